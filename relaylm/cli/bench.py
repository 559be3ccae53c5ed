"""Speed against MDLM's own sampler, in one run. Example: relaylm bench --json bench.json"""

import argparse

from relaylm.cli import tools
from relaylm.cli.options import add_shared, at_least_2, counts_type, positive
from relaylm.errors import UserError

DEPTHS, VOCABULARY = "12,4", 50258


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags."""
    add = parser.add_argument
    add("--family", help="take the weights from here (default: random ones)")
    add("--depths", type=counts_type, default=DEPTHS, help="blocks of the heavy and the light model")
    add("--width", type=positive, help="of the models (default: 768 on CUDA, 256 on a CPU)")
    add("--vocab-size", type=at_least_2, default=VOCABULARY, help="tokens with the mask")
    add("--length", type=positive, help="positions in a row (default: 1024 on CUDA, 256 on a CPU)")
    add("--steps", type=positive, help="denoising steps (default: 1000 on CUDA, 256 on a CPU)")
    add_shared(parser, "batch-size")
    add_shared(parser, "dtype", dtype="of the engine's blocks (default: bfloat16 where the device has it)")
    add("--quick", action="store_true", help="fewer repeats")
    add("--parts", help="only these, separated by commas (default: all; an unknown name lists them)")
    add_shared(parser, "seed device")


def run(args: argparse.Namespace) -> tools.Result:
    """Measure, and show the table."""
    from relaylm.studies.bench.bench import bench, render

    if len(args.depths) != 2 or args.depths[0] < args.depths[1]:
        raise UserError("--depths takes the heavy model's blocks and then the light one's, such as 12,4")
    sizes = {
        "--depths": args.depths != counts_type(DEPTHS),
        "--width": args.width,
        "--vocab-size": args.vocab_size != VOCABULARY,
    }
    if args.family is not None and (given := [flag for flag, chosen in sizes.items() if chosen]):
        raise UserError(f"{given[0]} is of random weights: a family brings its own, so leave it out")
    same = tools.chosen(args, "device width vocab_size length steps batch_size family dtype seed quick")
    result = bench(depth=args.depths, parts=tools.split_list(args.parts), **same)
    tools.show(args, render(result))
    return result
