"""Events in parallel (`sampling.parallel`): rounds, work and milliseconds of one row against the sequential sampler.

    python -m relaylm.studies.record.parallel FAMILY OUT.json [--model 12b] [--windows 4,8,16] [--rows 1] [--steps inf]

The sequential run has a batch of the rows alone, as it is run in practice. Tokens are the same bit for bit at one call
shape (tests); how many are at these different shapes is recorded.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

from relaylm.files import write_json
from relaylm.measure.provenance import how_made
from relaylm.models.family import Family
from relaylm.sampling.sample import sample


def main() -> None:
    """Measure, and write OUT.json."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("family")
    parser.add_argument("out", type=Path)
    parser.add_argument("--model")
    parser.add_argument("--windows", default="4,8,16")
    parser.add_argument("--rows", type=int, default=1)
    parser.add_argument("--steps", type=float, default=math.inf)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    options = parser.parse_args()
    family = Family.load(options.family, device=options.device)
    model, n = options.model or family.roles()[1], options.rows
    same: dict[str, Any] = {"steps": options.steps, "seed": options.seed}
    plain = sample(family, model, n, batch_size=n, **same)
    first = {"window": 1, "rounds": plain.cost.network_calls, "calls": plain.cost.total_calls}
    found: list[dict[str, Any]] = [{**first, "milliseconds": 1e3 * plain.cost.seconds}]
    for window in map(int, options.windows.split(",")):
        ahead = sample(family, model, n, parallel=window, **same)
        alike = float((ahead.tokens == plain.tokens).mean())
        found.append(
            {
                "window": window,
                "rounds": ahead.cost.network_calls,
                "calls": ahead.cost.total_calls,
                "work": ahead.cost.total_calls / plain.cost.total_calls,
                "milliseconds": 1e3 * ahead.cost.seconds,
                "same_tokens_as_at_batch_1": alike,
            }
        )
        print(found[-1], flush=True)
    about = {"family": {"name": family.name, "digest": family.digest}, "model": model, "rows": n, "seed": options.seed}
    steps = "inf" if math.isinf(options.steps) else int(options.steps)
    write_json(
        options.out, {**about, "steps": steps, "length": family.length, **how_made(family.device), "runs": found}
    )


if __name__ == "__main__":
    main()
