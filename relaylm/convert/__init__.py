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

from relaylm.errors import UserError

if TYPE_CHECKING:
    import numpy as np
    import torch

    from relaylm.convert.tensors import Found, Options
    from relaylm.family import Family
    from relaylm.tokenizer import Tokenizer

Source = str | Path
HUB_FILES = ("*.safetensors", "*.json", "*.txt", "*.jinja", "README.md")
FORMATS = "MDLM, BD3-LM, SEDD, SMDM, LLaDA, Dream, masked LMs"
NOTES = "convert.json"  # what a converted folder remembers: the options that were given
PICKLES = (".ckpt", ".pt", ".pth", ".bin")
_GPT2 = "the tokenizer: give GPT-2's tokenizer.json (hub id openai-community/gpt2)"
_LLAMA = "the tokenizer: give TinyLlama's tokenizer.json (hub id TinyLlama/TinyLlama_v1.1)"
HINTS = {"mdlm": _GPT2, "bd3lm": _GPT2, "lightning": _GPT2, "sedd": _GPT2, "smdm": _LLAMA}

# owner/name, or a file of weights in it
_hub_re = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?:(?:/[\w.-]+)*/[\w.-]+\.(?:safetensors|ckpt|pth?|bin))?")


# ------------------------------------------------------------------------------------------------------- recognising


def recognise(source: Source, revision: str | None = None, hub: bool = True) -> str | None:
    """The format of a source, or None for what is not a public checkpoint (a relaylm family among others). A hub id is
    fetched, or found in the cache, unless `hub` is off; a file that is hostile or cut short is a UserError."""
    if not hub and str(source).count("/") == 1 and _hub_re.fullmatch(str(source)) and not _exists(source):
        return None
    try:
        parts = _parts(source, revision)
    except _Unknown:
        return None
    kinds = {_kind(path) for _, path in parts}
    return None if not kinds or None in kinds else "+".join(sorted(map(str, kinds)))


def _exists(source: Source) -> bool:
    try:
        return Path(source).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # too long, a null in it, an unknown user: no such path
        return False


class _Unknown(UserError):
    """The source is not a checkpoint; somebody else may know what it is."""


def _parts(source: Source | Sequence[Source], revision: str | None = None) -> list[tuple[str, Path]]:
    """The single checkpoints that a source stands for, each with the name its model gets."""
    from relaylm.family import _backup

    if not isinstance(source, (str, Path)):
        return [part for one in source for part in _parts(one, revision)]
    text = str(source)
    if not _exists(source):
        path = Path(source)
        if _exists(_backup(path)):  # a relaylm family whose saving was killed between its two renames
            raise _Unknown(f"{text!r} is a relaylm family")
        if "," in text:
            return [part for one in text.split(",") if one.strip() for part in _parts(one.strip(), revision)]
        if not (isinstance(source, str) and _hub_re.fullmatch(text)):
            raise _Unknown(f"there is no file, folder or hub id {text!r}")
        path = fetch(text, revision)
        name = "/".join(text.split("/")[1:2]) if text.count("/") == 1 else Path(text).stem
    else:
        path = Path(source).expanduser()
        name = path.resolve().name if path.is_dir() else path.stem
        if path.name in ("model.safetensors", "pytorch_model.bin") and (path.parent / "config.json").is_file():
            path, name = path.parent, path.resolve().parent.name
    if path.is_file() or (path / "config.json").is_file() or (path / "family.json").is_file():
        return [(name, path)]
    inside = [file for file in sorted(path.iterdir()) if file.suffix in (".safetensors", ".ckpt", ".pth")]
    inside = [file for file in inside if file.is_file()] or sorted(
        folder for folder in path.iterdir() if (folder / "config.json").is_file()
    )
    if not inside:
        inside = sorted(file for file in path.iterdir() if file.suffix in PICKLES and file.is_file())
    if not inside:
        raise _Unknown(f"{text!r} holds no checkpoint that relaylm knows")
    return [(file.name if file.is_dir() else file.stem, file) for file in inside]


def _kind(path: Path) -> str | None:
    from relaylm.convert import hf, sedd
    from relaylm.convert.tensors import read_json

    if path.is_dir():
        if (path / "family.json").is_file() or not (path / "config.json").is_file():
            return None
        config = read_json(path / "config.json")
        if config.get("model_type") in ("mdlm", "bd3lm"):
            return str(config["model_type"])
        return "sedd" if sedd.is_config(config) else hf.kind_of(config)
    if path.suffix == ".safetensors":
        from relaylm.convert.tensors import from_safetensors

        return _kind_of_names(from_safetensors([path]))
    if path.suffix in PICKLES:
        from relaylm.convert import pickles

        data = pickles.read(path)
        if not isinstance(data, dict):
            raise UserError(f"{path} does not hold a checkpoint but {data!r}"[:300])
        state = data.get("state_dict")
        if isinstance(state, dict) and any(str(key).startswith("backbone.") for key in state):
            return "lightning"
        for key in ("state_dict", "model"):
            data = data[key] if isinstance(data.get(key), dict) else data
        kind = _kind_of_names(data)
        if kind is None:
            raise UserError(f"{path} holds no checkpoint that relaylm knows: it has no tensors of MDLM, SEDD or SMDM")
        return kind
    return None


