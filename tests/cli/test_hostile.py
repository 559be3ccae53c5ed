"""What a hostile or unlucky user finds at the command line: text that commands terminals, names that are mathematics,
outputs that fail, files that lie. One line and the documented exit code each time, and no result is lost."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from relaylm.cli import main as cli
from relaylm.errors import LONGEST, UserError, printable
from relaylm.models.denoiser import Architecture, Transformer
from relaylm.models.family import Family
from relaylm.models.folder import save_family
from relaylm.models.tokenizer import ByteTokenizer, Text8Tokenizer
from relaylm.search.trials import Trials
from relaylm.show import figures
from relaylm.show.colours import BLACK
from relaylm.show.figures import new_figure, save_figure

EVIL = "a\x1b[2J\x07\x9b31m\u202e\x00b"


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


def network(vocab_size: int, seed: int = 0, depth: int = 1, causal: bool = False) -> Transformer:
    shape = Architecture(vocab_size=vocab_size, length=8, width=8, depth=depth, heads=2, causal=causal)
    return Transformer(shape).initialise(torch.Generator().manual_seed(seed)).eval().requires_grad_(False)


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = {"a": network(28), "b": network(28, 1, 2)}
    judge = network(28, 2, causal=True)
    folder = tmp_path_factory.mktemp("hostile") / "fam"
    return save_family(folder, models, Text8Tokenizer(), length=8, name=r"$\frac{$ " + EVIL, judge=judge)


def unsafe(text: str) -> set[str]:
    return {c for c in text if (ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160 or c in "\u202e\u2028"}


# ------------------------------------------------------------------------------------------------------ the terminal


@pytest.mark.parametrize(
    "words",
    [
        ["sample", "--family", "FAMILY", "--prompt", EVIL],
        ["sample", "--family", "FAMILY", "--schedule", EVIL],
        ["info", "FAMILY"],
        ["ls", "FAMILY"],
        ["info", EVIL],
        ["sample", "--judge" + EVIL],
        ["compare", "--family", "FAMILY", "-n", "2", "--schedules", EVIL],
        ["sample", "--json", "/nowhere/" + EVIL.replace("\x00", "")],
        ["sample", "--family", "FAMILY", "-n", "2", "--steps", "2"],
    ],
    ids=range(9),
)
def test_no_control_characters_reach_a_terminal(
    words: list[str], family: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, err = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stdout", out)
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setenv("NO_COLOR", "1")
    monkeypatch.setenv("TERM", "dumb")
    code = cli.main([word.replace("FAMILY", str(family)) for word in words])
    assert code in (0, 2)
    assert not unsafe(out.getvalue() + err.getvalue())


@pytest.mark.parametrize("colours", [True, False])
def test_no_control_characters_of_a_model_reach_a_terminal(
    colours: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A byte model that writes escape, bell and C1 bytes; a pipe gets them as they are."""
    model = network(257)
    model.output_layer.linear.weight.zero_()
    model.output_layer.linear.bias.fill_(-1e4)
    model.output_layer.linear.bias[torch.tensor([7, 27, 91, 50, 74, 13])] = 0.0
    folder = save_family(tmp_path / "bytes", {"a": model}, ByteTokenizer(), length=8)
    words = ["sample", "--family", str(folder), "--schedule", "a", "-n", "8"]
    monkeypatch.setenv("FORCE_COLOR" if colours else "NO_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    seen = {}
    for kind in (Terminal, io.StringIO):
        stream = kind()
        monkeypatch.setattr(sys, "stdout", stream)
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        assert cli.main(words) == 0
        seen[kind] = stream.getvalue()
    shown = seen[Terminal]
    shown = re.sub(r"\x1b\[[0-9;]*m", "", shown)  # the colours that relaylm sets itself
    assert not unsafe(shown) and "\\x1b" in shown
    if not colours:
        assert "\x1b" in seen[io.StringIO]


def test_printable_keeps_text() -> None:
    text = "Ünï 日本 🙂‍👩 a\tb\nc"
    assert printable(text) == text
    assert printable("\x1b[0m\r\x85\ud800") == "\\x1b[0m\\r\\x85\\ud800"
    assert printable("\x1b", io.StringIO()) == "\x1b"


def test_a_message_is_one_short_line() -> None:
    for text in ("x" * 10**6, "a\nb\x1b[31m\ud800", ("{'" * 10**5)):
        message = str(UserError(text))
        assert len(message) < LONGEST + 50 and len(message.splitlines()) == 1
        message.encode()


# ----------------------------------------------------------------------------------------------- figures and outputs


def test_text_in_figures_is_not_mathematics(tmp_path: Path) -> None:
    figure = new_figure(3, 2)
    axes = figure.subplots()
    axes.set_xscale("log")
    axes.plot([1, 1000], [0, 1], color=BLACK, label=r"$\frac{$")
    axes.set_yticks([0, 1], [r"$\x{$", "$$$"])
    axes.set_title(r"$\frac{$ x $")
    axes.legend()
    path = save_figure(figure, tmp_path / "a.svg")
    assert path.read_text().startswith("<?xml")
    labels = [label for label in axes.get_xticklabels() if "mathdefault" in label.get_text()]
    assert labels and all(label.get_parse_math() for label in labels)  # powers of ten still are


def test_results_are_written_before_pictures(
    family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: Any) -> None:
        raise UserError("the figure failed")

    words = ["compare", "--family", str(family), "-n", "4", "--no-rivals", "--steps", "4", "--schedules", "a,b"]
    assert cli.main([*words, "--json", str(tmp_path / "a.json"), "--plot", str(tmp_path / "a.png")]) == 0
    assert (tmp_path / "a.png").stat().st_size
    monkeypatch.setattr(figures, "plot_compare", fail)
    assert cli.main([*words, "--json", str(tmp_path / "b.json"), "--plot", str(tmp_path / "b.png")]) == 2
    assert "the figure failed" in capsys.readouterr().err
    first, second = (json.loads((tmp_path / name).read_text()) for name in ("a.json", "b.json"))
    assert [row["log_ppls"] for row in first["rows"]] == [row["log_ppls"] for row in second["rows"]]


def run_command(words: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "relaylm", *words]
    return subprocess.run(command, capture_output="stdout" not in options, text=True, timeout=120, **options)


def test_closed_and_full_standard_output(tmp_path: Path) -> None:
    closed = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m relaylm ls >&- 2>&-"], capture_output=True, timeout=120
    )
    assert closed.returncode == 0
    if not Path("/dev/full").exists():
        pytest.skip("there is no /dev/full here")
    with open("/dev/full", "w") as full:
        found = run_command(["ls"], stdout=full, stderr=subprocess.PIPE)
    assert found.returncode == 2 and found.stderr.count("\n") == 1 and "standard output" in found.stderr


