"""What commands share: where to write, what to read, which family, progress on standard error."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from relaylm.errors import UserError


def note(text: str) -> None:
    print(text, file=sys.stderr)


def out(text: str) -> None:
    print(text)


@contextlib.contextmanager
def progress(label: str, unit: str, shown: bool = True) -> Iterator[Callable[[int, int], None] | None]:
    """A bar for anything that reports (done, total); appears only if the work takes over a second."""
    if not shown:
        yield None
        return
    from relaylm.progress import progress_bar

    with progress_bar(label, None, unit, delay=1.0, leave=False, dynamic_ncols=True) as bar:

        def update(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield update


def read_schedule(text: str) -> str:
    """The text of a schedule in one line, or what @FILE says: plain notation, or JSON with a "schedule" in it."""
    if not text.startswith("@"):
        return " ".join(text.split())
    path = Path(text[1:]).expanduser()
    content = read_file(str(path)).strip()
    if content.startswith("{"):
        from relaylm.schedule import Schedule

        try:
            data = json.loads(content)
        except json.JSONDecodeError as error:
            raise UserError(f"{path} is not valid JSON: {error}") from None
        value = data.get("schedule", data)
        return " ".join(value.split()) if isinstance(value, str) else str(Schedule.from_json(value))
    return " ".join(content.split())


def read_schedules(texts: str) -> list[str]:
    """Schedules separated by commas, each as it was typed (or as its @FILE says): so tables name them. All are good."""
    from relaylm.schedule import Schedule

    found = [read_schedule(text.strip()) for text in texts.split(",") if text.strip()]
    for text in found:
        Schedule.parse(text)
    return found


def with_provenance(result: dict[str, Any], family: Any, args: argparse.Namespace) -> dict[str, Any]:
    """A result for `--json`, and how it was made; what the result says itself stands."""
    from relaylm.provenance import how_made

    seed = {"seed": args.seed} if hasattr(args, "seed") else {}
    return {**seed, **how_made(family.device), **result}


def read_file(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {reason(error)}") from None


def default_family(source: str | None) -> str:
    from relaylm.family_folder import bundled

    if source is not None:
        return source
    if names := bundled():
        return names[0]
    from relaylm.demo import trained

    if (folder := trained()) is None:
        raise UserError("no family is bundled with this version: name one with --family, or run `relaylm demo` first")
    return str(folder)


def load_family(args: argparse.Namespace) -> Any:
    from relaylm.family import Family

    return Family.load(default_family(args.family), device=args.device, dtype=getattr(args, "dtype", None))


def token_rows(family: Any, path: str | None, length: int, rows: int | None) -> Any:
    """Rows of a text's tokens, spread over it; the text is the family's own held-out one if none is named."""
    from relaylm.bound import held_out, spread_rows

    if family.tokenizer is None:
        raise UserError("this family has no tokenizer, so it cannot read a text")
    tokens_N = held_out(family, path or None)
    if tokens_N is None:
        raise UserError("this family comes without a held-out text: name one with --text FILE")
    return spread_rows(tokens_N, length, rows)


def reason(error: BaseException) -> str:
    """An error in a few words: the system's own for a file, the first line of anything else."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error) or type(error).__name__).splitlines()[0]


def check_writable(path: str) -> None:
    """Refuse an output that could not be written, before any work is done."""
    if path == "-":
        return
    target = Path(os.path.realpath(Path(path).expanduser()))
    if target.is_dir():
        raise UserError(f"cannot write {path}: it is a folder")
    if not target.parent.is_dir():
        raise UserError(f"cannot write {path}: the folder {target.parent} does not exist")
    replaced = not target.exists() or target.is_file()  # a new file, beside which a temporary one must fit
    if (replaced and not os.access(target.parent, os.W_OK)) or (target.exists() and not os.access(target, os.W_OK)):
        raise UserError(f"cannot write {path}: permission denied")


def check_plot(path: str | None) -> None:
    if path is not None:
        if Path(path).suffix.lower() not in (".png", ".svg", ".pdf"):
            raise UserError(f"cannot draw {path}: the name must end in .png, .svg or .pdf")
        check_writable(path)


def write_text(path: str, text: str) -> None:
    """Whole or not at all. A link is followed; a pipe or a device is written to, not replaced."""
    target = Path(os.path.realpath(Path(path).expanduser()))
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        if target.exists() and not target.is_file():
            target.write_text(text, encoding="utf-8")
            return
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {reason(error)}") from None
