"""Each campaign in its short form: a few cases, so that the campaigns themselves stay in order."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.campaigns import fuzz, laws, mutate, supply

ROOT = Path(__file__).resolve().parents[2]


def campaign(name: str, out: Path, *words: str) -> dict[str, Any]:
    """Run a campaign in a process of its own (it makes copies of itself), and return its record."""
    command = [sys.executable, f"tests/campaigns/{name}.py", "--out", str(out), *words]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads((out / f"{name}.json").read_text())


needs_linux = pytest.mark.skipif(not sys.platform.startswith("linux"), reason="for Linux")


@needs_linux
def test_kills(tmp_path: Path) -> None:
    found = campaign("kills", tmp_path, "--size", "3", "--jobs", "1", "--only", "convert,serve", "--seed", "1")
    assert found["counts"]["kills"] >= 3 and not found["failures"] and found["seed"] == 1 and found["commit"] != ""


@needs_linux
@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
def test_faults(tmp_path: Path) -> None:
    found = campaign("faults", tmp_path, "--size", "6", "--jobs", "2", "--only", "sample,convert", "--seed", "2")
    assert found["cases"] == 6 and not found["failures"]
    assert found["changes on disk"]["convert"] > 10


@needs_linux
def test_soak(tmp_path: Path) -> None:
    for package in ("starlette", "uvicorn", "sse_starlette", "prometheus_client"):
        pytest.importorskip(package)
    found = campaign("soak", tmp_path, "--size", "2", "--stretches", "1")
    assert found["counts"]["requests"] > 0 and found["counts"]["kills"] == 1 and not found["failures"]


def test_laws(tmp_path: Path) -> None:
    words = ["--size", "5", "--only", "dream-entropy,dream-margin,spaced:2,remdm-loop", "--seed", "3"]
    assert laws.main([*words, "--out", str(tmp_path)], n=4000) == 0
    found = json.loads((tmp_path / "laws.json").read_text())
    assert found["counts"]["tests"] == 5 and len(found["told apart"]) == 4


def test_laws_can_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the law of one rule in the place of another's."""
    options = laws.CASES["rule low-confidence"][0]
    monkeypatch.setitem(laws.CASES, "rule low-confidence", (options, laws.CASES["rule random"][1]))
    words = ["--size", "2", "--only", "low-confidence", "--seed", "4", "--out", str(tmp_path)]
    assert laws.main(words, n=20_000) == 1


@pytest.mark.parametrize("target", fuzz.TARGETS)
def test_fuzz(target: str) -> None:
    """Valid inputs and random changes of them, without the fuzzer."""
    rng, one, seeds = random.Random(target), fuzz.guarded(fuzz.TARGETS[target]()), fuzz.seeds(target)
    for seed in seeds:
        one(seed)
    for _ in range(200):
        one(mutate.changed(rng, seeds, mutate.PIECES, 2**16))


BURIED = """
import sys
from pathlib import Path
from tests.campaigns import mutate
tests = [f"{' ' * k}if data[{k}:{k + 1}] == {letter}:" for k, letter in enumerate((b"q", b"z", b"k"))]
source = "\\n ".join(["def one(data):", *tests, f"   {sys.argv[2]}", "return ''"])
names = {}
exec(compile(source, "parser", "exec"), names)
mutate.fuzz(lambda: names["one"], Path(sys.argv[1]), 400_000, 1, 64, 0.2, 100)
"""


@needs_linux
@pytest.mark.skipif(sys.version_info < (3, 12), reason="needs sys.monitoring")
@pytest.mark.parametrize("bug", ["raise KeyError", "while True: pass", "bytearray(300_000_000)"])
def test_the_fuzzer_finds_what_coverage_leads_to(tmp_path: Path, bug: str) -> None:
    """Three bytes in a row, which blind changes find in one of 16 million inputs."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    (folder / "seed").write_bytes(b"hello")
    command = [sys.executable, "-c", BURIED, str(folder), bug]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    (found,) = tmp_path.glob("corpus-crash-*")
    assert done.returncode == 1 and found.read_bytes()[:3] == b"qzk"


def test_supply() -> None:
    assert supply.undeclared() == {}
    packages = supply.closure()
    assert packages["torch"]["version"] and packages["numpy"]["licence"]
