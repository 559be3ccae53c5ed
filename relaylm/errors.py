"""The one exception a user is meant to see, and one line about any other.

Raise `UserError` for anything the caller can put right: what was wrong, and what is allowed, in one sentence. The
command line prints it as a single line and exits with code 2; a library user catches it as a `ValueError`.
"""


class UserError(ValueError):
    """Bad input. The message is one sentence that says what was wrong and what is allowed."""


def reason(error: BaseException) -> str:
    """Why something failed, in one line: the operating system's words, else the first line of the message."""
    text = (isinstance(error, OSError) and error.strerror) or str(error).strip()
    return text.splitlines()[0][:500] if text else type(error).__name__
