"""Decoding rules x steps x schedules, and whether their savings multiply.
Example: relaylm compose --steps 32,256 --plot grid.png
"""

import argparse

from relaylm.cli import tools
from relaylm.cli.options import add_shared, at_least_2, counts_type
from relaylm.errors import UserError
from relaylm.files import expand, read_object, with_infinities


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags."""
    add = parser.add_argument
    add_shared(parser, "family")
    add("--rules", help="separated by commas; @P adds a nucleus, as in ancestral@0.9 (default: six)")
    add("--steps", type=counts_type, help="numbers of steps, separated by commas (default: 8,32,256)")
    add("--schedules", help="separated by commas (default: heavy, two sandwiches, a middle model, light)")
    add("-n", "--n", type=at_least_2, default=400, help="samples in each cell")
    store = "keep each cell here as it is done; run again to resume"
    add_shared(parser, "length judge light heavy batch-size store fresh", store=store)
    add("--stored-only", action="store_true", help="show the cells that the store has; sample nothing")
    add("--recorded", metavar="FILE", help="show and draw this JSON of an earlier run; sample nothing")
    add("--markdown", metavar="FILE", help="write the tables into this document, between their marks")
    add_shared(parser, "plot seed device", plot="draw two figures, FILE and one more (.png, .svg or .pdf)")


def run(args: argparse.Namespace) -> tools.Result:
    """Measure the grid, or read it; show, draw and write it."""
    from relaylm.studies.compose import view

    result = measured(args) if args.recorded is None else with_infinities(read_object(expand(args.recorded)))
    if result.get("kind") != "compose" or not {"rows", "combinations", "answer"} <= result.keys():
        raise UserError(f"{args.recorded} is not what `relaylm compose --json` writes")
    tools.show(args, view.render(result))
    tools.draw_last(args, view.plot, result)
    if args.markdown is not None:
        tools.note(f"written: {view.put_into(result, args.markdown)}")
    return result


def measured(args: argparse.Namespace) -> tools.Result:
    """The grid, with how it was made: the Markdown says that too."""
    from relaylm.studies.compose.compose import RULES, STEPS, compose

    schedules = None if args.schedules is None else tools.read_schedules(args.schedules)
    family = tools.load_family(args)
    result = compose(
        family,
        tools.split_list(args.rules) or RULES,
        args.steps or STEPS,
        schedules,
        args.n,
        progress=True,
        **tools.chosen(args, "length seed judge light heavy batch_size store fresh stored_only"),
    )
    return tools.with_provenance(result, family, args)
