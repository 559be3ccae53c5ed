"""What the commands of this folder share: their flags, a family's held-out text, how a record begins and is written."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import numpy as np

from relaylm.errors import UserError
from relaylm.files import read_json, read_object, write_json
from relaylm.measure.likelihood import held_out
from relaylm.measure.provenance import how_made
from relaylm.models.family import Family


def command(doc: str | None, words: str, **flags: Any) -> argparse.Namespace:
    """The command line: positional `words` (`out` is a path), and flags. A flag is given as its default, as a type
    where it has none, as one of these with a help text, or as a dict of argparse's own options."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for word in words.split():
        parser.add_argument(word, type=Path if word == "out" else str)
    for name, given in flags.items():
        default, text = given if isinstance(given, tuple) else (given, None)
        if isinstance(default, dict):
            how = default
        elif default is False:
            how = {"action": "store_true"}
        else:
            how = {"type": default} if isinstance(default, type) else {"type": type(default), "default": default}
        names = ["-n", "--n"] if name == "n" else [f"--{name.replace('_', '-')}"]
        parser.add_argument(*names, **{"help": text, **how})
    return parser.parse_args()


def about(family: Family) -> dict[str, Any]:
    """The family and the seed of a record."""
    return {"family": {"name": family.name, "digest": family.digest}, "seed": 0}


def begun(path: Path, family: Family, record: dict[str, Any]) -> dict[str, Any]:
    """What a file has already, if it is about the same family and says what this record does; else nothing."""
    known = read_json(path) or {}
    return known if all(known.get(key) == value for key, value in {**about(family), **record}.items()) else {}


def keep(path: Path, family: Family, record: dict[str, Any]) -> None:
    """Write a record, with its family and how it was made."""
    write_json(path, {**about(family), **record, **how_made(family.device)})


def records_beside(path: Path) -> list[dict[str, Any]]:
    """The records in a file's folder, by name."""
    return [read_object(file) for file in sorted(path.parent.glob("*.json"))]


def text_of(family: Family, source: str) -> np.ndarray:
    """The held-out text beside a family from this source, as tokens."""
    if (tokens_N := held_out(family)) is None:
        raise UserError(f"{source} has no held-out text beside it (heldout.txt)")
    return tokens_N
