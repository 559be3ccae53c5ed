"""Which models may form a family; and a family on disk, read without trust, written whole or not at all.

Models that take turns along one trajectory read and write the same tokens, so vocabulary size, mask, length and
tokenizer must agree, and each model needs a name that a schedule can contain.

A family is a folder, format version 1:

    family.json        what is inside; the sha256 of every file that is read; a digest of what determines the numbers
    NAME/model-00001-of-0000N.safetensors      one folder for each model; also judge/ and twins/NAME/
    tokenizer.json     where the tokenizer is a `tokenizers` JSON
    README.md          the model card
    heldout.txt        text that no model was trained on, where there is some
    pairs.json         the heavy model's table of pairs, where it was measured
    .relaylm.json      the sha256 of every file as it was written: what may be replaced (`files.write_folder`)

Nothing is trusted and nothing is unpickled: a file is read once, hashed, and the bytes that were hashed are the bytes
that are parsed; names, shapes and types of all tensors must be exactly those of the architecture.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from relaylm.core import notation
from relaylm.errors import UserError, meant
from relaylm.files import expand, read_bytes, read_object, write_folder
from relaylm.models.denoiser import LATER, Architecture, Denoiser, Transformer, build
from relaylm.models.tokenizer import Tokenizer, check_unicode, load_tokenizer

FORMAT, VERSION = "relaylm-family", 1
MANIFEST, CARD, HELDOUT, PAIRS = "family.json", "README.md", "heldout.txt", "pairs.json"
# What determines the numbers that a family computes. The rest of family.json (name, roles, meta) may be edited by hand.
DIGESTED = ("length", "vocab_size", "mask_id", "tokenizer", "models", "judge", "twins")
PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")
# No network is larger than this; a manifest that says so would only keep the machine busy.
LARGEST = {"depth": 10_000, "width": 1 << 20, "vocab_size": 1 << 28, "length": 1 << 28}
LARGEST |= {"mlp_ratio": 64, "cond_dim": 1 << 20}
TAGS = ("masked-diffusion", "diffusion-language-model", "model-schedule")  # of model cards, for the hub
_KINDS = {int: "a whole number", dict: "an object", str: "text", bool: "true or false"}
_FILE = re.compile(rf"{notation.name_re.pattern}(?:/{notation.name_re.pattern})*\.safetensors")
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Model names that mean something else in a schedule or in the folder.
RESERVED = (notation.LIGHT, notation.HEAVY, "light", "heavy", *notation.RESERVED, "judge", "twins")


# --------------------------------------------------------------------------------------------------------- the rules


def check_models(
    models: Mapping[str, Denoiser], mask_id: int, vocab_size: int, length: int, tokenizer: Tokenizer | None
) -> dict[str, Denoiser]:
    """The models of a family, ordered from light to heavy by the cost of a call; a UserError if they cannot take turns.
    A denoiser that does not state its cost, vocabulary or length passes."""
    if not models:
        raise UserError("a family needs at least one model")
    for name in models:
        check_name(name)
    if not 0 <= mask_id < vocab_size:
        raise UserError(f"the mask must be one of the family's tokens, 0 to {vocab_size - 1}, not {mask_id}")
    numbers = {name: (getattr(m, "vocab_size", None), getattr(m, "mask_id", None)) for name, m in models.items()}
    known = {name: (v, m) for name, (v, m) in numbers.items() if v is not None and m is not None}
    check_together({**known, "the family": (vocab_size, mask_id)})
    trained = {name: getattr(model, "architecture", None) for name, model in models.items()}
    check_lengths({name: a.length for name, a in trained.items() if a is not None}, length)
    blocks = {name: getattr(model, "block_length", 0) for name, model in models.items()}
    if len(set(blocks.values())) > 1:
        found = ", ".join(f"{name} {block or 'none'}" for name, block in blocks.items())
        raise UserError(f"models that take turns must share the length of their blocks of positions: {found}")
    if any(length % block for block in blocks.values() if block):
        raise UserError(f"the length of a family must be whole blocks of {max(blocks.values())}, not {length}")
    if tokenizer is not None and tokenizer.size > vocab_size:
        raise UserError(f"the tokenizer has {tokenizer.size} tokens, but the models' vocabulary is {vocab_size}")
    if tokenizer is not None and mask_id < tokenizer.size and mask_id != tokenizer.mask_id:
        # Text and free positions would look the same.
        own = "none" if tokenizer.mask_id is None else tokenizer.mask_id
        raise UserError(f"the models' mask {mask_id} is an ordinary token of the tokenizer (its own mask token: {own})")

    def weight(model: Denoiser) -> tuple[float, float]:
        return model.flops(length, 1) if hasattr(model, "flops") else 0.0, getattr(model, "depth", 0)

    return dict(sorted(models.items(), key=lambda item: weight(item[1])))


def check_name(name: str) -> None:
    """Refuse a name that a schedule or a family's folder could not contain."""
    if not isinstance(name, str) or not notation.name_re.fullmatch(name):
        raise UserError(f"{name!r} cannot name a model: letters, digits and _.- are allowed, a letter or digit first")
    if name in RESERVED:
        raise UserError(f"{name!r} cannot name a model: it is reserved, as are {', '.join(RESERVED)}")


