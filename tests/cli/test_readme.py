"""The documentation is run, not believed.

- Python blocks of README.md, docs/quickstart.md and docs/howto.md are executed from top to bottom, one session a file.
- `relaylm ...` lines of their bash blocks go through `cli.main` if the command is cheap (see CHEAP); the flags of all
  such lines in all documents are checked against the parser.
- A tiny family stands in for what a reader would have at hand (see STAND_INS), and for the bundled family.
- `<!-- skip: reason -->` on the line before a block leaves it out (a GPU, a download); `<!-- file: NAME -->` writes the
  block to NAME in the folder where the lines are run.
- Relative links and anchors exist; docs/reference.md and the code list the same commands and flags.
- Every module is imported with the core dependencies alone.
"""

from __future__ import annotations

import argparse
import lzma
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch

from relaylm.cli import main as cli
from relaylm.models.denoiser import Architecture, Transformer
from relaylm.models.folder import save_family
from relaylm.models.tokenizer import Text8Tokenizer

ROOT = Path(__file__).parents[2]
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md")])
RUN = [ROOT / "README.md", ROOT / "docs" / "quickstart.md", ROOT / "docs" / "howto.md"]
REFERENCE = ROOT / "docs" / "reference.md"
STAND_INS = ("path/to/family", "out/family", "FOLDER_OR_HUB_ID", "wiki-char")
CHEAP = ("sample", "info", "ls", "prepare", "demo", "bound")
OPTIONAL = (
    *("transformers", "datasets", "matplotlib", "ray", "gguf", "huggingface_hub", "typer", "pandas", "tqdm"),
    *("tensorboard", "triton", "lm_eval"),
)
TEXT = "the quick brown fox jumps over the lazy dog and the history of the river goes on " * 60


# ------------------------------------------------------------------------------------------------- reading documents


class Block(NamedTuple):
    language: str
    line: int  # of its first line of code, from 1
    text: str
    mark: str  # what the HTML comment just before it says


def blocks(text: str) -> Iterator[Block]:
    """Fenced blocks in order."""
    lines = text.splitlines()
    at = 0
    while at < len(lines):
        if not lines[at].startswith("```"):
            at += 1
            continue
        end = next((i for i in range(at + 1, len(lines)) if lines[i].startswith("```")), None)
        assert end is not None, f"the block that begins in line {at + 1} has no end"
        comment = re.fullmatch(r"<!--\s*(.*?)\s*-->", lines[at - 1]) if at else None
        body = "\n".join(lines[at + 1 : end]) + "\n"
        yield Block(lines[at][3:].strip(), at + 2, body, comment.group(1) if comment else "")
        at = end + 1


def prose(text: str) -> str:
    """The text without its blocks."""
    return re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)


def commands(block: Block) -> Iterator[list[str]]:
    """The `relaylm ...` lines of a block, as words; outside bash blocks with whatever explanation follows them."""
    for line in block.text.replace("\\\n", " ").splitlines():
        if line.startswith("relaylm "):
            yield (shlex.split(line, comments=True) if block.language == "bash" else line.split())[1:]


def subparsers() -> dict[str, argparse.ArgumentParser]:
    parser = cli.build_parser()
    return dict(next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices)


def options(parser: argparse.ArgumentParser) -> set[str]:
    return {option for action in parser._actions for option in action.option_strings} - {"-h", "--help"}


