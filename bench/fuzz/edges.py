"""What an edge is: something that takes bytes from others, and what must hold whatever they are."""

from __future__ import annotations

import dataclasses
import tempfile
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

SPLIT = b"\n\xff\xfe\n"
"""Between the parts of an input that has several."""
JSON_WORDS = (
    *(b"null", b"true", b"-1", b"1e999", b"NaN", b"Infinity", b"9223372036854775808", b"1e308"),
    *(b'"\\ud800"', b'"\\u0000"', b"[[[[[[", b'{"a":', b"0.0000001", b"-0", b"\xff", b"{}", b"[]"),
)
YAML_WORDS = (
    *(b"&a ", b"*a", b"<<: ", b"!!python/object:os.system ", b"{", b"[", b"? ", b"- ", b"\t", b"'"),
    *(b"%YAML 1.1\n", b"!!binary ", b"0x7", b"1_0", b".inf", b".nan", b"~", b"\xe2\x80\xa8", b": "),
)


@dataclasses.dataclass(frozen=True, slots=True)
class Attack:
    """One edge.

    An attack takes bytes. It raises nothing where the program did what it should: took the input,
    or refused it in the one way that there is for that.

    Attributes:
        name: for people.
        make: prepares the edge in a folder of its own; the answer takes inputs.
        seeds: inputs that are in order.
        words: what is often of importance in them.
        pure: whether it neither starts nor asks anything, so that coverage can lead.
        of: the program whose edge it is.
    """

    name: str
    make: Callable[[Path, ExitStack], Callable[[bytes], None]]
    seeds: tuple[bytes, ...]
    words: tuple[bytes, ...] = ()
    pure: bool = True
    of: str = "node"


def require(*, holds: bool, what: str) -> None:
    """Fail unless something holds; unlike an assertion, also where these are left out."""
    if not holds:
        raise RuntimeError(what)


@contextmanager
def prepared(attack: Attack) -> Iterator[Callable[[bytes], None]]:
    """The edge, ready to take inputs.

    Args:
        attack: which one.
    """
    with ExitStack() as stack:
        # In memory where that can be had: some of them sync what they write.
        place = "/dev/shm" if Path("/dev/shm").is_dir() else None  # noqa: S108 (a folder of our own)
        folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="fuzz-", dir=place))
        yield attack.make(Path(folder), stack)
