"""The commands that measure, compare and search; as thin as those in `commands`, and with heavy imports inside."""

from __future__ import annotations

import argparse
import contextlib
import json
from typing import Any

from relaylm.command_tools import (
    check_plot,
    check_writable,
    load_family,
    note,
    out,
    progress,
    read_file,
    read_schedule,
    read_schedules,
    token_rows,
    with_provenance,
    write_text,
)
from relaylm.errors import UserError


def run_compare(args: argparse.Namespace) -> dict[str, Any]:
    from relaylm.comparison import compare, render

    schedules = read_schedules(args.schedules)
    check_plot(args.plot)
    prompts = None
    if args.prompts is not None:
        prompts = [line for line in read_file(args.prompts).splitlines() if line]
    family = load_family(args)
    workers: Any = contextlib.nullcontext()
    if args.cluster is not None:
        from relaylm.cluster import Cluster

        workers = Cluster(family, args.cluster)
    with workers as cluster:
        result = compare(
            family,
            schedules,
            args.n,
            steps=args.steps,
            length=args.length,
            seed=args.seed,
            prompts=prompts,
            judge=args.judge,
            recipe=args.recipe,
            rivals=not args.no_rivals,
            bound=args.bound is not None,
            text=None if args.bound is None else token_rows(family, args.bound, args.length or family.length, 64),
            mauve=None if args.mauve is None else token_rows(family, args.mauve, args.length or family.length, args.n),
            timing=args.timing,
            light=args.light,
            heavy=args.heavy,
            batch_size=args.batch_size,
            store=args.store,
            fresh=args.fresh,
            cluster=cluster,
            progress=True,
        )
    if args.json != "-":
        out(render(result))
    if args.plot is not None:
        from relaylm.report import plot_compare

        note(f"drawn: {plot_compare(result, args.plot)}")
    return with_provenance(result, family, args)


def run_compose(args: argparse.Namespace) -> dict[str, Any]:
    from relaylm import compose_view
    from relaylm.compose import RULES, STEPS, compose

    check_plot(args.plot)
    if args.markdown is not None:
        check_writable(args.markdown)
    if args.recorded is not None:
        try:
            result = json.loads(read_file(args.recorded))
        except json.JSONDecodeError as error:
            raise UserError(f"{args.recorded} is not valid JSON: {error}") from None
        if not isinstance(result, dict) or result.get("kind") != "compose":
            raise UserError(f"{args.recorded} is not what `relaylm compose --json` writes")
    else:
        rules = None if args.rules is None else [rule.strip() for rule in args.rules.split(",") if rule.strip()]
        schedules = None if args.schedules is None else read_schedules(args.schedules)
        family = load_family(args)
        result = compose(
            family,
            rules or RULES,
            args.steps or STEPS,
            schedules,
            args.n,
            length=args.length,
            seed=args.seed,
            judge=args.judge,
            light=args.light,
            heavy=args.heavy,
            batch_size=args.batch_size,
            store=args.store,
            fresh=args.fresh,
            stored_only=args.stored_only,
            progress=True,
        )
        result = with_provenance(result, family, args)  # Markdown says it, too
    if args.json != "-":
        out(compose_view.render(result))
    if args.plot is not None:
        note(f"drawn: {', '.join(map(str, compose_view.plot(result, args.plot)))}")
    if args.markdown is not None:
        note(f"written: {compose_view.put_into(result, args.markdown)}")
    return result


def run_cost(args: argparse.Namespace) -> dict[str, Any]:
    from relaylm.cost import parse_budget
    from relaylm.timing import cost_table, render

    schedules = read_schedules(args.schedules)
    budget = None if args.budget is None else parse_budget(args.budget)
    family = load_family(args)
    with progress("timing", "model") as on_models:
        result = cost_table(
            family,
            schedules,
            length=args.length,
            steps=args.steps,
            batch_size=args.batch_size,
            light=args.light,
            heavy=args.heavy,
            budget=budget,
            fresh=args.fresh,
            on_models=on_models,
        )
    if args.json != "-":
        out(render(result))
    return with_provenance(result, family, args)


def run_importance(args: argparse.Namespace) -> dict[str, Any]:
    from relaylm.importance import importance, render

    check_plot(args.plot)
    pairs: Any = args.pairs
    if args.pairs not in (None, "all"):
        pairs = [tuple(pair.split(":")) for pair in args.pairs.split(",")]
        if any(len(pair) != 2 for pair in pairs):
            raise UserError(f"--pairs takes light:heavy, such as 4b:12b, not {args.pairs!r}")
    family = load_family(args)
    result = importance(
        family,
        None if args.states == "trajectory" else token_rows(family, args.text, family.length, args.sequences),
        pairs=pairs,
        states=args.states,
        timesteps=args.timesteps,
        sequences=args.sequences,
        seed=args.seed,
        progress=True,
    )
    if args.json != "-":
        out(render(result))
    if args.plot is not None:
        from relaylm.report import plot_importance

        note(f"drawn: {plot_importance(result, args.plot)}")
    return with_provenance(result, family, args)


