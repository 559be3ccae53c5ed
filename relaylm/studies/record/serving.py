"""What a server of this machine does under load: behind results/serve/.

    python -m relaylm.studies.record.serving results/serve/cpu.json

Saturation compares 64 clients at once with `relaylm.sample` at the same batch size, in turns, by the clock and by
processor time (on a machine that others use as well, only the second is steady). By the clock a round counts from its
64th answer to its last but 64: while all clients ask. What `sample` does counts whole. Latency is measured with Poisson
arrivals at a share of the saturated rate, memory over many small requests. With `--draw` OUT is a figure of the records
beside it.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import resource
import socket
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import numpy as np
import torch

from relaylm.files import write_json
from relaylm.measure.provenance import how_made
from relaylm.models.denoiser import Architecture
from relaylm.models.family import Family
from relaylm.models.folder import save_family
from relaylm.sampling.sample import sample
from relaylm.show.colours import BLACK, BLUE, RED, VIOLET
from relaylm.show.figures import finish, panels, save_figure
from relaylm.studies.bench.published import random_network
from relaylm.studies.record.common import command, records_beside

CLIENTS = 64


def random_family(folder: Path) -> Path:
    """A family of the paper's size in a folder: 12 and 4 blocks, 768 wide, with random weights."""
    size: dict[str, Any] = {"width": 768, "heads": 12, "length": 1024, "vocab_size": 50258}
    models = {f"d{depth}": random_network(Architecture(depth=depth, **size), depth) for depth in (4, 12)}
    return save_family(folder, models, None, length=1024, dtype="bfloat16", max_shard_bytes=1 << 30)


@contextmanager
def served(*words: str) -> Iterator[tuple[str, int]]:
    """A server beside this process: its address and process number."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    line = [sys.executable, "-m", "relaylm", "serve", "--port", str(port), *words]
    process = subprocess.Popen(line, stderr=subprocess.DEVNULL)
    try:
        address = f"http://127.0.0.1:{port}"
        while True:
            try:
                urlopen(f"{address}/health", timeout=5).close()
                break
            except OSError:
                if process.poll() is not None:
                    raise RuntimeError("the server ended") from None
                time.sleep(0.2)
        yield address, process.pid
    finally:
        process.terminate()
        process.wait(60)


def processes(pid: int) -> list[Path]:
    """A process and those that it started, as folders (Linux)."""
    found = [Path(f"/proc/{pid}")]
    for place in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it has ended meanwhile
            if _words(place)[1] == str(pid):
                found.append(place)
    return found


def _words(place: Path) -> list[str]:
    """What the kernel says of a process, from its state on."""
    return (place / "stat").read_text().rpartition(")")[2].split()


def numbers_of(pid: int) -> tuple[float, int]:
    """Processor seconds so far, and bytes of memory, of a process and those that it started."""
    each = [_words(place) for place in processes(pid)]
    ticks, pages = (sum(int(words[at]) for words in each for at in which) for which in ((11, 12), (21,)))
    return ticks / os.sysconf("SC_CLK_TCK"), pages * os.sysconf("SC_PAGE_SIZE")


Ask = Callable[[dict[str, Any]], Awaitable[tuple[float, dict[str, Any]]]]


@asynccontextmanager
async def asking(address: str) -> AsyncIterator[Ask]:
    """A function that makes a request and returns the seconds from sending to the whole answer, and the answer. Plain
    sockets, as many as there are requests at once: httpx takes several times their processor time."""
    host, port = address.removeprefix("http://").split(":")
    idle: list[Any] = []
    every: list[Any] = []

    async def ask(fields: dict[str, Any]) -> tuple[float, dict[str, Any]]:
        began, body = time.perf_counter(), json.dumps({**fields, "stream": False})
        while idle and idle[-1][0].at_eof():  # the server closes connections that were idle for half a minute
            idle.pop()
        if not idle:
            idle.append(await asyncio.open_connection(host, int(port)))
            every.append(idle[-1])
        reader, writer = connection = idle.pop()
        head = f"POST /v1/denoise HTTP/1.1\r\nhost: {host}\r\ncontent-type: application/json\r\n"
        writer.write(f"{head}content-length: {len(body)}\r\n\r\n{body}".encode())
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        size = re.search("content-length: (.*)\r", head)
        answer = await reader.readexactly(int(size[1]) if size else 0)
        if not head.startswith("http/1.1 200"):
            raise RuntimeError(f"{head}{answer.decode()}")
        idle.append(connection)
        return time.perf_counter() - began, json.loads(answer)

    try:
        yield ask
    finally:
        for _, writer in every:
            writer.close()


async def closed(
    address: str, fields: dict[str, Any], at_once: int, each: int, first_seed: int
) -> tuple[list[dict[str, Any]], list[float]]:
    """So many clients at once, each with one request after the other: the answers in order of their seeds, and the
    times at which answers came, in order."""
    times: list[float] = []
    async with asking(address) as ask:

        async def one(number: int) -> list[dict[str, Any]]:
            answers = []
            for seed in range(first_seed + number * each, first_seed + (number + 1) * each):
                answers.append((await ask({**fields, "seed": seed}))[1])
                times.append(time.perf_counter())
            return answers

        return [answer for answers in await asyncio.gather(*map(one, range(at_once))) for answer in answers], times


async def poisson(address: str, fields: dict[str, Any], rate: float, requests: int) -> list[float]:
    """Latencies with arrivals at random times, `rate` a second on average."""
    chance = random.Random(0)
    async with asking(address) as ask:

        async def one(seed: int, at: float) -> float:
            await asyncio.sleep(at)
            return (await ask({**fields, "seed": seed}))[0]

        times = np.cumsum([chance.expovariate(rate) for _ in range(requests)])
        return list(await asyncio.gather(*(one(seed, at) for seed, at in enumerate(times))))


def counted(address: str) -> dict[str, float]:
    """What the server's own metrics say of its calls so far: number, rows, and seconds of waiting for the device."""
    with urlopen(f"{address}/metrics") as answer:
        lines = [line.rpartition(" ") for line in answer.read().decode().splitlines() if not line.startswith("#")]
    names = {"calls": "calls_total", "rows": "call_rows_total", "waited": "call_wait_seconds_total"}
    return {
        short: sum(float(value) for label, _, value in lines if label.partition("{")[0] == f"relaylm_{name}")
        for short, name in names.items()
    }


