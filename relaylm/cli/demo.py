"""The same prompt under three schedules, side by side. Example: relaylm demo"""

import argparse
import sys
from typing import Any

from relaylm.cli import tools
from relaylm.cli.options import add_shared
from relaylm.tables import table, terminal_width, wrapped

SCHEDULES = ("heavy", "sandwich:25%", "light")
ROWS = 2  # samples of each
LENGTH = 128  # positions, prompt included
NOTE = f"""Figures of {ROWS} samples each, the first of them shown: `relaylm compare` draws enough to distinguish
schedules. Perplexity is that of the continuation under the family's own judge, entropy that of its words."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags."""
    add_shared(parser, "family")
    parser.add_argument("--prompt", help="text at the front (default: The history of)")
    add_shared(parser, "seed device")


def run(args: argparse.Namespace) -> tools.Result:
    """Sample under each schedule, and show texts and costs."""
    from relaylm.sampling.sample import sample
    from relaylm.show.terminal import console_for, legend, side_by_side

    family = tools.load_family(args)
    usual = "The history of the" if family.vocab_size > 256 else "the history of "  # small alphabets have no capitals
    prompt = usual if args.prompt is None else args.prompt
    options: dict[str, Any] = {"seed": args.seed, "prompt": prompt, "length": min(LENGTH, family.length)}
    sample(family, "sandwich", 1, **{**options, "steps": 4})  # the first calls of a process are slow
    columns = [(schedule, sample(family, schedule, ROWS, **options)) for schedule in SCHEDULES]
    light, heavy = family.roles()
    print(f"L is {light}, H is {heavy}; one plan: every column writes the same positions at the same steps.\n")
    console = console_for(sys.stdout)
    console.print(side_by_side(family, columns))
    console.print("\n", legend(family, (light, heavy)), "\n", sep="")
    shown, rows = {}, []
    for title, samples in columns:
        cost, (perplexity, entropy) = samples.cost, quality(family, samples, prompt)
        shown[title] = {**samples.to_json(), "gen_ppl": perplexity, "entropy": entropy}
        calls = " + ".join(f"{count} {name}" for name, count in cost.calls.items() if count)
        saved = "" if cost.flops_saved is None else f"{100 * cost.flops_saved:.1f}%"
        judged = "-" if perplexity is None else f"{perplexity:.2f}"
        rows.append([title, judged, f"{entropy:.2f}", calls, f"{cost.flops or 0:.2e}", saved, f"{cost.seconds:.2f}"])
    print(table(["schedule", "perplexity", "entropy", "calls", "FLOPs", "saved", "seconds"], rows))
    print("", *wrapped([NOTE], terminal_width()), sep="\n")
    return {"prompt": prompt, "family": family.name, "samples": shown}


def quality(family: Any, samples: Any, prompt: str) -> tuple[float | None, float]:
    """Perplexity of the continuations under the family's judge (None without one), and the entropy of their words."""
    import numpy as np

    from relaylm.measure import metrics
    from relaylm.measure.judge import load_judge, score

    start = len(family.tokenizer.encode(prompt)) if family.tokenizer is not None else 0
    entropy = float(np.mean([metrics.word_entropy(text[len(prompt) :]) for text in samples.texts]))
    if family.judge is None:
        return None, entropy
    given = np.full(samples.tokens.shape, -1)
    given[:, :start] = samples.tokens[:, :start]
    scores = score(load_judge(None, family), samples.tokens, samples.texts, given)
    return float(np.exp(scores.written_nll_n / scores.written_count_n).mean()), entropy
