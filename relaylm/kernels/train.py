r"""The trunk of a plain network in training, in as few passes over memory as possible.

A block of width 256 is bound by memory, not by arithmetic. So whatever lies between two matrix products is one pass
over a (tokens, width) or (tokens, 4 width) matrix, forward and backward. On Hopper the rotation, GELU and GELU's slope
are done in the products themselves (`gemm`).

    _AddNorm    x <- x + branch + bias,  h = LayerNorm(x) weight
    attend      qkv = h W', rotated in place; softmax(q k' / sqrt d) v    gradients leave un-rotated and packed
    _Product    h W'
    _Mlp        gelu(h W_up' + b) W_down'                                 GELU's slope and the bias sum in one pass

With a small vocabulary the embedding, the first norm and, in short rows, the first block's queries, keys and values
before rotation are rows of tables by token. The gradient of a table is the sum of its rows' gradients by token, and
those of the norm and of the weights are products as small as it. After the last block's attention no position depends
on another one, so where only some positions are scored the rest of the network runs on their rows alone (`_RowsAt`).

A branch is added to the residual stream by the norm after it, and that norm's backward pass also has the gradient of
the branch's bias: the sum over tokens of dx. With x^ = (x - mean) / std and g = weight * dh,

    dx = (g - mean(g) - x^ mean(g x^)) / std + (gradient that comes down the residual stream).

GELU is the tanh form, x s(x) with s = 1 / (1 + exp(-2u)), u = sqrt(2/pi) (x + 0.044715 x^3); its slope is
s + 2 x s (1 - s) u'. Attention is that of `attention`. Every sum here has a fixed order.

Weights are float32; their bfloat16 copies are made once for a call, and gradients come from the matrix products in
float32. The result is that of `Transformer.hidden_at` and the final norm under autocast, apart from where it is rounded
(the residual stream may be bfloat16 too), and can be captured in a CUDA graph.

Shapes: B rows, L positions, M = B L tokens, K of them scored, D width, X = 3 D, H hidden units of the MLP.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from relaylm.kernels import attention, available, gemm, train_kernels
from relaylm.kernels.trunk import rotate_, rotate_from_table

Shape = tuple[int, int, int, bool]  # rows, length, heads, causal
SMALL_VOCABULARY = 512  # up to this size what depends on a token alone comes from a table


def applies(model: Any) -> bool:
    """Whether `trunk` can train this network: a plain one on CUDA, without dropout."""
    a, weight = model.architecture, model.vocab_embed.embedding
    dim = a.width // a.heads
    return bool(
        weight.is_cuda
        and weight.dtype == torch.float32
        and not (a.adaln or a.qkv_bias or any(block.dropout for block in model.blocks))
        and a.width % 8 == 0  # cuBLAS's alignment of bfloat16 rows
        and dim in (16, 32, 64, 128)  # Triton's tiles are powers of two
        and available()
    )


def trunk(
    model: Any, tokens_BL: Tensor, residual: torch.dtype = torch.bfloat16, dtype: torch.dtype = torch.bfloat16,
    scored: tuple[Tensor, Tensor] | None = None,
) -> Tensor:  # fmt: skip
    """The final norm (M, D) of the network's residual stream, which is in `residual` (bfloat16 halves its traffic). The
    norm and the products are in `dtype`. With `scored`, the two maps of `_RowsAt`, only its rows (K, D) there."""
    blocks = model.blocks
    length, shape = tokens_BL.shape[1], (*tokens_BL.shape, model.architecture.heads, model.architecture.causal)
    cos, sin = (angle.float() for angle in model.angles(length))
    with torch.autocast(tokens_BL.device.type, enabled=False):
        layers = [layer for block in blocks for layer in (block.attn_qkv, block.attn_out, block.mlp[0], block.mlp[2])]
        matrices = [layer.weight for layer in layers]
        with torch.no_grad():
            copies = [torch.empty_like(weight, dtype=dtype) for weight in matrices]
            torch._foreach_copy_(copies, matrices)
        pairs = iter(zip(matrices, copies))
        tokens_M, embedding, first_norm = tokens_BL.flatten(), model.vocab_embed.embedding, blocks[0].norm1.weight
        by_token = length <= attention.OWN_ATTENTION_UP_TO and len(embedding) <= SMALL_VOCABULARY
        if not by_token:
            x, h = embed(tokens_M, embedding, first_norm, residual, dtype)
        for block, following in zip(blocks, [*(block.norm1 for block in blocks[1:]), model.output_layer.norm_final]):
            if by_token and block is blocks[0]:
                tables = tokens_M, embedding, first_norm, *next(pairs)
                x, h = _EmbedAttend.apply(*tables, cos, sin, shape, residual)
            else:
                h = attend(h, *next(pairs), cos, sin, shape)
            if scored is not None and block is blocks[-1]:
                x, h = _RowsAt.apply(x, h, *scored)
            x, h = _AddNorm.apply(x, _Product.apply(h, *next(pairs)), None, block.norm2.weight, dtype)
            branch = _Mlp.apply(h, *next(pairs), block.mlp[0].bias, *next(pairs))
            x, h = _AddNorm.apply(x, branch, block.mlp[2].bias, following.weight, dtype)
    return h


def embed(
    tokens_M: Tensor, weight_VD: Tensor, norm_D: Tensor, residual: torch.dtype, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """The tokens' embeddings (M, D), in `residual`, and their LayerNorm in `dtype`."""
    if len(weight_VD) > SMALL_VOCABULARY:
        return _AddNorm.apply(_Rows.apply(tokens_M, weight_VD, residual), None, None, norm_D, dtype)
    return _Embed.apply(tokens_M, weight_VD, norm_D, residual, dtype)


