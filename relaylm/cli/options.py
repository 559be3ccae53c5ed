"""Flags that several commands have, each defined once, and the types of values."""

import argparse
import math
from collections.abc import Callable
from typing import Any

DTYPES = ("float32", "bfloat16", "float16")


def _number(kind: Callable[[str], float], low: float, what: str) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}") from None
        if not value >= low:
            raise argparse.ArgumentTypeError(f"{text} is not {what}")
        return value

    return parse


natural = _number(int, 0, "a whole number from 0 up")
positive = _number(int, 1, "a whole number from 1 up")
at_least_2 = _number(int, 2, "a whole number from 2 up")


def steps_type(text: str) -> float:
    """A number of steps, or inf."""
    return math.inf if text in ("inf", "infinity") else positive(text)


def batch_type(text: str) -> int | None:
    """A number of rows, or auto (None)."""
    return None if text == "auto" else positive(text)


def seconds_type(text: str) -> float:
    """Seconds from 90s, 10m, 1h or a plain number."""
    unit = {"s": 1, "m": 60, "h": 3600}.get(text[-1:], 0)
    return _number(float, 0, "a time such as 90s, 10m or 1h")(text[:-1] if unit else text) * (unit or 1)


def counts_type(text: str) -> tuple[int, ...]:
    """Whole numbers, separated by commas."""
    return tuple(positive(part) for part in text.split(","))


def _flag(text: str, **options: Any) -> dict[str, Any]:
    return {"help": text, **options}


SHARED = {
    "family": _flag("a bundled name, a folder, a checkpoint or a hub id (default: wiki-bpe, or RELAYLM_FAMILY)"),
    "schedules": _flag("schedules separated by commas, instead of words (default: heavy,sandwich:25%%,light)"),
    "steps": _flag("denoising steps, or inf (default: the length)", type=steps_type),
    "length": _flag("positions in a sample (default: the family's)", type=positive),
    "prompts": _flag("text file, one prompt in a line; row r continues prompt r", metavar="FILE"),
    "judge": _flag("own, hf:NAME or gguf:PATH", default="own"),
    "recipe": _flag("how perplexity is computed", default="plain", choices=("plain", "mdlm")),
    "light": _flag("the model that L stands for (default: the smallest)", metavar="MODEL"),
    "heavy": _flag("the model that H stands for (default: the largest)", metavar="MODEL"),
    "batch-size": _flag("rows in a network call", type=batch_type, default="auto"),
    "dtype": _flag("what the blocks compute in (default: bfloat16 on CUDA, else float32)", choices=DTYPES),
    "store": _flag("keep results here; what is there is not computed again", metavar="FOLDER"),
    "fresh": _flag("compute again what the store has", action="store_true"),
    "cluster": _flag("run on Ray: on this machine, or at ADDRESS", nargs="?", const="local", metavar="ADDRESS"),
    "plot": _flag("draw the result (.png, .svg or .pdf)", metavar="FILE"),
    "seed": _flag("the same seed gives the same result", type=natural, default=0),
    "device": _flag("auto, cpu, cuda or mps", default="auto"),
    "json": _flag("write the result as JSON; - for standard output", metavar="FILE"),
    "config": _flag("TOML file with values for these flags", metavar="FILE"),
}


def add_shared(parser: argparse._ActionsContainer, names: str, **texts: str) -> None:
    """Add flags of `SHARED`, some with another help text."""
    for name in names.split():
        words = ["-T", "--steps"] if name == "steps" else [f"--{name}"]
        parser.add_argument(*words, **{**SHARED[name], **({"help": texts[name]} if name in texts else {})})
