"""What runs gave when they were recorded they give now, bit for bit (`recorded_runs`): all of them on processors that
round as one of the records, elsewhere those that came out the same on all."""

from __future__ import annotations

import pytest
import torch
from recorded_runs import RECORDS, expected, read_record, record_file, runs

RUNS = runs()


def test_every_run_is_on_record() -> None:
    recorded = [read_record(file) for file in RECORDS.glob("*.json")]
    assert all(any(name in record for record in recorded) for name in RUNS)
    assert all(name in RUNS for record in recorded for name in record)


@pytest.mark.parametrize("name", list(RUNS))
def test_as_recorded(name: str) -> None:
    if (wanted := expected(name)) is None:
        pytest.skip(f"depends on rounding, and no record is of a machine and PyTorch {torch.__version__} that round so")
    known = record_file().is_file()
    assert RUNS[name]() == wanted, (
        ""
        if known
        else (
            "this processor's rounding is not on record: if before your change the run was the same as now, and it compares "
            "probabilities, record it (python tests/recorded_runs.py --write all)"
        )
    )
