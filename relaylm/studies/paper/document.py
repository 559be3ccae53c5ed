"""A report as a list of blocks, and its two forms: Markdown with files beside it, and one HTML file with everything in.

A text is a paragraph, a heading (`## `) or a list (every line begins with a dash), and may hold `code` and **bold**;
nothing else in it is read as markup, in either form. Figures and tables are numbered. Tables also go to CSV.

In HTML a section shows its figures first; its tables are folded under their captions, with what is said of them, unless
it has no figure.
"""

from __future__ import annotations

import base64
import csv
import io
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from importlib.resources import files
from itertools import count, takewhile
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
        """A table of rows that are given as cells by column. A column in which no row has anything is left out."""
        head = [column for column in rows[0] if any(row[column] for row in rows)]
        return cls(name, caption, head, [[row[column] for column in head] for row in rows])


@dataclass(frozen=True)
class Figure:
    """A picture in a file."""

    file: Path
    caption: str


@dataclass(frozen=True)
class Folded:
    """A text for those who ask; HTML folds it under its title."""

    title: str
    text: str


@dataclass(frozen=True)
class Board:
    """Claims and what was found. HTML shows each claim with a badge, and folds the rest of its row and its findings."""

    claims: Table
    """Columns claim, verdict, findings (`3 yes, 8 open`), and what else is said of a claim."""
    findings: Table
    """Columns claim, where, says, evidence."""
    sections: Mapping[str, str]
    """Names that stand in the column `see here`, and the headings that they refer to."""


Block = str | Table | Figure | Folded | Board


def numbered(blocks: Sequence[Block]) -> list[Block]:
    """The blocks with a number in every caption."""
    numbers = {Figure: count(1), Table: count(1)}

    def with_number(block: Block) -> Block:
        if not isinstance(block, Figure | Table):
            return block
        kind = type(block)
        return replace(block, caption=f"{kind.__name__} {next(numbers[kind])}. {block.caption}".rstrip())

    return list(map(with_number, blocks))


def markdown_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table in Markdown; a bar in a cell is escaped, a line break becomes a space."""
    lines = ["| " + " | ".join(map(_cell, row)) + " |" for row in [head, *rows]]
    return "\n".join([lines[0], "|" + "---|" * len(head), *lines[1:]])


def markdown(blocks: Sequence[Block], folder: Path) -> str:
    """The report with links to figures and tables in `folder`."""

    def shown(block: Block) -> str:
        if isinstance(block, Table):
            link = f"{block.caption} ([CSV](tables/{block.name}.csv))"
            return f"{link}\n\n{markdown_table(block.head, block.rows)}"
        if isinstance(block, Figure):
            return f"![{_cell(block.caption)}]({block.file.relative_to(folder).as_posix()})\n\n*{block.caption}*"
        if isinstance(block, Folded):
            return f"**{block.title}.** {block.text}"
        if isinstance(block, Board):
            return f"{shown(block.claims)}\n\n{shown(block.findings)}"
        return block

    return "\n\n".join(map(shown, numbered(blocks))) + "\n"


# ------------------------------------------------------------------------------------------------ HTML


def slug(title: str) -> str:
    """A heading's anchor."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def html(blocks: Sequence[Block], title: str) -> str:
    """The same in one file, with a table of contents: figures inline, nothing loaded."""
    sections: list[list[Block]] = [[]]
    for block in numbered(blocks):
        if isinstance(block, str) and block.startswith("## "):
            sections.append([])
        sections[-1].append(block)
    titles = [str(section[0])[3:] for section in sections[1:]]
    links = "".join(f'<li><a href="#{slug(text)}">{_inline(text)}</a></li>' for text in titles)
    page, style = (
        (files(package) / name).read_text(encoding="utf-8")
        for package, name in ((__package__, "report.html"), ("relaylm.show", "web/renderer.css"))
    )
    parts = {"$TITLE": escape(title), "$STYLE": style, "$LINKS": links, "$BODY": "\n".join(map(_section, sections))}
    return re.sub(r"\$(TITLE|STYLE|LINKS|BODY)", lambda found: parts[found.group()], page)


def _section(blocks: Sequence[Block]) -> str:
    lead = list(takewhile(lambda block: isinstance(block, str), blocks))
    figures = [block for block in blocks if isinstance(block, Figure)]
    others = [block for block in blocks[len(lead) :] if not isinstance(block, Figure)]
    others.sort(key=lambda block: isinstance(block, Folded))
    parts = [_html(block) for block in [*lead, *figures]]
    about = ""  # what is said of the next table
    for block in others:
        if isinstance(block, str):
            about += _html(block)
        elif isinstance(block, Table):
            parts.append(_fold(_caption(block.caption), about + _table(block.head, block.rows), not figures))
            about = ""
        else:
            parts.append(about + _html(block))
            about = ""
    return "<section>" + "\n".join([*parts, about]) + "</section>"


