"""Ranges of rows on Ray's workers are the rows of one process, whichever workers are lost on the way."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from local_workers import Local

from relaylm.cli import main as cli
from relaylm.cluster import Cluster, row_ranges, sample_many
from relaylm.errors import UserError
from relaylm.measure.compare import compare
from relaylm.measure.evaluate import sample_rows
from relaylm.measure.store import Store
from relaylm.models.denoiser import Architecture, Transformer
from relaylm.models.family import Family
from relaylm.models.folder import save_family
from relaylm.models.tokenizer import Text8Tokenizer
from relaylm.sampling.result import Samples
from relaylm.sampling.sample import sample
from relaylm.search.exhaustive import all_placements
from relaylm.search.tree import Grown, Stopped, grow_rows


def stored_family(folder: Path, width: int = 16, length: int = 32) -> Family:
    models = {}
    for depth in (1, 3):
        network = Transformer(Architecture(vocab_size=28, length=length, width=width, depth=depth, heads=2))
        network.initialise(torch.Generator().manual_seed(depth))
        network.output_layer.linear.weight.data.normal_(0, 1, generator=torch.Generator().manual_seed(9))
        models[f"{depth}b"] = network.eval()
    judge = Transformer(Architecture(vocab_size=28, length=length, width=width, depth=1, heads=2, causal=True))
    judge.initialise(torch.Generator().manual_seed(7)).eval()
    save_family(folder, models, Text8Tokenizer(), length=length, name="tiny", judge=judge)
    return Family.load(folder)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    return stored_family(tmp_path_factory.mktemp("families") / "tiny")


@pytest.fixture(scope="module")
def cluster(family: Family) -> Iterator[Cluster]:
    pytest.importorskip("ray")
    with Cluster(family, workers=2) as workers:
        yield workers


def same(a: Samples, b: Samples) -> None:
    for x, y in ((a.tokens, b.tokens), *((getattr(a.trace, k), getattr(b.trace, k)) for k in ("step_nL", "model_nL"))):
        np.testing.assert_array_equal(x, y)
    assert a.texts == b.texts and a.trace.models == b.trace.models and a.schedule == b.schedule
    for name in ("calls", "flops", "flops_all_heavy", "blocks_saved", "batch_size"):
        one, other = getattr(a.cost, name), getattr(b.cost, name)
        assert one == other or one == pytest.approx(other, rel=1e-12)


@pytest.mark.parametrize("number", [1, 2, 7])
def test_ranges(number: int) -> None:
    for n in (1, 5, 16, 33, 1000):
        ranges = row_ranges(n, 4, number)
        assert [r for first, rows in ranges for r in range(first, first + rows)] == list(range(n))
        assert len(ranges) <= 4 * number and (len(ranges) == 1 or min(rows for _, rows in ranges) >= 8)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"schedule": "heavy", "prompt": "the cat ", "seed": 4, "steps": 9},
        {"given": np.where(np.arange(40 * 20).reshape(40, 20) % 3 == 0, 5, -1), "batch_size": 3},
        {"first_row": 100, "temperature": 0.8, "length": 20},
        {"schedule": "L25% H75% spaced:5", "batch_size": 3},
    ],
)
def test_a_large_sample_in_ranges(family: Family, options: dict[str, Any]) -> None:
    """One after the other in this process: joining is what is tested."""
    local = Local(family)
    local.number = 3
    options = {"batch_size": None, "schedule": "L25% H50% L25%", **options}
    schedule, heard = options.pop("schedule"), []
    parts = sample_many(local, schedule, 40, on_rows=lambda *pair: heard.append(pair), **options)
    same(parts, sample(family, schedule, 40, **options))
    assert heard[-1] == (40, 40)
    if options["batch_size"]:
        assert len(heard) == 6


def grown_equal(a: Grown, b: Grown) -> None:
    np.testing.assert_array_equal(a.tokens_SnL, b.tokens_SnL)
    assert a.calls_made_K.tolist() == b.calls_made_K.tolist()


def test_workers_do_as_local_does_and_one_may_die(family: Family, cluster: Cluster) -> None:
    schedules = [s.bind(family.light, family.heavy).resample(32) for s in all_placements(4, 2)]
    tasks = [(schedules, first, 8, {"batch_size": 4, "seed": 1}) for first in range(0, 64, 8)]
    expected = dict(Local(family).map(grow_rows, tasks))
    found: dict[int, Grown] = {}
    killed = 0
    for index, grown in cluster.map(grow_rows, tasks):
        assert index not in found
        found[index] = grown
        busy = [pid for actor, pid in cluster.pids.items() if actor not in cluster._idle]
        if not killed and busy:
            killed = busy[0]
            os.kill(killed, signal.SIGKILL)
    assert killed and killed not in cluster.pids.values()
    assert sorted(found) == list(range(len(tasks)))
    for index, grown in expected.items():
        grown_equal(found[index], grown)
    same(sample_many(cluster, "L25% H75%", 40, batch_size=4), sample(family, "L25% H75%", 40, batch_size=4))


def test_a_comparison_on_workers(family: Family, cluster: Cluster, tmp_path: Path) -> None:
    """The same table, and the same store: what the workers drew is found there by a comparison without them."""

    def table(**options: Any) -> list[dict[str, Any]]:
        result = compare(family, ["sandwich", "heavy"], n=70, batch_size=16, rivals=False, progress=False, **options)
        return [{name: value for name, value in row.items() if name != "seconds"} for row in result["rows"]]

    here = table()
    assert table(cluster=cluster, store=tmp_path) == here
    records = len(list(Store(tmp_path).records("samples")))
    assert records == 2 * len(here)  # 64 rows and 6
    assert table(store=tmp_path) == here and len(list(Store(tmp_path).records("samples"))) == records


class Pretended(Local):
    """A cluster for the command line to find, without Ray."""

    asked: ClassVar[list[str]] = []

    def __init__(self, family: Family, address: str) -> None:
        super().__init__(family)
        self.asked.append(address)

    def __enter__(self) -> Pretended:
        return self

    def __exit__(self, *_: object) -> None:
        self.asked.append("closed")


def test_on_the_command_line(
    family: Family, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("relaylm.cluster.Cluster", Pretended)
    assert family.folder is not None

    def run(command: str, *words: str) -> Any:
        code = cli.main([command, "--family", str(family.folder), "--device", "cpu", "--json", "-", *words])
        assert code == 0, capsys.readouterr().err
        return json.loads(capsys.readouterr().out)

    words = ["-n", "20", "--schedule", "sandwich", "--batch-size", "2", "--prompt", "the "]
    assert run("sample", *words, "--cluster")["tokens"] == run("sample", *words)["tokens"]
    words = ["-n", "4", "--schedules", "sandwich", "--batch-size", "2"]
    there, here = (run("compare", *words, *more)["rows"] for more in (["--cluster", "host:6379"], []))
    assert [row["log_ppls"] for row in there] == [row["log_ppls"] for row in here]
    assert Pretended.asked == ["local", "closed", "host:6379", "closed"]
    assert cli.main(["sample", "--family", str(family.folder), "--watch", "--cluster"]) == 2
    assert "--watch plays what happens here" in capsys.readouterr().err


def test_errors_come_back_as_they_were(cluster: Cluster) -> None:
    with pytest.raises(UserError, match=r"^temperature must be above 0, not -1$"):
        dict(cluster.map(sample_rows, [("heavy", 0, 2, {"temperature": -1})]))
    assert [index for index, _ in cluster.map(sample_rows, [("heavy", 0, 2, {})])] == [0]  # and work goes on


def test_stopping(cluster: Cluster) -> None:
    began = time.monotonic()
    with pytest.raises(Stopped):
        dict(cluster.map(sample_rows, [("heavy", 0, 10_000, {})] * 2, stop=lambda: time.monotonic() > began + 1))
    assert time.monotonic() - began < 15
    with pytest.raises(Stopped):
        dict(Local(cluster.family).map(sample_rows, [("heavy", 0, 1, {})], stop=lambda: True))


def test_messages(family: Family) -> None:
    pytest.importorskip("ray")
    with pytest.raises(UserError, match="save this one first"):
        Cluster(Family(family.models, family.mask_id, family.vocab_size, family.length))
    with pytest.raises(UserError, match="at least one worker"):
        Cluster(family, workers=0)


def test_workers_load_what_the_family_is_now(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """A narrow residual stream is the models'; changed weights are in no folder, before or after workers start."""
    asked: list[Any] = []
    load = SimpleNamespace(remote=lambda *how: asked.append(how) or len(asked))
    remote = SimpleNamespace(remote=lambda: SimpleNamespace(load=load))
    ray = SimpleNamespace(
        exceptions=SimpleNamespace(**dict.fromkeys(
            ("RayActorError", "WorkerCrashedError", "NodeDiedError", "ObjectLostError", "OutOfMemoryError"), OSError
        )),
        is_initialized=lambda: True, cluster_resources=lambda: {"CPU": 1.0}, kill=lambda actor: None,
        remote=lambda **_: lambda worker: remote,
    )  # fmt: skip
    monkeypatch.setitem(sys.modules, "ray", ray)
    assert family.folder is not None
    own = Family.load(family.folder)
    for narrow in (False, True):
        for model in own.models.values():
            model.narrow = narrow  # type: ignore[attr-defined]
        workers = Cluster(own)
        assert asked.pop() == (str(family.folder), "cpu", torch.float32, narrow, family.digest)
    own["1b"].output_layer.linear.bias.data += 1  # type: ignore[attr-defined]
    with pytest.raises(UserError, match="changed after its workers were started"):
        next(workers.map(sample_rows, []))
    with pytest.raises(UserError, match="save this one first"):
        Cluster(own)


@pytest.mark.slow
def test_addresses_where_nobody_is(family: Family) -> None:
    """In a process of its own: Ray is running in this one."""
    pytest.importorskip("ray")
    assert family.folder is not None
    code = f"""
from relaylm.cluster import Cluster
from relaylm.models.family import Family
for address in ("127.0.0.1:1", "nonsense"):
    try:
        Cluster(Family.load({str(family.folder)!r}), address)
    except ValueError as error:
        print(error)
"""
    lines = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.splitlines()
    assert [line.split(": ")[0] for line in lines] == [
        f"cannot reach a Ray cluster at {address}" for address in ("127.0.0.1:1", "nonsense")
    ]


def test_nobody_is_there(family: Family, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without Ray; the rest of the package does not miss it."""
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"pip install relaylm\[cluster\]"):
        Cluster(family)
