r"""The trunk of a plain network in sampling: the kernels between its matrix products, and the whole of it.

- `norm`: LayerNorm of the float32 residual stream, in one pass;
- `norm_from_table`: the same where the stream begins, which it makes from token ids and the first branch;
- `rotate_`: rotary embedding of queries and keys, in place in the qkv matrix (`rotate` is the plain definition);
- `attend_few`: attention of a few queries, without values.

The matrix products are those of `gemm`, cuBLAS and cuDNN. `trunk` computes what `Transformer.hidden_at` defines.

Shapes: B rows, L positions, M = B L, K positions asked for, D width, X columns, R half a head, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from relaylm.kernels import attention, early, gemm, tl, triton

NORM_ELEMENTS, ROTATE_ELEMENTS = 2048, 4096  # of one program

if triton is not None:

    @triton.jit
    def _norm_kernel(
        x, tokens, table, branch, offset, weight, out, rows, width, places,
        FROM_TABLE: tl.constexpr, HAS_OFFSET: tl.constexpr, SIZE: tl.constexpr, ROWS: tl.constexpr,
        SPLIT: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        """Normalise rows of x: as they are, or made here, from a table's rows and a branch, and written. With SPLIT the
        result is two matrices in bfloat16 with so many places, it rounded and what that left."""
        row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        column = tl.arange(0, SIZE)
        wide = column < width
        scale = tl.load(weight + column, mask=wide, other=0.0)
        if HAS_OFFSET:
            added = tl.load(offset + column, mask=wide, other=0.0)
        if EARLY:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        inside = (row < rows)[:, None] & wide[None, :]
        at = row[:, None] * width + column[None, :]
        if FROM_TABLE:
            ids = tl.load(tokens + row, mask=row < rows, other=0).to(tl.int64)
            value = tl.load(table + ids[:, None] * width + column[None, :], mask=inside, other=0.0).to(tl.float32)
            value += tl.load(branch + at, mask=inside, other=0.0).to(tl.float32)
            tl.store(x + at, value.to(x.dtype.element_ty), mask=inside)
        else:
            value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if HAS_OFFSET:
            value += added[None, :]
        mean = tl.sum(value, axis=1) / width
        centred = tl.where(inside, value - mean[:, None], 0.0)
        variance = tl.sum(centred * centred, axis=1) / width
        scaled = centred * tl.rsqrt(variance + 1e-5)[:, None] * scale[None, :]
        high = scaled.to(out.dtype.element_ty)
        tl.store(out + at, high, mask=inside)
        if SPLIT:
            tl.store(out + places * width + at, (scaled - high.to(tl.float32)).to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _weights_kernel(
        query, key, out, scale, length, few, row_stride, position_stride,
        HEADS: tl.constexpr, DIM: tl.constexpr, QUERIES: tl.constexpr, BLOCK: tl.constexpr,
    ):  # fmt: skip
        """Attention's weights for a few queries, a head of a row: once over the keys for the largest score and the
        sum, and once more, out of the cache, to write. `scale` has log2(e) in it."""
        row, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
        which, column = tl.arange(0, QUERIES), tl.arange(0, DIM)
        real = which < few
        at = (row * few + which) * (HEADS * DIM) + head * DIM
        q = tl.load(query + at[None, :] + column[:, None], mask=real[None, :], other=0.0)
        base = key + row.to(tl.int64) * row_stride + head * DIM + column[None, :]
        largest = tl.full((QUERIES,), -float("inf"), tl.float32)
        total = tl.zeros((QUERIES,), tl.float32)
        for start in range(0, length, BLOCK):
            place = start + tl.arange(0, BLOCK)
            inside = (place < length)[:, None]
            score = tl.dot(tl.load(base + place[:, None] * position_stride, mask=inside, other=0.0), q) * scale
            score = tl.where(inside, score, -float("inf"))
            now = tl.maximum(largest, tl.max(score, axis=0))
            total = total * tl.exp2(largest - now) + tl.sum(tl.exp2(score - now[None, :]), axis=0)
            largest = now
        to = out + (tl.program_id(0).to(tl.int64) * few + which[None, :]) * length
        for start in range(0, length, BLOCK):
            place = start + tl.arange(0, BLOCK)
            inside = (place < length)[:, None]
            score = tl.dot(tl.load(base + place[:, None] * position_stride, mask=inside, other=0.0), q) * scale
            weight = tl.exp2(score - largest[None, :]) / total[None, :]
            tl.store(to + place[:, None], weight.to(out.dtype.element_ty), mask=inside & real[None, :])

    @triton.jit
    def _rotate_kernel(
        qkv, tokens_bl, table, positions, bias, cos, sin, total, length, stride,
        HEADS: tl.constexpr, ROTATED: tl.constexpr, HALF: tl.constexpr, TOKENS: tl.constexpr, TILE: tl.constexpr,
        FROM_TABLE: tl.constexpr, AT: tl.constexpr, HAS_BIAS: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        """Rotate the first ROTATED of HEADS heads of TOKENS tokens, after adding a bias: in place, or on the way from a
        table. Tokens are whole rows, or (AT) those at the positions."""
        token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
        head = tl.arange(0, TILE)
        pair = tl.arange(0, HALF)
        real = (token < total)[:, None, None] & (head < HEADS)[None, :, None] & (pair >= 0)[None, None, :]
        place = tl.load(positions + token, mask=token < total, other=0) if AT else token % length
        angle = (place * HALF)[:, None, None] + pair[None, None, :]
        in_range = (token < total)[:, None, None] & (pair >= 0)[None, None, :]
        c = tl.load(cos + angle, mask=in_range, other=0.0)
        s = tl.load(sin + angle, mask=in_range, other=0.0)
        if ROTATED < HEADS:
            turns = (head < ROTATED)[None, :, None]
            c = tl.where(turns, c, 1.0)
            s = tl.where(turns, s, 0.0)
        within = head[None, :, None] * (2 * HALF) + pair[None, None, :]
        if HAS_BIAS:
            known = (head < HEADS)[None, :, None] & (pair >= 0)[None, None, :]
            first_bias = tl.load(bias + within, mask=known, other=0.0).to(tl.float32)
            second_bias = tl.load(bias + within + HALF, mask=known, other=0.0).to(tl.float32)
        to = qkv + token[:, None, None] * stride + within
        if EARLY:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()
        if FROM_TABLE:
            ids = tl.load(tokens_bl + token, mask=token < total, other=0)
            source = table + ids[:, None, None] * stride + within
        else:
            source = to
        first = tl.load(source, mask=real, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=real, other=0.0).to(tl.float32)
        if HAS_BIAS:
            first += first_bias
            second += second_bias
        tl.store(to, (first * c - second * s).to(qkv.dtype.element_ty), mask=real)
        tl.store(to + HALF, (second * c + first * s).to(qkv.dtype.element_ty), mask=real)


def norm(
    x_MD: Tensor, weight_D: Tensor, dtype: torch.dtype, offset_D: Tensor | None = None, tokens_BL: Tensor | None = None,
    table_VD: Tensor | None = None, branch_MD: Tensor | None = None, places: int = 0,
) -> Tensor:  # fmt: skip
    """LayerNorm(x + offset) * weight in `dtype`. With a table, x is first written: rows by token id plus a branch. With
    `places`, at least as many as there are rows, the result is two matrices of so many rows whose sum it is: rounded to
    `dtype`, and what that left; rows beyond x's are not written."""
    width = x_MD.shape[-1]
    rows, size = x_MD.numel() // width, triton.next_power_of_2(width)
    out = torch.empty((2, places, width) if places else x_MD.shape, dtype=dtype, device=x_MD.device)
    per_program = max(1, NORM_ELEMENTS // size)
    _norm_kernel[(triton.cdiv(rows, per_program),)](
        x_MD, tokens_BL, table_VD, branch_MD, offset_D, weight_D, out, rows, width, places,
        FROM_TABLE=table_VD is not None, HAS_OFFSET=offset_D is not None, SIZE=size, ROWS=per_program, SPLIT=places > 0,
        num_warps=2, **early(x_MD),
    )  # fmt: skip
    return out


def norm_from_table(
    table_VD: Tensor, tokens_BL: Tensor, branch_MD: Tensor, weight_D: Tensor, residual: torch.dtype,
    dtype: torch.dtype, offset_D: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """x (M, D), rows of a table by token id plus a branch, in `residual`, and LayerNorm(x + offset) * weight in
    `dtype`."""
    x = torch.empty(branch_MD.shape, dtype=residual, device=branch_MD.device)
    return x, norm(x, weight_D, dtype, offset_D, tokens_BL.contiguous(), table_VD, branch_MD)


def rotate_(
    qkv_BLX: Tensor, cos_LR: Tensor, sin_LR: Tensor, rotated: int, tokens_BL: Tensor | None = None,
    table_VX: Tensor | None = None, positions_BK: Tensor | None = None, bias_X: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Rotate the first `rotated` heads of each row of qkv, in place: of all positions, or of those that are listed. A
    bias is added to them first. With a table, qkv is its rows by token id."""
    half, total = cos_LR.shape[-1], qkv_BLX.numel() // qkv_BLX.shape[-1]
    heads = rotated if table_VX is None else qkv_BLX.shape[-1] // (2 * half)  # in place the others need no copy
    tile = triton.next_power_of_2(heads)
    per_program = max(1, ROTATE_ELEMENTS // (tile * half * 2))
    _rotate_kernel[(triton.cdiv(total, per_program),)](
        qkv_BLX, tokens_BL, table_VX, positions_BK, bias_X, cos_LR, sin_LR, total, cos_LR.shape[0], qkv_BLX.shape[-1],
        HEADS=heads, ROTATED=rotated, HALF=half, TOKENS=per_program, TILE=tile, FROM_TABLE=table_VX is not None,
        AT=positions_BK is not None, HAS_BIAS=bias_X is not None, num_warps=4, **early(qkv_BLX),
    )  # fmt: skip
    return qkv_BLX


def rotate_from_table(table_VX: Tensor, tokens_BL: Tensor, cos_LR: Tensor, sin_LR: Tensor, heads: int) -> Tensor:
    """qkv (B, L, 3D) of the first block: rows of a table by token id, with queries and keys rotated."""
    qkv = torch.empty((*tokens_BL.shape, table_VX.shape[1]), dtype=table_VX.dtype, device=table_VX.device)
    return rotate_(qkv, cos_LR, sin_LR, 2 * heads, tokens_BL.contiguous(), table_VX)


def attend_few(query_BKHd: Tensor, key_BLX: Tensor, h_BLD: Tensor, weight_XD: Tensor) -> Tensor:
    """Attention (B*K, X) of a few queries, without values: sum_l p_l (W h_l) = W (sum_l p_l h_l), which for few queries
    is less work than the values of all positions. `weight_XD` is W."""
    (b, k, heads, dim), (_, length, d) = query_BKHd.shape, h_BLD.shape
    weights = torch.empty((b, heads * k, length), dtype=h_BLD.dtype, device=h_BLD.device)
    _weights_kernel[(b * heads,)](
        query_BKHd.contiguous(), key_BLX, weights, dim**-0.5 * attention.LOG2_E, length, k, *key_BLX.stride()[:2],
        HEADS=heads, DIM=dim, QUERIES=16, BLOCK=256, num_warps=4, num_stages=3,
    )  # fmt: skip
    pooled = torch.bmm(weights, h_BLD).view(b, heads, k, d).transpose(0, 1).reshape(heads, b * k, d)
    out_HNd = torch.bmm(pooled, weight_XD.view(heads, dim, d).transpose(1, 2))
    return out_HNd.transpose(0, 1).reshape(b * k, heads * dim)


def trunk(network: Any, tokens_BL: Tensor, positions_BK: Tensor) -> Tensor:
    """`Transformer.hidden_at` (B, K, D) for a plain network in bfloat16, by the kernels above and matrix products.

    Four rearrangements, all exact: the first block's queries, keys and values come from a table of all token ids,
    since they depend on the token alone until they are rotated, so the residual stream begins after the first attention
    (`norm_from_table`; a single block starts from the embedding); what values and MLPs add whatever their input, their
    biases, is kept out of the stream as one running vector that the norms add (`Transformer.offsets`); the last block
    computes only what the positions need, its few queries without values (`attend_few`); where a call has few rows, and
    so costs what its kernels take to start, all of the last block's attention is computed by the kernel of the others.
    """
    a, positions_BK = network.architecture, positions_BK.contiguous()
    (b, length), k, last = tokens_BL.shape, positions_BK.shape[1], len(network.blocks) - 1
    cos, sin = network.angles(length)
    table_VD = network.vocab_embed.embedding
    residual = torch.bfloat16 if network.narrow else table_VD.dtype
    if last == 0:
        x = network.vocab_embed(tokens_BL).view(b * length, a.width).to(residual)
    where = positions_BK.view(-1)
    if b > 1:
        where = where + torch.arange(0, b * length, length, device=where.device).repeat_interleave(k)
    few = pools(k, dim := a.width // a.heads)
    own = length % 64 == 0 and dim in (16, 32, 64, 128)  # the attention kernel applies
    whole = own and attention.are_few(b, length, a.heads)
    offset, offsets = None, network.offsets()
    for i, block in enumerate(network.blocks):
        pruned = i == last and not whole
        if i == 0 and i < last:
            qkv = rotate_from_table(network.first_qkv(), tokens_BL, cos, sin, a.heads)
        else:
            h = norm(x, block.norm1.weight, torch.bfloat16, offset_D=offset)
            # In the last block queries are wanted at a few positions only.
            part = slice(a.width, 2 * a.width if few else None) if pruned else slice(None)
            qkv = _rotated_qkv(network, i, h, part, cos, sin)
        if i == last:
            x = x.index_select(0, where)
        if pruned:
            weight, bias = block.attn_qkv.weight, block.attn_qkv.bias
            q_NX = F.linear(h.index_select(0, where), weight[: a.width], None if bias is None else bias[: a.width])
            q_BKHd = rotate_(q_NX, cos, sin, a.heads, positions_BK=positions_BK).view(b, k, a.heads, dim)
            if few:
                attended = attend_few(q_BKHd, qkv.view(b, length, -1), h.view(b, length, -1), weight[2 * a.width :])
            else:
                key, value = qkv.view(b, length, 2, a.heads, dim).permute(2, 0, 3, 1, 4)
                attended = F.scaled_dot_product_attention(q_BKHd.transpose(1, 2), key, value)
                attended = attended.transpose(1, 2).reshape(b * k, a.width)
        elif whole or (own and length <= attention.OWN_ATTENTION_UP_TO):
            attended, _ = attention.attention(qkv.view(b, length, -1), a.heads, False)
        else:
            q, key, value = qkv.view(b, length, 3, a.heads, dim).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(q, key, value).transpose(1, 2).reshape(b * length, a.width)
        if i == last and whole:
            attended = attended.index_select(0, where)
        after = offsets[2 * i]
        if i == 0 and i < last:
            branch = F.linear(attended, block.attn_out.weight)
            x, h = norm_from_table(table_VD, tokens_BL, branch, block.norm2.weight, residual, torch.bfloat16, after)
        else:
            gemm.add_product_(x, attended, block.attn_out.weight)
            h = norm(x, block.norm2.weight, torch.bfloat16, offset_D=after)
        up, down = block.mlp[0], block.mlp[2]
        gemm.add_mlp_(x, h, up.weight, up.bias, down.weight)
        offset = offsets[2 * i + 1]
    return (x + offset).view(b, k, a.width)


def pools(queries: int, dim: int) -> bool:
    """Whether the last block does without values for so many queries in a row, with heads of this size."""
    return queries <= 16 and dim in (16, 32, 64, 128)


def _rotated_qkv(network: Any, i: int, h_MD: Tensor, part: slice, cos: Tensor, sin: Tensor) -> Tensor:
    """Block i's queries, keys and values, rotated, the values without their bias; or the `part` of them that begins
    with the keys."""
    heads, linear = network.architecture.heads, network.blocks[i].attn_qkv
    rotated = heads if part.start else 2 * heads
    columns = len(linear.weight[part])
    if gemm.can_rotate(h_MD, heads) and gemm.fills(h_MD, columns):
        weight, bias = network.grouped_qkv(i)
        return gemm.rotated(h_MD, weight[part], None if bias is None else bias[part], cos, sin, rotated)
    bias = None if linear.bias is None else linear.bias[part]
    return rotate_(F.linear(h_MD, linear.weight[part]), cos, sin, rotated, bias_X=bias)