def check_known(names: Iterable[str], models: Mapping[str, Any]) -> None:
    """Refuse a name that no model of the family has."""
    for name in names:
        if name not in models:
            hint = meant(name, [*models, *notation.NAMES[:-1]]) or ":"
            raise UserError(f"there is no model {name!r} in this family{hint} it has {', '.join(models)}")


def check_together(numbers: Mapping[str, tuple[int, int]]) -> None:
    """Every model must have the first one's vocabulary size and mask id."""
    (first, expected), *rest = numbers.items()
    for name, (vocab_size, mask_id) in rest:
        if (vocab_size, mask_id) != expected:
            raise UserError(
                f"{name} has vocabulary {vocab_size} and mask {mask_id}, {first} has {expected[0]} and {expected[1]}: "
                f"models that take turns must share both"
            )


def check_lengths(trained: Mapping[str, int], length: int) -> None:
    """No model may be used beyond the length that it was trained for."""
    if length < 1:
        raise UserError(f"the length of a family must be at least 1, not {length}")
    for name, longest in trained.items():
        if longest < length:
            raise UserError(f"{name} was trained for length {longest}, but the family's length is {length}")


# --------------------------------------------------------------------------------------------------------- reading


def read_manifest(folder: Path) -> dict[str, Any]:
    """family.json, checked: types, names, digest, and that the models belong together. Reads no weights."""
    path = folder / MANIFEST
    if not path.is_file():
        raise UserError(f"{folder} is not a family: it has no {MANIFEST}")
    manifest = read_object(path)
    if manifest.get("format") != FORMAT:
        raise UserError(f'{path} does not describe a family: its "format" must be "{FORMAT}"')
    if manifest.get("version") != VERSION:
        raise UserError(f"{path} has version {manifest.get('version')!r}, this relaylm reads version {VERSION}")
    manifest = {"judge": None, "twins": {}, "tokenizer": None, "meta": {}, "roles": {}, "name": "", **manifest}
    kinds: dict[str, type] = dict.fromkeys(("length", "vocab_size", "mask_id"), int)
    kinds |= dict.fromkeys(("name", "digest"), str) | dict.fromkeys(("models", "twins", "meta", "roles"), dict)
    kinds |= {key: dict for key in ("judge", "tokenizer") if manifest[key] is not None}
    _expect(manifest, kinds, str(path))
    if manifest["digest"] != _digest(manifest):
        raise UserError(f"{path} does not match its own digest: the part that fixes the models was changed")
    if not manifest["models"]:
        raise UserError(f"{path} lists no models")
    for name, entry in (*manifest["models"].items(), *manifest["twins"].items()):
        check_name(name)
        _check_entry(entry, f"{path}, model {name}")
    if manifest["judge"] is not None:
        _check_entry(manifest["judge"], f"{path}, judge")
    built = {name: Architecture(**entry["architecture"]) for name, entry in manifest["models"].items()}
    built |= {f"the twin of {k}": Architecture(**entry["architecture"]) for k, entry in manifest["twins"].items()}
    numbers = {name: (a.vocab_size, a.mask_id) for name, a in built.items()}
    check_together({**numbers, "the family": (manifest["vocab_size"], manifest["mask_id"])})
    check_lengths({name: a.length for name, a in built.items()}, manifest["length"])
    manifest["roles"] = {"light": "", "heavy": "", **manifest["roles"]}
    _expect(manifest["roles"], {"light": str, "heavy": str}, f"{path}, roles")
    return manifest