def run_search(args: argparse.Namespace) -> dict[str, Any]:
    from relaylm.schedule_search import search
    from relaylm.search_report import plot_search, render, to_csv

    check_plot(args.plot)
    if args.csv is not None:
        check_writable(args.csv)
    prompts = None
    if args.prompts is not None:
        prompts = [line for line in read_file(args.prompts).splitlines() if line]
    family = load_family(args)
    text = None
    if args.text is not None or (args.method == "tune" and family.heldout is not None and family.tokenizer is not None):
        text = token_rows(family, args.text, args.length or family.length, 256 if family.device.type == "cuda" else 64)
    result = search(
        family,
        args.method,
        budget=args.budget,
        max_loss=args.max_loss,
        light_segments=args.light_segments,
        segments=args.segments,
        models=args.models.split(",") if args.models else None,
        densities=args.densities.split(",") if args.densities else None,
        n=args.n,
        confirm=args.confirm,
        rows=args.rows,
        steps=args.steps,
        length=args.length,
        seed=args.seed,
        prompts=prompts,
        judge=args.judge,
        recipe=args.recipe,
        text=text,
        quick=args.quick,
        time_limit=args.time_limit,
        light=args.light,
        heavy=args.heavy,
        batch_size=args.batch_size,
        store=args.store,
        fresh=args.fresh,
        cluster=args.cluster,
        progress=True,
    )
    if args.json != "-":
        out(render(result))
    if args.csv is not None:
        write_text(args.csv, to_csv(result))
    if args.plot is not None:
        note(f"drawn: {plot_search(result, args.plot)}")
    if args.json not in (None, "-"):
        note(f"to use it: relaylm sample --schedule @{args.json}")
    return with_provenance(result, family, args)


def run_bound(args: argparse.Namespace) -> dict[str, Any]:
    from relaylm.bound import bound

    family = load_family(args)
    family.check_names([args.model] if args.model else [])
    rows = token_rows(family, args.text, family.length, args.rows)
    result: dict[str, Any] = {}
    if args.schedule is not None:
        from relaylm.schedule import Schedule
        from relaylm.schedule_bound import measure_table, schedule_bound

        typed = read_schedule(args.schedule)
        schedule = Schedule.parse(typed).bind(*family.roles())
        family.check_names(schedule.models)
        models = {name: family[name] for name in schedule.models}
        options = {"draws": args.draws, "seed": args.seed, "device": family.device}
        with progress("bound", "row") as on_rows:
            table = measure_table(models, rows, family.mask_id, on_rows=on_rows, **options)
        steps = args.steps or (None if schedule.steps is not None else family.length)
        found: Any = schedule_bound(table, schedule, steps)
        result[str(schedule)] = found.to_json()
        if args.json != "-":
            out(f"{typed}: {found}")
        return with_provenance({"bounds": result, "rows": len(rows)}, family, args)
    for name in [args.model] if args.model else family.names:
        options = {"draws": args.draws, "seed": args.seed, "device": family.device}
        with progress(f"bound of {name}", "row") as on_rows:
            found = bound(family[name], rows, mask_id=family.mask_id, on_rows=on_rows, **options)
        result[name] = found.to_json()
        if args.json != "-":
            out(f"{name}: {found}")
    return with_provenance({"bounds": result, "rows": len(rows)}, family, args)


def run_bench(args: argparse.Namespace) -> dict[str, Any]:
    from relaylm.bench import bench, render

    if len(args.depths) != 2:
        raise UserError("--depths takes the heavy model's blocks and the light one's, such as 12,4")
    result = bench(
        device=args.device,
        depth=args.depths,
        width=args.width,
        vocab_size=args.vocab_size,
        length=args.length,
        steps=args.steps,
        batch_size=args.batch_size,
        family=args.family,
        dtype=args.dtype,
        seed=args.seed,
        quick=args.quick,
        parts=args.parts.split(",") if args.parts else None,
    )
    if args.json != "-":
        out(render(result))
    return result


def run_reproduce(args: argparse.Namespace) -> dict[str, Any]:
    from relaylm.family import Family
    from relaylm.reproduce import reproduce

    def load(source: str | None) -> Any:
        return None if source is None else Family.load(source, device=args.device)

    only = [name for word in args.only or () for name in word.split(",")]
    stages = [source for word in args.stages or () for source in word.split(",")]
    family = load_family(args)
    scale = args.scale if args.scale != "auto" else "gpu" if family.device.type == "cuda" else "cpu"
    result = reproduce(
        family,
        scale,
        args.out,
        only=only or None,
        store=args.store,
        text=args.text,
        second=load(args.second),
        bpe=load(args.bpe),
        stages=[load(source) for source in stages],
        judge=args.judge,
        seed=args.seed,
        progress=True,
        note=note,
    )
    for name, item in result["experiments"].items():
        if item["status"] == "not run":
            note(f"{name} was not run: {item['reason']}")
    if args.json != "-":
        width = max(len(claim["claim"]) for claim in result["claims"])
        for claim in result["claims"]:
            out(f"{claim['claim']:<{width}}  {claim['verdict']}")
        out(f"the report is {result['report']}")
    return result
