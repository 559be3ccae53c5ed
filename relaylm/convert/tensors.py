"""Tensors that can be looked at before they are read, and what is known of a checkpoint before its weights are.

Every reader of a format works in two stages. The first looks at names, shapes and the configuration alone and gives a
`Found`; a tensor that is renamed, missing or transposed is refused here, by name. The second, `Found.build`, reads the
weights, each tensor once and none that is not needed, so that no model is ever held twice.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relaylm.denoiser import Denoiser
from relaylm.errors import UserError

Shapes = dict[str, tuple[int, ...]]

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}


@dataclass(frozen=True)
class Lazy:
    """A stored tensor: what it is, and how to get it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    read: Callable[[], Tensor]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.itemsize


@dataclass(frozen=True)
class Options:
    """What a user may say where a checkpoint does not, or says it wrongly."""

    mask_id: int | None = None
    length: int | None = None
    heads: int | None = None
    time_conditioning: bool | None = None
    ema: bool = True  # take the averaged weights of a training checkpoint, as its authors do
    device_map: Any = None  # for models that run through transformers

    def said(self) -> dict[str, Any]:
        """Those that were given, for a converted folder to remember."""
        named = {key: getattr(self, key) for key in ("mask_id", "length", "heads", "time_conditioning")}
        return {key: value for key, value in named.items() if value is not None}


@dataclass
class Found:
    """A checkpoint that was recognised and whose tensors are all there. `build(device, dtype, fold)` reads them."""

    format: str
    name: str
    vocab_size: int  # counts the mask
    mask_id: int
    length: int
    depth: int
    width: int
    heads: int
    parameters: int
    bytes: int
    dtype: str  # of the stored weights
    time_conditioning: bool
    storable: bool  # can relaylm's own family folder hold it?
    files: list[Path]  # what has to travel with it, for formats that it cannot
    build: Callable[[torch.device, torch.dtype | None, bool], Denoiser] = field(repr=False)
    missing: list[str] = field(default_factory=list)  # what the checkpoint should have and has not, in words
    meta: dict[str, Any] = field(default_factory=dict)

    def describe(self) -> dict[str, Any]:
        keys = ("format", "vocab_size", "mask_id", "length", "depth", "width", "heads", "parameters", "bytes", "dtype",
                "time_conditioning", "missing")  # fmt: skip
        return {key: getattr(self, key) for key in keys} | {"meta": self.meta}


def from_safetensors(paths: Iterable[Path]) -> dict[str, Lazy]:
    """The tensors of one or several safetensors files, opened but not read."""
    found: dict[str, Lazy] = {}
    for path in paths:
        for name, lazy in _open_safetensors(path).items():
            if name in found:
                raise UserError(f"{path}: tensor {name} is there a second time")
            found[name] = lazy
    return found


def _open_safetensors(path: Path) -> dict[str, Lazy]:
    from safetensors import safe_open

    try:
        file = safe_open(str(path), framework="pt")
        found = {}
        for name in file.keys():  # noqa: SIM118  (not a mapping)
            view = file.get_slice(name)
            stored = view.get_dtype()
            if stored not in DTYPES:
                raise UserError(f"{path}: tensor {name} is of type {stored}, which relaylm does not read")

            def read(name: str = name) -> Tensor:
                return file.get_tensor(name)

            found[name] = Lazy(tuple(view.get_shape()), DTYPES[stored], read)
    except UserError:
        raise
    except Exception as error:  # malformed headers end in several types of error, depending on the version
        raise UserError(f"{path} is not a whole safetensors file ({_first_line(error)})") from None
    return found


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a Hugging Face folder: those of its index, else model.safetensors, else all of them."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        names = read_json(index).get("weight_map", {})
        files = sorted(set(names.values())) if isinstance(names, dict) else []
        for name in files:
            if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+\.safetensors", name):
                raise UserError(f"{index}: {name!r} is not the name of a safetensors file in the folder")
            if not (folder / name).is_file():
                raise UserError(f"{folder}: {name} is missing, though {index.name} names it")
        return [folder / name for name in files]
    single = folder / "model.safetensors"
    return [single] if single.is_file() else sorted(folder.glob("*.safetensors"))


def read_json(path: Path) -> dict[str, Any]:
    try:
        data = json.loads(path.read_bytes().decode("utf-8"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except (ValueError, RecursionError) as error:
        raise UserError(f"{path} is not valid JSON ({_first_line(error)})") from None
    if not isinstance(data, dict):
        raise UserError(f"{path} must hold a JSON object")
    return data


def check(found: Mapping[str, Any], expected: Mapping[str, tuple[int, ...]], where: object) -> None:
    """Are these exactly the tensors that a layout has? The first that is not is named."""
    extra = sorted(set(found) - set(expected))
    for name, shape in expected.items():
        if name not in found:
            alike = [other for other in extra if tuple(getattr(found[other], "shape", ())) == shape]
            hint = f"; there is {alike[0]}, which does not belong" if len(alike) == 1 else ""
            raise UserError(f"{where}: tensor {name} is missing (expected shape {shape}){hint}")
        lazy = found[name]
        if not isinstance(lazy, Lazy):
            raise UserError(f"{where}: {name} is not a plain tensor but {lazy!r}")
        if lazy.shape != shape:
            hint = ": it is transposed" if lazy.shape == shape[::-1] else ""
            raise UserError(f"{where}: tensor {name} has shape {lazy.shape}, expected {shape}{hint}")
        if not lazy.dtype.is_floating_point:
            raise UserError(f"{where}: tensor {name} holds {lazy.dtype}, expected floating-point numbers")
    if extra:
        raise UserError(f"{where}: tensor {extra[0]} does not belong to this layout ({len(extra)} such)")


def count(shapes: Mapping[str, tuple[int, ...]]) -> int:
    """How many numbers the tensors of a layout hold."""
    return sum(math.prod(shape) for shape in shapes.values())


def safetensors_size(shapes: Mapping[str, tuple[int, ...]], itemsize: int = 4, metadata: str = "") -> tuple[int, int]:
    """Bytes of the header and of the tensors of a safetensors file that holds a layout: 8 for the header's length, the
    header itself as compact JSON padded with spaces to a multiple of 8, then the tensors, sorted by name."""
    offset, header = 0, {}
    for name in sorted(shapes):
        end = offset + itemsize * math.prod(shapes[name])
        header[name] = {"dtype": "F32", "shape": list(shapes[name]), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(
        header if not metadata else {"__metadata__": {"format": metadata}, **header}, separators=(",", ":")
    )
    return 8 + math.ceil(len(text) / 8) * 8, offset


def whole(value: object, what: str, where: object) -> int:
    """A positive whole number out of a configuration."""
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 40:
        raise UserError(f"{where}: {what} must be a whole number from 1 up, not {value!r}")
    return value


def dtype_name(tensors: Iterable[Lazy]) -> str:
    names = sorted({str(lazy.dtype).removeprefix("torch.") for lazy in tensors})
    return names[0] if len(names) == 1 else ", ".join(names)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:200] if lines else type(error).__name__
