"""Train a family. Example: relaylm train corpus out --preset wiki-char"""

import argparse
import os
import sys
import tomllib
from typing import Any

from relaylm.cli import tools
from relaylm.cli.options import add_shared, counts_type, natural
from relaylm.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags."""
    add = parser.add_argument
    add("corpus", help="a folder that `relaylm prepare` wrote")
    add("out", help="where to train; run again to resume")
    add("--preset", default="tiny-cpu", help="a preset's name (see relaylm ls) or a TOML file")
    add("--depths", type=counts_type, help="blocks of each model, such as 4,6,8,10,12 (default: the preset's)")
    add("--twin", type=natural, help="blocks of a second model from another seed; 0: none (default: the preset's)")
    add("--judge", type=natural, help="blocks of a left-to-right judge; 0: none (default: the preset's)")
    add("--name", help="the family's name")
    add("--set", action="append", default=[], metavar="KEY=VALUE", help="any other number of the recipe")
    add("--no-pairs", action="store_true", help="do not measure which positions can be written together")
    add("--force", action="store_true", help="go on from the run that is there although settings differ")
    add_shared(parser, "device")


def run(args: argparse.Namespace) -> tools.Result:
    """Train, or go on with training, and say what the family is worth and what to do next."""
    from relaylm.models.family import Family
    from relaylm.train.corpus import TokenFile
    from relaylm.train.family import train_family
    from relaylm.train.recipe import SETTINGS
    from relaylm.train.report import render, report

    overrides = {key: value for key, value in tools.chosen(args, "depths twin judge").items() if value is not None}
    overrides |= settings(args.set, SETTINGS)
    command = "relaylm " + " ".join(sys.argv[1:])
    same = {**tools.chosen(args, "device name force"), "pairs": not args.no_pairs}
    folder = train_family(args.corpus, args.out, args.preset, progress=True, command=command, **same, **overrides)
    if os.environ.get("RANK", "0") != "0":  # not the first of the processes of torchrun
        return {}
    found = report(folder, TokenFile.load(args.corpus, verify=False), args.device)
    family = Family.load(folder)
    tools.show(args, render(family, found))
    seed = family.meta["preset"]["recipe"]["seed"]
    result = {"family": str(folder), "seed": seed, **found, "training": family.meta["training"]}
    return tools.with_provenance(result, family, args)


def settings(texts: list[str], known: frozenset[str]) -> dict[str, Any]:
    """What --set changes, by name: KEY=VALUE, the value in TOML's notation; a bare word is a string."""
    from relaylm.train.recipe import check_settings

    found: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not equals:
            raise UserError(f"--set takes KEY=VALUE, not {text!r}")
        check_settings([key], known)
        try:
            found[key] = tomllib.loads(f"x = {value}")["x"]
        except tomllib.TOMLDecodeError:
            found[key] = value
    return found
