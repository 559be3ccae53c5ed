"""Token files in, a family of denoisers out.

The models of a family are trained one after the other, each a run of its own (`run`), and written as one folder with a
model card.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from relaylm.errors import UserError
from relaylm.files import expand, write_json
from relaylm.models.denoiser import Architecture, Transformer, build
from relaylm.models.folder import check_name, save_family
from relaylm.models.tokenizer import check_unicode
from relaylm.train import checkpoint
from relaylm.train.corpus import TokenFile
from relaylm.train.recipe import Preset, load_preset, override
from relaylm.train.report import measured_pairs
from relaylm.train.run import CHECKPOINT, check_run, stage_file, train_model
from relaylm.train.step import AVERAGE, training_flops, world

TWIN = "-twin"


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
    pairs: bool = False,
    **overrides: Any,
) -> Path:
    """Train a family's models one after the other, and write it to OUT/family; returns that folder.

    `overrides` are fields of `Preset` and `Recipe` (depths, twin, judge, steps, lr, ...). Each model has a folder of
    its own under OUT/models with its checkpoint, metrics and summary; what is finished there is not trained again.
    The resolved settings go to OUT/config.json. What the models were like after each of the recipe's `stages` goes to
    OUT/stages/STEP, families too. The end of the held-out text goes with the family, for whatever asks for such a text.
    With `pairs` the heavy model's table of pairs is measured on held-out text, and the family samples at the spacing
    that follows. A family that is there already and would be the same is left alone, with whatever was added to it or
    edited.
    """
    chosen = override(preset, **overrides) if isinstance(preset, Preset) else load_preset(preset, **overrides)
    check_unicode(name or "")
    corpus, out, recipe = TokenFile.load(corpus_folder), expand(out_folder), chosen.recipe
    jobs = {chosen.model_name(depth): (depth, False, recipe.seed) for depth in sorted(chosen.depths)}
    if chosen.twin is not None:
        jobs[chosen.model_name(chosen.twin) + TWIN] = chosen.twin, False, recipe.seed + 1
    if chosen.judge is not None:
        jobs["judge"] = chosen.judge, True, recipe.seed
    shapes = {
        key: chosen.architecture(depth, corpus.vocab_size, corpus.mask_id, causal)
        for key, (depth, causal, _) in jobs.items()
    }
    command, title = command or f"relaylm train --preset {chosen.name}", name or chosen.name
    for depth in chosen.depths:
        check_name(chosen.model_name(depth))
        if chosen.model_name(depth).endswith(TWIN):
            raise UserError(f"names must not end with {TWIN}, which marks the second model of a depth")
    with world(device) as where:
        for key, (_, _, seed) in jobs.items():  # all of them, before the first is trained
            check_run(corpus, out / "models" / key, shapes[key], recipe, seed, where, force)
        if where.main:
            settings = {"preset": chosen.to_json(), "corpus": corpus.manifest, "command": command}
            write_json(out / "config.json", {**settings, "torch": torch.__version__})
        summaries: dict[str, dict[str, Any]] = {}
        same: dict[str, Any] = {"where": where, "progress": progress, "force": force}
        left = {key: recipe.steps * recipe.batch * training_flops(shape, shape.length) for key, shape in shapes.items()}
        for key, (_, _, seed) in jobs.items():
            runs = out / "models" / key
            del left[key]
            same["ahead"] = sum(left.values())
            summaries[key] = train_model(corpus, runs, shapes[key], recipe, seed=seed, label=key, **same)
            if where.size > 1:
                dist.barrier()  # the others must see the finished checkpoint
        if where.main:
            for step in recipe.stages:
                _save_stage(out, step, chosen, shapes, corpus, dtype)
            files = {key: out / "models" / key / CHECKPOINT for key in jobs}
            about = {"preset": chosen.to_json(), "training": summaries, "corpus": corpus.manifest["splits"]}
            card = model_card(title, chosen, corpus, summaries, command)
            more: dict[str, Any] = {"card": card, "heldout": heldout_text(corpus)}
            heavy = chosen.model_name(max(chosen.depths))
            if pairs:
                network = averaged_network(files[heavy], shapes[heavy])
                found = measured_pairs(out, network, corpus, summaries[heavy], where.device, progress)
                if found is not None:
                    about["spacing"], more["pairs"] = found["spacing"], found["table"]
            _save(out / "family", title, files, shapes, corpus, chosen.length, about, dtype, **more)
    return out / "family"


def _save(
    folder: Path,
    name: str,
    files: dict[str, Path],
    shapes: dict[str, Architecture],
    corpus: TokenFile,
    length: int,
    meta: dict[str, Any],
    dtype: torch.dtype,
    **options: Any,
) -> None:
    """A family of the averaged weights in checkpoints."""
    networks = {key: averaged_network(file, shapes[key]) for key, file in files.items()}
    options["judge"] = networks.pop("judge", None)
    options["twins"] = {key.removesuffix(TWIN): networks.pop(key) for key in list(networks) if key.endswith(TWIN)}
    options |= {"length": length, "name": name, "meta": meta, "dtype": dtype}
    save_family(folder, networks, corpus.tokenizer, overwrite=True, **options)


def _save_stage(
    out: Path, step: int, preset: Preset, shapes: dict[str, Architecture], corpus: TokenFile, dtype: torch.dtype
) -> None:
    """A family of the denoisers as they were after so many steps: all of them, or none if one was already past that
    step when stages were asked for."""
    files = {key: stage_file(out / "models" / key, step) for key, shape in shapes.items() if not shape.causal}
    if lacking := [key for key, file in files.items() if not file.is_file()]:
        print(f"no stage {step}: {', '.join(lacking)} went by without keeping it", file=sys.stderr)
        return
    seen = {"steps": step, "tokens": step * preset.recipe.batch * preset.length}
    training = {key: seen for key in files if not key.endswith(TWIN)}
    about = {"preset": preset.to_json(), "training": training}
    name = f"{preset.name} after {step} steps"
    _save(out / "stages" / str(step), name, files, shapes, corpus, preset.length, about, dtype)


def heldout_text(corpus: TokenFile, most: int = 1_000_000) -> str:
    """The end of a corpus's held-out part, so many bytes at most; nothing where sentences are padded, since a text
    does not say where each ends. (Where rows lie between marks, the first may be cut short: `bound.held_out` finds the
    whole ones.)"""
    if corpus.manifest.get("packing") == "pad":
        return ""
    text = corpus.tokenizer.decode(corpus.heldout.reshape(-1)[-most:])
    return text.encode()[-most:].decode(errors="ignore")


def averaged_network(file: Path, architecture: Architecture) -> Transformer:
    """The network with the averaged weights of a run's checkpoint, in float32."""
    found = checkpoint.load(file)
    if found is None:
        raise UserError(f"there is no checkpoint {file}")
    return build(architecture, {k.removeprefix(AVERAGE): v for k, v in found[0].items() if k.startswith(AVERAGE)})


