r"""The engine's CUDA kernels, in Triton. Optional: everything here has a plain PyTorch twin that defines the result.

These close the gaps between the matrix products (`products`, cuBLAS and cuDNN):

- `norm`: LayerNorm of the float32 residual stream, in one pass;
- `norm_from_table`: the same where the stream begins, which it makes from token ids and the first branch;
- `rotate_`: rotary embedding of queries and keys, in place in the qkv matrix;
- `attend_few`: attention of a few queries, without values;
- `race`: the exponential race of `plan.race`, over the noise of `plan.token_noise`, word for word;
- `philox`: the random words behind it, for whoever wants them as they are.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from relaylm import attention_kernels, products

if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl
else:  # pragma: no cover - CPU builds of PyTorch come without Triton
    triton = None


def available() -> bool:
    return triton is not None


if triton is not None:
    # Triton takes an integer argument that happens to be 1 for a compile-time constant (a seed of 1, say), which has no
    # `.to`; hence do_not_specialize below.

    @triton.jit
    def _mulhilo(a, b):
        product = a.to(tl.uint64) * b.to(tl.uint64)
        return (product >> 32).to(tl.uint32), (product & 0xFFFFFFFF).to(tl.uint32)

    @triton.jit
    def _philox(c0, c1, c2, c3, k0, k1):
        """Philox4x32-10 on uint32 words."""
        m0 = tl.full((1,), 0xD2511F53, tl.uint32)
        m1 = tl.full((1,), 0xCD9E8D57, tl.uint32)
        w0 = tl.full((1,), 0x9E3779B9, tl.uint32)
        w1 = tl.full((1,), 0xBB67AE85, tl.uint32)
        for _ in tl.static_range(10):
            high0, low0 = _mulhilo(m0, c0)
            high1, low1 = _mulhilo(m1, c2)
            c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
            k0 = k0 + w0
            k1 = k1 + w1
        return c0, c1, c2, c3

    @triton.jit(do_not_specialize=["k0", "k1"])
    def _philox_kernel(c0, c1, c2, c3, out, total, k0, k1, SIZE: tl.constexpr):
        index = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
        inside = index < total
        x0, x1 = tl.load(c0 + index, mask=inside, other=0), tl.load(c1 + index, mask=inside, other=0)
        x2, x3 = tl.load(c2 + index, mask=inside, other=0), tl.load(c3 + index, mask=inside, other=0)
        w0, w1, w2, w3 = _philox(
            x0.to(tl.uint32), x1.to(tl.uint32), x2.to(tl.uint32), x3.to(tl.uint32), k0.to(tl.uint32), k1.to(tl.uint32)
        )
        tl.store(out + index, w0.to(tl.int64), mask=inside)
        tl.store(out + total + index, w1.to(tl.int64), mask=inside)
        tl.store(out + 2 * total + index, w2.to(tl.int64), mask=inside)
        tl.store(out + 3 * total + index, w3.to(tl.int64), mask=inside)

    @triton.jit
    def _exponential(high, low):
        """As plan._exponential; -log1p(-v) by its series where v is so small that 1 - v would lose it."""
        v = high.to(tl.float64) * 2.3283064365386963e-10 + (low.to(tl.float64) + 0.5) * 5.421010862427522e-20
        v = tl.minimum(v, 0.9999999999999999)
        small = v * (1.0 + v * (0.5 + v * (1.0 / 3.0 + v * 0.25)))
        return tl.where(v < 1e-4, small, -tl.log(1.0 - v))

    @triton.jit
    def _block_minimum(block, position, row, draw, k0, k1):
        """The smallest exponential of each block of 64 tokens, and the slot it falls on."""
        c0 = block.to(tl.uint32)
        zero = c0 & 0
        use = zero + (draw * 256 + 1).to(tl.uint32)
        w0, w1, w2, _w3 = _philox(c0, zero + position.to(tl.uint32), zero + row.to(tl.uint32), use, k0, k1)
        return _exponential(w0, w1) * 0.015625, (w2 & 63).to(tl.int32)

    @triton.jit(do_not_specialize=["k0", "k1"])
    def _ceilings_kernel(
        logits,
        row_n,
        position_n,
        draw_n,
        ceiling_out,
        floor_out,
        vocab,
        stride,
        blocks,
        k0,
        k1,
        TILE: tl.constexpr,
    ):
        """For each block the best score it could hold, (its largest logit) - log(its minimum), and for each tile the
        best score it surely holds, that of the tokens the minima fall on."""
        n = tl.program_id(0)
        tile = tl.program_id(1)
        row, position, draw = tl.load(row_n + n), tl.load(position_n + n), tl.load(draw_n + n)
        base = logits + n.to(tl.int64) * stride
        block = tile * TILE + tl.arange(0, TILE)
        token = block[:, None] * 64 + tl.arange(0, 64)[None, :]
        allowed = token < vocab
        largest = tl.max(tl.load(base + token, mask=allowed, other=-float("inf")).to(tl.float32), axis=1)
        minimum, slot = _block_minimum(block, position, row, draw, k0.to(tl.uint32), k1.to(tl.uint32))
        log_minimum = tl.log(minimum)
        ceiling = largest.to(tl.float64) - log_minimum
        # Kept in float32, rounded up: a block too many is opened now and then, never one too few.
        rounded_up = tl.where(largest == -float("inf"), ceiling, ceiling + 1e-5 + tl.abs(ceiling) * 1e-6)
        tl.store(ceiling_out + n * blocks + block, rounded_up.to(tl.float32), mask=block < blocks)
        held = block * 64 + slot
        fits = held < vocab
        score = tl.load(base + held, mask=fits, other=-float("inf")).to(tl.float64) - log_minimum
        tl.store(floor_out + n * tl.num_programs(1) + tile, tl.max(score, axis=0))

    @triton.jit(do_not_specialize=["k0", "k1"])
    def _open_kernel(
        logits,
        row_n,
        position_n,
        draw_n,
        ceilings,
        floors,
        best_out,
        token_out,
        vocab,
        stride,
        blocks,
        floor_count,
        k0,
        k1,
        FLOORS: tl.constexpr,
        TILE: tl.constexpr,
    ):
        """Of a row's tiles of blocks, every so manyeth: race those in full that could hold the winner."""
        n = tl.program_id(0)
        which = tl.arange(0, FLOORS)
        floor = tl.max(tl.load(floors + n * floor_count + which, mask=which < floor_count, other=-float("inf")), axis=0)
        best = tl.full((), -float("inf"), tl.float64)
        winner = tl.full((), 0, tl.int32)
        for tile in range(tl.program_id(1), tl.cdiv(blocks, TILE), tl.num_programs(1)):
            block = tile * TILE + tl.arange(0, TILE)
            ceiling = tl.max(tl.load(ceilings + n * blocks + block, mask=block < blocks, other=-float("inf")), axis=0)
            if ceiling.to(tl.float64) >= floor:
                row, position, draw = tl.load(row_n + n), tl.load(position_n + n), tl.load(draw_n + n)
                slots = tl.arange(0, 64)
                token = block[:, None] * 64 + slots[None, :]
                allowed = token < vocab
                base = logits + n.to(tl.int64) * stride
                value = tl.load(base + token, mask=allowed, other=-float("inf")).to(tl.float64)
                key0, key1 = k0.to(tl.uint32), k1.to(tl.uint32)
                minimum, slot = _block_minimum(block, position, row, draw, key0, key1)
                pair = (token // 2).to(tl.uint32)
                zero = pair & 0
                use = zero + (draw * 256 + 2).to(tl.uint32)
                t0, t1, t2, t3 = _philox(pair, zero + position.to(tl.uint32), zero + row.to(tl.uint32), use, key0, key1)
                odd = (token % 2) == 1
                extra = _exponential(tl.where(odd, t2, t0), tl.where(odd, t3, t1))
                noise = minimum[:, None] + tl.where(slot[:, None] == slots[None, :], 0.0, extra)
                in_block, where_slot = tl.max(value - tl.log(noise), axis=1, return_indices=True)
                top, where_block = tl.max(in_block, axis=0, return_indices=True)
                at = tl.sum(tl.where(tl.arange(0, TILE) == where_block, where_slot, 0), axis=0)
                winner = tl.where(top > best, (tile * TILE + where_block) * 64 + at, winner)
                best = tl.maximum(top, best)
        tl.store(best_out + n * tl.num_programs(1) + tl.program_id(1), best)
        tl.store(token_out + n * tl.num_programs(1) + tl.program_id(1), winner)

    @triton.jit
    def _norm_kernel(
        x,
        tokens,
        table,
        branch,
        offset,
        weight,
        out,
        rows,
        width,
        FROM_TABLE: tl.constexpr,
        HAS_OFFSET: tl.constexpr,
        SIZE: tl.constexpr,
        ROWS: tl.constexpr,
    ):
        """Normalise rows of x: as they are, or made here, from a table's rows and a branch, and written."""
        row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        column = tl.arange(0, SIZE)
        wide = column < width
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
            value += tl.load(offset + column, mask=wide, other=0.0)[None, :]
        mean = tl.sum(value, axis=1) / width
        centred = tl.where(inside, value - mean[:, None], 0.0)
        variance = tl.sum(centred * centred, axis=1) / width
        scaled = centred * tl.rsqrt(variance + 1e-5)[:, None] * tl.load(weight + column, mask=wide, other=0.0)[None, :]
        tl.store(out + at, scaled.to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _weights_kernel(
        query,
        key,
        out,
        scale,
        length,
        few,
        row_stride,
        position_stride,
        HEADS: tl.constexpr,
        DIM: tl.constexpr,
        QUERIES: tl.constexpr,
        BLOCK: tl.constexpr,
    ):
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
        qkv,
        tokens_bl,
        table,
        cos,
        sin,
        total,
        length,
        stride,
        HEADS: tl.constexpr,
        ROTATED: tl.constexpr,
        HALF: tl.constexpr,
        TOKENS: tl.constexpr,
        TILE: tl.constexpr,
        FROM_TABLE: tl.constexpr,
    ):
        """Rotate the first ROTATED of HEADS heads of TOKENS tokens: in place, or on the way from a table."""
        token = (tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)).to(tl.int64)
        head = tl.arange(0, TILE)
        pair = tl.arange(0, HALF)
        real = (token < total)[:, None, None] & (head < HEADS)[None, :, None] & (pair >= 0)[None, None, :]
        angle = ((token % length) * HALF)[:, None, None] + pair[None, None, :]
        in_range = (token < total)[:, None, None] & (pair >= 0)[None, None, :]
        c = tl.load(cos + angle, mask=in_range, other=0.0)
        s = tl.load(sin + angle, mask=in_range, other=0.0)
        if ROTATED < HEADS:
            turns = (head < ROTATED)[None, :, None]
            c = tl.where(turns, c, 1.0)
            s = tl.where(turns, s, 0.0)
        within = head[None, :, None] * (2 * HALF) + pair[None, None, :]
        to = qkv + token[:, None, None] * stride + within
        if FROM_TABLE:
            ids = tl.load(tokens_bl + token, mask=token < total, other=0)
            source = table + ids[:, None, None] * stride + within
        else:
            source = to
        first = tl.load(source, mask=real, other=0.0).to(tl.float32)
        second = tl.load(source + HALF, mask=real, other=0.0).to(tl.float32)
        tl.store(to, (first * c - second * s).to(qkv.dtype.element_ty), mask=real)
        tl.store(to + HALF, (second * c + first * s).to(qkv.dtype.element_ty), mask=real)


