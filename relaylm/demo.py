"""`relaylm demo`: the same prompt continued under three schedules, side by side.

With the bundled family that is a matter of seconds. Without one it first trains a tiny family on the text this project
consists of, which takes about a minute on two cores and is kept for the next time.
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np

from relaylm import metrics
from relaylm.errors import UserError
from relaylm.family import Family
from relaylm.family_folder import bundled
from relaylm.judge import load_judge, score
from relaylm.sampler import Samples, sample
from relaylm.terminal import has_colours, legend, side_by_side

SCHEDULES = ("heavy", "sandwich:25%", "light")
ROWS = 2  # samples of each


def demo(source: str | None, prompt: str | None, seed: int, device: str) -> dict[str, Any]:
    """Show it; returns what was shown."""
    tiny = source is None and not bundled()
    family = Family.load(tiny_family() if tiny else (source or bundled()[0]), device=device)
    prompt = prompt if prompt is not None else ("the model " if tiny else "the history of ")
    sample(family, "sandwich", 1, seed=seed, prompt=prompt, steps=8)  # the first calls of a process are slow
    columns: list[tuple[str, Samples]] = []
    for schedule in SCHEDULES:
        columns.append((schedule, sample(family, schedule, ROWS, seed=seed, prompt=prompt)))
    light, heavy = family.roles()
    print(f"L is {light}, H is {heavy}; one plan: every column writes the same positions at the same steps.\n")
    print(side_by_side(family, columns, sys.stdout))
    print("\n" + legend(family, (light, heavy), has_colours(sys.stdout)) + "\n")
    figures = {title: _quality(family, samples, prompt) for title, samples in columns}
    print(f"{'schedule':<16}{'perplexity':>11}{'entropy':>9}{'calls':>20}{'FLOPs':>10}{'saved':>8}{'seconds':>9}")
    for title, samples in columns:
        cost, (perplexity, entropy) = samples.cost, figures[title]
        calls = " + ".join(f"{count} {name}" for name, count in cost.calls.items() if count)
        saved = "" if cost.flops_saved is None else f"{100 * cost.flops_saved:.1f}%"
        judged = "-" if perplexity is None else f"{perplexity:.2f}"
        print(
            f"{title:<16}{judged:>11}{entropy:>9.2f}{calls:>20}{cost.flops or 0:>10.2e}{saved:>8}{cost.seconds:>9.2f}"
        )
    print(
        f"\nFigures of {ROWS} samples each, the first of them shown: `relaylm compare` draws enough to tell schedules"
    )
    print("apart. Perplexity is that of the continuation under the family's own judge, entropy that of its words.")
    if tiny:
        print("\nThis family was trained in a minute on this project's own source text: it shows the mechanism only.")
    shown = {
        title: {**samples.to_json(), "gen_ppl": figures[title][0], "entropy": figures[title][1]}
        for title, samples in columns
    }
    return {"prompt": prompt, "family": family.name, "samples": shown}


def _quality(family: Family, samples: Samples, prompt: str) -> tuple[float | None, float]:
    """Perplexity of the continuations under the family's judge (None without one), and the entropy of their words."""
    start = len(family.tokenizer.encode(prompt)) if family.tokenizer is not None else 0
    entropy = float(np.mean([metrics.word_entropy(text[len(prompt) :]) for text in samples.texts]))
    if family.judge is None:
        return None, entropy
    given = np.full(samples.tokens.shape, -1)
    given[:, :start] = samples.tokens[:, :start]
    scores = score(load_judge(None, family), samples.tokens, samples.texts, given)
    return float(np.exp(scores.written_nll_n / scores.written_count_n).mean()), entropy


def project_text() -> str:
    """The documentation and source of this project: the text that is always there."""
    package = Path(__file__).parent
    files = (
        sorted(package.rglob("*.py")) + sorted(package.parent.glob("*.md")) + sorted(package.parent.glob("docs/*.md"))
    )
    return "\n\n".join(file.read_text(encoding="utf-8") for file in files)


def _home() -> Path:
    text = project_text()
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "relaylm"
    return cache / f"demo-{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def trained() -> Path | None:
    """The tiny family, if it has been trained."""
    family = _home() / "out" / "family"
    return family if (family / "family.json").is_file() else None


def tiny_family() -> Path:
    """The tiny family, trained on first use and kept under the user's cache folder."""
    from relaylm.corpus import prepare
    from relaylm.train import train_family

    if (family := trained()) is not None:
        return family
    print("No family is bundled: training a tiny one on this project's own text (about a minute)...", file=sys.stderr)
    home = _home()
    try:
        home.mkdir(parents=True, exist_ok=True)
        (home / "text.txt").write_text(project_text(), encoding="utf-8")
    except OSError as error:
        raise UserError(f"cannot write to {home} ({error.strerror}): set XDG_CACHE_HOME to another folder") from None
    prepare([home / "text.txt"], home / "corpus", tokenizer="text8", progress=False)
    return train_family(home / "corpus", home / "out", "tiny-cpu", device="cpu", name="demo", progress=True)
