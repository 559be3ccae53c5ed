"""The same prompt three times: step by step, in spaced calls, and by two networks. Example: relaylm demo"""

import argparse
import shlex
import sys
import time
from contextlib import nullcontext, redirect_stdout
from dataclasses import replace
from typing import Any

from relaylm.cli import tools
from relaylm.cli.options import add_shared
from relaylm.console import table, terminal_width, wrapped

SPACING = 16  # of the positions that a call writes, where the family has none of its own
LENGTH = 64  # positions, prompt included
SECONDS = 6.0  # that the text takes to appear, at least
ABOUT = """One prompt, three times. On the left the large network writes it as usual, in as many steps as there are
positions. In the middle the same network writes in every call all positions that are far enough apart, so it needs a
fraction of the calls. On the right a small network makes the first and the last of these calls."""
LUCK = """All columns use the same order of positions and the same random numbers, and make their calls at the same
pace."""
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
    """Sample in each of the three ways, and show texts and costs; on standard error if JSON goes to the output."""
    with redirect_stdout(sys.stderr if args.json == "-" else sys.stdout):
        return present(args)


def present(args: argparse.Namespace) -> tools.Result:
    """The demo on standard output."""
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
        ("sample", "--prompt", prompt, "--length", "64", "--watch"),
        ("compare", "--length", "64", "-n", "32"),
        ("search", "--budget", "25%", "--quick", "--length", "64"),
    )
    print("Try next:", *(f"  {shlex.join(('relaylm', *words, *source))}" for words in further), sep="\n")
    return {"prompt": prompt, "family": family.name, "samples": shown}


def play(family: Any, given_L: Any, seed: int) -> list[tuple[str, Any]]:
    """The samples, by title. Calls are made in turn, one of each column that is not done yet."""
    from relaylm.core.plan import make_plan
    from relaylm.core.schedule import Schedule, Spacing
    from relaylm.measure.evaluate import texts_of
    from relaylm.sampling.denoise import Options, begin
    from relaylm.sampling.engine import settings
    from relaylm.sampling.law import Law
    from relaylm.sampling.sample import sample
    from relaylm.show.terminal import Watch

    light, heavy = family.roles()
    length = len(given_L)
    plan = make_plan(1, length, seed, given_L[None])
    spacing = family.spacing(length) or Spacing(SPACING)
    ways = [("heavy", length, None), ("heavy", None, spacing), ("sandwich:25%", None, spacing)]
    titles = [f"{text} {spaced or f'in {steps} steps'}" for text, steps, spaced in ways]
    watch = Watch(family, given_L, (light, heavy), sys.stdout, pace=0.0, titles=titles)
    options = Options(family.mask_id, Law(), 1, heavy, family.device)
    runs, seconds, found = [], [0.0] * len(ways), []
    with watch, settings(family.device):
        sample(family, "sandwich", 1, given=given_L, steps=2)  # the first calls of a process are slow
        for k, (text, steps, spaced) in enumerate(ways):
            schedule = replace(Schedule.parse(text).bind(light, heavy), spacing=spaced)
            models = {name: family[name] for name in family.names if name in (*schedule.models, heavy)}
            follow = watch.follow(k) if watch.live is not None else None  # a pipe gets the result alone
            runs.append(begin(models, schedule, plan, replace(options, callback=follow), steps))
        start, rounds = time.monotonic(), max(len(run.events.step_E) for run, _ in runs)
        for number in range(1, rounds + 1):
            for k, (run, _) in enumerate(runs):
                began = time.perf_counter() - watch.seconds
                run.step()
                seconds[k] += time.perf_counter() - watch.seconds - began
            if watch.live is not None:
                time.sleep(max(0.0, start + SECONDS * number / rounds - time.monotonic()))
        for title, (_, finish), spent in zip(titles, runs, seconds, strict=True):
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
