"""lm-evaluation-harness with a family under a schedule: the real package, on the example tasks, without a network."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from relaylm import harness
from relaylm.errors import UserError
from relaylm.measure.plan_likelihood import continuation_bound
from relaylm.models.denoiser import Architecture, Transformer
from relaylm.models.folder import save_family
from relaylm.models.tokenizer import Text8Tokenizer
from relaylm.sampling.sample import sample

ROOT = Path(__file__).parents[1]
TASKS = ROOT / "examples" / "lm-eval"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    models = {}
    for depth, name in enumerate(("small", "large"), 1):
        a = Architecture(vocab_size=28, length=48, width=16, depth=depth, heads=2)
        network = Transformer(a).initialise(torch.Generator().manual_seed(depth))
        network.output_layer.linear.weight.data.normal_(0, 1, generator=torch.Generator().manual_seed(9))
        models[name] = network.eval()
    return save_family(tmp_path_factory.mktemp("harness") / "tiny", models, Text8Tokenizer(), length=48)


@pytest.fixture(scope="module")
def heavy(folder: Path) -> harness.Scheduled:
    return harness.Scheduled(str(folder), "heavy", steps=math.inf, calls=8, device="cpu")


def request(*args: Any, doc: int | None = None) -> Any:
    return SimpleNamespace(args=args, doc_id=doc)


@pytest.mark.parametrize("options", ["schedule=sandwich:50%,spacing=16", "schedule=heavy,rule=eb:2"])
def test_every_example_task_runs(folder: Path, options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in OFFLINE.items():
        monkeypatch.setenv(name, value)
    lm_eval = pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
    from lm_eval.tasks import TaskManager

    harness.register()
    manager = TaskManager(include_path=str(TASKS), include_defaults=False)
    found = lm_eval.simple_evaluate(
        model="relaylm",
        model_args=f"family={folder},{options},calls=4",
        device="cpu",
        tasks=sorted(manager.all_tasks),
        task_manager=manager,
        limit=2,
        bootstrap_iters=2,
    )
    scores = {(task, metric): value for task, each in found["results"].items() for metric, value in each.items()}
    assert {task for task, _ in scores} == {f"relaylm_{path.stem}" for path in TASKS.glob("*.yaml")}
    assert scores["relaylm_choice", "acc,none"] in (0, 0.5, 1)
    assert scores["relaylm_generation", "exact_match,first-word"] in (0, 0.5, 1)
    assert 1 < scores["relaylm_perplexity", "bits_per_byte,none"] < 30
    assert scores["relaylm_cloze", "perplexity,none"] > 1
    for sample_of_choice in found["samples"]["relaylm_choice"]:
        each = [float(value) for ((value, _),) in sample_of_choice["resps"]]
        assert len(each) == 4 and max(each) < 0


def test_likelihoods_are_the_estimates_of_the_bound(folder: Path, heavy: harness.Scheduled) -> None:
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
    model = harness.model_class()(family=str(folder), schedule="heavy", steps=math.inf, calls=8, device="cpu")
    requests = [request("the river", " runs", doc=3), request("", "to the sea", doc=3), request("of", "", doc=4)]
    (one, _), (two, _), (nothing, greedy) = model.loglikelihood(requests)
    ids = heavy.tokenizer.encode("the river runs")
    free = np.arange(len(ids)) >= len("the river")
    found = continuation_bound(
        heavy.models, heavy.schedule, np.array([ids]), free[None], 27, steps=math.inf, calls=8, numbers_N=np.array([3])
    )
    assert one == pytest.approx(-found.nats_N[0]) and two < 0
    assert model.scheduled.standard_errors[0] == pytest.approx(found.error_N[0])
    assert (nothing, greedy) == (0.0, True)


def test_one_symbol_is_greedy_and_it_is_the_likeliest(heavy: harness.Scheduled) -> None:
    before = heavy.tokenizer.encode("the hist")
    rows = [([*before, symbol], 1) for symbol in range(27)]
    greedy = heavy.are_greedy(rows)
    likelihood = heavy.log_likelihoods(rows, [0] * 27, "symbols")[:, 0]
    assert sum(greedy) == 1 and greedy[int(likelihood.argmax())]
    assert np.exp(likelihood).sum() == pytest.approx(1)


def test_what_is_greedy_is_what_the_surest_position_first_writes(heavy: harness.Scheduled) -> None:
    """Writing by hand, one position at a time, gives the one continuation that is called greedy."""
    row = np.array([*heavy.tokenizer.encode("on the "), *[27] * 4])
    model = heavy.models["large"]
    while (row == 27).any():
        t = torch.tensor([(row == 27).sum() / 4])
        log_p = model.logits(torch.from_numpy(row)[None], t)[0, :, :27].log_softmax(dim=-1).detach().numpy()
        place = max(np.flatnonzero(row == 27), key=lambda position: log_p[position].max())
        row[place] = log_p[place].argmax()
    other = row.copy()
    other[-1] = (other[-1] + 1) % 27
    assert heavy.are_greedy([(row.tolist(), 4), (other.tolist(), 4)]) == [True, False]


@given(st.text("abc ", max_size=200))
def test_windows_score_every_token_once(heavy: harness.Scheduled, text: str) -> None:
    ids = heavy.tokenizer.encode(text, strict=False)
    windows = heavy.windows(text)
    assert [token for row, last in windows for token in row[len(row) - last :]] == ids
    assert all(len(row) <= 48 for row, _ in windows)
    assert len(windows) < 2 or len(windows[-1][0]) == 48  # the last one has context


@given(st.text("abc ", max_size=80), st.text("abc ", min_size=1, max_size=80))
def test_pairs_are_cut_on_the_left(heavy: harness.Scheduled, context: str, continuation: str) -> None:
    before, after = heavy.pair(context, continuation)
    row = heavy.row(before, after)
    whole = heavy.tokenizer.encode(context + continuation, strict=False)
    assert row == whole[-48:] and row[len(row) - len(after) :] == after


def test_texts_are_those_of_sample_and_end_at_the_first_stop(folder: Path, heavy: harness.Scheduled) -> None:
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
    model = harness.model_class()(family=str(folder), schedule="heavy", spacing=8, device="cpu")
    prompt = "the history of "
    whole = sample(model.scheduled.family, "heavy", spacing=8, prompt=prompt, max_new_tokens=12, top_k=1)
    text = whole.texts[0][len(prompt) :]
    stop = text[5]
    asked = [(prompt, {"until": until, "max_gen_toks": 12}) for until in ([], stop, ["@", stop])]
    assert model.generate_until([request(*args) for args in asked]) == [text, *[text.split(stop)[0]] * 2]
    warm = {"do_sample": True, "temperature": 0.7, "max_gen_toks": 12, "until": []}
    drawn = sample(model.scheduled.family, "heavy", spacing=8, prompt=prompt, max_new_tokens=12, temperature=0.7)
    assert model.generate_until([request(prompt, warm)]) == [drawn.texts[0][len(prompt) :]]


def test_a_mark_is_given_where_the_rows_of_training_had_one() -> None:
    scheduled = harness.Scheduled("wiki-bpe", "light", device="cpu")
    ids = scheduled.tokenizer.encode("The river")
    mark, masks = scheduled.tokenizer.eos_id, [scheduled.family.mask_id] * harness.AFTER
    rows = scheduled.windows("The river")
    assert rows == [([mark, *ids, *masks, mark], len(ids))]
    assert np.flatnonzero(scheduled.scored(rows)[0]).tolist() == list(range(1, 1 + len(ids)))
    per_token = scheduled.log_likelihoods(rows, [0], "one")[0, 0] / len(ids)
    assert -12 < per_token < 0  # the last token is not taken for the end of the row
    assert len(scheduled.generate(["The river"], 4, [], top_k=1)[0]) > 0
    assert scheduled.schedule.spacing is not None  # the family's own


@pytest.mark.parametrize("family", ["wiki-bpe", "wiki-char"])  # rows with marks, and without
def test_a_prompt_is_kept_however_many_tokens_are_asked_for(
    family: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    scheduled = harness.Scheduled(family, "light", spacing=2, device="cpu")
    front, behind, length = len(scheduled.front), len(scheduled.back), scheduled.family.length
    rows: list[np.ndarray] = []

    def drawn(*args: Any, given: np.ndarray, **options: Any) -> Any:
        rows.extend(given)
        return SimpleNamespace(tokens=np.maximum(given, 0))

    def asked(prompt: str, tokens: int) -> tuple[list[int], list[int], int]:
        """The prompt's tokens, those that were given, and how many the text has."""
        rows.clear()
        scheduled.generate([prompt], tokens, [])
        place = int(np.argmax(rows[0][front:] < 0)) + front  # the first that is free
        free = int((rows[0] < 0).sum()) - behind - max(0, behind - 1)
        assert len(rows[0]) <= length
        return scheduled.tokenizer.encode(prompt, strict=False), rows[0][front:place].tolist(), free

    monkeypatch.setattr(harness, "sample", drawn)
    room = scheduled.space - behind
    for tokens in (5, room - 20, room, 10 * length):
        ids, kept, free = asked("the river", tokens)
        assert kept == ids and free == min(tokens, room - len(ids))
        ids, kept, free = asked("of the river " * 300, tokens)
        assert free == min(tokens, room - scheduled.space // 4)
        assert kept == ids[len(ids) - len(kept) :] and len(kept) == room - free
    assert caplog.text.count("are cut to rows of") == 4 + 2


def test_a_long_text_is_the_sum_of_its_windows(folder: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
    model = harness.model_class()(family=str(folder), schedule="heavy", steps=math.inf, calls=8, device="cpu")
    text = "the river runs to the sea " * 4
    (found,) = model.loglikelihood_rolling([request(text)])
    windows = model.scheduled.windows(text)
    each = model.scheduled.log_likelihoods(windows, range(len(windows)), "windows")
    assert len(windows) == 3 and found == pytest.approx(each[:, 0].sum())
    assert model.scheduled.standard_errors == [pytest.approx(math.sqrt((each[:, 1] ** 2).sum()))]


def test_texts_end_where_the_model_ended_them_and_blanks_belong_to_what_follows() -> None:
    scheduled = harness.Scheduled("wiki-bpe", "light", spacing=40, device="cpu")
    ids = scheduled.tokenizer.encode("The river")
    assert scheduled._text([*ids, scheduled.tokenizer.eos_id, *ids], []) == "The river"
    assert scheduled.pair("The river ", "runs") == scheduled.pair("The river", " runs")


def test_prompts_of_other_lengths_have_random_numbers_of_their_own(
    heavy: harness.Scheduled, monkeypatch: pytest.MonkeyPatch
) -> None:
    first: list[int] = []

    def drawn(*args: Any, given: np.ndarray, first_row: int, **options: Any) -> Any:
        first.append(first_row)
        return SimpleNamespace(tokens=np.maximum(given, 0))

    monkeypatch.setattr(harness, "sample", drawn)
    heavy.generate(["a", "a", "bc", "bc", "def"], 3, [])
    assert first == [0, 2, 4]


def test_numbers_of_calls_and_seeds_are_checked(folder: Path) -> None:
    for asked, rows in (("auto", 32), (1, 32), ("7", 7)):  # lm_eval says 1 unless it is given another
        assert harness.Scheduled(str(folder), batch_size=asked, device="cpu").batch_size == rows  # type: ignore[arg-type]
    assert harness.Scheduled(str(folder), calls="8", device="cpu").calls == 8  # type: ignore[arg-type]
    for options in ({"calls": 0}, {"calls": "many"}, {"seed": -1}):
        with pytest.raises(UserError, match="must be a whole number from"):
            harness.Scheduled(str(folder), device="cpu", **options)  # type: ignore[arg-type]


def test_without_lm_eval_one_line_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    harness.model_class.cache_clear()
    with pytest.raises(UserError, match=r"relaylm\[lm-eval\]"):
        harness.register()
    harness.model_class.cache_clear()


@pytest.mark.slow
def test_the_command_line(folder: Path) -> None:
    pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")
    arguments = ["--model_args", f"family={folder},schedule=light,steps=8,calls=4", "--limit", "2", "--device", "cpu"]
    command = [sys.executable, "-m", "relaylm.harness", "--model", "relaylm", *arguments]
    command += ["--include_path", str(TASKS), "--tasks", "relaylm_cloze"]
    done = subprocess.run(
        command, capture_output=True, text=True, env={**os.environ, **OFFLINE, "PYTHONPATH": str(ROOT)}, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "relaylm_cloze" in done.stdout and "standard error of an estimate" in done.stderr
