r"""SMDM (nieshen/SMDM): thirty sizes of one masked diffusion model, as safetensors without a configuration.

A LLaMA-like Transformer made bidirectional: pre-norm RMSNorm (eps 1e-5), rotary positions over the whole head
(half-split, base 10000, cosines and sines rounded to bfloat16 as the published code does), SwiGLU, no biases, untied
output, no time input. For a row of tokens x_L, with e the width and r(x) = x / sqrt(mean(x^2) + 1e-5):

    h = wte[x]
    for each block:  q, k, v = attn(r(h) n1);   h += proj(softmax(rot(q) rot(k)^T / sqrt(head)) v)
                     h += w3(silu(w1 y) * w2 y),   y = r(h) n2
    logits = lm_head(r(h) n_f)

Traps: the rows of `attn.attn` go head by head, [q_1, k_1, v_1, q_2, ...]; the embedding has one row more than the
output, the mask, which has no logit (a column of -inf stands for it here, so that every network gives V logits); the
number of heads is in no tensor and comes from the table of published sizes.

Shapes: B rows, L positions, K positions asked for, D width, H heads, F hidden width of the MLP, V vocabulary with the
mask.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relaylm.convert.tensors import Found, Options, Shapes, blocks_of, count, open_weights, shape_of
from relaylm.errors import UserError
from relaylm.models.denoiser import check_tensors
from relaylm.models.family import pick_dtype
from relaylm.models.folder import place
from relaylm.models.layers import TrunkAndHead, attend, take

LENGTH = 2048

# The published sizes, in millions of parameters: (blocks, heads, width, hidden width of the MLP).
SIZES = {
    6: (6, 4, 256, 1024), 19: (8, 6, 384, 1536), 34: (8, 8, 512, 2048), 48: (9, 9, 576, 2304),
    66: (10, 10, 640, 2560), 85: (13, 10, 640, 2560), 75: (16, 8, 640, 1600), 113: (12, 12, 768, 3072),
    142: (15, 12, 768, 3072), 170: (18, 12, 768, 3072), 180: (14, 14, 896, 3584), 206: (16, 14, 896, 3584),
    231: (18, 14, 896, 3584), 268: (16, 16, 1024, 4096), 302: (18, 16, 1024, 4096), 336: (20, 16, 1024, 4096),
    472: (18, 10, 1280, 5120), 551: (21, 10, 1280, 5120), 571: (18, 11, 1408, 5632), 629: (24, 10, 1280, 5120),
    666: (21, 11, 1408, 5632), 717: (19, 12, 1536, 6144), 761: (24, 11, 1408, 5632), 831: (22, 12, 1536, 6144),
    944: (25, 12, 1536, 6144), 1028: (20, 14, 1792, 7168), 1233: (24, 14, 1792, 7168), 1476: (22, 16, 2048, 8192),
    1678: (25, 16, 2048, 8192), 2121: (28, 17, 2176, 8704),
}  # fmt: skip
_HEADS = {(blocks, width, hidden): heads for blocks, heads, width, hidden in SIZES.values()}


@dataclass(frozen=True)
class Size:
    """The numbers that determine a network's tensors."""

    depth: int
    heads: int
    width: int
    hidden: int
    vocab_size: int = 32_001  # with the mask, the last id, which has no logit
    length: int = LENGTH
    time_conditioning: ClassVar[bool] = False

    @property
    def mask_id(self) -> int:
        """The last id, which is also the number of other symbols."""
        return self.vocab_size - 1

    def to_json(self) -> dict[str, int]:
        """All numbers."""
        return asdict(self)


def layout(size: Size) -> Shapes:
    """Names and shapes of the published file."""
    e, f = size.width, size.hidden
    shapes: Shapes = {"lm_head.weight": (size.mask_id, e), "transformer.wte.weight": (size.vocab_size, e)}
    for i in range(size.depth):
        p = f"transformer.h.{i}."
        shapes |= {p + "norm_1.weight": (e,), p + "attn.attn.weight": (3 * e, e), p + "attn.proj.weight": (e, e)}
        shapes |= {p + "norm_2.weight": (e,), p + "mlp.swiglu.w1.weight": (f, e), p + "mlp.swiglu.w2.weight": (f, e)}
        shapes[p + "mlp.swiglu.w3.weight"] = (e, f)
    return shapes | {"transformer.ln_f.weight": (e,)}


def open_file(path: Path, name: str, options: Options) -> Found:
    """One of the published files, safetensors or .pth."""
    tensors = {str(key).removeprefix("_orig_mod."): value for key, value in open_weights(path)[0].items()}
    size = infer(tensors, options, path)
    check_tensors(tensors, layout(size), path)

    def make(device: torch.device, dtype: torch.dtype | None, fold: bool) -> Smdm:
        chosen = pick_dtype(dtype, device)
        wide = torch.float64 if chosen == torch.float64 else torch.float32
        return place(Smdm(size, {key: tensors[key].read().to(wide) for key in layout(size)}), device, chosen)

    return Found(
        format="smdm",
        name=name,
        shape=size,
        parameters=count(layout(size)),
        tensors=tensors,
        build=make,
        files=[path],
    )


