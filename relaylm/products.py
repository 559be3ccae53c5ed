r"""Matrix products with something done to each tile, in Triton for Hopper. Whoever lacks one falls back on PyTorch.

A fixed number of programs goes from tile to tile; tiles come and go by the bulk copy engine, so that what is done to
one tile overlaps the loading of the next. cuBLAS's own epilogues do not overlap, and what they cannot do (a rotation)
costs a pass over memory.

- `twice_gelu`: 2 gelu(h W^T + b), for `add_mlp_`;
- `rotated`: queries, keys and values, h W^T + b, with queries and keys rotated on the way out.

And two that are cuBLAS's own, which won against such kernels on an H200 (`add_product_`) or need none (`head`).
"""

from __future__ import annotations

import importlib.util
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

if importlib.util.find_spec("triton") is not None:
    import triton
    import triton.language as tl

    try:
        from triton.tools.tensor_descriptor import TensorDescriptor
    except ImportError:  # a Triton that is too old
        TensorDescriptor = None
else:  # pragma: no cover - CPU builds of PyTorch come without Triton
    triton = None

SHARED_MEMORY = 232_448  # bytes a program may have on Hopper: nearly all of it goes into the stages


class Tiles(NamedTuple):
    """How a product is cut: tiles of m x n in steps of k, by so many warps, so many steps ahead, with so many programs
    on each multiprocessor."""

    m: int = 128
    n: int = 256
    k: int = 64
    warps: int = 8
    stages: int = 4
    per_processor: int = 1


GELU_TILES = Tiles()
ROTATED_TILES = Tiles()
WIDEST_HEAD = 64  # `rotated` takes room for the angles too, and those of wider heads no longer fit


