"""The record of plans and rules: read back, continued, drawn."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from relaylm.core.schedule import Spacing
from relaylm.measure.likelihood import held_out
from relaylm.models.family import Family
from relaylm.show import figures
from relaylm.studies.record import common, spacing


def test_plans_by_name() -> None:
    assert spacing.read_plan("uniform:16") == (None, 16, None)
    assert spacing.read_plan("spaced:9:prefix") == (Spacing(9, "prefix"), None, None)
    rule = spacing.read_plan("surest:11:2")[2]
    assert rule is not None and str(rule) == "surest:11:2"


def test_a_record_is_continued_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are there are not measured again, and the rest is as if it had not been stopped."""
    load = Family.load
    text = held_out(load("wiki-char"))

    def short(*words: Any, **options: Any) -> Family:
        """The light model alone, at a length that takes no time."""
        family = load(*words, **options)
        light = Family({"4b": family.models["4b"]}, family.mask_id, family.vocab_size, 24, family.tokenizer, "short")
        light.stored = family.stored
        return light

    def run(path: Path, rows: int) -> dict[str, Any]:
        words = ["spacing", "wiki-char", str(path), "--rows", str(rows), "--pair-rows", "2", "--chunk", "1"]
        words += ["--plans", "uniform:4,spaced:3,surest:4,dus:8", "--device", "cpu"]
        monkeypatch.setattr(sys, "argv", words)
        spacing.main()
        return dict(json.loads(path.read_text()))

    monkeypatch.setattr(spacing.Family, "load", short)
    monkeypatch.setattr(common, "held_out", lambda family: text)
    first, again = (run(tmp_path / "a.json", rows) for rows in (1, 2))
    assert first["rows"] == 1 and again["rows"] == 2
    both = run(tmp_path / "b.json", 2)
    for one, other in zip(again["plans"], both["plans"], strict=True):
        assert one["plan"] == other["plan"] and one["nats"] == pytest.approx(other["nats"], rel=1e-6)
        assert one["calls"] == pytest.approx(other["calls"])
        assert (one["predicted"] is None) == one["plan"].startswith(("surest", "dus"))
    drawn: list[Any] = []
    monkeypatch.setattr(figures, "save_figure", lambda figure, path, title: drawn.append(figure))
    figures.plot_front(both, tmp_path / "front.svg")
    (axes,) = drawn[0].axes
    drawn[0].draw_without_rendering()
    calls = {float(label.get_text()) for label in axes.get_xticklabels()}  # plain numbers, not powers of ten
    assert {1, 2, 5, 10, 20} <= calls and {"-5", "0", "+5"} <= {label.get_text() for label in axes.get_yticklabels()}
