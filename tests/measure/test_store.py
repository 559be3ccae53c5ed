"""The store: a record is there whole or not at all, after kills, full disks and damage, with many processes."""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from relaylm.errors import UserError
from relaylm.measure import store as module
from relaylm.measure.store import FILE, Store, content_key

ROOT = Path(module.__file__).parents[2]


def record(i: int) -> dict[str, Any]:
    return {"kind": "test", "number": i, "text": f"line {i}\n" * (i % 3), "list": [i, i / 7, None], "load": "x" * 2000}


def key(i: int) -> str:
    return content_key("test", i)


def filled(folder: Path, count: int = 3) -> Store:
    store = Store(folder)
    for i in range(count):
        store.put(key(i), record(i))
    return store


def edit(folder: Path, statement: str, *values: Any) -> None:
    """Change the file with SQLite alone, as a user might."""
    connection = sqlite3.connect(folder / FILE)
    connection.execute(statement, values)
    connection.commit()
    connection.close()


# ------------------------------------------------------------------------------------------------ plain use


def test_what_was_put_is_there(tmp_path: Path) -> None:
    store = filled(tmp_path / "a" / "b")
    assert len(store) == 3 and key(1) in store and key(9) not in store
    again = Store(tmp_path / "a" / "b")
    assert [again.get(key(i)) for i in range(3)] == [record(i) for i in range(3)]
    assert again.get(key(9)) is None
    assert again.damage == again.repaired == []
    assert [r["number"] for r in again.records("test")] == [r["number"] for r in again.records()] == [0, 1, 2]
    assert list(again.records("other")) == []


def test_a_key_is_there_once_unless_replaced(tmp_path: Path) -> None:
    store = filled(tmp_path)
    assert store.put(key(1), {"kind": "late"}) == record(1)
    assert store.put(key(1), {"kind": "new"}, replace=True) == {"kind": "new"}
    again = Store(tmp_path)
    assert again.get(key(1)) == {"kind": "new"} and len(again) == 3 and again.damage == []


def test_two_stores_see_each_other(tmp_path: Path) -> None:
    one, two = Store(tmp_path), Store(tmp_path)
    one.put(key(1), record(1))
    assert two.get(key(1)) == record(1)
    two.put(key(2), record(2))
    assert key(2) in one
    assert one.put(key(2), {"kind": "mine"}) == record(2)


def test_records_are_found_by_short_fields(tmp_path: Path) -> None:
    store = Store(tmp_path)
    for i in range(4):
        store.put(key(i), {"kind": "k", "law": str(i % 2), "number": i})
    assert [r["number"] for r in store.records("k", law="1")] == [1, 3]


@pytest.mark.parametrize("bad", [{"x": float("nan")}, {"x": {1, 2}}])
def test_refuses_what_is_not_a_record(tmp_path: Path, bad: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="plain JSON"):
        Store(tmp_path).put("k", bad)
    assert len(Store(tmp_path)) == 0


def test_a_key_depends_on_content_alone() -> None:
    assert content_key({"a": 1, "b": [2]}) == content_key({"b": [2], "a": 1})
    assert content_key("a", "b") != content_key("ab") != content_key(["a", "b"])
    assert content_key("a", 1) == hashlib.sha256(b'["a",1]').hexdigest()  # keys of stores that exist
    with pytest.raises(UserError):
        content_key(float("inf"))


def test_the_file_is_plain_sqlite(tmp_path: Path) -> None:
    filled(tmp_path).close()
    assert os.listdir(tmp_path) == [FILE]
    rows = sqlite3.connect(tmp_path / FILE).execute("SELECT key, kind, body FROM records ORDER BY number").fetchall()
    assert [(key, kind, json.loads(body)) for key, kind, body in rows] == [
        (key(i), "test", record(i)) for i in range(3)
    ]


def test_a_store_that_cannot_be_opened(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot open the store"):
        Store(tmp_path / "file" / "store")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / FILE).write_text("not a database at all " * 100)
    with pytest.raises(UserError, match=r"cannot open the store .*not a database"):
        Store(tmp_path / "text")
    (tmp_path / "other").mkdir()
    edit(tmp_path / "other", "CREATE TABLE notes (text TEXT)")
    with pytest.raises(UserError, match="not a store that this relaylm reads"):
        Store(tmp_path / "other")
    filled(tmp_path / "later").close()
    edit(tmp_path / "later", "PRAGMA user_version = 2")
    with pytest.raises(UserError, match="version 1"):
        Store(tmp_path / "later")


