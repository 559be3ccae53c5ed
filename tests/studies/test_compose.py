"""The grid rule x steps x schedule: its cells are plain samples, its arithmetic is what it says, and it resumes."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from search_oracle import network

from relaylm.cli import main as cli
from relaylm.errors import UserError
from relaylm.measure.judge import load_judge, score
from relaylm.measure.store import Store
from relaylm.models.family import Family
from relaylm.models.tokenizer import Text8Tokenizer
from relaylm.sampling.sample import sample
from relaylm.studies.compose import compose as compose_module
from relaylm.studies.compose import view as compose_view
from relaylm.studies.compose.compose import Measured, answer, cells, combinations, combined, compose, kind_of, pareto

ROOT = Path(__file__).parents[2]
RULES = ["ancestral", "low-confidence:4", "threshold:0.5", "threshold:0.05", "ancestral@0.8"]


@pytest.fixture(scope="module")
def family() -> Family:
    family = Family({f"{d}b": network(d, d, 12) for d in (1, 2, 3)}, 27, 28, 12, Text8Tokenizer(), "toy")
    family.judge = network(1, 1, 12, causal=True)
    return family


@pytest.fixture(scope="module")
def result(family: Family) -> dict[str, Any]:
    return compose(family, RULES, (3, 12), None, 10, progress=False, seed=4)


def test_the_grid_has_every_cell_once(family: Family, result: dict[str, Any]) -> None:
    schedules = ["heavy", "sandwich:25%", "sandwich:50%", "2b", "light"]
    found = [(row["line"], row["dial"], row["schedule"]) for row in result["rows"]]
    expected = [
        (line, dial, schedule)
        for line, dials in (
            ("ancestral", ("T=12", "T=3")),
            ("low-confidence:4", ("T=12", "T=3")),
            ("threshold", ("0.5", "0.05")),
            ("ancestral@0.8", ("T=12", "T=3")),
        )
        for dial in dials
        for schedule in schedules
    ]
    assert sorted(found) == sorted(expected)
    assert [cell.label for cell in cells(family, ["ancestral"], (3,), ["light"], "1b", "3b")] == ["heavy", "light"]


def test_a_cell_is_a_plain_sample_judged(family: Family, result: dict[str, Any]) -> None:
    row = next(
        r for r in result["rows"] if (r["rule"], r["dial"], r["schedule"]) == ("threshold:0.05", "0.05", "light")
    )
    samples = sample(family, "light", 10, rule="threshold:0.05", seed=4)
    scores = score(load_judge(None, family), samples.tokens, samples.texts)
    assert row["gen_ppl"] == pytest.approx(np.exp(scores.written_nll_n / scores.written_count_n).mean())
    assert row["calls"] == samples.cost.total_calls and row["flops"] == samples.cost.flops
    assert not row["exact"] and row["seconds"] > 0
    nucleus = next(r for r in result["rows"] if (r["line"], r["dial"], r["schedule"]) == ("ancestral@0.8", "T=3", "2b"))
    own = sample(family, "2b", 10, rule="ancestral", steps=3, top_p=0.8, seed=4)
    scores = score(load_judge(None, family), own.tokens, own.texts)
    assert nucleus["log_ppl"] == pytest.approx((scores.written_nll_n / scores.written_count_n).mean())
    json.dumps(result, allow_nan=False)


def test_combinations_by_hand(family: Family, result: dict[str, Any]) -> None:
    def log_n(rule: str, steps: int, schedule: str) -> np.ndarray:
        samples = sample(family, schedule, 10, rule=rule, steps=steps, seed=4)
        scores = score(load_judge(None, family), samples.tokens, samples.texts)
        return np.asarray(scores.written_nll_n / scores.written_count_n)

    item = next(c for c in result["combinations"] if (c["line"], c["schedule"]) == ("low-confidence:4", "sandwich:50%"))
    rows = {(r["line"], r["dial"], r["schedule"]): r for r in result["rows"]}

    def flops(dial: str, schedule: str) -> float:
        return float(rows["low-confidence:4", dial, schedule]["flops"])

    most = flops("T=12", "heavy")
    assert item["flops"]["both"] == pytest.approx(flops("T=3", "sandwich:50%") / most)
    assert item["flops"]["product"] == pytest.approx(
        flops("T=3", "heavy") / most * flops("T=12", "sandwich:50%") / most
    )
    neither, both = log_n("low-confidence:4", 12, "heavy"), log_n("low-confidence:4", 3, "sandwich:50%")
    fewer, scheduled = log_n("low-confidence:4", 3, "heavy"), log_n("low-confidence:4", 12, "sandwich:50%")
    assert item["loss"]["both"]["value"] == pytest.approx((both - neither).mean(), abs=1e-5)
    assert item["interaction"]["value"] == pytest.approx((both - fewer - scheduled + neither).mean(), abs=1e-5)
    spread = (both - fewer - scheduled + neither).std(ddof=1) / math.sqrt(10)
    low, high = item["interaction"]["ci"]
    assert (high - low) / 2 == pytest.approx(2.262157 * spread, rel=1e-4)  # Student's t with 9 degrees of freedom
    assert item["neither"] == "T=12" and item["dial"] == "T=3"
    # At T = 2 the 25% sandwich has no light step: it is the heavy model, and no combination.
    short = compose(family, ["ancestral"], (2, 8), ["sandwich:25%"], 2, progress=False)
    assert len(short["rows"]) == 4 and short["combinations"] == [] and "Nothing was combined" in short["answer"]
    # A rule that finds its own steps has its dearer number as the line's end.
    ends = {c["neither"] for c in result["combinations"] if c["line"] == "threshold"}
    assert ends == {"0.5"} and rows["threshold", "0.5", "heavy"]["flops"] > rows["threshold", "0.05", "heavy"]["flops"]


def test_words_for_losses_that_overlap_compound_or_add() -> None:
    places = (("T=8", "heavy", 100.0), ("T=8", "light", 50.0), ("T=2", "heavy", 20.0), ("T=2", "light", 10.0))
    rows = [{"line": "x", "dial": d, "schedule": s, "flops": f} for d, s, f in places]
    rng = np.random.default_rng(0)
    base = [np.zeros(400), np.full(400, 0.5), np.full(400, 0.3)]

    def item(both: float) -> dict[str, Any]:
        per_row = [(x + rng.normal(0, 0.01, 400), x) for x in [*base, np.full(400, both)]]
        return combined(*(Measured(row, *each) for row, each in zip(rows, per_row, strict=True)))

    for both, kind in ((0.6, "overlap"), (0.8, "add"), (1.0, "compound")):
        found = item(both)
        assert kind_of(found) == kind
        assert found["flops"]["product"] == pytest.approx(0.1) == found["flops"]["both"]
        assert found["entropy_interaction"]["value"] == pytest.approx(both - 0.8)
        assert "savings multiply to within 0.0%" in answer([found])
        assert (kind if kind != "add" else "add up as far as can be told") in answer([found])
    assert "Nothing was combined" in answer([])
    said = answer([item(0.6), item(1.0)])
    assert "(interaction +0.0" in said and "beside a sum of +0.8" in said  # the mean of -0.2 and +0.2
    for left, words in (
        (0.091, "multiply to within 9.0%"),
        (0.109, "multiply to within 9.0%"),
        (0.089, "do not multiply"),
    ):
        found = item(0.8)
        found["flops"]["both"] = left
        assert f"savings {words}" in answer([found])
    found["flops"]["both"] = 0.111
    assert "savings do not multiply (both over product 1.110 to 1.110)" in answer([found])


def test_pareto_front_by_brute_force() -> None:
    rng = np.random.default_rng(1)
    rows = [
        {"flops": f, "log_ppl": p, "entropy": e} for f, p, e in rng.integers(1, 6, size=(40, 3)).astype(float).tolist()
    ]
    for row, on_front in zip(rows, pareto(rows), strict=True):
        beaten = any(
            other["flops"] <= row["flops"]
            and other["log_ppl"] <= row["log_ppl"]
            and other["entropy"] >= row["entropy"]
            and (other["flops"], other["log_ppl"], other["entropy"]) != (row["flops"], row["log_ppl"], row["entropy"])
            for other in rows
        )
        assert on_front == (not beaten)


def test_the_front_goes_no_further_than_real_text() -> None:
    """A perplexity below held-out text's and an entropy above it are no merit."""
    real = {"log_ppl": 1.0, "entropy": 9.0, "word_entropy": 3.0}

    def row(flops: float, log_ppl: float, words: float) -> dict[str, float]:
        return {"flops": flops, "log_ppl": log_ppl, "entropy": 5.0, "word_entropy": words}

    rows = [row(1, 0.9, 3.1), row(2, 0.5, 3.1), row(2, 0.9, 3.5), row(3, 0.4, 4.0), row(0.5, 1.1, 2.9)]
    assert pareto(rows, real) == [True, False, False, False, True]
    assert pareto(rows) == pareto(rows, None) == [True, True, True, True, True]
    short = [row(1, 2.0, 2.0), row(2, 1.5, 2.0), row(2, 2.0, 2.5), row(2, 2.0, 2.0)]  # as ever on this side of the text
    assert pareto(short, real) == pareto(short) == [True, True, True, False]