# ------------------------------------------------------------------------------------------ exit codes and sentences


@pytest.mark.parametrize(
    "content",
    [b"n = " + b"9" * 10_000, b"n = \xff", b"n = " + b"[" * 100_000, b"n = {}", b"seed = -1", b"n = 1e400"],
    ids=range(6),
)
def test_odd_config_files(content: bytes, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "c.toml").write_bytes(content)
    assert cli.main(["sample", "--config", str(tmp_path / "c.toml")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.parametrize("path", ["a\0b", "~nosuchuser/x", "\ud800", "x" * 5000, "/" + "y/" * 3000])
@pytest.mark.parametrize(
    "words",
    [
        ["sample", "--config"],
        ["sample", "--json"],
        ["sample", "--svg"],
        ["sample", "--family"],
        ["sample", "--schedule", "@"],
        ["compare", "--plot"],
        ["compare", "--family", "wiki-char", "-n", "2", "--store"],
        ["compare", "--judge", "gguf:"],
        ["prepare", "out"],
        ["train", "out"],
        ["info"],
        ["ls"],
        ["convert", "out"],
        ["bound", "--family", "wiki-char", "--text"],
    ],
    ids=" ".join,
)
def test_odd_paths(
    words: list[str], path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    joined = words[-1] in ("@", "gguf:")
    path += ".png" if words[-1] == "--plot" else ""
    words = [*words[:-1], words[-1] + path] if joined else [*words, path]
    code = cli.main(words)
    said = capsys.readouterr().err
    monkeypatch.undo()
    assert code == 2 or words[0] == "ls"
    assert "failed" not in said and len(said) < 3000 and len(said.splitlines()) <= 1


def test_a_model_and_a_schedule_do_not_go_together(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["bound", "--schedule", "heavy", "--model", "4b"]) == 2
    assert "--model" in capsys.readouterr().err


def test_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="surrogate"):
        save_family(tmp_path / "f", {"a": network(28)}, Text8Tokenizer(), length=8, name="half \ud800")
    assert not list(tmp_path.iterdir())


def test_an_early_interrupt_of_a_search_is_130(family: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*arguments: Any, **options: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Trials, "scores", interrupt)
    words = ["search", "exhaustive", "--family", str(family), "--light-segments", "1", "--segments", "2", "-n", "4"]
    assert cli.main([*words, "--steps", "4"]) == 130
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)  # the handler is still Python's own


def test_a_full_disk_in_convert_is_one_line(
    family: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*arguments: Any) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "write_bytes", full)
    assert cli.main(["convert", "--to-mdlm", str(family), str(tmp_path / "out")]) == 2
    assert "No space left" in capsys.readouterr().err and not list(tmp_path.iterdir())


def test_the_family_of_these_tests_loads(family: Path) -> None:
    assert Family.load(family).names == ("a", "b")
