"""Training checkpoints: one safetensors file, replaced atomically, so that there are no two files to keep in step.

Weights, their moving average and the optimiser's moments are tensors; everything else is JSON in the header, with a
CRC-32 of the data, which safetensors does not check by itself. Nothing is ever pickled.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor

from relaylm.errors import UserError, reason
from relaylm.files import atomic_write

_STATE, _CRC = "state", "crc32"


def _crc32(tensors: Mapping[str, Tensor]) -> str:
    crc = 0
    for name in sorted(tensors):
        data: Any = tensors[name].reshape(-1).view(torch.uint8).numpy()
        crc = zlib.crc32(data, crc)
    return str(crc)


def save(path: Path, tensors: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Write a checkpoint."""
    host = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    atomic_write(path, safetensors.torch.save(host, {_STATE: json.dumps(state), _CRC: _crc32(host)}))


def load(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    """The tensors and the state of a checkpoint, None if there is none. A damaged file is a UserError."""
    return _read(path, whole=True)


def load_state(path: Path) -> dict[str, Any] | None:
    """The state alone: the tensors are neither read nor checked."""
    found = _read(path, whole=False)
    return None if found is None else found[1]


def _read(path: Path, whole: bool) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
    if not path.exists():
        return None
    try:
        with safetensors.safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in sorted(file.keys())} if whole else {}
        if whole and _crc32(tensors) != metadata[_CRC]:
            raise ValueError("its checksum does not match")
        return tensors, json.loads(metadata[_STATE])
    except OSError as error:
        raise UserError(f"cannot read the checkpoint {path}: {reason(error)}") from None
    except (safetensors.SafetensorError, ValueError, KeyError, RuntimeError) as error:
        message = f"the checkpoint {path} is damaged ({reason(error)}): remove it to train this model again"
        raise UserError(message) from None
