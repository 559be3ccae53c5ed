"""What the models of one family must share, and where they compute: the rules that `Family` and its folder both obey.

Models that take turns along one trajectory must read and write the same tokens, so vocabulary size, mask, length and
tokenizer must agree, and each model needs a name that a schedule can say. They compute on one device, in one type;
half precision is for the blocks' matrices alone.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from relaylm import schedule
from relaylm.denoiser import Denoiser, Transformer
from relaylm.errors import UserError
from relaylm.tokenizer import Tokenizer

DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Model names that mean something else in a schedule or in the folder.
RESERVED = (schedule.LIGHT, schedule.HEAVY, "light", "heavy", *schedule.RESERVED, "judge", "twins")
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")


# ------------------------------------------------------------------------------------------------ what belongs together


def check_name(name: str) -> None:
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise UserError(f"{name!r} cannot name a model: letters, digits and _.- are allowed, a letter or digit first")
    if name in RESERVED:
        raise UserError(f"{name!r} cannot name a model: it is reserved, as are {', '.join(RESERVED)}")


def numbers_of(model: Denoiser) -> tuple[int, int] | None:
    vocab_size, mask_id = getattr(model, "vocab_size", None), getattr(model, "mask_id", None)
    return None if vocab_size is None or mask_id is None else (int(vocab_size), int(mask_id))


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
    if length < 1:
        raise UserError(f"the length of a family must be at least 1, not {length}")
    for name, longest in trained.items():
        if longest < length:
            raise UserError(f"{name} was trained for length {longest}, but the family's length is {length}")


def check_tokenizer(tokenizer: Tokenizer | None, vocab_size: int, mask_id: int) -> None:
    """The mask must not be one of the tokenizer's symbols, or text could not be told from what is still to write."""
    if tokenizer is None:
        return
    if tokenizer.size > vocab_size:
        raise UserError(f"the tokenizer has {tokenizer.size} tokens, but the models' vocabulary is {vocab_size}")
    if mask_id < tokenizer.size and mask_id != tokenizer.mask_id:
        own = "none" if tokenizer.mask_id is None else tokenizer.mask_id
        raise UserError(f"the models' mask {mask_id} is an ordinary token of the tokenizer (its own mask token: {own})")


# -------------------------------------------------------------------------------------------------------------- devices


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


def cpu_has_bfloat16() -> bool:
    """Has this CPU instructions for products of bfloat16? PyTorch computes them on any, but slowly."""
    asked = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")  # named so from PyTorch 2.6 on
    return any(getattr(torch.cpu, name, lambda: False)() for name in asked)


def pick_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    if dtype is None:
        return torch.bfloat16 if device.type == "cuda" else torch.float32
    chosen = DTYPES.get(str(dtype).removeprefix("torch."))
    if chosen is None or (chosen == torch.float64 and device.type == "mps"):
        raise UserError(f"{dtype} cannot be computed in on {device.type}: write float32, bfloat16 or float16")
    return chosen


def place(network: Transformer, device: torch.device, dtype: torch.dtype | None) -> Transformer:
    """Half precision is for the blocks' matrices alone (`Transformer.cast`)."""
    if dtype in (torch.float32, torch.float64):
        return network.to(device, dtype)
    return network.to(device) if dtype is None else network.to(device, torch.float32).cast(dtype)
