"""The one exception a user is meant to see.

Raise `UserError` for anything the caller can put right: what was wrong, and what is allowed, in one sentence. The
command line prints it as a single line and exits with code 2; a library user catches it as a `ValueError`.
"""


class UserError(ValueError):
    """Bad input. The message is one sentence that says what was wrong and what is allowed."""
