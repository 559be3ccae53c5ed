"""The rules that the models of one family obey, and where they compute.

Models that take turns along one trajectory read and write the same tokens, so vocabulary size, mask, length and
tokenizer must agree, and each model needs a name that a schedule can contain. They compute on one device, in one type;
half precision is for the blocks' matrices alone.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch

from relaylm.core import notation
from relaylm.errors import UserError, meant
from relaylm.models.denoiser import Denoiser, Transformer
from relaylm.models.tokenizer import Tokenizer

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Model names that mean something else in a schedule or in the folder.
RESERVED = (notation.LIGHT, notation.HEAVY, "light", "heavy", *notation.RESERVED, "judge", "twins")
SCHEDULES = ("heavy", "light", *notation.RESERVED[:-1])  # schedules by name, which a wrong model name may be meant as
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


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
    if tokenizer is not None:
        _check_tokenizer(tokenizer, vocab_size, mask_id)

    def weight(model: Denoiser) -> tuple[float, float]:
        return model.flops(length, 1) if hasattr(model, "flops") else 0.0, getattr(model, "depth", 0)

    return dict(sorted(models.items(), key=lambda item: weight(item[1])))


def check_whole(models: Mapping[str, Any]) -> None:
    """Refuse models that write block after block where whole rows are asked for."""
    for name, model in models.items():
        if block := getattr(model, "block_length", 0):
            raise UserError(f"{name} writes one block of {block} positions after another: only sample and bound do so")


def check_name(name: str) -> None:
    """Refuse a name that a schedule or a family's folder could not contain."""
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise UserError(f"{name!r} cannot name a model: letters, digits and _.- are allowed, a letter or digit first")
    if name in RESERVED:
        raise UserError(f"{name!r} cannot name a model: it is reserved, as are {', '.join(RESERVED)}")


def check_known(names: Iterable[str], models: Mapping[str, Any]) -> None:
    """Refuse a name that no model of the family has."""
    for name in names:
        if name not in models:
            hint = meant(name, [*models, *SCHEDULES]) or ":"
            raise UserError(f"there is no model {name!r} in this family{hint} it has {', '.join(models)}")


def other_spelling(name: str, models: Mapping[str, Any]) -> str:
    """The name of a model that is asked for by its depth in the other way of writing it, `4b` for `d4` and the reverse,
    where the family has no model of that very name; else the name as it is."""
    depth = re.fullmatch(r"d([0-9]+)|([0-9]+)b", name)
    other = "" if depth is None else f"{depth[1]}b" if depth[1] else f"d{depth[2]}"
    return other if name not in models and other in models else name


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


def _check_tokenizer(tokenizer: Tokenizer, vocab_size: int, mask_id: int) -> None:
    """The mask must not be one of the tokenizer's symbols: text and free positions would look the same."""
    if tokenizer.size > vocab_size:
        raise UserError(f"the tokenizer has {tokenizer.size} tokens, but the models' vocabulary is {vocab_size}")
    if mask_id < tokenizer.size and mask_id != tokenizer.mask_id:
        own = "none" if tokenizer.mask_id is None else tokenizer.mask_id
        raise UserError(f"the models' mask {mask_id} is an ordinary token of the tokenizer (its own mask token: {own})")


# -------------------------------------------------------------------------------------------------------------- devices


def pick_device(device: str | torch.device) -> torch.device:
    """The device of that name, which must be present; "auto" is the fastest one."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    try:
        chosen = torch.device(device)
    except RuntimeError:
        chosen = None
    if chosen is None or chosen.type not in ("cpu", "cuda", "mps"):
        raise UserError(f"{device!r} is not a device: write auto, cpu, cuda or mps")
    present = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}[chosen.type]
    if not present or (chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count()):
        raise UserError(f"this machine has no {chosen} that PyTorch can use: write auto or cpu")
    return chosen


def cpu_has_bfloat16() -> bool:
    """True if this CPU has instructions for products of bfloat16; PyTorch computes them on any, but slowly."""
    checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # named so from PyTorch 2.6 on
    return any(getattr(torch.cpu, name, lambda: False)() for name in checks)


def pick_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """The type the blocks compute in: by default bfloat16 on CUDA, float32 elsewhere."""
    if dtype is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    chosen = DTYPES.get(str(dtype).removeprefix("torch."))
    if chosen is None or (chosen == torch.float64 and device.type == "mps"):
        raise UserError(f"{dtype} cannot be computed in on {device.type}: write float32, bfloat16 or float16")
    return chosen


def place(network: Transformer, device: torch.device, dtype: torch.dtype | None) -> Transformer:
    """The network on a device; half precision goes to the blocks' matrices alone (`Transformer.cast`)."""
    if dtype in (torch.float32, torch.float64):
        return network.to(device, dtype)
    return network.to(device) if dtype is None else network.to(device, torch.float32).cast(dtype)
