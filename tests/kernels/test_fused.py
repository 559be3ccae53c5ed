"""The training kernels against the plain network: the final norm and every gradient.

Without a GPU this needs Triton's interpreter (TRITON_INTERPRET=1), which computes in float32 and so shows errors of
1e-6. `python tests/kernels/test_fused.py` on CUDA runs everything in bfloat16, prints the errors and needs no pytest.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from relaylm.core.noise import race
from relaylm.kernels import attention as attention_kernels
from relaylm.kernels import available, draw
from relaylm.kernels import gemm as products
from relaylm.kernels import loss as losses
from relaylm.kernels import train as fused
from relaylm.kernels import train_kernels as fused_kernels
from relaylm.kernels import trunk as kernels
from relaylm.kernels import update as updates
from relaylm.models.denoiser import Architecture, Transformer
from relaylm.train.muon import Muon
from relaylm.train.objective import Objective, _places_of
from relaylm.train.recipe import Recipe
from relaylm.train.step import Trainer, World

INTERPRETED = available() and os.environ.get("TRITON_INTERPRET") == "1"
ON_CUDA = torch.cuda.is_available() and available() and not INTERPRETED
DEVICE = "cuda" if ON_CUDA else "cpu"
FOR_HOPPER = INTERPRETED or (ON_CUDA and torch.cuda.get_device_capability()[0] >= 9)  # some kernels are made for it

try:
    import pytest

    pytestmark = pytest.mark.skipif(not (INTERPRETED or ON_CUDA), reason="needs CUDA, or Triton's interpreter")
except ModuleNotFoundError:  # run as a script on a machine without test tools: decorators that do nothing
    pytest = mock.MagicMock()
    pytest.fixture = lambda *_, **__: lambda function: function
    pytest.mark.parametrize = lambda *_, **__: lambda function: function

if INTERPRETED:  # its loops take one-element arrays for numbers, which newer NumPys refuse
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_index(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch_index
    load = interpreter.InterpreterBuilder.create_masked_load

    def load_where(builder: Any, pointers: Any, mask: Any, *rest: Any, **named: Any) -> Any:
        """Version 3.9 makes whole numbers of the comparison of two scalars, and then does not take them for a mask."""
        bits = interpreter.TensorHandle(np.asarray(mask.data, dtype=bool), interpreter.tl.int1)
        return load(builder, pointers, bits, *rest, **named)

    interpreter.InterpreterBuilder.create_masked_load = load_where
    # What the kernels have in assembly, which the interpreter does not know.
    ASSEMBLY = {"ex2.approx.ftz.f32": np.exp2, "tanh.approx.f32": np.tanh, "prefetch.global.L2": np.zeros_like}

    def run_assembly(_: Any, text: str, constraints: str, values: list[Any], *rest: Any) -> Any:
        made = interpreter.TensorHandle(ASSEMBLY[text.split()[0]](values[0].data), values[0].dtype.scalar)
        return mock.Mock(get_result=lambda _: made)

    interpreter.InterpreterBuilder.create_inline_asm = run_assembly
    # Few programs, which take longer turns: the interpreter's time is a matter of their number, and they come to loop.
    fused_kernels.NORM |= {"ELEMENTS": 1024, "PROGRAMS": 3}
    fused_kernels.POINTWISE |= {"BLOCK_M": 16, "PROGRAMS": 3}
    fused_kernels.SUMS |= {"COLUMNS": 64}

PLAIN = Architecture(vocab_size=30, length=40, width=64, depth=2, heads=2)
# name: (architecture, rows)
CASES = {
    "two blocks": (PLAIN, 3),
    "four blocks": (replace(PLAIN, depth=4), 2),
    "width 224, 7 heads of 32, length 37": (replace(PLAIN, width=224, heads=7, depth=1, length=37), 2),
    "4 heads of 64": (replace(PLAIN, width=256, heads=4, depth=1, length=17), 2),
    "causal, longer than a block": (replace(PLAIN, length=150, depth=1, causal=True, mlp_ratio=3), 2),
    "longer than two blocks": (replace(PLAIN, length=261, depth=1, heads=4), 1),
    "ratio 3": (replace(PLAIN, mlp_ratio=3), 3),
    "large vocabulary": (replace(PLAIN, vocab_size=700), 3),
    "one token": (replace(PLAIN, length=1, depth=1), 1),
}
# (case, the residual stream's precision, own attention or PyTorch's): each case once, and each choice in a few of them.
COMBINATIONS = [(name, torch.float32, True) for name in CASES]
COMBINATIONS += [(name, torch.bfloat16, True) for name in ("two blocks", "width 224, 7 heads of 32, length 37")]
COMBINATIONS += [(name, torch.float32, False) for name in ("two blocks", "causal, longer than a block", "one token")]
if ON_CUDA:  # Kernels are compiled for each shape, which takes most of the time here: fewer toys, and the real thing.
    CASES["as trained, 256"] = (Architecture(28, 256, 256, 12, 4), 64)
    CASES["as trained, 224"] = (Architecture(28, 256, 224, 12, 7), 64)
    CASES["as trained, 768"] = (Architecture(50258, 1024, 768, 2, 12), 4)
    COMBINATIONS = [
        ("width 224, 7 heads of 32, length 37", torch.float32, True),
        ("causal, longer than a block", torch.float32, True),
        ("two blocks", torch.float32, False),
        ("as trained, 256", torch.float32, True),
        ("as trained, 256", torch.bfloat16, True),
        ("as trained, 224", torch.bfloat16, True),
        ("as trained, 768", torch.bfloat16, False),
    ]


@pytest.fixture(autouse=True)
def _settings_come_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module, name in ((attention_kernels, "OWN_ATTENTION_UP_TO"), (fused, "SMALL_VOCABULARY"), (fused, "trunk")):
        monkeypatch.setattr(module, name, getattr(module, name))
    yield


def network(architecture: Architecture, dtype: torch.dtype = torch.float32) -> Transformer:
    """Weights at which every part matters: no ones, no zeros."""
    generator = torch.Generator().manual_seed(0)
    model = Transformer(architecture).initialise(generator)
    for parameter in model.parameters():
        parameter.data += 0.05 * torch.randn(parameter.shape, generator=generator)
    return model.to(DEVICE, dtype)


def inputs(architecture: Architecture, rows: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(0, architecture.vocab_size, (rows, architecture.length), generator=generator)
    gradient = torch.randn(rows * architecture.length, architecture.width, generator=generator)
    return tokens.to(DEVICE), gradient.to(DEVICE)


def found(model: Transformer, h: Tensor, gradient: Tensor) -> dict[str, Tensor]:
    h.backward(gradient.to(h.dtype))
    gradients = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
    return {"h": h.detach().double(), **gradients}


def plain(architecture: Architecture, rows: int, dtype: torch.dtype, autocast: bool = False) -> dict[str, Tensor]:
    model, (tokens, gradient) = network(architecture, dtype), inputs(architecture, rows)
    with torch.autocast(DEVICE, dtype=torch.bfloat16, enabled=autocast):
        h = model.output_layer.norm_final(model.hidden_at(tokens, torch.ones(rows, device=DEVICE), None)).flatten(0, 1)
    return found(model, h, gradient)


def errors(got: dict[str, Tensor], want: dict[str, Tensor]) -> dict[str, float]:
    assert got.keys() == want.keys()
    return {name: float((got[name] - value).norm() / value.norm()) for name, value in want.items()}


def measured(name: str, residual: torch.dtype, own: bool) -> dict[str, tuple[float, float]]:
    """How far the final norm and each gradient are from float64, and how far they may be. In bfloat16 the yardstick is
    what plain autocast, with a float32 stream, is off by."""
    architecture, rows = CASES[name]
    attention_kernels.OWN_ATTENTION_UP_TO = 1 << 20 if own else 0
    model, (tokens, gradient) = network(architecture), inputs(architecture, rows)
    computed = torch.bfloat16 if ON_CUDA else torch.float32
    made = fused.trunk(model, tokens, residual, computed)
    assert made.dtype == computed
    off = errors(found(model, made, gradient), want := plain(architecture, rows, torch.float64))
    if computed == torch.float32:
        allowed = dict.fromkeys(want, 3e-06 if residual == torch.float32 else 0.03)
    else:
        usual = errors(plain(architecture, rows, torch.float32, autocast=True), want)
        factor = 1.5 if residual == torch.float32 else 3.0
        allowed = {key: factor * max(usual[key], 0.004) for key in want}
    return {key: (off[key], allowed[key]) for key in want}


@pytest.mark.parametrize("name, residual, own", COMBINATIONS)
def test_final_norm_and_gradients(name: str, residual: torch.dtype, own: bool) -> None:
    found = measured(name, residual, own)
    assert all(off < allowed for off, allowed in found.values()), found


def test_products_with_gelu_inside() -> None:
    """The product, GELU, its slope and the bias's gradient, at rows that are no multiple of the tiles."""
    if not FOR_HOPPER:
        return
    generator, allowed = torch.Generator().manual_seed(4), 0.01 if ON_CUDA else 2e-6
    kind = torch.bfloat16 if ON_CUDA else torch.float32
    for tokens, width, hidden in ((300, 64, 256), (130, 192, 128)):
        h, dy = torch.randn(2, tokens, width, generator=generator).to(DEVICE, kind)
        up, down = torch.randn(hidden, width, generator=generator), torch.randn(width, hidden, generator=generator)
        up, down = (0.2 * up).to(DEVICE, kind), (0.2 * down).to(DEVICE, kind)
        bias = torch.randn(hidden, generator=generator).to(DEVICE)
        before = (h.double() @ up.double().T + bias.double()).requires_grad_()
        after = F.gelu(before, approximate="tanh")
        (want,) = torch.autograd.grad(after, before, dy.double() @ down.double())
        gelu, slope = products.gelu_and_slope(h, up, bias)
        dbefore, sums = products.times_slope(dy, down, slope)
        got = {"gelu": gelu, "dbefore": dbefore, "dbias": fused_kernels.column_sums(sums)}
        off = errors(
            {name: x.double() for name, x in got.items()},
            {"gelu": after.detach(), "dbefore": want, "dbias": want.sum(0)},
        )
        assert max(off.values()) < allowed, off


