"""How good the texts of a family are: samples beside real and shuffled text, under its own judge and under another.

    python -m relaylm.studies.record.texts FAMILY OUT.json [--judge gguf:PATH] [--rows 64] [--uniform-rows 16]

Kinds of text: rows of the held-out text; the same rows with their words in random order; samples of the heavy and of
the light model at the family's own spacing; and of the heavy model in T = L uniform steps, which takes several times
as many calls and may have fewer rows. Each has its perplexity under both judges, entropy, repetition and diversity,
and, where the package is installed, MAUVE against other rows of the held-out text.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from relaylm.console import progress_bar
from relaylm.errors import UserError
from relaylm.measure import metrics
from relaylm.measure.evaluate import figures, judge_rows, texts_of
from relaylm.measure.judge import Judge, features, load_judge
from relaylm.measure.likelihood import spread_rows
from relaylm.models.family import Family
from relaylm.sampling.sample import sample
from relaylm.studies.record.common import command, keep, text_of

LABELS = {"own": "own judge", "other": "other judge"}


def main() -> None:
    """The command."""
    judge = (str, "hf:NAME or gguf:PATH")
    options = command(__doc__, "family out", judge=judge, rows=64, uniform_rows=16, device="auto")
    family = Family.load(options.family, device=options.device)
    asked = {"own": "own"} | ({"other": options.judge} if options.judge else {})
    judges = {name: load_judge(source, family) for name, source in asked.items()}
    real_nL = spread_rows(text_of(family, options.family), family.length, 2 * options.rows)
    rows_nL, reference_nL = real_nL[::2], real_nL[1::2]
    named, texts = {LABELS[name]: judge.name for name, judge in judges.items()}, []
    for label, tokens_nL, calls in kinds(family, rows_nL, options.uniform_rows):
        found = {"text": label, "n": len(tokens_nL), "calls": calls}
        texts.append(found | described(family, judges, tokens_nL, reference_nL))
        print(texts[-1], flush=True)
        keep(options.out, family, {"judges": named, "texts": texts})


def kinds(family: Family, real_nL: np.ndarray, uniform_rows: int) -> Any:
    """Yield each kind of text: its label, tokens (n, L), and calls for a row where it was sampled."""
    light, heavy = family.roles()
    yield "held-out text", real_nL, None
    yield "held-out text, words shuffled", shuffled(family, real_nL), None
    asked = [("heavy", len(real_nL), None), ("light", len(real_nL), None), ("heavy", uniform_rows, family.length)]
    for role, n, steps in asked:
        with progress_bar(f"{role}, {steps or 'spaced'}", None, "call") as bar:
            samples = sample(family, role, n, seed=0, steps=steps, on_calls=bar.report)
        name = heavy if role == "heavy" else light
        way = f"T = {steps}" if steps else str(family.meta.get("spacing", "default"))
        yield f"{name}, {way}", samples.tokens, sum(samples.cost.calls.values()) / n


def shuffled(family: Family, tokens_nL: np.ndarray, seed: int = 0) -> np.ndarray:
    """Rows whose words are in random order, cut or filled up to the same length with their own first tokens."""
    assert family.tokenizer is not None
    generator = np.random.default_rng(seed)
    out_nL = tokens_nL.copy()
    for row, text in enumerate(texts_of(family, tokens_nL)):
        words = " ".join(generator.permutation(text.split()).tolist())
        ids = np.array(family.tokenizer.encode(words, strict=False))
        out_nL[row] = np.resize(ids, tokens_nL.shape[1])
    return out_nL


def described(
    family: Family, judges: dict[str, Judge], tokens_nL: np.ndarray, reference_nL: np.ndarray
) -> dict[str, Any]:
    """Perplexities under the judges, and what else is measured of texts."""
    scores = {name: judge_rows(family, judge, tokens_nL) for name, judge in judges.items()}
    out = {key: value for key, value in figures(family, tokens_nL, scores["own"]).items() if "ppl" not in key}
    out |= {LABELS[name]: metrics.perplexity(s.written_nll_n, s.written_count_n) for name, s in scores.items()}
    try:
        metrics.mauve_package()
    except UserError:
        return out | {"mauve": None}
    judge, n = judges.get("other", judges["own"]), min(len(tokens_nL), len(reference_nL))
    sides = [features(judge, side_nL, texts_of(family, side_nL)) for side_nL in (tokens_nL[:n], reference_nL[:n])]
    return out | {"mauve": metrics.mauve(*sides)}


if __name__ == "__main__":
    main()
