"""The command line: its flags are frozen, its errors are one line, nothing is half-written."""

from __future__ import annotations

import argparse
import json
import os
import pickle
import re
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from search_oracle import small_family

from relaylm.cli import main as cli
from relaylm.cli import tools as command_tools
from relaylm.models.denoiser import Architecture, Transformer
from relaylm.models.folder import save_family
from relaylm.models.tokenizer import Text8Tokenizer
from relaylm.show import picture

COMMON = {"--json", "--config", "-h", "--help"}
FLAGS = {
    "sample": COMMON
    | {"--family", "--schedule", "-n", "--n", "--steps", "-T", "--length", "--prompt", "--suffix", "--infill", "--seed"}
    | {
        "--spacing",
        "--spread",
        "--max-new-tokens",
        "--stop",
        "--chat",
        "--temperature",
        "--top-p",
        "--top-k",
        "--rule",
        "--block-length",
        "--stride",
        "--parallel",
        "--light",
        "--heavy",
        "--batch-size",
        "--cluster",
    }
    | {"--watch", "--svg", "--html", "--device", "--dtype"},
    "info": COMMON,
    "ls": COMMON,
    "prepare": COMMON | {"--tokenizer", "--packing", "--length", "--holdout", "--license"},
    "train": COMMON
    | {"--preset", "--depths", "--twin", "--judge", "--name", "--set", "--force", "--device"}
    | {"--no-pairs"},
    "lighten": COMMON
    | {"--blocks", "--corpus", "--out", "--name", "--rows", "--set", "--force", "--heavy", "--device"},
    "compare": COMMON
    | {"--family", "--schedules", "-n", "--n", "-T", "--steps", "--length", "--prompts", "--judge", "--recipe"}
    | {"--no-rivals", "--bound", "--mauve", "--timing", "--light", "--heavy", "--batch-size", "--store", "--fresh"}
    | {"--cluster", "--plot", "--seed", "--device"},
    "cost": COMMON
    | {"--family", "--schedules", "-T", "--steps", "--length", "--budget", "--light", "--heavy", "--batch-size"}
    | {"--fresh", "--device"},
    "compose": COMMON
    | {"--family", "--rules", "--steps", "--schedules", "-n", "--n", "--length", "--judge", "--light", "--heavy"}
    | {"--batch-size", "--store", "--fresh", "--stored-only", "--recorded", "--plot", "--markdown"}
    | {"--seed", "--device"},
    "search": COMMON
    | {"--family", "--budget", "--max-loss", "--light-segments", "--segments", "--models", "--densities", "-n", "--n"}
    | {"--confirm", "--rows", "-T", "--steps", "--length", "--prompts", "--judge", "--recipe", "--text", "--quick"}
    | {"--time-limit", "--light", "--heavy", "--batch-size", "--store", "--fresh", "--cluster", "--plot", "--csv"}
    | {"--seed", "--device"},
    "importance": COMMON
    | {"--family", "--text", "--states", "--pairs", "--timesteps", "--sequences", "--plot", "--seed", "--device"}
    | {"--twin"},
    "pairs": COMMON
    | {"--family", "--model", "--text", "--samples", "--rows", "--length", "--max-loss", "--budget", "--calls"}
    | {"--keep", "--plot", "--seed", "--device"},
    "bound": COMMON
    | {"--family", "--text", "--model", "--schedule", "-T", "--steps", "--rows", "--draws", "--seed", "--device"}
    | {"--rule"},
    "push": COMMON | {"--message", "--private"},
    "serve": COMMON
    | {"--family", "--host", "--port", "--api-key", "--max-rows", "--max-queue", "--timeout", "--log-prompts"}
    | {"--batch-size", "--cluster", "--replicas", "--device", "--dtype"},
    "convert": COMMON
    | {"--block-length"}
    | {"--names", "--tokenizer", "--license", "--to-mdlm", "--overwrite"}
    | {"--revision", "--length", "--mask-id", "--heads", "--raw-weights"},
    "bench": COMMON
    | {"--family", "--depths", "--width", "--vocab-size", "--length", "--steps", "--batch-size", "--quick", "--seed"}
    | {"--device", "--parts", "--dtype"},
    "demo": COMMON | {"--family", "--prompt", "--seed", "--device"},
    "reproduce": COMMON
    | {"--family", "--scale", "--only", "--out", "--store", "--text", "--second", "--bpe", "--stages", "--judge"}
    | {"--records", "--samples", "--seed", "--device", "--bpe-twin"},
}


