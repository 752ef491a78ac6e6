"""Durable states of a run: written whole or not at all, checked before they are believed.

`<save_dir>/states/` holds `run.json` (whose run it is, see `runs`), and per state `NNNNNN.pt`
(tensors and plain values only: torch loads it with `weights_only=True`, so it runs no code and
outlives library updates) and `NNNNNN.json` (the manifest with size and sha256; its rename is the
commit).
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
import threading
import time
from dataclasses import dataclass, field
from typing import IO, TYPE_CHECKING, Any, Self

from gpuwarden import job_files
from gpuwarden.errors import PermanentError
from gpuwarden.trainer import typed_documents

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

log = logging.getLogger(__name__)

VERSION = 1
FOLDER = "states"
_CHUNK = 1 << 20


class NonFiniteState(PermanentError):
    """Weights hold NaN or infinity; a finite state is never replaced by such a one."""


class NotStorable(PermanentError):
    """The training keeps something that cannot be stored without pickling code."""


@dataclass(frozen=True, slots=True)
class Position:
    """Where in the training a state belongs: before batch `batch` of epoch `epoch`.

    `batch` may be the number of batches: all are done and the validation is pending, or, with
    `validated`, is done as well and only the final evaluation is left.
    """

    epoch: int
    batch: int
    validated: bool = False


@dataclass(frozen=True, slots=True)
class Manifest:
    """What is known about a state without opening it.

    Attributes:
        lineage: the run's token; states of another training in the same folder are not ours.
        sequence: grows with each state of the folder.
        epoch, batch, validated: see `Position`.
        step: batches trained on in the whole run.
        batches: batches per epoch.
        epochs: planned epochs.
        batch_size: images per batch.
        dataset: fingerprint of images and labels.
        order: data order, with its version.
        exact: whether the state may be resumed within an epoch.
        reason: what caused the save.
        software: versions that wrote it.
        words: the user's words that make the training this one.
        seed, optimizer, classes, model, world_size: what else it is known again by; see
            `comparisons.facts`. None and empty: not known.
        extended: epochs in all, if the run was given more than its words say.
        fitness: of the newest validation, by which the best state is known; None before the first.
        time: Unix time at which it was taken.
        size, sha256: of the .pt file.
    """

    lineage: str
    epoch: int
    batch: int
    step: int
    batches: int
    epochs: int
    batch_size: int
    dataset: str
    order: str
    exact: bool
    reason: str
    time: float
    validated: bool = False
    software: dict[str, str] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)
    seed: int | None = None
    optimizer: str = ""
    classes: str = ""
    model: str = ""
    world_size: int = 1
    extended: int | None = None
    fitness: float | None = None
    sequence: int = 0
    size: int = 0
    sha256: str = ""

    @property
    def position(self) -> Position:
        """Where in the training the state belongs."""
        return Position(self.epoch, self.batch, self.validated)

    @property
    def writer(self) -> str:
        """The versions that wrote it, to be told."""
        said = (f"{name} {version}" for name, version in sorted(self.software.items()))
        return ", ".join(said) or "unknown versions"

    def encode(self) -> bytes:
        """The file's content."""
        return json.dumps({"version": VERSION, **dataclasses.asdict(self)}, indent=1).encode()

    @classmethod
    def decode(cls, content: bytes) -> Self:
        """Read the file's content.

        Raises:
            ValueError: not a manifest, with "version" in the message if it is another version's.
        """
        data = typed_documents.document(content)
        version = data.pop("version", None)
        if version != VERSION:
            raise WrongVersion(f"version {version!r} is not {VERSION}")
        return typed_documents.record(cls, data)


class WrongVersion(ValueError):
    """Written by a gpuwarden whose format this one does not know."""


@dataclass(frozen=True, slots=True)
class BadState:
    """A state that was not used.

    Attributes:
        name: its number.
        kind: `missing`, `corrupt`, `version` (of another format) or `unreadable` (whole as far as
            is known, but it could not be read or loaded just now).
        message: what was found.
    """

    name: str
    kind: str
    message: str

    def __str__(self) -> str:
        return f"state {self.name} is {self.kind}: {self.message}"

    @property
    def hopeless(self) -> bool:
        """Whether it can never be used: only then it is put aside."""
        return self.kind in ("missing", "corrupt")


