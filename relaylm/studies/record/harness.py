"""Schedules side by side in lm-evaluation-harness, on the tasks under examples/lm-eval.

    python -m relaylm.studies.record.harness wiki-bpe examples/lm-eval results/lm-eval/wiki-bpe.json [--limit 40]

OUT.json has lm_eval's scores with its standard errors for every schedule, and the standard errors of the likelihood
estimates themselves. It is written after each schedule.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np

from relaylm.harness import model_class
from relaylm.studies.record.common import command, keep

SCHEDULES: tuple[dict[str, Any], ...] = (
    {"schedule": "heavy", "steps": 512},
    {"schedule": "light", "steps": 512},
    {"schedule": "sandwich:25%", "steps": 512},
    {"schedule": "heavy", "spacing": 16},
)


def main() -> None:
    """Measure and write."""
    limit = (int, "documents of each task (default: all)")
    calls = (8, "network calls for one likelihood, about")
    options = command(__doc__, "family tasks out", limit=limit, calls=calls, device="auto")

    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=options.tasks, include_defaults=False)
    found: list[dict[str, Any]] = []
    for chosen in SCHEDULES:
        began = time.perf_counter()
        model = model_class()(family=options.family, calls=options.calls, device=options.device, **chosen)
        names = list(manager.all_tasks)
        got = simple_evaluate(model, tasks=names, task_manager=manager, limit=options.limit, log_samples=False)
        errors = [error for error in model.scheduled.standard_errors if error > 0]
        scores = {name: {k: v for k, v in got["results"][name].items() if "," in k} for name in sorted(got["results"])}
        found.append(
            {
                **chosen,
                "scores": scores,
                "samples": {name: entry["effective"] for name, entry in got["n-samples"].items()},
                "standard_error_median": float(np.median(errors)),
                "seconds": time.perf_counter() - began,
            }
        )
        print(found[-1], flush=True)
        record = {"seed": model.scheduled.seed, "calls": options.calls, "limit": options.limit}
        record |= {"lm_eval": got["lm_eval_version"], "schedules": found}
        keep(options.out, model.scheduled.family, record)


if __name__ == "__main__":
    main()