def _expect(data: Mapping[str, Any], kinds: Mapping[str, type], where: str) -> None:
    for key, kind in kinds.items():
        if type(data.get(key)) is not kind:  # JSON's types have no subtypes, but True is an int to isinstance
            raise UserError(f'{where}: "{key}" must be {_KINDS[kind]}')


def _check_entry(entry: Any, where: str) -> None:
    """One model's part of the manifest."""
    if not isinstance(entry, dict):
        raise UserError(f"{where} must be an object")
    _expect(entry, {"architecture": dict, "files": dict, "dtype": str, "parameters": int}, where)
    numbers = entry["architecture"]
    fields = {item.name: bool if isinstance(item.default, bool) else int for item in dataclasses.fields(Architecture)}
    if unknown := sorted(set(numbers) - set(fields)):
        raise UserError(f"{where}: this relaylm does not know {unknown[0]!r} in an architecture")
    needed = {key: kind for key, kind in fields.items() if key not in LATER or key in numbers}
    _expect(numbers, needed, f"{where}, architecture")
    for key, most in LARGEST.items():
        if numbers[key] > most:
            raise UserError(f"{where}: {key} {numbers[key]} is more than the {most} that relaylm reads")
    try:
        Architecture(**numbers)
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    if entry["dtype"] not in DTYPES:
        raise UserError(f"{where}: dtype {entry['dtype']!r} is not one of {', '.join(DTYPES)}")
    for file, digest in entry["files"].items():
        if not _FILE.fullmatch(file):
            raise UserError(f"{where}: {file!r} is not the name of a safetensors file inside the folder")
        if not isinstance(digest, str):
            raise UserError(f"{where}: the sha256 of {file} must be text")


def load_network(
    folder: Path, name: str, entry: Mapping[str, Any], device: torch.device, dtype: torch.dtype
) -> Transformer:
    """A model's tensors, each exactly as the architecture has it, folded where that is exact."""
    architecture = Architecture(**entry["architecture"])
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    state: dict[str, Tensor] = {}
    for file, digest in entry["files"].items():
        tensors = _read_tensors(folder / file, digest)
        for tensor, value in tensors.items():
            if tensor in state:
                raise UserError(f"{folder / file}: tensor {tensor} of {name} is there a second time")
            if value.dtype != (stored := _stored_dtype(value, DTYPES[entry["dtype"]])):
                raise UserError(f"{folder / file}: tensor {tensor} is {_name(value.dtype)}, not {_name(stored)}")
            state[tensor] = value.to(wide)
    network = build(architecture, state, f"{folder}, {name} ({', '.join(entry['files']) or 'no files'})")
    if architecture.adaln and not architecture.time_conditioning:
        network = network.fold()
    return place(network, device, dtype)


def place(network: Any, device: torch.device, dtype: torch.dtype | None) -> Any:
    """The network on a device; half precision goes to the blocks' matrices alone (`Transformer.cast`)."""
    if dtype in (torch.float32, torch.float64):
        return network.to(device, dtype)
    return network.to(device) if dtype is None else network.to(device, torch.float32).cast(dtype)


def _read_tensors(path: Path, digest: str) -> dict[str, Tensor]:
    data = read_bytes(path)
    if hashlib.sha256(data).hexdigest() != digest:  # of the very bytes that are parsed below
        raise UserError(f"{path} does not have the sha256 in {MANIFEST}: it was cut short or changed")
    try:
        return safetensors.torch.load(data)
    except Exception as error:  # malformed headers end in several types of error, depending on the version
        raise UserError(f"{path} is not a whole safetensors file ({error})") from None


