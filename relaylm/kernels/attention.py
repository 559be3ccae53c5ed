r"""Attention over short rows, forward and backward, in Triton, for sampling and training.

Queries, keys and values come in one matrix (B, L, 3D), queries and keys rotated; gradients leave un-rotated and packed
alike. Up to a few hundred positions this is faster than PyTorch's attention.

The forward pass keeps log2 of each query's normaliser, from which the backward pass recomputes the probabilities P:

    dV = P' dO,  dS = P (dO V' - rowsum(dO O)),  dK = dS' Q,  dQ = dS K.

`_whole_row_gradient_kernel` computes P once; `_attention_gradient_kernel` twice, for a block of keys over all queries,
and for a block of queries over all keys. Neither uses atomics: every sum has a fixed order.

Shapes: B rows, L positions, M = B L, D width, X = 3 D.
"""

from __future__ import annotations

import torch
from torch import Tensor

from relaylm.kernels import early, gemm, tl, triton

# Set by measurement on an H200 at 65,536 tokens, 4 heads of 64.
OWN_ATTENTION_UP_TO = 256  # positions; in longer rows PyTorch's attention is faster
ATTENTION = {"BLOCK_Q": 64, "BLOCK_K": 64, "num_warps": 4, "num_stages": 3}
FEW_PROGRAMS = 256  # up to so many, about two for each multiprocessor, it is faster in longer rows, too
ATTENTION_GRADIENT = {"BLOCK": 64, "STEP": 32, "num_warps": 4, "num_stages": 2, "maxnreg": 128}
WHOLE_ROW = {"STEP": 64, "num_warps": 8, "num_stages": 1}
WHOLE_ROW_POSITIONS, WHOLE_ROW_ELEMENTS = 256, 256 * 64  # of a head of one row: the most that one program holds
WHOLE_ROW_BYTES = 140_000  # of shared memory for this: an A100 has them, a desktop card does not
LOG2_E = 1.4426950408889634

