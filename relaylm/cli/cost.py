"""What calls and schedules cost on this device. Example: relaylm cost --budget 40ms"""

import argparse

from relaylm.cli import tools
from relaylm.cli.options import add_shared


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags."""
    parser.add_argument("asked", nargs="*", metavar="SCHEDULE", help="what to price, a word each")
    add_shared(parser, "family schedules steps length")
    parser.add_argument("--budget", help="mark what is over it: a share to save (25%%, 25%% ms), 3e12flops, 40ms, 12J")
    add_shared(parser, "light heavy batch-size fresh device", fresh="measure again what the table has")


def run(args: argparse.Namespace) -> tools.Result:
    """Time the models' calls and show the table."""
    from relaylm.core.cost import parse_budget
    from relaylm.measure.prices import cost_table, render

    schedules = tools.asked_schedules(args)
    budget = None if args.budget is None else parse_budget(args.budget)
    family = tools.load_family(args)
    same = tools.chosen(args, "length steps batch_size light heavy fresh")
    with tools.progress("timing", "model") as bar:
        result = cost_table(family, schedules, budget=budget, on_models=bar.report, **same)
    tools.show(args, render(result))
    return tools.with_provenance(result, family, args)