def saturation(
    address: str, pid: int, family: Family, fields: dict[str, Any], rounds: int, each: int
) -> dict[str, Any]:
    """Rows a second of 64 clients with so many requests each, and of `sample`, in turns; a text of each is compared."""
    found: dict[str, list[list[float]]] = {"server": [], "sample": []}
    options = {name: value for name, value in fields.items() if name != "schedule"}
    batch = asyncio.run(closed(address, fields, 1, 1, 10**6))[0][0]["relaylm"]["batch_size"]
    rows, same = CLIENTS * each, True
    asyncio.run(closed(address, fields, CLIENTS, 1, 2 * 10**6))  # both warm
    sample(family, fields["schedule"], batch, batch_size=batch, **options)
    totals = dict.fromkeys(("calls", "rows", "waited", "seconds"), 0.0)
    for seed in range(0, rounds * rows, rows):
        spent, clock, before = numbers_of(pid)[0], time.perf_counter(), counted(address)
        answers, times = asyncio.run(closed(address, fields, CLIENTS, each, seed))
        now = {**counted(address), "seconds": time.perf_counter()}
        totals = {name: totals[name] + now[name] - {**before, "seconds": clock}[name] for name in totals}
        middle = (rows - 2 * CLIENTS) / (times[-CLIENTS - 1] - times[CLIENTS - 1])
        found["server"].append([middle, (numbers_of(pid)[0] - spent) / rows])
        clock, usage = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF)
        samples = sample(family, fields["schedule"], rows, batch_size=batch, seed=seed, **options)
        seconds, after = time.perf_counter() - clock, resource.getrusage(resource.RUSAGE_SELF)
        processor = after.ru_utime + after.ru_stime - usage.ru_utime - usage.ru_stime
        found["sample"].append([rows / seconds, processor / rows])
        own = samples.texts or [" ".join(map(str, row)) for row in samples.tokens[:1].tolist()]
        same &= answers[0]["texts"] == own[:1]
    server, alone = (np.array(found[name]).mean(axis=0) for name in ("server", "sample"))
    return {
        "clients": CLIENTS,
        "requests_each": each,
        "batch_size": batch,
        "rounds": rounds,
        "rows_per_second": {"server": float(server[0]), "sample": float(alone[0])},
        "processor_seconds_per_row": {"server": float(server[1]), "sample": float(alone[1])},
        "ratio_by_clock": float(server[0] / alone[0]),
        "ratio_by_processor_time": float(alone[1] / server[1]),
        "calls_per_second": totals["calls"] / totals["seconds"],
        "rows_per_call": totals["rows"] / totals["calls"],
        "share_waiting_for_the_device": totals["waited"] / totals["seconds"],
        "each": found,
        "texts_equal": bool(same),
    }


def latency(address: str, fields: dict[str, Any], rate: float, load: float, requests: int) -> dict[str, Any]:
    """Percentiles of the latency at a share of the saturated rate."""
    seconds = asyncio.run(poisson(address, fields, load * rate, requests))
    p50, p95, p99 = np.percentile(seconds, [50, 95, 99]).tolist()
    return {"load": load, "requests_per_second": load * rate, "requests": requests, "p50": p50, "p95": p95, "p99": p99}


