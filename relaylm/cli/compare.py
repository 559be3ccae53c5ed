"""Schedules side by side, paired. Example: relaylm compare heavy sandwich:25% "heavy spaced:16" """

import argparse

from relaylm.cli import tools
from relaylm.cli.options import add_shared, at_least_2


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags."""
    add = parser.add_argument
    add("asked", nargs="*", metavar="SCHEDULE", help="what to compare, a word each")
    add_shared(parser, "family schedules")
    add("-n", "--n", type=at_least_2, default=400, help="samples of each schedule")
    add_shared(parser, "steps length prompts judge recipe")
    add("--no-rivals", action="store_true", help="leave out the equal-compute rivals")
    add("--bound", metavar="FILE", help="add each schedule's likelihood bound on this text")
    add("--mauve", metavar="FILE", help="add MAUVE against this text, on the judge's states")
    add("--timing", action="store_true", help="add milliseconds (and joules) by this device's table")
    add_shared(parser, "light heavy batch-size store fresh cluster plot seed device")


def run(args: argparse.Namespace) -> tools.Result:
    """Compare, show the table and draw it."""
    from relaylm.measure.compare import compare, render
    from relaylm.show.figures import plot_compare

    schedules, prompts = tools.asked_schedules(args), tools.read_lines(args.prompts)
    family = tools.load_family(args)
    length = args.length or family.length
    with tools.open_workers(family, args.cluster) as cluster:
        result = compare(
            family,
            schedules,
            args.n,
            prompts=prompts,
            rivals=not args.no_rivals,
            bound=args.bound is not None,
            text=None if args.bound is None else tools.token_rows(family, args.bound, length, 64),
            mauve=None if args.mauve is None else tools.token_rows(family, args.mauve, length, args.n),
            cluster=cluster,
            progress=True,
            **tools.chosen(args, "steps length seed judge recipe timing light heavy batch_size store fresh"),
        )
    tools.show(args, render(result))
    tools.draw_last(args, plot_compare, result)
    return tools.with_provenance(result, family, args)
