"""What the site adds to docs/: README.md as its first page, the files that pages link to, and the player.

A hook of mkdocs (`mkdocs.yml`). Links are written for the repository; here each is resolved to the file it names, and
that file becomes part of the site: Markdown as a page, everything else as it is. A link to a folder becomes plain text.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[1]
LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
PAGES = {"README.md": "index.md"}  # by their path in the repository; others keep theirs, without docs/


def on_files(files: Files, config: Any) -> Files:
    """Add the first page, the player, and all that pages link to."""
    waiting = ["README.md", *(f"docs/{file.src_uri}" for file in files.documentation_pages())]
    seen = set(waiting)
    for source in waiting:  # grows
        text = (ROOT / source).read_text(encoding="utf-8")
        found = {there for _, _, link in LINK.findall(text) if (there := _resolved(source, link)) is not None}
        if not source.startswith("docs/"):
            files.append(File.generated(config, _place(source), content=text))
        for there in sorted(found - seen):
            seen.add(there)
            if there.endswith(".md"):
                waiting.append(there)
            elif not there.startswith("docs/"):
                files.append(File.generated(config, _place(there), abs_src_path=str(ROOT / there)))
    files.append(File.generated(config, "player.html", content=_player()))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Point links at the places that files have on the site."""
    place = page.file.src_uri
    sources = {value: key for key, value in PAGES.items()}
    source = sources.get(place, f"docs/{place}" if (ROOT / "docs" / place).exists() else place)

    def moved(found: re.Match[str]) -> str:
        image, text, link = found.groups()
        path, _, anchor = link.partition("#")
        if not path or re.match(r"[a-z]+:", link):
            return found.group()
        there = _resolved(source, link)
        if there is None:
            return text if (ROOT / source).parent.joinpath(path).is_dir() else found.group()
        target = os.path.relpath(_place(there), Path(place).parent) + (f"#{anchor}" if anchor else "")
        return f"{image}[{text}]({target})"

    return LINK.sub(moved, markdown)


def _resolved(source: str, link: str) -> str | None:
    """The file of the repository that a link names, as a path from the root; None for a folder or another host."""
    path = link.partition("#")[0]
    if not path or re.match(r"[a-z]+:", path):
        return None
    there = (ROOT / source).parent.joinpath(path).resolve()
    return str(there.relative_to(ROOT)) if there.is_file() else None


def _place(source: str) -> str:
    """Where a file of the repository is on the site."""
    return PAGES.get(source, source.removeprefix("docs/"))


def _player() -> str:
    """A page that plays two samples of the bundled family."""
    from relaylm import Family, Schedule, sample
    from relaylm.show.player import page

    family = Family.load("wiki-char")
    schedule = Schedule.parse("sandwich:50%")
    samples = sample(family, schedule, n=2, prompt="the history of ", length=160, steps=160, seed=2)
    return page(family, samples, schedule.bind(*family.roles()))
