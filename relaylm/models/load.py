"""Families by their source: found, described, listed.

A source is a folder, the name of a family that came with the package, or a Hugging Face id. Public checkpoints of other
formats are sources too; `relaylm.convert` reads those.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from relaylm.core import cost
from relaylm.errors import UserError, meant, reason
from relaylm.files import backup, expand
from relaylm.models.denoiser import Architecture
from relaylm.models.folder import MANIFEST, files_of, read_manifest

BUNDLED = Path(__file__).parent / "families"


def bundled() -> list[str]:
    """Names of the families that came with the package."""
    return sorted(path.parent.name for path in BUNDLED.glob(f"*/{MANIFEST}"))


def on_disk(source: str | Path) -> Path:
    """Where a source would lie: as given, under its backup name (a save was killed between its two renames), or among
    the bundled families."""
    folder = Path(os.path.expanduser(str(source)))  # os.path, here and below: never raises, whatever the text
    if not os.path.exists(folder):
        if os.path.isdir(backup(folder)):
            return backup(folder)
        if str(source) in bundled():
            return BUNDLED / str(source)
    return folder


def locate(source: str | Path, revision: str | None = None) -> Path:
    """The folder of a family: given as such, bundled, or fetched from the Hugging Face hub into its cache."""
    text, folder = str(source), on_disk(source)
    if os.path.isdir(folder):
        if revision is not None:
            raise UserError(f"a revision is for a family on the Hugging Face hub, but {text!r} is a folder")
        return folder
    if os.path.exists(folder):
        raise UserError(f"{text!r} is a file, but a family is a folder")
    from relaylm.models.hub import HUB_FILES, HUB_ID, download

    if isinstance(source, str) and HUB_ID.fullmatch(text):
        return download(text, revision, HUB_FILES)
    known = f"the bundled families are {', '.join(bundled())}" if bundled() else "no families are bundled"
    hint = meant(text, bundled()) or ":"
    raise UserError(f"there is no family {text!r}{hint} no such folder, {known}, and a hub id is written owner/name")


# -------------------------------------------------------------------------------------------------- what is inside


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
