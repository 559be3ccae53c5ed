"""The paper's experiments on a family, and a verdict on each of its claims.
Example: relaylm reproduce --family wiki-char --scale cpu --out reproduce
"""

import argparse
from dataclasses import asdict, replace
from typing import Any

from relaylm.cli import tools
from relaylm.cli.options import add_shared, at_least_2
from relaylm.console import table
from relaylm.errors import UserError
from relaylm.files import expand


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Define the flags."""
    add = parser.add_argument
    add_shared(parser, "family")
    add("--scale", default="auto", choices=("auto", "cpu", "gpu", "paper"), help="how large; auto is by the device")
    add("--only", nargs="+", metavar="NAME", help="only these experiments (default: all; an unknown name lists them)")
    add("--samples", type=at_least_2, help="of each schedule (default: those of the scale)")
    add("--out", metavar="FOLDER", default="reproduce", help="where report, figures, tables and data go")
    add("--store", metavar="FOLDER", help="samples and scores (default: store in --out)")
    add("--text", metavar="FILE", help="held-out text (default: heldout.txt beside the family, if there)")
    add("--second", metavar="FAMILY", help="a family of another corpus, with short rows")
    add("--bpe", metavar="FAMILY", help="a family with a large vocabulary: its schedules, the float32 draw")
    add("--bpe-twin", metavar="FAMILY", help="models of that family from another seed: how far two trainings differ")
    add("--stages", nargs="+", metavar="FAMILY", help="one pair at several stages of its training")
    add("--records", metavar="FOLDER", help="earlier results, shown where a family cannot (default: results here)")
    add_shared(parser, "judge seed device")


def run(args: argparse.Namespace) -> tools.Result:
    """Run the experiments and show the verdicts."""
    from relaylm.models.family import Family
    from relaylm.studies.paper.experiments import SCALES
    from relaylm.studies.paper.reproduce import judge_all, load_all, reproduce

    def load(source: str | None) -> Any:
        return None if source is None else Family.load(source, device=args.device)

    if args.records is not None and not expand(args.records).is_dir():
        raise UserError(f"there is no folder {args.records} (--records)")
    only = [name for word in args.only or () for name in word.split(",")]
    stages = [source for word in args.stages or () for source in word.split(",")]
    family = tools.load_family(args)
    scale = args.scale if args.scale != "auto" else "gpu" if family.device.type == "cuda" else "cpu"
    others: dict[str, Any] = {"second": load(args.second), "bpe": load(args.bpe)}
    others |= {"bpe_twin": load(args.bpe_twin), "stages": list(map(load, stages))}
    same = tools.chosen(args, "store text judge seed records")
    sized = SCALES[scale] if args.samples is None else replace(SCALES[scale], samples=args.samples)
    result = reproduce(family, sized, args.out, only=only or None, progress=True, note=tools.note, **others, **same)
    for name, item in result["experiments"].items():
        if item["status"] == "not run":
            tools.note(f"{name} was not run: {item['reason']}")
    here = {v.claim.name: [asdict(finding) for finding in v.findings] for v in judge_all(load_all(expand(args.out)))}
    rows = []
    for claim in result["claims"]:
        claim["recorded"] = claim["findings"] != here.get(claim["claim"])
        rows.append([claim["claim"], claim["verdict"], "recorded" if claim["recorded"] else ""])
    lines = [table(["claim", "verdict", "data"], rows, text=(0, 1, 2))]
    if any(claim["recorded"] for claim in result["claims"]):
        lines.append("recorded: rests at least in part on results kept with the project, not on this run")
    tools.show(args, "\n".join([*lines, f"the report is {result['report']}"]))
    return result
