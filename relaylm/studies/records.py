"""Records of earlier runs: JSON under a folder such as this project's results/, which a wheel does not contain."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from relaylm.files import expand


def records_folder(folder: str | Path | None = None) -> Path | None:
    """The folder of records: the one that is named, else `results` in the current folder, else None."""
    if folder is not None:
        return expand(folder)
    return Path("results") if Path("results").is_dir() else None


def load_record(file: Path | None) -> dict[str, Any] | None:
    """A record, or None where there is none that can be read."""
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file is not None else None
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
