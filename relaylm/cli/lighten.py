"""Make a light sibling of a model. Example: relaylm lighten wiki-char --blocks 4 --corpus corpus"""

import argparse
import os

from relaylm.cli import tools
from relaylm.cli.options import add_shared, positive
from relaylm.cli.train import settings


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags."""
    add = parser.add_argument
    add("family", help="a bundled name, a folder, a checkpoint or a hub id")
    add("--blocks", type=positive, default=4, help="how many blocks to keep, chosen by what the model misses without")
    add("--corpus", required=True, help="a folder that `relaylm prepare` wrote, with the family's tokenizer")
    add("--out", help="where to work; run again to resume (default: lightN in this folder)")
    add("--name", help="the sibling's name (default: lightN)")
    add("--rows", type=positive, default=16, help="rows of the corpus that choose the blocks")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="any number of the recipe, such as steps=8000")
    add("--force", action="store_true", help="go on from the run that is there although settings differ")
    add_shared(parser, "heavy device")


def run(args: argparse.Namespace) -> tools.Result:
    """Choose blocks, distil, and say where the family is."""
    from relaylm.models.family import Family
    from relaylm.train.lighten import lighten
    from relaylm.train.recipe import RECIPE_SETTINGS

    out = args.out or f"light{args.blocks}"
    same = tools.chosen(args, "blocks heavy name rows device force")
    folder = lighten(args.family, args.corpus, out, **same, **settings(args.set, RECIPE_SETTINGS))
    about = Family.load(folder).meta["lightened"]
    if os.environ.get("RANK", "0") == "0":  # one of the processes of torchrun
        held = about["summary"]["heldout"]
        bits = "" if held is None else f", held-out {held['bits']:.4f} bits a token"
        kept = ", ".join(str(number + 1) for number in about["choice"]["kept"])
        tools.note(f"{about['model']}: blocks {kept} of {about['choice']['depth']}{bits}")
        tools.note(f"the family is in {folder}: relaylm compare --family {folder} --schedules heavy,sandwich:25%,light")
    return {"family": str(folder), **about}
