r"""The denoiser protocol, and this package's own Transformer.

Anything with two methods can be scheduled: `logits(tokens, t)` everywhere, or `logits_at(tokens, t, positions)` where
they are needed. A table in a test, a wrapped Hugging Face model and the network below are all denoisers.

The network is MDLM's diffusion Transformer: bidirectional, rotary positions (half-split), LayerNorm with a weight and
no bias computed in float32, a tanh-GELU MLP of ratio 4, an output layer with bias. With time conditioning each
block is modulated by adaLN(sigma(t)), sigma(t) = -log(1 - 0.999 t). Without it adaLN is a constant that `fold` moves
into the weights, or absent from the start. `causal=True` makes the same network a left-to-right judge; `tied=True` uses
the embedding as the output layer's matrix too, one tensor with both gradients.

**Blocks of positions.** With a `block_length` the network is one of block diffusion (BD3-LM): a position sees its own
block and the blocks before it. Text is written block after block (`sampling.blocks`). Nothing that follows changes what
a finished block computes, so its keys and values are computed once (`extend`) and given to later calls as their `past`:
`hidden_at(tokens, t, positions, past)` runs on the tokens after it alone.

Precision: the residual stream, norms and head are float32 whatever the blocks compute in (`cast` puts their matrices
in bfloat16), and float64 throughout if the weights are float64.

Shapes: B rows, L positions, K positions asked for in each row, D width, H heads, C conditioning width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Protocol, cast, runtime_checkable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relaylm.core import cost
from relaylm.errors import UserError, brief, checked
from relaylm.kernels import available
from relaylm.models.layers import (
    Block,
    Embedding,
    Memory,
    OutputLayer,
    Past,
    SigmaMap,
    TrunkAndHead,
    block_mask,
    modulate,
    project,
    take,
)

LATER = ("tied", "block_length")  # fields of an architecture that are written only where they are set


@runtime_checkable
class Denoiser(Protocol):
    """What can be scheduled. t_B holds each row's time in (0, 1]; a network without time conditioning ignores it.

    Optional: `hidden_at` and `head` (the two halves of `logits_at`, so that the vocabulary head
    can be run on fewer rows than the trunk), `flops(length, positions)` for the cost, `depth` for the paper's count of
    blocks, `mask_id` and `vocab_size` for the checks of a family; `block_length` where it must be sampled in blocks of
    positions, with `extend` and a `past` for `hidden_at` so that finished blocks are not computed again."""

    def logits(self, tokens_BL: Tensor, t_B: Tensor) -> Tensor:
        """Logits (B, L, V) at every position."""
        ...

    def logits_at(self, tokens_BL: Tensor, t_B: Tensor, positions_BK: Tensor) -> Tensor:
        """Logits (B, K, V) at K positions of each row."""
        ...


class FromLogits:
    """A denoiser from any function (tokens_BL, t_B) -> logits_BLV: convenient, and as slow as that function is."""

    @checked
    def __init__(self, function: Callable[[Tensor, Tensor], Tensor]) -> None:
        self.function = function

    def logits(self, tokens_BL: Tensor, t_B: Tensor) -> Tensor:
        """Logits (B, L, V) of the function, which must be floating-point numbers in that shape."""
        logits_BLV = self.function(tokens_BL, t_B)
        if not isinstance(logits_BLV, Tensor):
            raise UserError(f"a denoiser's function must return a tensor of logits, not {brief(logits_BLV)}")
        if not logits_BLV.is_floating_point() or logits_BLV.dim() != 3:
            found = f"{logits_BLV.dtype} in shape {(*logits_BLV.shape,)}"
            raise UserError(
                f"a denoiser's logits must be floating-point numbers (rows, positions, tokens), not {found}"
            )
        if logits_BLV.shape[:2] != tokens_BL.shape:
            found = f"{(*logits_BLV.shape,)} for {(*tokens_BL.shape,)}"
            raise UserError(f"a denoiser's logits must be those of all rows and positions, not of shape {found}")
        return logits_BLV

    def logits_at(self, tokens_BL: Tensor, t_B: Tensor, positions_BK: Tensor) -> Tensor:
        """Logits (B, K, V) at K positions of each row."""
        return take(self.logits(tokens_BL, t_B), positions_BK)


@dataclass(frozen=True)
class Architecture:
    """The numbers that determine a network's tensors. `vocab_size` counts the mask, which is `mask_id`."""

    vocab_size: int
    length: int  # the longest sequence it was trained on; shorter ones are allowed
    width: int = 768
    depth: int = 12  # Transformer blocks
    heads: int = 12
    mask_id: int = -1  # -1: the last id
    mlp_ratio: int = 4
    adaln: bool = False  # modulated by a conditioning vector (MDLM's checkpoints), or plain
    time_conditioning: bool = False  # does that vector depend on t? if not it is a constant and can be folded
    cond_dim: int = 128
    qkv_bias: bool = False  # folding adaLN's shift leaves one
    causal: bool = False  # a left-to-right language model (the judge)
    tied: bool = False  # the output layer's matrix is the embedding
    block_length: int = 0  # positions of a block, of which each sees its own and those before; 0: all see all

    def __post_init__(self) -> None:
        for name in ("vocab_size", "length", "width", "depth", "heads", "mlp_ratio", "cond_dim"):
            if getattr(self, name) < 1:
                raise UserError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.width % (2 * self.heads):
            raise UserError(f"the width ({self.width}) must be a multiple of twice the heads ({self.heads})")
        if self.time_conditioning and not self.adaln:
            raise UserError("time conditioning needs adaln")
        if self.block_length < 0 or (self.block_length and (self.causal or self.time_conditioning)):
            raise UserError("a network in blocks of positions is neither causal nor conditioned on time")
        if self.mask_id == -1:
            object.__setattr__(self, "mask_id", self.vocab_size - 1)
        if not 0 <= self.mask_id < self.vocab_size:
            raise UserError(f"mask_id must lie in 0..{self.vocab_size - 1}, not {self.mask_id}")

    def to_json(self) -> dict[str, Any]:
        """All numbers; the later ones only where they are set, so that what was written before is still the same."""
        return {key: value for key, value in asdict(self).items() if key not in LATER or value}


