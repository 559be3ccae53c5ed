"""What each command does: thin. One function of another room is called with the flags; tables and results go to stdout
(left out where `--json -` has it), progress and notes to stderr. What a command returns is its JSON.

Heavy imports are inside the functions, so that `relaylm --help` does not import torch.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import sys
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from relaylm.errors import UserError


def run_sample(args: argparse.Namespace) -> dict[str, Any]:
    from relaylm.decoding import parse_rule
    from relaylm.sampler import sample
    from relaylm.schedule import Schedule

    schedule = Schedule.parse(read_schedule(args.schedule))
    if args.watch and args.n > 1:
        raise UserError(f"--watch plays one sample, not {args.n}")
    if args.watch and args.cluster is not None:
        raise UserError("--watch plays what happens here, not on a cluster")
    for target in (args.svg, args.html):
        if target is not None:
            check_writable(target)
    rule = None if args.rule is None else parse_rule(args.rule, args.block_length)
    if args.block_length is not None and rule is None:
        raise UserError("--block-length goes with a rule: --rule low-confidence")
    if args.stride is not None and args.html is not None:
        raise UserError("--html plays one window, not the several of --stride")
    if args.chat and (args.family is None or args.prompt is None):
        raise UserError("--chat needs an instruction-tuned model (--family) and what to say to it (--prompt)")
    family = load_family(args)
    light, heavy = family.roles(args.light, args.heavy)
    if args.chat:
        from relaylm import convert

        message = {"role": "user", "content": args.prompt}
        args.prompt = convert.chat_prompt(args.family.split(",")[0], [message])
    callback = None
    plain = not (args.chat or args.stop or args.stride or args.cluster is not None or args.json == "-")
    live = args.watch or (args.n == 1 and plain and sys.stdout.isatty())  # on a terminal one text is shown as it grows
    if live:
        from relaylm.family import lay_out
        from relaylm.terminal import Watch

        given_L = lay_out(family, args.prompt, args.suffix, args.infill, args.length, args.max_new_tokens)
        used = [name for name in family.names if name in schedule.bind(light, heavy).models or name == heavy]
        stream = sys.stderr if args.json == "-" else sys.stdout
        callback = Watch(family, given_L, used, stream, pace=4.0 if args.watch else 0.0)
    same = "steps length seed prompt suffix infill max_new_tokens stop temperature top_p top_k stride batch_size"
    options = {name: getattr(args, name) for name in same.split()} | {"rule": rule, "light": light, "heavy": heavy}
    with progress("sampling", "call" if args.cluster is None else "row", shown=not live) as on_calls:
        if args.cluster is None:
            samples = sample(family, schedule, args.n, callback=callback, on_calls=on_calls, **options)
        else:
            from relaylm.cluster import Cluster, sample_many

            with Cluster(family, args.cluster) as workers:
                samples = sample_many(workers, schedule, args.n, on_rows=on_calls, **options)
    if callback is not None:
        took = replace(samples.cost, seconds=samples.cost.seconds - callback.seconds)
        samples = replace(samples, cost=took)
    if args.json is not None and rule is None and args.stride is None:
        from relaylm.timing import with_measured

        samples = replace(samples, cost=with_measured(samples, family))
    if args.chat:
        start = len(family.tokenizer.encode(args.prompt))
        samples = replace(samples, texts=convert.texts(family, samples.tokens, start))
    if args.json != "-" and not live:
        show_samples(family, samples)
    by_time = rule is not None and rule.adaptive  # its steps are its own: there is no timetable of them
    if args.svg is not None:
        from relaylm.picture import svg

        bound = schedule.bind(light, heavy)
        timetable = None if math.isinf(samples.steps) or by_time else bound.timetable(int(samples.steps))
        write_text(args.svg, svg(family, samples, timetable))
    if args.html is not None:
        from relaylm.player import page

        write_text(args.html, page(family, samples, None if by_time else schedule.bind(light, heavy), heavy))
    note(cost_line(samples, heavy))
    if samples.changes_law:
        note(f"{', '.join(samples.changes_law)}: these samples do not follow the models' own law")
    return samples.to_json()


def show_samples(family: Any, samples: Any) -> None:
    from relaylm.terminal import coloured, has_colours, legend, pieces_of

    colours = has_colours(sys.stdout)
    for row in range(len(samples.tokens)):
        text = samples.texts[row] if samples.texts else " ".join(map(str, samples.tokens[row]))
        # Only where a text is its tokens' texts side by side can each be given a colour.
        if colours and "".join(pieces_of(family, samples.tokens[row])) == text:
            text = coloured(family, samples, row)
        print(text)
        if row + 1 < len(samples.tokens):
            print("─" * 40)
    if colours:
        note(legend(family, samples.trace.models, True))


def cost_line(samples: Any, heavy: str) -> str:
    cost = samples.cost
    calls = ", ".join(f"{count} of {name}" for name, count in cost.calls.items() if count)
    steps = "infinitely many" if math.isinf(samples.steps) else f"{int(samples.steps)}"
    line = f"{samples.schedule}: {steps} steps, calls: {calls}"
    if cost.flops is not None:
        saved = f", {100 * cost.flops_saved:.1f}% saved against {heavy} alone" if cost.flops_saved is not None else ""
        line += f"; {cost.flops:.3g} FLOPs{saved}"
    return f"{line}; {cost.seconds:.2f} s"


def run_info(args: argparse.Namespace) -> dict[str, Any]:
    from relaylm.family import describe

    about = describe(default_family(args.source))
    if args.json != "-":
        out(render_info(about))
    return about


def render_info(about: dict[str, Any]) -> str:
    kind = (about.get("tokenizer") or {}).get("type", "none")
    roles = about.get("roles") or {}
    form = f" ({about['format']} checkpoint)" if about.get("format") else ""
    lines = [
        f"{about['name'] or 'unnamed family'}{form}: length {about['length']}, vocabulary {about['vocab_size']} "
        f"(mask {about['mask_id']}), tokenizer {kind}"
    ]
    for name, model in about["models"].items():
        role = {roles.get("light"): " (L)", roles.get("heavy"): " (H)"}.get(name, "")
        facts = [f"{model[key]} {label}" for key, label in (("depth", "blocks"), ("width", "wide")) if model.get(key)]
        if model.get("parameters"):
            facts.append(f"{model['parameters']:,} parameters")
        if model.get("flops_per_call"):
            facts.append(f"{model['flops_per_call']:.3g} FLOPs a call")
        lines.append(f"  {name}{role}: {', '.join(facts)}")
    for extra in ("judge", "twins"):
        if about.get(extra):
            lines.append(f"  with {'a judge' if extra == 'judge' else 'twins: ' + ', '.join(about[extra])}")
    if about.get("bytes"):
        where = f" in {about['folder']}" if about.get("folder") else ""
        lines.append(f"  {about['bytes'] / 1e6:.1f} MB{where}")
    for missing in about.get("missing") or []:
        lines.append(f"  missing: {missing}")
    return "\n".join(lines)


def run_ls(args: argparse.Namespace) -> dict[str, Any]:
    from relaylm.family import list_families
    from relaylm.schedule import hand_made
    from relaylm.train import presets

    for folder in args.folder:
        if not Path(folder).is_dir():
            raise UserError(f"{folder} is not a folder")
    from relaylm.demo import trained
    from relaylm.family_folder import bundled

    found: dict[str, Any] = {
        "families": list_families(*args.folder),
        "schedules": {name: str(schedule) for name, schedule in hand_made().items()},
        "presets": presets(),
        "default": next(iter(bundled()), None) or (str(folder) if (folder := trained()) else None),
    }
    if args.json != "-":
        out("families")
        for entry in found["families"]:
            about = entry["error"] or f"{', '.join(entry['models'])}; length {entry['length']}"
            out(f"  {entry['source']}{' (bundled)' if entry['bundled'] else ''}: {about}")
        if found["default"] is not None and not any(entry["bundled"] for entry in found["families"]):
            out(f"  {found['default']} (the demo's, used where no family is named)")
        elif not found["families"]:
            out("  none here; `relaylm demo` trains a tiny one, `relaylm train` a real one")
        out("schedules (any other: see relaylm sample --help)")
        for name, text in found["schedules"].items():
            out(f"  {name}: {text}")
        out("presets for relaylm train\n  " + ", ".join(found["presets"]))
    return found


def run_prepare(args: argparse.Namespace) -> dict[str, Any]:
    from relaylm.corpus import prepare

    *sources, folder = args.sources
    if not sources:
        raise UserError("name at least one text and then the folder to write")
    corpus = prepare(
        sources,
        folder,
        tokenizer=args.tokenizer,
        packing=args.packing,
        length=args.length,
        holdout=args.holdout,
        licence=args.license,
        progress=sys.stderr.isatty(),
    )
    note(f"{folder}: {len(corpus.train):,} tokens to train on, {len(corpus.heldout):,} held out")
    return {"folder": str(folder), "train": len(corpus.train), "heldout": len(corpus.heldout)}


def run_train(args: argparse.Namespace) -> dict[str, Any]:
    from relaylm.train import train_family

    overrides = {key: value for key in ("depths", "twin", "judge") if (value := getattr(args, key)) is not None}
    for text in args.set:
        key, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"--set takes KEY=VALUE, not {text!r}")
        try:
            overrides[key] = tomllib.loads(f"x = {value}")["x"]
        except tomllib.TOMLDecodeError:
            overrides[key] = value
    command = "relaylm " + " ".join(sys.argv[1:])
    family = train_family(
        args.corpus,
        args.out,
        args.preset,
        device=args.device,
        name=args.name,
        progress=True,
        force=args.force,
        command=command,
        **overrides,
    )
    if os.environ.get("RANK", "0") == "0":  # under torchrun, one process speaks
        note(f"the family is in {family}: relaylm sample --family {family}")
    return {"family": str(family)}


def run_compare(args: argparse.Namespace) -> dict[str, Any]:
    from relaylm.comparison import compare, render
    from relaylm.schedule import Schedule

    texts = [text.strip() for text in args.schedules.split(",") if text.strip()]
    schedules = [Schedule.parse(read_schedule(text)) for text in texts]
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
            progress=sys.stderr.isatty(),
        )
    if args.json != "-":
        out(render(result))
    if args.plot is not None:
        from relaylm.report import plot_compare

        note(f"drawn: {plot_compare(result, args.plot)}")
    return result


def run_compose(args: argparse.Namespace) -> dict[str, Any]:
    from relaylm import compose_view
    from relaylm.compose import RULES, STEPS, compose

    def words(text: str | None) -> list[str] | None:
        return None if text is None else [word.strip() for word in text.split(",") if word.strip()]

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
        result = compose(
            load_family(args),
            words(args.rules) or RULES,
            args.steps or STEPS,
            words(args.schedules),
            args.n,
            length=args.length,
            seed=args.seed,
            judge=args.judge,
            light=args.light,
            heavy=args.heavy,
            batch_size=args.batch_size,
            store=args.store,
            fresh=args.fresh,
            progress=sys.stderr.isatty(),
        )
    if args.json != "-":
        out(compose_view.render(result))
    if args.plot is not None:
        note(f"drawn: {', '.join(map(str, compose_view.plot(result, args.plot)))}")
    if args.markdown is not None:
        note(f"written: {compose_view.put_into(result, args.markdown)}")
    return result


def run_cost(args: argparse.Namespace) -> dict[str, Any]:
    from relaylm.cost import parse_budget
    from relaylm.schedule import Schedule
    from relaylm.timing import cost_table, render

    texts = [text.strip() for text in args.schedules.split(",") if text.strip()]
    schedules = [Schedule.parse(read_schedule(text)) for text in texts]
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
    return result


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
        progress=sys.stderr.isatty(),
    )
    if args.json != "-":
        out(render(result))
    if args.plot is not None:
        from relaylm.report import plot_importance

        note(f"drawn: {plot_importance(result, args.plot)}")
    return result


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
        progress=sys.stderr.isatty(),
    )
    if args.json != "-":
        out(render(result))
    if args.csv is not None:
        write_text(args.csv, to_csv(result))
    if args.plot is not None:
        note(f"drawn: {plot_search(result, args.plot)}")
    if args.json not in (None, "-"):
        note(f"to use it: relaylm sample --schedule @{args.json}")
    return result


def token_rows(family: Any, path: str | None, length: int, rows: int | None) -> Any:
    """Rows of a text's tokens, spread over it; the text is the family's own held-out one if none is named."""
    from relaylm.bound import spread_rows
    from relaylm.text import read_text

    if family.tokenizer is None:
        raise UserError("this family has no tokenizer, so it cannot read a text")
    chosen = path or family.heldout
    if chosen is None:
        raise UserError("this family comes without a held-out text: name one with --text FILE")
    return spread_rows(family.tokenizer.encode(read_text(chosen), strict=False), length, rows)


def run_bound(args: argparse.Namespace) -> dict[str, Any]:
    from relaylm.bound import bound

    family = load_family(args)
    family.check_names([args.model] if args.model else [])
    rows = token_rows(family, args.text, family.length, args.rows)
    result: dict[str, Any] = {}
    if args.schedule is not None:
        from relaylm.schedule import Schedule
        from relaylm.schedule_bound import measure_table, schedule_bound

        schedule = Schedule.parse(read_schedule(args.schedule)).bind(*family.roles())
        family.check_names(schedule.models)
        models = {name: family[name] for name in schedule.models}
        options = {"draws": args.draws, "seed": args.seed, "device": family.device}
        with progress("bound", "row") as on_rows:
            table = measure_table(models, rows, family.mask_id, on_rows=on_rows, **options)
        steps = args.steps or (None if schedule.steps is not None else family.length)
        found: Any = schedule_bound(table, schedule, steps)
        result[str(schedule)] = found.to_json()
        if args.json != "-":
            out(f"{schedule}: {found}")
        return {"bounds": result, "rows": len(rows)}
    for name in [args.model] if args.model else family.names:
        options = {"draws": args.draws, "seed": args.seed, "device": family.device}
        with progress(f"bound of {name}", "row") as on_rows:
            found = bound(family[name], rows, mask_id=family.mask_id, on_rows=on_rows, **options)
        result[name] = found.to_json()
        if args.json != "-":
            out(f"{name}: {found}")
    return {"bounds": result, "rows": len(rows)}


def run_convert(args: argparse.Namespace) -> dict[str, Any]:
    from relaylm import convert

    *sources, folder = args.sources
    if not sources:
        raise UserError("name a checkpoint and then the folder to write")
    if args.to_mdlm:
        if len(sources) != 1:
            raise UserError("--to-mdlm takes one family and the folder to write")
        written = convert.export(sources[0], folder, license=args.license, overwrite=args.overwrite)
    else:
        names = args.names.split(",") if args.names else None
        options = {key: value for key in ("length", "mask_id", "heads") if (value := getattr(args, key)) is not None}
        if args.raw_weights:
            options["ema"] = False
        written = convert.convert(
            sources,
            folder,
            names=names,
            tokenizer=args.tokenizer,
            revision=args.revision,
            license=args.license,
            overwrite=args.overwrite,
            **options,
        )
    note(f"wrote {written}")
    return {"folder": str(written)}


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
        progress=sys.stderr.isatty(),
        note=note,
    )
    if args.json != "-":
        width = max(len(claim["claim"]) for claim in result["claims"])
        for claim in result["claims"]:
            out(f"{claim['claim']:<{width}}  {claim['verdict']}")
        out(f"the report is {result['report']}")
    return result


def run_demo(args: argparse.Namespace) -> dict[str, Any]:
    from relaylm.demo import demo

    return demo(args.family, args.prompt, args.seed, args.device)


# -------------------------------------------------------------------------------------------------------- helpers


def note(text: str) -> None:
    print(text, file=sys.stderr)


def out(text: str) -> None:
    print(text)


@contextlib.contextmanager
def progress(label: str, unit: str, shown: bool = True) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr for anything that reports (done, total); appears only if the work takes over a second."""
    if not shown:
        yield None
        return
    from tqdm import tqdm

    look: dict[str, Any] = {"leave": False, "dynamic_ncols": True, "disable": None}  # None: not into a file or a pipe
    with tqdm(desc=label, unit=unit, delay=1.0, file=sys.stderr, **look) as bar:

        def update(done: int, total: int) -> None:
            bar.total = total
            bar.update(done - bar.n)

        yield update


