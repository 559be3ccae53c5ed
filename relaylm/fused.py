r"""The trunk of a plain network in training, as few passes over memory as it can be done in.

A block of width 256 is bound by memory, not by arithmetic: what costs is every extra pass over a (tokens, width) or
(tokens, 4 width) matrix. So what stands between two matrix products is one pass, forward and backward:

    add_norm    x <- x + branch + bias,  h = LayerNorm(x) weight
    attend      qkv = h W', rotated in place; softmax(q k' / sqrt d) v    gradients leave un-rotated and packed
    product     h W'
    mlp         gelu(h W_up' + b) W_down'                                 GELU's slope and the bias sum in one pass

(At this width products with rotation or with GELU inside were tried, and lost against cuBLAS and these passes on an
H200.)

With a small vocabulary the embedding, the first norm and, in short rows, the first block's queries, keys and values
before rotation are rows of tables that have one for each token: no product runs over the tokens, and the gradient of a
table is the sum of its rows' gradients by token, from which those of the norm and of the weights are products as small
as it. After the last block's attention no position looks at another one any more, so where only some positions are
scored the rest of the network runs on their rows alone (`rows_at`); the other positions get a gradient of zero.

A branch is added to the residual stream by the norm after it, and that norm's backward pass also has the gradient of
the branch's bias: the sum over tokens of dx. With x^ = (x - mean) / std and g = weight * dh,

    dx = (g - mean(g) - x^ mean(g x^)) / std + (gradient that comes down the residual stream).

GELU is the tanh form, x s(x) with s = 1 / (1 + exp(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3); its slope is
s + 2 x s (1 - s) u'. Attention is that of `attention_kernels`. Every sum here has a fixed order.

Weights are float32; their bfloat16 copies are made once for a call, in one kernel, and gradients come back in float32
straight from the matrix products. All of it is what `Transformer.hidden_at` and the final norm compute under autocast,
up to where it is rounded (the residual stream may be bfloat16 too), and can be captured in a CUDA graph.

Shapes: B rows, L positions, M = B L tokens, K of them scored, D width, X = 3 D, H hidden units of the MLP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from relaylm import attention_kernels, fused_kernels, kernels

if TYPE_CHECKING:
    from relaylm.denoiser import Transformer, _Block

RESIDUAL = torch.bfloat16  # the residual stream's precision; float32 costs two more passes over it for every one
SMALL_VOCABULARY = 512  # up to this size what depends on a token alone is a table's


def applies(model: Transformer) -> bool:
    """Can `trunk` train this network: a plain one on CUDA, in one piece, without dropout?"""
    a, weight = model.architecture, model.vocab_embed.embedding
    dim = a.width // a.heads
    return bool(
        weight.is_cuda
        and weight.dtype == torch.float32
        and not (a.adaln or a.qkv_bias or any(block.dropout for block in cast("list[_Block]", model.blocks)))
        and a.width % 8 == 0  # what cuBLAS wants of a bfloat16 row
        and dim in (16, 32, 64, 128)  # Triton's tiles are powers of two
        and kernels.available()
    )


def trunk(
    model: Transformer,
    tokens_BL: Tensor,
    residual: torch.dtype | None = None,
    dtype: torch.dtype = torch.bfloat16,
    scored: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """The final norm (M, D) of the network's residual stream, in `dtype`, which is also that of the matrix products.
    The stream itself is in `residual`. With `scored`, the two maps of `rows_at`, only its rows (K, D) there."""
    blocks = cast("list[_Block]", model.blocks)
    b, length = tokens_BL.shape
    heads, causal = model.architecture.heads, model.architecture.causal
    cos, sin = (angle.float() for angle in model.angles(length))
    with torch.autocast(tokens_BL.device.type, enabled=False):
        matrices = [weight for block in blocks for weight in _matrices(block)]
        with torch.no_grad():
            copies = [torch.empty_like(weight, dtype=dtype) for weight in matrices]
            torch._foreach_copy_(copies, matrices)
        pairs = iter(zip(matrices, copies))
        shape, tokens_M = (b, length, heads, causal), tokens_BL.flatten()
        embedding, first_norm = model.vocab_embed.embedding, blocks[0].norm1.weight
        by_token = length <= attention_kernels.OWN_ATTENTION_UP_TO and len(embedding) <= SMALL_VOCABULARY
        if not by_token:
            x, h = embed(tokens_M, embedding, first_norm, residual or RESIDUAL, dtype)
        for block, following in zip(blocks, [*(block.norm1 for block in blocks[1:]), model.output_layer.norm_final]):
            if by_token and block is blocks[0]:
                x, h = embed_attend(
                    tokens_M, embedding, first_norm, *next(pairs), cos, sin, shape, residual or RESIDUAL
                )
            else:
                h = attend(h, *next(pairs), cos, sin, shape)
            if scored is not None and block is blocks[-1]:
                x, h = rows_at(x, h, *scored)
            x, h = add_norm(x, product(h, *next(pairs)), None, block.norm2.weight, dtype)
            up, down = cast(nn.Linear, block.mlp[0]), cast(nn.Linear, block.mlp[2])
            x, h = add_norm(x, mlp(h, *next(pairs), up.bias, *next(pairs)), down.bias, following.weight, dtype)
    return h


def _matrices(block: _Block) -> list[Tensor]:
    up, down = cast(nn.Linear, block.mlp[0]), cast(nn.Linear, block.mlp[2])
    return [block.attn_qkv.weight, block.attn_out.weight, up.weight, down.weight]


def embed(
    tokens_M: Tensor, weight_VD: Tensor, norm_D: Tensor, residual: torch.dtype, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The tokens' embeddings (M, D), in `residual`, and their LayerNorm in `dtype`."""
    if len(weight_VD) > SMALL_VOCABULARY:
        return add_norm(F.embedding(tokens_M, weight_VD).to(residual), None, None, norm_D, dtype)
    return _Embed.apply(tokens_M, weight_VD, norm_D, residual, dtype)


