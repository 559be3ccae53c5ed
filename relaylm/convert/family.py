"""Checkpoints as families: loaded in place, described, or written as a folder."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from relaylm.convert import sedd
from relaylm.convert.sources import NOTES, Checkpoints, Source, look, recognise
from relaylm.convert.tensors import Found, Options
from relaylm.files import expand, write_folder, write_json
from relaylm.models.about import describe as describe_family
from relaylm.models.denoiser import Denoiser, Transformer
from relaylm.models.family import Family, load_family, locate, pick_device, pick_dtype
from relaylm.models.folder import front_matter, save_family
from relaylm.models.tokenizer import Tokenizer


def open_family(
    source: Source,
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    revision: str | None = None,
    narrow: bool = False,
) -> Family:
    """A family from any source: `Family.load` has the arguments."""
    if recognise(source, revision, hub=False) is None:  # not files, a list or a folder of checkpoints
        folder = locate(source, revision)
        if recognise(folder) is None:  # nor a checkpoint on the hub
            return load_family(folder, device, dtype, narrow)
    family = load(source, device, dtype, revision)
    for model in family.models.values():
        if isinstance(model, Transformer):
            model.narrow = narrow
    return family


def load(
    source: Source | Sequence[Source],
    device: str | torch.device = "cpu",
    dtype: str | torch.dtype | None = None,
    revision: str | None = None,
    *,
    tokenizer: Source | Tokenizer | None = None,
    names: Sequence[str] | None = None,
    fold: bool = True,
    **options: Any,
) -> Family:
    """A family of public checkpoints, in place. `options` are those of `tensors.Options`: mask_id, length, heads,
    time_conditioning, ema, device_map. `dtype` as in `Family.load`; by transformers, None keeps the stored type."""
    found = look(source, tokenizer, names, revision, Options.checked(options))
    where = pick_device(device)
    models, meta = _built(found, where, None if dtype is None else pick_dtype(dtype, where), fold)
    shape = found.models[0].shape
    numbers = shape.mask_id, shape.vocab_size, found.length
    return Family(models, *numbers, found.tokenizer, name=found.name, device=where, meta=meta)


def _built(
    found: Checkpoints, device: torch.device, dtype: torch.dtype | None, fold: bool
) -> tuple[dict[str, Denoiser], dict[str, Any]]:
    """The models with their weights, and what is known of them: for SEDD, how far its score is from normalised."""
    models = {one.name: one.build(device, dtype, fold) for one in found.models}
    normalisers = {
        one.name: sedd.probe(model, bool(one.meta["scale_by_sigma"]))
        for one in found.models
        if one.format == "sedd" and isinstance(model := models[one.name], Transformer)
    }
    return models, found.meta | ({"normaliser": normalisers} if normalisers else {})


def describe(
    source: Source | Sequence[Source],
    revision: str | None = None,
    *,
    tokenizer: Source | Tokenizer | None = None,
    names: Sequence[str] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """What `relaylm info` shows: the keys of `models.family.describe`, and the format for a checkpoint. Reads names,
    shapes and configurations, not the weights."""
    if isinstance(source, (str, Path)) and recognise(source, revision) is None:
        return describe_family(source)
    found = look(source, tokenizer, names, revision, Options.checked(options))
    models = sorted(found.models, key=lambda one: one.parameters)
    return {
        "format": found.meta["format"],
        "name": models[0].name if len(models) == 1 else f"{models[0].format}-{len(models)}",
        "folder": None,
        "length": found.length,
        "vocab_size": models[0].shape.vocab_size,
        "mask_id": models[0].shape.mask_id,
        "eos_ids": found.meta.get("eos_ids", []),
        "tokenizer": None if found.tokenizer is None else found.tokenizer.to_json(),
        "roles": {"light": models[0].name, "heavy": models[-1].name},
        "models": {one.name: one.describe() for one in models},
        "judge": None,
        "twins": {},
        "bytes": sum(one.bytes for one in models),
        "missing": found.meta["missing"],
        "digest": None,
        "meta": found.meta,
    }


def convert(
    source: Source | Sequence[Source],
    folder: Source,
    *,
    tokenizer: Source | Tokenizer | None = None,
    names: Sequence[str] | None = None,
    revision: str | None = None,
    license: str | None = None,
    overwrite: bool = False,
    **options: Any,
) -> Path:
    """Write checkpoints as a folder that `Family.load` reads and that can go to the hub as it is, model card included.

    MDLM's relatives become a relaylm family, unfolded, so that nothing is lost. The others (SMDM, and what runs through
    transformers) keep their own files, one folder or file for each model: they are copied, not loaded."""
    given = Options.checked(options)
    found = look(source, tokenizer, names, revision, given)
    found.meta["license"] = license or _licence(found.models) or "unknown"
    target = expand(folder)
    card = _card(target.name, found)
    if all(one.storable for one in found.models):
        models, meta = _built(found, torch.device("cpu"), None, False)
        return save_family(
            target,
            models,
            found.tokenizer,
            length=found.length,
            name=target.name,
            meta=meta,
            overwrite=overwrite,
            card=card,
        )

    def fill(new: Path) -> None:
        for one in found.models:
            place = new if len(one.files) == 1 else new / one.name
            place.mkdir(exist_ok=True)
            for file in one.files:
                shutil.copyfile(file, place / (file.name if place != new else f"{one.name}{file.suffix}"))
        for extra, data in ({} if found.tokenizer is None else found.tokenizer.files()).items():
            (new / extra).write_bytes(data)
        remembered = {key: value for key, value in given.items() if key not in ("ema", "device_map")}
        if block := getattr(found.models[0].shape, "block_length", 0):
            remembered["block_length"] = block  # which a model's name may have said
        write_json(new / NOTES, {"format": found.meta["format"], "options": remembered, "meta": found.meta})
        (new / "README.md").write_text(card, encoding="utf-8")

    return write_folder(target, fill, overwrite)


def _licence(found: list[Found]) -> str | None:
    """The licence in the front matter of a source's own model card, where it has one."""
    for one in found:
        card = one.files[0].parent / "README.md"
        if card.is_file():
            front = card.read_text(encoding="utf-8", errors="replace").split("\n---", 1)[0]
            if match := re.match(r"---\n(?:.*\n)*?license:[ \t]*[\"']?(\w[\w.+-]*)", front):
                return match.group(1)
    return None


def _card(title: str, found: Checkpoints) -> str:
    meta, shape = found.meta, found.models[0].shape
    rows = "".join(
        f"| {one.name} | {one.format} | {one.shape.depth} | {one.shape.width} | {one.parameters:,} |\n"
        for one in found.models
    )
    lacks = "".join(f"- {note}\n" for note in meta["missing"])
    return (
        f"{front_matter(meta['license'])}\n# {title}\n\nConverted by relaylm from {', '.join(meta['sources'])}.\n"
        f"Length {found.length}, vocabulary {shape.vocab_size} with the mask ({shape.mask_id}).\n\n"
        f"| model | format | blocks | width | parameters |\n|---|---|---|---|---|\n{rows}\n"
        f"```\nrelaylm sample --family {title}\n```\n" + (f"\nMissing:\n{lacks}" if lacks else "")
    )
