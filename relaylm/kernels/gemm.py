r"""Matrix products with an operation fused to each tile, in Triton for Hopper. Elsewhere PyTorch computes them.

A fixed number of programs goes from tile to tile. The bulk copy engine loads and stores tiles, so that the fused
operation on one tile overlaps the loading of the next. cuBLAS's own epilogues do not overlap, and a rotation, which
they lack, would cost a pass over memory.

- `twice_gelu`: 2 gelu(h W^T + b), for `add_mlp_`;
- `rotated`: queries, keys and values, h W^T + b, with queries and keys rotated before they are stored;
- for training `rotated_heads`, the same of weights in their usual order; `gelu_and_slope`, gelu(h W^T + b) with its
  slope; `times_slope`, dy W times that slope with its sums over rows. These products are narrow, and what is done to a
  tile takes almost as long, so two programs share a multiprocessor, and one computes products meanwhile.

Three more use cuBLAS, which was faster on an H200 (`add_product_`) or needs no fusion (`head`, `weight_gradient`).

Shapes: M rows, D width, X columns, N rows of the head, V vocabulary.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from relaylm.kernels import early, tl, triton

try:
    from triton.tools.tensor_descriptor import TensorDescriptor
except ImportError:  # no Triton, or one that is too old
    TensorDescriptor = None

SHARED_MEMORY = 232_448  # bytes a program may have on Hopper, nearly all used by the stages
TILE_M, TILE_N, TILE_K = 128, 256, 64  # a product is computed in tiles of m x n, in steps of k
OPTIONS = {"M": TILE_M, "N": TILE_N, "K": TILE_K, "GROUP": 8, "num_warps": 8, "num_stages": 4}
FEW_PLACES, FEW_TOKENS = 64, 64  # the most places that `few_logits` takes; tokens of one of its programs
# Of the products in training, by calculation: two programs fit a multiprocessor in registers and shared memory.
TRAINED = {"M": 128, "N": 128, "K": 64, "GROUP": 8, "num_warps": 8, "maxnreg": 128}
UP = {**TRAINED, "FLAT": True, "num_stages": 3}
HEADS = {**TRAINED, "FLAT": False, "num_stages": 3}
DOWN = {**TRAINED, "FLAT": True, "num_stages": 2}
WIDEST_HEAD = 64  # the angles of wider heads do not fit into the shared memory of `rotated`


if triton is not None:

    @triton.jit
    def _tanh(x):
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)

    @triton.jit
    def _place(tile, rows, tiles_n, M: tl.constexpr, GROUP: tl.constexpr):
        """A tile's first row and the number of its column tile, in groups of rows, whose tiles share cached data."""
        first = tile // (GROUP * tiles_n) * GROUP
        size = tl.minimum(tl.cdiv(rows, M) - first, GROUP)
        return (first + tile % (GROUP * tiles_n) % size) * M, tile % (GROUP * tiles_n) // size

    @triton.jit
    def _halves(x, M: tl.constexpr, N: tl.constexpr):
        """The left and the right half of a tile's columns; stored apart they take less shared memory."""
        return tl.split(tl.permute(tl.reshape(x, (M, 2, N // 2)), (0, 2, 1)))

    @triton.jit
    def _twice_gelu_kernel(
        h_desc, weight_desc, bias, out_desc, rows, tiles_n, width,
        M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
    ):  # fmt: skip
        for tile in tl.range(tl.program_id(0), tl.cdiv(rows, M) * tiles_n, PROGRAMS, flatten=True):
            at_m, tile_n = _place(tile, rows, tiles_n, M, GROUP)
            at_n = tile_n * N
            product = tl.zeros((M, N), dtype=tl.float32)
            for k in range(tl.cdiv(width, K)):
                part = h_desc.load([at_m, k * K])
                product = tl.dot(part, weight_desc.load([at_n, k * K]).T, product)
            x = product + tl.load(bias + at_n + tl.arange(0, N)).to(tl.float32)[None, :]
            # No product runs meanwhile, so each operation counts: twice the GELU takes one less, and with sqrt(2/pi)
            # and 0.044715 multiplied out every sum but the bias's goes into an fma.
            x = x + x * _tanh(x * (0.7978845608028654 + 0.035677408136300125 * (x * x)))
            left, right = _halves(x, M, N)
            out_desc.store([at_m, at_n], left.to(out_desc.dtype))
            out_desc.store([at_m, at_n + N // 2], right.to(out_desc.dtype))

    @triton.jit
    def _rotated_kernel(
        h_desc, weight_desc, bias, cos, sin, out_desc, rows, tiles_n, rotated_n, width, length,
        HAS_BIAS: tl.constexpr, HALF: tl.constexpr,
        M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, PROGRAMS: tl.constexpr,
    ):  # fmt: skip
        """The weight is `grouped`: a tile's left half holds its heads' first halves, its right half the second ones.
        The first `rotated_n` column tiles are rotated."""
        HEADS: tl.constexpr = N // (2 * HALF)
        for tile in tl.range(tl.program_id(0), tl.cdiv(rows, M) * tiles_n, PROGRAMS, flatten=True):
            at_m, tile_n = _place(tile, rows, tiles_n, M, GROUP)
            at_n = tile_n * N
            product = tl.zeros((M, N), dtype=tl.float32)
            for k in range(tl.cdiv(width, K)):
                part = h_desc.load([at_m, k * K])
                product = tl.dot(part, weight_desc.load([at_n, k * K]).T, product)
            if HAS_BIAS:
                product += tl.load(bias + at_n + tl.arange(0, N)).to(tl.float32)[None, :]
            angle = ((at_m + tl.arange(0, M)) % length * HALF)[:, None] + tl.arange(0, HALF)[None, :]
            turns = (angle >= 0) & (tile_n < rotated_n)
            c = tl.load(cos + angle, mask=turns, other=1.0)[:, None, :]
            s = tl.load(sin + angle, mask=turns, other=0.0)[:, None, :]
            left, right = _halves(product, M, N)
            first = tl.reshape(left, (M, HEADS, HALF))
            second = tl.reshape(right, (M, HEADS, HALF))
            turned = tl.join((first * c - second * s).to(out_desc.dtype), (second * c + first * s).to(out_desc.dtype))
            left, right = _halves(tl.reshape(tl.permute(turned, (0, 1, 3, 2)), (M, N)), M, N)
            x0, x1 = _halves(left, M, N // 2)  # in quarters, to leave shared memory for the angles
            x2, x3 = _halves(right, M, N // 2)
            out_desc.store([at_m, at_n], x0)
            out_desc.store([at_m, at_n + N // 4], x1)
            out_desc.store([at_m, at_n + N // 2], x2)
            out_desc.store([at_m, at_n + 3 * N // 4], x3)

    @triton.jit
    def _gelu_and_slope_kernel(
        h_desc, weight_desc, bias, gelu_desc, slope_desc, rows, tiles_n, width,
        M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, FLAT: tl.constexpr,
    ):  # fmt: skip
        for tile in tl.range(tl.program_id(0), tl.cdiv(rows, M) * tiles_n, tl.num_programs(0), flatten=FLAT):
            at_m, tile_n = _place(tile, rows, tiles_n, M, GROUP)
            at_n = tile_n * N
            product = tl.zeros((M, N), dtype=tl.float32)
            for k in range(tl.cdiv(width, K)):
                part = h_desc.load([at_m, k * K])
                product = tl.dot(part, weight_desc.load([at_n, k * K]).T, product)
            x = product + tl.load(bias + at_n + tl.arange(0, N))[None, :]
            # With s = (1 + tanh u) / 2 the GELU is x s, and its slope s + x s (1 - s) 2u'.
            square = x * x
            share = 0.5 + 0.5 * _tanh(x * (0.7978845608028654 + 0.035677408136300125 * square))
            gelu = x * share
            slope = share + gelu * (1.5957691216057308 + 0.2140644488178007 * square) * (1.0 - share)
            left, right = _halves(gelu.to(gelu_desc.dtype), M, N)
            gelu_desc.store([at_m, at_n], left)
            gelu_desc.store([at_m, at_n + N // 2], right)
            left, right = _halves(slope.to(slope_desc.dtype), M, N)
            slope_desc.store([at_m, at_n], left)
            slope_desc.store([at_m, at_n + N // 2], right)

    @triton.jit
    def _rotated_heads_kernel(
        h_desc, weight_desc, cos, sin, out_desc, rows, tiles_n, rotated_n, width, length, HALF: tl.constexpr,
        M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, FLAT: tl.constexpr,
    ):  # fmt: skip
        """As `_rotated_kernel`, of a weight in the usual order."""
        HEADS: tl.constexpr = N // (2 * HALF)
        for tile in tl.range(tl.program_id(0), tl.cdiv(rows, M) * tiles_n, tl.num_programs(0), flatten=FLAT):
            at_m, tile_n = _place(tile, rows, tiles_n, M, GROUP)
            at_n = tile_n * N
            product = tl.zeros((M, N), dtype=tl.float32)
            for k in range(tl.cdiv(width, K)):
                part = h_desc.load([at_m, k * K])
                product = tl.dot(part, weight_desc.load([at_n, k * K]).T, product)
            angle = ((at_m + tl.arange(0, M)) % length * HALF)[:, None] + tl.arange(0, HALF)[None, :]
            turns = (angle >= 0) & (tile_n < rotated_n)
            c = tl.load(cos + angle, mask=turns, other=1.0)[:, None, :]
            s = tl.load(sin + angle, mask=turns, other=0.0)[:, None, :]
            first, second = tl.split(tl.permute(tl.reshape(product, (M, HEADS, 2, HALF)), (0, 1, 3, 2)))
            turned = tl.join((first * c - second * s).to(out_desc.dtype), (second * c + first * s).to(out_desc.dtype))
            left, right = _halves(tl.reshape(tl.permute(turned, (0, 1, 3, 2)), (M, N)), M, N)
            out_desc.store([at_m, at_n], left)
            out_desc.store([at_m, at_n + N // 2], right)

    @triton.jit
    def _prefetch(pointers):
        """Asks for these lines of memory to come into the cache, and does not wait."""
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1
        )

    @triton.jit
    def _times_slope_kernel(
        dy_desc, weight_desc, slope, slope_desc, out_desc, sums, rows, tiles_n, width,
        M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, GROUP: tl.constexpr, FLAT: tl.constexpr,
    ):  # fmt: skip
        """Sums over the rows of each tile: (tiles of rows, columns). Rows beyond the last are zeros."""
        LINE: tl.constexpr = 64  # elements of a line of memory
        for tile in tl.range(tl.program_id(0), tl.cdiv(rows, M) * tiles_n, tl.num_programs(0), flatten=FLAT):
            at_m, tile_n = _place(tile, rows, tiles_n, M, GROUP)
            at_n = tile_n * N
            row = tl.minimum(at_m + tl.arange(0, M), rows - 1).to(tl.int64)[:, None]
            _prefetch(slope + row * (tiles_n * N) + at_n + LINE * tl.arange(0, N // LINE)[None, :])
            product = tl.zeros((M, N), dtype=tl.float32)
            for k in range(tl.cdiv(width, K)):
                part = dy_desc.load([at_m, k * K])
                product = tl.dot(part, weight_desc.load([k * K, at_n]), product)
            product *= slope_desc.load([at_m, at_n]).to(tl.float32)
            tl.store(sums + (at_m // M) * (tiles_n * N) + at_n + tl.arange(0, N), tl.sum(product, axis=0))
            left, right = _halves(product.to(out_desc.dtype), M, N)
            out_desc.store([at_m, at_n], left)
            out_desc.store([at_m, at_n + N // 2], right)

    @triton.jit
    def _few_logits_kernel(
        h_desc, weight_desc, bias, out, few, vocab, width,
        M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, EARLY: tl.constexpr,
    ):  # fmt: skip
        """Logits of M tokens at N places: the float32 weights, which are all there is to read, pass once."""
        token, place = tl.program_id(0) * M + tl.arange(0, M), tl.arange(0, N)
        added = tl.load(bias + token, mask=token < vocab, other=0.0)
        if EARLY:
            tl.extra.cuda.gdc_wait()
        sum = tl.zeros((M, N), dtype=tl.float32)
        for k in range(0, width, K):
            weight, h_high = weight_desc.load([tl.program_id(0) * M, k]), h_desc.load([0, k]).T
            high = weight.to(h_high.dtype)
            sum = tl.dot(high, h_high, sum)
            sum = tl.dot(high, h_desc.load([N, k]).T, sum)
            sum = tl.dot((weight - high.to(tl.float32)).to(h_high.dtype), h_high, sum)
        inside = (place < few)[None, :] & (token < vocab)[:, None]
        tl.store(out + place[None, :] * vocab + token[:, None], sum + added[:, None], mask=inside)


def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have on this device; SHARED_MEMORY where it is not known."""
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return int(getattr(properties, "shared_memory_per_block_optin", SHARED_MEMORY))


def on_hopper(x: Tensor) -> bool:
    """Whether this is on a GPU with the copy engine and the shared memory that the kernels here were made for: Hopper
    or later, and no desktop card."""
    if TensorDescriptor is None or not x.is_cuda:
        return False
    return torch.cuda.get_device_capability(x.device)[0] >= 9 and shared_memory(x.device) >= SHARED_MEMORY


def _programs(h_MD: Tensor, columns: int) -> int:
    """The number of programs for a product with so many columns; 0 where the kernels do not apply."""
    if columns % TILE_N or h_MD.shape[1] % TILE_K or not on_hopper(h_MD):
        return 0
    return int(torch.cuda.get_device_properties(h_MD.device).multi_processor_count)


def fills(h_MD: Tensor, columns: int) -> bool:
    """Whether the tiles of a product are a wave at least. With fewer, multiprocessors stay idle, and cuBLAS, with its
    smaller tiles, is faster (one row of 1,024 on an H200)."""
    return triton.cdiv(len(h_MD), TILE_M) * (columns // TILE_N) >= _programs(h_MD, columns)


def _launch(
    kernel: Any, h_MD: Tensor, weight_XD: Tensor, out_MX: Tensor, part: int, *rest: Any, **options: Any
) -> None:
    """Run a kernel that stores tiles in pieces of `part` columns; `rest` and `options` are its own arguments."""
    (rows, width), columns = h_MD.shape, len(weight_XD)
    programs, number = _programs(h_MD, columns), triton.cdiv(rows, TILE_M) * (columns // TILE_N)
    kernel[(min(programs, number),)](
        TensorDescriptor.from_tensor(h_MD, [TILE_M, TILE_K]), TensorDescriptor.from_tensor(weight_XD, [TILE_N, TILE_K]),
        *rest, TensorDescriptor.from_tensor(out_MX, [TILE_M, part]), rows, columns // TILE_N,
        width=width, PROGRAMS=programs, **OPTIONS, **options,
    )  # fmt: skip


def add_mlp_(x_MD: Tensor, h_MD: Tensor, up_XD: Tensor, bias_X: Tensor, down_DX: Tensor) -> None:
    """x += gelu(h @ up^T + bias) @ down^T, the tanh form."""
    if _programs(h_MD, len(bias_X)) and fills(h_MD, len(bias_X)):
        add_product_(x_MD, twice_gelu(h_MD, up_XD, bias_X), down_DX, 0.5)
    else:
        add_product_(x_MD, torch._addmm_activation(bias_X, h_MD, up_XD.t(), use_gelu=True), down_DX)


def twice_gelu(h_MD: Tensor, weight_XD: Tensor, bias_X: Tensor) -> Tensor:
    """2 gelu(h @ weight^T + bias) in bfloat16. The kernel's tanh is accurate to 2^-11, a quarter of the error that
    rounding to bfloat16 adds."""
    out = torch.empty((len(h_MD), len(bias_X)), dtype=torch.bfloat16, device=h_MD.device)
    _launch(_twice_gelu_kernel, h_MD, weight_XD, out, TILE_N // 2, bias_X)
    return out


def fits_training(h_MD: Tensor, columns: int) -> bool:
    """Whether `gelu_and_slope`, `times_slope` and `rotated_heads` apply to products of this input and so many columns;
    the last of them needs heads of at most WIDEST_HEAD, too."""
    whole_tiles = columns % TRAINED["N"] == 0 and h_MD.shape[1] % TRAINED["K"] == 0
    return whole_tiles and h_MD.element_size() == 2 and on_hopper(h_MD)


def rotated_heads(h_MD: Tensor, weight_XD: Tensor, cos_LR: Tensor, sin_LR: Tensor, heads: int) -> Tensor:
    """h @ weight^T, its first `heads` heads rotated by position, for training: the weight in the usual order."""
    (rows, width), columns, half = h_MD.shape, len(weight_XD), cos_LR.shape[-1]
    m, n, k = HEADS["M"], HEADS["N"], HEADS["K"]
    out = torch.empty((rows, columns), dtype=h_MD.dtype, device=h_MD.device)
    _rotated_heads_kernel[_two_for_each(h_MD, triton.cdiv(rows, m) * (columns // n))](
        TensorDescriptor.from_tensor(h_MD, [m, k]), TensorDescriptor.from_tensor(weight_XD, [n, k]), cos_LR, sin_LR,
        TensorDescriptor.from_tensor(out, [m, n // 2]), rows, columns // n, heads * 2 * half // n, width, len(cos_LR),
        HALF=half, **HEADS,
    )  # fmt: skip
    return out


def gelu_and_slope(h_MD: Tensor, weight_XD: Tensor, bias_X: Tensor) -> tuple[Tensor, Tensor]:
    """gelu(h @ weight^T + bias), the tanh form, and its slope there, which is all that the backward pass needs."""
    (rows, width), columns = h_MD.shape, len(weight_XD)
    m, n, k = UP["M"], UP["N"], UP["K"]
    gelu, slope = (torch.empty((rows, columns), dtype=h_MD.dtype, device=h_MD.device) for _ in range(2))
    _gelu_and_slope_kernel[_two_for_each(h_MD, triton.cdiv(rows, m) * (columns // n))](
        TensorDescriptor.from_tensor(h_MD, [m, k]), TensorDescriptor.from_tensor(weight_XD, [n, k]), bias_X,
        TensorDescriptor.from_tensor(gelu, [m, n // 2]), TensorDescriptor.from_tensor(slope, [m, n // 2]),
        rows, columns // n, width, **UP,
    )  # fmt: skip
    return gelu, slope


def times_slope(dy_MD: Tensor, weight_DX: Tensor, slope_MX: Tensor) -> tuple[Tensor, Tensor]:
    """(dy @ weight) slope, and its sums over the rows of each tile (tiles, X), float32, for `column_sums`."""
    (rows, width), columns = dy_MD.shape, weight_DX.shape[1]
    m, n, k = DOWN["M"], DOWN["N"], DOWN["K"]
    out, tiles = torch.empty_like(slope_MX), triton.cdiv(rows, m)
    sums = torch.empty((tiles, columns), dtype=torch.float32, device=dy_MD.device)
    _times_slope_kernel[_two_for_each(dy_MD, tiles * (columns // n))](
        TensorDescriptor.from_tensor(dy_MD, [m, k]), TensorDescriptor.from_tensor(weight_DX, [k, n]),
        slope_MX, TensorDescriptor.from_tensor(slope_MX, [m, n]), TensorDescriptor.from_tensor(out, [m, n // 2]),
        sums, rows, columns // n, width, **DOWN,
    )  # fmt: skip
    return out, sums


def _two_for_each(x: Tensor, tiles: int) -> tuple[int]:
    """Two programs for each multiprocessor, or one for each tile where these are fewer."""
    processors = torch.cuda.get_device_properties(x.device).multi_processor_count if x.is_cuda else 1
    return (min(tiles, 2 * processors),)


def can_rotate(h_MD: Tensor, heads: int) -> bool:
    """Whether `rotated` applies to these heads: their angles fit, and each tile is rotated as a whole."""
    dim = h_MD.shape[1] // heads
    fits = dim <= WIDEST_HEAD and heads % (TILE_N // dim) == 0
    return fits and _programs(h_MD, heads * dim) > 0


def grouped(weight_XD: Tensor, dim: int) -> Tensor:
    """The rows of a qkv matrix, or its bias, in the order that `rotated` needs: for each tile the first halves of its
    heads, then the second halves."""
    halves = weight_XD.view(-1, TILE_N // dim, 2, dim // 2, *weight_XD.shape[1:])
    return halves.transpose(1, 2).reshape(weight_XD.shape)


def rotated(
    h_MD: Tensor, grouped_XD: Tensor, bias_X: Tensor | None, cos_LR: Tensor, sin_LR: Tensor, heads: int
) -> Tensor:
    """h @ weight^T + bias in bfloat16, its first `heads` heads rotated by position, columns in the usual order."""
    half = cos_LR.shape[-1]
    out = torch.empty((len(h_MD), len(grouped_XD)), dtype=h_MD.dtype, device=h_MD.device)
    _launch(
        _rotated_kernel, h_MD, grouped_XD, out, TILE_N // 4, bias_X, cos_LR, sin_LR,
        rotated_n=heads * 2 * half // TILE_N, length=len(cos_LR), HAS_BIAS=bias_X is not None, HALF=half,
    )  # fmt: skip
    return out


def add_product_(x_MD: Tensor, h_MX: Tensor, weight_DX: Tensor, times: float = 1.0) -> None:
    """x += times h @ weight^T: a product of bfloat16 matrices, added to float32 or bfloat16 in the matrix kernel."""
    if x_MD.dtype == torch.bfloat16:
        torch.addmm(x_MD, h_MX, weight_DX.t(), alpha=times, out=x_MD)
        return
    torch.ops.aten.addmm.dtype_out(x_MD, h_MX, weight_DX.t(), torch.float32, alpha=times, out=x_MD)


def weight_gradient(dy_MX: Tensor, h_MD: Tensor) -> Tensor:
    """dy' h (X, D) in float32, without a rounding to bfloat16 on the way."""
    if dy_MX.is_cuda and dy_MX.dtype != torch.float32:
        return torch.ops.aten.mm.dtype(dy_MX.t(), h_MD, torch.float32)
    return (dy_MX.t() @ h_MD).float()


def split_weights(weight_VD: Tensor, bias_V: Tensor) -> Tensor:
    """A float32 matrix and bias as bfloat16 pieces side by side for `head`: high, low, high, bias. Rows of zeros round
    the vocabulary up to a multiple of 64, because cuBLAS is half as fast otherwise."""
    rows = triton.cdiv(len(bias_V), 64) * 64
    weight = F.pad(weight_VD, (0, 0, 0, rows - len(bias_V)))
    high = weight.bfloat16()
    low = (weight - high.float()).bfloat16()
    bias = torch.stack([bias_V, bias_V - bias_V.bfloat16().float()], dim=1)
    return torch.cat([high, low, high, F.pad(bias, (0, 6, 0, rows - len(bias_V))).bfloat16()], dim=1)


def are_few(h_ND: Tensor) -> bool:
    """Whether `few_logits` applies to these rows."""
    return len(h_ND) <= FEW_PLACES and _programs(h_ND, TILE_N) > 0


def few_places(n: int) -> int:
    """Places that `few_logits` computes for n of them."""
    return FEW_PLACES if n > FEW_PLACES // 2 else FEW_PLACES // 2


def few_logits(split_2PD: Tensor, n: int, weight_VD: Tensor, bias_V: Tensor) -> Tensor:
    """`head` at few places, the first n of P, given as two matrices, rounded to bfloat16 and what that left. The
    weights are then all there is to read, so they are split on the way."""
    (_, places, width), vocab = split_2PD.shape, len(bias_V)
    h = split_2PD.view(2 * places, width)
    out = torch.empty((n, vocab), dtype=torch.float32, device=h.device)
    _few_logits_kernel[(triton.cdiv(vocab, FEW_TOKENS),)](
        TensorDescriptor.from_tensor(h, [places, TILE_K]),
        TensorDescriptor.from_tensor(weight_VD, [FEW_TOKENS, TILE_K]),
        bias_V, out, n, vocab, width,
        M=FEW_TOKENS, N=places, K=TILE_K, num_warps=4, num_stages=2, **early(h),
    )  # fmt: skip
    return out


def head(h_ND: Tensor, pieces_VX: Tensor, vocab_size: int) -> Tensor:
    """h @ W^T + b in float32 from three bfloat16 products, high*high + high*low + low*high, as one matrix product on
    the tensor cores. What is dropped is 2^-16 of each term: far below what bfloat16 does to h itself in the trunk."""
    high = h_ND.bfloat16()
    low = (h_ND - high.float()).bfloat16()
    ones = torch.zeros((len(h_ND), 8), dtype=torch.bfloat16, device=h_ND.device)
    ones[:, :2] = 1
    logits = torch.ops.aten.mm.dtype(torch.cat([high, high, low, ones], dim=1), pieces_VX.t(), torch.float32)
    return logits[:, :vocab_size]
