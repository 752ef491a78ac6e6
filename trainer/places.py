"""Files that a user names on a command line."""

from __future__ import annotations

import errno
from pathlib import Path

from gpuwarden.errors import InvalidInput


def named(text: str) -> Path:
    """The file of a name, there or not; `~` and `~user` are somebody's home.

    Raises:
        InvalidInput: no file can be called so, or there is no such user.
    """
    try:
        path = Path(text).expanduser()
        path.stat()
    except RuntimeError as error:
        user = text.partition("/")[0]
        raise InvalidInput(f"{text}: {user} is nobody's home here: write the whole path") from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise InvalidInput(f"{text[:60]}...: too long for the name of a file") from error
    except ValueError as error:
        raise InvalidInput(f"{text!r}: no file can be called so: {error}") from error
    return path