def tiny_family(folder: Path) -> Path:
    models = {}
    for depth in (1, 3):
        a = Architecture(vocab_size=28, length=32, width=16, depth=depth, heads=2)
        network = Transformer(a).initialise(torch.Generator().manual_seed(depth))
        network.output_layer.linear.weight.data.normal_(0, 1, generator=torch.Generator().manual_seed(9))
        models[f"{depth}b"] = network.eval()
    save_family(folder, models, Text8Tokenizer(), length=32, name="tiny")
    return folder


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tiny_family(tmp_path_factory.mktemp("families") / "tiny"))


@pytest.fixture(scope="module")
def judged(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A family with a judge of its own."""
    made = small_family()
    folder = tmp_path_factory.mktemp("judged") / "toy"
    return str(save_family(folder, made.models, made.tokenizer, length=made.length, name="toy", judge=made.judge))


def run(*words: str) -> int:
    return cli.main(list(words))


def test_each_command_has_exactly_these_flags() -> None:
    parser = cli.build_parser()
    sub = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    found = {name: {o for a in p._actions for o in a.option_strings} for name, p in sub.choices.items()}
    assert found == FLAGS


def test_help_needs_no_torch() -> None:
    code = (
        "import sys; from relaylm.cli import main; main.build_parser().format_help(); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_sample_writes_the_promised_json(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = tmp_path / "out.json"
    words = ["--schedule", "L8 H16 L8", "-n", "3", "--prompt", "the cat ", "--seed", "5", "--json", str(target)]
    assert run("sample", "--family", family, *words) == 0
    result = json.loads(target.read_text())
    assert result["steps"] == 32 and result["length"] == 32 and result["seed"] == 5
    assert len(result["texts"]) == 3 and all(text.startswith("the cat ") for text in result["texts"])
    assert [len(row) for row in result["tokens"]] == [32] * 3
    cost = result["cost"]
    assert set(cost["calls"]) == {"1b", "3b"} and sum(cost["calls"].values()) > 0
    assert cost["blocks_saved"] == pytest.approx(0.5 * 2 / 3)
    assert 0 < cost["flops_saved"] < 1 and cost["flops"] > 0 and cost["seconds"] > 0
    assert result["config"]["schedule"] == "L8 H16 L8"
    assert capsys.readouterr().out.count("the cat ") == 3
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


def test_json_dash_puts_one_document_on_stdout(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("sample", "--family", family, "--json", "-") == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["texts"] and "calls" in captured.err


def test_the_same_seed_gives_the_same_text_and_another_seed_another(
    family: str, capsys: pytest.CaptureFixture[str]
) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        assert run("sample", "--family", family, "--seed", seed, "--json", "-") == 0
        texts.append(json.loads(capsys.readouterr().out)["texts"])
    assert texts[0] == texts[1] != texts[2]


def test_infill_suffix_and_max_new_tokens(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    def text(*words: str) -> str:
        assert run("sample", "--family", family, "--json", "-", *words) == 0
        return str(json.loads(capsys.readouterr().out)["texts"][0])

    filled = text("--infill", "the ___ of")
    assert filled.startswith("the ") and filled.endswith(" of") and len(filled) == 10
    both = text("--prompt", "ab", "--suffix", "yz")
    assert both.startswith("ab") and both.endswith("yz") and len(both) == 32
    assert len(text("--prompt", "ab", "--max-new-tokens", "4")) == 6


def test_blocks_compute_in_what_is_asked_for(family: str) -> None:
    for asked, kind in (("bfloat16", torch.bfloat16), (None, torch.float32)):
        words = ["sample", "--family", family, "--device", "cpu", *(["--dtype", asked] if asked else [])]
        loaded = command_tools.load_family(cli.build_parser().parse_args(words))
        assert {block.attn_qkv.weight.dtype for model in loaded.models.values() for block in model.blocks} == {kind}


def test_rules_blocks_and_strides(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def result(*words: str) -> dict[str, Any]:
        assert run("sample", "--family", family, "--json", "-", *words) == 0
        return dict(json.loads(capsys.readouterr().out))

    found = result("--rule", "low-confidence", "--block-length", "8", "--prompt", "the ", "--steps", "16")
    assert found["changes_law"] == ["rule=low-confidence:8"] and found["texts"][0].startswith("the ")
    drawn = tmp_path / "picture.svg"
    assert result("--rule", "threshold:0.2", "--schedule", "L25% H75%", "--svg", str(drawn))["steps"] <= 32
    assert ElementTree.parse(drawn).getroot().tag.endswith("svg")
    greedy = [result("--rule", "low-confidence", "--temperature", "0", "--seed", seed)["texts"] for seed in "12"]
    assert greedy[0] == greedy[1]
    assert len(result("--length", "50", "--stride", "8", "--rule", "remdm-cap:0.1")["texts"][0]) == 50
    for words, said in (
        (("--rule", "best"), "the rules are ancestral, random"),
        (("--block-length", "4"), "--rule"),
        (("--rule", "threshold", "--steps", "4"), "its own number of steps"),
        (("--length", "50"), "more than the family's"),
        (("--length", "50", "--stride", "99"), "from 1 to 31"),
    ):
        assert run("sample", "--family", family, *words) == 2
        message = capsys.readouterr().err
        assert said in message and message.count("\n") == 1


def test_chat_puts_the_prompt_into_the_template_and_shows_the_answer(
    family: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from relaylm import convert

    def template(folder: str, messages: list[dict[str, str]]) -> str:
        assert folder == family and messages == [{"role": "user", "content": "who"}]
        return "q who a "

    monkeypatch.setattr(convert, "chat_prompt", template)
    monkeypatch.setattr(Text8Tokenizer, "eos_id", 0, raising=False)  # a text ends at its first space
    assert run("sample", "--family", family, "--chat", "--prompt", "who", "-n", "5", "--json", "-") == 0
    result = json.loads(capsys.readouterr().out)
    rows = [result["tokens"][i][8:] for i in range(5)]
    expected = [row[: row.index(0)] if 0 in row else row for row in rows]
    assert result["texts"] == [Text8Tokenizer().decode(row) for row in expected]
    assert run("sample", "--family", family, "--chat") == 2


def test_steps_inf_and_watch(family: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    assert run("sample", "--family", family, "--steps", "inf", "--schedule", "sandwich", "--json", "-") == 0

    def refuse(constant: str) -> None:
        raise AssertionError(f"{constant} is not JSON")

    result = json.loads(capsys.readouterr().out, parse_constant=refuse)
    assert result["steps"] == result["config"]["steps"] == "inf" and sum(result["cost"]["calls"].values()) == 32
    assert run("sample", "--family", family, "--schedule", "sandwich", "--watch") == 0
    out = capsys.readouterr().out.rstrip("\n")
    assert "/32 written" in out and len(out.splitlines()[-1]) == 32


BAD = [
    (["--schedule", "L8 H8", "--steps", "32"], "the schedule has 16 steps"),
    (["--schedule", "7b:32"], "7b"),
    (["--schedule", "sandwich:150%"], "150%"),
    (["--schedule", "L40% H70%"], "110%"),
    (["--schedule", "@nowhere.txt"], "nowhere.txt"),
    (["--prompt", "a" * 33], "33"),
    (["--prompt", "Ünï"], "Ü"),
    (["--steps", "0"], "from 1 up"),
    (["--steps", "2.5"], "from 1 up"),
    (["-n", "0"], "from 1 up"),
    (["--temperature", "0"], "temperature"),
    (["--top-p", "1.5"], "top_p"),
    (["--length", "33"], "33"),
    (["--light", "9b"], "9b"),
    (["--seed", "-1"], "from 0 up"),
    (["--device", "tpu"], "tpu"),
    (["--json", "no/such/folder/x.json"], "no/such/folder"),
    (["--no-such-flag"], "no-such-flag"),
    (["--watch", "-n", "2"], "one sample"),
    (["--config"], "--config"),
]


@pytest.mark.parametrize(("words", "said"), BAD)
def test_bad_input_is_one_line_and_exit_code_2(
    words: list[str],
    said: str,
    family: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run("sample", "--family", family, *words) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1 and said in captured.err
    assert captured.err.startswith("relaylm: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("damage", ["truncated", "tampered", "pickle", "gone"])
def test_a_damaged_checkpoint_is_refused(damage: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = tiny_family(tmp_path / "f")
    weights = next(folder.glob("3b/*.safetensors"))
    data = bytearray(weights.read_bytes())
    if damage == "truncated":
        weights.write_bytes(data[: len(data) // 2])
    elif damage == "tampered":
        data[-1] ^= 1
        weights.write_bytes(data)
    elif damage == "pickle":
        (folder / "3b" / "model.bin").write_bytes(b"\x80\x04.")
    else:
        weights.unlink()
    assert run("sample", "--family", str(folder)) == 2
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1


def test_links_are_followed_and_what_is_no_plain_file_is_not_replaced(family: str, tmp_path: Path) -> None:
    target, link, pipe = tmp_path / "real.json", tmp_path / "link.json", tmp_path / "pipe"
    link.symlink_to(target)
    assert run("sample", "--family", family, "--json", str(link)) == 0
    assert link.is_symlink() and json.loads(target.read_text())["texts"]
    os.mkfifo(pipe)
    reader = subprocess.Popen(["cat", str(pipe)], stdout=subprocess.PIPE, text=True)
    assert run("sample", "--family", family, "--json", str(pipe)) == 0
    assert json.loads(reader.communicate(timeout=20)[0])["texts"] and pipe.is_fifo()


def test_a_failed_write_is_one_line_and_leaves_nothing(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    assert run("sample", "--family", family, "--json", str(tmp_path / "x.json")) == 2
    assert "No space left" in capsys.readouterr().err and list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("schedule", ["L8 H16 L8", "L25% H50% L25% spaced:4"])
def test_picture_of_a_sample(family: str, tmp_path: Path, schedule: str) -> None:
    words = ["--prompt", "the ", "--schedule", schedule, "--svg", str(tmp_path / "s.svg")]
    assert run("sample", "--family", family, *words) == 0
    root = ElementTree.fromstring((tmp_path / "s.svg").read_text())
    texts = [element.text or "" for element in root.iter("{http://www.w3.org/2000/svg}text")]
    bars = [
        float(r.get("width", "0")) for r in root.iter("{http://www.w3.org/2000/svg}rect") if r.get("height") == "14"
    ]
    assert texts[0] == "the " and sum(map(len, texts[: texts.index("fully masked (t = 1)")])) == 32
    assert len(bars) == 3 and bars[1] == pytest.approx(2 * bars[0], rel=0.01)


def test_lines_of_a_picture_break_after_spaces() -> None:
    text = "a" * 70 + " bc def " + "g" * 80 + " h"
    lines = [text[line] for line in picture._lines(text)]
    assert (
        lines == ["a" * 70 + " ", "bc def ", "g" * picture.COLUMNS, "g" * 8 + " h"] and list(picture._lines("")) == []
    )
    assert list(picture._lines("x" * 72 + " y")) == [slice(0, 73), slice(73, 145)]


def test_unwritable_output_is_refused_before_any_work(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def work(*_: Any, **__: Any) -> None:
        raise AssertionError("work was done")

    monkeypatch.setattr("relaylm.sampling.sample.denoise", work)
    assert run("sample", "--family", family, "--json", str(tmp_path)) == 2
    assert "folder" in capsys.readouterr().err


def test_interruption_and_failure_have_their_own_exit_codes(
    family: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def raising(error: BaseException) -> Any:
        def work(*_: Any, **__: Any) -> None:
            raise error

        return work

    monkeypatch.setattr("relaylm.sampling.sample.denoise", raising(KeyboardInterrupt()))
    assert run("sample", "--family", family) == 130
    monkeypatch.setattr("relaylm.sampling.sample.denoise", raising(RuntimeError("boom\nand more")))
    assert run("sample", "--family", family) == 1
    assert "boom" in capsys.readouterr().err


def test_config_file_fills_in_flags_and_the_command_line_wins(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "c.toml"
    config.write_text(f'family = "{family}"\nn = 2\nmax_new_tokens = 5\nprompt = "ab"\n')
    assert run("sample", "--config", str(config), "--prompt", "xyz", "--json", "-") == 0
    texts = json.loads(capsys.readouterr().out)["texts"]
    assert len(texts) == 2 and all(len(t) == 8 and t.startswith("xyz") for t in texts)
    config.write_text('watch = "yes"\n')
    assert run("sample", "--config", str(config)) == 2
    assert "true or false" in capsys.readouterr().err
    config.write_text("no_such = 1\n")
    assert run("sample", "--config", str(config)) == 2
    assert "no_such" in capsys.readouterr().err


def test_the_pauses_of_watch_are_not_sampling(
    family: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A clock on which nothing but pauses takes any time: four seconds of them, and no sampling."""
    now = 0.0

    def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    fake = SimpleNamespace(monotonic=lambda: now, perf_counter=lambda: now, sleep=sleep)
    for name in ("show.terminal", "sampling.denoise"):
        monkeypatch.setattr(f"relaylm.{name}.time", fake)
    assert run("sample", "--family", family, "--watch", "--json", "-") == 0
    assert json.loads(capsys.readouterr().out)["cost"]["seconds"] == pytest.approx(0, abs=1e-9) and now >= 3.9


def test_an_interruption_while_importing_is_quiet() -> None:
    code = """
import sys
class Interrupted:
    def find_spec(self, name, path=None, target=None):
        if name == "relaylm.cli.main":
            raise KeyboardInterrupt
sys.meta_path.insert(0, Interrupted())
from relaylm.__main__ import main
sys.exit(main())
"""
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")
    version = subprocess.run([sys.executable, "-m", "relaylm", "--version"], capture_output=True, text=True, check=True)
    assert version.stdout.startswith("relaylm ")


def test_cost_is_shown_kept_and_a_budget(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    words = ["--family", family, "--batch-size", "2"]
    assert run("cost", *words, "--schedules", "heavy,L8 H24", "--budget", "10% blocks", "--json", "-") == 0
    found = json.loads(capsys.readouterr().out)
    assert [item["within"] for item in found["schedules"]] == [False, True]
    assert found["schedules"][1]["saved"]["blocks"] == pytest.approx(1 / 6) and found["call"]["1b"]["ms"] > 0
    assert run("cost", *words, "--steps", "inf") == 0
    shown = capsys.readouterr().out
    assert "infinitely many steps" in shown and found["table"] in shown and "no joules" in shown
    assert run("cost", *words, "--budget", "3 parsecs") == 2
    assert "choose flops, blocks, ms, J" in capsys.readouterr().err
    # What was sampled is priced by what is now in the table.
    for count, known in (("2", True), ("1", False)):  # no batch of one row was timed
        assert run("sample", "--family", family, "-n", count, "--batch-size", count, "--json", "-") == 0
        assert ("milliseconds" in json.loads(capsys.readouterr().out)["cost"]) == known


def test_schedule_files(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.json").write_text(json.dumps({"schedule": "L8 H24", "flops": 1}))
    (tmp_path / "b.txt").write_text("1b:8 3b:24\n")
    for name in ("a.json", "b.txt"):
        assert run("sample", "--family", family, "--schedule", f"@{tmp_path / name}", "--json", "-") == 0
        assert json.loads(capsys.readouterr().out)["schedule"] == "1b:8 3b:24"


def test_info_and_ls(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("info", family) == 0
    shown = capsys.readouterr().out
    assert re.search(r"^1b +L +1 ", shown, re.M) and re.search(r"^3b +H +3 ", shown, re.M) and "mask 27" in shown
    assert run("ls", str(Path(family).parent), "--json", "-") == 0
    found = json.loads(capsys.readouterr().out)
    assert [Path(e["source"]).name for e in found["families"] if not e["bundled"]] == ["tiny"]
    assert found["schedules"]["sandwich"] == "L12.5% H75% L12.5%" and "wiki-char" in found["presets"]
    assert run("ls", "no/such/place") == 2


def test_spaced_schedules_in_every_command(judged: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and looked at the rain " * 40)

    def result(*words: str) -> dict[str, Any]:
        assert run(*words, "--family", judged, "--json", "-") == 0
        return dict(json.loads(capsys.readouterr().out))

    one = result("sample", "--spacing", "4", "--length", "16")
    assert one["law"] == "spaced:4" and one["schedule"].endswith("spaced:4")
    assert result("sample", "--schedule", "heavy spaced:4", "--length", "16")["texts"] == one["texts"]
    assert result("sample", "-T", "6", "--spread", "--length", "16")["law"].startswith("spaced:")
    assert run("sample", "--family", judged, "--spacing", "4", "-T", "8") == 2
    assert run("sample", "--family", judged, "--spacing", "4", "--svg", str(tmp_path / "a.svg")) == 0
    assert run("sample", "--family", judged, "--spacing", "4", "--html", str(tmp_path / "a.html")) == 0
    capsys.readouterr()
    rows = result("compare", "L50% H50% spaced:6", "heavy", "-n", "4", "--bound", str(text))["rows"]
    assert rows[0]["steps"] is None and rows[0]["flops_saved"] > 0 and rows[0]["bound"]["bits"] > 0
    assert any(row["rival"] == "heavy with a smaller spacing" for row in rows)
    assert result("bound", "--text", str(text), "--rows", "3", "--schedule", "heavy spaced:4")["bounds"]
    measured = ("pairs", "--text", str(text), "--rows", "3")
    table = result(*measured, "--max-loss", "0.5", "--budget", "5")
    assert len(table["choices"]) == 3 and len(table["nats"]) == len(table["shares"])
    length = table["length"]
    calls = length * (1 - (1 - 1 / length) ** length)  # of T = L, on average
    assert 0 < result(*measured, "--budget", "75%")["choices"][f"at most {calls / 4:.3g} calls"]["calls"] <= calls / 4
    for wrong in ("0", "100%", "-5%", "many", "nan"):
        assert run(*measured, "--family", judged, f"--budget={wrong}") == 2
        assert "is no budget: write calls" in capsys.readouterr().err
    assert run("compare", "heavy", "--schedules", "light", "--family", judged) == 2
    assert "not both" in capsys.readouterr().err


def test_compare_importance_and_bound(family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat and looked at the rain " * 40)

    def result(*words: str) -> dict[str, Any]:
        assert run(*words, "--family", family, "--json", "-") == 0
        return dict(json.loads(capsys.readouterr().out))

    assert run("compare", "--family", family, "-n", "4") == 2  # this family has no judge of its own
    assert "judge" in capsys.readouterr().err
    pair = result("importance", "--text", str(text), "--sequences", "4", "--timesteps", "2")["pairs"][0]
    keys = {"light", "heavy", "states", "n", "t", "loss_light", "loss_heavy", "abs_loss_diff", "kl", "kl_ci"}
    assert keys | {"kl_relative", "peak_t"} <= set(pair) and len(pair["kl"]) == 2
    assert run("importance", "--family", family) == 2
    assert "--text" in capsys.readouterr().err
    single = result("bound", "--text", str(text), "--rows", "8", "--model", "3b")["bounds"]["3b"]
    mixed = result("bound", "--text", str(text), "--rows", "8", "--schedule", "sandwich", "--steps", "16")["bounds"]
    assert single["bits"] > 0 and len(mixed) == 1
    for words in (["--model", "3b"], ["--schedule", "sandwich", "--steps", "16"]):  # one line each, for people
        assert run("bound", "--family", family, "--text", str(text), "--rows", "8", *words) == 0
        assert re.fullmatch(r".*: \d+\.\d+ bits per symbol \(95%: .*\), perplexity .*\n", capsys.readouterr().out)


def test_schedules_are_shown_as_they_were_typed(
    judged: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "120")
    (tmp_path / "one.txt").write_text("L25%\n H75%\n")
    listed = f"sandwich:25%,@{tmp_path / 'one.txt'},0100"
    typed = ["sandwich:25%", "L25% H75%", "0100"]

    def shown(*words: str) -> tuple[list[str], Any]:
        target = tmp_path / "out.json"
        assert run(*words, "--family", judged, "--json", str(target)) == 0
        return capsys.readouterr().out.splitlines(), json.loads(target.read_text())

    lines, result = shown("compare", "--schedules", listed, "-n", "2", "--no-rivals")
    assert [row["schedule"] for row in result["rows"]] == [*typed, "heavy", "light"]
    assert result["rows"][0]["models"] == "1b:12.5% 3b:75% 1b:12.5%"
    for text in typed:
        assert sum(line.strip().startswith(f"{text}  ") for line in lines) == 1
    lines, result = shown("cost", "--schedules", listed, "--batch-size", "2")
    assert [row["schedule"] for row in result["schedules"]] == typed
    for text in typed:
        assert sum(line.startswith(f"{text}  ") for line in lines) == 1
    lines, result = shown("compose", "--schedules", listed, "-n", "2", "--rules", "ancestral", "--steps", "4,8")
    assert {row["schedule"] for row in result["rows"]} == {*typed, "heavy"}
    assert all(any(f"  {text}  " in line for line in lines) for text in typed)
    page = tmp_path / "page.html"
    words = ["sample", "--family", judged, "--schedule", "sandwich:25%", "--html", str(page), "--json", "-"]
    assert run(*words) == 0
    captured = capsys.readouterr()
    assert "sandwich:25%: 16 steps" in captured.err and "toy: sandwich:25%" in page.read_text()
    assert json.loads(captured.out)["schedule"] == "1b:12.5% 3b:75% 1b:12.5%"  # a record has the names
    text = tmp_path / "held.txt"
    text.write_text("the cat sat on the mat and looked at the rain " * 4)
    assert run("bound", "--family", judged, "--text", str(text), "--rows", "2", "--schedule", "sandwich:25%") == 0
    assert capsys.readouterr().out.startswith("sandwich:25%: ")


PROVENANCE = {
    "sample": ["--schedule", "sandwich:25%"],
    "compare": ["--schedules", "light", "-n", "2"],
    "compose": ["--schedules", "light", "-n", "2", "--rules", "ancestral", "--steps", "4"],
    "importance": ["--states", "trajectory", "--sequences", "2", "--timesteps", "2"],
    "search": ["exhaustive", "--segments", "2", "--light-segments", "1", "-n", "2", "--confirm", "2"],
    "bound": ["--rows", "2", "--draws", "1"],
    "pairs": ["--rows", "2", "--samples"],
}


@pytest.mark.parametrize("command", PROVENANCE)
def test_json_says_how_it_was_made(command: str, judged: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("held.txt").write_text("the cat sat on the mat and looked at the rain " * 4)
    words = [command, *PROVENANCE[command], "--family", judged, "--seed", "3", "--device", "cpu", "--json", "a b.json"]
    words += ["--text", "held.txt"] if command == "bound" else []
    monkeypatch.setattr(sys, "argv", ["/somewhere/bin/relaylm", *words])
    monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)  # as a script, however pytest was started
    assert run(*words) == 0
    result = json.loads(Path("a b.json").read_text())
    assert shlex.split(result["command"]) == ["relaylm", *words]
    assert result["versions"]["torch"] == str(torch.__version__) and result["versions"]["relaylm"] == result["relaylm"]
    assert result["machine"]["threads"] == torch.get_num_threads() and result["machine"]["cpu"]
    assert "commit" in result and result["seed"] == 3
    assert result.get("device", "cpu") == "cpu"  # as the measurement says it


def test_how_it_was_made_never_replaces_what_a_result_says() -> None:
    args, family = argparse.Namespace(seed=3, json="-"), SimpleNamespace(device=torch.device("cpu"))
    said = {"seed": 4, "machine": "mine", "device": "cuda:1"}
    made = command_tools.with_provenance(said, family, args)
    assert said.items() <= made.items() and {"command", "versions", "commit"} <= set(made)


class Payload:
    """Pickled, it would create a file when loaded."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return open, (self.path, "w")


@pytest.mark.parametrize("name", ["model.ckpt", "model.pt", "pytorch_model.bin", "model.pkl"])
def test_a_malicious_pickle_never_runs(name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Beside a family's files, or as the checkpoint itself."""
    trap = tmp_path / "created"
    folder = tiny_family(tmp_path / "f")
    (folder / name).write_bytes(pickle.dumps(Payload(str(trap))))
    for source in (folder, folder / name):
        assert run("sample", "--family", str(source)) == 2
        assert run("convert", str(source), str(tmp_path / "out")) == 2
        assert all(line.startswith("relaylm: ") for line in capsys.readouterr().err.splitlines())
    assert not trap.exists() and not (tmp_path / "out").exists()


def test_two_converted_models_are_scheduled_through_the_command_line(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A family out to MDLM's published layout and back in as two checkpoints, then a mixed schedule over them."""
    assert run("convert", family, str(tmp_path / "mdlm"), "--to-mdlm") == 0
    assert run("convert", str(tmp_path / "mdlm" / "1b"), str(tmp_path / "mdlm" / "3b"), str(tmp_path / "back")) == 0
    capsys.readouterr()
    words = ["--schedule", "sandwich:50%", "--steps", "16", "--json", "-"]
    assert run("sample", "--family", str(tmp_path / "back"), *words) == 0
    cost = json.loads(capsys.readouterr().out)["cost"]
    assert len(cost["calls"]) == 2 and all(cost["calls"].values()) and 0 < cost["flops_saved"] < 1


@pytest.mark.parametrize(("given", "found"), [({}, "PASSIVE"), ({"OMP_WAIT_POLICY": "ACTIVE"}, "ACTIVE")])
def test_threads_sleep_while_they_wait_unless_told_otherwise(given: dict[str, str], found: str) -> None:
    """Set when relaylm is imported, which does not import torch."""
    code = "import os, sys, relaylm; print(os.environ.get('OMP_WAIT_POLICY'), 'torch' in sys.modules)"
    rest = {key: value for key, value in os.environ.items() if key not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
    done = subprocess.run([sys.executable, "-c", code], env={**rest, **given}, capture_output=True, text=True)
    assert done.stdout.split() == [found, "False"]