CARD = """\
---
library_name: relaylm
license: unknown
pipeline_tag: text-generation
tags: [masked-diffusion, diffusion-language-model, model-schedule]
---
# {name}

Masked diffusion denoisers of {depths} blocks that share everything else
(width {p.width}, {p.heads} heads, length {p.length}, vocabulary {vocabulary}),
made to take turns along one denoising trajectory. Trained {timed} time conditioning.

**Data.** {sources}: {train:,} tokens to train on, {heldout:,} more
at the end, held out. Licence of the text: {licence}.

**Command.** `{command}`

| model | parameters | steps | tokens | wall time | held-out bits per {unit} (95%) | per source character |
|---|---|---|---|---|---|---|
{rows}

A denoiser's figure is an upper bound on its negative log-likelihood; the judge's is exact, with the first
token of each row given.

`heldout.txt`, if it is here, is the end of the held-out text, under the licence of the text.

**Good for** studying model schedules, tests and demonstrations. **Not for** anything that needs true or safe
text: these are small models of a small corpus, and they repeat its errors and biases.
"""


def model_card(name: str, preset: Preset, corpus: TokenFile, summaries: dict[str, dict[str, Any]], command: str) -> str:
    """README.md of a family: what it is, what it was trained on and how, how good it is, what it is not for."""
    manifest = corpus.manifest
    rows = []
    for key, s in summaries.items():
        held, per_character = s["heldout"], s["bits_per_character"]
        bits = "-" if held is None else f"{held['bits']:.4f}"
        if held is not None and held["rows"] > 1:  # one row has no interval
            bits += f" ({held['low']:.4f} to {held['high']:.4f})"
        cells = [key, f"{s['parameters']:,}", f"{s['steps']:,}", f"{s['tokens']:,}"]
        cells += [f"{s['wall_seconds']:.0f} s on {s['device']}", bits]
        rows.append(f"| {' | '.join(cells)} | {'-' if per_character is None else f'{per_character:.4f}'} |")
    return CARD.format(
        name=name,
        p=preset,
        depths=", ".join(map(str, sorted(preset.depths))),
        vocabulary=corpus.vocab_size,
        timed="with" if preset.time_conditioning else "without",
        sources=", ".join(source["name"] for source in manifest["request"]["sources"]),
        train=corpus.tokens("train"),
        heldout=corpus.tokens("heldout"),
        licence=manifest["licence"] or "not stated",
        command=command,
        unit={"text8": "character", "bytes": "byte"}.get(manifest["tokenizer"]["type"], "token"),
        rows="\n".join(rows),
    )
