"""How much positions know of each other, by distance. Example: relaylm pairs --rows 16 --plot pairs.png"""

import argparse
import math

from relaylm.cli import tools
from relaylm.cli.options import add_shared, at_least_2
from relaylm.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags."""
    add = parser.add_argument
    add_shared(parser, "family")
    add("--model", help="the denoiser to measure (default: the largest)")
    add("--text", metavar="FILE", help="text to measure on (default: the family's held-out text)")
    add("--samples", action="store_true", help="measure on rows that the model writes, not on text")
    add("--rows", type=at_least_2, default=64, help="rows to measure on")
    add_shared(parser, "length")
    add("--max-loss", type=float, metavar="NATS", help="name the smallest spacing with at most this loss a position")
    text = (
        "name the largest spacing with at most so many calls a row (16), or that saves a share of those of T = L (90%%)"
    )
    add("--budget", "--calls", metavar="CALLS", help=text)
    add("--keep", action="store_true", help="keep the table in the family's folder, and its spacing as the default")
    add_shared(parser, "plot seed device")


def calls_within(budget: str | None, length: int) -> float:
    """Calls of a row: as many as named, or what a share to be saved leaves of those that T = L uniform steps make."""
    try:
        share, calls = (budget or "").endswith("%"), float((budget or "inf").removesuffix("%"))
    except ValueError:
        share, calls = False, math.nan
    if not (0 <= calls < 100 if share else calls >= 1):
        raise UserError(f"{budget!r} is no budget: write calls of a row (16), or the share of them to be saved (90%)")
    return (1 - calls / 100) * length * (1 - (1 - 1 / length) ** length) if share else calls


def run(args: argparse.Namespace) -> tools.Result:
    """Measure the table, show it, and name spacings."""
    import numpy as np

    from relaylm.core import pairs as predicted
    from relaylm.core.spacing import expected_calls, spread_over
    from relaylm.measure import pairs
    from relaylm.measure.estimate import announce_calls
    from relaylm.measure.likelihood import held_out, spread_rows
    from relaylm.show.figures import plot_pairs

    family = tools.load_family(args)
    name, length = family.named(args.model or family.heavy), args.length or family.length
    if length > family.length:
        raise UserError(f"length {length} is more than the family's {family.length}")
    budget = calls_within(args.budget, length)
    if args.keep and (family.stored is None or name != family.roles()[1] or length != family.length):
        raise UserError(
            "a family in a folder keeps the table of its heavy model at its own length: leave out --model and --length"
        )
    if args.samples:
        from relaylm.sampling.sample import sample

        rows = sample(family, name, args.rows, steps=length, length=length, seed=args.seed).tokens
    else:
        text = held_out(family, args.text)
        if text is None:
            raise UserError("there is no held-out text beside this family: give --text FILE, or --samples")
        rows = spread_rows(np.asarray(text), length, args.rows)
    count = 2 * len(rows) * len(pairs.SHARES)
    announce_calls(family, f"{count:,} calls", count, length, "--rows and --length make it shorter")
    table = pairs.measure_pairs(
        family[name], rows, family.mask_id, seed=args.seed, device=family.device, name=name,
        source="samples" if args.samples else "text", progress=True,
    )  # fmt: skip
    chosen = {"as good as T = L": predicted.default_spacing(table, length)}
    if args.max_loss is not None:
        chosen[f"loss at most {args.max_loss:g}"] = predicted.smallest_spacing(table, length, args.max_loss)
    if args.budget is not None:
        chosen[f"at most {budget:.3g} calls"] = spread_over(budget, length)
    found = {
        label: {
            "spacing": str(spacing),
            "calls": expected_calls(length, spacing),
            "predicted_loss": predicted.spacing_loss(table, spacing, length),
        }
        for label, spacing in chosen.items()
    }
    tools.show(args, pairs.render(table) + "\n\n" + pairs.render_choices(found))
    result = {**table.to_json(), "length": length, "uniform_loss": predicted.uniform_loss(table, length, length)}
    about = {"family": {"name": family.name, "digest": family.digest}}
    result = tools.with_provenance({**about, **result, "choices": found}, family, args)
    if args.keep and family.stored is not None:
        tools.note(f"kept: {pairs.keep_pairs(family.stored.folder, table)} is the family's default")
    tools.draw_last(args, plot_pairs, result)
    return result
