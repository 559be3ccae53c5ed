"""What runs gave when they were recorded they give now, bit for bit (`recorded_runs`)."""

from __future__ import annotations

import json

import pytest
import torch
from recorded_runs import RECORD, arithmetic, runs

RUNS = runs()
KEPT = json.loads(RECORD.read_text())


def test_every_run_is_on_record() -> None:
    assert list(RUNS) == list(KEPT["runs"])


@pytest.mark.parametrize("name", list(RUNS))
def test_as_recorded(name: str) -> None:
    if arithmetic() != KEPT["made_with"]["arithmetic"]:
        pytest.skip(f"this machine or PyTorch {torch.__version__} rounds otherwise than where the runs were recorded")
    assert RUNS[name]() == KEPT["runs"][name], f"{name} is not as it was recorded with {KEPT['made_with']}"