def memory(address: str, pid: int, requests: int) -> dict[str, Any]:
    """Resident memory of the server while it answers small requests of many lengths and schedules."""
    points = []

    async def many(first: int, count: int) -> None:
        async with asking(address) as ask:

            async def one(number: int) -> None:
                for seed in range(first + number, first + count, 16):
                    schedule = ("light", "L50% H50%", "heavy")[seed % 3]
                    fields = {"length": 4 + seed % 13, "steps": 1 + seed % 2, "schedule": schedule, "seed": seed}
                    await ask(fields)

            await asyncio.gather(*map(one, range(16)))

    step = max(1, requests // 20)
    for first in range(0, requests, step):
        asyncio.run(many(first, step))
        points.append([first + step, numbers_of(pid)[1]])
    half = len(points) // 2
    growth = points[-1][1] / points[half - 1][1] - 1
    return {"requests": requests, "bytes_after": points, "growth_over_second_half": growth}


def main() -> None:
    """Measure and write the record."""
    args = command(
        __doc__,
        "out",
        family=("wiki-char", "`random`: 12 and 4 blocks, 768 wide, L = 1024"),
        **{"device": "cpu", "length": 64, "steps": int, "spacing": str, "schedule": "sandwich:50%"},
        **{"rounds": 3, "each": (3, "requests of each client in a round, at least 3")},
        **{"requests": 100, "small_requests": 10_000},
        draw=(False, "only the figure OUT, from the records in its folder"),
    )
    if args.draw:
        print(save_figure(figure(records_beside(args.out)), args.out))
        return
    ways = {name: getattr(args, name) for name in ("steps", "spacing") if getattr(args, name) is not None}
    fields = {"length": args.length, **(ways or {"steps": args.length}), "schedule": args.schedule}
    with tempfile.TemporaryDirectory() as folder:
        name = str(random_family(Path(folder) / "random")) if args.family == "random" else args.family
        measured = under_load(name, fields, args)
    seed = "the number of the round (saturation), of the request (latency, memory)"
    record = {"seed": seed, "request": fields, "family": args.family, **measured}
    write_json(args.out, {**how_made(torch.device(args.device)), **record})


def under_load(name: str, fields: dict[str, Any], args: Namespace) -> dict[str, Any]:
    """Everything that is measured, with a server for the load and, if it is wanted, one for the memory."""
    family, words = Family.load(name, device=args.device), ("--family", name, "--device", args.device)
    with served(*words) as (address, pid):
        full = saturation(address, pid, family, fields, args.rounds, args.each)
        print(json.dumps({**full, "each": None}), flush=True)
        loads = []
        for load in (0.5, 0.8):
            loads.append(latency(address, fields, full["rows_per_second"]["server"], load, args.requests))
            print(json.dumps(loads[-1]), flush=True)
    if not args.small_requests:
        return {"saturation": full, "latency": loads}
    with served(*words, "--batch-size", "1") as (address, pid):
        flat = memory(address, pid, args.small_requests)
        print(json.dumps(flat["growth_over_second_half"]), flush=True)
    return {"saturation": full, "latency": loads, "memory": flat}


# ------------------------------------------------------------------------------------------------ the figure

QUANTILES = {"p50": BLUE, "p95": RED, "p99": VIOLET}


def figure(records: Sequence[Mapping[str, Any]]) -> Any:
    """Latency by load, a panel for each record that has it, and memory over the most requests."""
    loaded = [record for record in records if "latency" in record]
    each = [record["memory"] for record in records if "memory" in record]
    flat: Mapping[str, Any] = max(each, key=lambda memory: memory["requests"], default={})
    columns = len(loaded) + bool(flat)
    drawn, row = panels(2.75 * columns, 3.1, columns)
    for axes, record in zip(row, loaded, strict=False):
        _latency(axes, record)
    if flat:
        requests, size = zip(*flat["bytes_after"], strict=True)
        axes, size_N = row[-1], np.array(size) / 1e6
        axes.plot(requests, size_N, color=BLACK, marker="o", markersize=3, linewidth=1)
        axes.set_ylim(0, 1.3 * size_N.max())
        growth = flat["growth_over_second_half"]
        axes.set_title(f"memory of the server\n{growth:+.2%} in the second half", fontsize=8)
        finish(axes, "requests answered", "MB", grid="y", legend=False)
    return drawn


def _latency(axes: Any, record: Mapping[str, Any]) -> None:
    full, loads, machine = record["saturation"], record["latency"], record["machine"]
    unit, scale = ("s", 1) if loads[0]["p50"] >= 1 else ("ms", 1000)
    for k, (name, colour) in enumerate(QUANTILES.items()):
        seconds = np.array([one[name] for one in loads])
        bars = axes.bar(np.arange(len(loads)) + 0.29 * (k - 1), scale * seconds, 0.26, color=colour, label=name)
        axes.bar_label(bars, fmt="%.1f" if scale == 1 else "%.0f", fontsize=7, padding=1)
    axes.set_xticks(range(len(loads)), [f"{one['load']:.0%}" for one in loads])
    axes.set_ylim(0, 1.35 * scale * max(one["p99"] for one in loads))
    family = "12 x 768" if record["family"] == "random" else record["family"]
    where = (machine["gpu"] or f"{machine['threads']} CPU cores").removeprefix("NVIDIA ")
    speed = f"{full['rows_per_second']['server']:.3g} rows a second, {full['ratio_by_clock']:.0%} of sample's"
    axes.set_title(f"{family}, length {record['request']['length']}, {where}\n{speed}", fontsize=8)
    finish(axes, "load", f"latency, {unit}", grid="y", ncols=3, loc="upper center", handlelength=1, columnspacing=1)


if __name__ == "__main__":
    main()
