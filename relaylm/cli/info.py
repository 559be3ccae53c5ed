"""Say what a family or checkpoint holds. Example: relaylm info path/to/family"""

import argparse

from relaylm.cli import tools
from relaylm.console import table, terminal_width, wrapped


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags."""
    parser.add_argument("source", nargs="?", help="as for --family (default: wiki-bpe, or RELAYLM_FAMILY)")


def run(args: argparse.Namespace) -> tools.Result:
    """Show the family's models, sizes and files."""
    from relaylm.convert import describe

    about = describe(tools.default_family(args.source))
    tools.show(args, render(about))
    return about


def render(about: tools.Result) -> str:
    """The description as text, with a table of the models."""
    kind = (about.get("tokenizer") or {}).get("type", "none")
    form = f" ({about['format']} checkpoint)" if about.get("format") else ""
    title = (
        f"{about['name'] or 'unnamed family'}{form}: length {about['length']}, vocabulary {about['vocab_size']} "
        f"(mask {about['mask_id']}), tokenizer {kind}"
    )
    marks = {name: role[0].upper() for role, name in (about.get("roles") or {}).items()}
    forms = {"depth": "blocks", "width": "width", "parameters": "parameters", "flops_per_call": "FLOPs a call"}
    forms["block_length"] = "positions of a block"
    shown = {key: label for key, label in forms.items() if any(model.get(key) for model in about["models"].values())}
    rows = []
    for name, model in about["models"].items():
        cells = [(model.get(key) or "", ".3g" if key == "flops_per_call" else ",") for key in shown]
        rows.append([name, marks.get(name, ""), *(f"{value:{form}}" if value else "" for value, form in cells)])
    notes = ["with a judge"] if about.get("judge") else []
    notes += [f"with twins: {', '.join(about['twins'])}"] if about.get("twins") else []
    if spacing := (about.get("meta") or {}).get("spacing"):
        notes.append(f"writes with {spacing} where no steps are given, shorter texts with less")
    notes += [f"missing: {missing}" for missing in about.get("missing") or []]
    where = f" in {about['folder']}" if about.get("folder") else ""  # a path is not broken
    size = [f"{about['bytes'] / 1e6:.1f} MB{where}"] if about.get("bytes") else []
    width = terminal_width()
    listed = table(["model", "", *shown.values()], rows, width, text=(0, 1))
    return "\n".join([*wrapped([title], width), "", listed, "", *wrapped(notes, width), *size]).rstrip()
