"""Files that are either whole or not there, their hashes, and JSON.

A file is written to a temporary neighbour, fsynced, renamed over its name, and the folder fsynced: whatever happens in
between (kill -9, a full disk, a power cut) the name holds either the old file or the new one, never a part. A folder is
written in the same way: filled beside its place and renamed into it.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import math
import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from relaylm.errors import UserError, reason

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]

MARK = ".relaylm.json"  # in every folder that `write_folder` wrote: which files, and the sha256 of each


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
    """Write a file whole or not at all, and remove what writers of it left that were killed. A full disk or an
    unwritable folder is a UserError, and what was there stays."""
    view = memoryview(data.encode() if isinstance(data, str) else data)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path, "????????.tmp")
        while not _written(path, view):
            pass
        sync(path.parent)
    except OSError as error:
        kept = "; the last good one is kept" if path.exists() else ""
        raise UserError(f"cannot write {path}: {reason(error)}{kept}") from error


def _written(path: Path, view: memoryview) -> bool:
    """Write a file by way of a temporary neighbour; False if another writer of it removed that one in the moment before
    it was locked."""
    temporary, lock = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp"), None  # two writers never share one
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o644)
    try:
        try:
            lock = _locked(temporary)
            while len(view):
                view = view[os.write(handle, view) :]
            os.fsync(handle)
        finally:
            os.close(handle)
        try:
            os.replace(temporary, path)
        except FileNotFoundError:
            return False
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    finally:
        if lock is not None:
            os.close(lock)
    return True


def expand(path: str | Path) -> Path:
    """A path as a user wrote it, with ~ for a home folder. What cannot be a path is a UserError."""
    text = os.path.expanduser(os.fspath(path))
    try:
        names = os.fsencode(text).split(os.fsencode(os.sep))
    except UnicodeEncodeError:
        names = [b"\0"]
    if any(b"\0" in name for name in names):
        raise UserError(f"{str(path)!r} is not a path: it holds a character that no path can")
    if max(map(len, names)) > 255 or len(os.fsencode(text)) > 4095:
        raise UserError(f"{str(path)!r} is not a path: it is too long")
    if text.startswith("~"):
        raise UserError(f"{str(path)!r} is not a path: there is no user of that name")
    return Path(text)


def backup(folder: Path) -> Path:
    """Where an old folder waits while a new one takes its place."""
    return folder.parent / f".{folder.name}.old"


def write_folder(target: Path, fill: Callable[[Path], None], overwrite: bool) -> Path:
    """Write a folder whole or not at all: `fill` puts the files into an empty one beside the target, which is synced
    and renamed into place, with the sha256 of every file in `MARK`.

    With `overwrite`, a folder that this function wrote is replaced: one with a mark, and every file in it as the mark
    says. A file that was added or edited since is not relaylm's to delete, so the folder is refused. If the new folder
    would hold just what was written before, the old one stays, edits and all.

    Two renames cannot be one step, so a kill between them leaves the old folder under its backup name: readers look
    there too, and the next call puts it back first."""
    target = Path(os.path.realpath(expand(target)))
    old, new, lock = backup(target), _unfinished(target), None
    try:
        if old.is_dir():
            if not (old / MARK).is_file() or (target.exists() and _foreign(old)):
                raise UserError(f"{old} is in the way, and holds files that relaylm did not write: move it first")
            if target.exists():
                _discard(old, target)
            else:
                os.replace(old, target)
        if target.exists() and not target.is_dir():
            raise UserError(f"cannot write {target}: it is a file")
        moved = target.is_dir() and any(target.iterdir())
        if moved and not overwrite:
            raise UserError(f"{target} is not empty: choose another folder, or --overwrite (overwrite=True)")
        if moved and not (target / MARK).is_file():
            raise UserError(f"{target} was not written by relaylm (it has no {MARK}), so it is not overwritten")
        _remove_abandoned(target, "new-????????")
        new.mkdir(parents=True)
        lock = _locked(new)
        fill(new)
        written = _hashes(new)
        if moved and read_object(target / MARK).get("files") == written:
            return target
        if moved and (foreign := _foreign(target)):
            raise UserError(
                f"{target} is not overwritten: {foreign} in it is not as relaylm wrote it. Move it away first"
            )
        (new / MARK).write_bytes(json.dumps({"written by": "relaylm", "files": written}, indent=1).encode() + b"\n")
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
        if moved:
            _discard(old, target)
    except OSError as error:
        raise UserError(f"cannot write {target}: {reason(error)}") from None
    finally:
        if new.is_dir():
            shutil.rmtree(new, ignore_errors=True)
        if lock is not None:
            os.close(lock)
    return target


def _unfinished(target: Path) -> Path:
    """A name beside a folder that nothing has yet. `_remove_abandoned` deletes what has such a name."""
    return target.parent / f".{target.name}.new-{secrets.token_hex(4)}"


def _discard(old: Path, target: Path) -> None:
    """Delete a backup if possible. It is renamed first: a part of it, left by a kill, must not count as a backup."""
    with contextlib.suppress(OSError):
        os.replace(old, unfinished := _unfinished(target))
        shutil.rmtree(unfinished)


def _hashes(folder: Path) -> dict[str, str]:
    """The sha256 of every file below a folder, by its path; a link counts by where it points, and is not followed."""
    found = {}
    for root, folders, names in os.walk(folder):
        for path in (Path(root, name) for name in (*folders, *names)):
            if path.is_symlink():
                found[path.relative_to(folder).as_posix()] = f"link to {os.readlink(path)}"
            elif not path.is_dir():
                found[path.relative_to(folder).as_posix()] = file_sha256(path) if path.is_file() else "special"
    found.pop(MARK, None)
    return dict(sorted(found.items()))


def _foreign(folder: Path) -> str | None:
    """A file of a marked folder that others added or edited since `write_folder`; None if there is none."""
    mark = read_object(folder / MARK)
    return next((name for name, digest in _hashes(folder).items() if not _ours(mark, name, digest)), None)


def _ours(mark: dict[str, Any], name: str, digest: str) -> bool:
    """Is this what `write_folder` or `amend_folder` wrote under a name?"""
    files, amended = (value if isinstance(value := mark.get(key), dict) else {} for key in ("files", "amended"))
    return digest == files.get(name) or digest in (amended.get(name) or ())


def amend_folder(folder: Path, name: str, value: Any) -> None:
    """Write a JSON file into a folder of `write_folder`, which stays relaylm's to replace. The mark is written first
    and allows what was there, too, so a kill in between does no harm; a file that others edited stays theirs."""
    path, data = folder / name, json.dumps(value, indent=1) + "\n"
    mark = read_object(folder / MARK) if (folder / MARK).is_file() else None
    if mark is not None and (not path.exists() or _ours(mark, name, file_sha256(path))):
        digest, amended = hashlib.sha256(data.encode()).hexdigest(), mark.get("amended") or {}
        if digest not in (known := amended.get(name) or []):
            write_json(folder / MARK, {**mark, "amended": {**amended, name: [*known, digest]}})
    atomic_write(path, data)


def _remove_abandoned(target: Path, names: str) -> None:
    """Delete the unfinished files or folders of calls that were killed: nobody holds their lock any more."""
    for left in target.parent.glob(f".{glob.escape(target.name)}.{names}"):
        if (lock := _locked(left)) is not None:
            if left.is_dir():
                shutil.rmtree(left, ignore_errors=True)
            else:
                left.unlink(missing_ok=True)
            os.close(lock)


def _locked(path: Path) -> int | None:
    """A handle that holds the lock of a file or folder until it is closed; None where another process has it, or where
    there are no locks."""
    if fcntl is None:
        return None
    handle = None
    try:
        handle = os.open(path, os.O_RDONLY)
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return handle
    except OSError:
        if handle is not None:
            os.close(handle)
        return None


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


def plain(value: Any) -> Any:
    """A value that JSON can hold, which has neither infinity nor NaN: infinity becomes "inf", NaN becomes null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(float(value))
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    return [plain(item) for item in value] if isinstance(value, (list, tuple)) else value


def with_infinities(value: Any) -> Any:
    """What `plain` was given, but for NaN: a value of JSON in which "inf" and "-inf" are numbers."""
    if isinstance(value, str) and value in ("inf", "-inf"):
        return float(value)
    if isinstance(value, dict):
        return {key: with_infinities(item) for key, item in value.items()}
    return [with_infinities(item) for item in value] if isinstance(value, list) else value


def write_json(path: Path, value: Any) -> None:
    """Write a value as indented JSON (see `plain`), whole or not at all."""
    atomic_write(path, json.dumps(plain(value), indent=1, allow_nan=False) + "\n")


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