@pytest.mark.skipif(not Path("/proc/self/fd").is_dir(), reason="for Linux")
def test_a_store_that_is_refused_is_not_held_open(tmp_path: Path) -> None:
    filled(tmp_path).close()
    edit(tmp_path, "ALTER TABLE records RENAME COLUMN kind TO sort")
    with pytest.raises(UserError, match="no such column") as held:  # with its traceback
        Store(tmp_path)
    assert held.value and not [f for f in Path("/proc/self/fd").iterdir() if str(tmp_path) in os.path.realpath(f)]


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    filled(tmp_path).close()
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(UserError, match="cannot open the store"):
            Store(tmp_path)
    finally:
        tmp_path.chmod(0o700)


# ------------------------------------------------------------------------------------------------ damage


@pytest.mark.parametrize(
    "change",
    [
        "body = '{}'",
        "body = x'00'",
        "body = 1",
        "kind = 'other'",
        "labels = '{'",
        "labels = 3",
        "labels = '3'",
        "sha256 = 'x'",
        "key = 'x'",
    ],
)
def test_an_edited_row_is_noticed_and_replaced(tmp_path: Path, change: str) -> None:
    store = filled(tmp_path)
    edit(tmp_path, f"UPDATE records SET {change} WHERE number = 2")
    for user in (store, again := Store(tmp_path)):
        assert user.get(key(0)) == record(0) and user.get(key(1)) is None
        assert [r["number"] for r in user.records()] == [0, 2]
        assert [r["number"] for r in user.records("test", text="line 2\nline 2\n")] == [2]
    assert again.damage == [f"{FILE} record 2 is damaged: it does not match its checksum"]
    assert again.put(key(1), record(1)) == record(1) and store.get(key(1)) == record(1)
    assert bool(Store(tmp_path).damage) == change.startswith("key")  # where the row with another key stays


def test_removed_rows_are_counted(tmp_path: Path) -> None:
    filled(tmp_path, 5).close()
    edit(tmp_path, "DELETE FROM records WHERE number IN (1, 5)")
    store = Store(tmp_path)
    assert store.damage == [f"2 of 5 records are missing from {FILE}"]
    assert store.get(key(0)) is None and store.get(key(1)) == record(1)