class StateStore:
    """The states of one run. One process uses it at a time, see `runs.RunLock`.

    Args:
        folder: `<save_dir>/states`, which exists.
        lineage: the run's token.
        keep: how many of its newest states stay; besides them stays the best one.
    """

    def __init__(self, folder: Path, lineage: str, *, keep: int = 3) -> None:
        self.folder, self._lineage, self._keep = folder, lineage, keep
        numbers = [int(path.stem[:6]) for path in folder.glob("[0-9]" * 6 + ".*")]
        self._sequence = max(numbers, default=0)

    def remove_leftovers(self) -> None:
        """Delete what a write that never ended left behind."""
        for path in self.folder.glob(".*.tmp"):
            path.unlink(missing_ok=True)
        for path in self.folder.glob("[0-9]" * 6 + ".pt"):
            if not path.with_suffix(".json").exists():  # never committed
                path.unlink(missing_ok=True)

    def write(self, state: dict[str, Any], draft: Manifest) -> Manifest:
        """Put a state on disk; when this returns it survives a power loss.

        Args:
            state: tensors and plain values, see `captures.capture`.
            draft: its manifest without sequence, size and sum.

        Raises:
            NonFiniteState: weights or the optimizer's moments are not finite.
            OSError: it could not be written; older states are untouched.
        """
        import torch

        _refuse_nonfinite(state)
        self._sequence += 1
        name = f"{self._sequence:06d}"
        temporary = self.folder / f".{name}.pt.tmp"
        try:
            with temporary.open("wb") as file:
                summed = _SummingFile(file)
                torch.save(state, summed)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(self.folder / f"{name}.pt")
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        manifest = dataclasses.replace(
            draft,
            lineage=self._lineage,
            sequence=self._sequence,
            size=summed.count,
            sha256=summed.digest.hexdigest(),
        )
        # The commit: also makes the state's own rename durable, being in the same directory.
        try:
            job_files.write(self.folder / f"{name}.json", manifest.encode(), durable=True)
        except BaseException:
            (self.folder / f"{name}.json").unlink(missing_ok=True)
            (self.folder / f"{name}.pt").unlink(missing_ok=True)
            raise
        self._prune()
        return manifest

    def manifests(self) -> list[Manifest]:
        """The run's states, newest first, as far as their manifests can be read."""
        found = []
        for path in self._paths():
            with contextlib.suppress(OSError, ValueError):
                manifest = Manifest.decode(path.read_bytes())
                if manifest.lineage == self._lineage:
                    found.append(manifest)
        return found

    def newest(self) -> tuple[Manifest, dict[str, Any]] | None:
        """Load the newest good state; what is bad on the way is reported and put aside.

        Missing and corrupt states are renamed to `*.bad`; those of another version are left for
        the gpuwarden that wrote them, those that could not be read for a better moment.
        """
        for path in self._paths():
            try:
                manifest, state = self._load(path)
            except _Unusable as unusable:
                log.warning("%s; trying the one before", unusable.bad)
                if unusable.bad.hopeless:
                    self._quarantine(path)
                continue
            if manifest.lineage == self._lineage:
                return manifest, state
        return None

    def has_any(self) -> bool:
        """Whether the run ever had a state here, good or not."""
        if any(self.folder.glob("[0-9]" * 6 + ".*.bad")):
            return True
        for path in self._paths():
            try:
                if Manifest.decode(path.read_bytes()).lineage == self._lineage:
                    return True
            except (OSError, ValueError):
                return True
        return False

    def discard_others(self) -> None:
        """Delete the states of former trainings in this folder: a fresh start supersedes them."""
        for path in self._paths():
            with contextlib.suppress(OSError, ValueError):
                if Manifest.decode(path.read_bytes()).lineage == self._lineage:
                    continue
            path.unlink(missing_ok=True)
            path.with_suffix(".pt").unlink(missing_ok=True)
        for path in self.folder.glob("[0-9]" * 6 + ".*.bad"):
            path.unlink(missing_ok=True)

    def _paths(self) -> list[Path]:
        return sorted(self.folder.glob("[0-9]" * 6 + ".json"), reverse=True)

    def _load(self, path: Path) -> tuple[Manifest, dict[str, Any]]:
        import torch

        name = path.stem
        try:
            manifest = Manifest.decode(path.read_bytes())
        except WrongVersion as error:
            raise _Unusable(BadState(name, "version", str(error))) from error
        except ValueError as error:
            raise _Unusable(BadState(name, "corrupt", f"manifest: {error}")) from error
        except OSError as error:
            raise _Unusable(BadState(name, "unreadable", f"manifest: {error}")) from error
        file = path.with_suffix(".pt")
        try:
            digest, size = file_digest(file)
        except FileNotFoundError as error:
            raise _Unusable(BadState(name, "missing", f"{file} is not there")) from error
        except OSError as error:
            raise _Unusable(BadState(name, "unreadable", f"{file}: {error.strerror}")) from error
        if size != manifest.size:
            raise _Unusable(BadState(name, "corrupt", f"{size} bytes instead of {manifest.size}"))
        if digest != manifest.sha256:
            raise _Unusable(BadState(name, "corrupt", "its sha256 is not the manifest's"))
        if manifest.lineage != self._lineage:
            return manifest, {}
        try:
            return manifest, torch.load(file, map_location="cpu", weights_only=True)
        except Exception as error:  # its bytes are right: memory is short, or torch is another
            raise _Unusable(BadState(name, "unreadable", f"torch: {error}")) from error

    def _quarantine(self, path: Path) -> None:
        for bad in (path, path.with_suffix(".pt")):
            with contextlib.suppress(FileNotFoundError):
                bad.replace(bad.with_name(f"{bad.name}.bad"))

    def best(self) -> Manifest | None:
        """The state with the highest fitness, the newest of equals; None without any."""
        judged = [manifest for manifest in self.manifests() if manifest.fitness is not None]
        return max(judged, key=lambda item: (item.fitness, item.sequence), default=None)

    def _prune(self) -> None:
        best = self.best()
        for manifest in self.manifests()[self._keep :]:
            if best is not None and manifest.sequence == best.sequence:
                continue
            path = self.folder / f"{manifest.sequence:06d}.json"
            path.unlink(missing_ok=True)
            path.with_suffix(".pt").unlink(missing_ok=True)


