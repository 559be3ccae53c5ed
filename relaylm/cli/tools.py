"""What commands share: reading schedules, texts and families, checking and writing outputs, progress and notes."""

import argparse
import contextlib
import os
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from relaylm.console import Bar, note, progress_bar
from relaylm.errors import UserError, printable, reason
from relaylm.files import atomic_write, expand, read_object

Result = dict[str, Any]
DEFAULT_FAMILY = "wiki-bpe"


def chosen(args: argparse.Namespace, names: str) -> dict[str, Any]:
    """The values of flags, by name."""
    return {name: getattr(args, name) for name in names.split()}


def progress(label: str, unit: str, shown: bool = True) -> Bar:
    """A bar whose `report` is a callback; it appears only if the work takes over a second."""
    return progress_bar(label, None, unit, shown, delay=1.0)


def read_file(path: str) -> str:
    """The text of a file."""
    try:
        return expand(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {reason(error)}") from None


def read_lines(path: str | None) -> list[str] | None:
    """The lines of a file that are not empty; None without a file."""
    return None if path is None else [line for line in read_file(path).splitlines() if line]


def read_schedule(text: str) -> str:
    """A schedule as typed, or the content of @FILE: the notation, or JSON with a "schedule" in it."""
    if text.startswith("@"):
        path, text = text[1:], read_file(text[1:])
        if text.lstrip().startswith("{"):
            from relaylm.core.schedule import Schedule

            data = read_object(expand(path))
            value = data.get("schedule", data)
            text = value if isinstance(value, str) else str(Schedule.from_json(value))
    return " ".join(text.split())


def read_schedules(texts: str) -> list[str]:
    """Schedules separated by commas, each as typed (tables show them so) or as its @FILE says. All are checked."""
    from relaylm.core.schedule import Schedule

    found = [read_schedule(text.strip()) for text in texts.split(",") if text.strip()]
    for text in found:
        Schedule.parse(text)
    return found


def asked_schedules(args: argparse.Namespace) -> list[str]:
    """The schedules that a command names, one in a word, or separated by commas in --schedules."""
    if args.asked and args.schedules is not None:
        raise UserError("name schedules as words or in --schedules, not both")
    listed = "heavy,sandwich:25%,light" if args.schedules is None else args.schedules
    return [text for words in args.asked or [listed] for text in read_schedules(words)]


def split_list(text: str | None) -> list[str] | None:
    """Words separated by commas; None if there are none."""
    return [word.strip() for word in (text or "").split(",") if word.strip()] or None


def default_family(source: str | None) -> str:
    """The family that was named; else that of RELAYLM_FAMILY in the environment; else the bundled wiki-bpe."""
    return source or os.environ.get("RELAYLM_FAMILY") or DEFAULT_FAMILY


def load_family(args: argparse.Namespace) -> Any:
    """The family of --family, on --device, in --dtype."""
    from relaylm.models.family import Family

    source = args.family or _remembered(getattr(args, "schedule", None))
    return Family.load(default_family(source), device=args.device, dtype=getattr(args, "dtype", None))


def _remembered(schedule: str | None) -> str | None:
    """The family that a schedule was found for, where it is the @FILE that `relaylm search --json` wrote."""
    if schedule is None or not schedule.startswith("@") or not read_file(schedule[1:]).lstrip().startswith("{"):
        return None
    family = read_object(expand(schedule[1:])).get("family")
    source = family.get("source") if isinstance(family, dict) else None
    return source if isinstance(source, str) else None


def open_workers(family: Any, address: str | None) -> Any:
    """Ray's workers at an address, as a context; a context of None without one."""
    if address is None:
        return contextlib.nullcontext()
    from relaylm.cluster import Cluster

    return Cluster(family, address)


def token_rows(family: Any, path: str | None, length: int, rows: int | None) -> Any:
    """Rows of tokens, evenly spread over a text: a file, or the held-out text that comes with the family."""
    from relaylm.measure.likelihood import held_out, spread_rows

    if family.tokenizer is None:
        raise UserError("this family has no tokenizer, so it cannot read a text")
    tokens_N = held_out(family, path or None)
    if tokens_N is None:
        raise UserError("this family comes without a held-out text: name one with --text FILE")
    return spread_rows(tokens_N, length, rows)


def check_writable(path: str | None) -> None:
    """Refuse an output that could not be written, before any work is done."""
    if path is None:
        return
    if path == "-":
        raise UserError("- stands for standard output with --json alone: name a file")
    target = Path(os.path.realpath(expand(path)))
    if target.is_dir():
        raise UserError(f"cannot write {path}: it is a folder")
    if not target.parent.is_dir():
        raise UserError(f"cannot write {path}: the folder {target.parent} does not exist")
    replaced = not target.exists() or target.is_file()  # a new file, beside which a temporary one must fit
    if (replaced and not os.access(target.parent, os.W_OK)) or (target.exists() and not os.access(target, os.W_OK)):
        raise UserError(f"cannot write {path}: permission denied")


def check_plot(path: str | None) -> None:
    """Refuse a figure that could not be drawn or written."""
    if path is not None and Path(path).suffix.lower() not in (".png", ".svg", ".pdf"):
        raise UserError(f"cannot draw {path}: the name must end in .png, .svg or .pdf")
    if path is not None and find_spec("matplotlib") is None:
        raise UserError("figures need matplotlib: `pip install relaylm[report]`")
    check_writable(path)


def write_last(args: argparse.Namespace, path: str | None, make: Callable[[], str]) -> None:
    """Have a page or a table written, if it is wanted, once the command's result is: one that fails loses no result."""
    if path is not None:
        args.last = [*getattr(args, "last", ()), lambda: write_text(path, make())]


def draw_last(args: argparse.Namespace, draw: Callable[[Result, str], Any], result: Result) -> None:
    """The same for the figures of --plot; `draw` returns their files."""

    def drawn() -> None:
        files = draw(result, args.plot)
        for file in files if isinstance(files, list) else [files]:
            note(f"written: {file}")

    if args.plot is not None:
        args.last = [*getattr(args, "last", ()), drawn]


def write_text(path: str, text: str) -> None:
    """Write a file whole or not at all. A link is followed; a pipe or a device is written to, not replaced."""
    target = Path(os.path.realpath(expand(path)))
    if not target.exists() or target.is_file():
        atomic_write(target, text)
        note(f"written: {path}")
        return
    try:
        target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write {path}: {reason(error)}") from None


def show(args: argparse.Namespace, text: str) -> None:
    """Print a report, unless standard output is for JSON."""
    if args.json != "-":
        print(printable(text, sys.stdout))


def with_provenance(result: Result, family: Any, args: argparse.Namespace) -> Result:
    """A result for `--json` with how it was made; the result's own entries take precedence."""
    if args.json is None:
        return result
    from relaylm.measure.provenance import how_made

    seed = {"seed": args.seed} if hasattr(args, "seed") else {}
    return {**seed, **how_made(family.device), **result}