def _kind_of_names(names: Iterable[Any]) -> str | None:
    known = {str(name) for name in names}
    if any(name.endswith("transformer.h.0.attn.attn.weight") or name.startswith("transformer.h.") for name in known):
        return "smdm"
    return "mdlm" if any(name.endswith("vocab_embed.embedding") for name in known) else None


def _open(name: str, path: Path, options: Options, tokenizer: Tokenizer | None) -> Found:
    """Look at one checkpoint: everything but the weights."""
    from relaylm.convert import hf, mdlm, sedd, smdm

    kind = _kind(path)
    if kind == "lightning":
        return mdlm.open_checkpoint(path, name, options)
    if kind == "smdm":
        return smdm.open_file(path, name, options)
    if kind == "sedd":
        return sedd.open_folder(path, name, options)
    if kind in ("mdlm", "bd3lm"):
        return mdlm.open_folder(path, name, options) if path.is_dir() else mdlm.open_file(path, name, options)
    if kind in ("llada", "dream", "masked-lm"):
        return hf.open_folder(path, name, options, None if tokenizer is None else tokenizer.mask_id)
    raise UserError(f"{path} holds no checkpoint that relaylm knows ({FORMATS})")


def fetch(name: str, revision: str | None = None) -> Path:
    """A hub repository, or a file or folder in it, from the cache or the network: safetensors, JSON and text alone.
    huggingface_hub's own settings hold (HF_HOME, HF_HUB_OFFLINE)."""
    owner, repository, *inside = name.split("/")
    if (owner, repository) == ("nieshen", "SMDM") and not inside:
        raise UserError(
            "nieshen/SMDM holds 434 GB: name a file of it, such as "
            "nieshen/SMDM/mdm_safetensors/mdm-170M-100e18.safetensors"
        )
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(
            f"there is no file or folder {name!r}, and fetching it from the Hugging Face hub needs "
            f"`pip install relaylm[hub]`"
        ) from None
    place = "/".join(inside)
    patterns = list(HUB_FILES)
    if inside:
        if Path(place).suffix in PICKLES:
            raise UserError(f"{name}: only safetensors are fetched from the hub, not {Path(place).suffix} files")
        patterns = [place, "tokenizer.json", "tokenizer_config.json"]
    try:
        folder = Path(snapshot_download(f"{owner}/{repository}", revision=revision, allow_patterns=patterns))
    except Exception as error:  # the hub's errors come from several libraries; all of them mean: not fetched
        reason = next(iter(str(error).strip().splitlines()), "")[:200]
        at = "" if revision is None else f" at revision {revision}"
        raise UserError(
            f"there is no file or folder {name!r}, and it could not be fetched from the Hugging Face hub{at} "
            f"({type(error).__name__}{': ' if reason else ''}{reason})"
        ) from None
    if inside and not (folder / place).exists():
        raise UserError(f"{owner}/{repository} on the Hugging Face hub has no {place}")
    return folder / place if inside else folder


# ----------------------------------------------------------------------------------------------------------- loading


def _look(
    sources: Source | Sequence[Source],
    tokenizer: Source | Tokenizer | None,
    names: Sequence[str] | None,
    revision: str | None,
    options: dict[str, Any],
) -> tuple[list[Found], Tokenizer | None, list[str]]:
    """Every checkpoint of the sources, looked at and found to belong together, and the tokenizer."""
    from relaylm.convert.tensors import Options, read_json

    parts = _parts(sources, revision)
    if names is not None:
        if len(names) != len(parts):
            raise UserError(f"there are {len(parts)} models to name, but {len(names)} names")
        parts = [(name, path) for name, (_, path) in zip(names, parts, strict=True)]
    where = [path if path.is_dir() else path.parent for _, path in parts]
    missing: list[str] = []
    converted = [place.parent for place in where if (place.parent / NOTES).is_file()]
    reader = _tokenizer(tokenizer, [*where, *converted])
    found: list[Found] = []
    for (name, path), folder in zip(parts, where, strict=True):
        notes = next((place / NOTES for place in (folder, folder.parent) if (place / NOTES).is_file()), None)
        remembered = read_json(notes).get("options", {}) if notes else {}
        known = {key: value for key, value in remembered.items() if key in Options.__dataclass_fields__}
        found.append(_open(_safe_name(name), path, Options(**{**known, **options}), reader))
    seen: dict[str, int] = {}
    for one in found:
        seen[one.name] = seen.get(one.name, 0) + 1
        if seen[one.name] > 1:
            one.name += f"-{seen[one.name]}"
    first = found[0]
    for other in found[1:]:
        if (other.vocab_size, other.mask_id) != (first.vocab_size, first.mask_id):
            raise UserError(
                f"{first.name} ({first.format}) has {first.vocab_size} tokens with mask {first.mask_id}, {other.name} "
                f"({other.format}) has {other.vocab_size} with mask {other.mask_id}: they speak different vocabularies "
                f"and cannot take turns"
            )
    if reader is not None:
        reader = _with_mask(reader, first.mask_id)
    else:
        missing.append(HINTS.get(first.format, "the tokenizer: give a tokenizer.json"))
    missing += [note if len(found) == 1 else f"{one.name}: {note}" for one in found for note in one.missing]
    return found, reader, missing