if triton is not None:

    @triton.jit
    def _rows_of(matrix, position, STRIDE: tl.constexpr, LENGTH: tl.constexpr, BLOCK: tl.constexpr):
        """Rows of a matrix given as pointers to its first row (1, d); zeros beyond LENGTH."""
        if LENGTH % BLOCK == 0:
            return tl.load(matrix + position[:, None] * STRIDE)
        return tl.load(matrix + position[:, None] * STRIDE, mask=(position < LENGTH)[:, None], other=0.0)

    @triton.jit
    def exp2(x):
        """2^x, 0 where that is no normal number: `tl.exp2` takes four more instructions, to get those right too."""
        return tl.inline_asm_elementwise(
            "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )

    @triton.jit
    def _attention_kernel(
        qkv, out, normaliser, scale, LENGTH: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr,
        CAUSAL: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        """Attention of a block of queries of one head, scores in powers of two (scale = 1 / (sqrt(d) ln 2))."""
        if EARLY:
            tl.extra.cuda.gdc_wait()
        blocks: tl.constexpr = (LENGTH + BLOCK_Q - 1) // BLOCK_Q
        first, which = tl.program_id(0) % blocks * BLOCK_Q, tl.program_id(0) // blocks
        row, head = which // HEADS, which % HEADS
        query, column = first + tl.arange(0, BLOCK_Q), tl.arange(0, DIM)
        width: tl.constexpr = HEADS * DIM
        base = qkv + row.to(tl.int64) * (LENGTH * 3 * width) + head * DIM + column[None, :]
        q = _rows_of(base, query, 3 * width, LENGTH, BLOCK_Q)
        largest = tl.full((BLOCK_Q,), -float("inf"), tl.float32)
        total = tl.zeros((BLOCK_Q,), tl.float32)
        result = tl.zeros((BLOCK_Q, DIM), tl.float32)
        end = tl.minimum(first + BLOCK_Q, LENGTH) if CAUSAL else LENGTH
        for start in range(0, end, BLOCK_K):
            key = start + tl.arange(0, BLOCK_K)
            k = _rows_of(base + width, key, 3 * width, LENGTH, BLOCK_K)
            v = _rows_of(base + 2 * width, key, 3 * width, LENGTH, BLOCK_K)
            score = tl.dot(q, tl.trans(k)) * scale
            if LENGTH % BLOCK_K != 0:
                score = tl.where((key < LENGTH)[None, :], score, -float("inf"))
            if CAUSAL:
                score = tl.where(key[None, :] <= query[:, None], score, -float("inf"))
            now = tl.maximum(largest, tl.max(score, axis=1))
            p = exp2(score - now[:, None])
            shrink = exp2(largest - now)
            total = total * shrink + tl.sum(p, axis=1)
            result = tl.dot(p.to(v.dtype), v, result * shrink[:, None])
            largest = now
        at = (row.to(tl.int64) * LENGTH + query)[:, None] * width + head * DIM + column[None, :]
        tl.store(out + at, (result / total[:, None]).to(out.dtype.element_ty), mask=(query < LENGTH)[:, None])
        tl.store(normaliser + which * LENGTH + query, largest + tl.log2(total), mask=query < LENGTH)

    @triton.jit
    def _store_unrotated(to, gradient, cos, sin, position, LENGTH: tl.constexpr, DIM: tl.constexpr, N: tl.constexpr):
        """The gradient (N, DIM) of rotated queries or keys, turned back, to rows `to` (N, 1)."""
        half: tl.constexpr = DIM // 2
        pair = tl.arange(0, half)
        inside = (position < LENGTH)[:, None] & (pair >= 0)[None, :]
        c = tl.load(cos + position[:, None] * half + pair[None, :], mask=inside, other=0.0)
        s = tl.load(sin + position[:, None] * half + pair[None, :], mask=inside, other=0.0)
        first, second = tl.split(tl.permute(tl.reshape(gradient, (N, 2, half)), (0, 2, 1)))
        tl.store(to + pair[None, :], (first * c + second * s).to(to.dtype.element_ty), mask=inside)
        tl.store(to + half + pair[None, :], (second * c - first * s).to(to.dtype.element_ty), mask=inside)

    @triton.jit
    def _attention_gradient_kernel(
        qkv, out, normaliser, dout, dqkv, cos, sin, scale, unit, LENGTH: tl.constexpr, HEADS: tl.constexpr,
        DIM: tl.constexpr, CAUSAL: tl.constexpr, BLOCK: tl.constexpr, STEP: tl.constexpr,
    ):  # fmt: skip
        """dk and dv of a block of keys of one head, or (second half of its programs) dq of a block of queries. Queries
        beyond the row have an infinite normaliser, so probability 0; keys beyond it are zeros, their gradient is not
        stored, and dq sees a probability of 0 (2^-normaliser may be infinite). `unit` is 1 / sqrt(d)."""
        blocks: tl.constexpr = (LENGTH + BLOCK - 1) // BLOCK
        part, which = tl.program_id(0) % (2 * blocks), tl.program_id(0) // (2 * blocks)
        first = part % blocks * BLOCK
        row, head = which // HEADS, which % HEADS
        own, column = first + tl.arange(0, BLOCK), tl.arange(0, DIM)
        width: tl.constexpr = HEADS * DIM
        base = qkv + row.to(tl.int64) * (LENGTH * 3 * width) + head * DIM + column[None, :]
        out += row.to(tl.int64) * (LENGTH * width) + head * DIM
        dout += row.to(tl.int64) * (LENGTH * width) + head * DIM
        normaliser += which * LENGTH
        to = dqkv + row.to(tl.int64) * (LENGTH * 3 * width) + own[:, None] * (3 * width) + head * DIM
        if part < blocks:
            own_k = _rows_of(base + width, own, 3 * width, LENGTH, BLOCK)
            own_v = _rows_of(base + 2 * width, own, 3 * width, LENGTH, BLOCK)
            dk = tl.zeros((BLOCK, DIM), tl.float32)
            dv = tl.zeros((BLOCK, DIM), tl.float32)
            begin = first // STEP * STEP if CAUSAL else 0
            for start in range(begin, LENGTH, STEP):
                query = start + tl.arange(0, STEP)
                q = _rows_of(base, query, 3 * width, LENGTH, STEP)
                do = _rows_of(dout + column[None, :], query, width, LENGTH, STEP)
                o = _rows_of(out + column[None, :], query, width, LENGTH, STEP)
                log_sum = tl.load(normaliser + query, mask=query < LENGTH, other=float("inf"))
                inner = tl.sum(do.to(tl.float32) * o.to(tl.float32), axis=1)
                p = exp2(tl.dot(own_k, tl.trans(q)) * scale - log_sum[None, :])
                if CAUSAL:
                    p = tl.where(own[:, None] <= query[None, :], p, 0.0)
                dv = tl.dot(p.to(do.dtype), do, dv)
                ds = p * (tl.dot(own_v, tl.trans(do)) - inner[None, :])
                dk = tl.dot(ds.to(q.dtype), q, dk)
            _store_unrotated(to + width, dk * unit, cos, sin, own, LENGTH, DIM, BLOCK)
            tl.store(to + 2 * width + column[None, :], dv.to(dqkv.dtype.element_ty), mask=(own < LENGTH)[:, None])
        else:
            own_q = _rows_of(base, own, 3 * width, LENGTH, BLOCK)
            own_do = _rows_of(dout + column[None, :], own, width, LENGTH, BLOCK)
            own_o = _rows_of(out + column[None, :], own, width, LENGTH, BLOCK)
            own_log_sum = tl.load(normaliser + own, mask=own < LENGTH, other=float("inf"))
            own_inner = tl.sum(own_do.to(tl.float32) * own_o.to(tl.float32), axis=1)
            dq = tl.zeros((BLOCK, DIM), tl.float32)
            end = tl.minimum(first + BLOCK, LENGTH) if CAUSAL else LENGTH
            for start in range(0, end, STEP):
                key = start + tl.arange(0, STEP)
                k = _rows_of(base + width, key, 3 * width, LENGTH, STEP)
                v = _rows_of(base + 2 * width, key, 3 * width, LENGTH, STEP)
                p = exp2(tl.dot(own_q, tl.trans(k)) * scale - own_log_sum[:, None])
                if LENGTH % STEP != 0:
                    p = tl.where((key < LENGTH)[None, :], p, 0.0)
                if CAUSAL:
                    p = tl.where(key[None, :] <= own[:, None], p, 0.0)
                ds = p * (tl.dot(own_do, tl.trans(v)) - own_inner[:, None])
                dq = tl.dot(ds.to(k.dtype), k, dq)
            _store_unrotated(to, dq * unit, cos, sin, own, LENGTH, DIM, BLOCK)

    @triton.jit
    def _whole_row_gradient_kernel(
        qkv, out, normaliser, dout, dqkv, cos, sin, scale, unit, LENGTH: tl.constexpr, HEADS: tl.constexpr,
        DIM: tl.constexpr, CAUSAL: tl.constexpr, SIZE: tl.constexpr, STEP: tl.constexpr,
    ):  # fmt: skip
        """The same for one head of a row of at most SIZE positions, by one program: it keeps all queries and their dq
        and loops over the keys, so that scores are computed once, with five products instead of seven."""
        row, head = tl.program_id(0) // HEADS, tl.program_id(0) % HEADS
        query, column = tl.arange(0, SIZE), tl.arange(0, DIM)
        width: tl.constexpr = HEADS * DIM
        base = qkv + row.to(tl.int64) * (LENGTH * 3 * width) + head * DIM + column[None, :]
        out += row.to(tl.int64) * (LENGTH * width) + head * DIM
        dout += row.to(tl.int64) * (LENGTH * width) + head * DIM
        to = dqkv + row.to(tl.int64) * (LENGTH * 3 * width) + head * DIM
        do = _rows_of(dout + column[None, :], query, width, LENGTH, SIZE)
        o = _rows_of(out + column[None, :], query, width, LENGTH, SIZE)
        inner = tl.sum(do.to(tl.float32) * o.to(tl.float32), axis=1)
        log_sum = tl.load(normaliser + tl.program_id(0) * LENGTH + query, mask=query < LENGTH, other=float("inf"))
        q = _rows_of(base, query, 3 * width, LENGTH, SIZE)
        dq = tl.zeros((SIZE, DIM), tl.float32)
        for start in range(0, LENGTH, STEP):
            key = start + tl.arange(0, STEP)
            k = _rows_of(base + width, key, 3 * width, LENGTH, STEP)
            v = _rows_of(base + 2 * width, key, 3 * width, LENGTH, STEP)
            p = exp2(tl.dot(q, tl.trans(k)) * scale - log_sum[:, None])
            if LENGTH % STEP != 0:
                p = tl.where((key < LENGTH)[None, :], p, 0.0)
            if CAUSAL:
                p = tl.where(key[None, :] <= query[:, None], p, 0.0)
            ds = (p * (tl.dot(do, tl.trans(v)) - inner[:, None])).to(q.dtype)
            dv = tl.dot(tl.trans(p.to(q.dtype)), do)
            dk = tl.dot(tl.trans(ds), q)
            dq = tl.dot(ds, k, dq)
            rows = to + key[:, None] * (3 * width)
            _store_unrotated(rows + width, dk * unit, cos, sin, key, LENGTH, DIM, STEP)
            tl.store(rows + 2 * width + column[None, :], dv.to(dqkv.dtype.element_ty), mask=(key < LENGTH)[:, None])
        _store_unrotated(to + query[:, None] * (3 * width), dq * unit, cos, sin, query, LENGTH, DIM, SIZE)


def are_few(b: int, length: int, heads: int) -> bool:
    """Whether these rows are so few that this is faster than PyTorch's attention, however long they are."""
    return b * heads * triton.cdiv(length, ATTENTION["BLOCK_Q"]) <= FEW_PROGRAMS


def attention(qkv_BLX: Tensor, heads: int, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention (M, D) of rotated queries and keys, and log2 of the normalisers (B heads, L)."""
    b, length, width = qkv_BLX.shape[0], qkv_BLX.shape[1], qkv_BLX.shape[2] // 3
    dim = width // heads
    out = torch.empty((b * length, width), dtype=qkv_BLX.dtype, device=qkv_BLX.device)
    normaliser = torch.empty((b * heads, length), dtype=torch.float32, device=qkv_BLX.device)
    options = ATTENTION | ({"BLOCK_K": 128} if length > OWN_ATTENTION_UP_TO else {})
    _attention_kernel[(triton.cdiv(length, ATTENTION["BLOCK_Q"]) * b * heads,)](
        qkv_BLX, out, normaliser, dim**-0.5 * LOG2_E,
        LENGTH=length, HEADS=heads, DIM=dim, CAUSAL=causal, **options, **early(qkv_BLX),
    )  # fmt: skip
    return out, normaliser


def fits_whole_row(qkv_BLX: Tensor, heads: int) -> bool:
    """Whether one program can hold a whole row of one head, for `attention_gradient`."""
    size = triton.next_power_of_2(qkv_BLX.shape[1])
    fits = size <= WHOLE_ROW_POSITIONS and size * qkv_BLX.shape[2] // (3 * heads) <= WHOLE_ROW_ELEMENTS
    return fits and gemm.shared_memory(qkv_BLX.device) >= WHOLE_ROW_BYTES


def attention_gradient(
    qkv_BLX: Tensor, out_MD: Tensor, normaliser: Tensor, dout_MD: Tensor, cos: Tensor, sin: Tensor, heads: int,
    causal: bool, whole_row: bool | None = None,
) -> Tensor:  # fmt: skip
    """Gradient (M, 3D) of the matrix before rotation, by one program for a whole row of a head where that fits."""
    b, length, width = qkv_BLX.shape[0], qkv_BLX.shape[1], qkv_BLX.shape[2] // 3
    dim, size = width // heads, max(16, triton.next_power_of_2(length))
    dqkv = torch.empty((b * length, 3 * width), dtype=qkv_BLX.dtype, device=qkv_BLX.device)
    if fits_whole_row(qkv_BLX, heads) if whole_row is None else whole_row:
        kernel, programs = _whole_row_gradient_kernel, b * heads
        options = {**WHOLE_ROW, "SIZE": size, "STEP": min(WHOLE_ROW["STEP"], size)}
    else:
        kernel, options = _attention_gradient_kernel, ATTENTION_GRADIENT
        programs = 2 * triton.cdiv(length, ATTENTION_GRADIENT["BLOCK"]) * b * heads
    kernel[(programs,)](
        qkv_BLX, out_MD, normaliser, dout_MD, dqkv, cos, sin, dim**-0.5 * LOG2_E, dim**-0.5,
        LENGTH=length, HEADS=heads, DIM=dim, CAUSAL=causal, **options,
    )  # fmt: skip
    return dqkv
