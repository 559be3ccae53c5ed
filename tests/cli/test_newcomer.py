"""What a new user meets: slips of the pen, names in another spelling, printed commands, completion, files in order."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from search_oracle import small_family

from relaylm import Architecture, Family, Schedule, Transformer, UserError, sample
from relaylm.cli import main as cli
from relaylm.cli import tools
from relaylm.cli.sample import say_how_long
from relaylm.measure import estimate as estimates
from relaylm.measure.metrics import paired_difference as paired
from relaylm.models.folder import save_family
from relaylm.models.tokenizer import JsonTokenizer, Text8Tokenizer
from relaylm.sampling.sample import settle
from relaylm.search import tournament
from relaylm.show.colours import END, pieces_of, readable
from relaylm.show.search import drawn


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("smaple", "sample"),
        ("sample --promt x", "--prompt"),
        ("sample --schedule sandwhich:25%", "sandwich"),
        ("sample --schedule sandwhich", "sandwich"),
        ("sample --schedule heavvy", "heavy"),
        ("sample --family wiki-chr", "wiki-char"),
        ("sample --rule low-confidnce", "low-confidence"),
        ("train corpus out --preset tiny-cpv", "tiny-cpu"),
        ("search exhaustiv", "exhaustive"),
    ],
)
def test_the_nearest_word_is_offered(words: str, hint: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(words.split()) == 2
    error = capsys.readouterr().err
    assert f"did you mean {hint}?" in error and error.count("\n") == 1


def test_nothing_like_it_is_not_offered(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sample", "--family", "qqqqqq"]) == 2
    assert "did you mean" not in capsys.readouterr().err


def network(depth: int) -> Transformer:
    shape = Architecture(vocab_size=28, length=16, width=16, depth=depth, heads=2)
    return Transformer(shape).initialise(torch.Generator().manual_seed(depth)).eval()


def test_both_ways_of_writing_a_depth_find_the_model() -> None:
    family = Family({"d1": network(1), "d2": network(2), "1b": network(1)}, 27, 28, 16)
    assert family.named("2b") == "d2" and family["2b"] is family["d2"]
    assert family.named("1b") == "1b" and family.named("d1") == "d1"  # a model of that very name comes first
    assert family.bind("2b:25% d2:25% H50%", "1b", "d2") == Schedule.parse("d2:25% d2:25% d2:50%")
    assert family.roles("d1", "2b") == ("d1", "d2")
    old = Family({"4b": network(1), "x": network(2)}, 27, 28, 16)
    assert (sample(old, "d4", seed=1, steps=4).tokens == sample(old, "4b", seed=1, steps=4).tokens).all()
    for wrong in ("d3", "4", "b4", "4bb"):
        with pytest.raises(UserError, match="there is no model"):
            old.named(wrong)


def test_the_end_of_a_text_is_readable() -> None:
    import tokenizers

    words = {"<|endoftext|>": 0, "a": 1, "b": 2}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="a"))
    backend.decoder = tokenizers.decoders.Fuse()
    family: Any = Family({"m": network(1)}, 27, 28, 16, None)
    assert readable(family, "x") == "x"
    family.tokenizer = JsonTokenizer(backend.to_str())
    assert pieces_of(family, np.array([1, 0, 2, 27])) == ["a", END, "b", "_"]
    assert readable(family, "a<|endoftext|>b") == f"a{END}b"


def test_results_are_written_before_pictures(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A figure that fails loses nothing, and a missing package is noticed before the work."""
    monkeypatch.chdir(tmp_path)
    words = ["importance", "--sequences", "4", "--timesteps", "2", "--plot", "i.png", "--json", "i.json"]

    def fail(*_: object) -> None:
        raise RuntimeError("no ink")

    monkeypatch.setattr("relaylm.show.figures.plot_importance", fail)
    assert cli.main(words) == 1
    assert json.loads((tmp_path / "i.json").read_text())["pairs"]
    monkeypatch.setattr(tools, "find_spec", lambda _: None)
    monkeypatch.setattr(tools, "load_family", fail)
    assert cli.main(words) == 2


