"""Training that is killed, or out of disk, at any moment: the last good checkpoint stays, and the end is the same."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from relaylm.errors import UserError
from relaylm.models.denoiser import Architecture
from relaylm.train import checkpoint
from relaylm.train import run as loop
from relaylm.train.corpus import TokenFile, prepare
from relaylm.train.recipe import Recipe
from relaylm.train.run import train_model

SHAPE = Architecture(28, 8, 8, 1, 1)
RECIPE = Recipe(steps=6, batch=4, warmup=2, lr=1e-2, ema=0.9, log_every=2, eval_rows=2, checkpoint_every=2)
CALLS = ("open", "write", "fsync", "replace")


class Killed(BaseException):
    """Stands in for kill -9: no handler may catch it to clean up."""


@contextmanager
def fault(monkeypatch: pytest.MonkeyPatch, at: int, error: Callable[[], BaseException]) -> Iterator[list[str]]:
    """Make the at-th of the file system calls that checkpoints are made of fail; before it, half a write gets through.
    Yields the calls made."""
    made: list[str] = []
    with monkeypatch.context() as patch:
        for name in CALLS:
            real = getattr(os, name)

            def call(*arguments: Any, name: str = name, real: Any = real, **options: Any) -> Any:
                made.append(name)
                if len(made) == at + 1:
                    if name == "write":
                        real(arguments[0], arguments[1][: len(arguments[1]) // 2])
                    raise error()
                return real(*arguments, **options)

            patch.setattr(os, name, call)
        yield made


FAULTS: dict[str, Callable[[], BaseException]] = {
    "ENOSPC": lambda: OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)),
    "EIO": lambda: OSError(errno.EIO, os.strerror(errno.EIO)),
    "EACCES": lambda: PermissionError(errno.EACCES, os.strerror(errno.EACCES)),
    "kill": Killed,
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> TokenFile:
    folder = tmp_path_factory.mktemp("corpus")
    (folder / "a.txt").write_text("some words that come again " * 20)
    return prepare(folder / "a.txt", folder / "c", tokenizer="text8", holdout=0.1, progress=False)


def final(folder: Path) -> dict[str, torch.Tensor]:
    found = checkpoint.load(folder / loop.CHECKPOINT)
    assert found is not None and found[1]["step"] == RECIPE.steps
    return found[0]


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_at_every_call_of_a_save_keeps_the_old_file_or_has_the_new(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "checkpoint.safetensors"
    old, new = ({name: torch.randn(3, 5) for name in "abcd"} for _ in range(2))
    for at in range(1000):
        checkpoint.save(path, old, {"step": 1})
        try:
            with fault(monkeypatch, at, FAULTS[kind]) as made:
                checkpoint.save(path, new, {"step": 2})
        except (UserError, Killed) as error:
            found = checkpoint.load(path)
            assert found is not None
            if made[: at + 1].count("replace") == 0 or made[at] == "replace":
                assert found[1] == {"step": 1} and same(found[0], old)
            else:
                assert found[1] == {"step": 2} and same(found[0], new)
            if kind != "kill":
                assert "cannot write" in str(error) and "\n" not in str(error) and "is kept" in str(error)
                assert [file.name for file in tmp_path.iterdir()] == [path.name]
            continue
        if at == len(made):
            break
        found = checkpoint.load(path)  # without a lock a file is written all the same
        assert found is not None and found[1] == {"step": 2} and made[at] == "open"
    assert at == len(made) and set(made) == set(CALLS)
    assert at == 7  # open, the lock's open, write, fsync, replace, and the folder's open and fsync


def run_with_faults(corpus: TokenFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> int:
    train_model(corpus, tmp_path / "whole", SHAPE, RECIPE, progress=False)
    expected = final(tmp_path / "whole")
    for at in range(10_000):
        folder = tmp_path / f"{kind}-{at}"
        try:
            with fault(monkeypatch, at, FAULTS[kind]) as made:
                train_model(corpus, folder, SHAPE, RECIPE, progress=False)
        except (UserError, Killed):
            found = checkpoint.load(folder / loop.CHECKPOINT)
            assert found is not None or made[:at].count("replace") <= 1  # the first is that of metrics.jsonl
        else:
            if at >= len(made):
                return at
            assert made[at] == "open"  # that of the lock: without a lock a file is written all the same
        train_model(corpus, folder, SHAPE, RECIPE, progress=False)
        assert same(final(folder), expected)
    raise AssertionError("never finished")


@pytest.mark.parametrize("kind", FAULTS)
def test_a_run_survives_a_fault_at_every_call(
    kind: str, corpus: TokenFile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_with_faults(corpus, tmp_path, monkeypatch, kind) >= 4 * 7  # the metrics and three checkpoints


def test_an_unwritable_folder_is_one_sentence(corpus: TokenFile, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(UserError, match="cannot write"):
        train_model(corpus, tmp_path / "file" / "run", SHAPE, RECIPE, progress=False)


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "c.safetensors"
    checkpoint.save(path, {"a": torch.arange(6.0), "b": torch.zeros(2, 2)}, {"step": 3, "text": "x"})
    data = path.read_bytes()
    assert checkpoint.load(path) is not None
    for size in range(len(data)):
        path.write_bytes(data[:size])
        with pytest.raises(UserError, match="damaged"):
            checkpoint.load(path)
    whole = {"a": torch.arange(6.0), "b": torch.zeros(2, 2)}
    header = 8 + int.from_bytes(data[:8], "little")
    for i in range(len(data)):
        path.write_bytes(data[:i] + bytes([data[i] ^ 0x15]) + data[i + 1 :])
        try:
            found = checkpoint.load(path)
        except UserError:
            continue
        assert i < header  # a flipped bit in the data is always noticed; in the header it may change a name
        assert found is not None and (not same(found[0], whole) or found[1] != {"step": 3, "text": "x"})


# One process that has imported everything forks the runs that are killed: starting Python each time takes seconds.
HARNESS = """
import os, random, signal, sys, time
import torch
torch.set_num_threads(1)
from pathlib import Path
from relaylm.train import checkpoint
from relaylm.train import run as loop
from relaylm.train.corpus import TokenFile
from relaylm.models.denoiser import Architecture
from relaylm.train.recipe import Recipe