def check_damaged(folder: Path, data: bytes, count: int) -> tuple[int, bool]:
    """A store whose file has these bytes is refused in a sentence, or gives sound records and says what is missing.
    Returns the number of records, and whether something was said; then it works as any store does."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    (folder / FILE).write_bytes(data)
    try:
        store = Store(folder)
    except UserError as error:
        assert "\n" not in str(error)
        return 0, True
    found = [store.get(key(i)) for i in range(count)]
    assert all(got in (None, record(i)) for i, got in enumerate(found))
    said = bool(store.damage or store.repaired)
    assert said or None not in found
    for i in range(count):
        assert store.put(key(i), record(i)) == record(i)
    store.close()
    return sum(got is not None for got in found), said


def test_cut_at_many_lengths(tmp_path: Path) -> None:
    filled(tmp_path / "whole", 12).close()
    data = (tmp_path / "whole" / FILE).read_bytes()
    sizes = [*range(0, 600, 97), *range(1024, len(data), 3531), len(data) - 1]
    found = [check_damaged(tmp_path / "cut", data[:size], 12) for size in sizes]
    assert all(said for _, said in found)
    counts = [count for count, _ in found]
    assert counts == sorted(counts) and counts[-1] >= 9  # what was before the cut is saved
    check_damaged(tmp_path / "cut", data[: len(data) // 2], 12)
    assert (tmp_path / "cut" / f"{FILE}.damaged").read_bytes()[100:] == data[100 : len(data) // 2]


@pytest.mark.parametrize("step", [397, pytest.param(13, marks=pytest.mark.slow)])
def test_bytes_changed(tmp_path: Path, step: int) -> None:
    filled(tmp_path / "whole", 6).close()
    data = (tmp_path / "whole" / FILE).read_bytes()
    rng = random.Random(0)
    for at in [*range(0, 100, max(1, step // 60)), *range(100, len(data), step)]:
        changed = data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
        check_damaged(tmp_path / "changed", changed, 6)


def test_a_damaged_file_is_replaced_only_if_no_one_has_it_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    filled(tmp_path / "whole").close()
    data = (tmp_path / "whole" / FILE).read_bytes()
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / FILE).write_bytes(data)
    other = sqlite3.connect(tmp_path / "cut" / FILE)
    assert other.execute("SELECT count(*) FROM records").fetchone() == (3,)
    os.truncate(tmp_path / "cut" / FILE, len(data) - 3000)
    monkeypatch.setattr(module, "PATIENCE", 0.1)
    with pytest.raises(UserError, match="cannot open the store"):
        Store(tmp_path / "cut")
    other.close()
    assert "records were saved" in Store(tmp_path / "cut").damage[0]


# ------------------------------------------------------------------------------------------------ kills, full disks


def test_killed_at_any_point_of_the_log(tmp_path: Path) -> None:
    """A kill leaves some beginning of the write-ahead log: the records whose commit is in it are there, no others."""
    store = filled(tmp_path / "whole", 1)
    store._connection.execute("PRAGMA wal_autocheckpoint = 0")  # so that two puts are in the log
    for i in (1, 2):
        store.put(key(i), record(i))
    log = (tmp_path / "whole" / f"{FILE}-wal").read_bytes()
    seen = set()
    for size in [*range(0, len(log), 631), len(log)]:
        folder = tmp_path / "cut"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        shutil.copyfile(tmp_path / "whole" / FILE, folder / FILE)
        (folder / f"{FILE}-wal").write_bytes(log[:size])
        again = Store(folder)
        assert again.damage == []
        found = [again.get(key(i)) for i in range(3)]
        assert found in [[record(j) if j < count else None for j in range(3)] for count in (1, 2, 3)]
        seen.add(sum(got is not None for got in found))
        assert again.put(key(2), record(2)) == record(2)
        again.close()
    assert seen == {1, 2, 3}


@pytest.mark.skipif(sys.platform == "win32", reason="no limits on files")
def test_a_full_disk(tmp_path: Path) -> None:
    """Writes fail from some size on: older records stay, the new one is not there, and later the put succeeds."""
    store = filled(tmp_path)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    refused = 0
    for room in range(0, 60_000, 3000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
        try:
            store.put(key(3), {**record(3), "load": "x" * 40_000})
        except UserError as error:
            assert str(error).startswith(f"cannot write to the store {tmp_path}: ") and "\n" not in str(error)
            refused += 1
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        for user in (store, again := Store(tmp_path)):
            assert [user.get(key(i)) for i in range(3)] == [record(i) for i in range(3)]
        assert again.damage == [] and len(again) == 3
    assert refused == 20
    assert store.put(key(3), record(3)) == record(3) and Store(tmp_path).damage == []


def test_a_full_database(tmp_path: Path) -> None:
    store = filled(tmp_path)
    store._connection.execute("PRAGMA max_page_count = 1")
    with pytest.raises(UserError, match="disk is full"):
        for i in range(3, 9):
            store.put(key(i), record(i))
    assert [store.get(key(i)) for i in range(3)] == [record(i) for i in range(3)]


APPENDER = """
import os, sys
sys.path.insert(0, {root!r})
from relaylm.measure.store import Store, content_key
store = Store({folder!r})
worker, log = int(sys.argv[1]), os.open(sys.argv[2], os.O_WRONLY | os.O_APPEND | os.O_CREAT)
i = 0
while True:
    for name in (f"{{worker}}-{{i}}", f"shared-{{i}}"):
        if content_key(name) not in store:
            store.put(content_key(name), {{"kind": "k", "name": name, "load": name * (7 * i % 2000)}})
        os.write(log, (name + "\\n").encode())
    i += 1
