"""Events in parallel (`sampling.parallel`): rounds, work and milliseconds of one row against the sequential sampler.

    python -m relaylm.studies.record.parallel FAMILY OUT.json [--model 12b] [--windows 4,8,16] [--rows 1] [--steps inf]

The sequential run has a batch of the rows alone, as it is run in practice. Tokens are the same bit for bit at one call
shape (tests); how many are at these different shapes is recorded. Milliseconds are those of the fastest of three runs.
"""

from __future__ import annotations

import math

from relaylm.models.family import Family
from relaylm.sampling.sample import sample
from relaylm.studies.record.common import command, keep

RUNS = 3


def main() -> None:
    """Measure, and write OUT.json."""
    flags = {"windows": "4,8,16", "rows": 1, "steps": math.inf, "seed": 0, "device": "auto"}
    options = command(__doc__, "family out", model=str, **flags)
    family = Family.load(options.family, device=options.device)
    model, n = options.model or family.roles()[1], options.rows
    steps = options.steps if math.isinf(options.steps) else int(options.steps)
    plain, found = None, []
    for window in (1, *map(int, options.windows.split(","))):
        how = {"parallel": window} if window > 1 else {"batch_size": n}
        runs = [sample(family, model, n, steps=steps, seed=options.seed, **how) for _ in range(RUNS)]
        ahead = min(runs, key=lambda run: run.cost.seconds)
        plain = plain or ahead
        found.append(
            {
                "window": window,
                "rounds": ahead.cost.network_calls,
                "calls": ahead.cost.total_calls,
                "work": ahead.cost.total_calls / plain.cost.total_calls,
                "milliseconds": 1e3 * ahead.cost.seconds,
                "same_tokens_as_at_batch_1": float((ahead.tokens == plain.tokens).mean()),
            }
        )
        print(found[-1], flush=True)
    record = {"model": model, "rows": n, "seed": options.seed, "length": family.length}
    keep(options.out, family, {**record, "steps": "inf" if math.isinf(steps) else steps, "runs": found})


if __name__ == "__main__":
    main()
