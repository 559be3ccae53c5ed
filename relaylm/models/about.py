"""What `relaylm info` and `relaylm ls` show of stored families: family.json and the sizes of files, no weights."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from relaylm.core import cost
from relaylm.errors import UserError, reason
from relaylm.files import expand
from relaylm.models.denoiser import Architecture
from relaylm.models.family import BUNDLED, bundled, locate
from relaylm.models.folder import MANIFEST, files_of, read_manifest


def describe(source: str | Path) -> dict[str, Any]:
    """What `relaylm info` shows of a stored family. Reads family.json and the sizes of the files, not the weights.

    `flops_per_call` is one row through the network with logits at one position, as the exact sampler mostly calls it;
    `flops_full` has logits at every position, as published samplers do."""
    folder = locate(source)
    manifest = read_manifest(folder)
    length, roles, judge = manifest["length"], manifest["roles"], manifest["judge"]
    models = {name: _describe_entry(folder, entry, length) for name, entry in manifest["models"].items()}
    names = sorted(models, key=lambda name: models[name]["flops_per_call"])
    files = {file: folder / file for file in files_of(manifest)}
    return {
        "name": manifest["name"],
        "folder": str(folder),
        "length": length,
        "vocab_size": manifest["vocab_size"],
        "mask_id": manifest["mask_id"],
        "tokenizer": manifest["tokenizer"],
        "roles": {"light": roles["light"] or names[0], "heavy": roles["heavy"] or names[-1]},
        "models": {name: models[name] for name in names},
        "judge": None if judge is None else _describe_entry(folder, judge, length),
        "twins": {name: _describe_entry(folder, entry, length) for name, entry in manifest["twins"].items()},
        "bytes": _size(files.values()),
        "missing": [file for file, path in files.items() if not os.path.isfile(path)],
        "digest": manifest["digest"],
        "meta": manifest["meta"],
    }


def list_families(*places: str | Path) -> list[dict[str, Any]]:
    """What `relaylm ls` shows: the bundled families, and those under each of `places` (the current folder if none is
    given), three folders deep. A folder that cannot be read is listed with its error."""
    found: dict[Path, str] = {BUNDLED / name: name for name in bundled()}
    for outer in places or (Path("."),):
        root = expand(outer)
        for manifest in sorted(path for depth in range(4) for path in root.glob(f"{depth * '*/'}{MANIFEST}")):
            hidden = any(part.startswith(".") for part in manifest.relative_to(root).parts)
            if not hidden and os.path.isfile(manifest) and BUNDLED.resolve() not in manifest.resolve().parents:
                found.setdefault(manifest.parent, str(manifest.parent))
    listed = []
    for folder, source in found.items():
        entry: dict[str, Any] = {"source": source, "bundled": folder.parent == BUNDLED}
        try:
            about = describe(folder)
            keys = ("name", "length", "vocab_size", "bytes", "missing")
            entry |= {key: about[key] for key in keys} | {"models": list(about["models"]), "error": None}
            entry["sizes"] = {name: model["parameters"] for name, model in about["models"].items()}
        except (UserError, OSError) as error:
            entry["error"] = str(error) if isinstance(error, UserError) else reason(error)
        listed.append(entry)
    return listed


def _describe_entry(folder: Path, entry: Mapping[str, Any], length: int) -> dict[str, Any]:
    a = Architecture(**entry["architecture"])
    numbers = a.depth, a.width, a.vocab_size, length
    return {
        "depth": a.depth,
        "width": a.width,
        "heads": a.heads,
        "parameters": entry["parameters"],
        "time_conditioning": a.time_conditioning,
        "block_length": a.block_length,
        "flops_per_call": cost.call_flops(*numbers, 1, a.mlp_ratio),
        "flops_full": cost.call_flops(*numbers, None, a.mlp_ratio),
        "dtype": entry["dtype"],
        "bytes": _size(folder / file for file in entry["files"]),
    }


def _size(files: Iterable[Path]) -> int:
    return sum(os.path.getsize(file) for file in files if os.path.isfile(file))