class Transformer(TrunkAndHead, nn.Module):
    """MDLM's denoiser, any depth, width, vocabulary. Parameter names are those of the public checkpoints."""

    def __init__(self, architecture: Architecture, dropout: float = 0.0) -> None:
        super().__init__()
        a = architecture
        self.architecture = a
        self.vocab_size, self.mask_id, self.depth = a.vocab_size, a.mask_id, a.depth
        self.time_conditioning, self.block_length = a.time_conditioning, a.block_length
        cond_dim = a.cond_dim if a.adaln else 0
        block = a.width, a.heads, a.mlp_ratio * a.width, cond_dim, a.qkv_bias, a.causal, dropout
        self.vocab_embed = Embedding(a.vocab_size, a.width)
        self.sigma_map = SigmaMap(cond_dim) if a.adaln else None
        self.blocks = nn.ModuleList([Block(*block) for _ in range(a.depth)])
        self.output_layer = OutputLayer(self.vocab_embed, cond_dim, a.tied)
        self.narrow = False  # the residual stream in the blocks' type too: faster, and only nearly the same function
        self._rotary: dict[tuple[int, torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}
        self._tables: dict[str, tuple[Any, Tensor]] = {}

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.vocab_embed.embedding.device

    def flops(self, length: int, positions: int | None = None, past: int = 0) -> float:
        """Operations of one call on one row; `positions` where logits are asked for, None for everywhere; `past`
        finished ones before them."""
        a = self.architecture
        if past:
            queries = a.depth * length if positions is None else (a.depth - 1) * length + positions
            return self.flops(length, positions) + 4 * queries * past * a.width
        if a.causal and positions is not None:  # the causal network's last block is not pruned
            trunk = cost.call_flops(a.depth, a.width, 0, length, None, a.mlp_ratio)
            return trunk + 2 * positions * a.width * a.vocab_size
        return cost.call_flops(a.depth, a.width, a.vocab_size, length, positions, a.mlp_ratio)

    def initialise(self, generator: torch.Generator) -> Transformer:
        """Fresh weights, drawn on the CPU so that they do not depend on the device: normal(0, 0.02) embeddings and
        matrices, branches that end in the residual stream scaled down by sqrt(2 depth), zeros for the output layer
        and adaLN (so that training starts from the uniform distribution and an unmodulated network; with a tied
        embedding, from nearly uniform ones)."""
        shrink = 1 / math.sqrt(2 * self.architecture.depth)
        for name, parameter in self.named_parameters():
            value = torch.zeros(parameter.shape)
            if name.endswith(("norm1.weight", "norm2.weight", "norm_final.weight")):
                value += 1
            elif parameter.dim() == 2 and "adaLN" not in name and "output_layer" not in name:
                value = torch.randn(parameter.shape, generator=generator) * 0.02
                if "attn_out" in name or "mlp.2" in name:
                    value *= shrink
            parameter.data.copy_(value)
        return self

    def cast(self, dtype: torch.dtype) -> Transformer:
        """Put the blocks' matrices in `dtype`; norms, embedding and head stay as they are (float32), and with them
        the residual stream. Here bfloat16 saves the most time and loses the least accuracy."""
        for block in cast(list[Block], self.blocks):
            for linear in (block.attn_qkv, block.attn_out, block.mlp[0], block.mlp[2]):
                linear.to(dtype)
        return self

    def hidden_at(
        self, tokens_BL: Tensor, t_B: Tensor, positions_BK: Tensor | None, past: Past | None = None
    ) -> Tensor:
        """The trunk: the residual stream (B, K, D) at the positions, or everywhere."""
        if positions_BK is not None and self._has_kernels():
            from relaylm.kernels import trunk

            return trunk.trunk(self, tokens_BL, positions_BK)
        return self._trunk(tokens_BL, t_B, positions_BK, self._memory(tokens_BL, past))

    def extend(self, tokens_BL: Tensor, past: Past | None = None) -> Past:
        """The past with these tokens, whole blocks of them, after it."""
        memory = self._memory(tokens_BL, past)
        assert memory is not None
        t_B = torch.ones(len(tokens_BL), device=tokens_BL.device)  # which no network in blocks looks at
        nowhere_B0 = torch.zeros(len(tokens_BL), 0, dtype=torch.int64, device=tokens_BL.device)
        self._trunk(tokens_BL, t_B, nowhere_B0, memory)  # of the last block only keys and values are needed
        return Past(tuple(memory.layers))

    def _memory(self, tokens_BL: Tensor, past: Past | None) -> Memory | None:
        block, before = self.block_length, 0 if past is None else past.length
        return Memory(past, block_mask(tokens_BL.shape[1], before, block, tokens_BL.device)) if block else None

    def _trunk(self, tokens_BL: Tensor, t_B: Tensor, positions_BK: Tensor | None, memory: Memory | None) -> Tensor:
        x = self.vocab_embed(tokens_BL)
        if self.narrow:
            x = x.to(cast(Block, self.blocks[0]).attn_qkv.weight.dtype)
        cond_BC = self._condition(t_B)
        before, total = 0, tokens_BL.shape[1]
        if memory is not None:
            before = 0 if memory.past is None else memory.past.length
            total = max(before + total, self.architecture.length)  # one table for the calls of all blocks
        cos_LR, sin_LR = (table[before : before + tokens_BL.shape[1]] for table in self.angles(total))
        prune = positions_BK is not None and not self.architecture.causal
        last = len(self.blocks) - 1
        for i, block in enumerate(self.blocks):
            x = block(x, cond_BC, cos_LR, sin_LR, positions_BK if prune and i == last else None, memory)
        return x if prune or positions_BK is None else take(x, positions_BK)

    def head(self, x_KD: Tensor, t_B: Tensor | None = None) -> Tensor:
        """The output layer on any rows of the residual stream, in float32 (on tensor cores by pieces; never TF32).
        With adaLN the leading dimension must be that of t_B."""
        out = self.output_layer
        if x_KD.dim() == 2 and self._has_kernels():
            from relaylm.kernels import gemm, trunk

            if gemm.are_few(x_KD):
                split = trunk.norm(x_KD, out.norm_final.weight, torch.bfloat16, places=gemm.few_places(len(x_KD)))
                return gemm.few_logits(split, len(x_KD), out.linear.weight, out.linear.bias)
            return gemm.head(out.norm_final(x_KD), self._pieces(), self.vocab_size)
        h = out.norm_final(x_KD)
        if out.adaLN_modulation is not None:
            assert t_B is not None
            shift, scale = out.adaLN_modulation(self._condition(t_B)).chunk(2, dim=-1)
            shape = (len(t_B),) + (1,) * (h.dim() - 2) + (-1,)
            h = modulate(h, shift.view(shape), scale.view(shape))
        return F.linear(h, out.linear.weight, out.linear.bias)

    def _has_kernels(self) -> bool:
        """True if the CUDA kernels apply: a plain bidirectional network in bfloat16, sampling."""
        weight, a = cast(Block, self.blocks[0]).attn_qkv.weight, self.architecture
        return bool(
            weight.is_cuda
            and weight.dtype == torch.bfloat16
            and not (a.adaln or a.causal or a.block_length or torch.is_grad_enabled())
            and (half := a.width // a.heads // 2) & (half - 1) == 0  # Triton's tiles are powers of two
            and available()
        )

    def _condition(self, t_B: Tensor) -> Tensor | None:
        if self.sigma_map is None:
            return None
        t = t_B.to(self.vocab_embed.embedding.dtype)
        # MDLM's log-linear noise level. Without time conditioning its networks are always given sigma = 0.
        sigma_B = -torch.log1p(-(1 - 1e-3) * t) if self.time_conditioning else torch.zeros_like(t)
        return self.sigma_map(sigma_B)

    def angles(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines of the rotary embedding, (length, head_dim / 2), in the residual stream's precision."""
        weight = self.vocab_embed.embedding
        key = (length, weight.device, weight.dtype)
        if key not in self._rotary:
            with torch.inference_mode(False):  # what sampling caches, training may use
                head_dim = self.architecture.width // self.architecture.heads
                frequency = 10_000 ** (-torch.arange(0, head_dim, 2, dtype=weight.dtype) / head_dim)
                angle = torch.arange(length, dtype=weight.dtype)[:, None] * frequency
                self._rotary[key] = (angle.cos().to(weight.device), angle.sin().to(weight.device))
        return self._rotary[key]

    def first_qkv(self) -> Tensor:
        """The first block's queries, keys and values (V, 3D) of every token id, before rotation; values without their
        bias."""
        block = cast(Block, self.blocks[0])
        embedding, weight, bias = self.vocab_embed.embedding, block.attn_qkv.weight, block.attn_qkv.bias

        def make() -> Tensor:
            return project(block.norm1(embedding), weight, None if bias is None else _but_values(bias))

        return self._derived("first_qkv", (embedding, block.norm1.weight, weight, bias), make)

    def grouped_qkv(self, i: int) -> tuple[Tensor, Tensor | None]:
        """Block i's qkv matrix and bias, but that of the values, in the order that `gemm.rotated` needs."""
        from relaylm.kernels.gemm import grouped

        linear = cast(Block, self.blocks[i]).attn_qkv
        dim = self.architecture.width // self.architecture.heads
        weight = self._derived(f"qkv_{i}", (linear.weight,), lambda: grouped(linear.weight, dim))
        if linear.bias is None:
            return weight, None
        bias = self._derived(f"qkv_bias_{i}", (linear.bias,), lambda: grouped(_but_values(linear.bias), dim))
        return weight, bias

    def offsets(self) -> list[Tensor | None]:
        """What biases have added to the residual stream (D) after each attention and each MLP, in float32: attention's
        weights sum to 1, so a bias of the values adds the same everywhere. None before the first."""
        blocks, biased = cast(list[Any], self.blocks), self.architecture.qkv_bias
        added = [(block.attn_out.weight, block.attn_qkv.bias, block.mlp[2].bias) for block in blocks]

        def make() -> Tensor:
            parts = []
            for weight, bias, mlp_bias in added:
                values = weight.float() @ bias[-len(mlp_bias) :].float() if biased else torch.zeros_like(mlp_bias)
                parts += [values.float(), mlp_bias.float()]
            return torch.stack(parts).cumsum(dim=0)

        offsets_ND = self._derived("offsets", tuple(tensor for each in added for tensor in each), make)
        return [None if i == 0 and not biased else offsets_ND[i] for i in range(2 * len(blocks))]

    def _pieces(self) -> Tensor:
        """The head's weights as bfloat16 pieces."""
        from relaylm.kernels.gemm import split_weights

        linear = self.output_layer.linear
        return self._derived("pieces", (linear.weight, linear.bias), lambda: split_weights(linear.weight, linear.bias))

    def _derived(self, name: str, sources: tuple[Tensor | None, ...], make: Callable[[], Tensor]) -> Tensor:
        """A table made from weights: once, and again only when one of them was replaced or written to (by what PyTorch
        counts: not through `.data` or numpy)."""
        stamp = tuple((s.data_ptr(), 0 if s.is_inference() else s._version) for s in sources if s is not None)
        if name not in self._tables or self._tables[name][0] != stamp:
            self._tables[name] = (stamp, make())
        return self._tables[name][1]

    def fold(self) -> Transformer:
        """The same function without adaLN, for a network whose conditioning vector is a constant: scales go into the
        norm weights, shifts into biases, gates into the rows of the matrices before the residual stream. float64."""
        a = self.architecture
        if not a.adaln:
            return self
        if a.time_conditioning:
            raise UserError("a time-conditioned network cannot be folded: its modulation depends on t")
        state = {name: value.double() for name, value in self.state_dict().items()}
        reference = next(iter(self.state_dict().values())).dtype
        sigma_map = SigmaMap(a.cond_dim).double()
        sigma_map.load_state_dict({k.removeprefix("sigma_map."): v for k, v in state.items() if k.startswith("sigma_")})
        cond_C = sigma_map(torch.zeros(1, dtype=torch.float64))[0].detach().to(self.device)
        for i in range(a.depth):
            p = f"blocks.{i}."
            m = state.pop(p + "adaLN_modulation.weight") @ cond_C + state.pop(p + "adaLN_modulation.bias")
            shift1, scale1, gate1, shift2, scale2, gate2 = m.chunk(6)
            qkv_bias = state.get(p + "attn_qkv.bias", 0.0)
            state[p + "attn_qkv.bias"] = qkv_bias + state[p + "attn_qkv.weight"] @ shift1
            state[p + "norm1.weight"] = state[p + "norm1.weight"] * (1 + scale1)
            state[p + "attn_out.weight"] = state[p + "attn_out.weight"] * gate1[:, None]
            state[p + "mlp.0.bias"] = state[p + "mlp.0.bias"] + state[p + "mlp.0.weight"] @ shift2
            state[p + "norm2.weight"] = state[p + "norm2.weight"] * (1 + scale2)
            state[p + "mlp.2.weight"] = state[p + "mlp.2.weight"] * gate2[:, None]
            state[p + "mlp.2.bias"] = state[p + "mlp.2.bias"] * gate2
        o = "output_layer."
        m = state.pop(o + "adaLN_modulation.weight") @ cond_C + state.pop(o + "adaLN_modulation.bias")
        shift, scale = m.chunk(2)
        state[o + "linear.bias"] = state[o + "linear.bias"] + self.output_layer.linear.weight.double() @ shift
        state[o + "norm_final.weight"] = state[o + "norm_final.weight"] * (1 + scale)
        state = {k: v.to(reference) for k, v in state.items() if not k.startswith("sigma_map.")}
        plain = Architecture(**{**a.to_json(), "adaln": False, "qkv_bias": True})
        return build(plain, state)


def _but_values(bias_X: Tensor) -> Tensor:
    """A bias of queries, keys and values, with zeros for the values."""
    return bias_X.where(torch.arange(len(bias_X), device=bias_X.device) < 2 * len(bias_X) // 3, 0)


def build(architecture: Architecture, state: dict[str, Tensor], where: object = "") -> Transformer:
    """A network around given tensors, not copied. Names and shapes must fit exactly; an error says where they are
    from."""
    with torch.device("meta"):
        network = Transformer(architecture)
    check_tensors(state, {name: tuple(value.shape) for name, value in network.named_parameters()}, where)
    network.load_state_dict(state, assign=True)
    return network.eval().requires_grad_(False)


def check_tensors(found: Mapping[str, Any], expected: Mapping[str, tuple[int, ...]], where: object = "") -> None:
    """Refuse tensors, read or not, that are not exactly those of a layout. The error names the first that is not."""
    at = f"{where}: " if where else ""
    extra = sorted(set(found) - set(expected))
    for name, shape in expected.items():
        if name not in found:
            alike = [other for other in extra if tuple(getattr(found[other], "shape", ())) == shape]
            hint = f"; there is {alike[0]}, which does not belong" if len(alike) == 1 else ""
            raise UserError(f"{at}tensor {name} is missing (expected shape {shape}){hint}")
        value = found[name]
        if not hasattr(value, "shape"):
            raise UserError(f"{at}{name} is not a plain tensor but {brief(value)}")
        if (stored := tuple(value.shape)) != shape:
            hint = ": it is transposed" if stored == shape[::-1] else ""
            raise UserError(f"{at}tensor {name} has shape {stored}, expected {shape}{hint}")
    if extra:
        raise UserError(f"{at}tensor {extra[0]} does not belong to this network ({len(extra)} such)")
    check_floats(found, where)


def check_floats(found: Mapping[str, Any], where: object = "") -> None:
    """Refuse tensors, read or not, of whole numbers: those of quantised weights mean nothing without their scales."""
    for name, value in found.items():
        if not value.dtype.is_floating_point:
            at = f"{where}: " if where else ""
            raise UserError(f"{at}tensor {name} holds {value.dtype}, expected floating-point numbers")


def expected_shapes(architecture: Architecture) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of a network, in the order of its parameters."""
    with torch.device("meta"):
        network = Transformer(architecture)
    return {name: tuple(parameter.shape) for name, parameter in network.named_parameters()}


def features_at(model: Any, tokens_BL: Tensor, t_B: Tensor, positions_BK: Tensor) -> tuple[Tensor, Any]:
    """Features (B K, D) at the listed positions and the head that makes logits of them, or logits (B K, V) and None."""
    if hasattr(model, "hidden_at"):
        return model.hidden_at(tokens_BL, t_B, positions_BK).flatten(0, 1), model.head
    return model.logits_at(tokens_BL, t_B, positions_BK).flatten(0, 1), None


def sees_t(model: Any) -> bool:
    """Does the head want the time? A plain network's does not."""
    return not (isinstance(model, Transformer) and not model.architecture.adaln)
