"""The store: whole or not at all, whatever happens and whoever else is there."""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaylm import store as module
from relaylm.errors import UserError
from relaylm.store import MANIFEST, RESULTS, Store, content_key, seal, unseal

ROOT = Path(module.__file__).parents[1]


@pytest.fixture
def no_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that open hundreds of stores and do not ask what a power cut would do."""
    monkeypatch.setattr(module.os, "fsync", lambda handle: None)


def record(i: int) -> dict[str, Any]:
    return {"kind": "test", "number": i, "text": f"line {i}\n" * (i % 3), "list": [i, i / 7, None]}


def key(i: int) -> str:
    return content_key("test", i)


def filled(folder: Path, count: int = 3) -> Store:
    store = Store(folder)
    for i in range(count):
        store.put(key(i), record(i))
    return store


def lines_by_key(folder: Path) -> Counter[str]:
    """What is in the file, read without the store: every line must be sound."""
    data = (folder / RESULTS).read_bytes()
    assert data.endswith(b"\n")
    found: Counter[str] = Counter()
    for line in data.splitlines():
        fields = unseal(line)
        assert fields is not None
        assert json.loads(line)["key"] == fields["key"]  # also plain JSON, as pandas reads it
        found[fields["key"]] += 1
    return found


# ------------------------------------------------------------------------------------------------ plain use


def test_what_was_put_is_there(tmp_path: Path) -> None:
    store = filled(tmp_path / "a" / "b")
    assert len(store) == 3 and key(1) in store and key(9) not in store
    again = Store(tmp_path / "a" / "b")
    assert [again.get(key(i)) for i in range(3)] == [record(i) for i in range(3)]
    assert again.get(key(9)) is None
    assert again.damage == again.repaired == []
    assert [r["number"] for r in again.records("test")] == [0, 1, 2]
    assert list(again.records("other")) == []


def test_a_key_is_there_once_unless_replaced(tmp_path: Path) -> None:
    store = filled(tmp_path)
    assert store.put(key(1), {"kind": "late"}) == record(1)
    assert lines_by_key(tmp_path)[key(1)] == 1
    assert store.put(key(1), {"kind": "new"}, replace=True) == {"kind": "new"}
    assert Store(tmp_path).get(key(1)) == {"kind": "new"}
    assert len(Store(tmp_path)) == 3


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


@pytest.mark.parametrize("bad", [{"x": float("nan")}, {"x": {1, 2}}, {"key": 1}, {"sha256": "x"}])
def test_refuses_what_is_not_a_record(tmp_path: Path, bad: dict[str, Any]) -> None:
    with pytest.raises(UserError):
        Store(tmp_path).put("k", bad)
    assert len(Store(tmp_path)) == 0


def test_a_key_depends_on_content_alone() -> None:
    assert content_key({"a": 1, "b": [2]}) == content_key({"b": [2], "a": 1})
    assert content_key("a", "b") != content_key("ab") != content_key(["a", "b"])
    with pytest.raises(UserError):
        content_key(float("inf"))


@given(st.dictionaries(st.text(), st.recursive(st.none() | st.booleans() | st.integers() | st.text(), st.lists)))
@settings(max_examples=50, deadline=None)
def test_seal_and_unseal(fields: dict[str, Any]) -> None:
    line = seal(fields)
    assert line.count(b"\n") == 1
    if fields and "sha256" not in fields:
        assert unseal(line[:-1]) == fields


def test_pandas_reads_the_file_as_it_is(tmp_path: Path) -> None:
    pandas = pytest.importorskip("pandas")
    filled(tmp_path)
    assert pandas.read_json(tmp_path / RESULTS, lines=True)["number"].tolist() == [0, 1, 2]


def test_a_store_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(UserError, match="cannot open the store"):
        Store(tmp_path / "file" / "store")


# ------------------------------------------------------------------------------------------------ damage


def copy(whole: Path, folder: Path, results: bytes) -> Path:
    """The store again, with other bytes for results."""
    folder.mkdir(exist_ok=True)
    shutil.copyfile(whole / MANIFEST, folder / MANIFEST)
    (folder / RESULTS).write_bytes(results)
    return folder


def test_cut_at_every_length(tmp_path: Path, no_sync: None) -> None:
    filled(tmp_path / "whole")
    data = (tmp_path / "whole" / RESULTS).read_bytes()
    ends = [i for i, byte in enumerate(data) if byte == 10]  # a record is whole once its last byte but the newline is
    for size in range(len(data)):
        folder = copy(tmp_path / "whole", tmp_path / "cut", data[:size])
        whole = sum(size >= end for end in ends)
        store = Store(folder)
        assert [store.get(key(i)) for i in range(3)] == [record(i) if i < whole else None for i in range(3)]
        missing = 3 - whole
        assert bool(store.damage) == bool(missing)
        assert not missing or f"{missing} records are missing" in store.damage[0]
        assert (folder / RESULTS).read_bytes() == data[: ends[whole - 1] + 1 if whole else 0]  # mended
        if size % 8 == 0:  # and good to go on with
            for i in range(3):
                store.put(key(i), record(i))
            assert lines_by_key(folder) == {key(i): 1 for i in range(3)}
            again = Store(folder)
            assert again.damage == again.repaired == [] and len(again) == 3


def newline(byte: int) -> int:
    return 10 if byte != 10 else 32


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda byte: byte ^ 1, id="bit 0"),
        pytest.param(lambda byte: byte ^ 128, id="bit 7", marks=pytest.mark.slow),
        pytest.param(newline, id="newline", marks=pytest.mark.slow),
    ],
)
def test_every_byte_changed(tmp_path: Path, no_sync: None, change: Callable[[int], int]) -> None:
    filled(tmp_path / "whole")
    data = (tmp_path / "whole" / RESULTS).read_bytes()
    starts = [0, *(i + 1 for i, byte in enumerate(data) if byte == 10)]
    for at, byte in enumerate(data):
        changed = data[:at] + bytes([change(byte)]) + data[at + 1 :]
        folder = copy(tmp_path / "whole", tmp_path / "changed", changed)
        store = Store(folder)
        hit = sum(at >= start for start in starts) - 1
        assert store.damage or store.repaired, at
        if not store.repaired:
            assert f"line {hit + 1} " in store.damage[0]
        for i in range(3):
            expected = record(i)
            assert store.get(key(i)) in ([expected] if i != hit or byte == 10 else [None]), (at, i)
        if at % 8 == 0 or byte == 10:
            store.put(key(hit), record(hit))
            assert [Store(folder).get(key(i)) for i in range(3)] == [record(i) for i in range(3)]


def test_manifest_cut_changed_or_gone(tmp_path: Path, no_sync: None) -> None:
    filled(tmp_path / "whole")
    data = (tmp_path / "whole" / MANIFEST).read_bytes()
    variants: list[bytes | None] = [None, *(data[:size] for size in range(len(data)))]
    variants += [data[:i] + bytes([byte ^ 4]) + data[i + 1 :] for i, byte in enumerate(data)]
    for variant in variants:
        path = tmp_path / "whole" / MANIFEST
        path.unlink()
        if variant is not None:
            path.write_bytes(variant)
        store = Store(tmp_path / "whole")
        assert MANIFEST in store.damage[0] and len(store) == 3
        assert Store(tmp_path / "whole").damage == []
        assert path.read_bytes() == data


def test_results_gone(tmp_path: Path) -> None:
    filled(tmp_path)
    (tmp_path / RESULTS).unlink()
    store = Store(tmp_path)
    assert "3 records are missing" in " ".join(store.damage) and len(store) == 0


def test_damage_while_open(tmp_path: Path) -> None:
    store = filled(tmp_path)
    data = bytearray((tmp_path / RESULTS).read_bytes())
    data[20] ^= 1
    (tmp_path / RESULTS).write_bytes(data)
    assert store.get(key(0)) is None and store.get(key(1)) == record(1)
    assert "damaged while it was open" in store.damage[0]
    os.truncate(tmp_path / RESULTS, 10)
    assert store.get(key(1)) is None
    assert "became shorter" in store.damage[1]


# ------------------------------------------------------------------------------------------------ faults


class Faulty:
    """`os` with a fault at the N-th write, fsync, rename or truncation, or from there on: an error, or (code None)
    death by SIGKILL. A faulty write leaves half of its bytes."""

    def __init__(self, at: int, code: int | None, stays: bool = False) -> None:
        self.at, self.code, self.stays, self.calls = at, code, stays, 0

    def __getattr__(self, name: str) -> Any:
        real = getattr(os, name)
        if name not in ("write", "fsync", "replace", "ftruncate"):
            return real

        def call(*arguments: Any) -> Any:
            self.calls += 1
            if self.calls == self.at or (self.stays and self.calls > self.at):
                if name == "write":
                    os.write(arguments[0], bytes(arguments[1])[: len(arguments[1]) // 2])
                if self.code is None:
                    os.kill(os.getpid(), signal.SIGKILL)
                raise OSError(self.code, os.strerror(self.code))
            return real(*arguments)

        return call


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
@pytest.mark.parametrize("stays", [False, True], ids=["once", "from then on"])
def test_a_failing_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, stays: bool) -> None:
    """A fault at every write, fsync and rename in turn, once or from then on: old records stay, the new one is there
    whole or not at all, and when the disk is well again the put succeeds and is there once."""
    for at in range(1, 100):
        folder = tmp_path / str(at)
        store = filled(folder, 2)

        faulty = Faulty(at, code, stays)
        monkeypatch.setattr(module, "os", faulty)
        try:
            store.put(key(2), record(2))
            done = True
        except UserError as error:
            done = False
            assert os.strerror(code) in str(error)
        monkeypatch.setattr(module, "os", os)
        if not stays:
            lines_by_key(folder)  # taken back at once, not only when the store is next opened
        fresh = Store(folder)
        assert fresh.damage == []
        assert [fresh.get(key(i)) for i in range(2)] == [record(0), record(1)]
        assert fresh.get(key(2)) in ([record(2)] if done else [None, record(2)])
        for user in (store, fresh):
            assert user.put(key(2), record(2)) == record(2)
        assert lines_by_key(folder) == {key(i): 1 for i in range(3)}
        assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []
        if faulty.calls < at:
            assert at > 5  # a put writes and syncs twice and renames once, at the least
            return
    raise AssertionError("more calls than a put can have")


KILLED = """
import sys
sys.path[:0] = [{root!r}, {tests!r}]
from test_store import Faulty, Store, key, module, record
store = Store({folder!r})
faulty = Faulty({at}, None)
module.os = faulty
store.put(key(2), record(2))
print(faulty.calls)
"""


def test_killed_at_every_write_sync_and_rename(tmp_path: Path) -> None:
    for at in range(1, 100):
        folder = tmp_path / str(at)
        filled(folder, 2)
        script = KILLED.format(root=str(ROOT), tests=str(Path(__file__).parent), folder=str(folder), at=at)
        child = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
        store = Store(folder)
        assert store.damage == []
        assert [store.get(key(i)) for i in range(2)] == [record(0), record(1)]
        assert store.get(key(2)) in (None, record(2))
        assert store.put(key(2), record(2)) == record(2)
        assert lines_by_key(folder) == {key(i): 1 for i in range(3)}
        if child.returncode == 0:
            assert at == int(child.stdout) + 1 > 5
            return
        assert child.returncode == -signal.SIGKILL, child.stderr
    raise AssertionError("more calls than a put can have")


# ------------------------------------------------------------------------------------------------ company

APPENDER = """
import os, sys
sys.path.insert(0, {root!r})
from relaylm.store import Store, content_key
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


