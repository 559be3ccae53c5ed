"""A family on disk: finding its folder, reading it without trusting it, and writing it whole or not at all.

A family is a folder, format version 1:

    family.json        what is inside; the sha256 of every file that is read; a digest of all that fixes the numbers
    NAME/model-00001-of-0000N.safetensors      one folder for each model; also judge/ and twins/NAME/
    tokenizer.json     where the tokenizer is a `tokenizers` JSON
    README.md          the model card

Nothing is trusted and nothing is unpickled: a file is read once, hashed, and the bytes that were hashed are the bytes
that are parsed; names, shapes and types of all tensors must be exactly those of the architecture. A folder is written
beside its place, synced, and renamed into it, so that a crash leaves the old family or the new one.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from relaylm.checkpoint import sync_folder
from relaylm.denoiser import Architecture, Denoiser, Transformer, build, expected_shapes
from relaylm.errors import UserError
from relaylm.members import DTYPES, NAME, check_lengths, check_name, check_together, place
from relaylm.tokenizer import Tokenizer, load_tokenizer

FORMAT, VERSION = "relaylm-family", 1
MANIFEST, CARD, HELDOUT = "family.json", "README.md", "heldout.txt"
BUNDLED = Path(__file__).parent / "families"
# What fixes the numbers that a family computes. The rest of family.json (name, roles, meta) may be edited by hand.
DIGESTED = ("length", "vocab_size", "mask_id", "tokenizer", "models", "judge", "twins")
PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")
HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.md")
# No network is larger than this; a manifest that says so would only keep the machine busy.
LARGEST = {
    "depth": 10_000,
    "width": 1 << 20,
    "vocab_size": 1 << 28,
    "length": 1 << 28,
    "mlp_ratio": 64,
    "cond_dim": 1 << 20,
}

_file_re = re.compile(rf"{NAME.pattern}(?:/{NAME.pattern})*\.safetensors")
_hub_re = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


# --------------------------------------------------------------------------------------------------------- finding


def bundled() -> list[str]:
    """Names of the families that came with the package."""
    return sorted(path.parent.name for path in BUNDLED.glob(f"*/{MANIFEST}"))


def locate(source: str | Path, revision: str | None = None) -> Path:
    """The folder of a family: given as such, bundled, or fetched from the Hugging Face hub into its cache."""
    text = str(source)
    folder = Path(os.path.expanduser(text))  # os.path, here and below: never raises, whatever the text
    if not os.path.exists(folder):
        if os.path.isdir(backup(folder)):
            return backup(folder)  # a save was killed between its two renames
        if text in bundled():
            folder = BUNDLED / text
    if os.path.isdir(folder):
        if revision is not None:
            raise UserError(f"a revision is for a family on the Hugging Face hub, but {text!r} is a folder")
        return folder
    if os.path.exists(folder):
        raise UserError(f"{text!r} is a file, but a family is a folder")
    if isinstance(source, str) and _hub_re.fullmatch(text):
        return _download(text, revision)
    known = f"the bundled families are {', '.join(bundled())}" if bundled() else "no families are bundled"
    raise UserError(f"there is no family {text!r}: no such folder, {known}, and a hub id is written owner/name")


def _download(name: str, revision: str | None) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise UserError(
            f"there is no folder {name!r}, and fetching it from the Hugging Face hub needs `pip install relaylm[hub]`"
        ) from None
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=list(HUB_FILES)))
    except Exception as error:  # the hub's errors come from several libraries; all of them mean: not fetched
        reason = next(iter(str(error).strip().splitlines()), "")[:200]
        at = "" if revision is None else f" at revision {revision}"
        raise UserError(
            f"there is no folder {name!r}, and it could not be fetched from the Hugging Face hub{at} "
            f"({type(error).__name__}{': ' if reason else ''}{reason})"
        ) from None


# --------------------------------------------------------------------------------------------------------- reading


def read_manifest(folder: Path) -> dict[str, Any]:
    """family.json, checked: types, names, digest, and that the models belong together. Reads no weights."""
    path = folder / MANIFEST
    if not path.is_file():
        raise UserError(f"{folder} is not a family: it has no {MANIFEST}")
    try:
        manifest = json.loads(read_bytes(path).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({error})") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise UserError(f'{path} does not describe a family: its "format" must be "{FORMAT}"')
    if manifest.get("version") != VERSION:
        raise UserError(f"{path} has version {manifest.get('version')!r}, this relaylm reads version {VERSION}")
    where = str(path)
    manifest = {"judge": None, "twins": {}, "tokenizer": None, "meta": {}, "roles": {}, "name": "", **manifest}
    for key in ("length", "vocab_size", "mask_id"):
        _expect(manifest, key, int, where)
    for key in ("models", "twins", "meta", "roles"):
        _expect(manifest, key, dict, where)
    for key in ("judge", "tokenizer"):
        if manifest[key] is not None:
            _expect(manifest, key, dict, where)
    for key in ("name", "digest"):
        _expect(manifest, key, str, where)
    if manifest["digest"] != _digest(manifest):
        raise UserError(f"{path} does not match its own digest: the part that fixes the models was changed")
    for name, entry in (*manifest["models"].items(), *manifest["twins"].items()):
        check_name(name)
        _check_entry(entry, f"{where}, model {name}")
    if manifest["judge"] is not None:
        _check_entry(manifest["judge"], f"{where}, judge")
    if not manifest["models"]:
        raise UserError(f"{path} lists no models")
    built = {name: Architecture(**entry["architecture"]) for name, entry in manifest["models"].items()}
    built |= {f"the twin of {k}": Architecture(**entry["architecture"]) for k, entry in manifest["twins"].items()}
    numbers = {name: (a.vocab_size, a.mask_id) for name, a in built.items()}
    check_together({**numbers, "the family": (manifest["vocab_size"], manifest["mask_id"])})
    check_lengths({name: a.length for name, a in built.items()}, manifest["length"])
    roles = manifest["roles"] = {"light": "", "heavy": "", **manifest["roles"]}
    for role in ("light", "heavy"):
        _expect(roles, role, str, f"{where}, roles")
    return manifest


def _expect(data: Mapping[str, Any], key: str, kind: type, where: str) -> None:
    value = data.get(key)
    if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
        words = {int: "a whole number", dict: "an object", str: "text", bool: "true or false"}
        raise UserError(f'{where}: "{key}" must be {words[kind]}')


def _check_entry(entry: Any, where: str) -> None:
    """One model's part of the manifest."""
    if not isinstance(entry, dict):
        raise UserError(f"{where} must be an object")
    for key, kind in (("architecture", dict), ("files", dict), ("dtype", str), ("parameters", int)):
        _expect(entry, key, kind, where)
    fields = {item.name: bool if isinstance(item.default, bool) else int for item in dataclasses.fields(Architecture)}
    unknown = sorted(set(entry["architecture"]) - set(fields))
    if unknown:
        raise UserError(f"{where}: this relaylm does not know {unknown[0]!r} in an architecture")
    for key in fields:
        _expect(entry["architecture"], key, fields[key], f"{where}, architecture")
    for key, most in LARGEST.items():
        if entry["architecture"][key] > most:
            raise UserError(f"{where}: {key} {entry['architecture'][key]} is more than the {most} that relaylm reads")
    try:
        Architecture(**entry["architecture"])
    except UserError as error:
        raise UserError(f"{where}: {error}") from None
    if entry["dtype"] not in DTYPES:
        raise UserError(f"{where}: dtype {entry['dtype']!r} is not one of {', '.join(DTYPES)}")
    for file, digest in entry["files"].items():
        if not _file_re.fullmatch(file):
            raise UserError(f"{where}: {file!r} is not the name of a safetensors file inside the folder")
        if not isinstance(digest, str):
            raise UserError(f"{where}: the sha256 of {file} must be text")


