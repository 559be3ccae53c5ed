"""A small coverage-guided fuzzer for Python 3.12: inputs are random changes of those kept so far, and an input under
which a line of Python runs for the first time, or which is refused in other words, is kept. A line is reported once
(`sys.monitoring`), so it costs nothing from then on."""

from __future__ import annotations

import hashlib
import random
import re
import resource
import signal
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

MOST = 1000  # inputs that are kept for the words they are refused with
NOT_WORDS = re.compile(r"""['\"\d/@].*(['\"\d/@]|\.\.\.)|[^ -~]""", re.DOTALL)  # what a message quotes
PIECES = [b"9" * 40, b"\xff", b"\0", b"-1", b"1e999", b"NaN", b"null", b"true", b"0.5", b"%", b"[" * 300, b"{" * 300]
PIECES += ["\u0661".encode(), b"\xed\xa0\x80", b"\xe2\x80\xae", b"\x1b[2J", b"\n", b"'", b'"', b"\\u0000", b"//", b".."]


class Slow(BaseException):
    """An input takes too long; no parser catches this."""


def megabytes() -> int:
    """The most memory that this process has used."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


def changed(rng: random.Random, kept: list[bytes], words: list[bytes], longest: int) -> bytes:
    """A random change of an input that was kept, often of a late one."""
    data = bytearray(kept[-1 - int(len(kept) * rng.random() ** 2)])
    for _ in range(1 << rng.randrange(4)):
        at = rng.randrange(len(data) + 1)
        size = min(1 << rng.randrange(7), len(data) - at)
        match rng.randrange(7):
            case 0 if at < len(data):
                data[at] ^= 1 << rng.randrange(8)
            case 1 if at < len(data):
                data[at] = rng.randrange(256)
            case 2:
                del data[at : at + size]
            case 3:
                to = rng.randrange(len(data) + 1)
                data[to:to] = data[at : at + size]
            case 4:
                other = rng.choice(kept)
                start = rng.randrange(len(other) + 1)
                data[at : at + rng.choice((0, size))] = other[start : start + (1 << rng.randrange(9))]
            case _:
                data[at : at + rng.choice((0, 0, 1, size))] = rng.choice(words)
    return bytes(data[:longest])


def fuzz(
    make: Callable[[], Callable[[bytes], str]],
    folder: Path,
    inputs: int,
    seed: int,
    longest: int,
    seconds: float,
    most: int,
) -> None:
    """Try so many inputs, for a function that returns with which words it refused one; the first that fails is written
    beside the folder, and ends the process."""
    one, rng, fresh, refusals = make(), random.Random(seed), [False], {""}

    def line(code: CodeType, number: int) -> Any:
        fresh[0] |= code.co_filename != __file__
        return monitoring.DISABLE

    def late(number: int, frame: FrameType | None) -> None:
        raise Slow(f"over {seconds} s")

    monitoring = sys.monitoring  # type: ignore[attr-defined,unused-ignore]
    monitoring.use_tool_id(monitoring.COVERAGE_ID, "fuzz")
    monitoring.register_callback(monitoring.COVERAGE_ID, monitoring.events.LINE, line)
    monitoring.set_events(monitoring.COVERAGE_ID, monitoring.events.LINE)
    signal.signal(signal.SIGPROF, late)
    kept = [path.read_bytes() for path in sorted(folder.iterdir())]
    words = PIECES + sorted({word for data in kept for word in re.findall(rb"\w+|\W", data) if len(word) < 64})
    given = len(kept)
    one(kept[0])
    limit = megabytes() + most
    for number in range(inputs):
        data = kept[number] if number < given else changed(rng, kept, words, longest)
        fresh[0] = False
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            words_of_refusal = NOT_WORDS.sub("", one(data))[:80]
            signal.setitimer(signal.ITIMER_PROF, 0)
            if megabytes() > limit:
                raise MemoryError(f"over {most} MB")
        except BaseException:
            signal.setitimer(signal.ITIMER_PROF, 0)
            traceback.print_exc()
            failed = folder.with_name(f"{folder.name}-crash-{hashlib.sha1(data).hexdigest()}")
            failed.write_bytes(data)
            print(f"{failed.name}: {data[:400]!r}\nstat::number_of_executed_units: {number}")
            sys.exit(1)
        fresh[0] |= words_of_refusal not in refusals and len(kept) < MOST
        refusals.add(words_of_refusal)
        if fresh[0] and number >= given:
            kept.append(data)
            (folder / hashlib.sha1(data).hexdigest()).write_bytes(data)
    print(f"stat::number_of_executed_units: {inputs}")