class _Unusable(Exception):
    def __init__(self, bad: BadState) -> None:
        super().__init__(str(bad))
        self.bad = bad


class _SummingFile:
    """A file to write to that keeps the sha256 and length of what went through."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self.digest = hashlib.sha256()
        self.count = 0

    def write(self, part: Any) -> int:
        view = memoryview(part).cast("B")
        self.digest.update(view)
        self.count += len(view)
        return self._file.write(view)

    def flush(self) -> None:
        self._file.flush()


def _refuse_nonfinite(state: dict[str, Any]) -> None:
    import torch

    def check(what: str, value: Any) -> None:
        floating = isinstance(value, torch.Tensor) and value.is_floating_point()
        if floating and not bool(torch.isfinite(value).all()):
            raise NonFiniteState(f"{what} is not finite: the state was not saved")

    for part in ("model", "ema"):
        for name, value in state[part].items():
            check(f"{part} {name}", value)
    for at, moments in state.get("optimizer", {}).get("state", {}).items():
        for name, value in moments.items():
            check(f"optimizer {name} {at}", value)


def file_digest(path: Path) -> tuple[str, int]:
    """A file's sha256 and size in bytes."""
    digest, size = hashlib.sha256(), 0
    with path.open("rb") as file:
        while part := file.read(_CHUNK):
            digest.update(part)
            size += len(part)
    return digest.hexdigest(), size


class BackgroundWrite:
    """One write on a thread of its own, so that the loop stands still only for the copy.

    Args:
        write: writes, and gives the manifest.
        ended: called on that thread once `running` is false.
    """

    def __init__(
        self, write: Callable[[], Manifest], *, ended: Callable[[], None] = lambda: None
    ) -> None:
        self._write, self._ended = write, ended
        self.running = True
        """Whether the write has not ended."""
        self._result: Manifest | None = None
        self._error: Exception | None = None
        self._durable = 0.0
        self.seconds = 0.0
        """How long it took, once it has ended well."""
        self._thread = threading.Thread(target=self._run, name="gpuwarden-state", daemon=True)
        try:
            self._thread.start()
        except RuntimeError:  # the machine, or the container, has no thread left: then here
            self._run()

    def _run(self) -> None:
        began = time.monotonic()
        try:
            self._result = self._write()
            self._durable = time.time()
            self.seconds = time.monotonic() - began
        except Exception as error:  # noqa: BLE001 -- handed to the loop, which reports it
            self._error = error
        finally:
            self.running = False
            self._ended()

    def result(self) -> tuple[Manifest, float]:
        """Wait for the end: the manifest, and the Unix time at which it was durable.

        Raises:
            NonFiniteState, OSError: as `StateStore.write`.
        """
        if self.running:
            self._thread.join()
        if self._error is not None:
            raise self._error
        if self._result is None:
            raise OSError("the write ended without a result")
        return self._result, self._durable
