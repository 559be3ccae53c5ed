"""Write the generated parts of README.md, docs/*.md and the cards again.

    python docs/generate.py

What stands between `<!-- begin: NAME -->` and `<!-- end -->` is what BLOCKS[NAME] returns: a table of the records under
results/, made by the function of that name in `tables` or `spacing_tables`, or the reference from the argument parser
and the public docstrings. Everything else is written by hand. A test says whether the documents are current.
"""

from __future__ import annotations

import argparse
import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the package beside these documents, not an installed one
import spacing_tables
import tables

import relaylm
from relaylm.cli.main import build_parser
from relaylm.errors import UserError
from relaylm.studies.compose import view as compose
from relaylm.studies.paper.document import markdown_table

ROOT = Path(__file__).resolve().parents[1]
MARKED = re.compile(r"(<!-- begin: (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
VERDICTS = {"claim": "claim of the paper", "verdict": "verdict here", "findings": "findings"}
PEAKS = {"family": "family", "ratio": "loss at t = 0.05 over loss at t = 1", "KL's peak t (95%)": "KL peaks at t (95%)"}
FLOAT32 = {"T": "T", "exact PPL (95%)": "perplexity, exact", "MDLM's float32": "in float32"}
FLOAT32 |= {"exact entropy": "entropy, exact", "float32's": "entropy in float32", "difference": "difference (95%)"}


# ------------------------------------------------------------------------------------------------ the reference


def commands(records: Path) -> str:
    """A section for each command: what it does, an example, its arguments."""
    subparsers = next(a for a in build_parser()._actions if isinstance(a, argparse._SubParsersAction))
    return "\n\n".join(_command(name, parser) for name, parser in subparsers.choices.items())


def _command(name: str, parser: argparse.ArgumentParser) -> str:
    rows = []
    for action in parser._actions:
        if not isinstance(action, argparse._HelpAction):
            names = ", ".join(f"`{option}`" for option in action.option_strings or [str(action.metavar or action.dest)])
            text = " ".join((action.help or "").split()).replace("%%", "%")
            choices = f" ({', '.join(action.choices)})" if action.choices else ""
            rows.append([names, _default(action), text + choices])
    example = (parser.epilog or "").removeprefix("example:").strip()
    table = markdown_table(["argument", "default", "meaning"], rows)
    return f"### relaylm {name}\n\n{parser.description}\n\n```text\n{example}\n```\n\n{table}"


def _default(action: argparse.Action) -> str:
    value = action.default
    if value is None or value is False or value == [] or value == argparse.SUPPRESS:
        return ""
    return f"`{','.join(map(str, value)) if isinstance(value, (list, tuple)) else value}`"


def python_names(records: Path) -> str:
    """Every public name: its signature and docstring, and those of its public methods and attributes."""
    return "\n\n".join(_entry(name, getattr(relaylm, name)) for name in relaylm.__all__ if not name.startswith("__"))


def _entry(name: str, thing: Any) -> str:
    parts = [f"### {name}", f"```python\n{_signature(name, thing)}\n```", _prose(thing)]
    if inspect.isclass(thing) and (rows := [[f"`{member}`", text] for member, text in _members(thing)]):
        parts.append(markdown_table(["member", "what it is"], rows))
    return "\n\n".join(part for part in parts if part)


def _signature(name: str, thing: Any) -> str:
    """As it is called, without annotations; `...` stands for a default that has no short form."""
    if inspect.isclass(thing) and (issubclass(thing, Exception) or getattr(thing, "_is_protocol", False)):
        return name
    words: list[str] = []
    for key, p in inspect.signature(thing).parameters.items():
        if p.kind is p.KEYWORD_ONLY and "*" not in words:
            words.append("*")
        shown = repr(p.default) if isinstance(p.default, (int, float, str, type(None))) else "..."
        words.append(f"**{key}" if p.kind is p.VAR_KEYWORD else key if p.default is p.empty else f"{key}={shown}")
    return f"{name}({', '.join(word for word in words if word not in ('self', 'cls'))})"


def _members(thing: Any) -> Iterator[tuple[str, str]]:
    """Fields of a dataclass, then properties and methods of this package that have a docstring."""
    for field in dataclasses.fields(thing) if dataclasses.is_dataclass(thing) else ():
        if not field.name.startswith("_"):
            yield field.name, str(field.type)
    own = [vars(kind) for kind in reversed(thing.__mro__) if kind.__module__.startswith("relaylm.")]
    for name, member in {name: member for members in own for name, member in members.items()}.items():
        found = member.__func__ if isinstance(member, (classmethod, staticmethod)) else member
        if name.startswith("_") or not inspect.getdoc(found):
            continue
        if isinstance(found, property):
            yield name, _prose(found)
        elif inspect.isfunction(found):
            yield _signature(name, found), _prose(found)


def _prose(thing: Any) -> str:
    """A docstring's paragraphs, each on one line; indented text stays as it is. None where Python made it."""
    text = inspect.getdoc(thing) or ""
    if text.startswith(f"{getattr(thing, '__name__', '')}("):
        return ""
    return "\n\n".join(p if p.startswith("    ") else " ".join(p.split()) for p in re.split(r"\n\s*\n", text))


# ------------------------------------------------------------------------------------------------ the documents

BLOCKS: dict[str, Callable[[Path], str]] = {
    name.replace("_", " "): function
    for module in (tables, spacing_tables)
    for name, function in vars(module).items()
    if inspect.isfunction(function) and [*inspect.signature(function).parameters] == ["records"]
}
BLOCKS |= {
    "verdicts": partial(tables.reported, name="claims", columns=VERDICTS),
    "peaks": partial(tables.reported, name="peaks", columns=PEAKS),
    "float32": partial(tables.reported, name="precision", columns=FLOAT32, schedule="heavy"),
    "compose wiki-char": lambda records: compose.markdown(tables.load(records, "compose/wiki-char")),
    "commands": commands,
    "python": python_names,
}


def refreshed(text: str, records: Path) -> str:
    """A document with everything between its markers made again."""

    def made(found: re.Match[str]) -> str:
        begin, name, end = found.groups()
        if name not in BLOCKS:
            raise UserError(f"nothing is generated under the name {name!r}: {', '.join(BLOCKS)}")
        return f"{begin}\n{BLOCKS[name](records)}\n\n{end}"

    return MARKED.sub(made, text)


def documents(root: Path = ROOT) -> list[Path]:
    """The documents that may have generated parts."""
    places = ("docs/*.md", "results/*/README.md", "relaylm/models/families/*/README.md")
    return [root / "README.md", *(path for place in places for path in sorted(root.glob(place)))]


def main() -> int:
    """Write all of them again."""
    for path in documents():
        path.write_text(refreshed(path.read_text(encoding="utf-8"), ROOT / "results"), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
