r"""Denoisers that may take turns: what binds them, how they are stored, and how a request is laid out for them.

Models that take turns along one trajectory must read and write the same tokens, so a family shares vocabulary, mask,
length and tokenizer; `Family` refuses what does not belong together. Any denoisers will do (a table in a test).

On disk a family is a folder, format version 1:

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
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.torch
import torch
from torch import Tensor

from relaylm import cost, schedule
from relaylm.denoiser import Architecture, Denoiser, Transformer, build, expected_shapes
from relaylm.errors import UserError
from relaylm.tokenizer import BLANK, Tokenizer, load_tokenizer

FORMAT, VERSION = "relaylm-family", 1
MANIFEST, CARD = "family.json", "README.md"
BUNDLED = Path(__file__).parent / "families"
# What fixes the numbers that a family computes. The rest of family.json (name, roles, meta) may be edited by hand.
DIGESTED = ("length", "vocab_size", "mask_id", "tokenizer", "models", "judge", "twins")
PICKLES = (".pt", ".pth", ".bin", ".ckpt", ".pkl", ".pickle")
HUB_FILES = ("*.json", "*.safetensors", "*.txt", "*.md")
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Model names that mean something else in a schedule or in the folder.
RESERVED = (schedule.LIGHT, schedule.HEAVY, "light", "heavy", *schedule.RESERVED, "judge", "twins")
# No network is larger than this; a manifest that says so would only keep the machine busy.
LARGEST = {
    "depth": 10_000,
    "width": 1 << 20,
    "vocab_size": 1 << 28,
    "length": 1 << 28,
    "mlp_ratio": 64,
    "cond_dim": 1 << 20,
}

_name_re = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_file_re = re.compile(rf"{_name_re.pattern}(?:/{_name_re.pattern})*\.safetensors")
_hub_re = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


@dataclass(frozen=True)
class _Stored:
    """Where a family came from, for the parts that are loaded when they are first asked for."""

    folder: Path
    manifest: dict[str, Any]
    dtype: torch.dtype


@dataclass
class Family:
    """Denoisers that may take turns, ordered from light to heavy."""

    models: Mapping[str, Denoiser]
    mask_id: int
    vocab_size: int  # counts the mask
    length: int  # the longest sequence; shorter ones are fine
    tokenizer: Tokenizer | None = None
    name: str = ""
    light: str = ""  # the model that L means; the smallest unless said otherwise
    heavy: str = ""  # the model that H means; the largest
    device: torch.device = torch.device("cpu")  # of the models, where they say  # noqa: RUF009
    meta: dict[str, Any] = field(default_factory=dict)
    stored: _Stored | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if not self.models:
            raise UserError("a family needs at least one model")
        for name in self.models:
            _check_name(name)
        if not 0 <= self.mask_id < self.vocab_size:
            most = self.vocab_size - 1
            raise UserError(f"the mask must be one of the family's tokens, 0 to {most}, not {self.mask_id}")
        numbers = {name: _numbers(model) for name, model in self.models.items()}
        known = {name: pair for name, pair in numbers.items() if pair is not None}
        _check_together({**known, "the family": (self.vocab_size, self.mask_id)})
        trained = {name: getattr(model, "architecture", None) for name, model in self.models.items()}
        _check_lengths({name: a.length for name, a in trained.items() if a is not None}, self.length)
        _check_tokenizer(self.tokenizer, self.vocab_size, self.mask_id)
        self.models = dict(sorted(self.models.items(), key=lambda item: self._weight(item[1])))
        self.light, self.heavy = self.light or self.names[0], self.heavy or self.names[-1]
        self.check_names((self.light, self.heavy))
        devices = {model.device for model in self.models.values() if hasattr(model, "device")}
        if len(devices) > 1:
            raise UserError(f"the models are on different devices: {', '.join(sorted(map(str, devices)))}")
        self.device = devices.pop() if devices else torch.device(self.device)

    def _weight(self, model: Denoiser) -> tuple[float, float]:
        """Cost of a call, for the order; a denoiser that does not say keeps its place among its like."""
        flops = model.flops(self.length, 1) if hasattr(model, "flops") else 0.0
        return flops, getattr(model, "depth", 0)

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.models)

    def __getitem__(self, name: str) -> Denoiser:
        self.check_names((name,))
        return self.models[name]

    def check_names(self, names: Iterable[str]) -> None:
        for name in names:
            if name not in self.models:
                raise UserError(f"there is no model {name!r} in this family: it has {', '.join(self.models)}")

    def roles(self, light: str | None = None, heavy: str | None = None) -> tuple[str, str]:
        """The names that L and H stand for: the family's own unless the caller says otherwise."""
        names = light or self.light, heavy or self.heavy
        self.check_names(names)
        return names

    def batch_size(self, n: int, length: int) -> int:
        """Rows in a call, where nobody has said: a power of two, at most n.

        CPU: about a million activations (B * length * width), 1024 to 4096 tokens, so that a block's working set stays
        in the caches. CUDA: 65,536 tokens (64 rows of 1024), or less if half of the free memory does not hold them, at
        40 bytes for each of a row's activations and 16 for each logit of 8 due positions."""
        width = max(getattr(getattr(model, "architecture", None), "width", 256) for model in self.models.values())
        if self.device.type == "cuda":
            free, _ = torch.cuda.mem_get_info(self.device)
            rows = min(65_536 // length, free // 2 // (40 * length * width + 16 * 8 * self.vocab_size))
        else:
            rows = min(4096, max(1024, (1 << 20) // width)) // length
        return max(1, min(n, 1 << max(0, int(rows).bit_length() - 1)))

    def to(self, device: str | torch.device, dtype: str | torch.dtype | None = None) -> Family:
        """Move the models, in place; `dtype` as in `load`, None leaves it."""
        device = pick_device(device)
        chosen = None if dtype is None else _pick_dtype(dtype, device)
        extras = [*self.__dict__.get("twins", {}).values(), self.__dict__.get("judge")]
        for model in (*self.models.values(), *extras):
            if isinstance(model, Transformer):
                _place(model, device, chosen)
            elif hasattr(model, "to"):
                model.to(device)
        self.device = device
        if self.stored is not None and chosen is not None:
            self.stored = dataclasses.replace(self.stored, dtype=chosen)
        return self

    @cached_property
    def judge(self) -> Transformer | None:
        """The left-to-right model that the family's samples are judged by, loaded when first asked for."""
        entry = self.stored and self.stored.manifest["judge"]
        return self._load_stored("judge", entry) if entry else None

    @cached_property
    def twins(self) -> dict[str, Transformer]:
        """Models trained like those of the same name from another seed: how far apart two equals are."""
        entries = self.stored.manifest["twins"] if self.stored is not None else {}
        return {name: self._load_stored(f"twin of {name}", entry) for name, entry in entries.items()}

    def _load_stored(self, what: str, entry: dict[str, Any]) -> Transformer:
        assert self.stored is not None
        return _load_network(self.stored.folder, what, entry, self.device, self.stored.dtype)

    @property
    def folder(self) -> Path | None:
        """The folder it was loaded from."""
        return self.stored.folder if self.stored is not None else None

    @property
    def digest(self) -> str | None:
        """A sha256 of all that fixes what the family computes, as stored; None for one made in memory."""
        return self.stored.manifest["digest"] if self.stored is not None else None

    @classmethod
    def load(
        cls,
        source: str | Path,
        device: str | torch.device = "cpu",
        dtype: str | torch.dtype | None = None,
        revision: str | None = None,
    ) -> Family:
        """A family from a folder, by the name of a bundled one, or by its Hugging Face id "owner/name".

        `dtype` is what the blocks compute in: by default bfloat16 on CUDA and float32 elsewhere (the rest is float32
        either way; float64 is for tests). adaLN without time conditioning is folded into the weights."""
        from relaylm import convert

        if convert.recognise(source, revision, hub=False) is not None:  # files, lists, checkpoint folders
            return convert.load(source, device, dtype, revision)
        folder = locate(source, revision)
        if convert.recognise(folder) is not None:  # a checkpoint on the hub
            return convert.load(source, device, dtype, revision)
        manifest = read_manifest(folder)
        _refuse_pickles(folder)
        where = pick_device(device)
        chosen = _pick_dtype(dtype, where)
        tokenizer = None if manifest["tokenizer"] is None else load_tokenizer(manifest["tokenizer"], folder)
        models = {k: _load_network(folder, k, entry, where, chosen) for k, entry in manifest["models"].items()}
        return cls(
            models,
            manifest["mask_id"],
            manifest["vocab_size"],
            manifest["length"],
            tokenizer,
            manifest["name"],
            manifest["roles"]["light"],
            manifest["roles"]["heavy"],
            where,
            manifest["meta"],
            _Stored(folder, manifest, chosen),
        )

    from_pretrained = load

    def save_pretrained(self, folder: str | Path, *, overwrite: bool = False, **options: Any) -> Path:
        """Store what is in memory, judge and twins included; options as for `save_family`. A family loaded on CUDA has
        its blocks rounded to bfloat16: load on the CPU to keep all digits."""
        card = None
        if self.folder is not None and (self.folder / CARD).is_file():
            card = _read_bytes(self.folder / CARD).decode("utf-8", errors="replace")
        given: dict[str, Any] = {
            "name": self.name or None,
            "judge": self.judge,
            "twins": self.twins,
            "card": card,
            "meta": self.meta,
        }
        given |= {"light": self.light, "heavy": self.heavy, "length": self.length}
        return save_family(folder, self.models, self.tokenizer, overwrite=overwrite, **{**given, **options})


# -------------------------------------------------------------------------------------------- what belongs together


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not _name_re.fullmatch(name):
        raise UserError(f"{name!r} cannot name a model: letters, digits and _.- are allowed, a letter or digit first")
    if name in RESERVED:
        raise UserError(f"{name!r} cannot name a model: it is reserved, as are {', '.join(RESERVED)}")


def _numbers(model: Denoiser) -> tuple[int, int] | None:
    vocab_size, mask_id = getattr(model, "vocab_size", None), getattr(model, "mask_id", None)
    return None if vocab_size is None or mask_id is None else (int(vocab_size), int(mask_id))


def _check_together(numbers: Mapping[str, tuple[int, int]]) -> None:
    """Every model must have the first one's vocabulary size and mask id."""
    (first, expected), *rest = numbers.items()
    for name, (vocab_size, mask_id) in rest:
        if (vocab_size, mask_id) != expected:
            raise UserError(
                f"{name} has vocabulary {vocab_size} and mask {mask_id}, {first} has {expected[0]} and {expected[1]}: "
                f"models that take turns must share both"
            )


def _check_lengths(trained: Mapping[str, int], length: int) -> None:
    if length < 1:
        raise UserError(f"the length of a family must be at least 1, not {length}")
    for name, longest in trained.items():
        if longest < length:
            raise UserError(f"{name} was trained for length {longest}, but the family's length is {length}")


def _check_tokenizer(tokenizer: Tokenizer | None, vocab_size: int, mask_id: int) -> None:
    """The mask must not be one of the tokenizer's symbols, or text could not be told from what is still to write."""
    if tokenizer is None:
        return
    if tokenizer.size > vocab_size:
        raise UserError(f"the tokenizer has {tokenizer.size} tokens, but the models' vocabulary is {vocab_size}")
    if mask_id < tokenizer.size and mask_id != tokenizer.mask_id:
        own = "none" if tokenizer.mask_id is None else tokenizer.mask_id
        raise UserError(f"the models' mask {mask_id} is an ordinary token of the tokenizer (its own mask token: {own})")


# --------------------------------------------------------------------------------------------------------- devices


def pick_device(device: str | torch.device) -> torch.device:
    """ "auto" is the best one that is there; what is asked for by name must be there."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError:
        chosen = None
    if chosen is None or chosen.type not in ("cpu", "cuda", "mps"):
        raise UserError(f"{device!r} is not a device: write auto, cpu, cuda or mps")
    there = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}[chosen.type]
    if not there or (chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count()):
        raise UserError(f"this machine has no {chosen} that PyTorch can use: write auto or cpu")
    return chosen


def _pick_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    if dtype is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    chosen = DTYPES.get(str(dtype).removeprefix("torch."))
    if chosen is None or (chosen == torch.float64 and device.type == "mps"):
        raise UserError(f"{dtype} cannot be computed in on {device.type}: write float32, bfloat16 or float16")
    return chosen


def _place(network: Transformer, device: torch.device, dtype: torch.dtype | None) -> Transformer:
    """Half precision is for the blocks' matrices alone (`Transformer.cast`)."""
    if dtype in (torch.float32, torch.float64):
        return network.to(device, dtype)
    return network.to(device) if dtype is None else network.to(device, torch.float32).cast(dtype)


# --------------------------------------------------------------------------------------------------------- finding


def bundled() -> list[str]:
    """Names of the families that came with the package."""
    return sorted(path.parent.name for path in BUNDLED.glob(f"*/{MANIFEST}"))


def locate(source: str | Path, revision: str | None = None) -> Path:
    """The folder of a family: given as such, bundled, or fetched from the Hugging Face hub into its cache."""
    text = str(source)
    folder = Path(os.path.expanduser(text))  # os.path, here and below: never raises, whatever the text
    if not os.path.exists(folder):
        if os.path.isdir(_backup(folder)):
            return _backup(folder)  # a save was killed between its two renames
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
        manifest = json.loads(_read_bytes(path).decode("utf-8"))
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
        _check_name(name)
        _check_entry(entry, f"{where}, model {name}")
    if manifest["judge"] is not None:
        _check_entry(manifest["judge"], f"{where}, judge")
    if not manifest["models"]:
        raise UserError(f"{path} lists no models")
    built = {name: Architecture(**entry["architecture"]) for name, entry in manifest["models"].items()}
    built |= {f"the twin of {k}": Architecture(**entry["architecture"]) for k, entry in manifest["twins"].items()}
    numbers = {name: (a.vocab_size, a.mask_id) for name, a in built.items()}
    _check_together({**numbers, "the family": (manifest["vocab_size"], manifest["mask_id"])})
    _check_lengths({name: a.length for name, a in built.items()}, manifest["length"])
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


def _load_network(
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
    return _place(network, device, dtype)


def _read_tensors(path: Path, digest: str) -> dict[str, Tensor]:
    data = _read_bytes(path)
    if hashlib.sha256(data).hexdigest() != digest:
        raise UserError(f"{path} does not have the sha256 in {MANIFEST}: it was cut short or changed")
    try:
        return safetensors.torch.load(data)
    except Exception as error:  # malformed headers end in several types of error, depending on the version
        raise UserError(f"{path} is not a whole safetensors file ({error})") from None


def _stored_dtype(value: Tensor, dtype: torch.dtype) -> torch.dtype:
    """Vectors (norms, biases) are kept in float32 beside half-precision matrices: they weigh nothing."""
    return torch.float32 if value.dim() < 2 and dtype in (torch.bfloat16, torch.float16) else dtype


def _refuse_pickles(folder: Path) -> None:
    for root, _, files in os.walk(folder):
        for file in sorted(files):
            if file.lower().endswith(PICKLES):
                raise UserError(
                    f"{Path(root) / file} looks like a pickle, and relaylm never unpickles: remove it, families are "
                    f"safetensors and JSON alone"
                )


def _read_bytes(path: Path) -> bytes:
    if not path.is_file():
        raise UserError(f"{path} is missing")
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None


def _digest(manifest: Mapping[str, Any]) -> str:
    core = {key: manifest[key] for key in DIGESTED}
    return hashlib.sha256(json.dumps(core, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


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
    _check_together(
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
        def put(network: Transformer, place: str) -> dict[str, Any]:
            return _write_network(new, place, network, stored, max_shard_bytes)

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
    root: Path, place: str, network: Transformer, dtype: torch.dtype | None, max_shard_bytes: int
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
    (root / place).mkdir(parents=True)
    files = {}
    for number, names in enumerate(shards, 1):
        tensors = {k: state[k].to("cpu", _stored_dtype(state[k], dtype)).contiguous() for k in names}
        data = safetensors.torch.save(tensors, {"format": "pt"})
        file = f"{place}/model-{number:05d}-of-{len(shards):05d}.safetensors"
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


def _backup(folder: Path) -> Path:
    """Where an old family waits while a new one takes its place."""
    return folder.parent / f".{folder.name}.old"


def _replace_folder(target: Path, fill: Callable[[Path], None], overwrite: bool) -> None:
    """Fill a folder beside the target, sync it, and put it in the target's place.

    Two renames cannot be one step, so a kill between them leaves the old family under its backup name: `locate` reads
    it from there, and the next save puts it back first."""
    backup = _backup(target)
    if backup.is_dir():
        if target.exists():
            shutil.rmtree(backup)
        else:
            os.replace(backup, target)
    if target.exists() and not target.is_dir():
        raise UserError(f"cannot write a family to {target}: it is a file")
    if target.is_dir() and any(target.iterdir()):
        if not overwrite:
            raise UserError(f"{target} is not empty: choose another folder, or say that it may be overwritten")
        if not (target / MANIFEST).is_file():
            raise UserError(f"{target} is not a family (it has no {MANIFEST}), so it is not overwritten")
    target.parent.mkdir(parents=True, exist_ok=True)
    new = target.parent / f".{target.name}.new-{secrets.token_hex(4)}"
    try:
        new.mkdir()
        fill(new)
        for root, _, _ in os.walk(new, topdown=False):
            _sync_folder(Path(root))
        moved = target.is_dir() and any(target.iterdir())
        if moved:
            os.replace(target, backup)
        elif target.is_dir():
            target.rmdir()
        try:
            os.replace(new, target)
        except BaseException:
            if moved and not target.exists():
                os.replace(backup, target)
            raise
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    _sync_folder(target.parent)
    shutil.rmtree(backup, ignore_errors=True)


def _write(path: Path, data: bytes) -> None:
    with open(path, "xb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    if os.name == "nt":  # has no such thing
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


# ------------------------------------------------------------------------------------------------ laying out a request


def lay_out(
    family: Family,
    prompt: str | None = None,
    suffix: str | None = None,
    infill: str | None = None,
    length: int | None = None,
    max_new_tokens: int | None = None,
) -> np.ndarray:
    """Token ids (L,) of a request, -1 where the family is to write.

    A prompt stands at the front, a suffix at the end. `infill` is a whole text in which every `_` is one free position
    (one token; the text between blanks is tokenised by itself), and its length is its own. L is `length` if given,
    else prompt + max_new_tokens + suffix, else the family's length."""
    for key, value in (("max_new_tokens", max_new_tokens), ("length", length)):
        if value is not None and value < 1:
            raise UserError(f"{key} must be at least 1, not {value}")
    if length is not None and length > family.length:
        raise UserError(f"length {length} is more than the family's {family.length}")
    if length is not None and max_new_tokens is not None:
        raise UserError("give length or max_new_tokens, not both")
    if infill is not None:
        if prompt or suffix or max_new_tokens is not None:
            raise UserError("infill already says what stands where: give it without prompt, suffix and max_new_tokens")
        return _lay_out_infill(family, infill, length)
    front, back = _encode(family, prompt, "prompt"), _encode(family, suffix, "suffix")
    what = "the prompt and the suffix take" if front and back else f"the {'suffix' if back else 'prompt'} takes"
    taken = len(front) + len(back)
    if max_new_tokens is not None:
        length = taken + max_new_tokens
        if length > family.length:
            known = f"{what} {taken} and " if taken else ""
            raise UserError(f"{known}max_new_tokens is {max_new_tokens}, but the family's length is {family.length}")
    length = length or family.length
    if taken > length:
        raise UserError(f"{what} {taken} positions, but the length is {length}")
    if taken == length:
        raise UserError(f"nothing is left to write: {what} all {length} positions")
    return np.array(front + [-1] * (length - taken) + back, dtype=np.int64)


def _lay_out_infill(family: Family, infill: str, length: int | None) -> np.ndarray:
    ids: list[int] = []
    for number, piece in enumerate(infill.split(BLANK)):
        ids += ([-1] if number else []) + _encode(family, piece, "infill text")
    if -1 not in ids:
        raise UserError(f"nothing is left to write: the infill text has no {BLANK} (one for each free position)")
    if length is not None and length != len(ids):
        raise UserError(f"the infill text takes {len(ids)} positions, but length is {length}: leave length out")
    if len(ids) > family.length:
        raise UserError(f"the infill text takes {len(ids)} positions, but the family's length is {family.length}")
    return np.array(ids, dtype=np.int64)


def _encode(family: Family, text: str | None, what: str) -> list[int]:
    if not text:
        return []
    if family.tokenizer is None:
        raise UserError(f"this family has no tokenizer, so it cannot read the {what}: give token ids instead")
    try:
        ids = family.tokenizer.encode(text)
    except UserError as error:
        raise UserError(f"the {what} cannot be read: {error}") from None
    if family.mask_id in ids:
        raise UserError(f"the {what} contains the mask token: use infill with {BLANK} for what is to be written")
    return ids


# -------------------------------------------------------------------------------------------------- what is inside


def describe(family: Family | str | Path) -> dict[str, Any]:
    """What `relaylm info` shows. From a source it reads family.json and the sizes of the files, not the weights.

    `flops_per_call` is one row through the network with logits at one position, as the exact sampler mostly calls it;
    `flops_full` has logits at every position, as published samplers do."""
    if isinstance(family, Family) and family.stored is not None:
        family = family.stored.folder
    if isinstance(family, Family):
        about = _outline(family.name, family.length, family.vocab_size, family.mask_id, family.light, family.heavy)
        about["tokenizer"] = None if family.tokenizer is None else family.tokenizer.to_json()
        about["models"] = {name: _describe_model(model, family.length) for name, model in family.models.items()}
        return {**about, "meta": family.meta}
    from relaylm import convert

    if convert.recognise(family) is not None:
        return convert.describe(family)
    folder = locate(family)
    manifest = read_manifest(folder)
    length = manifest["length"]
    entries = sorted(manifest["models"].items(), key=lambda item: _entry_flops(item[1], length, 1))
    names = [name for name, _ in entries]
    roles = manifest["roles"]
    light, heavy = roles["light"] or names[0], roles["heavy"] or names[-1]
    about = _outline(manifest["name"], length, manifest["vocab_size"], manifest["mask_id"], light, heavy)
    about["tokenizer"] = manifest["tokenizer"]
    about["models"] = {name: _describe_entry(folder, entry, length) for name, entry in entries}
    judge = manifest["judge"]
    about["judge"] = None if judge is None else _describe_entry(folder, judge, length)
    about["twins"] = {name: _describe_entry(folder, entry, length) for name, entry in manifest["twins"].items()}
    files = list(_files(manifest))
    about["bytes"] = sum((folder / file).stat().st_size for file in files if (folder / file).is_file())
    about["missing"] = [file for file in files if not (folder / file).is_file()]
    return {**about, "folder": str(folder), "digest": manifest["digest"], "meta": manifest["meta"]}


def list_families(*places: str | Path) -> list[dict[str, Any]]:
    """What `relaylm ls` shows: the bundled families, and those directly inside each of `places` (the current folder if
    none is given). A folder that cannot be read is listed with its error."""
    found: dict[Path, str] = {BUNDLED / name: name for name in bundled()}
    for place in places or (Path("."),):
        root = Path(place).expanduser()
        for manifest in (root / MANIFEST, *sorted(root.glob(f"*/{MANIFEST}"))):
            if manifest.is_file() and not manifest.parent.name.startswith("."):
                found.setdefault(manifest.parent, str(manifest.parent))
    listed = []
    for folder, source in found.items():
        entry: dict[str, Any] = {"source": source, "bundled": folder.parent == BUNDLED}
        try:
            about = describe(folder)
            keys = ("name", "length", "vocab_size", "bytes", "missing")
            entry |= {key: about[key] for key in keys} | {"models": list(about["models"]), "error": None}
        except UserError as error:
            entry["error"] = str(error)
        listed.append(entry)
    return listed


def _outline(name: str, length: int, vocab_size: int, mask_id: int, light: str, heavy: str) -> dict[str, Any]:
    return {
        "name": name,
        "folder": None,
        "length": length,
        "vocab_size": vocab_size,
        "mask_id": mask_id,
        "tokenizer": None,
        "roles": {"light": light, "heavy": heavy},
        "models": {},
        "judge": None,
        "twins": {},
        "bytes": None,
        "missing": [],
        "digest": None,
    }


def _describe_model(model: Denoiser, length: int) -> dict[str, Any]:
    architecture = getattr(model, "architecture", None)
    flops = getattr(model, "flops", None)
    parameters = getattr(model, "parameters", None)
    return {
        "depth": getattr(model, "depth", None),
        "width": getattr(architecture, "width", None),
        "heads": getattr(architecture, "heads", None),
        "parameters": None if parameters is None else sum(value.numel() for value in parameters()),
        "time_conditioning": getattr(model, "time_conditioning", None),
        "flops_per_call": None if flops is None else flops(length, 1),
        "flops_full": None if flops is None else flops(length, None),
        "dtype": None,
        "bytes": None,
    }


def _describe_entry(folder: Path, entry: Mapping[str, Any], length: int) -> dict[str, Any]:
    a = Architecture(**entry["architecture"])
    return {
        "depth": a.depth,
        "width": a.width,
        "heads": a.heads,
        "parameters": entry["parameters"],
        "time_conditioning": a.time_conditioning,
        "flops_per_call": _entry_flops(entry, length, 1),
        "flops_full": _entry_flops(entry, length, None),
        "dtype": entry["dtype"],
        "bytes": sum((folder / file).stat().st_size for file in entry["files"] if (folder / file).is_file()),
    }


def _entry_flops(entry: Mapping[str, Any], length: int, positions: int | None) -> float:
    a = Architecture(**entry["architecture"])
    return cost.call_flops(a.depth, a.width, a.vocab_size, length, positions, a.mlp_ratio)


def _files(manifest: Mapping[str, Any]) -> Iterator[str]:
    """Every file that belongs to the family, family.json first."""
    yield from (MANIFEST, CARD)
    if (manifest["tokenizer"] or {}).get("type") == "json":
        yield "tokenizer.json"
    for entry in (*manifest["models"].values(), manifest["judge"] or {"files": {}}, *manifest["twins"].values()):
        yield from entry["files"]