def load_network(
    folder: Path, name: str, entry: Mapping[str, Any], device: torch.device, dtype: torch.dtype
) -> Transformer:
    """A model's tensors, each exactly as the architecture has it, folded where that is exact."""
    architecture = Architecture(**entry["architecture"])
    expected = expected_shapes(architecture)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    state: dict[str, Tensor] = {}
    for file, digest in entry["files"].items():
        path = folder / file
        for tensor, value in _read_tensors(path, digest).items():
            if tensor not in expected:
                raise UserError(f"{path}: tensor {tensor} does not belong to {name}")
            if tensor in state:
                raise UserError(f"{path}: tensor {tensor} of {name} is there a second time")
            if tuple(value.shape) != expected[tensor]:
                raise UserError(f"{path}: tensor {tensor} has shape {tuple(value.shape)}, not {expected[tensor]}")
            if value.dtype != _stored_dtype(value, DTYPES[entry["dtype"]]):
                raise UserError(
                    f"{path}: tensor {tensor} is {str(value.dtype).removeprefix('torch.')}, "
                    f"not {str(_stored_dtype(value, DTYPES[entry['dtype']])).removeprefix('torch.')}"
                )
            state[tensor] = value.to(wide)
    for tensor in expected:
        if tensor not in state:
            raise UserError(f"{folder}: tensor {tensor} is missing from the {len(entry['files'])} file(s) of {name}")
    network = build(architecture, state)
    if architecture.adaln and not architecture.time_conditioning:
        network = network.fold()
    return place(network, device, dtype)


