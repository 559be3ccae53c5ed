r"""Drawing tokens: `race` and `philox` of `relaylm.core.noise` on any device, by Triton kernels on CUDA.

The kernels use the noise of `noise.token_noise`, word for word. Scores may differ from the plain race in the last bits
of a logarithm: fewer than one token in 10^4 differs.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from relaylm.core import noise
from relaylm.kernels import available, early, tl, triton

MANY_PROGRAMS = 1 << 15  # enough to fill a large GPU several times over

if triton is not None:
    # Triton makes an integer argument of value 1 (a seed, say) a compile-time constant, which has no `.to`; hence
    # do_not_specialize below.

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
        """As noise._exponential; -log1p(-v) by its series where v is so small that 1 - v would lose it."""
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

    @triton.jit
    def _key(k0, k1, n, OWN: tl.constexpr):
        """The words of a seed: one for all places, or where they stand for each of them."""
        if OWN:
            k0 = tl.load(k0 + n)
            k1 = tl.load(k1 + n)
        return k0.to(tl.uint32), k1.to(tl.uint32)

    @triton.jit
    def _wait(EARLY: tl.constexpr):
        """For the kernel ahead, where this one began before its end; and let the next one begin."""
        if EARLY:
            tl.extra.cuda.gdc_wait()
            tl.extra.cuda.gdc_launch_dependents()

    @triton.jit
    def _largest_kernel(logits, out, vocab, stride, SIZE: tl.constexpr, EARLY: tl.constexpr):
        """The largest logit of each tile; NaN if one is."""
        _wait(EARLY)
        n, tile = tl.program_id(0), tl.program_id(1)
        token = tile * SIZE + tl.arange(0, SIZE)
        value = tl.load(logits + n.to(tl.int64) * stride + token, mask=token < vocab, other=-float("inf"))
        value = value.to(tl.float32)
        spoilt = tl.max((value != value).to(tl.int32), axis=0) > 0
        tl.store(out + n * tl.num_programs(1) + tile, tl.where(spoilt, float("nan"), tl.max(value, axis=0)))

    @triton.jit
    def _shift(largest, n, count, SIZE: tl.constexpr):
        """What is taken off a place's logits: the largest, where the noise would be rounded beside it."""
        which = tl.arange(0, SIZE)
        top = tl.max(tl.load(largest + n * count + which, mask=which < count, other=-float("inf")), axis=0)
        return tl.where((tl.abs(top) > 1048576.0) & (tl.abs(top) < float("inf")), top, 0.0)

    @triton.jit(do_not_specialize=["k0", "k1"])
    def _ceilings_kernel(
        logits, largest, row_n, position_n, draw_n, ceiling_out, floor_out, vocab, stride, blocks, count, k0, k1,
        COUNT: tl.constexpr, TILE: tl.constexpr, OWN: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        """For each block the best score it could hold, (its largest logit) - log(its minimum), and for each tile the
        best score it surely holds, that of the tokens the minima fall on."""
        _wait(EARLY)
        n = tl.program_id(0)
        tile = tl.program_id(1)
        row, position, draw = tl.load(row_n + n), tl.load(position_n + n), tl.load(draw_n + n)
        key0, key1 = _key(k0, k1, n, OWN)
        base = logits + n.to(tl.int64) * stride
        block = tile * TILE + tl.arange(0, TILE)
        token = block[:, None] * 64 + tl.arange(0, 64)[None, :]
        allowed = token < vocab
        shift = _shift(largest, n, count, COUNT)
        highest = tl.max(tl.load(base + token, mask=allowed, other=-float("inf")).to(tl.float32) - shift, axis=1)
        minimum, slot = _block_minimum(block, position, row, draw, key0, key1)
        log_minimum = tl.log(minimum)
        ceiling = highest.to(tl.float64) - log_minimum
        # Kept in float32, rounded up: sometimes a block is opened in vain, but none is missed.
        rounded_up = tl.where(highest == -float("inf"), ceiling, ceiling + 1e-5 + tl.abs(ceiling) * 1e-6)
        tl.store(ceiling_out + n * blocks + block, rounded_up.to(tl.float32), mask=block < blocks)
        held = block * 64 + slot
        fits = held < vocab
        score = tl.load(base + held, mask=fits, other=-float("inf")).to(tl.float64) - shift - log_minimum
        tl.store(floor_out + n * tl.num_programs(1) + tile, tl.max(score, axis=0))

    @triton.jit(do_not_specialize=["k0", "k1"])
    def _open_kernel(
        logits, largest, row_n, position_n, draw_n, ceilings, floors, best_out, token_out, vocab, stride, blocks, count,
        k0, k1, COUNT: tl.constexpr, TILE: tl.constexpr, OWN: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        """Race in full the tiles of blocks that could hold the winner: a program takes every num_programs-th tile."""
        _wait(EARLY)
        n = tl.program_id(0)
        which = tl.arange(0, COUNT)
        floor = tl.max(tl.load(floors + n * count + which, mask=which < count, other=-float("inf")), axis=0)
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
                value -= _shift(largest, n, count, COUNT)
                key0, key1 = _key(k0, k1, n, OWN)
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
    def _winner_kernel(
        best, token, largest, token_out, largest_out, spoilt_out, vocab, parts, count,
        PARTS: tl.constexpr, COUNT: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        """The token of the best program of each place, and the largest of its logits. Among NaNs nobody wins, and any
        token will do."""
        _wait(EARLY)
        n = tl.program_id(0)
        part, tile = tl.arange(0, PARTS), tl.arange(0, COUNT)
        _, first = tl.max(
            tl.load(best + n * parts + part, mask=part < parts, other=-float("inf")), 0, return_indices=True
        )
        tl.store(token_out + n, tl.minimum(tl.load(token + n * parts + first), vocab - 1).to(tl.int64))
        top = tl.load(largest + n * count + tile, mask=tile < count, other=-float("inf"))
        spoilt = tl.max((top != top).to(tl.int32), axis=0) > 0
        top = tl.where(spoilt, float("nan"), tl.max(top, axis=0))
        tl.store(largest_out + n, top)
        tl.store(spoilt_out, 1, mask=(top != top) | (tl.abs(top) == float("inf")))


def philox(counter: Sequence[Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """The four words of `noise.philox`; on CUDA by one kernel, where the plain arithmetic takes a hundred."""
    if not (available() and any(word.is_cuda for word in counter)):
        return noise.philox(counter, key)
    words = [word.contiguous() for word in torch.broadcast_tensors(*counter)]
    out = torch.empty((4, *words[0].shape), dtype=torch.int64, device=words[0].device)
    total = words[0].numel()
    _philox_kernel[(triton.cdiv(total, 256),)](*words, out, total, *key, SIZE=256)
    return out.unbind(0)


def race(
    logits_NV: Tensor, seed: noise.Seed, row_N: Tensor, position_N: Tensor, draw_N: Tensor, spoilt: Tensor
) -> tuple[Tensor, Tensor]:
    """`noise.race_and_largest`, by the kernel where there is one, and on the CPU for a device without float64."""
    if available() and logits_NV.is_cuda:
        return race_kernel(logits_NV, seed, row_N, position_N, draw_N, spoilt)
    if logits_NV.device.type != "mps":
        return noise.race_and_largest(logits_NV, seed, row_N, position_N, draw_N, spoilt)
    key = seed if isinstance(seed, int) else (seed[0].cpu(), seed[1].cpu())
    flag = spoilt.cpu()
    found = noise.race_and_largest(logits_NV.cpu(), key, row_N.cpu(), position_N.cpu(), draw_N.cpu(), flag)
    spoilt.copy_(flag)
    return found[0].to(logits_NV.device), found[1].to(logits_NV.device)


def race_kernel(
    logits_NV: Tensor, seed: noise.Seed, row_N: Tensor, position_N: Tensor, draw_N: Tensor, spoilt: Tensor
) -> tuple[Tensor, Tensor]:
    """`race` on CUDA: one token for each row of logits."""
    n, vocab = logits_NV.shape
    logits_NV = logits_NV if logits_NV.stride(1) == 1 else logits_NV.contiguous()
    blocks = triton.cdiv(vocab, 64)
    wide, narrow = min(64, triton.next_power_of_2(blocks)), min(2, triton.next_power_of_2(blocks))
    count, tiles = triton.cdiv(blocks, wide), triton.cdiv(blocks, narrow)
    parts = max(1, min(tiles, MANY_PROGRAMS // max(1, n)))  # few tiles are opened: one program for each costs more
    device, own = logits_NV.device, not isinstance(seed, int)
    key = (seed & 0xFFFFFFFF, seed >> 32) if isinstance(seed, int) else tuple(word_N.contiguous() for word_N in seed)
    tile_largest, largest_N = (torch.empty(size, dtype=torch.float32, device=device) for size in ((n, count), n))
    ceiling = torch.empty((n, blocks), dtype=torch.float32, device=device)
    floor = torch.empty((n, count), dtype=torch.float64, device=device)
    best = torch.empty((n, parts), dtype=torch.float64, device=device)
    token, token_N = (
        torch.empty(size, dtype=kind, device=device) for size, kind in (((n, parts), torch.int32), (n, torch.int64))
    )
    places = [x_N.contiguous() for x_N in (row_N, position_N, draw_N)]
    stride, size, ahead = logits_NV.stride(0), triton.next_power_of_2(count), early(logits_NV)
    _largest_kernel[(n, count)](logits_NV, tile_largest, vocab, stride, SIZE=64 * wide, num_warps=4, **ahead)
    _ceilings_kernel[(n, count)](
        logits_NV, tile_largest, *places, ceiling, floor, vocab, stride, blocks, count, *key,
        COUNT=size, TILE=wide, OWN=own, num_warps=4, **ahead,
    )  # fmt: skip
    _open_kernel[(n, parts)](
        logits_NV, tile_largest, *places, ceiling, floor, best, token, vocab, stride, blocks, count, *key,
        COUNT=size, TILE=narrow, OWN=own, num_warps=1, **ahead,
    )  # fmt: skip
    _winner_kernel[(n,)](
        best, token, tile_largest, token_N, largest_N, spoilt, vocab, parts, count,
        PARTS=triton.next_power_of_2(parts), COUNT=size, num_warps=1, **ahead,
    )  # fmt: skip
    return token_N, largest_N
