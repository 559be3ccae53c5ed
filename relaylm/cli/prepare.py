"""Turn text into a token file. Example: relaylm prepare wiki.txt.xz corpus --tokenizer text8"""

import argparse
import sys

from relaylm.cli import tools
from relaylm.cli.options import positive
from relaylm.errors import UserError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags."""
    add = parser.add_argument
    add("sources", nargs="+", help="texts (plain, .xz, .gz, .jsonl; hf:NAME is a dataset), then the folder to write")
    tokenizer = "text8, bytes, bpe:SIZE (trained here), a tokenizers JSON file, or a family"
    add("--tokenizer", default="bytes", help=tokenizer)
    add("--packing", default="running", choices=("running", "wrap", "pad"), help="how rows are cut from documents")
    add("--length", type=positive, help="positions in a row, for wrap and pad")
    add("--holdout", type=float, default=0.02, help="share at the end that is never trained on")
    add("--license", default="", help="of the text; goes into model cards")


def run(args: argparse.Namespace) -> tools.Result:
    """Write the corpus and say how large it is."""
    from relaylm.train.corpus import prepare

    *sources, folder = args.sources
    if not sources:
        raise UserError("name at least one text and then the folder to write")
    if args.packing == "running" and args.length is not None:
        raise UserError("--length goes with --packing wrap or pad: running text is cut into rows when it is trained on")
    same = tools.chosen(args, "tokenizer packing length holdout")
    corpus = prepare(sources, folder, licence=args.license, progress=sys.stderr.isatty(), **same)
    train, heldout = map(corpus.tokens, ("train", "heldout"))
    tools.note(f"{folder}: {train:,} tokens to train on, {heldout:,} held out")
    return {"folder": str(folder), "train": train, "heldout": heldout}