def attend(h_MD: Tensor, weight: Tensor, copy: Tensor, cos: Tensor, sin: Tensor, shape: Shape) -> Tensor:
    """Attention (M, D) of queries, keys and values h W', rotated."""
    if shape[1] <= attention.OWN_ATTENTION_UP_TO:
        return _Attend.apply(h_MD, weight, copy, cos, sin, shape)
    q, k, v = _Rotated.apply(h_MD, weight, copy, cos, sin, shape)
    return F.scaled_dot_product_attention(q, k, v, is_causal=shape[3]).transpose(1, 2).reshape(h_MD.shape)


def _sums_by_token(tokens_M: Tensor, size: int, *gradients_MX: Tensor) -> list[Tensor]:
    """Sums (V, X) of rows by their token, in float32: products with indicators."""
    ids = torch.arange(-(-size // 64) * 64, device=tokens_M.device)  # a multiple of 64, for the tensor cores
    is_token = tokens_M[:, None] == ids
    indicators = {kind: is_token.to(kind) for kind in {gradient.dtype for gradient in gradients_MX}}
    return [gemm.weight_gradient(indicators[gradient.dtype], gradient)[:size] for gradient in gradients_MX]


def _rotated_qkv(h_MD: Tensor, weight_XD: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Queries, keys and values h W' (B, L, X), the first two rotated."""
    dim = 2 * cos.shape[1]
    if dim <= gemm.WIDEST_HEAD and gemm.fits_training(h_MD, len(weight_XD)):
        qkv_MX = gemm.rotated_heads(h_MD, weight_XD, cos, sin, 2 * h_MD.shape[1] // dim)
        return qkv_MX.view(-1, len(cos), len(weight_XD))
    qkv_BLX = (h_MD @ weight_XD.t()).view(-1, len(cos), len(weight_XD))
    return rotate_(qkv_BLX, cos, sin, 2 * h_MD.shape[1] // dim)


class _Embed(torch.autograd.Function):
    """`embed` by tables: the first norm of each token, looked up."""

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, weight: Tensor, norm: Tensor, residual: torch.dtype, dtype: torch.dtype
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(tokens, weight, norm)
        table, h_table = train_kernels.add_norm(weight.to(residual), None, None, norm, dtype)
        return train_kernels.rows_at(table, h_table, tokens)

    @staticmethod
    def backward(ctx: Any, dx: Tensor, dh: Tensor) -> tuple[Tensor | None, ...]:
        tokens, weight, norm = ctx.saved_tensors
        dtable, dh_table = _sums_by_token(tokens, len(weight), dx.contiguous(), dh.contiguous())
        rounded = weight.to(dx.dtype).float()
        dweight, _, _, dnorm = train_kernels.add_norm_gradient(rounded, norm, dh_table, dtable, None, False)
        return None, dweight, dnorm, None, None


class _Rows(torch.autograd.Function):
    """Rows of a table (V, D) in another precision: rounded before they are looked up, so less is read and written."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(tokens)
        ctx.size = len(weight)
        return train_kernels.rows_at(weight.to(dtype), None, tokens)[0]

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor | None, ...]:
        (tokens,) = ctx.saved_tensors
        return None, torch.ops.aten.embedding_dense_backward(dx.float(), tokens, ctx.size, -1, False), None


class _AddNorm(torch.autograd.Function):
    """(x + branch + bias, its LayerNorm in `dtype`). Without a branch x is passed through, so that both of its
    gradients are added here and not in a separate pass."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, branch: Tensor | None, bias: Tensor | None, weight: Tensor, dtype: torch.dtype
    ) -> tuple[Tensor, Tensor]:
        x_after, h = train_kernels.add_norm(x, branch, bias, weight, dtype)
        ctx.save_for_backward(x_after, weight)
        ctx.set_materialize_grads(False)  # nothing comes down the stream from the last norm
        ctx.branch, ctx.has_bias = None if branch is None else branch.dtype, bias is not None
        return x_after, h

    @staticmethod
    def backward(ctx: Any, dx: Tensor | None, dh: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx = None if dx is None else dx.contiguous()
        return *train_kernels.add_norm_gradient(x, weight, dh.contiguous(), dx, ctx.branch, ctx.has_bias), None


class _RowsAt(torch.autograd.Function):
    """The rows (K, D) of x and h at these positions. `place` (M,) is the way back: where among the K a position's row
    is, anything outside of 0..K-1 for nowhere. So the gradient is a selection of rows too, and needs no sums; rows that
    no position points to only fill the shape, and their gradient is dropped."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, h: Tensor, position: Tensor, place: Tensor) -> tuple[Tensor, ...]:
        ctx.save_for_backward(place)
        return train_kernels.rows_at(x.contiguous(), h.contiguous(), position)

    @staticmethod
    def backward(ctx: Any, dx: Tensor, dh: Tensor) -> tuple[Tensor | None, ...]:
        (place,) = ctx.saved_tensors
        return *train_kernels.rows_at(dx.contiguous(), dh.contiguous(), place), None, None


class _Product(torch.autograd.Function):
    """h W', from W's copy in h's precision; the gradient goes to W."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, copy: Tensor) -> Tensor:
        ctx.save_for_backward(h, copy)
        return h @ copy.t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        h, copy = ctx.saved_tensors
        return dy @ copy, gemm.weight_gradient(dy, h), None


class _Rotated(torch.autograd.Function):
    """Queries, keys and values (B, heads, L, d), views of one matrix."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, weight: Tensor, copy: Tensor, cos: Tensor, sin: Tensor, shape: Shape
    ) -> tuple[Tensor, ...]:
        ctx.save_for_backward(h, copy, cos, sin)
        b, length, heads, _ = shape
        return _rotated_qkv(h, copy, cos, sin).view(b, length, 3, heads, -1).permute(2, 0, 3, 1, 4).unbind(0)

    @staticmethod
    def backward(ctx: Any, dq: Tensor, dk: Tensor, dv: Tensor) -> tuple[Tensor | None, ...]:
        h, copy, cos, sin = ctx.saved_tensors
        dqkv = train_kernels.pack_rotated(dq, dk, dv, cos, sin)
        return dqkv @ copy, gemm.weight_gradient(dqkv, h), None, None, None, None


class _Attend(torch.autograd.Function):
    """`attend` in short rows, by the attention of `relaylm.kernels.attention`."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, weight: Tensor, copy: Tensor, cos: Tensor, sin: Tensor, shape: Shape) -> Tensor:
        qkv, ctx.heads_causal = _rotated_qkv(h, copy, cos, sin), shape[2:]
        out, normaliser = attention.attention(qkv, *ctx.heads_causal)
        ctx.save_for_backward(h, copy, cos, sin, qkv, out, normaliser)
        return out

    @staticmethod
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        h, copy, cos, sin, qkv, out, normaliser = ctx.saved_tensors
        dqkv = attention.attention_gradient(qkv, out, normaliser, dout.contiguous(), cos, sin, *ctx.heads_causal)
        return dqkv @ copy, gemm.weight_gradient(dqkv, h), None, None, None, None


class _EmbedAttend(torch.autograd.Function):
    """`embed` and then `attend`, by tables: the embeddings (M, D) and the first block's attention (M, D)."""

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, weight: Tensor, norm: Tensor, qkv_weight: Tensor, copy: Tensor, cos: Tensor,
        sin: Tensor, shape: Shape, residual: torch.dtype,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        b, length, heads, causal = shape
        table, h_table = train_kernels.add_norm(weight.to(residual), None, None, norm, copy.dtype)
        (x,) = train_kernels.rows_at(table, None, tokens)
        qkv = rotate_from_table(h_table @ copy.t(), tokens.view(b, length), cos, sin, heads)
        out, normaliser = attention.attention(qkv, heads, causal)
        ctx.save_for_backward(tokens, table, h_table, norm, copy, cos, sin, qkv, out, normaliser)
        ctx.heads_causal = heads, causal
        return x, out

    @staticmethod
    def backward(ctx: Any, dx: Tensor, dout: Tensor) -> tuple[Tensor | None, ...]:
        tokens, table, h_table, norm, copy, cos, sin, qkv, out, normaliser = ctx.saved_tensors
        dqkv = attention.attention_gradient(qkv, out, normaliser, dout.contiguous(), cos, sin, *ctx.heads_causal)
        dtable, dqkv_table = _sums_by_token(tokens, len(table), dx.contiguous(), dqkv)
        dh_table = dqkv_table @ copy.float()
        dweight, _, _, dnorm = train_kernels.add_norm_gradient(table.float(), norm, dh_table, dtable, None, False)
        return None, dweight, dnorm, dqkv_table.t() @ h_table.float(), None, None, None, None, None


class _Mlp(torch.autograd.Function):
    """gelu(h W_up' + bias) W_down'; the output bias is left to the norm that follows."""

    @staticmethod
    def forward(
        ctx: Any, h: Tensor, up: Tensor, up_copy: Tensor, bias: Tensor, down: Tensor, down_copy: Tensor
    ) -> Tensor:
        ctx.in_products = gemm.fits_training(h, len(bias))
        if ctx.in_products:
            after, kept = gemm.gelu_and_slope(h, up_copy, bias)
        else:
            kept = h @ up_copy.t()  # without the bias, which the GELU kernels add
            after = train_kernels.gelu(kept, bias)
        ctx.save_for_backward(h, up_copy, bias, down_copy, kept, after)
        return after @ down_copy.t()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        h, up, bias, down, kept, after = ctx.saved_tensors
        if ctx.in_products:
            dbefore, sums = gemm.times_slope(dy.contiguous(), down, kept)
            dbias = train_kernels.column_sums(sums)
        else:
            dbefore = dy @ down
            dbias = train_kernels.gelu_gradient_(dbefore, kept, bias)
        return dbefore @ up, gemm.weight_gradient(dbefore, h), None, dbias, gemm.weight_gradient(dy, after), None