def _tokenizer(given: Source | Tokenizer | None, folders: Iterable[Path]) -> Tokenizer | None:
    """The one that was given, or a tokenizer.json in one of the folders. Nothing else in a folder is opened."""
    from relaylm.tokenizer import load_tokenizer

    if given is not None and not isinstance(given, (str, Path)):
        return given
    if given is not None:
        text = str(given)
        if not _exists(text) and _hub_re.fullmatch(text) and text.count("/") == 1:
            given = _fetch_tokenizer(text)
        return load_tokenizer(given)
    for folder in folders:
        if (folder / "tokenizer.json").is_file():
            return load_tokenizer(folder)
        if (folder / "vocab.json").is_file() and (folder / "merges.txt").is_file() and _is_dream(folder):
            return _qwen_tokenizer(folder)
    return None


def _with_mask(reader: Tokenizer, mask_id: int) -> Tokenizer:
    """The model decides which token is the mask; a tokenizer that has several such, or another name for it, is told."""
    from relaylm.tokenizer import JsonTokenizer

    if not isinstance(reader, JsonTokenizer) or mask_id == reader.mask_id or mask_id >= reader.size:
        return reader
    import tokenizers

    data = reader.files()[reader.file_name]
    token = tokenizers.Tokenizer.from_str(data.decode("utf-8")).id_to_token(mask_id)
    special = {entry["content"] for entry in json.loads(data).get("added_tokens") or [] if entry.get("special")}
    return JsonTokenizer(data, token) if token in special else reader


def _fetch_tokenizer(name: str) -> Path:
    try:
        from huggingface_hub import snapshot_download

        return Path(snapshot_download(name, allow_patterns=["tokenizer.json", "tokenizer_config.json", "*.jinja"]))
    except Exception as error:
        raise UserError(f"the tokenizer {name!r} could not be fetched ({type(error).__name__})") from None


def _is_dream(folder: Path) -> bool:
    from relaylm.convert.tensors import read_json

    path = folder / "config.json"
    return path.is_file() and str(read_json(path).get("model_type")).lower() == "dream"


def _qwen_tokenizer(folder: Path) -> Tokenizer | None:
    """Dream has no tokenizer.json; its vocabulary and merges are Qwen2's, for which transformers has the rules."""
    from relaylm.tokenizer import JsonTokenizer

    try:
        import transformers

        kind = getattr(transformers, "Qwen2TokenizerFast", None) or transformers.Qwen2Tokenizer
        backend = kind.from_pretrained(str(folder), local_files_only=True).backend_tokenizer
        return JsonTokenizer(backend.to_str(), where=str(folder))
    except Exception:  # without it the family has no tokenizer, which is said
        return None


def _safe_name(name: str) -> str:
    """A file's name as a model's: what schedules cannot hold becomes a dash."""
    from relaylm.family import RESERVED

    safe = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-._") or "model"
    return f"model-{safe}" if safe in RESERVED else safe


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
    from relaylm.family import Family, _pick_dtype, pick_device

    found, reader, missing = _look(source, tokenizer, names, revision, _checked(options))
    where = pick_device(device)
    chosen = None if dtype is None else _pick_dtype(dtype, where)
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
        item if _hub_re.fullmatch(item) and not _exists(item) else Path(item).name for item in sources
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
    found, reader, missing = _look(source, tokenizer, names, revision, _checked(options))
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
    from relaylm.family import save_family

    given = _checked(options)
    found, reader, missing = _look(source, tokenizer, names, revision, given)
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
    computes the same function: in the folder itself for one model, else in a folder for each."""
    from relaylm.convert import mdlm
    from relaylm.denoiser import Transformer
    from relaylm.family import Family

    own = family if isinstance(family, Family) else Family.load(family)
    chosen = list(models or own.names)
    own.check_names(chosen)
    for name in chosen:
        if not isinstance(own.models[name], Transformer):
            raise UserError(f"{name} is not a network of MDLM's kind, so it has no place in MDLM's layout")
    target = Path(folder).expanduser()
    licence = license or str(own.meta.get("license", "unknown"))

    def fill(new: Path) -> None:
        for name in chosen:
            place = new if len(chosen) == 1 else new / name
            model = own.models[name]
            assert isinstance(model, Transformer)
            mdlm.export(model, place)
            for file, data in ({} if own.tokenizer is None else own.tokenizer.files()).items():
                (place / file).write_bytes(data)
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
            raise UserError(f"{target} is not empty: choose another folder, or say that it may be overwritten")
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
    if not _exists(folder) and isinstance(folder, str) and _hub_re.fullmatch(folder):
        place = _fetch_tokenizer(folder)
    return hf.chat_prompt(place, messages, add_generation_prompt)
