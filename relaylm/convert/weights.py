"""The tensors of a checkpoint on disk, safetensors or PyTorch's own files, opened but not read."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from relaylm.convert import pickles
from relaylm.convert.tensors import Lazy
from relaylm.errors import UserError, reason
from relaylm.files import read_object

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip


def open_weights(path: Path) -> tuple[dict[str, Any], list[Path]]:
    """The tensors of a file, or of a Hugging Face folder (safetensors, else pytorch_model.bin), and the files that hold
    them. What a PyTorch file has in place of a tensor is passed on, for `tensors.check` to name."""
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