def _read_tensors(path: Path, digest: str) -> dict[str, Tensor]:
    data = read_bytes(path)
    if hashlib.sha256(data).hexdigest() != digest:
        raise UserError(f"{path} does not have the sha256 in {MANIFEST}: it was cut short or changed")
    try:
        return safetensors.torch.load(data)
    except Exception as error:  # malformed headers end in several types of error, depending on the version
        raise UserError(f"{path} is not a whole safetensors file ({error})") from None


def _stored_dtype(value: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Vectors (norms, biases) are kept in float32 beside half-precision matrices: they weigh nothing."""
    return torch.float32 if value.dim() < 2 and dtype in (torch.bfloat16, torch.float16) else dtype


def refuse_pickles(folder: Path) -> None:
    for root, _, files in os.walk(folder):
        for file in sorted(files):
            if file.lower().endswith(PICKLES):
                raise UserError(
                    f"{Path(root) / file} looks like a pickle, and relaylm never unpickles: remove it, families are "
                    f"safetensors and JSON alone"
                )


def read_bytes(path: Path) -> bytes:
    if not path.is_file():
        raise UserError(f"{path} is missing")
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None


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
    meta: dict[str, Any] | None = None,
    light: str | None = None,
    heavy: str | None = None,
    dtype: str | torch.dtype | None = None,
    max_shard_bytes: int = 16_000_000,
    overwrite: bool = False,
) -> Path:
    """Write a family folder, all of it or nothing, and return its path.

    `dtype` is what matrices are stored in; None takes bfloat16 where that loses nothing, else float32 (or float64). A
    folder that is not empty is refused unless it is a family and `overwrite` is set; then the whole old folder makes
    way, once the new one is complete. `twins` are models from another seed, by the name of the one they equal."""
    from relaylm.family import Family

    target = Path(os.path.realpath(Path(folder).expanduser()))
    twins = dict(twins or {})
    networks: dict[str, Transformer] = {}
    for key, model in models.items():
        if not isinstance(model, Transformer):
            raise UserError(f"{key} cannot be stored: only relaylm's own networks can, not a {type(model).__name__}")
        networks[key] = model
    if not networks:
        raise UserError("a family needs at least one model")
    if len({key.lower() for key in networks}) < len(networks):
        raise UserError("the names of stored models must differ by more than capitals: some file systems ignore those")
    if unknown := sorted(set(twins) - set(networks)):
        raise UserError(f"there is no model {unknown[0]!r} for the twin of that name")
    first = next(iter(networks.values()))
    title = " ".join((name or target.name).split())
    numbers = first.mask_id, first.vocab_size, length
    # Made for the checks: what could not be loaded must not be written.
    family = Family(models, *numbers, tokenizer, title, light or "", heavy or "", meta=meta or {})
    check_together(
        {"the family": numbers[1::-1], **{f"the twin of {k}": (v.vocab_size, v.mask_id) for k, v in twins.items()}}
    )
    stored = None if dtype is None else DTYPES.get(str(dtype).removeprefix("torch."))
    if dtype is not None and stored is None:
        raise UserError(f"{dtype} cannot be stored: write one of {', '.join(DTYPES)}")
    if max_shard_bytes < 1:
        raise UserError(f"max_shard_bytes must be at least 1, not {max_shard_bytes}")
    try:
        json.dumps(family.meta, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UserError(f"meta must be plain JSON ({error})") from None

    def fill(new: Path) -> None:
        def put(network: Transformer, where: str) -> dict[str, Any]:
            return _write_network(new, where, network, stored, max_shard_bytes)

        for file, data in ({} if tokenizer is None else tokenizer.files()).items():
            _write(new / file, data)
        if tokenizer is not None:
            load_tokenizer(tokenizer.to_json(), new)  # what could not be read back must not be written
        manifest: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "name": title,
            "length": length,
            "vocab_size": family.vocab_size,
            "mask_id": family.mask_id,
            "tokenizer": None if tokenizer is None else tokenizer.to_json(),
            "roles": {"light": family.light, "heavy": family.heavy},
            "models": {key: put(networks[key], key) for key in family.names},
            "judge": None if judge is None else put(judge, "judge"),
            "twins": {key: put(network, f"twins/{key}") for key, network in twins.items()},
            "card": CARD,
            "meta": family.meta,
        }
        manifest["digest"] = _digest(manifest)
        _write(new / CARD, _card(card, manifest).encode())
        _write(new / MANIFEST, (json.dumps(manifest, indent=1) + "\n").encode())

    try:
        _replace_folder(target, fill, overwrite)
    except OSError as error:
        raise UserError(f"cannot write the family to {target}: {error.strerror or error}") from None
    return target


def _write_network(
    root: Path, where: str, network: Transformer, dtype: torch.dtype | None, max_shard_bytes: int
) -> dict[str, Any]:
    dtype = dtype or _lossless(network)
    state = {name: value.detach() for name, value in network.named_parameters()}
    shards: list[list[str]] = [[]]
    room = max_shard_bytes
    for name, value in state.items():
        size = value.numel() * _stored_dtype(value, dtype).itemsize
        if shards[-1] and size > room:
            shards.append([])
            room = max_shard_bytes
        shards[-1].append(name)
        room -= size
    (root / where).mkdir(parents=True)
    files = {}
    for number, names in enumerate(shards, 1):
        tensors = {k: state[k].to("cpu", _stored_dtype(state[k], dtype)).contiguous() for k in names}
        data = safetensors.torch.save(tensors, {"format": "pt"})
        file = f"{where}/model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write(root / file, data)
        files[file] = hashlib.sha256(data).hexdigest()
    return {
        "architecture": network.architecture.to_json(),
        "files": files,
        "dtype": str(dtype).removeprefix("torch."),
        "parameters": sum(value.numel() for value in state.values()),
    }


def _lossless(network: Transformer) -> torch.dtype:
    """The narrowest type that keeps every digit of the weights (vectors stay in float32)."""
    for dtype in (torch.bfloat16, torch.float32):
        if all(torch.equal(p.to(_stored_dtype(p, dtype)).to(p.dtype), p) for p in network.parameters()):
            return dtype
    return torch.float64


def _card(card: str | None, manifest: Mapping[str, Any]) -> str:
    """The model card: the caller's text, or a plain one; with the front matter that the hub reads."""
    if card is not None and card.startswith("---\n"):
        return card
    licence = json.dumps(str(manifest["meta"].get("license", "unknown")))
    front = f"---\nlibrary_name: relaylm\nlicense: {licence}\npipeline_tag: text-generation\n"
    front += "tags:\n- masked-diffusion\n- diffusion-language-model\n- model-schedule\n---\n"
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


def backup(folder: Path) -> Path:
    """Where an old family waits while a new one takes its place."""
    return folder.parent / f".{folder.name}.old"


def _replace_folder(target: Path, fill: Callable[[Path], None], overwrite: bool) -> None:
    """Fill a folder beside the target, sync it, and put it in the target's place.

    Two renames cannot be one step, so a kill between them leaves the old family under its backup name: `locate` reads
    it from there, and the next save puts it back first."""
    old = backup(target)
    if old.is_dir():
        if target.exists():
            shutil.rmtree(old)
        else:
            os.replace(old, target)
    if target.exists() and not target.is_dir():
        raise UserError(f"cannot write a family to {target}: it is a file")
    if target.is_dir() and any(target.iterdir()):
        if not overwrite:
            raise UserError(f"{target} is not empty: choose another folder, or --overwrite (overwrite=True)")
        if not (target / MANIFEST).is_file():
            raise UserError(f"{target} is not a family (it has no {MANIFEST}), so it is not overwritten")
    target.parent.mkdir(parents=True, exist_ok=True)
    new = target.parent / f".{target.name}.new-{secrets.token_hex(4)}"
    try:
        new.mkdir()
        fill(new)
        for root, _, _ in os.walk(new, topdown=False):
            sync_folder(Path(root))
        moved = target.is_dir() and any(target.iterdir())
        if moved:
            os.replace(target, old)
        elif target.is_dir():
            target.rmdir()
        try:
            os.replace(new, target)
        except BaseException:
            if moved and not target.exists():
                os.replace(old, target)
            raise
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    sync_folder(target.parent)
    shutil.rmtree(old, ignore_errors=True)


def _write(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
