"""When the kernels are used, and that the public draws are the plain ones without them."""

import pytest
import torch

from relaylm import kernels
from relaylm.core import noise
from relaylm.kernels import draw


def test_kernels_and_graphs_can_be_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "triton", object())
    for value, there in (("1", False), ("yes", False), ("0", True), ("", True)):
        monkeypatch.setenv("RELAYLM_EAGER", value)
        assert kernels.available() is there
    monkeypatch.delenv("RELAYLM_EAGER")
    assert kernels.available()


def test_draws_on_the_cpu_are_the_definition() -> None:
    logits, line = torch.randn(9, 100, generator=torch.Generator().manual_seed(0)), torch.arange(9)
    token, largest = draw.race(logits, 3, line, line, line, torch.zeros(1, dtype=torch.int32))
    assert torch.equal(token, noise.race(logits, 3, line, line, line)) and torch.equal(largest, logits.amax(dim=1))
    words = draw.philox([line, line, line, line], (1, 2)), noise.philox([line, line, line, line], (1, 2))
    assert all(torch.equal(a, b) for a, b in zip(*words, strict=True))