# ------------------------------------------------------------------------------------------------- running documents


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three models with the names that the documents use, of next to no size."""
    models = {}
    for depth, name in enumerate(("4b", "8b", "12b"), 1):
        a = Architecture(vocab_size=28, length=64, width=16, depth=depth, heads=2)
        network = Transformer(a).initialise(torch.Generator().manual_seed(depth))
        network.output_layer.linear.weight.data.normal_(0, 1, generator=torch.Generator().manual_seed(9))
        models[name] = network.eval()
    folder = save_family(tmp_path_factory.mktemp("docs") / "tiny", models, Text8Tokenizer(), length=64, name="tiny")
    (folder / "heldout.txt").write_text("the history of the river and the people who live by it " * 400)
    return folder


def stand_in(text: str, family: Path | None) -> str:
    """The text with a small family in place of those it names; without one as it is pasted."""
    for name in STAND_INS if family is not None else ():
        text = text.replace(name, str(family))
    return text


def run_python(text: str, name: str, family: Path | None) -> int:
    """Run the Python blocks of a document in one session; returns how many."""
    session: dict[str, Any] = {"__name__": "documentation"}
    count = 0
    for block in blocks(text):
        if block.language == "python" and not block.mark.startswith("skip"):
            code = "\n" * (block.line - 1) + stand_in(block.text, family)  # errors name the line of the document
            exec(compile(code, name, "exec"), session)
            count += 1
    return count


def run_commands(text: str, family: Path | None, folder: Path) -> int:
    """Run the cheap commands of a document; returns how many."""
    count = 0
    for block in blocks(text):
        if block.mark.startswith("file:"):
            (folder / block.mark.removeprefix("file:").strip()).write_text(stand_in(block.text, family))
        if block.language != "bash" or block.mark.startswith("skip"):
            continue
        for words in commands(block):
            words = [stand_in(word, family) for word in words]
            if words[0] == "--help":
                with pytest.raises(SystemExit) as stopped:
                    cli.main(words)
                assert stopped.value.code == 0
            elif words[0] in CHEAP:
                bare = family is not None and not {"--family", "--config"} & set(words)
                if bare and "--family" in options(subparsers()[words[0]]):
                    words += ["--family", str(family)]
                assert cli.main(words) == 0, f"relaylm {shlex.join(words)}"
            else:
                continue
            count += 1
    return count


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder to work in, with the texts that the documents speak of."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.sleep", lambda _: None)  # --watch takes its time
    for name in ("my.txt", "heldout.txt"):
        (tmp_path / name).write_text(TEXT)
    (tmp_path / "wiki.txt.xz").write_bytes(lzma.compress(TEXT.encode()))
    return tmp_path


@pytest.mark.parametrize("path", RUN, ids=lambda path: path.name)
def test_python_blocks_run(path: Path, family: Path, folder: Path) -> None:
    assert run_python(path.read_text(encoding="utf-8"), str(path), family) > 0


@pytest.mark.parametrize("path", RUN, ids=lambda path: path.name)
def test_cheap_commands_run(path: Path, family: Path, folder: Path) -> None:
    assert run_commands(path.read_text(encoding="utf-8"), family, folder) >= 5


@pytest.mark.slow
@pytest.mark.parametrize("path", [path for path in RUN if path.name != "README.md"], ids=lambda path: path.name)
def test_pages_run_as_pasted(path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With the bundled families, but for commands that name a family which the reader has trained."""
    monkeypatch.delenv("RELAYLM_FAMILY", raising=False)
    text = path.read_text(encoding="utf-8")
    text = "\n".join(line for line in text.splitlines() if "out/family" not in line)
    assert run_python(text, str(path), None) > 0
    assert run_commands(text, None, folder) >= 5


def test_a_broken_document_is_noticed(family: Path, folder: Path) -> None:
    def document(language: str, code: str, mark: str = "") -> str:
        return f"{mark}\n```{language}\n{code}\n```\n"

    with pytest.raises(AttributeError):
        run_python(document("python", "import relaylm; relaylm.no_such_name"), "bad.md", family)
    with pytest.raises(AssertionError, match="no-such-flag"):
        run_commands(document("bash", "relaylm sample --no-such-flag 1"), family, folder)
    with pytest.raises(AssertionError, match="9b"):
        run_commands(document("bash", "relaylm sample --schedule 9b:8"), family, folder)
    assert run_python(document("python", "1 / 0", "<!-- skip: never -->"), "skipped.md", family) == 0
    assert run_commands(document("bash", "relaylm bench"), family, folder) == 0


# -------------------------------------------------------------------------------------------------------- references


