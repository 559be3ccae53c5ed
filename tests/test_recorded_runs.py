"""What runs gave when they were recorded they give now, bit for bit (`recorded_runs`): all of them on processors that
round as one of the records, elsewhere those that came out the same on all."""

from __future__ import annotations

import pytest
import torch
from recorded_runs import RECORDS, expected, read_record, record_file, runs

RUNS = runs()
NOT_ON_RECORD = """This processor's rounding is not on record. If the run was the same before your change, and compares
probabilities, record it: python tests/recorded_runs.py --write all"""


def test_every_run_is_on_record() -> None:
    recorded = [read_record(file) for file in RECORDS.glob("*.json")]
    assert all(any(name in record for record in recorded) for name in RUNS)
    assert all(name in RUNS for record in recorded for name in record)


@pytest.mark.parametrize("name", list(RUNS))
def test_as_recorded(name: str) -> None:
    if (wanted := expected(name)) is None:
        pytest.skip(f"depends on rounding, and no record is of a machine and PyTorch {torch.__version__} that round so")
    assert RUNS[name]() == wanted, "" if record_file().is_file() else NOT_ON_RECORD
