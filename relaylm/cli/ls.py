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
    from relaylm.models.about import list_families
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
        what, length = entry["error"], ""
        if not what:
            what = ", ".join(f"{name} {size / 1e6:.3g}M" for name, size in entry["sizes"].items())
            length = str(entry["length"])
        marks = {"bundled": entry["bundled"], "default": entry["source"] == found["default"]}
        rows.append([entry["source"], what, length, ", ".join(mark for mark, has in marks.items() if has)])
    parts = [table(["families", "models and their parameters", "length", ""], rows, text=(0, 1, 3))]
    heads = {"schedules": ["schedules by name", "the same in shares"]}
    heads["presets"] = ["presets for relaylm train", "what to expect"]
    parts += [table(head, list(found[key].items()), text=(0, 1)) for key, head in heads.items()]
    tools.show(args, "\n\n".join(parts))
    return found
