r"""A `transformers` model as a denoiser: the trunk runs once on the whole row, the output head where it is needed.

None of the authors' code is used: `transformers`' own classes serve, and `trust_remote_code` is never set.

Shapes: B rows, L positions, K positions asked for, D width, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from relaylm.errors import UserError
from relaylm.models.layers import take


@dataclass(frozen=True)
class Shape:
    """The numbers that a family's checks and the cost need."""

    vocab_size: int
    mask_id: int
    length: int
    width: int
    depth: int
    heads: int
    time_conditioning: ClassVar[bool] = False


class Adapter:
    """A `transformers` model as a denoiser. `shifted`: the distribution of position i is read at i - 1 (Dream)."""

    time_conditioning = False

    def __init__(self, model: Any, shape: Shape, *, shifted: bool = False, bidirectional: bool = False) -> None:
        self.model, self.architecture, self.shifted = model.eval().requires_grad_(False), shape, shifted
        self.vocab_size, self.mask_id, self.depth = shape.vocab_size, shape.mask_id, shape.depth
        self.trunk, self._head = model.base_model, _head_parts(model)
        self._matrices = sum(  # the trunk's weights that meet every position
            value.numel()
            for name, value in self.trunk.named_parameters()
            if value.dim() == 2 and "embed" not in name and "pooler" not in name
        )
        self._explicit_mask = False
        if bidirectional:
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

    def flops(self, length: int, positions: int | None = None) -> float:
        """Operations of one call on one row; `positions` where logits are asked for, None for everywhere."""
        a, k = self.architecture, length if positions is None else positions
        trunk = 2 * length * self._matrices + 4 * length**2 * a.width * a.depth
        return float(trunk + 2 * k * a.width * a.vocab_size)

    def logits(self, tokens_BL: Tensor, t_B: Tensor) -> Tensor:
        """Logits (B, L, V) at every position."""
        return self.head(self.hidden_at(tokens_BL, t_B, None))

    def logits_at(self, tokens_BL: Tensor, t_B: Tensor, positions_BK: Tensor) -> Tensor:
        """Logits (B, K, V) at K positions of each row."""
        return self.head(self.hidden_at(tokens_BL, t_B, positions_BK))

    def hidden_at(self, tokens_BL: Tensor, t_B: Tensor, positions_BK: Tensor | None) -> Tensor:
        """The trunk's output (B, K, D) from which the positions are answered."""
        x_BLD = self._run(tokens_BL)
        if positions_BK is None:
            if not self.shifted:
                return x_BLD
            positions_BK = torch.arange(tokens_BL.shape[1], device=x_BLD.device).expand(len(tokens_BL), -1)
        index = (positions_BK - 1).clamp(min=0) if self.shifted else positions_BK
        return take(x_BLD, index.to(x_BLD.device))

    def head(self, x_KD: Tensor, t_B: Tensor | None = None) -> Tensor:
        """Logits of any rows of the trunk's output, in float32 or wider; the matrix keeps its own type."""
        x = x_KD.to(next(iter(self._head[-1].parameters())).device)
        for part in self._head:
            x = part(x)
        logits = x.to(self.device)
        return logits if logits.dtype == torch.float64 else logits.float()

    def _run(self, tokens_BL: Tensor) -> Tensor:
        options: dict[str, Any] = {}
        if self._explicit_mask:
            b, length = tokens_BL.shape
            options["attention_mask"] = torch.zeros(
                b, 1, length, length, dtype=self.model.dtype, device=tokens_BL.device
            )
        if hasattr(self.model.config, "use_cache"):
            options["use_cache"] = False
        return self.trunk(input_ids=tokens_BL, **options)[0].to(tokens_BL.device)

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
        first_BD = self._run(torch.tensor([[0, 1, 2], [0, 1, 3]], device=self.device))[:, 0]
        return not torch.equal(first_BD[0], first_BD[1])

    @torch.no_grad()
    def check_head(self, where: object) -> None:
        """Trunk and head together must be the model: a two-token row through both ways."""
        tokens_BL = torch.tensor([[0, self.mask_id]], device=self.device)
        expected = self.model(input_ids=tokens_BL)
        logits_BLV = expected.logits if hasattr(expected, "logits") else expected[0]
        ours_BLV = self.logits(tokens_BL, torch.ones(1))
        if not torch.allclose(ours_BLV, logits_BLV.to(ours_BLV), rtol=1e-2, atol=1e-2):
            name = type(self.model).__name__
            raise UserError(f"{where}: {name} does more between trunk and logits than relaylm knows")


def _head_parts(model: Any) -> tuple[Any, ...]:
    """The modules that come after the trunk, in order. Each model of transformers has one of these sets."""
    if hasattr(model, "lm_head"):  # LLaMA, Qwen2, RoBERTa, XLM-R
        return (model.lm_head,)
    if hasattr(model, "cls"):  # BERT, DeBERTa
        return (model.cls,)
    if hasattr(model, "head") and hasattr(model, "decoder"):  # ModernBERT
        return model.head, model.decoder
    if hasattr(model, "vocab_projector"):  # DistilBERT
        return model.vocab_transform, model.activation, model.vocab_layer_norm, model.vocab_projector
    raise UserError(f"relaylm does not know the output head of {type(model).__name__}")
