"""What arguments of the library may be, said once: `checked` refuses others by name, before anything is done."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from relaylm.errors import UserError, brief

if TYPE_CHECKING:
    import numpy as np

P = ParamSpec("P")
R = TypeVar("R")
LARGEST_TOKEN = 2**31 - 1
# Whole numbers, from and up to.
WHOLE = dict.fromkeys(("n", "length", "max_new_tokens", "batch_size", "top_k", "stride", "block_length"), (1, 2**32))
WHOLE |= {"first_row": (0, 2**32 - 1), "seed": (0, 2**64 - 1), "rows": (1, 2**32), "draws": (1, 2**32)}
NUMBERS = ("temperature", "top_p")
TEXTS = ("prompt", "suffix", "infill", "stop", "light", "heavy", "recipe", "method")


def whole(value: object, what: str, low: int = 1, high: int = 2**32) -> int:
    """A whole number within limits."""
    if isinstance(value, bool) or not isinstance(value, Integral) or not low <= int(value) <= high:
        raise UserError(f"{what} must be a whole number from {low} to {high}, not {brief(value)}")
    return int(value)


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """The function, with its arguments of the names above checked; None stands for a default everywhere."""
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        for name, value in signature.bind(*args, **kwargs).arguments.items():
            if value is None and signature.parameters[name].default is None:
                continue
            _check(name, value)
        return function(*args, **kwargs)

    return call


def _check(name: str, value: Any) -> None:
    if name in WHOLE:
        whole(value, name, *WHOLE[name])
    elif name in NUMBERS and (isinstance(value, bool) or not isinstance(value, Real)):
        raise UserError(f"{name} must be a number, not {brief(value)}")
    elif name in TEXTS and not isinstance(value, str):
        raise UserError(f"{name} must be text, not {brief(value)}")
    elif name == "steps" and not (isinstance(value, Real) and value == math.inf):
        whole(value, "steps, unless they are infinity,")
    elif name == "family" and not hasattr(value, "models"):
        raise UserError(f"family must be a Family, as Family.load gives it, not {brief(value)}")
    elif name == "schedule" and not (isinstance(value, str) or callable(value) or hasattr(value, "models")):
        raise UserError(f"schedule must be text, a Schedule or a function of a row's state, not {brief(value)}")
    elif name == "models" and not (hasattr(value, "items") and value):
        raise UserError(f"models must be a mapping from names to denoisers, not {brief(value)}")


def token_rows(given: Any, n: int, length: int | None = None) -> np.ndarray:
    """Token ids, -1 where a position is free, as int64: one row for all, or n rows (of a length)."""
    import numpy as np  # here, because schedules are read without it

    try:
        array = np.asarray(given)
    except (ValueError, RuntimeError, TypeError) as error:  # rows of different lengths, a tensor on a device
        raise UserError(f"given must hold whole numbers, in one row or in {n} ({error})") from None
    fits = array.ndim == 1 or (array.ndim == 2 and len(array) in (1, n))
    if array.dtype.kind not in "iu" or not fits or not array.size or (length and array.shape[-1] != length):
        where = f"in one row or in {n}" + (f", of {length} positions" if length else "")
        raise UserError(f"given must hold whole numbers, {where}, not {array.dtype} in shape {array.shape}")
    if array.min() < -1 or array.max() > LARGEST_TOKEN:
        odd = array.min() if array.min() < -1 else array.max()
        raise UserError(f"given must hold token ids, or -1 where a position is free, not {odd}")
    return array.astype(np.int64)