def anchors(text: str) -> set[str]:
    """The anchors that GitHub gives to a document's headings."""
    titles = re.findall(r"^#+ +(.*?) *$", prose(text), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def broken_links(path: Path, text: str) -> list[str]:
    broken = []
    for target in re.findall(r"\]\(([^)\s]+)\)", prose(text)):
        if re.match(r"[a-z]+:", target):  # elsewhere
            continue
        file, _, anchor = target.partition("#")
        there = path.parent / file if file else path
        known = there.exists() and (not anchor or anchor in anchors(text if not file else there.read_text()))
        if not known:
            broken.append(target)
    return broken


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_exist(path: Path) -> None:
    assert broken_links(path, path.read_text(encoding="utf-8")) == []


def test_a_broken_link_is_noticed() -> None:
    text = "# A heading\n[a](docs/reference.md) [b](no/such/file.md) [c](#a-heading) [d](#no) [e](https://x.org/y)"
    assert broken_links(ROOT / "README.md", text) == ["no/such/file.md", "#no"]


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)
def test_commands_in_documents_exist(path: Path) -> None:
    """Also those that are too expensive to run."""
    parsers = subparsers()
    for block in blocks(path.read_text(encoding="utf-8")):
        if block.language not in ("", "bash", "text"):
            continue
        for words in commands(block):
            if words[0] in ("--help", "--version", "COMMAND"):
                continue
            assert words[0] in parsers, f"{path.name}: relaylm {words[0]}"
            flags = {re.split("=", word)[0] for word in words[1:] if re.match(r"--?[A-Za-z]", word)}
            unknown = flags - options(parsers[words[0]]) - {"--help"}
            assert not unknown, f"{path.name}: relaylm {words[0]} {unknown}"


def sections(text: str, level: str) -> dict[str, str]:
    parts = re.split(rf"^{level} +(.*?) *$", text, flags=re.MULTILINE)
    return dict(zip(parts[1::2], parts[2::2], strict=True))


def first_cells(text: str) -> list[str]:
    """The first column of all tables, without their headings."""
    found = []
    for table in re.findall(r"(?:^\|.*\n?)+", text, flags=re.MULTILINE):
        found += [row.split("|")[1].strip() for row in table.splitlines()[2:]]
    return found


def test_reference_has_the_json_of_each_command() -> None:
    table = sections(REFERENCE.read_text(encoding="utf-8"), "##")["JSON output"]
    listed = re.findall(r"^\| `([a-z]+)` \|", table, re.MULTILINE)
    assert sorted(listed) == sorted(name for name in cli.COMMANDS if name != "serve")


def test_reference_lists_each_command_with_its_arguments() -> None:
    listed = sections(sections(REFERENCE.read_text(encoding="utf-8"), "##")["Commands"], "###")
    documented = {
        title.removeprefix("relaylm "): {name for cell in first_cells(body) for name in re.findall(r"`([^`]+)`", cell)}
        for title, body in listed.items()
    }
    real = {
        name: options(parser) | {str(a.metavar or a.dest) for a in parser._actions if not a.option_strings}
        for name, parser in subparsers().items()
    }
    assert documented == real


# ----------------------------------------------------------------------------------------------------------- imports

IMPORT_ALL = """
import importlib, pkgutil, sys

blocked = set(sys.argv[1].split(","))

class Without:
    "A finder that does not find what is blocked, as if it were not installed."
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        find = getattr(self.finder, "find_spec", None)
        return None if name.split(".")[0] in blocked or find is None else find(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)

sys.meta_path[:] = [Without(finder) for finder in sys.meta_path]
import relaylm
names = [m.name for m in pkgutil.walk_packages(relaylm.__path__, "relaylm.") if not m.name.endswith("__main__")]
for name in names:
    importlib.import_module(name)
for name in relaylm.__all__:
    getattr(relaylm, name)
assert not blocked & set(sys.modules), blocked & set(sys.modules)
print(len(names))
"""


def import_all(*blocked: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", IMPORT_ALL, ",".join(blocked)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    return subprocess.run(command, check=False, capture_output=True, text=True, cwd=ROOT, env=environment)


def test_every_module_imports_with_the_core_dependencies_alone() -> None:
    done = import_all(*OPTIONAL)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= 20


def test_a_missing_dependency_is_noticed() -> None:
    done = import_all("safetensors")
    assert done.returncode != 0 and "No module named 'safetensors'" in done.stderr