def company(folder: Path, kills: int) -> Iterator[str]:
    """Two processes append, each killed at random moments and started again; yields what they were told is stored."""
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


def check_company(folder: Path, kills: int) -> None:
    told = set(company(folder, kills))
    store = Store(folder / "store")
    assert store.damage == []
    found = lines_by_key(folder / "store")
    assert set(found.values()) == {1}
    assert {content_key(name) for name in told} <= set(found)
    assert len(found) <= len(told) + 4 * (kills + 2)  # what was stored just before a kill was not told
    names = {r["name"]: r["load"] for r in store.records()}
    assert all(load == name * (7 * int(name.split("-")[1]) % 2000) for name, load in names.items())
    assert len(told) > 10


RACER = """
import os, sys, time
sys.path.insert(0, {root!r})
from relaylm.store import Store, content_key
os.fsync = lambda handle: None  # the faster, the more they meet
store = Store({folder!r})
while not os.path.exists({go!r}):
    time.sleep(0.001)
for i in range(150):
    kept = store.put(content_key(i), {{"kind": "k", "number": i, "by": sys.argv[1], "load": "x" * 3000}})
    assert kept["number"] == i
"""


def test_processes_that_race_for_the_same_keys(tmp_path: Path) -> None:
    """Without the lock two of them would find a key missing at once, and both append it."""
    script = RACER.format(root=str(ROOT), folder=str(tmp_path / "store"), go=str(tmp_path / "go"))
    children = [subprocess.Popen([sys.executable, "-c", script, str(worker)]) for worker in range(4)]
    time.sleep(0.5)
    (tmp_path / "go").touch()
    assert [child.wait(timeout=60) for child in children] == [0] * 4
    assert lines_by_key(tmp_path / "store") == {content_key(i): 1 for i in range(150)}
    assert Store(tmp_path / "store").damage == []


@pytest.mark.skipif(sys.platform == "win32", reason="kill -9")
def test_two_processes_ten_kills(tmp_path: Path) -> None:
    check_company(tmp_path, 10)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform == "win32", reason="kill -9")
def test_two_processes_two_hundred_kills(tmp_path: Path) -> None:
    check_company(tmp_path, 200)
