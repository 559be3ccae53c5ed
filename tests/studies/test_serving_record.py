"""The figure of what a server does under load."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from relaylm.studies.record import serving

RECORDS = Path(__file__).parents[2] / "results" / "serve"


def bars(axes: Any) -> list[float]:
    return [bar.get_height() for bars in axes.containers for bar in bars]


def test_the_figure_shows_what_the_records_say(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    records = {path.stem: json.loads(path.read_text()) for path in sorted(RECORDS.glob("*.json"))}
    drawn = serving.figure(list(records.values()))
    loaded = [record for record in records.values() if "latency" in record]
    *panels, memory = drawn.axes
    assert len(panels) == len(loaded) == 3
    for axes, record in zip(panels, loaded, strict=True):
        scale = 1000 if record["machine"]["gpu"] else 1
        seconds = [scale * one[name] for name in ("p50", "p95", "p99") for one in record["latency"]]
        assert bars(axes) == pytest.approx(seconds)
        assert record["family"] in axes.get_title() or record["family"] == "random"
    (line,) = memory.lines
    points = records["memory"]["memory"]["bytes_after"]
    assert line.get_xdata()[-1] == 10_000 and line.get_ydata() == pytest.approx([size / 1e6 for _, size in points])
    assert memory.get_ylim()[0] == 0
    for name, record in records.items():
        (tmp_path / f"{name}.json").write_text(json.dumps(record))
    monkeypatch.setattr("sys.argv", ["serving", str(tmp_path / "load.svg"), "--draw"])
    serving.main()
    assert (tmp_path / "load.svg").stat().st_size > 10_000
    assert len(serving.figure([records["cpu"]]).axes) == 2 and len(serving.figure(loaded[1:2]).axes) == 1
