"""The command line: thin. Flags in, one function of another room called, tables and progress on stderr, results on
stdout (one JSON document with `--json -`). Heavy imports are inside the commands, so that `--help` is quick.

Exit codes: 0 done, 1 failed, 2 bad input (one line that says what was wrong and what is allowed), 130 interrupted.
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
from pathlib import Path
from typing import Any, NoReturn

from relaylm import __version__
from relaylm.errors import UserError

DESCRIPTION = """\
Masked diffusion language models whose denoisers take turns.

A model schedule says which denoiser runs at which denoising step. In "L32 H192 L32" a light model (L) makes the first
and the last 32 of 256 steps and a heavy one (H) the rest: cheaper than all-heavy, at little loss."""

SCHEDULE_HELP = """model schedule, from the fully masked end: counts "L32 H192 L32", shares "L12.5%% H75%% L12.5%%",
model names "4b:32 12b:192 4b:32", step grids "L8@25%% H200@65%% L8@10%%", segment bits 1000000111, or heavy, light,
quarter:1, sandwich:25%%, small-first:25%%, interleaved:25%%, random:7:25%%; @FILE reads it from a file"""


class _Parser(argparse.ArgumentParser):
    """argparse, with its errors in one line."""

    def error(self, message: str) -> NoReturn:
        raise UserError(f"{message} (see {self.prog} --help)")


def _number(kind: Callable[[str], float], low: float, what: str) -> Callable[[str], Any]:
    def parse(text: str) -> Any:
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}") from None
        if not value >= low:
            raise argparse.ArgumentTypeError(f"{text} is not {what}")
        return value

    return parse


positive = _number(int, 1, "a whole number from 1 up")
natural_from_2 = _number(int, 2, "a whole number from 2 up")
natural = _number(int, 0, "a whole number from 0 up")


def steps_type(text: str) -> float:
    return math.inf if text in ("inf", "infinity") else positive(text)


def batch_type(text: str) -> int | None:
    return None if text == "auto" else positive(text)


def depths_type(text: str) -> tuple[int, ...]:
    return tuple(positive(part) for part in text.split(","))


def common(parser: argparse.ArgumentParser, seed: bool = True, device: bool = True) -> None:
    if seed:
        parser.add_argument("--seed", type=natural, default=0, help="the same seed gives the same result (default 0)")
    if device:
        parser.add_argument("--device", default="auto", help="auto, cpu, cuda or mps")
    parser.add_argument("--json", metavar="FILE", help="write the result as JSON; - for standard output")
    parser.add_argument("--config", metavar="FILE", help="TOML file with values for these flags")


def family_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--family", help="a bundled name, a folder, a checkpoint or a hub id (default: the bundled one)"
    )


def build_parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="relaylm", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"relaylm {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, parser_class=_Parser)

    def command(name: str, run: Callable[[argparse.Namespace], dict[str, Any] | None], text: str, example: str) -> Any:
        sub = commands.add_parser(
            name,
            help=text,
            description=text[0].upper() + text[1:] + ".",
            epilog=f"example:\n  {example}",
            formatter_class=argparse.RawDescriptionHelpFormatter,
            allow_abbrev=False,
        )
        sub.set_defaults(run=run)
        return sub

    p = command(
        "sample", run_sample, "write text", 'relaylm sample --schedule "L32 H192 L32" --prompt "the history of "'
    )
    family_flag(p)
    p.add_argument("--schedule", default="heavy", help=SCHEDULE_HELP)
    p.add_argument("-n", "--n", type=positive, default=1, help="number of samples (default 1)")
    p.add_argument(
        "-T", "--steps", type=steps_type, help="denoising steps, or inf (default: the schedule's own, or the length)"
    )
    p.add_argument("--length", type=positive, help="positions in a sample (default: the family's)")
    p.add_argument("--prompt", help="text at the front, kept as it is")
    p.add_argument("--suffix", help="text at the end, kept as it is")
    p.add_argument("--infill", help="text with one _ for each position to be written")
    p.add_argument("--max-new-tokens", type=positive, help="positions to write after the prompt")
    p.add_argument("--stop", help="cut each text at this string, after sampling")
    p.add_argument("--temperature", type=float, default=1.0, help="other than 1 changes the law of the samples")
    p.add_argument("--top-p", type=float, help="nucleus; changes the law of the samples")
    p.add_argument("--top-k", type=positive, help="the k likeliest tokens; changes the law of the samples")
    p.add_argument("--light", help="the model that L stands for (default: the smallest)")
    p.add_argument("--heavy", help="the model that H stands for (default: the largest)")
    p.add_argument("--batch-size", type=batch_type, default="auto", help="rows in a network call, or auto")
    p.add_argument("--watch", action="store_true", help="play the denoising in the terminal")
    common(p)

    p = command("info", run_info, "say what a family or checkpoint holds", "relaylm info path/to/family")
    p.add_argument("source", nargs="?", help="as for --family (default: the bundled one)")
    common(p, seed=False, device=False)

    p = command("ls", run_ls, "list families, schedules and presets", "relaylm ls")
    p.add_argument("folder", nargs="*", help="folders to look for families in (default: the current one)")
    common(p, seed=False, device=False)

    p = command(
        "compare", run_compare, "schedules side by side, paired", "relaylm compare --schedules heavy,sandwich:25%,light"
    )
    family_flag(p)
    p.add_argument("--schedules", default="heavy,sandwich:25%,light", help="separated by commas")
    p.add_argument("-n", "--n", type=natural_from_2, default=400, help="samples of each schedule (default 400)")
    p.add_argument("-T", "--steps", type=steps_type, help="denoising steps, or inf (default: the length)")
    p.add_argument("--length", type=positive, help="positions in a sample (default: the family's)")
    p.add_argument("--prompts", metavar="FILE", help="text file, one prompt in a line; row r continues prompt r")
    p.add_argument("--judge", default="own", help="own, hf:NAME or gguf:PATH")
    p.add_argument("--recipe", default="plain", choices=("plain", "mdlm"), help="how perplexity is computed")
    p.add_argument("--no-rivals", action="store_true", help="leave out the equal-compute rivals")
    p.add_argument("--bound", metavar="FILE", help="add each schedule's likelihood bound on this text")
    p.add_argument("--light", help="the model that L stands for (default: the smallest)")
    p.add_argument("--heavy", help="the model that H stands for (default: the largest)")
    p.add_argument("--batch-size", type=batch_type, default="auto", help="rows in a network call, or auto")
    p.add_argument("--store", metavar="FOLDER", help="keep results here; what is there is not computed again")
    p.add_argument("--fresh", action="store_true", help="compute again what the store has")
    p.add_argument("--plot", metavar="FILE", help="draw it (.png, .svg or .pdf)")
    common(p)

    p = command(
        "importance", run_importance, "how far models disagree, by timestep", "relaylm importance --text held.txt"
    )
    family_flag(p)
    p.add_argument("--text", metavar="FILE", help="held-out text; needed unless --states trajectory")
    p.add_argument("--states", default="data", choices=("data", "trajectory"), help="corrupted text, or own samples")
    p.add_argument("--pairs", help="light:heavy pairs separated by commas, or all (default: each against the heaviest)")
    p.add_argument("--timesteps", type=positive, default=20, help="number of even times (default 20)")
    p.add_argument("--sequences", type=positive, help="rows at each time (default 500 on a GPU, 64 on a CPU)")
    p.add_argument("--plot", metavar="FILE", help="draw the curves (.png, .svg or .pdf)")
    common(p)

    p = command(
        "prepare", run_prepare, "turn text into a token file", "relaylm prepare wiki.txt.xz corpus --tokenizer text8"
    )
    p.add_argument(
        "sources",
        nargs="+",
        help="text files (plain, .xz, .gz, .jsonl), then the folder to write; hf:NAME is a dataset",
    )
    p.add_argument(
        "--tokenizer", default="bytes", help="text8, bytes, bpe:SIZE (trained here), or a tokenizers JSON file"
    )
    p.add_argument(
        "--packing", default="running", choices=("running", "wrap", "pad"), help="how rows are cut from documents"
    )
    p.add_argument("--length", type=positive, help="positions in a row, for wrap and pad")
    p.add_argument(
        "--holdout", type=float, default=0.02, help="share at the end that is never trained on (default 0.02)"
    )
    p.add_argument("--license", default="", help="of the text; goes into model cards")
    common(p, seed=False, device=False)

    p = command("train", run_train, "train a family", "relaylm train corpus out --preset wiki-char")
    p.add_argument("corpus", help="a folder that `relaylm prepare` wrote")
    p.add_argument("out", help="where to train; run again to resume")
    p.add_argument("--preset", default="tiny-cpu", help="a preset's name (see relaylm ls) or a TOML file")
    p.add_argument("--depths", type=depths_type, help="blocks of each model, such as 4,6,8,10,12")
    p.add_argument("--twin", type=positive, help="blocks of a second model from another seed")
    p.add_argument("--judge", type=positive, help="blocks of a left-to-right judge")
    p.add_argument("--name", help="the family's name")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any other number of the recipe")
    p.add_argument("--force", action="store_true", help="go on from the run that is there although settings differ")
    common(p, seed=False)

    p = command("bound", run_bound, "likelihood bound on a text", "relaylm bound --text heldout.txt")
    family_flag(p)
    p.add_argument("--text", required=True, metavar="FILE", help="a text file (plain, .xz, .gz)")
    p.add_argument("--model", help="which model (default: each)")
    p.add_argument("--schedule", help="of a schedule, in --steps steps, instead of single models")
    p.add_argument(
        "-T", "--steps", type=steps_type, help="denoising steps of the schedule, or inf (default: the length)"
    )
    p.add_argument("--rows", type=positive, default=256, help="windows of the text, evenly spread (default 256)")
    p.add_argument("--draws", type=positive, default=4, help="noise levels for each window (default 4)")
    common(p)

    p = command("convert", run_convert, "bring public checkpoints in", "relaylm convert kuleshov-group/mdlm-owt mdlm")
    p.add_argument("sources", nargs="+", help="checkpoints (folders, files, hub ids), then the folder to write")
    p.add_argument("--names", help="names of the models, separated by commas")
    p.add_argument("--tokenizer", help="a tokenizers JSON file or a folder with one")
    p.add_argument("--license", help="for the model card, if the checkpoint does not say")
    p.add_argument("--revision", help="of a hub id")
    p.add_argument("--length", type=positive, help="longest sequence, where the checkpoint does not say")
    p.add_argument("--mask-id", type=natural, help="the mask's token id, where the checkpoint does not say")
    p.add_argument("--heads", type=positive, help="attention heads, where the checkpoint does not say")
    p.add_argument(
        "--raw-weights", action="store_true", help="of a .ckpt, the raw weights instead of the averaged ones"
    )
    p.add_argument("--to-mdlm", action="store_true", help="the other way: a family to MDLM's published layout")
    p.add_argument("--overwrite", action="store_true", help="replace what is there")
    common(p, seed=False, device=False)

    p = command("bench", run_bench, "speed against MDLM's own sampler, in one run", "relaylm bench --json bench.json")
    p.add_argument("--family", help="take the weights from here (default: random ones)")
    p.add_argument("--depths", type=depths_type, default=(12, 4), help="blocks of the heavy and the light model (12,4)")
    p.add_argument("--width", type=positive, help="default 768 on CUDA, 256 on a CPU")
    p.add_argument("--vocab-size", type=positive, default=50258, help="default 50258")
    p.add_argument("--length", type=positive, help="default 1024 on CUDA, 256 on a CPU")
    p.add_argument("--steps", type=positive, help="default 1000 on CUDA, 256 on a CPU")
    p.add_argument("--batch-size", type=batch_type, default="auto", help="rows in a network call, or auto")
    p.add_argument("--quick", action="store_true", help="fewer repeats")
    p.add_argument("--parts", help="only these, separated by commas (default: all; an unknown name lists them)")
    common(p)

    p = command("demo", run_demo, "the same prompt under three schedules, side by side", "relaylm demo")
    family_flag(p)
    p.add_argument("--prompt", help="text at the front")
    common(p)
    return parser


# ------------------------------------------------------------------------------------------------------- commands


def run_sample(args: argparse.Namespace) -> dict[str, Any]:
    from relaylm.sampler import sample
    from relaylm.schedule import Schedule

    schedule = Schedule.parse(read_schedule(args.schedule))
    family = load_family(args)
    light, heavy = family.roles(args.light, args.heavy)
    given = None
    callback = None
    if args.watch:
        from relaylm.family import lay_out
        from relaylm.terminal import Watch

        given = lay_out(family, args.prompt, args.suffix, args.infill, args.length, args.max_new_tokens)
        used = [name for name in family.names if name in schedule.bind(light, heavy).models or name == heavy]
        callback = Watch(family, given, used, sys.stderr if args.json == "-" else sys.stdout)
    with progress("sampling", "call", shown=not args.watch) as on_calls:
        samples = sample(
            family,
            schedule,
            args.n,
            steps=args.steps,
            length=args.length,
            seed=args.seed,
            prompt=args.prompt,
            suffix=args.suffix,
            infill=args.infill,
            given=given,
            max_new_tokens=args.max_new_tokens,
            stop=args.stop,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            light=light,
            heavy=heavy,
            batch_size=args.batch_size,
            callback=callback,
            on_calls=on_calls,
        )
    if args.json != "-" and not args.watch:
        show_samples(family, samples)
    note(cost_line(samples, heavy))
    if samples.changes_law:
        note(f"{', '.join(samples.changes_law)}: these samples do not follow the models' own law")
    return samples.to_json()


def show_samples(family: Any, samples: Any) -> None:
    from relaylm.terminal import coloured, has_colours, legend

    colours = has_colours(sys.stdout)
    for row in range(len(samples.tokens)):
        text = samples.texts[row] if samples.texts else " ".join(map(str, samples.tokens[row]))
        whole = not samples.texts or family.tokenizer.decode(samples.tokens[row]) == text
        if colours and whole:
            text = coloured(family, samples.tokens[row], samples.trace.model_nL[row])
        print(text)
        if row + 1 < len(samples.tokens):
            print("─" * 40)
    if colours:
        note(legend(samples.trace.models, True))


def cost_line(samples: Any, heavy: str) -> str:
    cost = samples.cost
    calls = ", ".join(f"{count} of {name}" for name, count in cost.calls.items())
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
    found: dict[str, Any] = {
        "families": list_families(*args.folder),
        "schedules": {name: str(schedule) for name, schedule in hand_made().items()},
        "presets": presets(),
    }
    if args.json != "-":
        out("families")
        for entry in found["families"]:
            about = entry["error"] or f"{', '.join(entry['models'])}; length {entry['length']}"
            out(f"  {entry['source']}{' (bundled)' if entry['bundled'] else ''}: {about}")
        if not found["families"]:
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
    if args.plot is not None:
        check_writable(args.plot)
    prompts = None
    if args.prompts is not None:
        prompts = [line for line in read_file(args.prompts).splitlines() if line]
    family = load_family(args)
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
        light=args.light,
        heavy=args.heavy,
        batch_size=args.batch_size,
        store=args.store,
        fresh=args.fresh,
        progress=sys.stderr.isatty(),
    )
    if args.json != "-":
        out(render(result))
    if args.plot is not None:
        from relaylm.report import plot_compare

        note(f"drawn: {plot_compare(result, args.plot)}")
    return result


def run_importance(args: argparse.Namespace) -> dict[str, Any]:
    from relaylm.importance import importance, render

    if args.plot is not None:
        check_writable(args.plot)
    if args.text is None and args.states == "data":
        raise UserError("name a held-out text with --text FILE, or use --states trajectory, which needs none")
    pairs: Any = args.pairs
    if args.pairs not in (None, "all"):
        pairs = [tuple(pair.split(":")) for pair in args.pairs.split(",")]
        if any(len(pair) != 2 for pair in pairs):
            raise UserError(f"--pairs takes light:heavy, such as 4b:12b, not {args.pairs!r}")
    family = load_family(args)
    result = importance(
        family,
        None if args.text is None else token_rows(family, args.text, family.length, args.sequences),
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


def token_rows(family: Any, path: str, length: int, rows: int | None) -> Any:
    """Rows of a text's tokens, spread over it."""
    from relaylm.bound import spread_rows
    from relaylm.corpus import read_text

    if family.tokenizer is None:
        raise UserError("this family has no tokenizer, so it cannot read a text")
    return spread_rows(family.tokenizer.encode(read_text(path), strict=False), length, rows)


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
        table = measure_table(models, rows, family.mask_id, draws=args.draws, seed=args.seed, device=family.device)
        steps = args.steps or (None if schedule.steps is not None else family.length)
        found: Any = schedule_bound(table, schedule, steps)
        result[str(schedule)] = found.to_json()
        if args.json != "-":
            out(f"{schedule}: {found}")
        return {"bounds": result, "rows": len(rows)}
    for name in [args.model] if args.model else family.names:
        found = bound(
            family[name], rows, mask_id=family.mask_id, draws=args.draws, seed=args.seed, device=family.device
        )
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

    with tqdm(desc=label, unit=unit, delay=1.0, leave=False, file=sys.stderr, dynamic_ncols=True) as bar:

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
    from relaylm.family import bundled

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
    target = Path(path).expanduser()
    if target.is_dir():
        raise UserError(f"cannot write {path}: it is a folder")
    if not target.parent.is_dir():
        raise UserError(f"cannot write {path}: the folder {target.parent} does not exist")
    if not os.access(target.parent, os.W_OK) or (target.exists() and not os.access(target, os.W_OK)):
        raise UserError(f"cannot write {path}: permission denied")