"""


def acknowledged(folder: Path, kills: int) -> Iterator[str]:
    """Two processes append, each killed at random moments and started again; yields what they say is stored."""
    script = APPENDER.format(root=str(ROOT), folder=str(folder / "store"))
    logs = [folder / f"log-{w}" for w in (0, 1)]
    rng = random.Random(0)

    def start(worker: int) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-c", script, str(worker), str(logs[worker])])

    children = [start(0), start(1)]
    try:
        for _ in range(kills):
            time.sleep(rng.uniform(0.1, 0.25))
            worker = rng.randrange(2)
            children[worker].kill()
            children[worker].wait()
            children[worker] = start(worker)
        time.sleep(0.3)
    finally:
        for child in children:
            child.kill()
            child.wait()
    for log in logs:
        yield from (log.read_text().split("\n")[:-1] if log.exists() else [])


def check_kills(folder: Path, kills: int) -> None:
    known = set(acknowledged(folder, kills))
    store = Store(folder / "store")
    assert store.damage == []
    found = {r["name"]: r["load"] for r in store.records()}
    assert known <= found.keys() and len(found) == len(store)
    assert len(found) <= len(known) + 4 * (kills + 2)  # what was stored just before a kill was not logged
    assert all(load == name * (7 * int(name.split("-")[1]) % 2000) for name, load in found.items())
    assert len(known) > 10


@pytest.mark.skipif(sys.platform == "win32", reason="kill -9")
def test_two_processes_ten_kills(tmp_path: Path) -> None:
    check_kills(tmp_path, 10)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="kill -9")
def test_two_processes_two_hundred_kills(tmp_path: Path) -> None:
    check_kills(tmp_path, 200)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kill -9 of forks")
def test_killed_within_a_put(tmp_path: Path) -> None:
    """Killed after a random time within the first puts of a process, the opening of the store included."""
    rng = random.Random(1)
    done = 0
    for attempt in range(40):
        reading, writing = os.pipe()
        child = os.fork()
        if not child:
            store = Store(tmp_path)
            for i in range(done, done + 20):
                store.put(key(i), record(i))
                os.write(writing, b".")
            os._exit(0)
        time.sleep(rng.uniform(0, 0.03))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(writing)
        done += len(os.read(reading, 100))
        os.close(reading)
        store = Store(tmp_path)
        assert store.damage == [] and len(store) in (done, done + 1), attempt
        assert [store.get(key(i)) for i in range(done)] == [record(i) for i in range(done)]
        done = len(store)
        store.close()
    assert done


RACER = """
import sys, time, os
sys.path.insert(0, {root!r})
from relaylm.measure.store import Store, content_key
while not os.path.exists({go!r}):
    time.sleep(0.001)
store = Store({folder!r})
for i in range(40):
    kept = store.put(content_key(i), {{"kind": "k", "number": i, "by": sys.argv[1], "load": "x" * 3000}})
    assert kept["number"] == i
"""


def test_processes_that_race_for_the_same_keys(tmp_path: Path) -> None:
    script = RACER.format(root=str(ROOT), folder=str(tmp_path / "store"), go=str(tmp_path / "go"))
    children = [subprocess.Popen([sys.executable, "-c", script, str(worker)]) for worker in range(4)]
    time.sleep(0.5)
    (tmp_path / "go").touch()
    assert [child.wait(timeout=60) for child in children] == [0] * 4
    store = Store(tmp_path / "store")
    assert [r["number"] for r in store.records()] == list(range(40)) and store.damage == []


# ------------------------------------------------------------------------------------------------ JSON lines


def write_lines(folder: Path, change: Callable[[list[bytes]], list[bytes]] = list) -> None:
    """A store as earlier releases wrote it."""
    lines = []
    for i in (0, 1, 2, 0):
        fields = {"key": key(i), **(record(i) if len(lines) < 3 else {"kind": "replaced"})}
        body = json.dumps(fields, separators=(",", ":")).encode()[1:]
        lines.append(b'{"sha256":"' + hashlib.sha256(body).hexdigest().encode() + b'",' + body)
    folder.mkdir()
    (folder / "results.jsonl").write_bytes(b"".join(line + b"\n" for line in change(lines)))
    manifest = {"sha256": "", "format": "relaylm-store", "version": 1, "records": 4, "bytes": sum(map(len, lines)) + 4}
    (folder / "manifest.json").write_text(json.dumps(manifest))


def test_an_old_store_is_imported(tmp_path: Path) -> None:
    write_lines(tmp_path / "old")
    store = Store(tmp_path / "old")
    assert [store.get(key(i)) for i in range(3)] == [{"kind": "replaced"}, record(1), record(2)]
    assert store.repaired == ["3 records were imported from results.jsonl"] and store.damage == []
    store.put(key(3), record(3))
    again = Store(tmp_path / "old")
    assert len(again) == 4 and again.repaired == again.damage == []


def test_what_an_old_store_lost_is_named(tmp_path: Path) -> None:
    write_lines(tmp_path / "edited", lambda lines: [lines[0], lines[1].replace(b"1", b"2"), *lines[2:]])
    store = Store(tmp_path / "edited")
    assert store.damage == ["results.jsonl line 2 is damaged and was not imported"]
    assert store.get(key(1)) is None and store.get(key(2)) == record(2)
    write_lines(tmp_path / "cut", lambda lines: [*lines[:2], lines[2][:100]])
    store = Store(tmp_path / "cut")
    assert store.damage == [
        "results.jsonl line 3 is damaged and was not imported",
        "results.jsonl was cut short: 1 records are missing",
    ]
    assert store.get(key(1)) == record(1) and len(store) == 2