def _stored_dtype(value: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Vectors (norms, biases) stay in float32 beside half-precision matrices: they take next to no space."""
    return torch.float32 if value.dim() < 2 and dtype in (torch.bfloat16, torch.float16) else dtype


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def refuse_pickles(folder: Path) -> None:
    """Refuse a folder with a file that other software would unpickle."""
    for root, _, files in os.walk(folder):
        for file in sorted(files):
            if file.lower().endswith(PICKLES):
                raise UserError(
                    f"{Path(root) / file} looks like a pickle, and relaylm never unpickles: remove it, families are "
                    f"safetensors and JSON alone"
                )


def _digest(manifest: Mapping[str, Any]) -> str:
    core = {key: manifest[key] for key in DIGESTED}
    return hashlib.sha256(json.dumps(core, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def files_of(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Every file that belongs to the family, family.json first."""
    yield from (MANIFEST, CARD)
    if (manifest["tokenizer"] or {}).get("type") == "json":
        yield "tokenizer.json"
    for entry in (*manifest["models"].values(), manifest["judge"] or {"files": {}}, *manifest["twins"].values()):
        yield from entry["files"]


# --------------------------------------------------------------------------------------------------------- writing


def save_family(
    folder: str | Path,
    models: Mapping[str, Denoiser],
    tokenizer: Tokenizer | None,
    *,
    length: int,
    name: str | None = None,
    judge: Transformer | None = None,
    twins: Mapping[str, Transformer] | None = None,
    card: str | None = None,
    heldout: str = "",
    pairs: Mapping[str, Any] | None = None,
    meta: dict[str, Any] | None = None,
    light: str | None = None,
    heavy: str | None = None,
    dtype: str | torch.dtype | None = None,
    max_shard_bytes: int = 16_000_000,
    overwrite: bool = False,
) -> Path:
    """Write a family folder, all of it or nothing, and return its path.

    `dtype` is what matrices are stored in; None takes bfloat16 where that loses nothing, else float32 (or float64). A
    folder that is not empty is refused unless it is a family and `overwrite` is set; it is replaced once the new one
    is complete, if no file in it was added or edited by others. `twins` are models from another seed, by the name of
    the model they equal; `heldout` is a text that none of the models was trained on, `pairs` the
    heavy model's table of pairs as JSON values."""
    title = " ".join((name or Path(os.path.realpath(expand(folder))).name).split())
    check_unicode(f"{title}{card or ''}{heldout}")
    twins, meta = dict(twins or {}), meta or {}
    networks = _check_storable(models, twins, tokenizer, length, meta)
    names = tuple(networks)
    roles = {"light": light or names[0], "heavy": heavy or names[-1]}
    check_known(roles.values(), networks)
    stored = None if dtype is None else DTYPES.get(str(dtype).removeprefix("torch."))
    if dtype is not None and stored is None:
        raise UserError(f"{dtype} cannot be stored: write one of {', '.join(DTYPES)}")
    if max_shard_bytes < 1:
        raise UserError(f"max_shard_bytes must be at least 1, not {max_shard_bytes}")

    def fill(new: Path) -> None:
        def put(network: Transformer, where: str) -> dict[str, Any]:
            return _write_network(new, where, network, stored, max_shard_bytes)

        for file, data in ({} if tokenizer is None else tokenizer.files()).items():
            (new / file).write_bytes(data)
        if tokenizer is not None:
            load_tokenizer(tokenizer.to_json(), new)  # what could not be read back must not be written
        first = networks[names[0]]
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "name": title,
            "length": length,
            "vocab_size": first.vocab_size,
            "mask_id": first.mask_id,
            "tokenizer": None if tokenizer is None else tokenizer.to_json(),
            "roles": roles,
            "models": {key: put(network, key) for key, network in networks.items()},
            "judge": None if judge is None else put(judge, "judge"),
            "twins": {key: put(network, f"twins/{key}") for key, network in twins.items()},
            "card": CARD,
            "meta": meta,
        }
        manifest["digest"] = _digest(manifest)
        if heldout:
            (new / HELDOUT).write_bytes(heldout.encode())
        if pairs is not None:
            (new / PAIRS).write_bytes((json.dumps(pairs) + "\n").encode())
        (new / CARD).write_bytes(_card(card, manifest).encode())
        (new / MANIFEST).write_bytes((json.dumps(manifest, indent=1) + "\n").encode())

    return write_folder(Path(folder), fill, overwrite)


