"""What the commands do that make and use families: thin. One function of another room is called with the flags; tables
and results go to stdout (left out where `--json -` has it), progress and notes to stderr. What a command returns is its
JSON. Those that measure are in `measure_commands`.

Heavy imports are inside the functions, so that `relaylm --help` does not import torch.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

from relaylm.command_tools import (
    check_writable,
    default_family,
    load_family,
    note,
    out,
    progress,
    read_schedule,
    with_provenance,
    write_text,
)
from relaylm.errors import UserError


def run_sample(args: argparse.Namespace) -> dict[str, Any]:
    from relaylm.decoding import parse_rule
    from relaylm.sampler import sample
    from relaylm.schedule import Schedule

    typed = read_schedule(args.schedule)
    schedule = Schedule.parse(typed)
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
        used = [name for name in family.names if name in schedule.bind(light, heavy).models]
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

        shown = replace(samples, schedule=typed)
        write_text(args.html, page(family, shown, None if by_time else schedule.bind(light, heavy), heavy))
    note(cost_line(samples, typed, heavy))
    if samples.changes_law:
        note(f"{', '.join(samples.changes_law)}: these samples do not follow the models' own law")
    return with_provenance(samples.to_json(), family, args)


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
        wrote = [name for name, count in samples.cost.calls.items() if count]
        note(legend(family, wrote, True, bool((samples.trace.model_nL < 0).any())))


def cost_line(samples: Any, schedule: str, heavy: str) -> str:
    cost = samples.cost
    calls = ", ".join(f"{count} of {name}" for name, count in cost.calls.items() if count)
    steps = "infinitely many" if math.isinf(samples.steps) else f"{int(samples.steps)}"
    line = f"{schedule}: {steps} steps, calls: {calls}"
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
    note(f"{folder}: {corpus.train.size:,} tokens to train on, {corpus.heldout.size:,} held out")
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


def run_demo(args: argparse.Namespace) -> dict[str, Any]:
    from relaylm.demo import demo

    return demo(args.family, args.prompt, args.seed, args.device)
