"""Who may ask over the network: the file of `--tokens`, and whom a bearer token belongs to."""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import BeforeValidator, StringConstraints

from gpuwarden.checked_files import check_file
from gpuwarden.errors import InvalidInput
from gpuwarden.fields import Strict, UserName, as_tuple
from gpuwarden.files import read_secret
from gpuwarden.scheduling.callers import Caller, Role

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

MIN_TOKEN = 16
"""Characters of a token, so that nobody guesses it."""


class TokenTerms(Strict):
    """Somebody who asks over the network."""

    name: UserName
    """Of a user: as on the nodes. Of a program that only looks: any."""
    role: Literal["reader", "user", "operator"]
    """reader: looks. user: also books for their team, and commands what is theirs. operator: also
    what is others'."""
    file: Annotated[str, StringConstraints(min_length=1, max_length=4096)]
    """With the token alone in it; relative paths are relative to this file."""


class TokenFile(Strict):
    """tokens.yaml."""

    version: Literal[1]
    """Of this file's format."""
    tokens: Annotated[tuple[TokenTerms, ...], BeforeValidator(as_tuple)]
    """One for each person or program."""


@dataclass(frozen=True, slots=True)
class Token:
    """A secret, and who bears it."""

    caller: Caller
    secret: bytes


def load_tokens(path: Path) -> tuple[Token, ...]:
    """Read who may ask, and their tokens.

    Raises:
        InvalidInput: with every mistake of the file, or the first token that cannot be used.
    """
    terms = check_file(path, TokenFile, lambda _content, _root: ()).usable()
    found: dict[str, Token] = {}
    for given in terms.tokens:
        setting = f"{path}: token of {given.name}"
        secret = read_secret(path.parent / given.file, setting)
        if len(secret) < MIN_TOKEN or not secret.isascii() or not secret.isprintable():
            raise InvalidInput(
                f"{setting}: {given.file} is not one line of at least {MIN_TOKEN} ASCII "
                "characters; `openssl rand -hex 32` makes a good one"
            )
        if secret in found:
            raise InvalidInput(f"{setting} is the same as that of {found[secret].caller.name}")
        found[secret] = Token(Caller(given.name, Role(given.role)), secret.encode())
    return tuple(found.values())


def bearer(tokens: Sequence[Token], given: str) -> Caller | None:
    """Whom a token belongs to; every one is compared, each in constant time."""
    found = None
    for token in tokens:
        if hmac.compare_digest(given.encode("utf-8", "replace"), token.secret):
            found = token.caller
    return found
