"""Ed25519 keys: the engine signs with the private one, nodes know only the public ones."""

from __future__ import annotations

import base64
import binascii
import contextlib
import os
import stat
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog
from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from gpuwarden import agent_api
from gpuwarden.errors import InvalidInput

if TYPE_CHECKING:
    from pathlib import Path

SUFFIX = ".pub"
MAX_KEYS = 64
MAX_KEY_BYTES = 4096

_log: structlog.stdlib.BoundLogger = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class KeyPair:
    """A new key pair on disk: the two files, and the name that signatures carry."""

    private: Path
    public: Path
    key_id: str


def generate(folder: Path) -> KeyPair:
    """Write a new key pair, `engine.key` (mode 0600) and `engine.pub`, into a folder.

    Raises:
        InvalidInput: one of the files is there already, or the folder cannot be written.
    """
    private, public = folder / "engine.key", folder / f"engine{SUFFIX}"
    key = Ed25519PrivateKey.generate()
    secret = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.NoEncryption(),
    )
    open_part = key.public_key().public_bytes(
        serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
    )
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        present = [str(path) for path in (private, public) if os.path.lexists(path)]
        if present:
            raise InvalidInput(
                f"{' and '.join(present)} would be overwritten, and nodes that know the old key "
                "would obey nobody: choose another folder with --out, or move the files away"
            )
        _create(private, secret, 0o600)
        _create(public, open_part, 0o644)
    except OSError as error:
        raise InvalidInput(f"the keys cannot be written to {folder}: {error.strerror}") from error
    return KeyPair(private, public, _key_id(key.public_key()))


def _create(path: Path, content: bytes, mode: int) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
    with os.fdopen(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fchmod(descriptor, mode)
        os.fsync(descriptor)


def _key_id(key: Ed25519PublicKey) -> str:
    raw = key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)
    return agent_api.key_id(raw)


class KeyRing:
    """The public keys in a folder, read again whenever the folder changes.

    A key file, and the folder, must belong to root or to the agent's user and be writable by nobody
    else: who can add a key can command this node.
    """

    def __init__(self, folder: Path) -> None:
        """Read the keys.

        Raises:
            InvalidInput: the folder holds no usable key.
        """
        self._folder = folder
        self._state: object = None
        self._keys: dict[str, Ed25519PublicKey] = {}
        self._refresh()
        if not self._keys:
            raise InvalidInput(
                f"{folder} holds no public key that can be used: make a pair with `gpuwarden agent "
                f"keys --out DIR`, keep engine.key on the engine's machine, and put engine{SUFFIX} "
                "here"
            )

    @property
    def key_ids(self) -> tuple[str, ...]:
        """Names of the keys that are accepted now."""
        self._refresh()
        return tuple(sorted(self._keys))

    def verify(self, key_id: str, signature: str, message: bytes) -> bool | None:
        """Check a signature.

        Args:
            key_id: the key that is said to have made it.
            signature: in base64.
            message: what it is said to cover.

        Returns:
            Whether it holds, or None where the key is not known.
        """
        self._refresh()
        key = self._keys.get(key_id)
        if key is None:
            return None
        try:
            key.verify(base64.b64decode(signature, validate=True), message)
        except (InvalidSignature, binascii.Error, ValueError):
            return False
        return True

    def _refresh(self) -> None:
        try:
            state = self._look()
        except OSError as error:
            # Without the folder nobody can be told from anybody.
            if self._keys or self._state is None:
                _log.error("no keys", folder=str(self._folder), error=str(error))
            self._keys, self._state = {}, ()
            return
        if state == self._state:
            return
        found: dict[str, Ed25519PublicKey] = {}
        for name in sorted(name for name, *_ in state[1])[:MAX_KEYS]:
            path = self._folder / name
            try:
                key = _load(path)
            except (OSError, ValueError, UnsupportedAlgorithm) as error:
                _log.error("key not used", file=str(path), error=str(error))
                continue
            found[_key_id(key)] = key
        self._keys, self._state = found, state
        _log.info("keys read", folder=str(self._folder), key_ids=sorted(found))

    def _look(self) -> tuple[int, list[tuple[str, int, int, int, int]]]:
        about = self._folder.stat()
        # Kubernetes mounts a secret's folder open to all, but read-only.
        if not os.statvfs(self._folder).f_flag & os.ST_RDONLY:
            _check_owner(about)
        files = []
        for path in self._folder.glob(f"*{SUFFIX}"):
            with contextlib.suppress(FileNotFoundError):
                seen = path.stat()
                files.append(
                    (path.name, seen.st_ino, seen.st_mtime_ns, seen.st_ctime_ns, seen.st_size)
                )
        return about.st_ino, sorted(files)


def _load(path: Path) -> Ed25519PublicKey:
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    with os.fdopen(descriptor, "rb") as file:
        about = os.fstat(descriptor)
        if not stat.S_ISREG(about.st_mode) or about.st_size > MAX_KEY_BYTES:
            raise ValueError("not a small plain file")
        _check_owner(about)
        key = serialization.load_pem_public_key(file.read(MAX_KEY_BYTES))
    if not isinstance(key, Ed25519PublicKey):
        raise UnsupportedAlgorithm("not an Ed25519 public key")
    return key


def _check_owner(about: os.stat_result) -> None:
    if about.st_uid not in (0, os.geteuid()) or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise PermissionError(
            "it must belong to root or the agent's user, and be writable by nobody else"
        )
