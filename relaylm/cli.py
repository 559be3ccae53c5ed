"""The command line: flags, config files and exit codes. Each command is one function of `commands` or
`measure_commands`; what it returns goes to `--json FILE` (`-` for standard output). Nothing heavy is imported here, so
that `--help` is quick.

Exit codes: 0 done, 1 failed, 2 bad input (one line that says what was wrong and what is allowed), 130 interrupted.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from relaylm import __version__
from relaylm.command_tools import check_writable, note, reason, write_text
from relaylm.commands import run_convert, run_demo, run_info, run_ls, run_prepare, run_sample, run_train
from relaylm.errors import UserError
from relaylm.measure_commands import (
    run_bench,
    run_bound,
    run_compare,
    run_compose,
    run_cost,
    run_importance,
    run_reproduce,
    run_search,
)

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


def seconds_type(text: str) -> float:
    unit = {"s": 1, "m": 60, "h": 3600}.get(text[-1:], 0)
    return _number(float, 0, "a time such as 90s, 10m or 1h")(text[:-1] if unit else text) * (unit or 1)


def counts_type(text: str) -> tuple[int, ...]:
    return tuple(positive(part) for part in text.split(","))


DTYPES = ("float32", "bfloat16", "float16")


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


def cluster_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cluster",
        nargs="?",
        const="local",
        metavar="ADDRESS",
        help="on Ray: this machine's workers, or those of the cluster at ADDRESS",
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
    p.add_argument("--chat", action="store_true", help="put the prompt into the model's chat template; show the answer")
    p.add_argument("--temperature", type=float, default=1.0, help="other than 1 changes the law of the samples")
    p.add_argument("--top-p", type=float, help="nucleus; changes the law of the samples")
    p.add_argument("--top-k", type=positive, help="the k likeliest tokens; changes the law of the samples")
    p.add_argument("--rule", help="decoding rule: ancestral (default), low-confidence, dream-entropy, threshold:0.9...")
    p.add_argument("--block-length", type=positive, help="write in blocks of so many positions, with some rules")
    p.add_argument("--stride", type=positive, help="go on past the family's length, to --length, in such windows")
    p.add_argument("--light", help="the model that L stands for (default: the smallest)")
    p.add_argument("--heavy", help="the model that H stands for (default: the largest)")
    p.add_argument("--batch-size", type=batch_type, default="auto", help="rows in a network call, or auto")
    p.add_argument(
        "--dtype",
        choices=DTYPES,
        help="what the blocks compute in (default: bfloat16 on CUDA, else float32)",
    )
    cluster_flag(p)
    p.add_argument("--watch", action="store_true", help="play the denoising in the terminal")
    p.add_argument("--svg", metavar="FILE", help="draw the first sample, in the colours of the models that wrote it")
    p.add_argument("--html", metavar="FILE", help="write a page that plays the denoising of the samples in a browser")
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
    p.add_argument("--mauve", metavar="FILE", help="add MAUVE against this text, on the judge's states")
    p.add_argument("--timing", action="store_true", help="add milliseconds (and joules) by this device's table")
    p.add_argument("--light", help="the model that L stands for (default: the smallest)")
    p.add_argument("--heavy", help="the model that H stands for (default: the largest)")
    p.add_argument("--batch-size", type=batch_type, default="auto", help="rows in a network call, or auto")
    p.add_argument("--store", metavar="FOLDER", help="keep results here; what is there is not computed again")
    p.add_argument("--fresh", action="store_true", help="compute again what the store has")
    cluster_flag(p)
    p.add_argument("--plot", metavar="FILE", help="draw it (.png, .svg or .pdf)")
    common(p)

    p = command(
        "compose",
        run_compose,
        "decoding rules x steps x schedules, and whether their savings multiply",
        "relaylm compose --steps 32,256 --plot grid.png",
    )
    family_flag(p)
    p.add_argument("--rules", help="separated by commas; @P adds a nucleus, as in ancestral@0.9 (default: six)")
    p.add_argument("--steps", type=counts_type, help="numbers of steps (default 8,32,256)")
    p.add_argument("--schedules", help="separated by commas (default: heavy, two sandwiches, a middle model, light)")
    p.add_argument("-n", "--n", type=natural_from_2, default=400, help="samples in each cell (default 400)")
    p.add_argument("--length", type=positive, help="positions in a sample (default: the family's)")
    p.add_argument("--judge", default="own", help="own, hf:NAME or gguf:PATH")
    p.add_argument("--light", help="the model that L stands for (default: the smallest)")
    p.add_argument("--heavy", help="the model that H stands for (default: the largest)")
    p.add_argument("--batch-size", type=batch_type, default="auto", help="rows in a network call, or auto")
    p.add_argument("--store", metavar="FOLDER", help="keep each cell here as it is done; run again to resume")
    p.add_argument("--fresh", action="store_true", help="compute again what the store has")
    p.add_argument("--stored-only", action="store_true", help="show the cells that the store has; sample nothing")
    p.add_argument("--recorded", metavar="FILE", help="show and draw this JSON of an earlier run; sample nothing")
    p.add_argument("--plot", metavar="FILE", help="draw two figures, FILE and one more (.png, .svg or .pdf)")
    p.add_argument("--markdown", metavar="FILE", help="write the tables into this document, between their marks")
    common(p)

    p = command("cost", run_cost, "what calls and schedules cost on this device", "relaylm cost --budget 40ms")
    family_flag(p)
    p.add_argument("--schedules", default="heavy,sandwich:25%,light", help="separated by commas")
    p.add_argument("-T", "--steps", type=steps_type, help="denoising steps, or inf (default: the length)")
    p.add_argument("--length", type=positive, help="positions in a sample (default: the family's)")
    p.add_argument("--budget", help="mark what is over it: a share to be saved (25%%, 25%% ms) or 3e12flops, 40ms, 12J")
    p.add_argument("--light", help="the model that L stands for (default: the smallest)")
    p.add_argument("--heavy", help="the model that H stands for (default: the largest)")
    p.add_argument("--batch-size", type=batch_type, default="auto", help="rows in a network call, or auto")
    p.add_argument("--fresh", action="store_true", help="measure again what the table has")
    common(p, seed=False)

    p = command(
        "importance", run_importance, "how far models disagree, by timestep", "relaylm importance --text held.txt"
    )
    family_flag(p)
    p.add_argument("--text", metavar="FILE", help="held-out text (default: the one that comes with the family)")
    p.add_argument("--states", default="data", choices=("data", "trajectory"), help="corrupted text, or own samples")
    p.add_argument("--pairs", help="light:heavy pairs separated by commas, or all (default: each against the heaviest)")
    p.add_argument("--timesteps", type=positive, default=20, help="number of even times (default 20)")
    p.add_argument("--sequences", type=positive, help="rows at each time (default 500 on a GPU, 64 on a CPU)")
    p.add_argument("--plot", metavar="FILE", help="draw the curves (.png, .svg or .pdf)")
    common(p)

    p = command(
        "search", run_search, "the best schedule within a budget", "relaylm search --budget 25% --json best.json"
    )
    p.add_argument("method", nargs="?", default="tune", help="tune (default), exhaustive or evolve: how to look for it")
    family_flag(p)
    p.add_argument("--budget", help="share of all-heavy to be saved (25%%), 3e12flops, 40ms, or a range 0:1:0.1")
    p.add_argument("--max-loss", help="instead: the most perplexity may rise (2%%), as cheaply as possible")
    p.add_argument("--light-segments", type=natural, help="instead: as much as so many light segments save")
    p.add_argument("--segments", type=positive, default=10, help="segments of the time axis (default 10)")
    p.add_argument("--models", help="that may take part, separated by commas (default: all)")
    p.add_argument("--densities", help="shares of a segment's steps that may be taken (default 1,1/2,1/4)")
    p.add_argument("-n", "--n", type=natural_from_2, help="rows for each schedule (default 160; evolve 64)")
    p.add_argument("--confirm", type=natural_from_2, help="fresh rows for the best (default 1600; tune: what is left)")
    p.add_argument("--rows", type=positive, help="what tune may spend, in samples' worth of calls (default 3300)")
    p.add_argument("-T", "--steps", type=steps_type, help="denoising steps (default: the length)")
    p.add_argument("--length", type=positive, help="positions in a sample (default: the family's)")
    p.add_argument("--prompts", metavar="FILE", help="text file, one prompt in a line; row r continues prompt r")
    p.add_argument("--judge", default="own", help="own, hf:NAME or gguf:PATH")
    p.add_argument("--recipe", default="plain", choices=("plain", "mdlm"), help="how perplexity is computed")
    p.add_argument("--text", metavar="FILE", help="held-out text for likelihood bounds (default: the family's, if any)")
    p.add_argument("--quick", action="store_true", help="tune by likelihood bounds alone: no sampling, no judge")
    p.add_argument("--time-limit", type=seconds_type, metavar="TIME", help="stop with the best so far: 90s, 10m, 1h")
    p.add_argument("--light", help="the model that L stands for (default: the smallest)")
    p.add_argument("--heavy", help="the model that H stands for (default: the largest)")
    p.add_argument("--batch-size", type=batch_type, default="auto", help="rows in a network call, or auto")
    p.add_argument("--store", metavar="FOLDER", help="keep results here; run again to go on where it stopped")
    p.add_argument("--fresh", action="store_true", help="compute again what the store has")
    cluster_flag(p)
    p.add_argument("--plot", metavar="FILE", help="draw it (.png, .svg or .pdf)")
    p.add_argument("--csv", metavar="FILE", help="write what was measured as a table")
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
    p.add_argument("--depths", type=counts_type, help="blocks of each model, such as 4,6,8,10,12")
    p.add_argument("--twin", type=natural, help="blocks of a second model from another seed (0: none)")
    p.add_argument("--judge", type=natural, help="blocks of a left-to-right judge (0: none)")
    p.add_argument("--name", help="the family's name")
    p.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="any other number of the recipe")
    p.add_argument("--force", action="store_true", help="go on from the run that is there although settings differ")
    common(p, seed=False)

    p = command("bound", run_bound, "likelihood bound on a text", "relaylm bound --text heldout.txt")
    family_flag(p)
    p.add_argument("--text", metavar="FILE", help="plain, .xz or .gz (default: the one that comes with the family)")
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
    p.add_argument("--depths", type=counts_type, default=(12, 4), help="blocks of the heavy and the light model (12,4)")
    p.add_argument("--width", type=positive, help="default 768 on CUDA, 256 on a CPU")
    p.add_argument("--vocab-size", type=positive, default=50258, help="default 50258")
    p.add_argument("--length", type=positive, help="default 1024 on CUDA, 256 on a CPU")
    p.add_argument("--steps", type=positive, help="default 1000 on CUDA, 256 on a CPU")
    p.add_argument("--batch-size", type=batch_type, default="auto", help="rows in a network call, or auto")
    p.add_argument(
        "--dtype",
        choices=DTYPES,
        help="of the engine's blocks (default: bfloat16 where the device has it)",
    )
    p.add_argument("--quick", action="store_true", help="fewer repeats")
    p.add_argument("--parts", help="only these, separated by commas (default: all; an unknown name lists them)")
    common(p)

    p = command(
        "reproduce",
        run_reproduce,
        "the paper's experiments on a family, and a verdict on each of its claims",
        "relaylm reproduce --scale cpu --out reproduce",
    )
    family_flag(p)
    p.add_argument(
        "--scale", default="auto", choices=("auto", "cpu", "gpu", "paper"), help="how large (default: by the device)"
    )
    p.add_argument("--only", nargs="+", metavar="NAME", help="only these experiments (an unknown name lists them)")
    p.add_argument("--out", metavar="FOLDER", default="reproduce", help="report, figures, tables, data (reproduce)")
    p.add_argument("--store", metavar="FOLDER", help="samples and scores (default: store in --out)")
    p.add_argument("--text", metavar="FILE", help="held-out text (default: heldout.txt beside the family, if there)")
    p.add_argument("--second", metavar="FAMILY", help="a family of another corpus, with short rows")
    p.add_argument("--bpe", metavar="FAMILY", help="a family with a large vocabulary: its schedules, the float32 draw")
    p.add_argument("--stages", nargs="+", metavar="FAMILY", help="one pair at several stages of its training")
    p.add_argument("--judge", default="own", help="own, hf:NAME or gguf:PATH")
    common(p)

    p = command("demo", run_demo, "the same prompt under three schedules, side by side", "relaylm demo")
    family_flag(p)
    p.add_argument("--prompt", help="text at the front")
    common(p)
    return parser


# -------------------------------------------------------------------------------------------------------------- running


def apply_config(parser: argparse.ArgumentParser, argv: list[str]) -> argparse.Namespace:
    """Flags, with values from --config FILE where the command line is silent."""
    finder = _Parser(prog=parser.prog, add_help=False, allow_abbrev=False)
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
        flag = action.option_strings[-1]
        if isinstance(action, argparse._StoreTrueAction):
            if not isinstance(value, bool):
                raise UserError(f"{path} sets {name} to {value!r}: it is true or false")
            words += [flag] if value else []
        elif isinstance(action, argparse._AppendAction):
            words += [f"{flag}={text}" for text in (value if isinstance(value, list) else [value])]
        else:
            words += [f"{flag}={','.join(map(str, value)) if isinstance(value, list) else value}"]
    # The command line comes last, so it wins.
    return parser.parse_args([argv[0], *words, *argv[1:]])


def write_json(path: str, value: Any) -> None:
    """Valid JSON (infinity as text), whole or not at all. A link is followed; what is no plain file (a pipe, a device)
    is written to and never replaced."""
    text = json.dumps(_finite(value), indent=1, default=str, allow_nan=False) + "\n"
    if path == "-":
        sys.stdout.write(text)
        return
    write_text(path, text)


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return {math.inf: "inf", -math.inf: "-inf"}.get(value)
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def main(argv: list[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    args = None
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
        kept = getattr(args, "store", None) is not None
        note("relaylm: interrupted" + ("; run again with the same --store to go on" if kept else ""))
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