def test_a_found_schedule_is_used_as_the_hint_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The command that search prints is pasted, without --family, from another folder."""
    family = small_family()
    monkeypatch.chdir(tmp_path)
    family.save_pretrained("mine")
    (tmp_path / "mine" / "heldout.txt").write_text("the history of the river " * 200)
    words = ["search", "--family", "mine", "--budget", "20%", "--quick", "--json", "best.json", "--segments", "4"]
    assert cli.main(words) == 0
    error = capsys.readouterr().err
    assert "written: best.json" in error
    command = next(line for line in error.splitlines() if line.startswith("to use it: ")).removeprefix("to use it: ")
    assert cli.main(shlex.split(command)[1:]) == 0
    found = json.loads((tmp_path / "best.json").read_text())
    assert found["family"]["source"] == str(tmp_path / "mine")


@pytest.mark.parametrize(
    ("words", "said"), [("--spacing 1", "at most 1 call a row,"), ("-T 1", " 1 step,"), ("-T 2", " 2 steps,")]
)
def test_the_cost_line_counts(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sample", "--family", "wiki-char", "--length", "8", *words.split()]) == 0
    assert said in capsys.readouterr().err


def test_the_cost_line_counts_the_steps_of_the_reference(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sample", "--family", "wiki-char", "--infill", "_"]) == 0
    assert "alone in 1 step)" in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--html", "--svg"])
def test_only_json_goes_to_standard_output(
    flag: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file of the name - would be a surprise."""
    monkeypatch.chdir(tmp_path)
    assert cli.main(["sample", "--family", "wiki-char", "--length", "8", flag, "-"]) == 2
    assert "--json alone" in capsys.readouterr().err and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("pairs --family wiki-char --length 257", "more than the family's 256"),
        ("sample --family wiki-char --length 257", "--stride writes longer texts"),
        ("compose --family wiki-char --length 257 -n 2", "more than the family's 256"),
        ("sample --family wiki-char --temperature 0", "not 0.0: 0 goes with a decoding rule"),
        ("prepare my.txt corpus --length 64", "--packing wrap or pad"),
        ("sample --family wiki-char --rule threshold:2", "above 0 and at most 1: threshold:2"),
        ("sample --family wiki-char --rule surest:1e7", "above 0 and at most 1000000: surest:1e+07"),
        ("bench --family wiki-char --width 64", "--width is of random weights"),
        ("bench --family wiki-char --depths 3,2", "--depths is of random weights"),
    ],
)
def test_numbers_out_of_place(
    words: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_text("the history of the river " * 20)
    assert cli.main(words.split()) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_completion(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("shtab")
    with pytest.raises(SystemExit) as stopped:
        cli.main(["--completion", shell])
    script = capsys.readouterr().out
    assert stopped.value.code == 0 and "--max-new-tokens" in script and "reproduce" in script
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)


def test_families_under_the_current_folder_are_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    save_family(tmp_path / "runs" / "a" / "family", {"d1": network(1)}, Text8Tokenizer(), length=16)
    save_family(tmp_path / ".hidden" / "family", {"d1": network(1)}, Text8Tokenizer(), length=16)
    assert cli.main(["ls", "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [entry["source"] for entry in found["families"] if not entry["bundled"]] == ["runs/a/family"]
    assert cli.main(["ls"]) == 0
    listed = capsys.readouterr().out
    assert "runs/a/family" in listed and "tiny-cpu" in listed and "minute" in listed


def test_help_of_sample_is_in_groups_and_states_defaults() -> None:
    command = [sys.executable, "-m", "relaylm", "sample", "--help"]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert "what is written:" in text and "what is shown:" in text and text.count("default:") >= 18


def test_work_is_announced_with_its_time(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    family = small_family()
    monkeypatch.setattr(estimates, "estimate", lambda *_, **__: 240.0)
    estimates.announce(family, "much", 1e15, 16, 2, "fewer rows")
    estimates.announce(family, "little", 1e3, 16, 2)
    assert capsys.readouterr().err == "much: about 4 minutes on this machine; fewer rows\n"
    monkeypatch.undo()
    once, twice = (estimates.estimate(family, flops, 16, 2) for flops in (1e9, 2e9))
    assert once is not None and twice is not None and once > 0
    said = [estimates.in_words(seconds) for seconds in (3, 42, 240, 9000)]
    assert said == ["about 10 seconds", "about 40 seconds", "about 4 minutes", "about 2.5 hours"]


def test_many_calls_of_one_sample_are_announced(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The estimate counts what is asked for: many calls with steps, few with the default spacing."""
    counted = []
    monkeypatch.setattr(estimates, "estimate", lambda family, flops, *_: counted.append(flops) or 240.0)
    family = Family.load("wiki-char")
    for steps, said in ((2048, True), (64, False)):
        say_how_long(family, 1, settle(family, "heavy", steps=steps))
        assert ("one sample: about 4 minutes" in capsys.readouterr().err) is said
    assert counted == [pytest.approx(256 * family["12b"].flops(256, 1))]  # no more calls than positions


def test_a_recommendation_says_how_sure_it_is() -> None:
    """18 rows that show nothing are said to show nothing, with the rows that would."""
    problem: Any = SimpleNamespace(steps=16, unit="flops")
    noise = np.random.default_rng(0).normal(size=18)
    heavy_n, mixed_n, rival_n = 0.1 * noise, 0.02 + 0.1 * noise[::-1], 0.05 + 0.1 * np.roll(noise, 5)

    def row(schedule: str, kind: str, log_n: np.ndarray, best: bool = False) -> dict[str, Any]:
        against = {"against_heavy": paired(log_n, heavy_n), "against_recommended": paired(log_n, mixed_n)}
        about = {"schedule": schedule, "what": schedule, "kind": kind, "steps": 16, "saved": 0.25, "rows": 18}
        return {**about, **against, "log_ppl": log_n.mean(), "within_budget": True, "recommended": best}

    rows = [row("a:3@10.15625% b:13@89.84375%", "mixed", mixed_n, True), row("b:9", "rival", rival_n)]
    said = tournament._verdict(problem, rows)
    needed = rows[1]["against_recommended"]["samples_needed"]
    assert said.startswith("NOT SIGNIFICANT") and f"--confirm {needed}" in said and needed > 18
    assert "a:3@10.2% b:13@89.8%" in said
    rows[1] = row("b:9", "rival", mixed_n + 1.0 + 0.01 * noise)
    assert "NOT SIGNIFICANT" not in tournament._verdict(problem, rows)


def test_a_schedule_as_a_strip() -> None:
    assert drawn(Schedule.parse("a:25% b:50% c:25%"), "abc", 8) == "░░▓▓▓▓██"
    assert drawn(Schedule.parse("a:1@75% b:99@25%"), "ab", 8) == "░░░░░░██"  # by time, not by steps
    assert drawn(Schedule.parse("interleaved(a:25% b:75%)"), "ab") == ""


def test_a_family_whose_training_has_not_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "out" / "models").mkdir(parents=True)
    (tmp_path / "out" / "config.json").write_text("{}")
    assert cli.main(["info", "out/family"]) == 2
    assert "relaylm train" in capsys.readouterr().err


def test_a_family_needs_no_converting(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["convert", "wiki-char", "copy"]) == 2 and "already" in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["--names", "a"], ["--mask-id", "0"], ["--raw-weights"], ["--revision", "main"]])
def test_flags_of_the_other_direction_are_refused(
    flags: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["convert", "--to-mdlm", "wiki-char", str(tmp_path / "out"), *flags]) == 2
    assert f"{flags[0]} does not go with --to-mdlm" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.parametrize("width", [60, 80, 120])
def test_help_fills_the_terminal_and_no_more(
    width: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    with pytest.raises(SystemExit):
        cli.main(["--help"])
    about = capsys.readouterr().out.partition("positional")[0].partition("\n\n")[2].splitlines()
    assert width - 20 < max(map(len, about)) <= width
    assert " ".join(about).split() == cli.DESCRIPTION.split()


def test_the_demo_leaves_standard_output_to_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["demo", "--family", "wiki-char", "--json", "-"]) == 0
    out, err = capsys.readouterr()
    found = json.loads(out)
    assert len(found["samples"]) == 3 and "completion" not in found["config"] and "Try next" in err


@pytest.mark.parametrize(
    "words",
    [
        "prepare text.txt file",
        "compare heavy --family wiki-char -n 2 --length 8 --store file",
        "reproduce --family wiki-char --only shares --out file",
        "train corpus file",
        "serve --port 65536",
    ],
)
def test_a_file_where_a_folder_is_wanted(
    words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each is a slip of the user's: one line that names it, exit code 2."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("x")
    (tmp_path / "text.txt").write_text("the history of the river " * 400)
    assert cli.main(["prepare", "text.txt", "corpus", "--tokenizer", "text8"]) == 0
    capsys.readouterr()
    assert cli.main(words.split()) == 2
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("relaylm: ") and words.split()[-1] in error and "failed" not in error


@pytest.mark.parametrize(
    ("words", "hint"),
    [
        ("train corpus out", "run the same command again to go on"),
        ("compare heavy --store kept", "run again with the same --store to go on"),
        ("info", ""),
    ],
)
def test_an_interrupt_says_how_to_go_on(
    words: str, hint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"relaylm.cli.{words.split()[0]}.run", interrupted)
    assert cli.main(words.split()) == 130
    assert capsys.readouterr().err == f"relaylm: interrupted{hint and f'; {hint}'}\n"