def read_schedule(text: str) -> str:
    """The text of a schedule, or what @FILE says: plain notation, or JSON with a "schedule" in it."""
    if not text.startswith("@"):
        return text
    path = Path(text[1:]).expanduser()
    content = read_file(str(path)).strip()
    if content.startswith("{"):
        from relaylm.schedule import Schedule

        try:
            data = json.loads(content)
        except json.JSONDecodeError as error:
            raise UserError(f"{path} is not valid JSON: {error}") from None
        value = data.get("schedule", data)
        return value if isinstance(value, str) else str(Schedule.from_json(value))
    return content


def read_file(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {path}: {reason(error)}") from None


def default_family(source: str | None) -> str:
    from relaylm.family_folder import bundled

    if source is not None:
        return source
    if names := bundled():
        return names[0]
    from relaylm.demo import trained

    if (folder := trained()) is None:
        raise UserError("no family is bundled with this version: name one with --family, or run `relaylm demo` first")
    return str(folder)


def load_family(args: argparse.Namespace) -> Any:
    from relaylm.family import Family

    return Family.load(default_family(args.family), device=args.device)


def reason(error: BaseException) -> str:
    """An error in a few words: the system's own for a file, the first line of anything else."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return (str(error) or type(error).__name__).splitlines()[0]


def check_writable(path: str) -> None:
    """Refuse an output that could not be written, before any work is done."""
    if path == "-":
        return
    target = Path(os.path.realpath(Path(path).expanduser()))
    if target.is_dir():
        raise UserError(f"cannot write {path}: it is a folder")
    if not target.parent.is_dir():
        raise UserError(f"cannot write {path}: the folder {target.parent} does not exist")
    replaced = not target.exists() or target.is_file()  # a new file, beside which a temporary one must fit
    if (replaced and not os.access(target.parent, os.W_OK)) or (target.exists() and not os.access(target, os.W_OK)):
        raise UserError(f"cannot write {path}: permission denied")


def check_plot(path: str | None) -> None:
    if path is not None:
        if Path(path).suffix.lower() not in (".png", ".svg", ".pdf"):
            raise UserError(f"cannot draw {path}: the name must end in .png, .svg or .pdf")
        check_writable(path)


def write_text(path: str, text: str) -> None:
    """Whole or not at all. A link is followed; a pipe or a device is written to, not replaced."""
    target = Path(os.path.realpath(Path(path).expanduser()))
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        if target.exists() and not target.is_file():
            target.write_text(text, encoding="utf-8")
            return
        temporary.write_text(text, encoding="utf-8")
        os.replace(temporary, target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {reason(error)}") from None
