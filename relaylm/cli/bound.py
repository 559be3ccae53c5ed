"""Likelihood bound on a text. Example: relaylm bound --text heldout.txt"""

import argparse
import math
from typing import Any

from relaylm.cli import tools
from relaylm.cli.options import add_shared, positive, steps_type
from relaylm.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags."""
    add = parser.add_argument
    add_shared(parser, "family")
    add("--text", metavar="FILE", help="plain, .xz or .gz (default: the one that comes with the family)")
    add("--model", help="which model (default: each)")
    add("--schedule", help="of a schedule, in --steps steps, instead of single models")
    add("--rule", help="of a decoding rule that looks at no draw, such as surest:16, eb:0.1, dus:32")
    add("-T", "--steps", type=steps_type, help="denoising steps of the schedule, or inf (default: the length)")
    add("--rows", type=positive, default=256, help="windows of the text, evenly spread")
    add("--draws", type=positive, default=4, help="noise levels for each window")
    add_shared(parser, "seed device")


def run(args: argparse.Namespace) -> tools.Result:
    """Show a bound in a line for each model, or for the schedule."""
    from relaylm.measure.estimate import announce_calls
    from relaylm.measure.likelihood import bound

    scheduled = args.schedule is not None or args.rule is not None
    if args.model is not None and scheduled:
        raise UserError("--model is for the bound of one model: with --schedule or --rule, name it in the schedule")
    family = tools.load_family(args)
    one = [] if args.model is None else [family.named(args.model)]
    rows = tools.token_rows(family, args.text, family.length, args.rows)
    count = len(rows) * args.draws * len(one or family.names)
    announce_calls(family, f"{count:,} calls", count, family.length, "--rows and --draws make it shorter")
    options = {"draws": args.draws, "seed": args.seed, "device": family.device}
    result: dict[str, Any] = {}
    for name in () if scheduled else one or family.names:
        if family.block_length:
            result[name] = of_schedule(args, family, rows, options, f"{name}:100%", math.inf)[1].to_json()
            continue
        with tools.progress(f"bound of {name}", "row") as bar:
            found = bound(family[name], rows, mask_id=family.mask_id, on_rows=bar.report, **options)
        result[name] = found.to_json()
        tools.show(args, f"{name}: {found}")
    if scheduled:
        typed, default = tools.read_schedule(args.schedule or "heavy"), family.block_length or family.length
        schedule, found = of_schedule(args, family, rows, options, typed, default)
        result[schedule] = found.to_json()
    return tools.with_provenance({"bounds": result, "rows": len(rows)}, family, args)


def of_schedule(
    args: argparse.Namespace, family: Any, rows: Any, options: dict[str, Any], typed: str, default: float
) -> tuple[str, Any]:
    """The schedule with its models' names, and its bound, which is shown; in `default` steps unless it says how many,
    or the user, or the rule."""
    from relaylm.measure.plan_likelihood import plan_bound
    from relaylm.measure.schedule_likelihood import measure_table, schedule_bound
    from relaylm.sampling.rules import parse_rule

    schedule, rule = family.bind(typed, *family.roles()), None if args.rule is None else parse_rule(args.rule)
    models = {name: family[name] for name in schedule.models}
    if schedule.spacing is not None or rule is not None or family.block_length:
        counted = schedule.spacing is None and schedule.steps is None and not (rule is not None and rule.adaptive)
        how: dict[str, Any] = {"rule": rule, "steps": args.steps or (default if counted else None), "progress": True}
        own = plan_bound(models, schedule, rows, family.mask_id, seed=args.seed, device=family.device, **how)
        label = typed if rule is None else f"{typed}, {rule}"
        tools.show(args, f"{label}: {own}")
        return str(schedule) if rule is None else label, own
    with tools.progress("bound", "row") as bar:
        table = measure_table(models, rows, family.mask_id, on_rows=bar.report, **options)
    found = schedule_bound(table, schedule, args.steps or (None if schedule.steps is not None else family.length))
    tools.show(args, f"{typed}: {found}")
    return str(schedule), found
