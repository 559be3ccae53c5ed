"""Records of a store whose checksum holds but whose content relaylm did not write: one sentence, or no change."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from relaylm.errors import UserError
from relaylm.measure import store as stores
from relaylm.measure.compare import compare
from relaylm.models.denoiser import Architecture, Transformer
from relaylm.models.family import Family
from relaylm.search.search import search


def network(seed: int, depth: int = 1, causal: bool = False) -> Transformer:
    shape = Architecture(vocab_size=6, length=4, width=8, depth=depth, heads=2, causal=causal)
    return Transformer(shape).initialise(torch.Generator().manual_seed(seed)).eval().requires_grad_(False)


def family() -> Family:
    made = Family({"a": network(0), "b": network(1, 2)}, 5, 6, 4)
    made.judge = network(2, causal=True)
    return made


def run(kind: str, folder: Path) -> Any:
    if kind == "compare":
        result = compare(family(), ["a", "b"], 4, steps=2, rivals=False, store=folder, progress=False)
        return [row["log_ppls"] for row in result["rows"]]
    options = {"light_segments": 1, "segments": 2, "n": 4, "confirm": 4, "steps": 2}
    result = search(family(), "exhaustive", store=folder, progress=False, **options)
    return result["recommendation"]["schedule"]


def changes(value: Any) -> Iterator[Any]:
    """Values of other kinds, and lists and objects with less in them."""
    yield from (None, "x", -7, 10**30, [], {}, [[None]])
    if isinstance(value, list) and value:
        yield value[:-1]
        yield [*value[:-1], "x"]
    if isinstance(value, dict):
        yield dict.fromkeys(value, "x")


@pytest.mark.parametrize("kind", ["compare", "search"])
def test_a_resealed_record_is_refused_or_changes_nothing_else(kind: str, tmp_path: Path) -> None:
    run(kind, tmp_path)
    file = sqlite3.connect(tmp_path / stores.FILE)
    rows = list(file.execute("SELECT key, body FROM records"))
    refused = tried = 0

    def put(key: str, record: dict[str, Any]) -> None:
        columns = stores._row(key, record)
        file.execute("UPDATE records SET kind = ?, labels = ?, body = ?, sha256 = ? WHERE key = ?", (*columns[1:], key))
        file.commit()

    for key, body in rows:
        record = json.loads(body)
        for name in record:
            for value in list(changes(record[name]))[:: 1 if name in ("log_ppl", "rows", "first", "tokens") else 12]:
                put(key, {**record, name: value})
                tried += 1
                try:
                    run(kind, tmp_path)
                except UserError as error:
                    refused += "did not write" in str(error)
        put(key, record)
    file.close()
    assert tried > 20 and refused > 3
