"""How far models disagree, by timestep. Example: relaylm importance --text held.txt"""

import argparse
from typing import Any

from relaylm.cli import tools
from relaylm.cli.options import add_shared, positive
from relaylm.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags."""
    add = parser.add_argument
    add_shared(parser, "family")
    add("--text", metavar="FILE", help="held-out text (default: the one that comes with the family)")
    add("--states", default="data", choices=("data", "trajectory"), help="corrupted text, or own samples")
    add("--pairs", help="light:heavy pairs separated by commas, or all (default: each against the heaviest)")
    add("--twin", metavar="FAMILY", help="the same models from another seed: how far two trainings differ")
    add("--timesteps", type=positive, default=20, help="number of even times")
    add("--sequences", type=positive, help="rows at each time (default: 500 on a GPU, 64 on a CPU)")
    add_shared(parser, "plot seed device")


def run(args: argparse.Namespace) -> tools.Result:
    """Measure the disagreement, show it and draw it."""
    from relaylm.measure.estimate import announce_calls
    from relaylm.measure.importance import importance, render, second_seeds
    from relaylm.models.family import Family
    from relaylm.show.figures import plot_importance

    pairs: Any = args.pairs
    if args.pairs not in (None, "all"):
        pairs = [tuple(pair.split(":")) for pair in args.pairs.split(",")]
        if any(len(pair) != 2 for pair in pairs):
            raise UserError(f"--pairs takes light:heavy, such as 4b:12b, not {args.pairs!r}")
    family = tools.load_family(args)
    text = None if args.states == "trajectory" else tools.token_rows(family, args.text, family.length, args.sequences)
    same = tools.chosen(args, "states timesteps sequences seed")
    twins = second_seeds(family, Family.load(args.twin, device=args.device)) if args.twin else None
    count = (args.sequences or (500 if family.device.type == "cuda" else 64)) * args.timesteps * len(family.names)
    announce_calls(family, f"{count:,} calls", count, family.length, "--sequences and --timesteps make it shorter")
    result = importance(family, text, pairs=pairs, twins=twins, progress=True, **same)
    tools.show(args, render(result))
    tools.draw_last(args, plot_importance, result)
    return tools.with_provenance(result, family, args)