def philox(counter: Sequence[Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """`plan.philox` on CUDA: one kernel where the plain arithmetic takes a hundred."""
    words = [word.contiguous() for word in torch.broadcast_tensors(*counter)]
    out = torch.empty((4, *words[0].shape), dtype=torch.int64, device=words[0].device)
    total = words[0].numel()
    _philox_kernel[(triton.cdiv(total, 256),)](*words, out, total, *key, SIZE=256)
    return out.unbind(0)


MANY_PROGRAMS = 1 << 15  # that fill a large GPU several times over


def race(logits_NV: Tensor, seed: int, row_N: Tensor, position_N: Tensor, draw_N: Tensor) -> Tensor:
    """`plan.race` on CUDA: one token for each row of logits."""
    n, vocab = logits_NV.shape
    logits_NV = logits_NV if logits_NV.stride(1) == 1 else logits_NV.contiguous()
    blocks = triton.cdiv(vocab, 64)
    wide, narrow = min(64, triton.next_power_of_2(blocks)), min(4, triton.next_power_of_2(blocks))
    floors, tiles = triton.cdiv(blocks, wide), triton.cdiv(blocks, narrow)
    parts = max(1, min(tiles, MANY_PROGRAMS // max(1, n)))  # most tiles are closed, and a program for each costs more
    device, key = logits_NV.device, (seed & 0xFFFFFFFF, seed >> 32)
    ceiling = torch.empty((n, blocks), dtype=torch.float32, device=device)
    floor = torch.empty((n, floors), dtype=torch.float64, device=device)
    best = torch.empty((n, parts), dtype=torch.float64, device=device)
    token = torch.empty((n, parts), dtype=torch.int32, device=device)
    noise = (row_N, position_N, draw_N)
    _ceilings_kernel[(n, floors)](
        logits_NV, *noise, ceiling, floor, vocab, logits_NV.stride(0), blocks, *key, TILE=wide, num_warps=4
    )
    _open_kernel[(n, parts)](
        logits_NV,
        *noise,
        ceiling,
        floor,
        best,
        token,
        vocab,
        logits_NV.stride(0),
        blocks,
        floors,
        *key,
        FLOORS=triton.next_power_of_2(floors),
        TILE=narrow,
        num_warps=2,
    )
    return token.gather(1, best.argmax(dim=1, keepdim=True))[:, 0].long()


def norm(x_MD: Tensor, weight_D: Tensor, dtype: torch.dtype, offset_D: Tensor | None = None) -> Tensor:
    """LayerNorm(x + offset) * weight in `dtype`."""
    return _norm(x_MD, None, None, None, offset_D, weight_D, dtype)


def norm_from_table(
    table_VD: Tensor, tokens_BL: Tensor, branch_MD: Tensor, weight_D: Tensor, residual: torch.dtype, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """x (M, D), rows of a table by token id plus a branch, in `residual`, and LayerNorm(x) * weight in `dtype`."""
    x = torch.empty(branch_MD.shape, dtype=residual, device=branch_MD.device)
    return x, _norm(x, tokens_BL.contiguous(), table_VD, branch_MD, None, weight_D, dtype)


def _norm(
    x: Tensor,
    tokens: Tensor | None,
    table: Tensor | None,
    branch: Tensor | None,
    offset: Tensor | None,
    weight: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    width = x.shape[-1]
    rows = x.numel() // width
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    size = triton.next_power_of_2(width)
    per_program = max(1, NORM_ELEMENTS // size)
    _norm_kernel[(triton.cdiv(rows, per_program),)](
        x,
        tokens,
        table,
        branch,
        offset,
        weight,
        out,
        rows,
        width,
        FROM_TABLE=table is not None,
        HAS_OFFSET=offset is not None,
        SIZE=size,
        ROWS=per_program,
        num_warps=NORM_WARPS,
    )
    return out


NORM_ELEMENTS, NORM_WARPS = 2048, 2
ROTATE_ELEMENTS, ROTATE_WARPS = 4096, 4


def rotate_(qkv_BLX: Tensor, cos_LR: Tensor, sin_LR: Tensor, heads: int) -> None:
    """Rotate the first `heads` heads of each row of qkv, in place."""
    _rotate(qkv_BLX, cos_LR, sin_LR, heads, heads, None, None)


def rotate_from_table(table_VX: Tensor, tokens_BL: Tensor, cos_LR: Tensor, sin_LR: Tensor, heads: int) -> Tensor:
    """qkv (B, L, 3D) of the first block: rows of a table by token id, queries and keys rotated on the way."""
    qkv = torch.empty((*tokens_BL.shape, table_VX.shape[1]), dtype=table_VX.dtype, device=table_VX.device)
    _rotate(qkv, cos_LR, sin_LR, 3 * heads, 2 * heads, tokens_BL.contiguous(), table_VX)
    return qkv


def _rotate(
    qkv: Tensor, cos: Tensor, sin: Tensor, heads: int, rotated: int, tokens: Tensor | None, table: Tensor | None
) -> None:
    half, total, tile = cos.shape[-1], qkv.numel() // qkv.shape[-1], triton.next_power_of_2(heads)
    per_program = max(1, ROTATE_ELEMENTS // (tile * half * 2))
    _rotate_kernel[(triton.cdiv(total, per_program),)](
        qkv,
        tokens,
        table,
        cos,
        sin,
        total,
        cos.shape[0],
        qkv.shape[-1],
        HEADS=heads,
        ROTATED=rotated,
        HALF=half,
        TOKENS=per_program,
        TILE=tile,
        FROM_TABLE=table is not None,
        num_warps=ROTATE_WARPS,
    )


def attend_few(query_BKHd: Tensor, key_BLX: Tensor, h_BLD: Tensor, weight_XD: Tensor, bias_X: Tensor | None) -> Tensor:
    """Attention (B*K, X) of a few queries, without values: sum_l p_l (W h_l + b) = W (sum_l p_l h_l) + b, which with
    few of them is less work than making the values of all positions. `weight_XD` is W."""
    (b, k, heads, dim), (_, length, d) = query_BKHd.shape, h_BLD.shape
    weights = torch.empty((b, heads * k, length), dtype=h_BLD.dtype, device=h_BLD.device)
    _weights_kernel[(b * heads,)](
        query_BKHd.contiguous(),
        key_BLX,
        weights,
        dim**-0.5 * 1.4426950408889634,
        length,
        k,
        key_BLX.stride(0),
        key_BLX.stride(1),
        HEADS=heads,
        DIM=dim,
        QUERIES=16,
        BLOCK=256,
        num_warps=4,
        num_stages=3,
    )
    pooled = torch.bmm(weights, h_BLD).view(b, heads, k, d).transpose(0, 1).reshape(heads, b * k, d)
    out_HNd = torch.bmm(pooled, weight_XD.view(heads, dim, d).transpose(1, 2))
    out = out_HNd.transpose(0, 1).reshape(b * k, heads * dim)
    return out if bias_X is None else out + bias_X


def trunk(network: Any, tokens_BL: Tensor, positions_BK: Tensor) -> Tensor:
    """`Transformer.hidden_at` for a plain network in bfloat16: the same function, with nothing between the matrix
    products but the kernels above.

    Three rearrangements, all exact: the first block's queries, keys and values depend on the token alone until they are
    rotated, so they come from a table of all token ids; the MLPs' output biases are not added to the residual stream
    but kept as one running vector, `offset`, that the norms add on the fly (`Transformer.mlp_offsets`); and the last
    block's few queries do without values (`attend_few`).

    So nobody asks for the embedding before the first attention is to be added to it, and the stream begins there
    (`norm_from_table`): one pass instead of a gather, a sum and a norm. A single block has to start from the embedding.
    """
    from relaylm.denoiser import rotate

    a = network.architecture
    (b, length), k, last = tokens_BL.shape, positions_BK.shape[1], len(network.blocks) - 1
    cos, sin = network.angles(length)
    table_VD = network.vocab_embed.embedding
    residual = torch.bfloat16 if network.narrow else table_VD.dtype
    if last == 0:
        x = network.vocab_embed(tokens_BL).view(b * length, a.width).to(residual)
    where = (torch.arange(0, b * length, length, device=tokens_BL.device)[:, None] + positions_BK).view(-1)
    dim = a.width // a.heads
    few = pools(k, dim)
    short = length <= attention_kernels.OWN_ATTENTION_UP_TO and length % 64 == 0 and dim in (16, 32, 64, 128)
    offset, offsets_ND = None, network.mlp_offsets()
    for i, block in enumerate(network.blocks):
        if i == 0 and i < last:
            qkv = rotate_from_table(network.first_qkv(), tokens_BL, cos, sin, a.heads)
        else:
            h = norm(x, block.norm1.weight, torch.bfloat16, offset_D=offset)
            # In the last block queries are wanted at a few positions only.
            part = slice(None) if i < last else slice(a.width, 2 * a.width if few else None)
            qkv = _rotated_qkv(network, i, h, part, cos, sin)
        if i == last:
            x, weight, bias = x[where], block.attn_qkv.weight, block.attn_qkv.bias
            q_BKX = F.linear(h[where], weight[: a.width], None if bias is None else bias[: a.width])
            angles = cos[positions_BK][:, :, None], sin[positions_BK][:, :, None]
            q_BKHd = rotate(q_BKX.view(b, k, a.heads, dim), *angles)
            if few:
                values = weight[2 * a.width :], None if bias is None else bias[2 * a.width :]
                attended = attend_few(q_BKHd, qkv.view(b, length, -1), h.view(b, length, -1), *values)
            else:
                key, value = qkv.view(b, length, 2, a.heads, dim).permute(2, 0, 3, 1, 4)
                attended = F.scaled_dot_product_attention(q_BKHd.transpose(1, 2), key, value)
                attended = attended.transpose(1, 2).reshape(b * k, a.width)
        elif short:
            attended, _ = attention_kernels.attention(qkv.view(b, length, -1), a.heads, False)
        else:
            q, key, value = qkv.view(b, length, 3, a.heads, dim).permute(2, 0, 3, 1, 4)
            attended = F.scaled_dot_product_attention(q, key, value).transpose(1, 2).reshape(b * length, a.width)
        if i == 0 and i < last:
            branch = F.linear(attended, block.attn_out.weight)
            x, h = norm_from_table(table_VD, tokens_BL, branch, block.norm2.weight, residual, torch.bfloat16)
        else:
            products.add_product_(x, attended, block.attn_out.weight)
            h = norm(x, block.norm2.weight, torch.bfloat16, offset_D=offset)
        up, down = block.mlp[0], block.mlp[2]
        products.add_mlp_(x, h, up.weight, up.bias, down.weight)
        offset = offsets_ND[i]
    return (x + offset).view(b, k, a.width)


def pools(queries: int, dim: int) -> bool:
    """Does the last block do without values for so many queries in a row, with heads of this size?"""
    return queries <= 16 and dim in (16, 32, 64, 128)


def _rotated_qkv(network: Any, i: int, h_MD: Tensor, part: slice, cos: Tensor, sin: Tensor) -> Tensor:
    """Block i's queries, keys and values, or a `part` of them, rotated: all of them, or keys and what comes after."""
    heads, linear = network.architecture.heads, network.blocks[i].attn_qkv
    rotated = heads if part.start else 2 * heads
    if products.can_rotate(h_MD, heads):
        weight, bias = network.grouped_qkv(i)
        return products.rotated(h_MD, weight[part], None if bias is None else bias[part], cos, sin, rotated)
    qkv = F.linear(h_MD, linear.weight[part], None if linear.bias is None else linear.bias[part])
    rotate_(qkv, cos, sin, rotated)
    return qkv
