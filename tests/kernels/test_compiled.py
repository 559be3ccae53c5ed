"""Every kernel is compiled for GPUs that need not be here, at the sizes it is used at, and fits their shared memory.

Triton's compiler needs no device. So where a kernel would be launched it is compiled instead, and nothing is computed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from types import ModuleType
from typing import Any

import pytest
import torch

from relaylm.kernels import attention, draw, gemm, loss, train, train_kernels, trunk, update
from relaylm.models.denoiser import Architecture, Transformer

triton = pytest.importorskip("triton")
if torch.cuda.is_available():
    pytest.skip("test_cuda.py runs the kernels here", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

MODULES: tuple[ModuleType, ...] = (attention, draw, gemm, loss, train_kernels, trunk, update)
SHARED = {80: 166_912, 90: 232_448}  # bytes of shared memory that a program may have: A100, H100 and H200
PAPER = Architecture(vocab_size=50_258, length=1024, width=768, depth=2, heads=12)
CHARACTERS = Architecture(vocab_size=28, length=256, width=256, depth=2, heads=4)
ODD_WIDTH = Architecture(vocab_size=28, length=224, width=224, depth=2, heads=7)
WIDE_HEADS = replace(CHARACTERS, heads=2)


@dataclass
class Device:
    """What Triton asks of a driver before it compiles, and the kernels that were compiled."""

    capability: int
    shared: dict[str, int] = field(default_factory=dict)  # the most bytes that each kernel took

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # Triton keeps what it compiled by the device's number

    def get_current_stream(self, device: int) -> int:
        return 0


@pytest.fixture(params=SHARED)
def device(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Device:
    made, hopper = Device(request.param), request.param >= 90

    def compiled(kernel: Any, grid: Any) -> Callable[..., None]:
        def launch(*args: Any, **options: Any) -> None:
            name, found = kernel.fn.__name__, kernel.run(*args, grid=grid, warmup=True, **options)
            made.shared[name] = max(found.metadata.shared, made.shared.get(name, 0))

        return launch

    monkeypatch.setattr(JITFunction, "__getitem__", compiled)
    monkeypatch.setattr(torch, "empty", torch.zeros)  # what a kernel would have written is used as numbers of rows
    monkeypatch.setattr(torch, "empty_like", torch.zeros_like)
    monkeypatch.setattr(gemm, "on_hopper", lambda x: hopper)
    monkeypatch.setattr(gemm, "shared_memory", lambda device: SHARED[request.param])
    monkeypatch.setattr(gemm, "_programs", lambda h, columns: 132 if hopper and columns % gemm.TILE_N == 0 else 0)
    for module in (attention, draw, gemm, trunk):
        if hasattr(module, "early"):
            early = {"EARLY": True, "launch_pdl": True} if hopper else {"EARLY": False}
            monkeypatch.setattr(module, "early", lambda x, early=early: early)
    monkeypatch.setattr(update, "applies", lambda tensors: True)
    monkeypatch.setattr(triton.runtime.driver, "_active", made)
    return made


def in_training(architecture: Architecture) -> None:
    model, tokens = Transformer(architecture), torch.zeros((1, architecture.length), dtype=torch.int64)
    train.trunk(model, tokens).sum().backward()
    where = torch.zeros(64, dtype=torch.int64), torch.zeros(architecture.length, dtype=torch.int64)
    train.trunk(model, tokens, scored=where).sum().backward()


def in_losses(vocab_size: int) -> None:
    h, weight, bias = (torch.ones(shape, requires_grad=True) for shape in ((40, 64), (vocab_size, 64), (vocab_size,)))
    target, scale = torch.zeros(40, dtype=torch.int64), torch.ones(40)
    loss.weighted_loss(h.bfloat16(), weight, bias, target, scale, vocab_size - 1).backward()
    with torch.no_grad():
        loss.weighted_loss(h.bfloat16(), weight, bias, target, scale, vocab_size - 1)


def in_optimizer() -> None:
    for shape in ((768, 3072), (2304, 768)):
        weights = [torch.zeros(shape) for _ in range(2)]
        stack = torch.zeros((2 * weights[0].numel() // (768 * shape[1]), 768, shape[1]), dtype=torch.bfloat16)
        update.ahead_(weights, weights, 0.95, stack)
        update.subtract_(weights, stack, torch.ones(()), 1.0)
    update.lerp_(torch.zeros(1000), torch.zeros(1000), torch.ones(()))


def in_sampling(architecture: Architecture, narrow: bool) -> None:
    """Calls of one row and of many, at few positions of each row and at many."""
    model = Transformer(architecture).requires_grad_(False).eval().cast(torch.bfloat16)
    model.narrow = narrow
    for rows, places in ((1, 2), (40, 2), (40, 32)):
        tokens = torch.zeros((rows, architecture.length), dtype=torch.int64)
        trunk.trunk(model, tokens, torch.zeros((rows, places), dtype=torch.int64))
    h, head = torch.zeros(40, architecture.width), model.output_layer.linear
    few = trunk.norm(h, torch.ones(architecture.width), torch.bfloat16, places=gemm.few_places(len(h)))
    if gemm.are_few(h):
        gemm.few_logits(few, len(h), head.weight.float(), head.bias.float())


def in_draws(vocab_size: int) -> None:
    line, logits = torch.arange(40), torch.zeros(40, vocab_size)
    for seed in (1, (line, line)):
        draw.race_kernel(logits, seed, line, line, line, torch.zeros(1, dtype=torch.int32))
    draw._philox_kernel[(1,)](line, line, line, line, torch.zeros((4, 40), dtype=torch.int64), 40, 1, 2, SIZE=256)


def test_every_kernel_compiles(device: Device) -> None:
    for architecture in (CHARACTERS, WIDE_HEADS, ODD_WIDTH, PAPER):
        in_training(architecture)
        in_training(replace(architecture, causal=True))
    for vocab_size in (600, 8192, loss.LARGEST_VOCABULARY):
        in_losses(vocab_size)
    in_optimizer()
    with torch.no_grad():
        for architecture in (CHARACTERS, PAPER):
            in_sampling(architecture, narrow=True)
            in_draws(architecture.vocab_size)
    written = {name for module in MODULES for name in vars(module) if name.endswith("_kernel")}
    written = {name for name in written if any(isinstance(vars(m).get(name), JITFunction) for m in MODULES)}
    only_on_hopper = {name for name in vars(gemm) if name.endswith("_kernel")} if device.capability < 90 else set()
    assert set(device.shared) == written - only_on_hopper
    most = SHARED[device.capability]
    assert {name: taken for name, taken in device.shared.items() if taken > most} == {}
