r"""Results on disk: JSON records by content key in one SQLite file, `store.sqlite`, in a folder of the user's.

A record is keyed by a hash of everything that determines it (`content_key`), so nothing is computed twice, and a result
that is put twice is there once. pandas reads the file: `read_sql("SELECT key, kind, body FROM records", connection)`.

**Guarantees.** After `put` returns, the record is on the disk: it is committed to the write-ahead log, which is synced
and then copied to the main file. After a kill or a full disk at any moment a record is there whole or not at all. Any
number of processes may read and write at once. Each record has a SHA-256 checksum, verified when the store is opened
and whenever the record is read; a record that does not match counts as missing and is named in `damage`. Record numbers
have no gaps, so removed records are counted. Where the file itself is damaged, the records that can be read move to a
new file and the old one is kept as `store.sqlite.damaged`.

Folders of JSON lines (`results.jsonl`, as earlier releases wrote them) are imported when they are opened.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sqlite3
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from relaylm.errors import UserError, reason
from relaylm.files import expand

FILE, OLD_FILE, OLD_MANIFEST = "store.sqlite", "results.jsonl", "manifest.json"
APPLICATION, VERSION = 0x72656C61, 1  # in the file's header; the first is "rela" in ASCII
PATIENCE = 600.0  # seconds to wait for other processes
LABEL_LENGTH = 100  # characters; text fields up to this length are labels, which `records` finds records by

TABLE = """CREATE TABLE records (
    number INTEGER PRIMARY KEY AUTOINCREMENT,
    key    TEXT NOT NULL UNIQUE,
    kind   TEXT NOT NULL,
    labels TEXT NOT NULL, -- JSON: the short text fields of the body
    body   TEXT NOT NULL, -- JSON: the record
    sha256 TEXT NOT NULL  -- of key, kind, labels and body
)"""
DURABLE = ("journal_mode = WAL", "synchronous = FULL", "wal_autocheckpoint = 1")
COLUMNS = "key, kind, labels, body, sha256"


def content_key(*parts: Any) -> str:
    """A sha256 of JSON values: equal for equal content, whatever the order of keys."""
    return hashlib.sha256(_json(list(parts), sort_keys=True).encode()).hexdigest()


def _json(value: Any, sort_keys: bool = False) -> str:
    try:
        return json.dumps(value, sort_keys=sort_keys, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise UserError(f"only plain JSON values can be stored ({error})") from None


def _row(key: str, record: Mapping[str, Any]) -> tuple[str, ...]:
    """A record's columns."""
    labels = {name: value for name, value in record.items() if isinstance(value, str) and len(value) <= LABEL_LENGTH}
    columns = (key, str(record.get("kind", "")), _json(labels), _json(dict(record)))
    return (*columns, _checksum(*(column.encode() for column in columns)))


def _checksum(*columns: bytes) -> str:
    return hashlib.sha256(b"\0".join(columns)).hexdigest()


def _sound(row: tuple[Any, ...]) -> bool:
    """Does a row match its checksum?"""
    return all(isinstance(column, bytes) for column in row) and _checksum(*row[:-1]).encode() == row[-1]


