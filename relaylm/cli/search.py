"""The best schedule within a budget. Example: relaylm search --budget 25% --json best.json"""

import argparse
import shlex

from relaylm.cli import tools
from relaylm.cli.options import add_shared, at_least_2, natural, positive, seconds_type
from relaylm.files import expand


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags."""
    add = parser.add_argument
    add("method", nargs="?", default="tune", help="tune, exhaustive or evolve: how to look for it")
    add_shared(parser, "family")
    add("--budget", help="share of all-heavy to be saved (25%%), 3e12flops, 40ms, or a range 0:1:0.1")
    add("--max-loss", help="instead: the most perplexity may rise (2%%), as cheaply as possible")
    add("--light-segments", type=natural, help="instead: as much as so many light segments save")
    add("--segments", type=positive, default=10, help="segments of the time axis")
    add("--models", help="that may take part, separated by commas (default: all)")
    add("--densities", help="shares of a segment's steps that may be taken (default: 1,1/2,1/4)")
    add("-n", "--n", type=at_least_2, help="rows for each schedule (default: 160; evolve: 64)")
    add("--confirm", type=at_least_2, help="fresh rows for the best (default: 1600; tune: what is left)")
    add("--rows", type=positive, help="what tune may spend, in samples' worth of calls (default: 3300)")
    add_shared(parser, "steps length prompts judge recipe", steps="denoising steps (default: the length)")
    add("--text", metavar="FILE", help="held-out text for likelihood bounds (default: the family's, if any)")
    add("--quick", action="store_true", help="tune by likelihood bounds only: no sampling, no judge")
    add("--time-limit", type=seconds_type, metavar="TIME", help="stop with the best so far: 90s, 10m, 1h")
    add("--csv", metavar="FILE", help="write what was measured as a table")
    store = "keep results here; run again to go on where it stopped"
    add_shared(parser, "light heavy batch-size store fresh cluster plot seed device", store=store)


def run(args: argparse.Namespace) -> tools.Result:
    """Search, show what was found, draw it and write it."""
    from relaylm.search.search import search
    from relaylm.show.search import plot_search, render, to_csv

    prompts = tools.read_lines(args.prompts)
    family = tools.load_family(args)
    text, rows = None, 256 if family.device.type == "cuda" else 64
    if args.text is not None or (args.method == "tune" and family.heldout is not None and family.tokenizer is not None):
        text = tools.token_rows(family, args.text, args.length or family.length, rows)
    same = "budget max_loss light_segments segments n confirm rows steps length seed judge recipe quick time_limit"
    with tools.open_workers(family, args.cluster) as cluster:
        result = search(
            family,
            args.method,
            models=tools.split_list(args.models),
            densities=tools.split_list(args.densities),
            prompts=prompts,
            text=text,
            cluster=cluster,
            progress=True,
            **tools.chosen(args, f"{same} light heavy batch_size store fresh"),
        )
    tools.show(args, render(result))
    tools.write_last(args, args.csv, lambda: to_csv(result))
    tools.draw_last(args, plot_search, result)
    source = tools.default_family(args.family)  # as a later command finds it, from any folder
    result["family"]["source"] = str(expand(source).resolve()) if expand(source).exists() else source
    if args.json not in (None, "-"):
        length = () if args.length is None else ("--length", str(args.length))
        tools.note(f"to use it: {shlex.join(('relaylm', 'sample', '--schedule', f'@{args.json}', *length))}")
    return tools.with_provenance(result, family, args)
