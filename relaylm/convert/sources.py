"""What a source is: recognised, found on disk or on the hub, looked at with its tokenizer; no weights are read.

`recognise` names a source's format, `look` opens everything it stands for and checks that it belongs together. A
source is a file, a folder, a hub id, or several of these: see `relaylm.convert`. Importing this does not import torch.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from relaylm.errors import UserError

if TYPE_CHECKING:
    from relaylm.convert.tensors import Found, Options
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
HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*(?:(?:/[\w.-]+)*/[\w.-]+\.(?:safetensors|ckpt|pth?|bin))?")


def recognise(source: Source, revision: str | None = None, hub: bool = True) -> str | None:
    """The format of a source, or None for what is not a public checkpoint (a relaylm family among others). A hub id is
    fetched, or found in the cache, unless `hub` is off; a file that is hostile or cut short is a UserError."""
    if not hub and str(source).count("/") == 1 and HUB_ID.fullmatch(str(source)) and not exists(source):
        return None
    try:
        parts = _parts(source, revision)
    except _Unknown:
        return None
    kinds = {_kind(path) for _, path in parts}
    return None if not kinds or None in kinds else "+".join(sorted(map(str, kinds)))


def exists(source: Source) -> bool:
    try:
        return Path(source).expanduser().exists()
    except (OSError, ValueError, RuntimeError):  # too long, a null in it, an unknown user: no such path
        return False


class _Unknown(UserError):
    """The source is not a checkpoint; somebody else may know what it is."""


def _parts(source: Source | Sequence[Source], revision: str | None = None) -> list[tuple[str, Path]]:
    """The single checkpoints that a source stands for, each with the name its model gets."""
    from relaylm.family_folder import backup

    if not isinstance(source, (str, Path)):
        return [part for one in source for part in _parts(one, revision)]
    text = str(source)
    if not exists(source):
        path = Path(source)
        if exists(backup(path)):  # a relaylm family whose saving was killed between its two renames
            raise _Unknown(f"{text!r} is a relaylm family")
        if "," in text:
            return [part for one in text.split(",") if one.strip() for part in _parts(one.strip(), revision)]
        if not (isinstance(source, str) and HUB_ID.fullmatch(text)):
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


def look(
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
        missing.append(_hint(first.format, first.vocab_size))
    missing += [note if len(found) == 1 else f"{one.name}: {note}" for one in found for note in one.missing]
    return found, reader, missing


def _hint(form: str, vocab_size: int) -> str:
    """Which tokenizer is missing. GPT-2's has 50257 tokens, the mask apart: of a smaller or larger vocabulary another
    tokenizer was the maker's, whatever the layout."""
    hint = HINTS.get(form)
    if hint is None or (hint == _GPT2 and vocab_size not in (50257, 50258)):
        return f"the tokenizer of {vocab_size} tokens, the mask among them: give a tokenizer.json, text8 or bytes"
    return hint


def _tokenizer(given: Source | Tokenizer | None, folders: Iterable[Path]) -> Tokenizer | None:
    """The one that was given, or a tokenizer.json in one of the folders. Nothing else in a folder is opened."""
    from relaylm.tokenizer import load_tokenizer

    if given is not None and not isinstance(given, (str, Path)):
        return given
    if given is not None:
        text = str(given)
        if not exists(text) and HUB_ID.fullmatch(text) and text.count("/") == 1:
            given = fetch_tokenizer(text)
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


def fetch_tokenizer(name: str) -> Path:
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
    from relaylm.members import RESERVED

    safe = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip("-._") or "model"
    return f"model-{safe}" if safe in RESERVED else safe