def write_json(path: str, value: Any) -> None:
    """Whole or not at all."""
    text = json.dumps(value, indent=1, default=str) + "\n"
    if path == "-":
        sys.stdout.write(text)
        return
    target = Path(path).expanduser()
    temporary = target.with_name(f".{target.name}.{os.getpid()}")
    try:
        temporary.write_text(text)
        os.replace(temporary, target)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise UserError(f"cannot write {path}: {reason(error)}") from None


def apply_config(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """Flags, with values from --config FILE where the command line is silent."""
    finder = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    finder.add_argument("--config")
    config = finder.parse_known_args(argv)[0].config
    commands = next(a for a in parser._actions if isinstance(a, argparse._SubParsersAction)).choices
    if config is None or not argv or argv[0] not in commands:
        return parser.parse_args(argv)
    path = Path(config).expanduser()
    try:
        values = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise UserError(f"cannot read {path}: {reason(error)}") from None
    flags = {a.option_strings[-1].lstrip("-"): a for a in commands[argv[0]]._actions if a.option_strings}
    known = {name: flag for name, flag in flags.items() if name not in ("help", "config")}
    words = []
    for name, value in values.items():
        action = known.get(name.replace("_", "-"))
        if action is None:
            raise UserError(f"{path} sets {name!r}, which relaylm {argv[0]} does not have: {', '.join(known)}")
        if isinstance(action, argparse._StoreTrueAction):
            words += [action.option_strings[-1]] if value is True else []
        else:
            text = ",".join(map(str, value)) if isinstance(value, list) else value
            words += [f"{action.option_strings[-1]}={text}"]
    # The command line comes last, so it wins.
    return parser.parse_args([argv[0], *words, *argv[1:]])


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    try:
        args = apply_config(build_parser(), argv)
        if args.json is not None:
            check_writable(args.json)
        result = args.run(args)
        if args.json is not None and os.environ.get("RANK", "0") == "0":
            config = {key: value for key, value in vars(args).items() if key not in ("run", "json", "config")}
            write_json(args.json, {"relaylm": __version__, "config": config, **(result or {})})
    except UserError as error:
        note(f"relaylm: {error}")
        return 2
    except KeyboardInterrupt:
        note("relaylm: interrupted")
        return 130
    except BrokenPipeError:
        # The reader of our output went away (a pager, head); nothing is wrong.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if os.environ.get("RELAYLM_DEBUG"):
            raise
        note(f"relaylm: failed: {type(error).__name__}: {reason(error)} (RELAYLM_DEBUG=1 shows where)")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
