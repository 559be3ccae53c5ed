r"""A `transformers` model as a denoiser: the trunk runs once on the whole row, the output head where it is needed.

None of the authors' code is used: `transformers`' own classes serve, and `trust_remote_code` is never set.

A network in blocks of positions gets its mask of attention from here, and its past as one of `transformers`' caches.

Shapes: B rows, L positions, P finished ones before them, K positions asked for, D width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from relaylm.errors import UserError, reason
from relaylm.models.layers import Past, TrunkAndHead, block_mask, take


@dataclass(frozen=True)
class Shape:
    """The numbers that a family's checks and the cost need."""

    vocab_size: int
    mask_id: int
    length: int
    width: int
    depth: int
    heads: int
    block_length: int = 0
    time_conditioning: ClassVar[bool] = False


class Adapter(TrunkAndHead):
    """A `transformers` model as a denoiser. `shifted`: the distribution of position i is read at i - 1 (Dream)."""

    time_conditioning = False

    def __init__(self, model: Any, shape: Shape, *, shifted: bool = False, bidirectional: bool = False) -> None:
        self.model, self.architecture, self.shifted = model.eval().requires_grad_(False), shape, shifted
        self.vocab_size, self.mask_id, self.depth = shape.vocab_size, shape.mask_id, shape.depth
        self.block_length = shape.block_length
        self.trunk, self._head = model.base_model, _head_parts(model)
        # Weights that meet every position, and those that meet the ones that are asked for.
        self._matrices = _products(self.trunk)
        self._head_matrices = sum(_products(part) for part in self._head)
        head_dim = getattr(self.trunk.config, "head_dim", None) or shape.width // shape.heads
        self._attended = shape.heads * head_dim  # Qwen3's heads together may be wider than the trunk
        self._explicit_mask = False
        if self.block_length:
            self._check_blocks()
        elif bidirectional:
            self._make_bidirectional()

    @property
    def device(self) -> torch.device:
        """Where tokens go in and logits come out."""
        return self.model.get_input_embeddings().weight.device

    def parameters(self) -> Any:
        """The parameters of the model."""
        return self.model.parameters()

    def to(self, device: torch.device | str) -> Adapter:
        """Move the model, unless `device_map` has placed it."""
        if getattr(self.model, "hf_device_map", None) is None:
            self.model.to(device)
        return self

    def flops(self, length: int, positions: int | None = None, past: int = 0) -> float:
        """Operations of one call on one row; `positions` where logits are asked for, None for everywhere; `past`
        finished ones before them."""
        a, k = self.architecture, length if positions is None else positions
        trunk = 2 * length * self._matrices + 4 * length * (past + length) * self._attended * a.depth
        return float(trunk + 2 * k * self._head_matrices)

    def hidden_at(
        self, tokens_BL: Tensor, t_B: Tensor, positions_BK: Tensor | None, past: Past | None = None
    ) -> Tensor:
        """The trunk's output (B, K, D) from which the positions are answered."""
        x_BLD, _ = self._run(tokens_BL, past)
        if self.shifted:
            first_BD = x_BLD[:, 0] if past is None or past.last_BD is None else past.last_BD
            x_BLD = torch.cat([first_BD[:, None], x_BLD[:, :-1]], dim=1)
        return x_BLD if positions_BK is None else take(x_BLD, positions_BK.to(x_BLD.device))

    def extend(self, tokens_BL: Tensor, past: Past | None = None) -> Past:
        """The past with these tokens, whole blocks of them, after it."""
        x_BLD, cache = self._run(tokens_BL, past, keep=True)
        return Past(tuple((layer[0], layer[1]) for layer in cache), x_BLD[:, -1])

    def head(self, x_KD: Tensor, t_B: Tensor | None = None) -> Tensor:
        """Logits of any rows of the trunk's output, in float32 or wider; the matrix keeps its own type."""
        x = x_KD.to(next(iter(self._head[-1].parameters())).device)
        for part in self._head:
            x = part(x)
        logits = x.to(self.device)
        return logits if logits.dtype == torch.float64 else logits.float()

    def _run(self, tokens_BL: Tensor, past: Past | None = None, keep: bool = False) -> tuple[Tensor, Any]:
        """The trunk's output everywhere, and transformers' cache with the call's own keys and values if they are to be
        kept."""
        options: dict[str, Any] = {}
        (b, length), before, cache = tokens_BL.shape, 0 if past is None else past.length, None
        if self.block_length or self._explicit_mask:
            mask = torch.zeros(length, before + length, dtype=self.model.dtype, device=tokens_BL.device)
            sees = block_mask(length, before, self.block_length, mask.device) if self.block_length else None
            mask = mask if sees is None else mask.masked_fill(~sees, torch.finfo(mask.dtype).min)
            options["attention_mask"] = mask.expand(b, 1, -1, -1)
        if past is not None or keep:
            from transformers import DynamicCache

            cache = options["past_key_values"] = DynamicCache()
            for i, (k, v) in enumerate(() if past is None else past.layers):
                cache.update(k, v, i)
            options["position_ids"] = torch.arange(before, before + length, device=tokens_BL.device)[None]
        if hasattr(self.model.config, "use_cache"):
            options["use_cache"] = cache is not None
        return self.trunk(input_ids=tokens_BL, **options)[0].to(tokens_BL.device), cache

    def _make_bidirectional(self) -> None:
        """Take the causal mask away: by the switch that this version of transformers has, else by a mask of zeros. That
        the first position sees the last token is checked, not assumed."""
        self.model.config.is_causal = self.trunk.config.is_causal = False
        for module in self.trunk.modules():
            if hasattr(module, "is_causal"):
                module.is_causal = False
        if not self._sees_ahead():
            self._explicit_mask = True
            if not self._sees_ahead():
                raise UserError("this version of transformers cannot run the network without a causal mask")

    @torch.no_grad()
    def _sees_ahead(self) -> bool:
        first_BD = self._run(torch.tensor([[0, 1, 2], [0, 1, 3]], device=self.device))[0][:, 0]
        return not torch.equal(first_BD[0], first_BD[1])

    @torch.no_grad()
    def _check_blocks(self) -> None:
        """The mask of attention must be followed: a block's first position sees its own block and not the next."""
        tokens_BL = torch.zeros(3, 2 * self.block_length, dtype=torch.int64, device=self.device)
        tokens_BL[1, self.block_length - 1] = tokens_BL[2, self.block_length] = 1
        first_BD = self._run(tokens_BL)[0][:, 0]
        if torch.equal(first_BD[0], first_BD[1]) or not torch.equal(first_BD[0], first_BD[2]):
            raise UserError("this version of transformers does not follow a mask of attention in blocks")

    @torch.no_grad()
    def check_head(self, where: object) -> None:
        """Trunk and head together must be the model: a two-token row through both ways."""
        tokens_BL, name = torch.tensor([[0, self.mask_id]], device=self.device), type(self.model).__name__
        try:
            expected = self.model(input_ids=tokens_BL)
            logits_BLV = expected.logits if hasattr(expected, "logits") else expected[0]
            ours_BLV = self.logits(tokens_BL, torch.ones(1))
            same = torch.allclose(ours_BLV, logits_BLV.to(ours_BLV), rtol=1e-2, atol=1e-2)
            finite = bool(ours_BLV.isfinite().all())
        except Exception as error:  # of a model that wants other inputs, or has another head
            raise UserError(f"{where}: {name} cannot be run on tokens alone ({reason(error)})") from None
        if not finite:
            raise UserError(f"{where}: the logits of {name} are not finite numbers")
        if not same:
            raise UserError(f"{where}: {name} does more between trunk and logits than relaylm knows")


def _products(module: Any) -> int:
    """How many weights of a module meet each of its inputs."""
    named = module.named_parameters()
    return sum(v.numel() for name, v in named if v.dim() == 2 and "embed" not in name and "pooler" not in name)


def _head_parts(model: Any) -> tuple[Any, ...]:
    """The modules that come after the trunk, in order; of a model with another head the name is refused."""
    if hasattr(model, "lm_head"):  # LLaMA, Qwen2, RoBERTa, XLM-R
        return (model.lm_head,)
    if hasattr(model, "cls"):  # BERT, DeBERTa
        return (model.cls,)
    if hasattr(model, "head") and hasattr(model, "decoder"):  # ModernBERT
        return model.head, model.decoder
    if hasattr(model, "vocab_projector"):  # DistilBERT
        return model.vocab_transform, model.activation, model.vocab_layer_norm, model.vocab_projector
    raise UserError(f"relaylm does not know the output head of {type(model).__name__}")
