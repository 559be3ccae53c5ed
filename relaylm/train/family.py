"""Token files in, a family of denoisers out: `train_family`, and how fast a machine trains: `throughput`.

The models of a family are trained one after the other, each a run of its own (`loop`), and written as one folder with
a model card.
"""

from __future__ import annotations

import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from relaylm.errors import UserError
from relaylm.files import write_json
from relaylm.models.denoiser import Architecture, Transformer, build
from relaylm.train import checkpoint
from relaylm.train.corpus import TokenFile
from relaylm.train.objective import Batches
from relaylm.train.recipe import Preset, load_preset, override
from relaylm.train.recipe import presets as presets
from relaylm.train.run import CHECKPOINT, stage_file, train_model
from relaylm.train.step import AVERAGE, MFU_FORMULA, Prefetch, Trainer, peak_tflops, training_flops, world

TWIN = "-twin"

# ------------------------------------------------------------------------------------------------------------ family


def train_family(
    corpus_folder: str | Path,
    out_folder: str | Path,
    preset: str | Path | Preset = "tiny-cpu",
    *,
    device: str | torch.device = "auto",
    name: str | None = None,
    dtype: torch.dtype = torch.bfloat16,
    progress: bool = True,
    force: bool = False,
    command: str | None = None,
    **overrides: Any,
) -> Path:
    """Train a family's models one after the other, and write it to OUT/family; returns that folder.

    `overrides` are fields of `Preset` and `Recipe` (depths, twin, judge, steps, lr, ...). Each model has a folder of
    its own under OUT/models with its checkpoint, metrics and summary; what is finished there is not trained again.
    The resolved settings go to OUT/config.json. What the models were like after each of the recipe's `stages` goes to
    OUT/stages/STEP, families too. The end of the held-out text goes with the family, for whatever asks for such a text.
    A family that is there already and would be the same is left alone, with whatever was added to it or edited.
    """
    from relaylm.models.folder import save_family

    if isinstance(preset, Preset):
        chosen = override(preset, **overrides)
    else:
        chosen = load_preset(preset, **overrides)
    corpus = TokenFile.load(corpus_folder)
    out = Path(out_folder).expanduser()
    jobs = [(chosen.model_name(depth), depth, False, chosen.recipe.seed) for depth in sorted(chosen.depths)]
    if chosen.twin is not None:
        jobs.append((chosen.model_name(chosen.twin) + TWIN, chosen.twin, False, chosen.recipe.seed + 1))
    if chosen.judge is not None:
        jobs.append(("judge", chosen.judge, True, chosen.recipe.seed))
    shapes = {
        key: chosen.architecture(depth, corpus.vocab_size, corpus.mask_id, causal) for key, depth, causal, _ in jobs
    }
    command = command or f"relaylm train --preset {chosen.name}"
    with world(device) as where:
        if where.main:
            settings = {"preset": chosen.to_json(), "corpus": corpus.manifest, "command": command}
            write_json(out / "config.json", {**settings, "torch": torch.__version__})
        summaries = {}
        for key, _, _, seed in jobs:
            summaries[key] = train_model(
                corpus,
                out / "models" / key,
                shapes[key],
                chosen.recipe,
                seed=seed,
                where=where,
                label=key,
                progress=progress,
                force=force,
            )
            if where.size > 1:
                dist.barrier()  # the others must see the finished checkpoint
        target = out / "family"
        if where.main:
            for step in chosen.recipe.stages:
                save_stage(out, step, chosen, {key: shapes[key] for key, *_ in jobs}, corpus, dtype)
            networks = {key: averaged_network(out / "models" / key / CHECKPOINT, shapes[key]) for key, *_ in jobs}
            judge = networks.pop("judge", None)
            twins = {key.removesuffix(TWIN): networks.pop(key) for key in list(networks) if key.endswith(TWIN)}
            save_family(
                target,
                networks,
                corpus.tokenizer,
                length=chosen.length,
                name=name or chosen.name,
                judge=judge,
                twins=twins,
                card=model_card(name or chosen.name, chosen, corpus, summaries, command),
                meta={"preset": chosen.to_json(), "training": summaries, "corpus": corpus.manifest["splits"]},
                heldout=heldout_text(corpus),
                dtype=dtype,
                overwrite=True,
            )
    return target


def heldout_text(corpus: TokenFile, most: int = 1_000_000) -> str:
    """The end of a corpus's held-out part, so many bytes at most; nothing where sentences are padded, since a text
    does not say where each ends. (Where rows lie between marks, the first may be cut short: `bound.held_out` finds the
    whole ones.)"""
    if corpus.manifest.get("packing") == "pad":
        return ""
    text = corpus.tokenizer.decode(corpus.heldout.reshape(-1)[-most:])
    return text.encode()[-most:].decode(errors="ignore")


