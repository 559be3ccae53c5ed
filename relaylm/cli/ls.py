"""List families, schedules and presets. Example: relaylm ls"""

import argparse
from pathlib import Path

from relaylm.cli import tools
from relaylm.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags."""
    parser.add_argument("folder", nargs="*", help="folders to look for families in (default: the current one)")


def run(args: argparse.Namespace) -> tools.Result:
    """List what can be named without a path, and the families in folders."""
    from relaylm.core.schedule import hand_made
    from relaylm.models.load import list_families
    from relaylm.train.recipe import load_preset, presets

    for folder in args.folder:
        if not Path(folder).is_dir():
            raise UserError(f"{folder} is not a folder")
    found: tools.Result = {
        "families": list_families(*args.folder),
        "schedules": {name: str(schedule) for name, schedule in hand_made().items()},
        "presets": {name: load_preset(name).description for name in presets()},
        "default": tools.default_family(None),
    }
    lines = ["families"]
    for entry in found["families"]:
        about = entry["error"] or f"{', '.join(entry['models'])}; length {entry['length']}"
        lines.append(f"  {entry['source']}{' (bundled)' if entry['bundled'] else ''}: {about}")
    lines += ["schedules (any other: see relaylm sample --help)"]
    lines += [f"  {name}: {text}" for name, text in found["schedules"].items()]
    lines += ["presets for relaylm train", *(f"  {name}: {text}" for name, text in found["presets"].items())]
    tools.show(args, "\n".join(lines))
    return found
