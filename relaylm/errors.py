"""The one exception a user is meant to see, and one line about any other.

Raise `UserError` for anything the caller can put right: what was wrong, and what is allowed, in one sentence. The
command line prints it as a single line and exits with code 2; a library user catches it as a `ValueError`.
"""

from collections.abc import Iterable
from difflib import get_close_matches


class UserError(ValueError):
    """Bad input. The message is one sentence that says what was wrong and what is allowed."""


def reason(error: BaseException) -> str:
    """Why something failed, in one line: the operating system's words, else the first line of the message."""
    text = (isinstance(error, OSError) and error.strerror) or str(error).strip()
    return text.splitlines()[0][:500] if text else type(error).__name__


def meant(word: str, known: Iterable[str]) -> str:
    """A hint for an error message: `, did you mean sandwich?`, or nothing where no known word is like it."""
    close = get_close_matches(word, list(known), 1, 0.7)
    return f", did you mean {close[0]}?" if close and close[0] != word else ""
