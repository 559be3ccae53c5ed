"""List families, schedules and presets. Example: relaylm ls"""

import argparse

from relaylm.cli import tools
from relaylm.console import table
from relaylm.errors import UserError
from relaylm.files import expand


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags."""
    parser.add_argument("folder", nargs="*", help="folders to look for families under (default: the current one)")


def run(args: argparse.Namespace) -> tools.Result:
    """List what can be named without a path, and the families under folders."""
    from relaylm.core.schedule import hand_made
    from relaylm.models.family import list_families
    from relaylm.train.recipe import load_preset, presets

    for folder in args.folder:
        if not expand(folder).is_dir():
            raise UserError(f"{folder} is not a folder")
    found: tools.Result = {
        "families": list_families(*args.folder),
        "schedules": {name: str(schedule) for name, schedule in hand_made().items()},
        "presets": {name: load_preset(name).description for name in presets()},
        "default": tools.default_family(None),
    }
    rows = []
    for entry in found["families"]:
        where = "bundled" if entry["bundled"] else ""
        where = ", ".join(filter(None, (where, "default" if entry["source"] == found["default"] else "")))
        sizes = (
            "" if entry["error"] else ", ".join(f"{name} {size / 1e6:.3g}M" for name, size in entry["sizes"].items())
        )
        rows.append([entry["source"], entry["error"] or sizes, "" if entry["error"] else str(entry["length"]), where])
    head = ["families", "models and their parameters", "length", ""]
    parts = [table(head, rows, text=(0, 1, 3))]
    parts.append(
        table(["schedules by name", "the same in shares"], [*map(list, found["schedules"].items())], text=(0, 1))
    )
    known = [list(item) for item in found["presets"].items()]
    parts.append(table(["presets for relaylm train", "what to expect"], known, text=(0, 1)))
    tools.show(args, "\n\n".join(parts))
    return found
