"""Files that are either whole or not there, their hashes, and JSON.

A file is written to a temporary neighbour, fsynced, renamed over its name, and the folder fsynced: whatever happens in
between (kill -9, a full disk, a power cut) the name holds either the old file or the new one, never a part. A folder is
written in the same way: filled beside its place and renamed into it.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relaylm.errors import UserError, reason


def sync(path: Path) -> None:
    """Wait until a file's bytes, or the names in a folder, are on disk: a rename is durable only after the latter."""
    if os.name == "nt" and path.is_dir():  # cannot open a folder
        return
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def atomic_write(path: Path, data: bytes | str) -> None:
    """Write a file whole or not at all. A full disk or an unwritable folder is a UserError, and what was there
    stays."""
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")  # two writers never share one
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o644)
        try:
            view = memoryview(data.encode() if isinstance(data, str) else data)
            while len(view):
                view = view[os.write(handle, view) :]
            os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(temporary, path)
        sync(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        kept = "; the last good one is kept" if path.exists() else ""
        raise UserError(f"cannot write {path}: {reason(error)}{kept}") from error


def backup(folder: Path) -> Path:
    """Where an old folder waits while a new one takes its place."""
    return folder.parent / f".{folder.name}.old"


def write_folder(target: Path, fill: Callable[[Path], None], mark: str, overwrite: bool) -> Path:
    """Write a folder whole or not at all: `fill` puts the files into an empty one beside the target, which is synced
    and renamed into place. A folder that is not empty is replaced if `overwrite` is set and it has the file `mark`.

    Two renames cannot be one step, so a kill between them leaves the old folder under its backup name: readers look
    there too, and the next call puts it back first."""
    target = Path(os.path.realpath(target.expanduser()))
    old, new = backup(target), target.parent / f".{target.name}.new-{secrets.token_hex(4)}"
    try:
        if old.is_dir():
            if target.exists():
                shutil.rmtree(old)
            else:
                os.replace(old, target)
        if target.exists() and not target.is_dir():
            raise UserError(f"cannot write {target}: it is a file")
        moved = target.is_dir() and any(target.iterdir())
        if moved and not overwrite:
            raise UserError(f"{target} is not empty: choose another folder, or --overwrite (overwrite=True)")
        if moved and not (target / mark).is_file():
            raise UserError(f"{target} was not written by relaylm (it has no {mark}), so it is not overwritten")
        new.mkdir(parents=True)
        fill(new)
        for root, _, names in os.walk(new, topdown=False):
            for path in (*(Path(root, name) for name in names), Path(root)):
                sync(path)
        if moved:
            os.replace(target, old)
        elif target.is_dir():
            target.rmdir()
        try:
            os.replace(new, target)
        except BaseException:
            if moved:
                os.replace(old, target)
            raise
        sync(target.parent)
        shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise UserError(f"cannot write {target}: {reason(error)}") from None
    finally:
        if new.is_dir():
            shutil.rmtree(new, ignore_errors=True)
    return target


def file_sha256(path: Path) -> str:
    """The sha256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_bytes(path: Path) -> bytes:
    """The bytes of a file; one that is missing or unreadable is a UserError."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {reason(error)}") from None


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON, whole or not at all."""
    atomic_write(path, json.dumps(value, indent=1) + "\n")


def read_json(path: Path) -> Any:
    """The content of a JSON file, None if there is no such file."""
    return _parsed(path) if path.exists() else None


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file, which must be there."""
    data = _parsed(path)
    if not isinstance(data, dict):
        raise UserError(f"{path} must hold a JSON object")
    return data


def _parsed(path: Path) -> Any:
    data = read_bytes(path)
    try:
        return json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({reason(error)})") from None