def test_product_with_the_heads_rotated() -> None:
    """Two, four and eight heads to a tile, values as they are, rows that are no multiple of a tile or of the length."""
    if not FOR_HOPPER:
        return
    generator, allowed = torch.Generator().manual_seed(10), 0.01 if ON_CUDA else 2e-6
    kind = torch.bfloat16 if ON_CUDA else torch.float32
    for rows, length, width, dim in ((3, 60, 128, 64), (2, 100, 128, 32), (1, 130, 256, 16)):
        h, weight = (
            torch.randn(rows * length, width, generator=generator),
            torch.randn(3 * width, width, generator=generator),
        )
        h, weight = h.to(DEVICE, kind), (weight / width**0.5).to(DEVICE, kind)
        angle = torch.randn(length, dim // 2, generator=generator).to(DEVICE)
        want = (h.double() @ weight.double().T).view(rows, length, 3 * width)
        kernels.rotate_(want, angle.cos(), angle.sin(), 2 * width // dim)
        got = products.rotated_heads(h, weight, angle.cos(), angle.sin(), 2 * width // dim).double()
        assert float((got - want.view_as(got)).norm() / want.norm()) < allowed


def test_trunk_with_gelu_and_rotation_inside_its_products() -> None:
    if not FOR_HOPPER:
        return
    architecture, allowed = replace(PLAIN, depth=1, width=128, vocab_size=700), 0.03 if ON_CUDA else 2e-6
    kind, made = torch.bfloat16 if ON_CUDA else torch.float32, []
    for inside in (False, True):
        with mock.patch.object(products, "fits_training", return_value=inside):
            model, (tokens, gradient) = network(architecture), inputs(architecture, 4)
            made.append(found(model, fused.trunk(model, tokens, torch.float32, kind), gradient))
    off = errors(made[1], made[0])
    assert max(off.values()) < allowed, off


def test_weighted_loss() -> None:
    """The loss and all gradients against autograd in float64: with a mask and without, columns that fill a row and that
    do not, more rows than programs; scaled, and where no gradient is wanted."""
    kind, allowed = (torch.bfloat16, 0.01) if ON_CUDA else (torch.float32, 1e-6)
    for places, vocab, mask_id in ((9, 700, 699), (5, 1024, 3), (3, 513, -1)):
        generator = torch.Generator().manual_seed(6)
        h, weight = torch.randn(places, 64, generator=generator), torch.randn(vocab, 64, generator=generator) / 4
        bias, scale = torch.randn(vocab, generator=generator), torch.rand(places, generator=generator)
        target, scale[1] = torch.randint(4, vocab - 1, (places,), generator=generator).to(DEVICE), 0.0
        leaves = [x.to(DEVICE).requires_grad_() for x in (h.to(kind), weight.to(kind).float(), bias)]
        exact = [x.detach().double().requires_grad_() for x in leaves]
        logits = exact[0] @ exact[1].T + exact[2]
        if mask_id >= 0:
            logits = logits.index_fill(1, torch.tensor([mask_id], device=DEVICE), -torch.inf)
        want = (F.cross_entropy(logits, target, reduction="none") * scale.to(DEVICE)).sum()
        with mock.patch.dict(losses.LOSS, PROGRAMS=4):
            got = losses.weighted_loss(*leaves, target, scale.to(DEVICE), mask_id)
            (3 * want).backward()
            (3 * got).backward()
        made = {"loss": got.detach().double(), **{str(i): x.grad.double() for i, x in enumerate(leaves)}}
        off = errors(made, {"loss": want.detach(), **{str(i): x.grad for i, x in enumerate(exact)}})
        assert max(off.values()) < allowed, off
        assert not leaves[0].grad[1].any()
        with torch.no_grad():
            assert torch.equal(losses.weighted_loss(*leaves, target, scale.to(DEVICE), mask_id), got)


def test_scored_positions_only() -> None:
    """The rows, and the gradients, of a network that runs everywhere and is asked for some positions only: fewer than
    there are places, none at all in one row, and one place too few."""
    kind = torch.bfloat16 if ON_CUDA else torch.float32
    for architecture, rows, limit in ((PLAIN, 3, 90), (replace(PLAIN, depth=1, length=7), 2, 8)):
        generator = torch.Generator().manual_seed(3)
        flag_BL = (torch.rand(rows, architecture.length, generator=generator) < 0.7).to(DEVICE)
        flag_BL[-1] = architecture.length == 7  # all, so that one finds no place
        where = _places_of(flag_BL.flatten(), limit)
        count = int(flag_BL.sum())
        assert int(where.lost) == max(0, count - limit) and int(where.kept_M.sum()) == min(count, limit)
        tokens, gradient = inputs(architecture, rows)
        gradient_M = torch.where(where.kept_M[:, None], gradient[where.index_M], 0.0)
        everywhere, some = network(architecture), network(architecture)
        want = found(
            everywhere,
            fused.trunk(everywhere, tokens, torch.float32, kind),
            torch.zeros_like(gradient).index_add(0, where.index_M, gradient_M),
        )
        got = found(some, fused.trunk(some, tokens, torch.float32, kind, (where.index_M, where.place_N)), gradient_M)
        got["h"], want["h"] = got["h"][where.kept_M], want["h"][where.index_M[where.kept_M]]
        off = errors(got, want)
        assert max(off.values()) < (0.03 if ON_CUDA else 2e-6), off


def test_attention_gradients() -> None:
    """Both kernels against autograd: rows that fill a program, that do not, that are shorter than the smallest tile."""
    kind, allowed = (torch.bfloat16, 0.01) if ON_CUDA else (torch.float32, 1e-6)
    shapes = ((2, 64, 2, 32), (1, 150, 3, 16), (2, 5, 1, 64))
    for (rows, length, heads, dim), causal in itertools.product(shapes, (False, True)):
        generator = torch.Generator().manual_seed(4)
        qkv = torch.randn(rows, length, 3 * heads * dim, generator=generator).to(DEVICE, kind)
        dout = torch.randn(rows * length, heads * dim, generator=generator).to(DEVICE, kind)
        angle = torch.randn(length, dim // 2, generator=generator).to(DEVICE)
        leaf = qkv.double().requires_grad_()
        q, k, v = leaf.view(rows, length, 3, heads, dim).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=causal).transpose(1, 2).reshape(dout.shape)
        (gradient,) = torch.autograd.grad(attended, leaf, dout.double())
        want = gradient.view(rows, length, 3, heads, 2, dim // 2).clone()
        turn = torch.polar(torch.ones_like(angle), -angle).to(torch.complex128)[:, None, None]
        turned = torch.view_as_real(torch.complex(want[:, :, :2, :, 0], want[:, :, :2, :, 1]) * turn)
        want[:, :, :2] = turned.movedim(-1, -2)
        out, normaliser = attention_kernels.attention(qkv, heads, causal)
        assert float((out - attended.detach()).norm() / attended.detach().norm()) < allowed
        for whole_row in (True, False):
            turned_back = angle.cos(), angle.sin(), heads, causal, whole_row
            got = attention_kernels.attention_gradient(qkv, out, normaliser, dout, *turned_back).double()
            assert float((got.view(want.shape) - want).norm() / want.norm()) < allowed, (whole_row, length)


def test_which_gradient_kernel() -> None:
    """One program holds 256 positions of a head of 64, and not twice as much of either."""
    cases = ((256, 64, True), (129, 64, True), (257, 64, False), (256, 128, False), (300, 16, False))
    for length, dim, fits in cases:
        x = torch.empty(1, length, 3 * 2 * dim)
        assert attention_kernels.fits_whole_row(x, 2) == fits, (length, dim)
        with mock.patch.object(products, "shared_memory", return_value=101_376):  # of a desktop card
            assert not attention_kernels.fits_whole_row(x, 2)


def test_gradients_where_all_scores_are_far_below_zero() -> None:
    """Rows that do not fill a tile: what is beyond them is as if its score were 0, far above all others, and must not
    come in."""
    kind, (rows, length, heads, dim) = torch.bfloat16 if ON_CUDA else torch.float32, (1, 37, 1, 16)
    qkv = torch.randn(rows, length, 3 * dim, generator=torch.Generator().manual_seed(8))
    qkv[..., :dim], qkv[..., dim : 2 * dim] = qkv[..., :dim].sign() * 0.01 + 8, qkv[..., dim : 2 * dim] * 0.01 - 8
    qkv, angle = qkv.to(DEVICE, kind), torch.zeros(length, dim // 2, device=DEVICE)
    out, normaliser = attention_kernels.attention(qkv, heads, False)
    assert float(normaliser.max()) < -130  # 2^130 is no float32
    for whole_row in (True, False):
        turned_back = angle.cos(), angle.sin(), heads, False, whole_row
        made = attention_kernels.attention_gradient(qkv, out, normaliser, torch.ones_like(out), *turned_back)
        assert made.isfinite().all()


def test_attention_of_a_few_queries() -> None:
    """Without values, the last block of the sampler's trunk: against attention with them, in float64."""
    kind, allowed = (torch.bfloat16, 0.01) if ON_CUDA else (torch.float32, 1e-6)
    generator = torch.Generator().manual_seed(9)
    shapes = ((2, 3, 64, 2, 32), (3, 1, 300, 1, 16), (2, 16, 5, 3, 16), (1, 7, 256, 2, 64))
    for b, k, length, heads, dim in shapes:
        width = heads * dim
        assert kernels.pools(k, dim)
        query = torch.randn(b, k, heads, dim, generator=generator).to(DEVICE, kind)
        key, h = torch.randn(2, b, length, width, generator=generator).to(DEVICE, kind)
        weight = (torch.randn(width, width, generator=generator) / width**0.5).to(DEVICE, kind)
        got = kernels.attend_few(query, key, h, weight).double()
        value = h.double() @ weight.double().T
        q, k_, v = query.double().transpose(1, 2), *(x.double().view(b, length, heads, dim) for x in (key, value))
        want = F.scaled_dot_product_attention(q, k_.transpose(1, 2), v.transpose(1, 2))
        want = want.transpose(1, 2).reshape(b * k, width)
        assert float((got - want).norm() / want.norm()) < allowed, (b, k, length, heads, dim)


def unspoilt() -> Tensor:
    return torch.zeros(1, dtype=torch.int32, device=DEVICE)


def test_race_kernel_draws_what_the_race_draws() -> None:
    """Whether a program looks at all of a row's tiles, at some or at one."""
    generator = torch.Generator().manual_seed(11)
    line = [torch.tensor(ids) for ids in ([0, 1, 2, 3, 9], [4, 4, 0, 255, 1], [0, 0, 1, 0, 2])]
    for programs, vocab in itertools.product((1, 12, 1 << 15), (28, 700, 2000)):
        logits = 3 * torch.randn(5, vocab, generator=generator)
        logits[2, vocab // 2 :] = -torch.inf
        with mock.patch.object(draw, "MANY_PROGRAMS", programs):
            got, largest = draw.race_kernel(logits.to(DEVICE), 7, *(ids.to(DEVICE) for ids in line), unspoilt())
        assert torch.equal(got.cpu(), race(logits, 7, *line)), (programs, vocab)
        assert torch.equal(largest.cpu(), logits.amax(dim=1))


def test_race_kernel_of_extreme_logits() -> None:
    """Far from 0 the noise still decides among equals; NaN and infinity are in the largest logits."""
    line = [torch.tensor(ids) for ids in ([0, 1, 2], [4, 4, 0], [0, 0, 1])]
    for top in (1e30, -1e30, 3e6):
        logits = torch.full((3, 300), top) * torch.ones(300).where(torch.arange(300) % 3 > 0, 1 - (top > 0) * 0.5)
        got, _ = draw.race_kernel(logits.to(DEVICE), 7, *(ids.to(DEVICE) for ids in line), flag := unspoilt())
        assert int(flag) == 0
        assert torch.equal(got.cpu(), race(logits, 7, *line)), top
    for spoilt in (torch.nan, torch.inf):
        logits = torch.zeros(3, 5000)
        logits[1, 4500] = spoilt
        got, largest = draw.race_kernel(logits.to(DEVICE), 7, *(ids.to(DEVICE) for ids in line), flag := unspoilt())
        assert int(flag) == 1 and largest.cpu().isfinite().tolist() == [True, False, True] and int(got.max()) < 5000


def test_rotation_at_positions() -> None:
    """Of listed positions as of whole rows."""
    generator = torch.Generator().manual_seed(12)
    qkv = torch.randn(2, 21, 96, generator=generator).to(DEVICE)
    angle = torch.randn(21, 8, generator=generator).to(DEVICE)
    positions = torch.tensor([[3, 20, 0], [7, 7, 1]], device=DEVICE)
    some = qkv.gather(1, positions[:, :, None].expand(-1, -1, 96)).flatten(0, 1).contiguous()
    whole = kernels.rotate_(qkv.clone(), angle.cos(), angle.sin(), 4)
    got = kernels.rotate_(some, angle.cos(), angle.sin(), 4, positions_BK=positions).view(2, 3, 96)
    assert torch.equal(got, whole.gather(1, positions[:, :, None].expand(-1, -1, 96)))


def test_logits_at_few_places() -> None:
    """The head from the residual stream, in pieces, against float64."""
    generator, kind = torch.Generator().manual_seed(13), torch.bfloat16 if ON_CUDA else torch.float32
    for n, vocab in ((1, 100), (32, 256), (33, 300)):
        x, weight = torch.randn(n, 128, generator=generator), torch.randn(vocab, 128, generator=generator) / 11
        bias, scale = torch.randn(vocab, generator=generator), torch.randn(128, generator=generator)
        want = F.linear(F.layer_norm(x.double(), (128,), scale.double()), weight.double(), bias.double())
        split = kernels.norm(x.to(DEVICE), scale.to(DEVICE), kind, places=products.few_places(n))
        split[:, n:] = torch.nan  # places that nobody asked for
        got = products.few_logits(split, n, weight.to(DEVICE), bias.to(DEVICE))
        assert got.shape == want.shape and float((got.cpu() - want).norm() / want.norm()) < 3e-5


def test_norm_from_table() -> None:
    """Where the sampler's residual stream begins, against float64: rows that fill no program, tokens in any order of
    memory, a wide and a narrow stream; and `norm` of the same rows."""
    generator = torch.Generator().manual_seed(10)
    for (b, length, width), residual in itertools.product(((3, 7, 24), (1, 5, 224)), (torch.float32, torch.bfloat16)):
        table, weight = torch.randn(11, width, generator=generator), torch.randn(width, generator=generator)
        branch = torch.randn(b * length, width, generator=generator).bfloat16()
        tokens = torch.randint(0, 11, (length, b), generator=generator).T
        tokens[0, 0] = 10
        table, weight, branch, tokens = (value.to(DEVICE) for value in (table, weight, branch, tokens))
        x, h = kernels.norm_from_table(table, tokens, branch, weight, residual, torch.float32)
        stream = table[tokens].reshape(-1, width) + branch
        cut = 2**-7 if INTERPRETED and residual == torch.bfloat16 else 0.0  # the interpreter cuts off, and rounds not
        assert x.dtype == residual and torch.allclose(x, stream.to(residual), rtol=cut, atol=0.0)
        want = F.layer_norm(stream.double(), (width,), weight.double())
        for got in (h, kernels.norm(stream, weight, torch.float32)):
            assert got.dtype == torch.float32 and float((got - want).abs().max()) < 1e-5


def test_first_block_from_tables() -> None:
    """The same, with gradients, as `embed` and `attend` one after the other: some tokens never occur, one often."""
    kind = torch.bfloat16 if ON_CUDA else torch.float32
    rows, length, heads, width, vocabulary = 3, 21, 2, 64, 70  # more than one round of tokens
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, 9, (rows * length,), generator=generator).to(DEVICE)
    tokens[-1] = vocabulary - 1
    leaves = [torch.randn(shape, generator=generator) for shape in ((vocabulary, width), (width,), (3 * width, width))]
    angle = torch.randn(length, width // heads // 2, generator=generator).to(DEVICE)
    gradients = torch.randn(2, rows * length, width, generator=generator).to(DEVICE, kind)
    made = []
    for by_tables in (False, True):
        embedding, norm, weight = (leaf.to(DEVICE, copy=True).requires_grad_() for leaf in leaves)
        copy, angles, shape = weight.detach().to(kind), (angle.cos(), angle.sin()), (rows, length, heads, False)
        if by_tables:
            x, out = fused._EmbedAttend.apply(tokens, embedding, norm, weight, copy, *angles, shape, kind)
        else:
            x, h = fused.embed(tokens, embedding, norm, kind, kind)
            out = fused.attend(h, weight, copy, *angles, shape)
        torch.autograd.backward([x, out], list(gradients))
        named = {"x": x, "out": out, "embedding": embedding.grad, "norm": norm.grad, "weight": weight.grad}
        made.append({name: value.detach().double() for name, value in named.items()})
    off = errors(made[1], made[0])
    assert off["x"] == 0 and max(off.values()) < (0.01 if ON_CUDA else 2e-6), off
    assert not made[1]["embedding"][9:-1].any() and made[1]["embedding"][-1].any()


def test_rows_at_and_back() -> None:
    generator = torch.Generator().manual_seed(5)
    x, h = torch.randn(9, 24, generator=generator).to(DEVICE), torch.randn(9, 24, generator=generator).to(DEVICE)
    at = torch.tensor([8, 0, 9, -1, 3], device=DEVICE)  # two of them outside
    for got, source in zip(fused_kernels.rows_at(x, h.to(torch.bfloat16), at), (x, h.to(torch.bfloat16))):
        want = torch.zeros(5, 24, dtype=source.dtype, device=DEVICE)
        want[[0, 1, 4]] = source[[8, 0, 3]]
        assert torch.equal(got, want)


def test_column_sums() -> None:
    for shape in ((1056, 2, 64), (1, 1, 24), (5000, 77), (264, 100)):
        share = torch.randn(shape, generator=torch.Generator().manual_seed(6)).to(DEVICE)
        got = fused_kernels.column_sums(share)
        assert got.shape == shape[1:] and (got - share.double().sum(0)).abs().max() < 1e-3
        assert torch.equal(got, fused_kernels.column_sums(share))


def test_muon_in_passes() -> None:
    """Matrices that lie down, stand up and are three in one, against the plain step; and the moving average."""
    generator, device = torch.Generator().manual_seed(7), DEVICE
    shapes = ((96, 32), (32, 32), (160, 32), (32, 160), (96, 32), (160, 32))
    made = []
    for in_passes in (False, True):
        generator.manual_seed(7)
        params = [torch.nn.Parameter(torch.randn(shape, generator=generator).to(device)) for shape in shapes]
        grads, moments = ([torch.randn(shape, generator=generator).to(device) for shape in shapes] for _ in range(2))
        optimizer = Muon(params, torch.tensor(0.1, device=device))
        for p, grad, moment in zip(params, grads, moments, strict=True):
            p.grad, optimizer.state[p]["exp_avg"] = grad, moment
        with mock.patch.object(updates, "applies", return_value=in_passes):
            optimizer.step()
        made.append(
            {
                f"{name} {i}": x.detach().double()
                for name, xs in (("param", params), ("moment", moments))
                for i, x in enumerate(xs)
            }
        )
    off = errors(made[1], made[0])
    assert max(off.values()) < (0.01 if ON_CUDA else 1e-5), off
    average, now = torch.randn(2, 5000, generator=generator).to(device)
    want = torch.lerp(average, now, 0.01)
    updates.lerp_(average, now, torch.tensor(0.01, device=device))
    assert torch.allclose(average, want, atol=1e-6)


def test_all_weights_in_one_piece_of_memory() -> None:
    """The same weights and averages after a few steps as with tensors of their own, and after going back to them."""
    recipe, made = Recipe(steps=8, batch=4, optimizer="muon", lr=5e-3, warmup=2, precision="fp32", compile="off"), []
    generator = torch.Generator().manual_seed(8)
    share = (torch.arange(4) + 0.5) / 4
    part = {
        "tokens": torch.randint(0, 29, (4, 40), generator=generator),
        "sample": torch.arange(4),
        "threshold": (share * 2**32).long(),
        "weight": (1 / (share * 160)).float(),
        "t": share.float(),
    }
    for whole in (False, True):
        with mock.patch.object(updates, "applies", return_value=whole):
            trainer = Trainer(replace(PLAIN, tied=True), recipe, 0, World(torch.device(DEVICE)))
            for _ in range(3):
                trainer.step([part])
            again = Trainer(replace(PLAIN, tied=True), recipe, 0, World(torch.device(DEVICE)))
            again.restore(trainer.tensors(), 3)
            for one in (trainer, again):
                one.step([part])
        assert len({p.untyped_storage().data_ptr() for p in trainer.params.values()}) == (
            1 if whole else len(trainer.params)
        )
        kept = trainer.tensors()
        assert all(torch.equal(kept[name], value) for name, value in again.tensors().items())
        made.append({name: value.double() for name, value in kept.items() if value.any()})
    off = errors(made[1], made[0])
    assert max(off.values()) < (0.05 if ON_CUDA else 1e-5), off


def test_twice_the_same_bits() -> None:
    """No sum depends on the order in which programs finish."""
    architecture, rows = CASES["width 224, 7 heads of 32, length 37"]
    made = []
    for _ in range(2):
        model, (tokens, gradient) = network(architecture), inputs(architecture, rows)
        made.append(
            found(model, fused.trunk(model, tokens, dtype=torch.bfloat16 if ON_CUDA else torch.float32), gradient)
        )
    assert all(torch.equal(made[0][name], made[1][name]) for name in made[0])


def test_packed_gradients_of_any_layout() -> None:
    """(B, heads, L, d) in memory, (B, L, heads, d), and one whose last dimension is not contiguous."""
    generator = torch.Generator().manual_seed(0)
    b, heads, length, dim = 2, 3, 9, 16
    dq, dk, dv = torch.randn(3, b, heads, length, dim, generator=generator).to(DEVICE)
    angle = torch.randn(length, dim // 2, generator=generator).to(DEVICE)
    cos, sin = angle.cos(), angle.sin()
    qkv = torch.zeros(b, length, 3 * heads * dim, device=DEVICE)
    want = []
    for gradient, turned in ((dq, True), (dk, True), (dv, False)):
        first, second = gradient.chunk(2, dim=-1)
        back = torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1) if turned else gradient
        want.append(back.transpose(1, 2).flatten(2))
    layouts = (
        dq,
        dk.transpose(1, 2).contiguous().transpose(1, 2),
        dv.transpose(-1, -2).contiguous().transpose(-1, -2),
    )
    got = fused_kernels.pack_rotated(*layouts, cos, sin).view_as(qkv)
    assert torch.allclose(got, torch.cat(want, dim=-1), atol=1e-6)


def test_where_it_applies() -> None:
    assert fused.applies(network(PLAIN)) == ON_CUDA
    assert not fused.applies(network(replace(PLAIN, adaln=True)))
    assert not fused.applies(network(replace(PLAIN, qkv_bias=True)))
    assert not fused.applies(network(replace(PLAIN, width=48, heads=2)))  # heads of 24
    assert not fused.applies(Transformer(PLAIN, dropout=0.1).to(DEVICE))


def test_the_objective_with_and_without() -> None:
    """The same loss and gradients from the plain trunk, from the fused one everywhere, and from the fused one at masked
    positions: up to bfloat16 on CUDA, and up to the rounding of float32 in the interpreter."""
    if not ON_CUDA:
        fused.trunk = partial(fused.trunk, residual=torch.float32, dtype=torch.float32)
    _check_objective(replace(PLAIN, length=64 if ON_CUDA else 20))
    _check_objective(replace(PLAIN, length=64 if ON_CUDA else 20, tied=True))
    _check_objective(replace(PLAIN, length=320 if ON_CUDA else 20, depth=1, tied=True, vocab_size=700))


def _check_objective(architecture: Architecture) -> None:
    rows, made = 16 if ON_CUDA else 6, []
    for use, gather in ((False, False), (True, False), (True, None)):
        model = network(architecture)
        length = model.architecture.length
        objective = Objective(model, Recipe(batch=rows), 0, ON_CUDA, rows, gather)
        objective.fused = use
        assert (objective.places is not None) == (gather is None)
        generator = torch.Generator().manual_seed(2)
        share = (torch.arange(rows) + 0.5) / rows
        batch = {
            "tokens": torch.randint(0, 29, (rows, length), generator=generator),
            "sample": torch.arange(rows),
            "threshold": (share * 2**32).long(),
            "weight": 1 / (share * rows * length),
            "t": share,
            "real": torch.arange(length, length - rows, -1),
        }
        loss, counts = objective(**{key: value.to(DEVICE) for key, value in batch.items()})
        assert counts[0] and not counts[1]
        loss.backward()
        gradients = {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}
        made.append({"loss": loss.detach().double(), **gradients})
    for other in made[1:]:
        off = errors(other, made[0])
        assert off["loss"] < (2e-3 if ON_CUDA else 1e-6) and max(off.values()) < (0.05 if ON_CUDA else 1e-5), off


if __name__ == "__main__":
    assert ON_CUDA, "needs CUDA and Triton"
    failed = []
    for case, stream, own_attention in COMBINATIONS:
        made = measured(case, stream, own_attention)
        worst = max(made, key=lambda key: made[key][0] / made[key][1])
        title = f"{case}, {stream}, {'own' if own_attention else 'library'} attention"
        print(f"{title}: h {made['h'][0]:.2e}; worst {worst} {made[worst][0]:.2e} of {made[worst][1]:.2e}", flush=True)
        if not made[worst][0] < made[worst][1]:
            failed.append(title)
            print(*(f"  {key} {off:.2e} of {allowed:.2e}" for key, (off, allowed) in made.items()), sep="\n")
    attention_kernels.OWN_ATTENTION_UP_TO = 256
    for name, test in list(globals().items()):
        if name.startswith("test_") and name != "test_final_norm_and_gradients":
            test()
            print(name, "ok", flush=True)
    assert not failed, failed
