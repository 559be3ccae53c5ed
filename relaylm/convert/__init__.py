"""Public checkpoints in: what a source is, and a family made of it.

A source is a file, a folder, a hub id (`owner/name`, or `owner/name/path/to/file`), or several of these with commas
between them, which then form one family. Formats, by the names that `recognise` gives:

    mdlm        kuleshov-group/mdlm-owt and what `export` writes          lightning   MDLM's and its relatives' .ckpt
    bd3lm       BD3-LM whose blocks are as long as the sequence           sedd        louaaron/sedd-small, -medium
    smdm        nieshen/SMDM, any size                                    llada, dream, masked-lm   by transformers

Nothing is ever unpickled, and no code that comes with a checkpoint is run.
"""

from __future__ import annotations

import json
import re
import secrets
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relaylm.convert.sources import HUB_ID, NOTES, Source, exists, fetch_tokenizer, look
from relaylm.convert.sources import fetch as fetch
from relaylm.convert.sources import recognise as recognise
from relaylm.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    import torch

    from relaylm.convert.tensors import Found
    from relaylm.family import Family
    from relaylm.tokenizer import Tokenizer

# ----------------------------------------------------------------------------------------------------------- loading


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
    from relaylm.convert import sedd
    from relaylm.denoiser import Transformer
    from relaylm.family import Family
    from relaylm.members import pick_device, pick_dtype

    found, reader, missing = look(source, tokenizer, names, revision, _checked(options))
    where = pick_device(device)
    chosen = None if dtype is None else pick_dtype(dtype, where)
    models = {one.name: one.build(where, chosen, fold) for one in found}
    meta = _meta(found, source, missing)
    for one in found:
        model = models[one.name]
        if one.format == "sedd" and isinstance(model, Transformer):
            scaled = bool(one.meta.get("scale_by_sigma", True))
            meta.setdefault("normaliser", {})[one.name] = sedd.probe(model, scaled)
    return Family(
        models,
        found[0].mask_id,
        found[0].vocab_size,
        min(one.length for one in found),
        reader,
        name=found[0].name if len(found) == 1 else _common_name(found),
        device=where,
        meta=meta,
    )


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    from relaylm.convert.tensors import Options

    for key in options:
        if key not in Options.__dataclass_fields__:
            raise UserError(f"{key!r} is not an option for a checkpoint: {', '.join(Options.__dataclass_fields__)} are")
    return {key: value for key, value in options.items() if value is not None}


def _common_name(found: list[Found]) -> str:
    return f"{found[0].format}-{len(found)}"


def _meta(found: list[Found], source: Source | Sequence[Source], missing: list[str]) -> dict[str, Any]:
    sources = [str(source)] if isinstance(source, (str, Path)) else [str(one) for one in source]
    meta: dict[str, Any] = {"format": "+".join(sorted({one.format for one in found})), "sources": [
        item if HUB_ID.fullmatch(item) and not exists(item) else Path(item).name for item in sources
    ]}  # fmt: skip
    eos = sorted({token for one in found for token in one.meta.get("eos_ids", [])})
    details = {one.name: {k: v for k, v in one.meta.items() if k != "eos_ids"} for one in found}
    details = {name: entry for name, entry in details.items() if entry}
    return meta | ({"eos_ids": eos} if eos else {}) | ({"details": details} if details else {}) | {"missing": missing}


