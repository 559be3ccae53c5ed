r"""Results that last: an append-only file of JSON lines, safe against crashes, full disks and company.

A store is a folder:

    results.jsonl     one record a line; pandas reads it as it is: pandas.read_json(path, lines=True)
    manifest.json     how many records and bytes there are, so that a file that was cut short is seen to be
    lock              held while writing; the system lets go of it when a process dies

A record is keyed by a hash of everything that determines it (`content_key`), so what is there is never computed again,
and the same result put twice is there once. A line begins with the sha256 of the rest of it:

    {"sha256":"<64 hex digits>","key":"<64 hex digits>", ...}\n

**What is promised.** After `put` returns the record is on the disk. After a kill, a full disk or a failing one at any
moment it is there whole or not at all. What a crash left unfinished at the end of the file is removed when the store is
next opened (`repaired` says so). A changed byte costs at most the record it is in, and `damage` names it by line and
byte; records lost to a cut are counted. Any number of processes may append and read at once.

**How.** Appends go under an exclusive lock: first the torn end that a killed process may have left is cut off, then the
line is written and synced, then the manifest is replaced (written beside, synced, renamed). A kill in between leaves a
manifest that knows less than the file, which is fine; one that knows more means that something was lost.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from relaylm.errors import UserError

if sys.platform == "win32":
    import msvcrt
else:
    import fcntl

FORMAT, VERSION = "relaylm-store", 1
RESULTS, MANIFEST, LOCK = "results.jsonl", "manifest.json", "lock"
_HEAD = b'{"sha256":"'
_START = len(_HEAD) + 64 + 2  # where the hashed part begins, after `",`
_SHORT = 100  # characters; shorter text fields of a record are kept in memory, to be found by


def content_key(*parts: Any) -> str:
    """A sha256 of JSON values: equal for equal content, whatever the order of keys."""
    return hashlib.sha256(_json(list(parts))).hexdigest()


def _json(value: Any) -> bytes:
    try:
        return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise UserError(f"only plain JSON values can be stored ({error})") from None


def seal(fields: Mapping[str, Any]) -> bytes:
    """A line: the fields as JSON, preceded by their sha256."""
    body = json.dumps(dict(fields), separators=(",", ":"), allow_nan=False).encode()[1:]
    return _HEAD + hashlib.sha256(body).hexdigest().encode() + b'",' + body + b"\n"


def unseal(line: bytes) -> dict[str, Any] | None:
    """The fields of a line without its newline; None if a single byte of it is not as it was written."""
    if line[: len(_HEAD)] != _HEAD or line[_START - 2 : _START] != b'",':
        return None
    if hashlib.sha256(line[_START:]).hexdigest().encode() != line[len(_HEAD) : _START - 2]:
        return None
    fields: dict[str, Any] = json.loads(b"{" + line[_START:])
    return fields


@dataclass(frozen=True)
class _Place:
    """Where a record is, and the short text fields it can be found by."""

    offset: int
    size: int
    short: dict[str, str]


class Store:
    """A folder of results. `damage` and `repaired` say in words what was found wrong on opening, and since."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser()
        self.damage: list[str] = []
        self.repaired: list[str] = []
        self._places: dict[str, _Place] = {}
        self._end = self._lines = 0  # read so far: bytes, lines
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            with self._locked():
                self._open()
        except OSError as error:
            raise UserError(f"cannot open the store {self.folder}: {error.strerror or error}") from None

    # -------------------------------------------------------------------------------------------- using it

    def __len__(self) -> int:
        return len(self._places)

    def __contains__(self, key: str) -> bool:
        self._look()
        return key in self._places

    def get(self, key: str) -> dict[str, Any] | None:
        """The record of a key, or None. (Its `key` and `sha256` are not part of it.)"""
        self._look()
        return self._read(key) if key in self._places else None

    def records(self, kind: str | None = None, **match: str) -> Iterator[dict[str, Any]]:
        """All records, oldest first, or those of a kind whose short text fields match."""
        self._look()
        wanted = match if kind is None else {"kind": kind, **match}
        for key, place in sorted(self._places.items(), key=lambda item: item[1].offset):
            if wanted.items() <= place.short.items() and (record := self._read(key)) is not None:
                yield record

    def put(self, key: str, record: Mapping[str, Any], *, replace: bool = False) -> dict[str, Any]:
        """Store a record and return what the store holds for its key: this one, or the one that was there before (the
        same work done by another process) unless `replace` is set. Replaced records stay in the file, the last
        counts."""
        if {"key", "sha256"} & set(record):
            raise UserError("a record's fields cannot be named key or sha256")
        _json(dict(record))  # refuses what is not JSON before anything is written
        try:
            with self._locked():
                self._catch_up(repair=True)
                if key not in self._places or replace:
                    self._append(seal({"key": key, **record}))
        except OSError as error:
            raise UserError(f"cannot write to the store {self.folder}: {error.strerror or error}") from None
        kept = self._read(key)
        assert kept is not None
        return kept

    # -------------------------------------------------------------------------------------------- the file

    @property
    def path(self) -> Path:
        return self.folder / RESULTS

    @contextlib.contextmanager
    def _locked(self, shared: bool = False) -> Iterator[None]:
        """Hold the lock. Opened anew each time, so threads and forked processes exclude each other as well."""
        handle = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        try:
            if sys.platform == "win32":
                msvcrt.locking(handle, msvcrt.LK_LOCK, 1)
            else:
                fcntl.flock(handle, fcntl.LOCK_SH if shared else fcntl.LOCK_EX)
            yield
        finally:
            os.close(handle)  # which unlocks

    def _open(self) -> None:
        """Read everything there is, mend the end, and hold it against the manifest."""
        manifest = self._read_manifest()
        self._catch_up(repair=True)
        lost = manifest["records"] - self._lines if manifest else 0
        if manifest and manifest["bytes"] > self._end:
            self.damage.append(
                f"{RESULTS} was cut short: the manifest knows of {manifest['bytes']} bytes and {manifest['records']} "
                f"records, {self._end} bytes are left and {max(lost, 0)} records are missing"
            )
        if manifest is None or (manifest["records"], manifest["bytes"]) != (self._lines, self._end):
            self._write_manifest()

    def _look(self) -> None:
        """Take in what others have appended."""
        try:
            if os.path.getsize(self.path) != self._end:
                with self._locked(shared=True):
                    self._catch_up(repair=False)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise UserError(f"cannot read the store {self.folder}: {error.strerror or error}") from None

    def _catch_up(self, repair: bool) -> None:
        """Read the lines from where we were; with `repair` (and so the exclusive lock) mend an unfinished end."""
        if not self.path.exists():
            return
        if os.path.getsize(self.path) < self._end:
            self.damage.append(f"{RESULTS} became shorter while it was open: it was read again from the beginning")
            self._places, self._end, self._lines = {}, 0, 0
        tail = b""
        with open(self.path, "rb") as file:
            file.seek(self._end)
            for line in file:
                if line.endswith(b"\n"):
                    self._take(line)
                else:
                    tail = line
        if tail and repair:
            self._mend(tail)

    def _take(self, line: bytes) -> None:
        """One line that ends in a newline: a record, or damage with perhaps a record or two in it."""
        offset, self._end = self._end, self._end + len(line)
        number = self._lines + 1
        if self._keep(line[:-1], offset):
            self._lines += 1
            return
        # A newline that was changed joins two lines: look for records that begin inside and lack but their last byte.
        starts = [at for at in range(len(line)) if line.startswith(_HEAD, at)] if line.count(_HEAD) < 1000 else []
        pieces = [line[a : b - 1] for a, b in zip(starts, [*starts[1:], len(line)])]
        found = sum(self._keep(piece, offset + start) for start, piece in zip(starts, pieces))
        self._lines += max(1, len(starts))
        saved = f"; {found} whole record{'s' * (found > 1)} inside it kept" if found else ""
        self.damage.append(f"{RESULTS} line {number} (byte {offset}) is damaged{saved}")

    def _keep(self, line: bytes, offset: int) -> bool:
        fields = unseal(line)
        if fields is None or not isinstance(fields.get("key"), str):
            return False
        short = {k: v for k, v in fields.items() if isinstance(v, str) and len(v) <= _SHORT and k != "key"}
        self._places[fields["key"]] = _Place(offset, len(line), short)
        return True

    def _mend(self, tail: bytes) -> None:
        """Finish or remove what stands after the last newline."""
        for whole, lacking in ((tail, "its newline"), (tail[:-1], "a sound newline")):
            if unseal(whole) is not None:
                self._cut(self._end + len(whole), b"\n")
                self._take(whole + b"\n")
                self.repaired.append(f"the last record of {RESULTS} lacked {lacking}, which was added")
                return
        self._cut(self._end)
        self.repaired.append(f"{len(tail)} bytes of an unfinished record were removed from the end of {RESULTS}")

    def _cut(self, size: int, ending: bytes = b"") -> None:
        handle = os.open(self.path, os.O_WRONLY)
        try:
            os.ftruncate(handle, size)
            if ending:
                os.lseek(handle, size, os.SEEK_SET)
                os.write(handle, ending)
            os.fsync(handle)
        finally:
            os.close(handle)

    def _append(self, line: bytes) -> None:
        """Write and sync a line at the end, which is known to be sound; take it back if that fails."""
        new = not self.path.exists()
        handle = os.open(self.path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            try:
                rest = memoryview(line)
                while rest:
                    rest = rest[os.write(handle, rest) :]
                os.fsync(handle)
            except BaseException:
                with contextlib.suppress(OSError):  # else the next to open the store will cut it off
                    os.ftruncate(handle, self._end)
                raise
        finally:
            os.close(handle)
        if new:
            self._sync_folder()
        self._take(line)
        self._write_manifest()

    def _read(self, key: str) -> dict[str, Any] | None:
        place = self._places[key]
        try:
            with open(self.path, "rb") as file:
                file.seek(place.offset)
                fields = unseal(file.read(place.size))
        except OSError as error:
            raise UserError(f"cannot read the store {self.folder}: {error.strerror or error}") from None
        if fields is None or fields.pop("key") != key:
            self.damage.append(f"{RESULTS} (byte {place.offset}) was damaged while it was open")
            del self._places[key]
            return None
        return fields

    # -------------------------------------------------------------------------------------------- the manifest

    def _read_manifest(self) -> dict[str, Any] | None:
        path = self.folder / MANIFEST
        for left in self.folder.glob(f".{MANIFEST}.*"):
            left.unlink(missing_ok=True)  # of a process that was killed
        try:
            data = path.read_bytes()
        except FileNotFoundError:
            if self.path.exists():
                self.damage.append(f"{MANIFEST} is missing: it was made anew from {RESULTS}")
            return None
        manifest = unseal(data.removesuffix(b"\n")) if data.endswith(b"\n") else None
        if manifest is None:
            self.damage.append(f"{MANIFEST} is damaged: it was made anew from {RESULTS}")
            return None
        if manifest.get("format") != FORMAT or manifest.get("version") != VERSION:
            raise UserError(f"{path} is not of a store that this relaylm reads (version {VERSION})")
        if not self.path.exists() and manifest["records"]:
            self.damage.append(f"{RESULTS} is missing")
        return manifest

    def _write_manifest(self) -> None:
        fields = {"format": FORMAT, "version": VERSION, "records": self._lines, "bytes": self._end}
        new = self.folder / f".{MANIFEST}.{secrets.token_hex(4)}"
        handle = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666)
        try:
            try:
                rest = memoryview(seal(fields))
                while rest:
                    rest = rest[os.write(handle, rest) :]
                os.fsync(handle)
            finally:
                os.close(handle)
            os.replace(new, self.folder / MANIFEST)
        except BaseException:
            with contextlib.suppress(OSError):
                os.unlink(new)
            raise
        self._sync_folder()

    def _sync_folder(self) -> None:
        if sys.platform == "win32":  # has no such thing
            return
        handle = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