class Store:
    """A folder of results. `damage` lists what was found wrong on opening and since, `repaired` what was put right."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = expand(folder)
        self.damage: list[str] = []
        self.repaired: list[str] = []
        try:
            with self._errors("open"):
                self._begin()
        except BaseException:  # whose traceback would hold the file open
            self.close()
            raise

    def _begin(self) -> None:
        if self.folder.is_file():
            raise UserError(f"{self.folder} is a file, but a store is a folder")
        self.folder.mkdir(parents=True, exist_ok=True)
        try:
            self._connection = self._open()
            why = self._connection.execute("PRAGMA integrity_check(1)").fetchone()[0].decode().splitlines()[-1]
        except sqlite3.DatabaseError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_CORRUPT:
                raise
            why = str(error)
        if why != "ok":
            self._connection = self._salvage(why)
        self._check()

    def close(self) -> None:
        """Close the file. A store that is not closed is closed when it is no longer referenced."""
        if hasattr(self, "_connection"):
            self._connection.close()

    __del__ = close

    @property
    def path(self) -> Path:
        """The SQLite file."""
        return self.folder / FILE

    def __len__(self) -> int:
        with self._errors("read"):
            return int(self._connection.execute("SELECT count(*) FROM records").fetchone()[0])

    def __contains__(self, key: str) -> bool:
        return self.get(key) is not None

    def get(self, key: str) -> dict[str, Any] | None:
        """The record of a key, or None."""
        with self._errors("read"):
            return self._read("key", key)

    def records(self, kind: str | None = None, **match: str) -> Iterator[dict[str, Any]]:
        """All records, oldest first, or those of a kind whose short text fields match."""
        query = "SELECT number, labels FROM records WHERE kind = ?1 OR ?1 IS NULL ORDER BY number"
        with self._errors("read"):
            found = self._connection.execute(query, (kind,)).fetchall()
        for number, labels in found:
            with contextlib.suppress(ValueError, TypeError, AttributeError):  # damaged, which `_read` reports
                if match and not match.items() <= json.loads(labels).items():
                    continue
            with self._errors("read"):
                record = self._read("number", number)
            if record is not None:
                yield record

    def put(self, key: str, record: Mapping[str, Any], *, replace: bool = False) -> dict[str, Any]:
        """Store a record and return what the store holds for its key: this one, or the one that was there before (the
        same work done by another process) unless `replace` is set."""
        row = _row(key, record)
        with self._errors("write to"), _transaction(self._connection):
            kept = self._read("key", key)
            if kept is None or replace:
                _write(self._connection, row)
                kept = json.loads(row[3])
        return kept

    @contextlib.contextmanager
    def using(self) -> Iterator[None]:
        """What is not in a record, or not as it should be, as one sentence: the checksum holds, but relaylm did not
        write it."""
        try:
            yield
        except UserError:
            raise
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            why = f"{type(error).__name__}: {reason(error)}"
            raise UserError(
                f"the store {self.folder} holds a record that relaylm did not write ({why}): name another folder"
            ) from None

    # -------------------------------------------------------------------------------------------- the file

    @contextlib.contextmanager
    def _errors(self, doing: str) -> Iterator[None]:
        """Failures of the disk or of SQLite as one sentence."""
        try:
            yield
        except (OSError, sqlite3.Error, UnicodeDecodeError) as error:  # the last in messages about damaged names
            why = getattr(error, "strerror", None) or error
            raise UserError(f"cannot {doing} the store {self.folder}: {why}") from None

    def _open(self) -> sqlite3.Connection:
        """The file, made if there is none; records of an older format are imported in the same transaction."""
        existed = self.path.exists()
        connection = _connect(self.path)
        try:
            with _transaction(connection):
                pragmas = (connection.execute(f"PRAGMA {name}") for name in ("application_id", "user_version"))
                about = tuple(pragma.fetchone()[0] for pragma in pragmas)
                if about == (0, 0) and not connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                    if existed:  # made by a process that was killed, or cut to less than a page
                        self.repaired.append(f"{FILE} was empty or cut short: it was begun anew")
                    _create(connection)
                    for row in self._old_rows():
                        _write(connection, row)
                elif about != (APPLICATION, VERSION):
                    raise UserError(f"{self.path} is not a store that this relaylm reads (version {VERSION})")
        except BaseException:
            connection.close()
            raise
        return connection

    def _check(self) -> None:
        """Verify every checksum, and that no record is missing."""
        for number, *row in self._connection.execute(f"SELECT number, {COLUMNS} FROM records ORDER BY number"):
            if not _sound(tuple(row)):
                self._report(number)
        count = len(self)
        last = self._connection.execute("SELECT max(seq) FROM sqlite_sequence").fetchone()[0] or 0
        if count < last:
            self.damage.append(f"{last - count} of {last} records are missing from {FILE}")

    def _read(self, column: str, value: Any) -> dict[str, Any] | None:
        query = f"SELECT number, {COLUMNS} FROM records WHERE {column} = ?"
        found = self._connection.execute(query, (value,)).fetchone()
        if found is None:
            return None
        number, *row = found
        if not _sound(tuple(row)):
            self._report(number)
            return None
        record: dict[str, Any] = json.loads(row[3])
        return record

    def _report(self, number: int) -> None:
        message = f"{FILE} record {number} is damaged: it does not match its checksum"
        if message not in self.damage:
            self.damage.append(message)

    def _salvage(self, why: str) -> sqlite3.Connection:
        """Replace a damaged file by one with the records that can still be read."""
        self.close()
        settings = ("writable_schema = ON", "journal_mode = DELETE")  # to read a cut file, to be alone with it
        with contextlib.closing(_connect(self.path, *settings)) as old:
            last, saved = _readable(old)
        damaged, new = (self.folder / f"{FILE}.{end}" for end in ("damaged", "new"))
        shutil.copyfile(self.path, damaged)
        new.unlink(missing_ok=True)
        with contextlib.closing(_connect(new)) as fresh, _transaction(fresh):
            _create(fresh)
            for row in saved:
                _write(fresh, row)
        os.replace(new, self.path)
        kept = f"{len(saved)} of {last} records were saved, and the file is kept as {damaged.name}"
        self.damage.append(f"{FILE} is damaged ({why}): {kept}")
        return _connect(self.path)

    # -------------------------------------------------------------------------------------------- JSON lines

    def _old_rows(self) -> list[tuple[str, ...]]:
        """The rows of a folder of JSON lines. A line begins with the sha256 of the rest of it:
        {"sha256":"<64 hex digits>","key":"<64 hex digits>", ...}. Of lines with one key the last counts."""
        path, head = self.folder / OLD_FILE, b'{"sha256":"'
        if not path.exists():
            return []
        start = len(head) + 64 + 2  # where the hashed part begins, after `",`
        found: dict[str, dict[str, Any]] = {}
        lines = path.read_bytes().splitlines()
        for number, line in enumerate(lines, 1):
            if hashlib.sha256(line[start:]).hexdigest().encode() == line[len(head) : start - 2]:
                record = json.loads(b"{" + line[start:])
                found[record.pop("key")] = record
            else:
                self.damage.append(f"{OLD_FILE} line {number} is damaged and was not imported")
        with contextlib.suppress(OSError, ValueError, KeyError):
            known = json.loads((self.folder / OLD_MANIFEST).read_bytes())["records"]
            if known > len(lines):
                self.damage.append(f"{OLD_FILE} was cut short: {known - len(lines)} records are missing")
        self.repaired.append(f"{len(found)} records were imported from {OLD_FILE}")
        return [_row(key, record) for key, record in found.items()]


def _connect(path: Path, *settings: str) -> sqlite3.Connection:
    """A connection with these settings (`DURABLE` ones if none), text as bytes: damaged text need not be UTF-8."""
    connection = sqlite3.connect(path, timeout=PATIENCE, isolation_level=None, check_same_thread=False)
    connection.text_factory = bytes
    try:
        for setting in settings or DURABLE:
            connection.execute(f"PRAGMA {setting}")
    except BaseException:
        connection.close()
        raise
    return connection


@contextlib.contextmanager
def _transaction(connection: sqlite3.Connection) -> Iterator[None]:
    """All or nothing, while no other process writes."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        yield
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _create(connection: sqlite3.Connection) -> None:
    connection.execute(TABLE)
    connection.execute(f"PRAGMA application_id = {APPLICATION}")
    connection.execute(f"PRAGMA user_version = {VERSION}")


