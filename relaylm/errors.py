"""Bad input: the one exception a user is meant to see, one line about any other, text from strangers made safe to show,
and what arguments of the library may be.

Raise `UserError` for anything the caller can put right: what was wrong, and what is allowed, in one sentence. The
command line prints it as a single line and exits with code 2; a library user catches it as a `ValueError`.
"""

from __future__ import annotations

import functools
import inspect
import math
import re
import reprlib
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, ParamSpec, TextIO, TypeVar

if TYPE_CHECKING:
    import numpy as np

LONGEST = 1000  # characters of a message
# What moves a cursor, starts a sequence that commands a terminal, turns the direction of text or cannot be encoded.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_UNSAFE_IN_LINES = re.compile(_UNSAFE.pattern.replace("\x00-\x1f", "\x00-\x08\x0b-\x1f"))
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 2, 120, 120, 60
P = ParamSpec("P")
R = TypeVar("R")
LARGEST_TOKEN = 2**31 - 1
# Whole numbers, from and up to.
WHOLE = dict.fromkeys(("n", "length", "max_new_tokens", "batch_size", "top_k", "stride", "block_length"), (1, 2**32))
WHOLE |= {"first_row": (0, 2**32 - 1), "seed": (0, 2**64 - 1), "rows": (1, 2**32), "draws": (1, 2**32)}
NUMBERS = ("temperature", "top_p")
CALLBACKS = ("callback", "on_calls", "function")
TEXTS = ("prompt", "suffix", "infill", "stop", "light", "heavy", "recipe", "method")


class UserError(ValueError):
    """Bad input. The message is one sentence that says what was wrong and what is allowed; of a long one, which repeats
    its input, the beginning and the end are kept."""

    def __init__(self, message: object) -> None:
        text = str(message)
        if len(text) > LONGEST:
            text = f"{text[: LONGEST * 2 // 3]} ... {text[-LONGEST // 3 :]}"
        super().__init__(_UNSAFE.sub(_escaped, text))


def reason(error: BaseException) -> str:
    """Why something failed, in one line: the operating system's words, else the first line of the message."""
    text = (isinstance(error, OSError) and error.strerror) or str(error).strip()
    return text.splitlines()[0][:500] if text else type(error).__name__


def meant(word: str, known: Iterable[str]) -> str:
    """A hint for an error message: `, did you mean sandwich?`, or nothing where no known word is like it."""
    close = get_close_matches(word, list(known), 1, 0.7)
    return f", did you mean {close[0]}?" if close and close[0] != word else ""


def brief(value: Any) -> str:
    """A value as in `repr`, but short and shallow: what a stranger nested or shared a million times takes no time."""
    if isinstance(value, int) and abs(value) >= 10**99:  # Python refuses to print the largest
        return "a number of over 99 digits"
    try:
        return _SHORT.repr(value)[:300]
    except Exception:  # a `__repr__` that fails
        return f"a {type(value).__name__}"


def printable(text: str, stream: TextIO | None = None) -> str:
    """The text with escapes (\\x1b) for characters that command a terminal; lines and tabs stay. With a stream, only if
    that is a terminal: a file or a pipe gets the text as it is."""
    return text if stream is not None and not stream.isatty() else _UNSAFE_IN_LINES.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode()


# ------------------------------------------------------------------------------------------------ arguments


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


def check_family(value: Any) -> None:
    """Refuse what is no family, such as the name of one."""
    if not hasattr(value, "models"):
        raise UserError(f"family must be a Family, as Family.load gives it, not {brief(value)}")


def _check(name: str, value: Any) -> None:
    if name in WHOLE:
        whole(value, name, *WHOLE[name])
    elif name in NUMBERS and (isinstance(value, bool) or not isinstance(value, Real)):
        raise UserError(f"{name} must be a number, not {brief(value)}")
    elif name in TEXTS and not isinstance(value, str):
        raise UserError(f"{name} must be text, not {brief(value)}")
    elif name == "steps" and not (isinstance(value, Real) and value == math.inf):
        whole(value, "steps, unless they are infinity,")
    elif name == "family":
        check_family(value)
    elif name in ("schedule", "policy") and not (isinstance(value, str) or callable(value) or hasattr(value, "models")):
        raise UserError(f"{name} must be text, a Schedule or a function of a row's state, not {brief(value)}")
    elif name == "rule" and not (isinstance(value, str) or hasattr(value, "adaptive")):
        raise UserError(f"rule must be text such as surest:16, not {brief(value)}")
    elif name == "plan" and not hasattr(value, "given_nL"):
        raise UserError(f"plan must be a Plan, as make_plan gives it, not {brief(value)}")
    elif name in CALLBACKS and not (callable(value) or hasattr(value, "put")):  # or a streamer
        raise UserError(f"{name} must be a function, not {brief(value)}")
    elif name == "models" and not (hasattr(value, "items") and value):
        raise UserError(f"models must be a mapping from names to denoisers, not {brief(value)}")


def token_rows(given: Any, n: int, length: int | None = None) -> np.ndarray:
    """Token ids, -1 where a position is free, as int64: one row for all, or n rows (of a length)."""
    import numpy as np  # here, because schedules are read without it

    try:
        array = np.asarray(given)
    except (ValueError, RuntimeError, TypeError) as error:  # rows of different lengths, a tensor on a device
        raise UserError(f"given must hold whole numbers in one shape ({error})") from None
    fits = array.ndim == 1 or (array.ndim == 2 and len(array) in (1, n))
    if array.dtype.kind not in "iu" or not fits or not array.size or (length and array.shape[-1] != length):
        where = f"in one row{'' if n == 1 else f' or in n = {n}'}" + (f", of {length} positions" if length else "")
        hint = f": for {len(array)} rows give n={len(array)}" if array.ndim == 2 and not fits else ""
        raise UserError(f"given must hold whole numbers, {where}, not {array.dtype} in shape {array.shape}{hint}")
    if array.min() < -1 or array.max() > LARGEST_TOKEN:
        odd = array.min() if array.min() < -1 else array.max()
        raise UserError(f"given must hold token ids, or -1 where a position is free, not {odd}")
    return array.astype(np.int64)