def infer(tensors: Mapping[str, Any], options: Options, where: Path) -> Size:
    """The size from the shapes; the heads from the table of published sizes."""
    (width,) = shape_of(tensors, "transformer.ln_f.weight", 1, where)
    rows, columns = shape_of(tensors, "lm_head.weight", 2, where)
    if columns != width:  # transposed, which `check_tensors` will name
        rows = shape_of(tensors, "transformer.wte.weight", 2, where)[0] - 1
    depth = blocks_of(tensors, "transformer.h.")
    hidden = max(shape_of(tensors, "transformer.h.0.mlp.swiglu.w1.weight", 2, where))
    heads = options.heads or _HEADS.get((depth, width, hidden))
    if heads is None:
        raise UserError(
            f"{where}: {depth} blocks of width {width} with MLPs of {hidden} is not a published size of SMDM, so the "
            f"number of heads is not known: give heads"
        )
    if width % (2 * heads):
        raise UserError(f"{where}: the width ({width}) must be a multiple of twice the heads ({heads})")
    return Size(depth, heads, width, hidden, rows + 1, options.length or LENGTH)


class _Block(nn.Module):
    def __init__(self, size: Size, state: Mapping[str, Tensor], prefix: str) -> None:
        super().__init__()
        self.heads = size.heads
        by_head = state[prefix + "attn.attn.weight"].view(size.heads, 3, -1, size.width)
        self.norm_1 = nn.Parameter(state[prefix + "norm_1.weight"])
        self.qkv = nn.Parameter(by_head.transpose(0, 1).reshape(3 * size.width, size.width))  # all q, all k, all v
        self.proj = nn.Parameter(state[prefix + "attn.proj.weight"])
        self.norm_2 = nn.Parameter(state[prefix + "norm_2.weight"])
        self.gate = nn.Parameter(state[prefix + "mlp.swiglu.w1.weight"])
        self.up = nn.Parameter(state[prefix + "mlp.swiglu.w2.weight"])
        self.down = nn.Parameter(state[prefix + "mlp.swiglu.w3.weight"])

    def forward(self, x_BLD: Tensor, angles: tuple[Tensor, Tensor], positions_BK: Tensor | None) -> Tensor:
        """One block; with positions, keys and values everywhere but the rest only there, (B, K, D)."""
        attended = attend(_norm(x_BLD, self.norm_1), self.qkv, None, self.heads, angles, positions_BK)
        x = x_BLD if positions_BK is None else take(x_BLD, positions_BK)
        x = x + F.linear(attended, self.proj)
        h = _norm(x, self.norm_2).to(self.gate.dtype)
        return x + F.linear(F.silu(F.linear(h, self.gate)) * F.linear(h, self.up), self.down)


class Smdm(TrunkAndHead, nn.Module):
    """The network, around given tensors. Residual stream, norms and head stay in float32 (float64 in tests)."""

    time_conditioning = False

    def __init__(self, size: Size, state: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.architecture = size
        self.vocab_size, self.mask_id, self.depth = size.vocab_size, size.mask_id, size.depth
        self.wte = nn.Parameter(state["transformer.wte.weight"])
        self.h = nn.ModuleList([_Block(size, state, f"transformer.h.{i}.") for i in range(size.depth)])
        self.ln_f = nn.Parameter(state["transformer.ln_f.weight"])
        self.lm_head = nn.Parameter(state["lm_head.weight"])
        self._rotary: dict[tuple[int, torch.device, torch.dtype], tuple[Tensor, Tensor]] = {}
        self.eval().requires_grad_(False)

    @property
    def device(self) -> torch.device:
        """Where it computes."""
        return self.wte.device

    def cast(self, dtype: torch.dtype) -> Smdm:
        """Put the blocks' matrices in half precision."""
        for block in self.h:
            for matrix in (block.qkv, block.proj, block.gate, block.up, block.down):
                matrix.data = matrix.data.to(dtype)
        return self

    def flops(self, length: int, positions: int | None = None) -> float:
        """As `cost.call_flops`, for an MLP of three matrices and an output without the mask."""
        s, k = self.architecture, length if positions is None else positions
        block = 2 * length * (4 * s.width**2 + 3 * s.width * s.hidden) + 4 * length**2 * s.width
        last = 4 * length * s.width**2 + 2 * k * (2 * s.width**2 + 3 * s.width * s.hidden) + 4 * k * length * s.width
        return float((s.depth - 1) * block + last + 2 * k * s.width * s.mask_id)

    def hidden_at(self, tokens_BL: Tensor, t_B: Tensor, positions_BK: Tensor | None) -> Tensor:
        """The residual stream (B, K, D) at the positions, or everywhere."""
        x = F.embedding(tokens_BL, self.wte)
        for i, block in enumerate(self.h):
            x = block(x, self.angles(tokens_BL.shape[1]), positions_BK if i == len(self.h) - 1 else None)
        return x

    def head(self, x_KD: Tensor, t_B: Tensor | None = None) -> Tensor:
        """Logits of any rows of the residual stream; the mask's is -inf."""
        logits = F.linear(_norm(x_KD, self.ln_f), self.lm_head)
        return F.pad(logits, (0, 1), value=-torch.inf)

    def angles(self, length: int) -> tuple[Tensor, Tensor]:
        """Cosines and sines (length, head / 2), computed in float32 and rounded to bfloat16 whatever the rest is in."""
        key = (length, self.wte.device, self.wte.dtype)
        if key not in self._rotary:
            head = self.architecture.width // self.architecture.heads
            frequency = 1.0 / (10_000 ** (torch.arange(0, head, 2, dtype=torch.float32) / head))
            angle = torch.outer(torch.arange(length, dtype=torch.float32), frequency)
            cos, sin = (value.bfloat16().to(self.wte.device, self.wte.dtype) for value in (angle.cos(), angle.sin()))
            self._rotary[key] = (cos, sin)
        return self._rotary[key]


def _norm(x: Tensor, weight: Tensor) -> Tensor:
    x = x.to(weight.dtype)
    return x * torch.rsqrt(x.pow(2).mean(dim=-1, keepdim=True) + 1e-5) * weight
