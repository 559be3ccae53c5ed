"""The layers of MDLM's Transformer. Parameter names are those of the public checkpoints.

Shapes: B rows, L positions, K positions of each row, D width, H heads, C conditioning width, V vocabulary.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relaylm.kernels import rotate


class TrunkAndHead:
    """A denoiser in two parts: a trunk, `hidden_at`, and a `head` that makes logits of any rows of its output."""

    hidden_at: Any
    head: Any

    def logits(self, tokens_BL: Tensor, t_B: Tensor) -> Tensor:
        """Logits (B, L, V) at every position."""
        logits_BLV: Tensor = self.head(self.hidden_at(tokens_BL, t_B, None), t_B)
        return logits_BLV

    def logits_at(self, tokens_BL: Tensor, t_B: Tensor, positions_BK: Tensor) -> Tensor:
        """Logits (B, K, V) at K positions of each row."""
        logits_BKV: Tensor = self.head(self.hidden_at(tokens_BL, t_B, positions_BK), t_B)
        return logits_BKV


class Norm(nn.Module):
    """LayerNorm with a weight and no bias, in the residual stream's precision."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        """Normalised x."""
        return F.layer_norm(x.to(self.weight.dtype), (x.shape[-1],), self.weight, None, 1e-5)


class Embedding(nn.Module):
    """One vector for each token id."""

    def __init__(self, vocab_size: int, width: int) -> None:
        super().__init__()
        self.embedding = nn.Parameter(torch.empty(vocab_size, width))

    def forward(self, tokens: Tensor) -> Tensor:
        """Vectors (B, L, D) of token ids."""
        return F.embedding(tokens, self.embedding)


class SigmaMap(nn.Module):
    """sigma -> conditioning vector: [cos, sin] features of sigma, Linear, SiLU, Linear."""

    def __init__(self, cond_dim: int) -> None:
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(256, cond_dim), nn.SiLU(), nn.Linear(cond_dim, cond_dim))

    def forward(self, sigma_B: Tensor) -> Tensor:
        """Conditioning vectors (B, C) of noise levels."""
        weight = cast(nn.Linear, self.mlp[0]).weight
        frequency = torch.exp(-math.log(10_000) * torch.arange(128, device=weight.device, dtype=weight.dtype) / 128)
        angle = sigma_B.to(weight.dtype)[:, None] * frequency
        return F.silu(self.mlp(torch.cat([angle.cos(), angle.sin()], dim=-1)))


