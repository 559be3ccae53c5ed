"""A report as a list of blocks, and its two forms: Markdown with files beside it, and one HTML file with everything in.

A block is a text, a table or a figure. A text is a paragraph, a heading (`## `) or a list (every line begins with a
dash), and may hold `code` and **bold**; nothing else in it is read as markup, in either form. Tables also go to CSV.
"""

from __future__ import annotations

import base64
import csv
import io
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

from relaylm.files import atomic_write


@dataclass(frozen=True)
class Table:
    """`name` is that of its CSV file; cells are shown as they are."""

    name: str
    caption: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]

    @classmethod
    def of(cls, name: str, caption: str, rows: Sequence[Mapping[str, str]]) -> Table:
        """A table of rows that are given as cells by column."""
        return cls(name, caption, list(rows[0]), [list(row.values()) for row in rows])


@dataclass(frozen=True)
class Figure:
    """A picture in a file."""

    file: Path
    caption: str


Block = str | Table | Figure


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; a bar in a cell is escaped, a line break becomes a space."""
    lines = ["| " + " | ".join(map(_cell, row)) + " |" for row in [head, *rows]]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def markdown(blocks: Sequence[Block], folder: Path) -> str:
    """The report with links to figures and tables in `folder`."""
    parts = []
    for block in blocks:
        if isinstance(block, Table):
            link = f"{block.caption} ([CSV](tables/{block.name}.csv))"
            parts.append(f"{link}\n\n{markdown_table(block.head, block.rows)}")
        elif isinstance(block, Figure):
            parts.append(f"![{_cell(block.caption)}]({block.file.relative_to(folder).as_posix()})\n\n*{block.caption}*")
        else:
            parts.append(block)
    return "\n\n".join(parts) + "\n"


def html(blocks: Sequence[Block], title: str) -> str:
    """The same in one file: figures inline, nothing loaded."""
    return _PAGE.replace("$TITLE", escape(title)).replace("$BODY", "\n".join(map(_html, blocks)))


def _html(block: Block) -> str:
    if isinstance(block, Figure):
        data = base64.b64encode(block.file.read_bytes()).decode()
        image = f'<img alt="{escape(block.caption)}" src="data:image/png;base64,{data}">'
        return f"<figure>{image}<figcaption>{_inline(block.caption)}</figcaption></figure>"
    if isinstance(block, Table):
        head = "".join(f"<th>{_inline(cell)}</th>" for cell in block.head)
        cells = ("".join(f"<td>{_unbroken(_inline(cell))}</td>" for cell in row) for row in block.rows)
        table = (
            f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(f'<tr>{row}</tr>' for row in cells)}</tbody></table>"
        )
        return f"<p class='caption'>{_inline(block.caption)}</p><div class='wide'>{table}</div>"
    if block.startswith("#"):
        level, _, text = block.partition(" ")
        return f"<h{len(level)}>{_inline(text)}</h{len(level)}>"
    if all(line.startswith("- ") for line in block.splitlines()):
        return "<ul>" + "".join(f"<li>{_inline(line[2:])}</li>" for line in block.splitlines()) + "</ul>"
    return f"<p>{_inline(block)}</p>"


def write(blocks: Sequence[Block], title: str, folder: Path) -> None:
    """report.md, report.html and tables/*.csv, each whole or not at all."""
    (folder / "tables").mkdir(parents=True, exist_ok=True)
    for block in blocks:
        if isinstance(block, Table):
            text = io.StringIO()
            csv.writer(text, lineterminator="\n").writerows([block.head, *block.rows])
            atomic_write(folder / "tables" / f"{block.name}.csv", text.getvalue())
    atomic_write(folder / "report.md", markdown(blocks, folder))
    atomic_write(folder / "report.html", html(blocks, title))


def _unbroken(text: str) -> str:
    """A number and its margin, and the ends of an interval, on one line."""
    return re.sub(r" (±|to) (?=[-+]?\d)", "\u00a0\\1\u00a0", text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _inline(text: str) -> str:
    text = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", escape(text))
    return re.sub(r"`(.+?)`", r"<code>\1</code>", text)


_PAGE = """\
<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>$TITLE</title>
<style>
:root { color-scheme: light dark; }
body { max-width: 62rem; margin: 2rem auto; padding: 0 1rem; font: 16px/1.55 system-ui, sans-serif; }
h1 { line-height: 1.2; } h2 { margin-top: 2.5rem; border-top: 1px solid #8884; padding-top: 1.5rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-size: .875rem; margin: .25rem 0 1.25rem; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid #8884; text-align: left; vertical-align: top; }
th { border-bottom-width: 2px; } .caption { margin-bottom: 0; font-weight: 600; }
figure { margin: 1rem 0; } img { max-width: 100%; background: #fff; border-radius: 4px; }
figcaption { font-size: .875rem; opacity: .8; } code { font-size: .9em; background: #8882; padding: 0 .25em; }
</style></head><body>
$BODY
</body></html>
"""
