"""The one exception a user is meant to see, one line about any other, and text from strangers made safe to show.

Raise `UserError` for anything the caller can put right: what was wrong, and what is allowed, in one sentence. The
command line prints it as a single line and exits with code 2; a library user catches it as a `ValueError`.
"""

import re
import reprlib
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Any, TextIO

LONGEST = 1000  # characters of a message
# What moves a cursor, starts a sequence that commands a terminal, turns the direction of text or cannot be encoded.
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
_UNSAFE_IN_LINES = re.compile(_UNSAFE.pattern.replace("\x00-\x1f", "\x00-\x08\x0b-\x1f"))
_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxstring, _SHORT.maxother, _SHORT.maxlong = 2, 120, 120, 60


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