def _check_storable(
    models: Mapping[str, Denoiser],
    twins: Mapping[str, Transformer],
    tokenizer: Tokenizer | None,
    length: int,
    meta: dict[str, Any],
) -> dict[str, Transformer]:
    """The models, ordered from light to heavy, if a folder can hold them: what cannot be loaded is not written."""
    if not models:
        raise UserError("a family needs at least one model")
    networks = {name: model for name, model in models.items() if isinstance(model, Transformer)}
    for name in models:
        if name not in networks:
            kind = type(models[name]).__name__
            raise UserError(f"{name} cannot be stored: only relaylm's own networks can, not a {kind}")
    if len({name.lower() for name in networks}) < len(networks):
        raise UserError("the names of stored models must differ by more than capitals: some file systems ignore those")
    if unknown := sorted(set(twins) - set(networks)):
        raise UserError(f"there is no model {unknown[0]!r} for the twin of that name")
    first = next(iter(networks.values()))
    ordered = check_models(networks, first.mask_id, first.vocab_size, length, tokenizer)
    pairs = {f"the twin of {name}": (twin.vocab_size, twin.mask_id) for name, twin in twins.items()}
    check_together({"the family": (first.vocab_size, first.mask_id), **pairs})
    try:
        json.dumps(meta, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"meta must be plain JSON ({error})") from None
    return {name: networks[name] for name in ordered}


def _write_network(
    root: Path, where: str, network: Transformer, dtype: torch.dtype | None, max_shard_bytes: int
) -> dict[str, Any]:
    """Write a network's tensors in shards, by default in the narrowest type that keeps every digit of the weights, and
    return its entry in the manifest."""
    state = {name: value.detach() for name, value in network.named_parameters()}

    def keeps(dtype: torch.dtype) -> bool:
        return all(torch.equal(p.to(_stored_dtype(p, dtype)).to(p.dtype), p) for p in state.values())

    dtype = dtype or next(filter(keeps, (torch.bfloat16, torch.float32)), torch.float64)
    shards: list[list[str]] = [[]]
    left = max_shard_bytes
    for name, value in state.items():
        size = value.numel() * _stored_dtype(value, dtype).itemsize
        if shards[-1] and size > left:
            shards.append([])
            left = max_shard_bytes
        shards[-1].append(name)
        left -= size
    (root / where).mkdir(parents=True)
    files = {}
    for number, names in enumerate(shards, 1):
        tensors = {k: state[k].to("cpu", _stored_dtype(state[k], dtype)).contiguous() for k in names}
        data = safetensors.torch.save(tensors, {"format": "pt"})
        file = f"{where}/model-{number:05d}-of-{len(shards):05d}.safetensors"
        (root / file).write_bytes(data)
        files[file] = hashlib.sha256(data).hexdigest()
    return {
        "architecture": network.architecture.to_json(),
        "files": files,
        "dtype": _name(dtype),
        "parameters": sum(value.numel() for value in state.values()),
    }


def front_matter(licence: str, library: str = "relaylm") -> str:
    """The head of a model card that the hub reads."""
    front = f"---\nlibrary_name: {library}\nlicense: {json.dumps(licence)}\npipeline_tag: text-generation\ntags:\n"
    return front + "".join(f"- {tag}\n" for tag in TAGS) + "---\n"


def _card(card: str | None, manifest: Mapping[str, Any]) -> str:
    """The model card: the caller's text, or a plain one, with front matter."""
    if card is not None and card.startswith("---\n"):
        return card
    front = front_matter(str(manifest["meta"].get("license", "unknown")))
    if card is not None:
        return front + card
    rows = "".join(
        f"| {name} | {entry['architecture']['depth']} | {entry['architecture']['width']} | {entry['parameters']:,} |\n"
        for name, entry in manifest["models"].items()
    )
    return (
        f"{front}\n# {manifest['name']}\n\nMasked diffusion language models that may take turns along one denoising "
        f"trajectory.\nLength {manifest['length']}, vocabulary {manifest['vocab_size']} with the mask "
        f"({manifest['mask_id']}).\n\n| model | blocks | width | parameters |\n|---|---|---|---|\n{rows}"
    )