def _write(connection: sqlite3.Connection, row: tuple[Any, ...]) -> None:
    """Add or replace a row. A replaced one keeps its number, so that numbers have no gaps."""
    done = connection.execute("UPDATE records SET kind = ?2, labels = ?3, body = ?4, sha256 = ?5 WHERE key = ?1", row)
    if not done.rowcount:
        connection.execute(f"INSERT INTO records ({COLUMNS}) VALUES (?, ?, ?, ?, ?)", row)


def _readable(connection: sqlite3.Connection) -> tuple[int, list[tuple[str, ...]]]:
    """The number of records of a damaged file, and its sound rows, each looked up by its number."""
    last, rows = 0, []
    for query in ("SELECT max(seq) FROM sqlite_sequence", "SELECT max(number) FROM records"):
        with contextlib.suppress(sqlite3.DatabaseError):
            last = max(last, connection.execute(query).fetchone()[0] or 0)
    for number in range(1, last + 1):
        with contextlib.suppress(sqlite3.DatabaseError):
            row = connection.execute(f"SELECT {COLUMNS} FROM records WHERE number = ?", (number,)).fetchone()
            if row is not None and _sound(row):
                rows.append(tuple(column.decode() for column in row))
    return last, rows


def open_store(store: Store | str | Path | None) -> Store | None:
    """A store as given, or opened from its folder."""
    return Store(store) if isinstance(store, str | Path) else store


def cached(
    store: Store | None, parts: Sequence[Any], make: Callable[[], dict[str, Any]], fresh: bool = False
) -> dict[str, Any]:
    """The record under the content key of `parts`: from the store, or made and kept there. `fresh` replaces it."""
    if store is None:
        return make()
    key = content_key(*parts)
    found = None if fresh else store.get(key)
    return found if found is not None else store.put(key, make(), replace=fresh)
