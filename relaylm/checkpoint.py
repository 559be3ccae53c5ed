"""Files that are either whole or not there, and training checkpoints made of them.

Everything is written to a temporary neighbour, fsynced, renamed over its name, and the folder fsynced: whatever
happens in between (kill -9, a full disk, a power cut) the name holds either the old file or the new one, never a part.

A checkpoint is one safetensors file, so there is one rename and no two files to keep in step: weights, their moving
average and AdamW's moments as tensors, and everything else as JSON in the header, with a CRC-32 of the data. Nothing is
ever pickled.
"""

from __future__ import annotations

import contextlib
import json
import os
import struct
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from relaylm.errors import UserError

_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.uint8: "U8",
}
_STATE, _CRC = "state", "crc32"


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable: a rename is on disk only after this."""
    if os.name == "nt":  # has no such thing
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def atomic_write(path: Path, parts: Iterable[bytes | memoryview]) -> None:
    """Write a file whole or not at all. A full disk or an unwritable folder is a UserError, and what was there
    stays."""
    temporary = path.with_name(path.name + ".tmp")  # a fixed name, so that a killed run leaves at most one behind
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            for part in parts:
                view = memoryview(part).cast("B")
                while len(view):
                    view = view[os.write(handle, view) :]
            os.fsync(handle)
        finally:
            os.close(handle)
        os.replace(temporary, path)
        sync_folder(path.parent)
    except OSError as error:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        kept = "; the last good one is kept" if path.exists() else ""
        raise UserError(f"cannot write {path}: {error.strerror or error}{kept}") from error


def write_json(path: Path, value: Any) -> None:
    atomic_write(path, [(json.dumps(value, indent=1) + "\n").encode()])


def read_json(path: Path) -> Any:
    """The content of a JSON file, None if there is none."""
    try:
        return json.loads(path.read_text())
    except FileNotFoundError:
        return None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from None
    except ValueError:
        raise UserError(f"{path} is not valid JSON") from None


def _bytes(tensor: Tensor) -> memoryview:
    """The bytes of a tensor on the host, not copied."""
    array: Any = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    return memoryview(array)


def save(path: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Write a checkpoint. Tensors are copied to the host one by one as they come, and held until the file is whole."""
    header: dict[str, Any] = {}
    parts: list[memoryview] = []
    position = crc = 0
    for name in sorted(tensors):  # the order in which the checksum runs
        host = tensors[name].detach().cpu().contiguous()
        data = _bytes(host)
        header[name] = {
            "dtype": _NAMES[host.dtype],
            "shape": list(host.shape),
            "data_offsets": [position, position + data.nbytes],
        }
        crc = zlib.crc32(data, crc)
        position += data.nbytes
        parts.append(data)
    header["__metadata__"] = {_STATE: json.dumps(state), _CRC: str(crc)}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # the format wants data aligned to eight bytes
    atomic_write(path, [struct.pack("<Q", len(text)), text, *parts])


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The tensors and the state of a checkpoint, None if there is none. A damaged file is a UserError."""
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        return None
    try:
        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in sorted(file.keys())}
        crc = 0
        for tensor in tensors.values():
            crc = zlib.crc32(_bytes(tensor), crc)
        if str(crc) != metadata[_CRC]:
            raise ValueError("checksum")
        return tensors, json.loads(metadata[_STATE])
    except OSError as error:
        raise UserError(f"cannot read the checkpoint {path}: {error.strerror or error}") from None
    except (SafetensorError, ValueError, KeyError, RuntimeError) as error:
        raise UserError(
            f"the checkpoint {path} is damaged ({str(error).splitlines()[0] if str(error) else 'unreadable'}): "
            f"remove it to train this model again"
        ) from None
