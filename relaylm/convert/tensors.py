"""Checkpoints opened but not read: their tensors, what is known before, and the checks that all formats share.

Every reader of a format works in two stages. The first looks at names, shapes and the configuration alone and returns a
`Found`; a tensor that is renamed, missing or transposed is refused here, by name. The second, `Found.build`, reads the
weights, each tensor once and none that is not needed, so that no model is ever held twice.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from relaylm.convert import pickles
from relaylm.convert.pickles import Lazy
from relaylm.errors import UserError, brief, reason, whole
from relaylm.files import read_object
from relaylm.models.denoiser import Denoiser

Shapes = dict[str, tuple[int, ...]]
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


@dataclass(frozen=True)
class Options:
    """What a user may add where a checkpoint is silent or wrong."""

    mask_id: int | None = None
    length: int | None = None
    heads: int | None = None
    block_length: int | None = None  # positions of a block, of models that write in blocks; 0 for whole rows
    time_conditioning: bool | None = None
    ema: bool = True  # take the averaged weights of a training checkpoint, as its authors do
    device_map: Any = None  # for models that run through transformers

    def __post_init__(self) -> None:
        for name, least in (("mask_id", 0), ("length", 1), ("heads", 1), ("block_length", 0)):
            if (value := getattr(self, name)) is not None:
                whole(value, name, least)
        for name in ("time_conditioning", "ema"):
            if not isinstance(value := getattr(self, name), bool | None):
                raise UserError(f"{name} must be True or False, not {brief(value)}")

    @classmethod
    def checked(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """The options that were given, None left out; an unknown one is refused."""
        for key in given:
            if key not in cls.__dataclass_fields__:
                raise UserError(f"{key!r} is not an option for a checkpoint: {', '.join(cls.__dataclass_fields__)} are")
        return {key: value for key, value in given.items() if value is not None}


@dataclass
class Found:
    """A checkpoint that was recognised and whose tensors are all there. `build(device, dtype, fold)` reads them."""

    format: str
    name: str
    shape: Any  # vocab_size (with the mask), mask_id, length, depth, width, heads, time_conditioning
    parameters: int
    tensors: Mapping[str, Lazy] = field(repr=False)
    build: Callable[[torch.device, torch.dtype | None, bool], Denoiser] = field(repr=False)
    storable: bool = False  # can relaylm's own family folder hold it?
    files: list[Path] = field(default_factory=list)  # what has to be copied with it, for formats that it cannot
    missing: list[str] = field(default_factory=list)  # what the checkpoint lacks, in words
    meta: dict[str, Any] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """The size of its tensors on disk."""
        return sum(lazy.elements * lazy.dtype.itemsize for lazy in self.tensors.values())

    def describe(self) -> dict[str, Any]:
        """What `relaylm info` shows of one model."""
        numbers = ("vocab_size", "mask_id", "length", "depth", "width", "heads", "time_conditioning")
        types = sorted({str(lazy.dtype).removeprefix("torch.") for lazy in self.tensors.values()})
        return {
            "format": self.format,
            **{key: getattr(self.shape, key) for key in numbers},
            "block_length": getattr(self.shape, "block_length", 0),
            "parameters": self.parameters,
            "bytes": self.bytes,
            "dtype": ", ".join(types),
            "missing": self.missing,
            "meta": self.meta,
        }


def count(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """How many numbers the tensors of a layout hold."""
    return sum(math.prod(shape) for shape in shapes.values())


def shape_of(tensors: Mapping[str, Any], key: str, dims: int, where: object) -> tuple[int, ...]:
    """The shape of a tensor that must be there, with so many dimensions."""
    value = tensors.get(key)
    if not isinstance(value, Lazy) or len(value.shape) != dims:
        raise UserError(f"{where}: tensor {key} is missing or has not {dims} dimension{'s' * (dims > 1)}")
    return value.shape


def blocks_of(names: Iterable[Any], prefix: str) -> int:
    """How many numbered blocks the names of tensors have: one more than the largest number after the prefix."""
    numbers = [int(match[1]) for name in names if (match := re.match(rf"{re.escape(prefix)}(\d+)\.", str(name)))]
    return max(numbers, default=-1) + 1


def number(config: Mapping[str, Any], key: str, where: object, default: int | None = None) -> int:
    """A positive whole number out of a configuration."""
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 40:
        raise UserError(f"{where}: {key} must be a whole number from 1 up, not {brief(value)}")
    return value


def real(config: Mapping[str, Any], key: str, where: object, default: float) -> float:
    """A positive number out of a configuration."""
    value = config.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise UserError(f"{where}: {key} must be a number above 0, not {brief(value)}")
    return float(value)


def open_weights(path: Path) -> tuple[dict[str, Any], list[Path]]:
    """The tensors of a file, or of a Hugging Face folder (safetensors, else pytorch_model.bin), and the files that hold
    them. What a PyTorch file has in place of a tensor is passed on, for `denoiser.check_tensors` to name."""
    if path.is_file() and path.suffix != ".safetensors":
        return pickles.state_of(pickles.read(path), path), [path]
    if files := [path] if path.is_file() else weight_files(path):
        return open_safetensors(files), files
    if not (file := path / "pytorch_model.bin").is_file():
        raise UserError(f"{path} has no weights: neither safetensors nor {file.name}")
    return pickles.state_of(pickles.read(file), file), [file]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder: those of its index, else model.safetensors, else all of them."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = read_object(index).get("weight_map")
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise UserError(f"{index}: its weight_map must say for each tensor in which file it is, as text")
        files = sorted(set(names.values()))
        for name in files:
            if not re.fullmatch(r"[\w.-]+\.safetensors", name):
                raise UserError(f"{index}: {name!r} is not the name of a safetensors file in the folder")
            if not (folder / name).is_file():
                raise UserError(f"{folder}: {name} is missing, though {index.name} names it")
        return [folder / name for name in files]
    single = folder / "model.safetensors"
    return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))


def open_safetensors(paths: Iterable[Path]) -> dict[str, Lazy]:
    """The tensors of one or several safetensors files."""
    found: dict[str, Lazy] = {}
    for path in paths:
        for name, lazy in _open_file(path).items():
            if name in found:
                raise UserError(f"{path}: tensor {name} is there a second time")
            found[name] = lazy
    return found


def _open_file(path: Path) -> dict[str, Lazy]:
    try:
        file = safe_open(str(path), framework="pt")
        views = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
        stored = {name: (tuple(view.get_shape()), view.get_dtype()) for name, view in views.items()}
    except Exception as error:  # malformed headers end in several types of error, depending on the version
        raise UserError(f"{path} is not a whole safetensors file ({reason(error)})") from None

    for name, (_, kind) in stored.items():
        if kind not in DTYPES:
            raise UserError(f"{path}: tensor {name} is of type {kind}, which relaylm does not read")
    return {name: Lazy(shape, DTYPES[kind], partial(file.get_tensor, name)) for name, (shape, kind) in stored.items()}