if triton is not None:

    @triton.jit
    def _tanh(x):
        return tl.inline_asm_elementwise("tanh.approx.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1)

    @triton.jit
    def _place(tile, rows, tiles_n, M: tl.constexpr, GROUP: tl.constexpr):
        """Tile number to first row and number of its column tile: groups of rows, so that what tiles share stays in the
        cache."""
        first = tile // (GROUP * tiles_n) * GROUP
        size = tl.minimum(tl.cdiv(rows, M) - first, GROUP)
        return (first + tile % (GROUP * tiles_n) % size) * M, tile % (GROUP * tiles_n) // size

    @triton.jit
    def _halves(x, M: tl.constexpr, N: tl.constexpr):
        """The left and the right half of a tile's columns: to store from less room."""
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
            x0, x1 = _halves(left, M, N // 2)  # in quarters: the angles take room too
            x2, x3 = _halves(right, M, N // 2)
            out_desc.store([at_m, at_n], x0)
            out_desc.store([at_m, at_n + N // 4], x1)
            out_desc.store([at_m, at_n + N // 2], x2)
            out_desc.store([at_m, at_n + 3 * N // 4], x3)


def shared_memory(device: torch.device) -> int:
    """Bytes that a program may have on this device; SHARED_MEMORY where nobody says."""
    properties = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return int(getattr(properties, "shared_memory_per_block_optin", SHARED_MEMORY))


def _programs(h_MD: Tensor, columns: int, tiles: Tiles) -> int:
    """How many programs there are for a product with so many columns, 0 if it does not fit the kernels."""
    if triton is None or TensorDescriptor is None or columns % tiles.n or h_MD.shape[1] % tiles.k:
        return 0
    if not h_MD.is_cuda or torch.cuda.get_device_capability(h_MD.device) < (9, 0):
        return 0
    if shared_memory(h_MD.device) < SHARED_MEMORY:  # a desktop card, however new
        return 0
    return tiles.per_processor * int(torch.cuda.get_device_properties(h_MD.device).multi_processor_count)


def _launch(
    kernel: Any, tiles: Tiles, h_MD: Tensor, weight_XD: Tensor, out_MX: Tensor, part: int, *rest: Any, **options: Any
) -> None:
    (rows, width), columns = h_MD.shape, len(weight_XD)
    programs, number = _programs(h_MD, columns, tiles), triton.cdiv(rows, tiles.m) * (columns // tiles.n)
    kernel[(min(programs, number),)](
        TensorDescriptor.from_tensor(h_MD, [tiles.m, tiles.k]),
        TensorDescriptor.from_tensor(weight_XD, [tiles.n, tiles.k]),
        *rest,
        TensorDescriptor.from_tensor(out_MX, [tiles.m, part]),
        rows,
        columns // tiles.n,
        **options,
        width=width,
        M=tiles.m,
        N=tiles.n,
        K=tiles.k,
        GROUP=8,
        PROGRAMS=programs,
        num_warps=tiles.warps,
        num_stages=tiles.stages,
    )


def add_mlp_(x_MD: Tensor, h_MD: Tensor, up_XD: Tensor, bias_X: Tensor, down_DX: Tensor) -> None:
    """x += gelu(h @ up^T + bias) @ down^T, the tanh form."""
    if _programs(h_MD, len(bias_X), GELU_TILES):
        add_product_(x_MD, twice_gelu(h_MD, up_XD, bias_X), down_DX, 0.5)
    else:
        add_product_(x_MD, torch._addmm_activation(bias_X, h_MD, up_XD.t(), use_gelu=True), down_DX)


def twice_gelu(h_MD: Tensor, weight_XD: Tensor, bias_X: Tensor) -> Tensor:
    """2 gelu(h @ weight^T + bias) in bfloat16. cuBLAS's own epilogue computes an exact tanh; this one's is good to
    2^-11, a quarter of what rounding to bfloat16 does next."""
    out = torch.empty((len(h_MD), len(bias_X)), dtype=torch.bfloat16, device=h_MD.device)
    _launch(_twice_gelu_kernel, GELU_TILES, h_MD, weight_XD, out, GELU_TILES.n // 2, bias_X)
    return out


def can_rotate(h_MD: Tensor, heads: int) -> bool:
    """Does `rotated` do these heads, a power of two wide: room for the angles, tiles that are rotated as a whole?"""
    dim = h_MD.shape[1] // heads
    fits = dim <= WIDEST_HEAD and heads % (ROTATED_TILES.n // dim) == 0
    return fits and _programs(h_MD, heads * dim, ROTATED_TILES) > 0


def grouped(weight_XD: Tensor, dim: int) -> Tensor:
    """The rows of a qkv matrix, or its bias, in the order that `rotated` wants: of the heads of each tile first the
    first halves and then the second ones."""
    halves = weight_XD.view(-1, ROTATED_TILES.n // dim, 2, dim // 2, *weight_XD.shape[1:])
    return halves.transpose(1, 2).reshape(weight_XD.shape)


def rotated(
    h_MD: Tensor, grouped_XD: Tensor, bias_X: Tensor | None, cos_LR: Tensor, sin_LR: Tensor, heads: int
) -> Tensor:
    """h @ weight^T + bias in bfloat16, its first `heads` heads rotated by their position. The columns come out in
    their usual order."""
    half = cos_LR.shape[-1]
    out = torch.empty((len(h_MD), len(grouped_XD)), dtype=h_MD.dtype, device=h_MD.device)
    _launch(
        _rotated_kernel,
        ROTATED_TILES,
        h_MD,
        grouped_XD,
        out,
        ROTATED_TILES.n // 4,
        bias_X,
        cos_LR,
        sin_LR,
        rotated_n=heads * 2 * half // ROTATED_TILES.n,
        length=len(cos_LR),
        HAS_BIAS=bias_X is not None,
        HALF=half,
    )
    return out


def add_product_(x_MD: Tensor, h_MX: Tensor, weight_DX: Tensor, times: float = 1.0) -> None:
    """x += times h @ weight^T: the product of bfloat16 matrices, added to float32 or bfloat16 in the matrix kernel
    itself."""
    if x_MD.dtype == torch.bfloat16:
        torch.addmm(x_MD, h_MX, weight_DX.t(), alpha=times, out=x_MD)
        return
    torch.ops.aten.addmm.dtype_out(x_MD, h_MX, weight_DX.t(), torch.float32, alpha=times, out=x_MD)


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
