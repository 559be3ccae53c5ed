"""What a source stands for: found on disk or on the hub, recognised, opened with its tokenizer; no weights are read.

A source is a file, a folder, a hub id, or several of these: see `relaylm.convert`. `recognise` names its format, `look`
opens every checkpoint it stands for and checks that they belong together.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import tokenizers

from relaylm.convert import formats, hf, mdlm, pickles, sedd, smdm
from relaylm.convert.tensors import Found, Options, open_safetensors
from relaylm.errors import UserError, brief
from relaylm.files import backup, expand, read_object
from relaylm.models.folder import MANIFEST, RESERVED, check_models, check_together
from relaylm.models.hub import HUB_FILES, download
from relaylm.models.tokenizer import JsonTokenizer, Tokenizer, load_tokenizer

Source = str | Path
FORMATS = ", ".join(dict.fromkeys(one.title for one in formats.LOADED))
NOTES = "convert.json"  # what a converted folder remembers: the options that were given
_GPT2 = "the tokenizer: give GPT-2's tokenizer.json (hub id openai-community/gpt2)"
_LLAMA = "the tokenizer: give TinyLlama's tokenizer.json (hub id TinyLlama/TinyLlama_v1.1)"
HINTS = {"mdlm": _GPT2, "bd3lm": _GPT2, "lightning": _GPT2, "sedd": _GPT2, "smdm": _LLAMA}

# owner/name, or a file of weights in it
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?:(?:/[\w.-]+)*/[\w.-]+\.(?:safetensors|ckpt|pth?|bin))?")


class _Unknown(UserError):
    """The source is not a checkpoint of another format."""


def exists(source: Source) -> bool:
    """True for a path that exists; text that cannot be a path does not."""
    return os.path.exists(os.path.expanduser(source))  # os.path: never raises, whatever the text


def recognise(source: Source, revision: str | None = None, hub: bool = True) -> str | None:
    """The format of a source, or None for what is not a public checkpoint (a relaylm family among others). A hub id is
    fetched, or found in the cache, unless `hub` is off; a file that is hostile or cut short is a UserError."""
    if not hub and str(source).count("/") == 1 and HUB_ID.fullmatch(str(source)) and not exists(source):
        return None
    try:
        kinds = {_kind(path) for _, path in _parts(source, revision)}
    except _Unknown:
        return None
    return None if not kinds or None in kinds else "+".join(sorted(map(str, kinds)))


def _parts(source: Source | Sequence[Source], revision: str | None = None) -> list[tuple[str, Path]]:
    """The single checkpoints that a source stands for, each with the name its model gets."""
    if not isinstance(source, (str, Path)):
        if not isinstance(source, Sequence) or not source or isinstance(source, bytes):
            raise _Unknown(f"a checkpoint is a file, a folder, a hub id or a list of them, not {brief(source)}")
        return [part for one in source for part in _parts(one, revision)]
    text = str(source)
    if exists(source) and revision is not None:
        raise UserError(f"a revision is for a family on the Hugging Face hub, but {text!r} is here")
    if exists(source):
        path = expand(source)
        name = path.resolve().name if path.is_dir() else path.stem
        if path.name in ("model.safetensors", "pytorch_model.bin") and (path.parent / "config.json").is_file():
            path, name = path.parent, path.resolve().parent.name
    elif exists(backup(Path(source))):  # a save was killed between its two renames
        raise _Unknown(f"{text!r} is a relaylm family")
    elif "," in text:
        return _parts([one.strip() for one in text.split(",") if one.strip()], revision)
    elif isinstance(source, str) and HUB_ID.fullmatch(text):
        path = fetch(text, revision)
        name = text.split("/")[1] if text.count("/") == 1 else Path(text).stem
    else:
        raise _Unknown(f"there is no file, folder or hub id {text!r}")
    if path.is_file() or (path / "config.json").is_file() or (path / MANIFEST).is_file():
        return [(name, path)]
    entries = sorted(path.iterdir())
    inside = (
        [entry for entry in entries if entry.suffix in (".safetensors", ".ckpt", ".pth") and entry.is_file()]
        or [entry for entry in entries if (entry / "config.json").is_file()]
        or [entry for entry in entries if entry.suffix in pickles.SUFFIXES and entry.is_file()]
    )
    if not inside:
        raise _Unknown(f"{text!r} holds no checkpoint that relaylm knows")
    return [(entry.name if entry.is_dir() else entry.stem, entry) for entry in inside]


def _kind(path: Path) -> str | None:
    """The format of one file or folder."""
    if path.is_dir():
        if (path / MANIFEST).is_file() or not (path / "config.json").is_file():
            return None
        config = read_object(path / "config.json")
        if why := formats.refusal(config):
            raise UserError(f"{path} cannot be used: it is {why}")
        if config.get("model_type") in ("mdlm", "bd3lm"):
            return str(config["model_type"])
        return "sedd" if sedd.is_config(config) else hf.kind_of(config)
    if path.suffix == ".safetensors":
        return _kind_of_names(open_safetensors([path]))
    if path.suffix not in pickles.SUFFIXES:
        return None
    data = pickles.read(path)
    state = data.get("state_dict") if isinstance(data, dict) else None
    if isinstance(state, dict) and any(str(key).startswith("backbone.") for key in state):
        return "lightning"
    kind = _kind_of_names(pickles.state_of(data, path))
    if kind is None:
        raise UserError(f"{path} holds no checkpoint that relaylm knows: it has no tensors of MDLM, SEDD or SMDM")
    return kind


def _kind_of_names(names: Iterable[Any]) -> str | None:
    known = {str(name) for name in names}
    if any(name.endswith("transformer.h.0.attn.attn.weight") or name.startswith("transformer.h.") for name in known):
        return "smdm"
    return "mdlm" if any(name.endswith("vocab_embed.embedding") for name in known) else None


def _open(name: str, path: Path, options: Options, tokenizer: Tokenizer | None) -> Found:
    """Look at one checkpoint: everything but the weights."""
    kind, plain = _kind(path), mdlm.open_folder if path.is_dir() else mdlm.open_file
    if kind in hf.FORMATS:
        return hf.open_folder(path, name, options, None if tokenizer is None else tokenizer.mask_id)
    openers = {"mdlm": plain, "bd3lm": plain, "lightning": mdlm.open_checkpoint}
    openers |= {"smdm": smdm.open_file, "sedd": sedd.open_folder}
    if kind not in openers:
        raise UserError(f"{path} holds no checkpoint that relaylm knows ({FORMATS})")
    return openers[kind](path, name, options)


def fetch(name: str, revision: str | None = None) -> Path:
    """A hub repository, or a file in it, from the cache or the network: safetensors, JSON and text alone."""
    owner, repository, *inside = name.split("/")
    if (owner, repository) == ("nieshen", "SMDM") and not inside:
        raise UserError(
            "nieshen/SMDM holds 434 GB: name a file of it, such as "
            "nieshen/SMDM/mdm_safetensors/mdm-170M-100e18.safetensors"
        )
    if not inside:
        return download(name, revision, HUB_FILES)
    place = "/".join(inside)
    if Path(place).suffix in pickles.SUFFIXES:
        raise UserError(f"{name}: only safetensors are fetched from the hub, not {Path(place).suffix} files")
    folder = download(f"{owner}/{repository}", revision, (place, "tokenizer.json", "tokenizer_config.json"))
    if not (folder / place).exists():
        raise UserError(f"{owner}/{repository} on the Hugging Face hub has no {place}")
    return folder / place


@dataclass(frozen=True)
class Checkpoints:
    """What a source stands for: models that belong together, their tokenizer, and where they came from."""

    models: list[Found]
    tokenizer: Tokenizer | None
    meta: dict[str, Any]

    @property
    def name(self) -> str:
        """The name of the only model, or of the format and the number of models."""
        first = self.models[0]
        return first.name if len(self.models) == 1 else f"{first.format}-{len(self.models)}"

    @property
    def length(self) -> int:
        """The longest sequence that all models can process."""
        return min(one.shape.length for one in self.models)


def look(
    source: Source | Sequence[Source],
    tokenizer: Source | Tokenizer | None,
    names: Sequence[str] | None,
    revision: str | None,
    options: Mapping[str, Any],
) -> Checkpoints:
    """Every checkpoint of a source, checked to belong together, and the tokenizer. Options are those of `Options`."""
    parts = _parts(source, revision)
    if names is not None and (isinstance(names, str) or not all(isinstance(name, str) for name in names)):
        raise UserError(f"names must be a list of text, not {brief(names)}")
    if names is not None and len(names) != len(parts):
        raise UserError(f"there are {len(parts)} models to name, but {len(names)} names")
    folders = [path if path.is_dir() else path.parent for _, path in parts]
    reader = _tokenizer(tokenizer, [*folders, *(f.parent for f in folders if (f.parent / NOTES).is_file())])
    found: list[Found] = []
    for (name, path), folder in zip(parts, folders, strict=True):
        notes = next((place / NOTES for place in (folder, folder.parent) if (place / NOTES).is_file()), None)
        remembered = read_object(notes).get("options", {}) if notes else {}
        known = {key: value for key, value in remembered.items() if key in Options.__dataclass_fields__}
        found.append(_open(_safe_name(name), path, Options(**{**known, **options}), reader))
    for one, name in zip(found, names or (), strict=False):  # after opening: a published name may say something
        one.name = _safe_name(name)
    taken = {one.name for one in found}
    for i, one in enumerate(found):
        if one.name in {other.name for other in found[:i]}:
            one.name = next(name for k in count(2) if (name := f"{one.name}-{k}") not in taken)
            taken.add(one.name)
    first = found[0]
    check_together({f"{one.name} ({one.format})": (one.shape.vocab_size, one.shape.mask_id) for one in found})
    missing = [note if len(found) == 1 else f"{one.name}: {note}" for one in found for note in one.missing]
    if reader is None:
        missing.insert(0, _hint(first.format, first.shape.vocab_size))
    else:
        reader = _with_mask(reader, first.shape.mask_id)
    checkpoints = Checkpoints(found, reader, _meta(found, source, missing))
    # What could not be loaded together is not described or copied either.
    shapes: dict[str, Any] = {one.name: one.shape for one in found}
    check_models(shapes, first.shape.mask_id, first.shape.vocab_size, checkpoints.length, reader)
    return checkpoints


def _meta(found: list[Found], source: Source | Sequence[Source], missing: list[str]) -> dict[str, Any]:
    """What a family remembers of its checkpoints."""
    sources = [str(source)] if isinstance(source, (str, Path)) else [str(one) for one in source]
    meta: dict[str, Any] = {
        "format": "+".join(sorted({one.format for one in found})),
        "sources": [s if HUB_ID.fullmatch(s) and not exists(s) else Path(s).name for s in sources],
    }
    if eos := sorted({token for one in found for token in one.meta.get("eos_ids", [])}):
        meta["eos_ids"] = eos
    details = {one.name: {k: v for k, v in one.meta.items() if k != "eos_ids"} for one in found}
    if details := {name: entry for name, entry in details.items() if entry}:
        meta["details"] = details
    return meta | {"missing": missing}


def _safe_name(name: str) -> str:
    """A file's name as a model's: what schedules cannot hold becomes a dash."""
    safe = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-._") or "model"
    return f"model-{safe}" if safe in RESERVED else safe


def _hint(form: str, vocab_size: int) -> str:
    """Which tokenizer is missing. GPT-2's has 50257 tokens, the mask apart: with a smaller or larger vocabulary another
    tokenizer was used, whatever the layout."""
    hint = HINTS.get(form)
    if hint is None or (hint == _GPT2 and vocab_size not in (50257, 50258)):
        return f"the tokenizer of {vocab_size} tokens, the mask among them: give a tokenizer.json, text8 or bytes"
    return hint


def _tokenizer(given: Source | Tokenizer | None, folders: Iterable[Path]) -> Tokenizer | None:
    """The one that was given, or a tokenizer.json in one of the folders. Nothing else in a folder is opened."""
    if isinstance(given, (str, Path)):
        text = str(given)
        hub = not exists(text) and HUB_ID.fullmatch(text) and text.count("/") == 1
        return load_tokenizer(fetch_tokenizer(text) if hub else given)
    if given is not None:
        if not hasattr(given, "encode"):
            raise UserError(f"tokenizer must be a file, a folder, a hub id or a Tokenizer, not {brief(given)}")
        return given
    for folder in folders:
        if (folder / "tokenizer.json").is_file():
            return load_tokenizer(folder)
        whole = all((folder / name).is_file() for name in ("vocab.json", "merges.txt", "config.json"))
        if whole and hf.kind_of(read_object(folder / "config.json")) not in (None, "llada", "masked-lm"):
            return _qwen_tokenizer(folder)
    return None


def _with_mask(reader: Tokenizer, mask_id: int) -> Tokenizer:
    """The model decides which token is the mask, where the tokenizer has several such or another name for it."""
    if not isinstance(reader, JsonTokenizer) or mask_id == reader.mask_id or mask_id >= reader.size:
        return reader
    data = reader.files()[reader.file_name]
    token = tokenizers.Tokenizer.from_str(data.decode("utf-8")).id_to_token(mask_id)
    special = {entry["content"] for entry in json.loads(data).get("added_tokens") or [] if entry.get("special")}
    return JsonTokenizer(data, token) if token in special else reader


def fetch_tokenizer(name: str) -> Path:
    """The tokenizer's files of a hub repository."""
    return download(name, None, ("tokenizer.json", "tokenizer_config.json", "*.jinja"))


def _qwen_tokenizer(folder: Path) -> Tokenizer | None:
    """Dream and some relatives have no tokenizer.json; their vocabulary and merges are Qwen2's, for which transformers
    has the rules."""
    try:
        import transformers

        kind = getattr(transformers, "Qwen2TokenizerFast", None) or transformers.Qwen2Tokenizer
        made = kind.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        return JsonTokenizer(made.backend_tokenizer.to_str(), where=str(folder))
    except Exception:  # the family then has no tokenizer, and says so
        return None
