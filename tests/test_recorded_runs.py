"""What runs gave when they were recorded they give now, bit for bit (`recorded_runs`)."""

from __future__ import annotations

import pytest
import torch
from recorded_runs import RECORDS, read_record, record_file, runs

RUNS = runs()


def test_every_run_is_on_record() -> None:
    recorded = [read_record(file) for file in RECORDS.glob("*.json")]
    assert all(any(name in record for record in recorded) for name in RUNS)
    assert all(name in RUNS for record in recorded for name in record)


@pytest.mark.parametrize("name", list(RUNS))
def test_as_recorded(name: str) -> None:
    record = read_record(record_file())
    if name not in record:
        pytest.skip(f"not recorded where a machine and PyTorch {torch.__version__} round as here")
    assert RUNS[name]() == record[name]