def _html(block: Block) -> str:
    if isinstance(block, Figure):
        data = base64.b64encode(block.file.read_bytes()).decode()
        image = f'<img alt="{escape(block.caption)}" src="data:image/png;base64,{data}">'
        return f"<figure>{image}<figcaption>{_caption(block.caption)}</figcaption></figure>"
    if isinstance(block, Table):
        return _fold(_caption(block.caption), _table(block.head, block.rows))
    if isinstance(block, Folded):
        return _fold(_inline(block.title), f"<p>{_inline(block.text)}</p>")
    if isinstance(block, Board):
        return _board(block)
    if block.startswith("#"):
        level, _, text = block.partition(" ")
        return f'<h{len(level)} id="{slug(text)}">{_inline(text)}</h{len(level)}>'
    if all(line.startswith("- ") for line in block.splitlines()):
        return "<ul>" + "".join(f"<li>{_inline(line[2:])}</li>" for line in block.splitlines()) + "</ul>"
    return f"<p>{_inline(block)}</p>"


def _fold(title: str, body: str, unfold: bool = False) -> str:
    return f"<details{' open' if unfold else ''}><summary>{title}</summary>{body}</details>"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    names = "".join(f"<th>{_inline(cell)}</th>" for cell in head)
    cells = ("".join(f"<td>{_unbroken(_inline(cell))}</td>" for cell in row) for row in rows)
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    return f'<div class="wide"><table><thead><tr>{names}</tr></thead><tbody>{body}</tbody></table></div>'


SIGNS = {"confirmed": "✓", "partly": "◐", "depends": "⇄", "not confirmed": "✕", "open": "?"}


def _board(board: Board) -> str:
    names = re.compile("|".join(sorted(map(re.escape, board.sections), key=len, reverse=True)))

    def linked(text: str) -> str:
        return names.sub(lambda m: f'<a href="#{slug(board.sections[m[0]])}">{m[0]}</a>', _inline(text))

    lines = []
    for row in board.claims.rows:
        claim, verdict, tally = row[0], row[1].strip("*"), row[2]
        badge = f'<span class="badge {slug(verdict)}">{SIGNS.get(verdict, "–")} {escape(verdict)}</span>'
        counts = [(word, int(number)) for number, word in re.findall(r"(\d+) (\w+)", tally)]
        bar = "".join(f'<i class="{word}" style="flex: {number}"></i>' for word, number in counts)
        title = f'{badge}<b>{_inline(claim)}</b><span class="bar">{bar}</span><small>{_inline(tally)}</small>'
        about = "".join(
            f"<dt>{_inline(name)}</dt><dd>{linked(cell) if name == 'see here' else _inline(cell)}</dd>"
            for name, cell in zip(board.claims.head[3:], row[3:], strict=True)
        )
        found = _table(board.findings.head[1:], [line[1:] for line in board.findings.rows if line[0] == claim])
        lines.append(_fold(title, f"<dl>{about}</dl>{found}"))
    return f'<div class="board">{"".join(lines)}</div>'


def _caption(text: str) -> str:
    return re.sub(r"^((?:Figure|Table) \d+\.)", r"<b>\1</b>", _inline(text))


def write(blocks: Sequence[Block], title: str, folder: Path, printed: Callable[[str], str] = str) -> None:
    """report.md, report.html and tables/*.csv, each whole or not at all; `printed` has the last word on their texts."""
    (folder / "tables").mkdir(parents=True, exist_ok=True)
    inside = [table for block in blocks if isinstance(block, Board) for table in (block.claims, block.findings)]
    for table in [*inside, *(block for block in blocks if isinstance(block, Table))]:
        text = io.StringIO()
        csv.writer(text, lineterminator="\n").writerows([table.head, *table.rows])
        atomic_write(folder / "tables" / f"{table.name}.csv", printed(text.getvalue()))
    atomic_write(folder / "report.md", printed(markdown(blocks, folder)))
    atomic_write(folder / "report.html", printed(html(blocks, title)))


def _unbroken(text: str) -> str:
    """A number and its margin, and the ends of an interval, on one line."""
    return re.sub(r" (±|to) (?=[-+]?\d)", "\u00a0\\1\u00a0", text)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _inline(text: str) -> str:
    text = re.sub(r"\*\*(.+?)\*\*", r"<strong>\1</strong>", escape(text))
    return re.sub(r"`(.+?)`", r"<code>\1</code>", text)
