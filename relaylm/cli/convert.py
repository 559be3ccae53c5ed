"""Bring public checkpoints in. Example: relaylm convert kuleshov-group/mdlm-owt mdlm"""

import argparse

from relaylm.cli import tools
from relaylm.cli.options import natural, positive
from relaylm.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags."""
    add = parser.add_argument
    add("sources", nargs="+", help="checkpoints (folders, files, hub ids), then the folder to write")
    add("--names", help="names of the models, separated by commas (default: by their blocks)")
    add("--tokenizer", help="a tokenizers JSON file or a folder with one (default: the checkpoint's)")
    add("--license", help="for the model card, if the checkpoint does not say")
    add("--revision", help="of a hub id (default: the newest)")
    add("--length", type=positive, help="longest sequence, where the checkpoint does not say")
    add("--mask-id", type=natural, help="the mask's token id, where the checkpoint does not say")
    add("--heads", type=positive, help="attention heads, where the checkpoint does not say")
    add("--block-length", type=positive, help="positions of a block, of models that write in blocks and do not say")
    add("--raw-weights", action="store_true", help="of a .ckpt, the raw weights instead of the averaged ones")
    add("--to-mdlm", action="store_true", help="the other way: a family to MDLM's published layout")
    add("--overwrite", action="store_true", help="replace what is there")


def run(args: argparse.Namespace) -> tools.Result:
    """Convert, and say what was written."""
    from relaylm.convert import convert, export
    from relaylm.models.family import on_disk
    from relaylm.models.folder import MANIFEST

    *sources, folder = args.sources
    if not sources:
        raise UserError("name a checkpoint and then the folder to write")
    if args.to_mdlm:
        if len(sources) != 1:
            raise UserError("--to-mdlm takes one family and the folder to write")
        unused = tools.chosen(args, "names tokenizer revision length mask_id heads block_length raw_weights")
        for name, value in unused.items():
            if value is not None and value is not False:
                raise UserError(f"--{name.replace('_', '-')} does not go with --to-mdlm: the family says all of it")
        written = export(sources[0], folder, **tools.chosen(args, "license overwrite"))
    elif families := [source for source in sources if (on_disk(source) / MANIFEST).is_file()]:
        raise UserError(f"{families[0]} is a family of relaylm already: it needs no converting (--to-mdlm goes back)")
    else:
        said = tools.chosen(args, "length mask_id heads block_length")
        options = {name: value for name, value in said.items() if value is not None}
        options |= {"ema": False} if args.raw_weights else {}
        same = tools.chosen(args, "tokenizer revision license overwrite")
        written = convert(sources, folder, names=tools.split_list(args.names), **same, **options)
    tools.note(f"wrote {written}")
    return {"folder": str(written)}