corpus = TokenFile.load(sys.argv[1])
root, kills, seed = Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
recipe = Recipe(steps=24, batch=4, warmup=2, ema=0.9, log_every=2, eval_every=10, eval_rows=2, checkpoint_every=1)

def start(folder):
    child = os.fork()
    if child == 0:
        try:
            loop.train_model(corpus, folder, Architecture(28, 8, 16, 1, 1), recipe, progress=False)
            os._exit(0)
        except BaseException as error:
            print(repr(error), file=sys.stderr)
            os._exit(1)
    return child

def finish(child):
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

began = time.monotonic()
finish(start(root / "whole"))
duration = time.monotonic() - began
expected, _ = checkpoint.load(root / "whole" / loop.CHECKPOINT)
chance = random.Random(seed)
early = 0
for i in range(kills):
    folder = root / str(i)
    child = start(folder)
    time.sleep(chance.uniform(0, 0.9 * duration))
    os.kill(child, signal.SIGKILL)
    early += os.waitpid(child, 0)[1] == signal.SIGKILL
    finish(start(folder))
    found, state = checkpoint.load(folder / loop.CHECKPOINT)
    assert state["step"] == 24 and found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected), i
print(f"killed {early} of {kills} in a run of {duration:.2f} s")
"""


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_kill_9_and_resume_ends_with_the_same_bits(kills: int, corpus: TokenFile, tmp_path: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-c", HARNESS, str(corpus.folder), str(tmp_path), str(kills), "0"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith("killed") and not result.stdout.startswith("killed 0")
