"""The same prompt under three schedules, side by side. Example: relaylm demo"""

import argparse
import shlex
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

from relaylm.cli import tools
from relaylm.cli.options import add_shared
from relaylm.console import table, terminal_width, wrapped

SCHEDULES = ("heavy", "sandwich:25%", "light")
SPACING = 16  # of the positions that a call writes, where the family has none of its own
LENGTH = 64  # positions, prompt included
SECONDS = 6.0  # that the text takes to appear, at least
ABOUT = """One prompt, three schedules: the large network alone (heavy), the small one alone (light), and a sandwich, in
which the small one begins and ends and the large one does the rest. Each call fills in several gaps of the text."""
LUCK = """The columns share all their luck: the same gaps are filled at the same moment with the same random numbers, so
they differ only by who computed."""
NOTE = """One sample of each says little about quality: `relaylm compare` draws enough to tell schedules apart."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags."""
    add_shared(parser, "family")
    parser.add_argument("--prompt", help="text at the front (default: The history of the)")
    add_shared(parser, "seed device")


def say(*notes: str) -> None:
    """Print paragraphs, wrapped to the terminal."""
    print(*wrapped([" ".join(note.split()) for note in notes], terminal_width()), "", sep="\n", flush=True)


def run(args: argparse.Namespace) -> tools.Result:
    """Sample under each schedule, and show texts and costs."""
    from relaylm.show.terminal import console_for, legend, side_by_side

    say(ABOUT, LUCK)
    console = console_for(sys.stdout)
    with console.status(f"reading {tools.default_family(args.family)}") if console.is_terminal else nullcontext():
        from relaylm.sampling.sample import lay_out

        family = tools.load_family(args)
    usual = "The history of the" if family.vocab_size > 256 else "the history of "  # small alphabets have no capitals
    prompt = usual if args.prompt is None else args.prompt
    columns = play(family, lay_out(family, prompt, length=min(LENGTH, family.length)), args.seed)
    light, heavy = family.roles()
    console.print(side_by_side(family, columns))
    console.print("\n", legend(family, (light, heavy)), "\n", sep="")
    shown, rows = {}, []
    for title, samples in columns:
        cost = samples.cost
        shown[title] = samples.to_json()
        if args.json is not None:
            shown[title] |= dict(zip(("gen_ppl", "entropy"), quality(family, samples, prompt), strict=True))
        calls = " + ".join(f"{count} {name}" for name, count in cost.calls.items() if count)
        saved = "" if cost.flops_saved is None else f"{100 * cost.flops_saved:.1f}%"
        rows.append([title, calls, f"{cost.flops or 0:.2e}", saved, f"{cost.seconds:.2f}"])
    print(table(["schedule", "calls", "FLOPs", "saved", "seconds"], rows))
    print()
    say(f"Saved: operations, against {heavy} alone in {len(columns[0][1].tokens[0])} steps. {NOTE}")
    source = () if args.family is None else ("--family", args.family)
    further = (
        ("sample", "--prompt", prompt, "--schedule", "sandwich:50%", "--watch"),
        ("compare", "--length", "64", "-n", "32"),
        ("search", "--budget", "25%", "--quick", "--length", "64"),
    )
    print("Try next:", *(f"  {shlex.join(('relaylm', *words, *source))}" for words in further), sep="\n")
    return {"prompt": prompt, "family": family.name, "samples": shown}


def play(family: Any, given_L: Any, seed: int) -> list[tuple[str, Any]]:
    """The samples of all schedules, by title. Their calls are made in turn, so that all columns grow together."""
    from relaylm.core.plan import make_plan
    from relaylm.core.schedule import Schedule, Spacing
    from relaylm.measure.evaluate import texts_of
    from relaylm.sampling.denoise import Options, begin
    from relaylm.sampling.engine import settings
    from relaylm.sampling.law import Law
    from relaylm.sampling.sample import sample
    from relaylm.show.terminal import Watch

    light, heavy = family.roles()
    plan = make_plan(1, len(given_L), seed, given_L[None])
    spacing = family.spacing(len(given_L)) or Spacing(SPACING)
    watch = Watch(family, given_L, (light, heavy), sys.stdout, pace=SECONDS, titles=SCHEDULES)
    options = Options(family.mask_id, Law(), 1, heavy, family.device)
    runs, seconds, found = [], [0.0] * len(SCHEDULES), []
    with watch, settings(family.device):
        sample(family, "sandwich", 1, given=given_L, steps=2)  # the first calls of a process are slow
        for k, text in enumerate(SCHEDULES):
            schedule = replace(Schedule.parse(text).bind(light, heavy), spacing=spacing)
            models = {name: family[name] for name in family.names if name in (*schedule.models, heavy)}
            follow = watch.follow(k) if watch.live is not None else None  # a pipe gets the result alone
            runs.append(begin(models, schedule, plan, replace(options, callback=follow)))
        going = True
        while going:
            for k, (run, _) in enumerate(runs):  # one plan: all have as many calls to make
                began = time.perf_counter() - watch.seconds
                going = run.step()
                seconds[k] += time.perf_counter() - watch.seconds - began
        for title, (_, finish), spent in zip(SCHEDULES, runs, seconds, strict=True):
            samples = finish(0.0)
            cost = replace(samples.cost, seconds=spent)
            found.append((title, replace(samples, cost=cost, texts=texts_of(family, samples.tokens))))
    return found


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