def project(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """A product in the weight's precision."""
    return F.linear(x.to(weight.dtype), weight, bias)


@dataclass(frozen=True)
class Past:
    """What finished blocks of positions leave to later ones: each layer's keys and values (B, H, P, D/H), rotated; and
    the trunk's output (B, D) at the last of the P positions, where a network answers one position early."""

    layers: tuple[tuple[Tensor, Tensor], ...]
    last_BD: Tensor | None = None

    @property
    def length(self) -> int:
        """P, the positions that are finished."""
        return int(self.layers[0][0].shape[2])

    def rows(self, rows_B: Tensor) -> Past:
        """The past of some of the rows."""
        last_BD = None if self.last_BD is None else self.last_BD[rows_B]
        return Past(tuple((k[rows_B], v[rows_B]) for k, v in self.layers), last_BD)


class Memory:
    """The keys and values of one call of a network in blocks, layer after layer: the past's, then its own. `sees_LY`
    says which of all Y keys each of the call's L positions sees; None for all of them."""

    def __init__(self, past: Past | None, sees_LY: Tensor | None) -> None:
        self.past, self.sees_LY = past, sees_LY
        self.layers: list[tuple[Tensor, Tensor]] = []

    def join(self, k_BHLd: Tensor, v_BHLd: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values of the next layer."""
        if self.past is not None:
            k, v = self.past.layers[len(self.layers)]
            k_BHLd, v_BHLd = torch.cat([k, k_BHLd], dim=2), torch.cat([v, v_BHLd], dim=2)
        self.layers.append((k_BHLd, v_BHLd))
        return self.layers[-1]

    def sees(self, positions_BK: Tensor | None) -> Tensor | None:
        """The mask of a call's queries: everywhere, or at the positions (B, 1, K, Y)."""
        return self.sees_LY if self.sees_LY is None or positions_BK is None else self.sees_LY[positions_BK][:, None]


def block_mask(length: int, past: int, block: int, device: torch.device) -> Tensor | None:
    """Which of the keys each of `length` positions after `past` finished ones sees: those of its own block of `block`
    positions and of the blocks before. None if that is all of them."""
    block_Y = torch.arange(past + length, device=device) // block
    return None if length <= block and past % block == 0 else block_Y[past:, None] >= block_Y


class Block(nn.Module):
    """Attention and MLP, each added to the residual stream; modulated if there is a conditioning vector (cond_dim)."""

    def __init__(
        self, width: int, heads: int, hidden: int, cond_dim: int, qkv_bias: bool, causal: bool, dropout: float
    ) -> None:
        super().__init__()
        self.heads, self.causal, self.dropout = heads, causal, dropout
        self.norm1 = Norm(width)
        self.attn_qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.attn_out = nn.Linear(width, width, bias=False)
        self.norm2 = Norm(width)
        self.mlp = nn.Sequential(nn.Linear(width, hidden), nn.GELU(approximate="tanh"), nn.Linear(hidden, width))
        self.adaLN_modulation = nn.Linear(cond_dim, 6 * width) if cond_dim else None

    def forward(
        self,
        x_BLD: Tensor,
        cond_BC: Tensor | None,
        cos_LR: Tensor,
        sin_LR: Tensor,
        positions_BK: Tensor | None,
        memory: Memory | None = None,
    ) -> Tensor:
        """One block. With positions, keys and values are computed everywhere but queries, attention output and MLP
        only there (exact: nothing after the last block looks at the other positions), and (B, K, D) is returned."""
        if self.adaLN_modulation is None:
            shift1 = scale1 = gate1 = shift2 = scale2 = gate2 = None
        else:
            assert cond_BC is not None
            modulation = self.adaLN_modulation(cond_BC)[:, None]
            shift1, scale1, gate1, shift2, scale2, gate2 = modulation.chunk(6, dim=-1)

        h = modulate(self.norm1(x_BLD), shift1, scale1)
        qkv = self.attn_qkv
        attended = attend(h, qkv.weight, qkv.bias, self.heads, (cos_LR, sin_LR), positions_BK, self.causal, memory)
        x = x_BLD if positions_BK is None else take(x_BLD, positions_BK)
        x = self._add(x, project(attended, self.attn_out.weight), gate1)

        h = modulate(self.norm2(x), shift2, scale2)
        up, down = cast(nn.Linear, self.mlp[0]), cast(nn.Linear, self.mlp[2])
        h = F.gelu(project(h, up.weight, up.bias), approximate="tanh")
        return self._add(x, project(h, down.weight, down.bias), gate2)

    def _add(self, x: Tensor, branch: Tensor, gate: Tensor | None) -> Tensor:
        if self.training and self.dropout:
            branch = F.dropout(branch, self.dropout)
        return x + branch if gate is None else torch.addcmul(x, gate.to(x.dtype), branch.to(x.dtype))


def modulate(h: Tensor, shift: Tensor | None, scale: Tensor | None) -> Tensor:
    """adaLN's h (1 + scale) + shift, or h."""
    return h if shift is None or scale is None else torch.addcmul(shift, h, 1 + scale)


def take(x_BLD: Tensor, positions_BK: Tensor) -> Tensor:
    """The rows (B, K, D) of x at K positions of each row."""
    return x_BLD.gather(1, positions_BK[..., None].expand(-1, -1, x_BLD.shape[-1]))


def attend(
    h_BLD: Tensor, weight: Tensor, bias: Tensor | None, heads: int, angles: tuple[Tensor, Tensor],
    positions_BK: Tensor | None, causal: bool = False, memory: Memory | None = None,
) -> Tensor:  # fmt: skip
    """Attention (B, K, D) before its output matrix, with rotary cosines and sines. Keys and values are computed
    everywhere, queries at the positions only, or everywhere. `weight` has the rows of q, k and v in this order."""
    cos_LR, sin_LR = angles

    def split(x_BLX: Tensor, parts: int) -> list[Tensor]:
        """(B, L, parts * D) -> parts tensors (B, H, L, D/H)."""
        x = x_BLX.view(*x_BLX.shape[:2], parts, heads, x_BLX.shape[2] // (parts * heads))
        return [x[:, :, i].transpose(1, 2) for i in range(parts)]

    if positions_BK is None:
        q, k, v = split(project(h_BLD, weight, bias), 3)
        q = rotate(q, cos_LR, sin_LR)
    else:
        width = h_BLD.shape[-1]
        q_bias, kv_bias = (None, None) if bias is None else (bias[:width], bias[width:])
        (q,) = split(project(take(h_BLD, positions_BK), weight[:width], q_bias), 1)
        k, v = split(project(h_BLD, weight[width:], kv_bias), 2)
        q = rotate(q, cos_LR[positions_BK][:, None], sin_LR[positions_BK][:, None])
    k, sees = rotate(k, cos_LR, sin_LR), None
    if memory is not None:
        k, v = memory.join(k, v)
        sees = memory.sees(positions_BK)
    if not q.shape[2]:  # keys and values alone were asked for
        return h_BLD[:, :0]
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=sees, is_causal=causal)
    return attended.transpose(1, 2).flatten(2)


class TiedLinear(nn.Module):
    """A linear layer with a bias of its own and the embedding for a matrix. The embedding stays the parameter of its
    own module alone, so it is listed, stored and loaded once."""

    def __init__(self, embedding: Embedding) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(len(embedding.embedding)))
        self._source = (embedding,)  # in a tuple, which hides it from PyTorch's lists of modules

    @property
    def weight(self) -> Tensor:
        """The embedding (V, D)."""
        return self._source[0].embedding

    def forward(self, x: Tensor) -> Tensor:
        """Logits of x."""
        return F.linear(x, self.weight, self.bias)


class OutputLayer(nn.Module):
    """Norm and vocabulary head, as parameters; `Transformer.head` computes them."""

    def __init__(self, embedding: Embedding, cond_dim: int, tied: bool) -> None:
        super().__init__()
        vocab_size, width = embedding.embedding.shape
        self.norm_final = Norm(width)
        self.linear = TiedLinear(embedding) if tied else nn.Linear(width, vocab_size)
        self.adaLN_modulation = nn.Linear(cond_dim, 2 * width) if cond_dim else None
