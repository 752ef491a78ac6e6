"""Files that a user names on a command line, and what a training left beside them."""

from __future__ import annotations

import errno
import re
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


def trained_from(weights: Path) -> str | None:
    """What `runs/detect/train/weights/best.pt` was trained from, by the args.yaml of its run."""
    arguments = weights.absolute().parent.parent / "args.yaml"
    if weights.suffix.lower() != ".pt" or not weights.is_file():
        return None
    try:
        with arguments.open(encoding="utf-8") as lines:
            found = re.search(r"^model: *['\"]?([^'\"\n]+)", lines.read(64 * 1024), re.MULTILINE)
    except (OSError, UnicodeDecodeError):
        return None
    return found[1].strip() if found else None
