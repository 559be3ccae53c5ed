"""How fast a machine trains: `throughput`, behind results/train/throughput.json and wiki-bpe-throughput.json.

python -m relaylm.studies.record.throughput PRESET OUT.json [--depth 12] [--vocab-size 8192] [--steps 50]
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch

from relaylm.files import write_json
from relaylm.measure.provenance import how_made
from relaylm.measure.timing import wait
from relaylm.models.family import pick_device
from relaylm.studies.record.common import command
from relaylm.train.corpus import TokenFile, token_dtype
from relaylm.train.objective import Batches
from relaylm.train.recipe import Preset, load_preset, override
from relaylm.train.step import MFU_FORMULA, Trainer, peak_tflops, prefetched, training_flops, world


def throughput(
    preset: str | Path | Preset = "wiki-char",
    *,
    depth: int | None = None,
    vocab_size: int = 28,
    steps: int = 20,
    warm: int = 5,
    device: str | torch.device = "auto",
    peak: float | None = None,
    **overrides: Any,
) -> dict[str, Any]:
    """Train on random tokens for a moment, and say how fast that was. Everything a real step does is in it: batches
    from the prefetching thread, masks, loss, backward, clipping, AdamW, moving average. `peak` in TFLOP/s overrides
    the data sheet."""
    chosen = override(preset, **overrides) if isinstance(preset, Preset) else load_preset(preset, **overrides)
    shape = chosen.architecture(depth or max(chosen.depths), vocab_size, vocab_size - 1)
    recipe, length = chosen.recipe, chosen.length
    tokens = 64 * recipe.batch * length // 8 + 2 * length
    text = np.random.default_rng(0).integers(0, vocab_size - 1, size=tokens).astype(token_dtype(vocab_size))
    corpus = TokenFile(Path("."), {"vocab_size": vocab_size, "mask_id": vocab_size - 1, "length": None}, text, text[:0])
    with world(device) as where:
        trainer = Trainer(shape, recipe, recipe.seed, where)
        batches = Batches(corpus, recipe, length, recipe.seed, False, where.rank, where.size)
        with closing(prefetched(batches.at, range(warm + steps), where.device.type == "cuda")) as ahead:
            began = time.perf_counter()
            for _ in range(warm):
                trainer.step(next(ahead))
            wait(where.device)
            warm_seconds = time.perf_counter() - began
            began = time.perf_counter()
            done = [trainer.step(next(ahead)) for _ in range(steps)]
            wait(where.device)
            seconds = time.perf_counter() - began
        table = torch.stack(done).cpu()
        rows_per_s = steps * recipe.batch / seconds
        peak = peak or peak_tflops(where.device)
        flops = training_flops(shape, length)
        on_cuda = where.device.type == "cuda"
        return {
            "preset": chosen.name,
            "architecture": shape.to_json(),
            "recipe": asdict(recipe),
            "device": torch.cuda.get_device_name(where.device) if on_cuda else "cpu",
            "processes": where.size,
            "torch": torch.__version__,
            "precision": trainer.precision,
            "steps": steps,
            "seconds": seconds,
            "seconds_per_step": seconds / steps,
            "warm_seconds": warm_seconds,
            "chars_per_s": rows_per_s * length,
            "masked_per_s": float(table[:, 2].sum()) * where.size / seconds,
            "flops_per_row": flops,
            "tflops_per_s": rows_per_s * flops / 1e12,
            "mfu": None if peak is None else rows_per_s * flops / (peak * 1e12 * where.size),
            "mfu_formula": MFU_FORMULA,
            "peak_tflops": peak,
            "peak_memory_gib": torch.cuda.max_memory_allocated(where.device) / 2**30 if on_cuda else None,
            "loss": float(table[-1, 0]) * where.size,
        }


def main() -> None:
    """The command: the heavy model of a preset, on random tokens."""
    options = command(__doc__, "preset out", depth=int, vocab_size=28, steps=50)
    found = throughput(options.preset, depth=options.depth, vocab_size=options.vocab_size, steps=options.steps)
    write_json(options.out, {**found, "seed": 0, **how_made(pick_device("auto"))})
    print({key: found[key] for key in ("chars_per_s", "mfu", "seconds_per_step")})


if __name__ == "__main__":
    main()