def save_stage(
    out: Path, step: int, preset: Preset, shapes: dict[str, Architecture], corpus: TokenFile, dtype: torch.dtype
) -> None:
    """A family of the denoisers as they were after so many steps: all of them, or none if one was already past that
    step when stages were asked for."""
    from relaylm.models.folder import save_family

    files = {key: stage_file(out / "models" / key, step) for key, shape in shapes.items() if not shape.causal}
    if lacking := [key for key, file in files.items() if not file.is_file()]:
        print(f"no stage {step}: {', '.join(lacking)} went by without keeping it", file=sys.stderr)
        return
    networks = {key: averaged_network(file, shapes[key]) for key, file in files.items()}
    twins = {key.removesuffix(TWIN): networks.pop(key) for key in list(networks) if key.endswith(TWIN)}
    tokens = step * preset.recipe.batch * preset.length
    save_family(
        out / "stages" / str(step),
        networks,
        corpus.tokenizer,
        length=preset.length,
        name=f"{preset.name} after {step} steps",
        twins=twins,
        meta={"preset": preset.to_json(), "training": {key: {"steps": step, "tokens": tokens} for key in networks}},
        dtype=dtype,
        overwrite=True,
    )


def averaged_network(file: Path, architecture: Architecture) -> Transformer:
    """The network with the averaged weights of a run's checkpoint, in float32."""
    found = checkpoint.load(file)
    if found is None:
        raise UserError(f"there is no checkpoint {file}")
    return build(architecture, {k.removeprefix(AVERAGE): v for k, v in found[0].items() if k.startswith(AVERAGE)})


def model_card(name: str, preset: Preset, corpus: TokenFile, summaries: dict[str, dict[str, Any]], command: str) -> str:
    """README.md of a family: what it is, what it was trained on and how, how good it is, what it is not for."""
    splits, kind = corpus.manifest["splits"], corpus.manifest["tokenizer"]["type"]
    sources = ", ".join(source["name"] for source in corpus.manifest["request"]["sources"])
    unit = {"text8": "character", "bytes": "byte"}.get(kind, "token")
    timed = "with" if preset.time_conditioning else "without"
    lines = [
        "---",
        "library_name: relaylm",
        "tags: [masked-diffusion, text-generation]",
        "---",
        f"# {name}",
        "",
        f"Masked diffusion denoisers of {', '.join(map(str, sorted(preset.depths)))} blocks that share everything else",
        f"(width {preset.width}, {preset.heads} heads, length {preset.length}, vocabulary {corpus.vocab_size}),",
        f"made to take turns along one denoising trajectory. Trained {timed} time conditioning.",
        "",
        f"**Data.** {sources}: {splits['train']['tokens']:,} tokens to train on, {splits['heldout']['tokens']:,} more",
        f"at the end, held out. Licence of the text: {corpus.manifest['licence'] or 'not stated'}.",
        "",
        f"**Command.** `{command}`",
        "",
        f"| model | parameters | steps | tokens | wall time | held-out bits per {unit} (95%) | per source character |",
        "|---|---|---|---|---|---|---|",
    ]
    for key, s in summaries.items():
        held, per_character = s["heldout"], s["bits_per_character"]
        cells = [
            key,
            f"{s['parameters']:,}",
            f"{s['steps']:,}",
            f"{s['tokens']:,}",
            f"{s['wall_seconds']:.0f} s on {s['device']}",
            "-" if held is None else f"{held['bits']:.4f} ({held['low']:.4f} to {held['high']:.4f})",
            "-" if per_character is None else f"{per_character:.4f}",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    lines += [
        "",
        "A denoiser's figure is an upper bound on its negative log-likelihood; the judge's is exact, with the first",
        "token of each row given.",
        "",
        "`heldout.txt`, if it is here, is the end of the held-out text, under the licence of the text.",
        "",
        "**Good for** studying model schedules, tests and demonstrations. **Not for** anything that needs true or safe",
        "text: these are small models of a small corpus, and they repeat its errors and biases.",
        "",
    ]
    return "\n".join(lines)


# -------------------------------------------------------------------------------------------------------- throughput


def throughput(
    preset: str | Path | Preset = "wiki-char",
    *,
    depth: int | None = None,
    vocab_size: int = 28,
    steps: int = 20,
    warm: int = 5,
    causal: bool = False,
    device: str | torch.device = "auto",
    peak: float | None = None,
    **overrides: Any,
) -> dict[str, Any]:
    """Train on random tokens for a moment, and say how fast that was. Everything a real step does is in it: batches
    from the prefetching thread, masks, loss, backward, clipping, AdamW, moving average. `peak` in TFLOP/s overrides
    the data sheet."""
    chosen = override(preset, **overrides) if isinstance(preset, Preset) else load_preset(preset, **overrides)
    shape = chosen.architecture(depth or max(chosen.depths), vocab_size, vocab_size - 1, causal)
    recipe, length = chosen.recipe, chosen.length
    rng = np.random.default_rng(0)
    kind = np.uint8 if vocab_size <= 256 else np.uint16 if vocab_size <= 65536 else np.uint32
    text = rng.integers(0, vocab_size - 1, size=64 * recipe.batch * length // 8 + 2 * length).astype(kind)
    corpus = TokenFile(Path("."), {"vocab_size": vocab_size, "mask_id": vocab_size - 1, "length": None}, text, text[:0])
    with world(device) as where:
        trainer = Trainer(shape, recipe, recipe.seed, where)
        batches = Batches(corpus, recipe, length, recipe.seed, causal, where.rank, where.size)
        pin = where.device.type == "cuda"
        with Prefetch(batches.at, range(warm + steps), pin) as ahead:
            began = time.perf_counter()
            for _ in range(warm):
                trainer.step(ahead.next())
            _wait(where.device)
            warm_seconds = time.perf_counter() - began
            began = time.perf_counter()
            done = [trainer.step(ahead.next()) for _ in range(steps)]
            _wait(where.device)
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


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