def test_a_store_resumes(family: Family, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import relaylm.measure.evaluate as module

    first = compose(family, ["ancestral", "random"], (3,), ["light"], 5, store=tmp_path / "s", progress=False)
    kept = Store(tmp_path / "s")
    assert [len(list(kept.records(kind))) for kind in ("samples", "scores")] == [4, 4]
    drawn: list[str] = []
    original = module.sample

    def counted(family: Family, schedule: Any, n: int, **options: Any) -> Any:
        drawn.append(str(schedule))
        return original(family, schedule, n, **options)

    monkeypatch.setattr(module, "sample", counted)
    again = compose(family, ["ancestral", "random"], (3, 6), ["light"], 5, store=tmp_path / "s", progress=False)
    assert len(drawn) == 4  # T = 6 alone
    known = {(row["rule"], row["dial"], row["schedule"]): row["gen_ppl"] for row in again["rows"]}
    assert all(known[row["rule"], row["dial"], row["schedule"]] == row["gen_ppl"] for row in first["rows"])
    compose(family, ["ancestral"], (3,), ["light"], 5, store=tmp_path / "s", progress=False, seed=1)
    assert len(drawn) == 6  # another seed is another grid


def test_what_the_store_has_is_shown_without_sampling(
    family: Family, result: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import relaylm.measure.evaluate as module

    def grid(rules: list[str], steps: tuple[int, ...], **options: Any) -> dict[str, Any]:
        return compose(family, rules, steps, None, 10, seed=4, store=tmp_path / "s", progress=False, **options)

    whole = grid(["ancestral", "low-confidence:4"], (3, 12))
    assert whole["missing"] == []
    monkeypatch.setattr(module, "sample", lambda *args, **options: pytest.fail("sampled"))
    again = grid(["ancestral", "low-confidence:4"], (3, 12), stored_only=True)
    assert again == whole
    # A rule, and a number of steps, that were never reached: what is there is told as if nothing else had been asked.
    more = grid(["ancestral", "low-confidence:4", "random"], (3, 6, 12), stored_only=True)
    assert [more[name] for name in ("rows", "combinations", "answer")] == [
        whole[name] for name in ("rows", "combinations", "answer")
    ]
    missing = {(cell["line"], cell["dial"]) for cell in more["missing"]}
    assert missing == {("ancestral", "T=6"), ("low-confidence:4", "T=6")} | {("random", f"T={t}") for t in (3, 6, 12)}
    assert len(more["missing"]) == 25 and "25 of 45 cells not measured" in compose_view.render(more)
    monkeypatch.setattr(compose_module, "announce_samples", lambda *args: pytest.fail("nothing takes time"))
    options: dict[str, Any] = {"store": tmp_path / "s", "stored_only": True}
    compose(family, ["ancestral"], (3,), None, 10, seed=4, progress=True, **options)
    with pytest.raises(UserError, match="none of the 5 cells"):
        grid(["random"], (3,), stored_only=True)
    with pytest.raises(UserError, match="--store FOLDER"):
        compose(family, ["random"], (3,), None, 10, stored_only=True)
    with pytest.raises(UserError, match="without --fresh"):
        grid(["ancestral"], (3,), stored_only=True, fresh=True)


def test_a_combination_needs_its_four_cells(family: Family, result: dict[str, Any]) -> None:
    grid = cells(family, ["ancestral"], (3, 12), None, "1b", "3b")
    rows = [row for row in result["rows"] if row["line"] == "ancestral"]
    assert [(cell.dial, cell.label) for cell in grid] == [(row["dial"], row["schedule"]) for row in rows]

    def without(*gone: tuple[str, str]) -> list[tuple[str, str]]:
        kept = [row for row in rows if (row["dial"], row["schedule"]) not in gone]
        found = combinations([Measured(row, np.arange(10.0), np.arange(10.0)) for row in kept], "3b")
        return [(item["dial"], item["schedule"]) for item in found]

    whole = [("T=3", name) for name in ("sandwich:25%", "sandwich:50%", "2b", "light")]
    assert without() == whole
    assert without(("T=12", "light")) == without(("T=3", "light")) == whole[:3]
    assert without(("T=3", "heavy")) == []  # the dial alone
    assert without(("T=3", "heavy"), ("T=12", "heavy")) == []


def test_tables_marks_and_figures(result: dict[str, Any], tmp_path: Path) -> None:
    shown = compose_view.render(result, 160)
    answer, cells = shown.split("\n\n")
    assert " ".join(answer.split()) == result["answer"] and cells.count("\n") == len(result["rows"]) + 2
    assert sum(line.startswith("*") for line in shown.splitlines()) == 1 + sum(row["front"] for row in result["rows"])
    document = tmp_path / "page.md"
    document.write_text("# Page\n\ntext\n")
    compose_view.put_into(result, document)
    once = document.read_text()
    assert once.startswith("# Page\n\ntext\n\n<!-- compose toy: begin -->\n### toy") and once.endswith("end -->\n")
    compose_view.put_into({**result, "answer": "changed."}, document)
    assert "changed." in document.read_text() and result["answer"] not in document.read_text()
    compose_view.put_into(result, document)
    assert document.read_text() == once
    # Seconds that mean nothing, cells that are not there, text to compare with, and what else is to be said.
    rows = [{**result["rows"][0], "seconds": None, "front": True}, *result["rows"][1:]]
    gone = [{"line": "random", "dial": "T=3", "schedule": "light"}]
    text = {**result["rows"][0], "gen_ppl": 2.5, "gen_ppl_ci": [2.4, 2.6], "entropy": 1.25, "word_entropy": 0.5}
    told = {**result, "rows": rows, "missing": gone, "heldout": {**text, "distinct_4": 0.75}, "note": "A word more."}
    first = next(line for line in compose_view.render(told, 160).splitlines() if line.startswith("*"))
    assert first.endswith(" -")
    expected = "perplexity 2.50 ± 0.10, entropy 1.250, of words 0.500, distinct-4 0.750"
    for shown in (compose_view.render(told, 160), compose_view.markdown(told)):
        assert expected in shown and "1 of 41 cells not measured: random T=3 light" in shown and "A word more." in shown
    drawn = compose_view.plot(told, tmp_path / "grid.png")
    assert [path.name for path in drawn] == ["grid.png", "grid-both.png"]
    assert all(path.stat().st_size > 20_000 for path in drawn)


def test_each_number_has_its_own_margin(result: dict[str, Any]) -> None:
    first = result["combinations"][0]
    loss = {**first["loss"], "both": {"value": 0.25, "ci": [0.2, 0.3]}}
    item = {**first, "loss": loss, "interaction": {"value": -0.5, "ci": [-0.75, -0.25]}}
    table = compose_view.markdown({**result, "combinations": [item]}).splitlines()[-3:]
    head, values = ([cell.strip() for cell in table[k].split("|")[1:-1]] for k in (0, 2))
    assert head[6:] == ["both", "interaction", "they"] and len(head) == len(values)
    assert values[6:] == ["+0.250 ± 0.050", "-0.500 ± 0.250", "overlap"]
    unknown = {**item, "interaction": {"value": -0.5, "ci": [None, None]}}
    assert "| +0.250 ± 0.050 | -0.500 | add |" in compose_view.markdown({**result, "combinations": [unknown]})


def test_figures_say_the_dial_and_hide_no_marker() -> None:
    """Two cells of one line and dial at one place stand side by side, and the heavy one's dial is beside it."""
    figure, (axes,) = compose_view.panels(6.0, 4.0)
    marks = []
    for x, y, text, kin in (
        (1.0, 1.0, "", ("a", "T=8")),
        (1.0, 1.0, "T=8", ("a", "T=8")),
        (2.0, 2.0, "", ("a", "T=8")),
        (2.0, 2.0, "", ("b", "T=8")),
        (3.0, 3.0, "0.9", None),
        (3.0, 3.0, "0.6", None),
    ):
        (artist,) = axes.plot(x, y, marker="o", markersize=8, linestyle="")
        marks.append(compose_view._Mark(axes, artist, text, kin=kin))
    compose_view._tidy(figure, marks)
    figure.draw_without_rendering()
    centre = np.array([m.artist.get_transform().transform(np.ravel(m.artist.get_data())) for m in marks])
    points = centre * 72 / figure.dpi
    assert points[1, 0] - points[0, 0] == pytest.approx(8.0) and points[0, 1] == points[1, 1]  # a diameter apart
    assert (points[2] == points[3]).all() and (points[4] == points[5]).all()
    assert [text.get_text() for text in axes.texts] == ["T=8", "0.9, 0.6"]
    for text in axes.texts:  # inside the frame and on no marker
        box = text.get_window_extent()
        frame = axes.get_window_extent()
        assert frame.x0 <= box.x0 and box.x1 <= frame.x1 and frame.y0 <= box.y0 and box.y1 <= frame.y1
        reach = 3.5 * figure.dpi / 72
        assert not any(box.x0 - reach < x < box.x1 + reach and box.y0 - reach < y < box.y1 + reach for x, y in centre)


def test_at_80_columns_no_cell_is_lost(result: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    lines = compose_view.render(result).splitlines()
    assert max(map(len, lines[1:])) <= 80 and lines == compose_view.render(result, 80).splitlines()
    assert "left out at this width: words, distinct-4, calls/row, s (--json has all)" in lines
    found = [line[2:].split()[:3] for line in lines[2:] if line.startswith((" ", "*"))]
    for row in result["rows"]:  # rule, dial and schedule stand in one line, once
        assert found.count([row["line"], row["dial"], row["schedule"]]) == 1
    # A schedule that does not fit goes on in the next line: two that begin alike are told apart.
    long = [f"L10% H10% L10% H10% L10% H10% L10% H10% {end}" for end in ("L20%", "H20%")]
    rows = [{**row, "schedule": name} for row, name in zip(result["rows"], long, strict=False)]
    shown = compose_view.render({**result, "rows": rows}, 80)
    assert max(map(len, shown.splitlines()[1:])) <= 80
    assert shown.count("L20%") == shown.count("H20%") == 1 and "..." not in shown and "…" not in shown


def test_the_command_and_its_recorded_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], family: Family) -> None:
    from relaylm.models.folder import save_family

    save_family(tmp_path / "toy", family.models, family.tokenizer, length=12, name="toy", judge=family.judge)
    text = "the cat sat on the mat and the dog ran off " * 3
    (tmp_path / "toy" / "heldout.txt").write_text(text)
    target, page = tmp_path / "grid.json", tmp_path / "page.md"
    words = ["--rules", "ancestral,threshold:0.3", "--steps", "2,4", "--schedules", "light", "-n", "3"]
    assert cli.main(["compose", "--family", str(tmp_path / "toy"), *words, "--json", str(target)]) == 0
    shown = capsys.readouterr().out
    assert {"command", "machine", "versions", "commit"} <= set(json.loads(target.read_text()))
    # Three rows of held-out text, spread over it, judged as samples are.
    rows = [text[start : start + 12] for start in (0, 36, 72)]
    tokens = np.array([family.tokenizer.encode(row) for row in rows])
    scores = score(load_judge(None, family), tokens, rows)
    found = json.loads(target.read_text())["heldout"]
    assert found["rows"] == 3 and "held-out text: perplexity" in shown
    assert found["gen_ppl"] == pytest.approx(np.exp(scores.written_nll_n / scores.written_count_n).mean(), rel=1e-4)
    recorded = ["compose", "--recorded", str(target), "--markdown", str(page)]
    assert cli.main(recorded) == 0 and capsys.readouterr().out == shown and "| ancestral |" in page.read_text()
    for other in ("{}", '{"kind": "compose"}'):
        (tmp_path / "other.json").write_text(other)
        assert cli.main(["compose", "--recorded", str(tmp_path / "other.json")]) == 2
        assert "is not what" in capsys.readouterr().err
    folder = str(tmp_path / "toy")
    for flags, word in (
        (["--rules", "nonsense"], "the rules are"),
        (["--rules", "ancestral@x"], "nucleus"),
        (["--schedules", "L4 H4"], "in percent"),
        (["--steps", "0"], "whole number"),
    ):
        assert cli.main(["compose", "--family", folder, *flags]) == 2
        message = capsys.readouterr().err
        assert word in message and message.count("\n") == 1


def test_bad_grids_are_refused(family: Family) -> None:
    with pytest.raises(UserError, match="at least 2"):
        compose(family, n=1, progress=False)
    with pytest.raises(UserError, match="at least one rule"):
        compose(family, [], progress=False)


@pytest.mark.parametrize(
    "rule, schedule, word",
    [
        ("random:5", "light", "no multiple of 3"),
        ("low-confidence:5", "light", "no multiple of 3"),
        ("ancestral@1.5", "light", "top_p must lie in"),
        ("threshold", "interleaved:25%", "single steps, not times"),
        ("dream-entropy", "L50%@25% H50%@75%", "shares of time"),
    ],
)
def test_a_bad_cell_costs_nothing(
    family: Family, monkeypatch: pytest.MonkeyPatch, rule: str, schedule: str, word: str
) -> None:
    """However late it comes in the grid."""
    import relaylm.measure.evaluate as module

    monkeypatch.setattr(module, "sample", lambda *args, **options: pytest.fail("sampled"))
    with pytest.raises(UserError) as error:
        compose(family, ["ancestral", rule], (4,), ["light", schedule], 2, progress=False)
    assert word in str(error.value)


def test_documents_have_what_was_recorded() -> None:
    """Where a grid is recorded under results/compose, its tables in docs/decoding.md are made from it."""
    page = (ROOT / "docs" / "decoding.md").read_text(encoding="utf-8")
    for file in sorted((ROOT / "results" / "compose").glob("*.json")):
        assert compose_view.markdown(json.loads(file.read_text())) in page, f"relaylm compose --recorded {file} ..."