def add_norm(
    x_MD: Tensor, branch_MD: Tensor | None, bias_D: Tensor | None, weight_D: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """(x + branch + bias, its LayerNorm in `dtype`). Without a branch x is handed through, so that both of its
    gradients are added here and not in a pass of their own."""
    return _AddNorm.apply(x_MD, branch_MD, bias_D, weight_D, dtype)


def rows_at(x_MD: Tensor, h_MD: Tensor, position_K: Tensor, place_M: Tensor) -> tuple[Tensor, Tensor]:
    """The rows (K, D) of both at these positions. `place_M` is the way back: where among the K a position's row went,
    anything outside of 0..K-1 for nowhere. So the gradient is rows picked too, and needs no sums; what no position
    points to is lost there, like the gradient of a place that only fills the room."""
    return _RowsAt.apply(x_MD, h_MD, position_K, place_M)


def product(h_MD: Tensor, weight: Tensor, copy: Tensor) -> Tensor:
    """h W', from W's copy in h's precision; the gradient goes to W."""
    return _Product.apply(h_MD, weight, copy)


def attend(
    h_MD: Tensor, weight: Tensor, copy: Tensor, cos: Tensor, sin: Tensor, shape: tuple[int, int, int, bool]
) -> Tensor:
    """Attention (M, D) of queries, keys and values h W', rotated. `shape`: rows, length, heads, causal."""
    if shape[1] <= attention_kernels.OWN_ATTENTION_UP_TO:
        return _Attend.apply(h_MD, weight, copy, cos, sin, shape)
    q, k, v = _Rotated.apply(h_MD, weight, copy, cos, sin, shape)
    return F.scaled_dot_product_attention(q, k, v, is_causal=shape[3]).transpose(1, 2).reshape(h_MD.shape)


def embed_attend(
    tokens_M: Tensor, weight_VD: Tensor, norm_D: Tensor, qkv: Tensor, qkv_copy: Tensor, cos: Tensor, sin: Tensor,
    shape: tuple[int, int, int, bool], residual: torch.dtype,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """`embed` and then `attend`, by tables: the embeddings (M, D) and the first block's attention (M, D)."""
    return _EmbedAttend.apply(tokens_M, weight_VD, norm_D, qkv, qkv_copy, cos, sin, shape, residual)


def mlp(h_MD: Tensor, up: Tensor, up_copy: Tensor, bias_H: Tensor, down: Tensor, down_copy: Tensor) -> Tensor:
    """gelu(h W_up' + bias) W_down'; the output bias is left to the norm that follows."""
    return _Mlp.apply(h_MD, up, up_copy, bias_H, down, down_copy)


def _weight_gradient(dy_MX: Tensor, h_MD: Tensor) -> Tensor:
    """dy' h (X, D) in float32, without a rounding to bfloat16 on the way."""
    if dy_MX.is_cuda and dy_MX.dtype != torch.float32:
        return torch.ops.aten.mm.dtype(dy_MX.t(), h_MD, torch.float32)
    return (dy_MX.t() @ h_MD).float()


def _sums_by_token(tokens_M: Tensor, size: int, *gradients_MX: Tensor) -> list[Tensor]:
    """Sums (V, X) of rows by their token, in float32: products with indicators."""
    ids = torch.arange(-(-size // 64) * 64, device=tokens_M.device)  # round, as the tensor cores like it
    is_token = tokens_M[:, None] == ids
    indicators = {kind: is_token.to(kind) for kind in {gradient.dtype for gradient in gradients_MX}}
    return [_weight_gradient(indicators[gradient.dtype], gradient)[:size] for gradient in gradients_MX]


def _rotated_qkv(h_MD: Tensor, weight_XD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    qkv_MX = h_MD @ weight_XD.t()
    heads = h_MD.shape[1] // (2 * cos.shape[1])
    kernels.rotate_(qkv_MX.view(-1, len(cos), len(weight_XD)), cos, sin, 2 * heads)
    return qkv_MX


class _Embed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, weight: Tensor, norm: Tensor, residual: torch.dtype, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(tokens, weight, norm)
        table, h_table = fused_kernels.add_norm(weight.to(residual), None, None, norm, dtype)
        return fused_kernels.rows_at(table, h_table, tokens)

    @staticmethod
    def backward(ctx: Any, dx: Tensor, dh: Tensor) -> tuple[Tensor | None, ...]:
        tokens, weight, norm = ctx.saved_tensors
        dtable, dh_table = _sums_by_token(tokens, len(weight), dx.contiguous(), dh.contiguous())
        rounded = weight.to(dx.dtype).float()
        dweight, _, _, dnorm = fused_kernels.add_norm_gradient(rounded, norm, dh_table, dtable, None, False)
        return None, dweight, dnorm, None, None


class _AddNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor | None, bias: Tensor | None, weight: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        x_after, h = fused_kernels.add_norm(x, branch, bias, weight, dtype)
        ctx.save_for_backward(x_after, weight)
        ctx.set_materialize_grads(False)  # nothing comes down the stream from the last norm
        ctx.branch, ctx.has_bias = None if branch is None else branch.dtype, bias is not None
        return x_after, h

    @staticmethod
    def backward(ctx: Any, dx: Tensor | None, dh: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx, dbranch, dbias, dweight = fused_kernels.add_norm_gradient(
            x, weight, dh.contiguous(), None if dx is None else dx.contiguous(), ctx.branch, ctx.has_bias
        )
        return dx, dbranch, dbias, dweight, None


class _RowsAt(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, h: Tensor, position: Tensor, place: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(place)
        return fused_kernels.rows_at(x.contiguous(), h.contiguous(), position)

    @staticmethod
    def backward(ctx: Any, dx: Tensor, dh: Tensor) -> tuple[Tensor | None, ...]:
        (place,) = ctx.saved_tensors
        return *fused_kernels.rows_at(dx.contiguous(), dh.contiguous(), place), None, None


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, copy: Tensor) -> Tensor:
        ctx.save_for_backward(h, copy)
        return h @ copy.t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        h, copy = ctx.saved_tensors
        return dy @ copy, _weight_gradient(dy, h), None


class _Rotated(torch.autograd.Function):
    """Queries, keys and values (B, heads, L, d), views of one matrix."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, weight: Tensor, copy: Tensor, cos: Tensor, sin: Tensor, shape: tuple[int, int, int, bool]
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(h, copy, cos, sin)
        b, length, heads, _ = shape
        qkv = _rotated_qkv(h, copy, cos, sin)
        return qkv.view(b, length, 3, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        h, copy, cos, sin = ctx.saved_tensors
        dqkv = fused_kernels.pack_rotated(dq, dk, dv, cos, sin)
        return dqkv @ copy, _weight_gradient(dqkv, h), None, None, None, None


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h: Tensor, weight: Tensor, copy: Tensor, cos: Tensor, sin: Tensor, shape: tuple[int, int, int, bool]
    ) -> Tensor:
        b, length, heads, causal = shape
        qkv = _rotated_qkv(h, copy, cos, sin).view(b, length, -1)
        out, normaliser = attention_kernels.attention(qkv, heads, causal)
        ctx.save_for_backward(h, copy, cos, sin, qkv, out, normaliser)
        ctx.heads, ctx.causal = heads, causal
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        h, copy, cos, sin, qkv, out, normaliser = ctx.saved_tensors
        dqkv = attention_kernels.attention_gradient(
            qkv, out, normaliser, dout.contiguous(), cos, sin, ctx.heads, ctx.causal
        )
        return dqkv @ copy, _weight_gradient(dqkv, h), None, None, None, None


class _EmbedAttend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, weight: Tensor, norm: Tensor, qkv_weight: Tensor, copy: Tensor, cos: Tensor,
        sin: Tensor, shape: tuple[int, int, int, bool], residual: torch.dtype,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        b, length, heads, causal = shape
        table, h_table = fused_kernels.add_norm(weight.to(residual), None, None, norm, copy.dtype)
        (x,) = fused_kernels.rows_at(table, None, tokens)
        qkv = kernels.rotate_from_table(h_table @ copy.t(), tokens.view(b, length), cos, sin, heads)
        out, normaliser = attention_kernels.attention(qkv, heads, causal)
        ctx.save_for_backward(tokens, table, h_table, norm, copy, cos, sin, qkv, out, normaliser)
        ctx.heads, ctx.causal = heads, causal
        return x, out

    @staticmethod
    def backward(ctx: Any, dx: Tensor, dout: Tensor) -> tuple[Tensor | None, ...]:
        tokens, table, h_table, norm, copy, cos, sin, qkv, out, normaliser = ctx.saved_tensors
        dqkv = attention_kernels.attention_gradient(
            qkv, out, normaliser, dout.contiguous(), cos, sin, ctx.heads, ctx.causal
        )
        dtable, dqkv_table = _sums_by_token(tokens, len(table), dx.contiguous(), dqkv)
        dh_table = dqkv_table @ copy.float()
        dweight, _, _, dnorm = fused_kernels.add_norm_gradient(table.float(), norm, dh_table, dtable, None, False)
        return None, dweight, dnorm, dqkv_table.t() @ h_table.float(), None, None, None, None, None


class _Mlp(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, h: Tensor, up: Tensor, up_copy: Tensor, bias: Tensor, down: Tensor, down_copy: Tensor
    ) -> Tensor:
        before = h @ up_copy.t()  # without the bias, which the GELU kernels add
        after = fused_kernels.gelu(before, bias)
        ctx.save_for_backward(h, up_copy, bias, down_copy, before, after)
        return after @ down_copy.t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        h, up, bias, down, before, after = ctx.saved_tensors
        dbefore = dy @ down
        dbias = fused_kernels.gelu_gradient_(dbefore, before, bias)
        return dbefore @ up, _weight_gradient(dbefore, h), None, dbias, _weight_gradient(dy, after), None
