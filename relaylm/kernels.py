r"""The engine's CUDA kernels, in Triton. Optional: everything here has a plain PyTorch twin that defines the result.

These close the gaps between the matrix products, which stay with cuBLAS and cuDNN but for one:

- `up_gelu`: the MLP's first product with its bias and GELU, whose epilogue runs while the next tile is loaded;
- `norm`: LayerNorm of the float32 residual stream, in one pass;
- `rotate_`: rotary embedding of queries and keys, in place in the qkv matrix;
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

if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl

    try:
        from triton.tools.tensor_descriptor import TensorDescriptor
    except ImportError:  # a Triton that is too old for `up_gelu`
        TensorDescriptor = None
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
        """Race a tile of blocks in full, if one of them could hold the winner."""
        n = tl.program_id(0)
        tile = tl.program_id(1)
        which = tl.arange(0, FLOORS)
        floor = tl.max(tl.load(floors + n * floor_count + which, mask=which < floor_count, other=-float("inf")), axis=0)
        block = tile * TILE + tl.arange(0, TILE)
        ceiling = tl.max(tl.load(ceilings + n * blocks + block, mask=block < blocks, other=-float("inf")), axis=0)
        best = tl.full((), -float("inf"), tl.float64)
        winner = tl.full((), 0, tl.int32)
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
            best = top
            winner = (tile * TILE + where_block) * 64 + at
        tl.store(best_out + n * tl.num_programs(1) + tile, best)
        tl.store(token_out + n * tl.num_programs(1) + tile, winner)

    @triton.jit
    def _norm_kernel(
        x,
        branch,
        offset,
        weight,
        out,
        rows,
        width,
        HAS_BRANCH: tl.constexpr,
        HAS_OFFSET: tl.constexpr,
        SIZE: tl.constexpr,
        ROWS: tl.constexpr,
    ):
        row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        column = tl.arange(0, SIZE)
        wide = column < width
        inside = (row < rows)[:, None] & wide[None, :]
        at = row[:, None] * width + column[None, :]
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
        if HAS_BRANCH:
            value += tl.load(branch + at, mask=inside, other=0.0).to(tl.float32)
            tl.store(x + at, value.to(x.dtype.element_ty), mask=inside)
        if HAS_OFFSET:
            value += tl.load(offset + column, mask=wide, other=0.0)[None, :]
        mean = tl.sum(value, axis=1) / width
        centred = tl.where(inside, value - mean[:, None], 0.0)
        variance = tl.sum(centred * centred, axis=1) / width
        scaled = centred * tl.rsqrt(variance + 1e-5)[:, None] * tl.load(weight + column, mask=wide, other=0.0)[None, :]
        tl.store(out + at, scaled.to(out.dtype.element_ty), mask=inside)

    @triton.jit
    def _tanh(x):
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)

    @triton.jit
    def _up_gelu_kernel(
        h_desc,
        weight_desc,
        bias,
        out_desc,
        rows,
        columns,
        width,
        M: tl.constexpr,
        N: tl.constexpr,
        K: tl.constexpr,
        GROUP: tl.constexpr,
        PROGRAMS: tl.constexpr,
    ):
        """gelu(h @ weight^T + bias) by a fixed number of programs that go from tile to tile."""
        tiles_m, tiles_n = tl.cdiv(rows, M), columns // N
        for tile in tl.range(tl.program_id(0), tiles_m * tiles_n, PROGRAMS, flatten=True):
            first = tile // (GROUP * tiles_n) * GROUP  # groups of rows, so that what tiles share stays in the cache
            size = tl.minimum(tiles_m - first, GROUP)
            at_m = (first + tile % (GROUP * tiles_n) % size) * M
            at_n = tile % (GROUP * tiles_n) // size * N
            product = tl.zeros((M, N), dtype=tl.float32)
            for k in range(tl.cdiv(width, K)):
                part = h_desc.load([at_m, k * K])
                product = tl.dot(part, weight_desc.load([at_n, k * K]).T, product)
            x = product + tl.load(bias + at_n + tl.arange(0, N)).to(tl.float32)[None, :]
            x = 0.5 * x * (1.0 + _tanh(0.7978845608028654 * x * (1.0 + 0.044715 * x * x)))
            left, right = tl.split(tl.permute(tl.reshape(x, (M, 2, N // 2)), (0, 2, 1)))  # to store from less room
            out_desc.store([at_m, at_n], left.to(tl.bfloat16))
            out_desc.store([at_m, at_n + N // 2], right.to(tl.bfloat16))

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


def race(logits_NV: Tensor, seed: int, row_N: Tensor, position_N: Tensor, draw_N: Tensor) -> Tensor:
    """`plan.race` on CUDA: one token for each row of logits."""
    n, vocab = logits_NV.shape
    logits_NV = logits_NV if logits_NV.stride(1) == 1 else logits_NV.contiguous()
    blocks = triton.cdiv(vocab, 64)
    wide, narrow = min(64, triton.next_power_of_2(blocks)), min(4, triton.next_power_of_2(blocks))
    floors, tiles = triton.cdiv(blocks, wide), triton.cdiv(blocks, narrow)
    device, key = logits_NV.device, (seed & 0xFFFFFFFF, seed >> 32)
    ceiling = torch.empty((n, blocks), dtype=torch.float32, device=device)
    floor = torch.empty((n, floors), dtype=torch.float64, device=device)
    best = torch.empty((n, tiles), dtype=torch.float64, device=device)
    token = torch.empty((n, tiles), dtype=torch.int32, device=device)
    noise = (row_N, position_N, draw_N)
    _ceilings_kernel[(n, floors)](
        logits_NV, *noise, ceiling, floor, vocab, logits_NV.stride(0), blocks, *key, TILE=wide, num_warps=4
    )
    _open_kernel[(n, tiles)](
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


def norm(
    x_MD: Tensor, weight_D: Tensor, dtype: torch.dtype, branch_MD: Tensor | None = None, offset_D: Tensor | None = None
) -> Tensor:
    """LayerNorm(x + branch + offset) * weight in `dtype`. A branch is added to x in place, the offset is not."""
    width = x_MD.shape[-1]
    rows = x_MD.numel() // width
    out = torch.empty(x_MD.shape, dtype=dtype, device=x_MD.device)
    size = triton.next_power_of_2(width)
    per_program = max(1, NORM_ELEMENTS // size)
    _norm_kernel[(triton.cdiv(rows, per_program),)](
        x_MD,
        branch_MD,
        offset_D,
        weight_D,
        out,
        rows,
        width,
        HAS_BRANCH=branch_MD is not None,
        HAS_OFFSET=offset_D is not None,
        SIZE=size,
        ROWS=per_program,
        num_warps=NORM_WARPS,
    )
    return out


NORM_ELEMENTS, NORM_WARPS = 2048, 4
ROTATE_ELEMENTS, ROTATE_WARPS = 4096, 4


def rotate_(qkv_BLX: Tensor, cos_LR: Tensor, sin_LR: Tensor, heads: int) -> None:
    """Rotate the first `heads` heads of each row of qkv, in place."""
    _rotate(qkv_BLX, cos_LR, sin_LR, heads, heads, None, None)


def rotate_from_table(table_VX: Tensor, tokens_BL: Tensor, cos_LR: Tensor, sin_LR: Tensor, heads: int) -> Tensor:
    """qkv (B, L, 3D) of the first block: rows of a table by token id, queries and keys rotated on the way."""
    qkv = torch.empty((*tokens_BL.shape, table_VX.shape[1]), dtype=table_VX.dtype, device=table_VX.device)
    _rotate(qkv, cos_LR, sin_LR, 3 * heads, 2 * heads, tokens_BL, table_VX)
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


def up_gelu(h_MD: Tensor, weight_XD: Tensor, bias_X: Tensor) -> Tensor:
    """gelu(h @ weight^T + bias), the tanh form, in bfloat16. cuBLAS's own epilogue computes an exact tanh after each
    tile; this one's is good to 2^-11, a quarter of what rounding to bfloat16 does next, and overlaps the next tile."""
    (rows, width), columns = h_MD.shape, len(bias_X)
    m, n, k = 128, 256, 64
    hopper = torch.cuda.get_device_capability(h_MD.device) >= (9, 0)
    if TensorDescriptor is None or columns % n or width % k or not hopper:
        return torch._addmm_activation(bias_X, h_MD, weight_XD.t(), use_gelu=True)
    out = torch.empty((rows, columns), dtype=torch.bfloat16, device=h_MD.device)
    programs = torch.cuda.get_device_properties(h_MD.device).multi_processor_count
    _up_gelu_kernel[(min(programs, triton.cdiv(rows, m) * (columns // n)),)](
        TensorDescriptor.from_tensor(h_MD, [m, k]),
        TensorDescriptor.from_tensor(weight_XD, [n, k]),
        bias_X,
        TensorDescriptor.from_tensor(out, [m, n // 2]),
        rows,
        columns,
        width,
        M=m,
        N=n,
        K=k,
        GROUP=8,
        PROGRAMS=programs,
        num_warps=8,
        num_stages=4,
    )
    return out


def add_product_(x_MD: Tensor, h_MX: Tensor, weight_DX: Tensor) -> None:
    """x += h @ weight^T: the product of bfloat16 matrices, added to float32 or bfloat16 in the matrix kernel itself."""
    if x_MD.dtype == torch.bfloat16:
        torch.addmm(x_MD, h_MX, weight_DX.t(), out=x_MD)
        return
    torch.ops.aten.addmm.dtype_out(x_MD, h_MX, weight_DX.t(), torch.float32, out=x_MD)


def split_weights(weight_VD: Tensor, bias_V: Tensor) -> Tensor:
    """A float32 matrix and bias as bfloat16 pieces side by side for `head`: high, low, high, bias. Rows of zeros round
    the vocabulary up to a multiple of 64, without which cuBLAS falls back to kernels half as fast."""
    rows = triton.cdiv(len(bias_V), 64) * 64
    weight = F.pad(weight_VD, (0, 0, 0, rows - len(bias_V)))
    high = weight.bfloat16()
    low = (weight - high.float()).bfloat16()
    bias = torch.zeros((rows, 8), dtype=torch.bfloat16, device=bias_V.device)
    bias[: len(bias_V), 0] = bias_V
    bias[: len(bias_V), 1] = bias_V - bias[: len(bias_V), 0].float()
    return torch.cat([high, low, high, bias], dim=1)


def head(h_ND: Tensor, pieces_VX: Tensor, vocab_size: int) -> Tensor:
    """h @ W^T + b in float32 from three bfloat16 products, high*high + high*low + low*high, as one matrix product on
    the tensor cores. What is dropped is 2^-16 of each term: far below what bfloat16 does to h itself in the trunk."""
    high = h_ND.bfloat16()
    low = (h_ND - high.float()).bfloat16()
    ones = torch.zeros((len(h_ND), 8), dtype=torch.bfloat16, device=h_ND.device)
    ones[:, :2] = 1
    logits = torch.ops.aten.mm.dtype(torch.cat([high, high, low, ones], dim=1), pieces_VX.t(), torch.float32)
    return logits[:, :vocab_size]


def trunk(network: Any, tokens_BL: Tensor, positions_BK: Tensor) -> Tensor:
    """`Transformer.hidden_at` for a plain network in bfloat16: the same function, with nothing between the matrix
    products but the kernels above.

    Two rearrangements, both exact: the first block's queries, keys and values depend on the token alone until they are
    rotated, so they come from a table of all token ids; and the MLPs' output biases are not added to the residual
    stream but kept as one running vector, `offset`, that the norms add on the fly (`Transformer.mlp_offsets`).
    """
    from relaylm.denoiser import rotate

    a = network.architecture
    b, length = tokens_BL.shape
    k, last = positions_BK.shape[1], len(network.blocks) - 1
    cos, sin = network.angles(length)
    x = network.vocab_embed(tokens_BL).view(b * length, a.width)
    x = x.bfloat16() if network.narrow else x
    where = (torch.arange(0, b * length, length, device=x.device)[:, None] + positions_BK).view(-1)
    offset, offsets_ND = None, network.mlp_offsets()
    for i, block in enumerate(network.blocks):
        weight, bias = block.attn_qkv.weight, block.attn_qkv.bias
        split = 0 if i < last else a.width  # in the last block queries are wanted at a few positions only
        if i == 0 and split == 0:
            qkv = rotate_from_table(network.first_qkv(), tokens_BL, cos, sin, a.heads)
        else:
            h = norm(x, block.norm1.weight, torch.bfloat16, offset_D=offset)
            qkv = F.linear(h, weight[split:], None if bias is None else bias[split:])
            rotate_(qkv, cos, sin, (2 if i < last else 1) * a.heads)
        *q, key, value = qkv.view(b, length, -1, a.heads, a.width // a.heads).permute(2, 0, 3, 1, 4).unbind(0)
        if i == last:
            few = F.linear(h[where], weight[:split], None if bias is None else bias[:split])
            few = few.view(b, k, a.heads, -1).transpose(1, 2)
            q = [rotate(few, cos[positions_BK][:, None], sin[positions_BK][:, None])]
            x = x[where]
        attended = F.scaled_dot_product_attention(q[0], key, value).transpose(1, 2).reshape(x.shape[0], a.width)
        add_product_(x, attended, block.attn_out.weight)
        h = norm(x, block.norm2.weight, torch.bfloat16, offset_D=offset)
        up, down = block.mlp[0], block.mlp[2]
        h = up_gelu(h, up.weight, up.bias)
        add_product_(x, h, down.weight)
        offset = offsets_ND[i]
    return (x + offset).view(b, k, a.width)