def describe(
    source: Source | Sequence[Source],
    revision: str | None = None,
    *,
    tokenizer: Source | Tokenizer | None = None,
    names: Sequence[str] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """What `relaylm info` shows of a checkpoint: the keys of `family.describe`, and the format. Reads names, shapes and
    configurations, not the weights."""
    found, reader, missing = look(source, tokenizer, names, revision, _checked(options))
    found.sort(key=lambda one: one.parameters)
    meta = _meta(found, source, missing)
    return {
        "format": meta["format"],
        "name": found[0].name if len(found) == 1 else _common_name(found),
        "folder": None,
        "length": min(one.length for one in found),
        "vocab_size": found[0].vocab_size,
        "mask_id": found[0].mask_id,
        "eos_ids": meta.get("eos_ids", []),
        "tokenizer": None if reader is None else reader.to_json(),
        "roles": {"light": found[0].name, "heavy": found[-1].name},
        "models": {one.name: one.describe() for one in found},
        "judge": None,
        "twins": {},
        "bytes": sum(one.bytes for one in found),
        "missing": missing,
        "digest": None,
        "meta": meta,
    }


# -------------------------------------------------------------------------------------------------- writing folders


def convert(
    source: Source | Sequence[Source],
    folder: Source,
    *,
    tokenizer: Source | Tokenizer | None = None,
    names: Sequence[str] | None = None,
    revision: str | None = None,
    license: str | None = None,
    overwrite: bool = False,
    dtype: str | torch.dtype | None = None,
    **options: Any,
) -> Path:
    """Write checkpoints as a folder that `Family.load` reads and that can go to the hub as it is, model card included.

    MDLM's relatives become a relaylm family, unfolded, so that nothing is lost. The others (SMDM, and what runs through
    transformers) keep their own files, one folder or file for each model: they are copied, not loaded."""
    from relaylm.convert.tensors import Options
    from relaylm.family_folder import save_family

    given = _checked(options)
    found, reader, missing = look(source, tokenizer, names, revision, given)
    meta = _meta(found, source, missing) | {"license": license or _licence(found) or "unknown"}
    length = min(one.length for one in found)
    target = Path(folder).expanduser()
    if all(one.storable for one in found):
        import torch

        models = {one.name: one.build(torch.device("cpu"), None, False) for one in found}
        if normalisers := _normalisers(found, models):
            meta["normaliser"] = normalisers
        return save_family(
            target, models, reader, length=length, name=target.name, dtype=dtype, meta=meta, overwrite=overwrite,
            card=_card(target.name, found, meta),
        )  # fmt: skip
    if dtype is not None:
        raise UserError(f"{found[0].format} checkpoints are copied as they are: dtype is chosen when they are loaded")

    def fill(new: Path) -> None:
        for one in found:
            folder_like = len(one.files) > 1
            (new / one.name).mkdir() if folder_like else None
            for file in one.files:
                suffix = ".safetensors" if file.suffix == ".safetensors" else file.suffix
                shutil.copyfile(file, new / one.name / file.name if folder_like else new / f"{one.name}{suffix}")
        for extra, data in ({} if reader is None else reader.files()).items():
            (new / extra).write_bytes(data)
        said = Options(**given).said()
        (new / NOTES).write_text(json.dumps({"format": meta["format"], "options": said, "meta": meta}, indent=1) + "\n")
        (new / "README.md").write_text(_card(target.name, found, meta), encoding="utf-8")

    return _write_folder(target, fill, overwrite, NOTES)


def export(
    family: Family | Source, folder: Source, *, models: Sequence[str] | None = None, license: str | None = None,
    overwrite: bool = False,
) -> Path:  # fmt: skip
    """Write a family's networks in MDLM's published layout (config.json, model.safetensors), so that MDLM's own code
    computes the same function: in the folder itself for one model, else in a folder for each, with tokenizer.json."""
    from relaylm.convert import mdlm
    from relaylm.denoiser import Transformer
    from relaylm.family import Family
    from relaylm.tokenizer import portable_json

    own = family if isinstance(family, Family) else Family.load(family)
    chosen = list(models or own.names)
    own.check_names(chosen)
    for name in chosen:
        if not isinstance(own.models[name], Transformer):
            raise UserError(f"{name} is not a network of MDLM's kind, so it has no place in MDLM's layout")
    target = Path(folder).expanduser()
    licence = license or str(own.meta.get("license", "unknown"))
    reader = None if own.tokenizer is None else portable_json(own.tokenizer)

    def fill(new: Path) -> None:
        for name in chosen:
            place = new if len(chosen) == 1 else new / name
            model = own.models[name]
            assert isinstance(model, Transformer)
            mdlm.export(model, place)
            if reader is not None:
                (place / "tokenizer.json").write_bytes(reader)
        rows = "".join(f"- `{name}`\n" for name in chosen)
        text = (
            f"{_front(licence, 'mdlm')}\n# {target.name}\n\nMasked diffusion language models in MDLM's layout, written "
            f"by relaylm.\n\n{rows}\nLength {own.length}, vocabulary {own.vocab_size} with the mask ({own.mask_id}).\n"
        )
        (new / "README.md").write_text(text, encoding="utf-8")

    return _write_folder(target, fill, overwrite, "README.md")


def _normalisers(found: list[Found], models: dict[str, Any]) -> dict[str, Any]:
    from relaylm.convert import sedd

    return {
        one.name: sedd.probe(models[one.name], bool(one.meta.get("scale_by_sigma", True)))
        for one in found
        if one.format == "sedd"
    }


def _write_folder(target: Path, fill: Any, overwrite: bool, mark: str) -> Path:
    """All of a folder or nothing: written beside its place, then renamed into it."""
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        if not overwrite:
            raise UserError(f"{target} is not empty: choose another folder, or --overwrite (overwrite=True)")
        if not (target / mark).is_file():
            raise UserError(f"{target} was not written by relaylm (it has no {mark}), so it is not overwritten")
    new = target.parent / f".{target.name}.new-{secrets.token_hex(4)}"
    old = target.parent / f".{target.name}.old-{secrets.token_hex(4)}"
    try:
        new.mkdir(parents=True)
        fill(new)
        if target.exists():
            target.rename(old)
        new.rename(target)
    except OSError as error:
        if old.exists() and not target.exists():
            old.rename(target)
        raise UserError(f"cannot write {target}: {error.strerror or error}") from None
    finally:
        shutil.rmtree(new, ignore_errors=True)
    shutil.rmtree(old, ignore_errors=True)
    return target


def _licence(found: list[Found]) -> str | None:
    """The licence in the front matter of a source's own model card, where it has one."""
    for one in found:
        card = (one.files[0].parent if one.files else Path()) / "README.md"
        if card.is_file():
            text = card.read_text(encoding="utf-8", errors="replace")
            match = re.match(r"---\n(?:.*\n)*?license:\s*[\"']?([\w.+-]+)", text)
            if match:
                return match.group(1)
    return None


def _front(licence: str, library: str) -> str:
    front = f"---\nlibrary_name: {library}\nlicense: {json.dumps(licence)}\npipeline_tag: text-generation\n"
    return front + "tags:\n- masked-diffusion\n- diffusion-language-model\n- model-schedule\n---\n"


def _card(title: str, found: list[Found], meta: dict[str, Any]) -> str:
    rows = "".join(f"| {one.name} | {one.format} | {one.depth} | {one.width} | {one.parameters:,} |\n" for one in found)
    first = found[0]
    lacks = "".join(f"- {note}\n" for note in meta["missing"])
    return (
        f"{_front(meta['license'], 'relaylm')}\n# {title}\n\nConverted by relaylm from {', '.join(meta['sources'])}.\n"
        f"Length {min(one.length for one in found)}, vocabulary {first.vocab_size} with the mask ({first.mask_id}).\n\n"
        f"| model | format | blocks | width | parameters |\n|---|---|---|---|---|\n{rows}\n"
        f"```\nrelaylm sample --family {title}\n```\n" + (f"\nMissing:\n{lacks}" if lacks else "")
    )


# ---------------------------------------------------------------------------------------------------- the end of text


def until_eos(tokens: np.ndarray | Sequence[Sequence[int]], eos_ids: Iterable[int], start: int = 0) -> list[list[int]]:
    """Each row up to, and without, the first token that ends a text, at `start` (the end of the prompt) or later."""
    ends = {int(token) for token in eos_ids}
    rows = []
    for row in tokens:
        ids = [int(token) for token in row]
        end = next((i for i, token in enumerate(ids) if i >= start and token in ends), len(ids))
        rows.append(ids[:end])
    return rows


def texts(family: Family, tokens: np.ndarray | Sequence[Sequence[int]], start: int = 0) -> list[str]:
    """The texts of samples from `start` on, each cut at its end: the family's `eos_ids`, else the tokenizer's."""
    if family.tokenizer is None:
        raise UserError("this family has no tokenizer, so its tokens have no text")
    own = family.tokenizer.eos_id
    ends = family.meta.get("eos_ids") or ([] if own is None else [own])
    return [family.tokenizer.decode(row[start:]) for row in until_eos(tokens, ends, start)]


def chat_prompt(folder: Source, messages: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
    """A conversation as the text that an instruction-tuned model continues; see `hf.chat_prompt`."""
    from relaylm.convert import hf

    place = Path(folder)
    if not exists(folder) and isinstance(folder, str) and HUB_ID.fullmatch(folder):
        place = fetch_tokenizer(folder)
    return hf.chat_prompt(place, messages, add_generation_prompt)
