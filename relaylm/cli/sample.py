"""Write text. Example: relaylm sample --prompt "the history of the" --schedule "L32 H192 L32" -n 2"""

import argparse
import contextlib
import math
import sys
from dataclasses import replace
from typing import Any

from relaylm.cli import tools
from relaylm.cli.options import add_shared, positive
from relaylm.errors import UserError, printable

SCHEDULE_HELP = """model schedule, from the fully masked end: counts "L32 H192 L32", shares "L12.5%%
H75%% L12.5%%", model names "d4:32 d12:192 d4:32", step grids "L8@25%% H200@65%% L8@10%%", segment bits 1000000111, or
heavy, light, quarter:1, sandwich:25%%, small-first:25%%, interleaved:25%%, random:7:25%%; @FILE reads it from a file"""


MANY = 200  # calls of a row, from which on an estimate comes first
SETTLED = (
    *("steps", "spacing", "spread", "length", "prompt", "suffix", "infill", "max_new_tokens", "temperature"),
    *("top_p", "top_k", "rule", "light", "heavy"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags."""
    parser.usage = "%(prog)s [--prompt TEXT] [--schedule SCHEDULE] [-n N] [--watch] [OPTION ...]"
    group = parser.add_argument_group("what is written")
    add = group.add_argument
    add("--prompt", metavar="TEXT", help="text at the front, kept as it is (default: none)")
    add("--suffix", metavar="TEXT", help="text at the end, kept as it is (default: none)")
    add("--infill", metavar="TEXT", help="text with one _ for each position to be written")
    add("-n", "--n", type=positive, default=1, help="number of samples")
    add_shared(group, "length")
    add("--max-new-tokens", type=positive, metavar="N", help="so many after the prompt (default: up to the length)")
    stride = "go on past the family's length, to --length, in windows that move by this (default: one window)"
    add("--stride", type=positive, help=stride)
    add("--stop", metavar="TEXT", help="cut each text at this string, after sampling (default: none)")
    add("--chat", action="store_true", help="put the prompt into the model's chat template")
    add_shared(group, "seed")
    group = parser.add_argument_group("who computes, and what one call writes")
    add = group.add_argument
    add_shared(group, "family")
    add("--schedule", default="heavy", help=SCHEDULE_HELP)
    add_shared(group, "light heavy steps", steps="denoising steps, or inf (default: a spacing, else the length)")
    spacing = "a call writes positions so far apart, instead of steps: 16, or 16:prefix (default: the family's own)"
    add("--spacing", help=spacing)
    add("--spread", action="store_true", help="choose the spacing that makes about --steps calls")
    add("--rule", help="decoding rule: ancestral, low-confidence, dream-entropy, threshold:0.9... (default: ancestral)")
    add("--block-length", type=positive, metavar="N", help="blocks of N positions, with some rules (default: one)")
    add = parser.add_argument_group("how tokens are drawn (each of these changes the law of the samples)").add_argument
    add("--temperature", type=float, default=1.0, help="below 1: likelier tokens; 0, with a rule: the likeliest")
    add("--top-p", type=float, help="the nucleus of this probability (default: all tokens)")
    add("--top-k", type=positive, help="the k likeliest tokens (default: all tokens)")
    add = parser.add_argument_group("what is shown").add_argument
    add("--watch", action="store_true", help="play the denoising slowly enough to follow")
    add("--svg", metavar="FILE", help="draw the first sample, in its writers' colours")
    add("--html", metavar="FILE", help="write a page that plays the denoising in a browser")
    group = parser.add_argument_group("where it runs")
    add_shared(group, "device dtype batch-size cluster")
    parallel = "the same text in fewer rounds, W calls of a row at a time (default: one after the other)"
    group.add_argument("--parallel", type=positive, metavar="W", help=parallel)


def run(args: argparse.Namespace) -> tools.Result:
    """Sample, show the texts and write what was asked for."""
    from relaylm.core.schedule import Schedule
    from relaylm.show.picture import svg
    from relaylm.show.player import page

    typed = tools.read_schedule(args.schedule)
    schedule = Schedule.parse(typed)
    check(args)
    rule = None
    if args.rule is not None:
        from relaylm.sampling.rules import parse_rule

        rule = parse_rule(args.rule, args.block_length)
    family = tools.load_family(args)
    light, heavy = family.roles(args.light, args.heavy)
    bound = family.bind(schedule, light, heavy)
    if args.chat:
        from relaylm.convert import chat_prompt

        args.prompt = chat_prompt(args.family.split(",")[0], [{"role": "user", "content": args.prompt}])
    plain = not (args.chat or args.stop or args.stride or args.cluster is not None or args.json == "-")
    live = args.watch or (args.n == 1 and plain and sys.stdout.isatty())  # on a terminal one text is shown as it grows
    samples = draw(args, family, schedule, {"rule": rule, "light": light, "heavy": heavy}, bound.models if live else ())
    if args.json is not None and rule is None and args.stride is None:
        from relaylm.measure.timing import with_measured

        samples = replace(samples, cost=with_measured(samples, family))
    if args.chat:
        from relaylm.convert import texts

        samples = replace(samples, texts=texts(family, samples.tokens, len(family.tokenizer.encode(args.prompt))))
    if args.json != "-":
        show_samples(family, samples)
    planned = samples.law.startswith(("uniform", "spaced")) or (rule is not None and not rule.adaptive)
    along = bound if planned else None  # else no model has a stretch of time
    tools.write_last(args, args.svg, lambda: svg(family, samples, along))
    tools.write_last(args, args.html, lambda: page(family, replace(samples, schedule=typed), along, heavy))
    tools.note(cost_line(samples, typed, heavy, min(samples.tokens.shape[1], family.length)), prose=True)
    if args.prompt and args.prompt.endswith(" ") and splits_words(family.tokenizer, args.prompt):
        more = "the prompt ends with a space, but words of this tokenizer begin with one: better without it"
        tools.note(more, prose=True)
    if samples.changes_law:
        tools.note(f"{', '.join(samples.changes_law)}: these samples do not follow the models' own law", prose=True)
    return tools.with_provenance(samples.to_json(), family, args)


def splits_words(tokenizer: Any, prompt: str) -> bool:
    """Whether a word after the prompt would have changed the prompt's own tokens: models never saw it split there."""
    ids = tokenizer.encode(prompt)
    return bool(tokenizer.encode(f"{prompt}the")[: len(ids)] != ids)


def check(args: argparse.Namespace) -> None:
    """Refuse flags that do not go together."""
    if args.watch and args.n > 1:
        raise UserError(f"--watch plays one sample, not {args.n}")
    if args.watch and args.cluster is not None:
        raise UserError("--watch plays what happens here, not on a cluster")
    if args.block_length is not None and args.rule is None:
        raise UserError("--block-length goes with a rule: --rule low-confidence")
    if args.stride is not None and args.html is not None:
        raise UserError("--html plays one window, not the several of --stride")
    if args.chat and (args.family is None or args.prompt is None):
        raise UserError("--chat needs an instruction-tuned model (--family) and a message to it (--prompt)")


def draw(args: argparse.Namespace, family: Any, schedule: Any, options: dict[str, Any], shown: Any) -> Any:
    """The samples, here or on a cluster; a denoising by the models `shown`, if any, is played as it happens."""
    from relaylm.sampling.sample import lay_out, sample, settle

    same = "steps spacing spread length seed prompt suffix infill max_new_tokens stop temperature top_p top_k"
    options |= tools.chosen(args, f"{same} stride parallel batch_size")
    if args.cluster is not None:
        from relaylm.cluster import sample_many

        with tools.progress("sampling", "row") as bar, tools.open_workers(family, args.cluster) as workers:
            return sample_many(workers, schedule, args.n, on_rows=bar.report, **options)
    if args.stride is None:
        say_how_long(family, args.n, settle(family, schedule, args.n, **{key: options[key] for key in SETTLED}))
    watch: Any = contextlib.nullcontext()
    if shown:
        from relaylm.show.terminal import Watch

        given_L = lay_out(family, args.prompt, args.suffix, args.infill, args.length, args.max_new_tokens)
        stream = sys.stderr if args.json == "-" else sys.stdout
        watch = Watch(family, given_L, shown, stream, pace=4.0 if args.watch else 0.0)
    with watch as callback, tools.progress("sampling", "call", shown=not shown) as bar:
        samples = sample(family, schedule, args.n, callback=callback, on_calls=bar.report, **options)
    if callback is None:
        return samples
    return replace(samples, cost=replace(samples.cost, seconds=samples.cost.seconds - callback.seconds))


def say_how_long(family: Any, n: int, request: Any) -> None:
    """An estimate of the time first, where the request is for more than a few calls."""
    length, spacing = request.given.shape[-1], getattr(request.policy, "spacing", None)
    calls = min(request.steps or getattr(request.policy, "steps", None) or length, length)
    if spacing is not None:
        from relaylm.core.spacing import expected_calls

        calls = expected_calls(length, spacing, rows=8)
    if n * calls > MANY:
        from relaylm.measure.estimate import announce_samples

        announce_samples(family, n, length, "-n and --length make it shorter", calls, request.rule is not None)


def show_samples(family: Any, samples: Any) -> None:
    """Print the texts; in a terminal each token in the colour of the model that wrote it."""
    from relaylm.show.colours import readable, row_pieces
    from relaylm.show.terminal import coloured, console_for, has_colours, legend

    console = console_for(sys.stdout)
    colours = has_colours(console)
    for row in range(len(samples.tokens)):
        if row:
            print("─" * 40)
        text = readable(family, samples.texts[row]) if samples.texts else " ".join(map(str, samples.tokens[row]))
        # Tokens can be coloured only where their texts, joined, are the text.
        if colours and "".join(row_pieces(family, samples.tokens[row])) == text:
            console.print(coloured(family, samples, row), soft_wrap=True)
        else:
            print(printable(text, sys.stdout))
    if colours:
        wrote = [name for name, count in samples.cost.calls.items() if count]
        console_for(sys.stderr).print(legend(family, wrote, bool((samples.trace.model_nL < 0).any())))


def cost_line(samples: Any, schedule: str, heavy: str, reference: int) -> str:
    """Steps, calls, FLOPs and seconds, in one line."""
    cost = samples.cost
    calls = ", ".join(f"{count} of {name}" for name, count in cost.calls.items() if count)
    steps = "infinitely many" if math.isinf(samples.steps) else f"{int(samples.steps)}"
    many = "" if samples.steps == 1 else "s"
    law = f"{steps} step{many}"
    if samples.law.startswith("spaced"):
        law = f"{samples.law}, at most {steps} call{many} a row"
    elif samples.law.startswith("blocks"):
        law = f"{samples.law}, {law}"
    line = f"{schedule}: {law}, calls: {calls}"
    if cost.flops is not None:
        line += f"; {cost.flops:.3g} FLOPs"
    if cost.flops_saved is not None:
        word = "saved" if cost.flops_saved >= 0 else "more"
        against = f"{heavy} alone in {reference} step{'' if reference == 1 else 's'}"
        line += f", {100 * abs(cost.flops_saved):.1f}% {word} (against {against})"
    return f"{line}; {cost.seconds:.2f} s"
