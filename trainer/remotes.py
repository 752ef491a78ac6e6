"""A run's second home, at any URL that fsspec knows; runs in a process of its own.

`<url>/<run_id>/` holds `run.json`, `states/NNNNNN.pt` with its manifest beside it, and `best.pt`;
once the run is complete also `last.pt`, `results.csv` and `args.yaml`. As on disk a state's
manifest comes last and is its commit. The training talks to this process over its standard input
and output (see `uploading`): fsspec's back ends keep threads and connections, which a process that
forks loader workers must not.

    python -m gpuwarden.trainer.remotes serve|record|fetch URL RUN_ID [SAVE_DIR]
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import selectors
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gpuwarden import job_files
from gpuwarden.errors import PermanentError
from gpuwarden.trainer.runs import RunRecord
from gpuwarden.trainer.states import FOLDER, Manifest, file_digest

if TYPE_CHECKING:
    from collections.abc import Iterator

log = logging.getLogger(__name__)

BEST = "best.pt"
KEPT_AT_END = ("weights/last.pt", "results.csv", "args.yaml")
FIRST_RETRY_SECONDS, LAST_RETRY_SECONDS = 2.0, 60.0
LAST_WORDS_SECONDS = 60
"""So long may an upload go on after the training's process is gone."""
_LINE_BYTES = 1 << 16
_ANSWERS = 3
"""Descriptor of the answers: what a back end prints must not get among them."""


class IncompleteUpload(OSError):
    """The remote holds something else than what was sent."""


class StatesDamaged(PermanentError):
    """What was uploaded of a run can be continued nowhere; it must not be begun anew by itself."""


class Remote:
    """One run's folder at a URL.

    Args:
        url: of all runs; credentials and endpoints come from the back end's own files and
            variables, such as AWS_* for s3:// or fsspec's configuration.
        run_id: of the run.
        keep: how many of its newest states stay there.
    """

    def __init__(self, url: str, run_id: str, *, keep: int = 3) -> None:
        import fsspec

        self._fs, root = fsspec.core.url_to_fs(url)
        self._root = f"{root.rstrip('/')}/{run_id}"
        self._keep = keep
        self._best_sent: tuple[int, int] | None = None

    def _at(self, name: str) -> str:
        return f"{self._root}/{name}"

    # -- writing

    def put(self, source: Path, name: str) -> None:
        """Put a file there; object stores replace one whole, whatever happens to the sender.

        Raises:
            OSError, and whatever the back end raises.
        """
        self._fs.makedirs(os.path.dirname(self._at(name)), exist_ok=True)  # noqa: PTH120 -- a URL's
        size = source.stat().st_size
        # A local or NFS target would show a file half written; others know no cheap renaming.
        local = self._fs.protocol == "file" or "file" in self._fs.protocol
        target = self._at(f"{name}.part") if local else self._at(name)
        self._fs.put_file(str(source), target)
        self._fs.invalidate_cache()
        if (sent := self._fs.info(target)["size"]) != size:
            raise IncompleteUpload(f"{name}: {sent} bytes arrived of {size}")
        if local:
            self._fs.mv(target, self._at(name))

    def put_state(self, folder: Path, sequence: int) -> None:
        """Put a state there, the best weights that belong to it, and remove what it supersedes.

        Args:
            folder: `<save_dir>/states`.
            sequence: number of the state.

        Raises:
            FileNotFoundError: it is gone, because newer ones have taken its place.
        """
        name = f"{sequence:06d}"
        manifest = Manifest.decode((folder / f"{name}.json").read_bytes())
        self._put_best(folder.parent / "weights" / BEST)
        self.put(folder / f"{name}.pt", f"{FOLDER}/{name}.pt")
        self.put(folder / f"{name}.json", f"{FOLDER}/{name}.json")
        self._prune(manifest.lineage)

    def _put_best(self, best: Path) -> None:
        try:
            about = best.stat()
        except FileNotFoundError:
            return
        mark = (about.st_ino, about.st_mtime_ns)  # it is replaced, never written in place
        if mark != self._best_sent:
            self.put(best, BEST)
            self._best_sent = mark

    def put_record(self, folder: Path) -> None:
        """Put the run's record there; that of a complete run after what the run has made."""
        record = RunRecord.read(folder)
        if record is None:
            return
        if record.finished is not None:
            self._put_best(folder.parent / "weights" / BEST)
            for name in KEPT_AT_END:
                with contextlib.suppress(FileNotFoundError):
                    self.put(folder.parent / name, name.rpartition("/")[2])
        self.put(folder / RunRecord.FILE, RunRecord.FILE)

    def _prune(self, lineage: str) -> None:
        own = 0
        for manifest in self._manifests():
            own += manifest.lineage == lineage
            if manifest.lineage == lineage and own <= self._keep:
                continue
            for suffix in ("json", "pt"):  # the commit goes first
                with contextlib.suppress(FileNotFoundError):
                    self._fs.rm_file(self._at(f"{FOLDER}/{manifest.sequence:06d}.{suffix}"))

    # -- reading

    def _manifests(self, damaged: list[str] | None = None) -> Iterator[Manifest]:
        """What is there, newest first.

        Args:
            damaged: gets the numbers of those that cannot be read.
        """
        self._fs.invalidate_cache()
        with contextlib.suppress(FileNotFoundError):
            names = [str(path) for path in self._fs.ls(self._at(FOLDER), detail=False)]
            for name in sorted((name for name in names if name.endswith(".json")), reverse=True):
                with contextlib.suppress(FileNotFoundError):
                    try:
                        manifest = Manifest.decode(self._fs.cat_file(name))
                    except ValueError:
                        if damaged is not None:
                            damaged.append(name.rpartition("/")[2].removesuffix(".json"))
                        continue
                    yield manifest

    def record(self) -> bytes | None:
        """Content of the run's record; None if the run is not there."""
        try:
            return bytes(self._fs.cat_file(self._at(RunRecord.FILE)))
        except FileNotFoundError:
            return None

    def fetch(self, save_dir: Path, lineage: str, *, after: int = 0) -> int | None:
        """Bring the newest good state here, and what belongs to it.

        Args:
            save_dir: of the run.
            lineage: whose states count.
            after: a state with this number or a lower one is not needed.

        Returns:
            The state's number; None if there is none that is newer and whole.

        Raises:
            StatesDamaged: there are states of the run, none of them is whole, and none is here.
        """
        damaged: list[str] = []
        folder = save_dir / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        (save_dir / "weights").mkdir(exist_ok=True)
        for manifest in self._manifests(damaged):
            if manifest.lineage != lineage or manifest.sequence <= after:
                continue
            name = f"{manifest.sequence:06d}"
            temporary = folder / f".{name}.pt.tmp"
            try:
                self._fs.get_file(self._at(f"{FOLDER}/{name}.pt"), str(temporary))
                digest, size = file_digest(temporary)
            except FileNotFoundError:
                log.warning("the uploaded state %s is missing; trying the one before", name)
                damaged.append(name)
                continue
            if (digest, size) != (manifest.sha256, manifest.size):
                log.warning("the uploaded state %s is corrupt; trying the one before", name)
                temporary.unlink()
                damaged.append(name)
                continue
            self._get_best(save_dir / "weights" / BEST)
            _sync(temporary)
            temporary.replace(folder / f"{name}.pt")
            job_files.write(folder / f"{name}.json", manifest.encode(), durable=True)
            return manifest.sequence
        if damaged and not after:
            raise StatesDamaged(
                f"none of the run's states at its --upload can be used ({', '.join(damaged)}) and "
                "none is here: put a copy back, or start anew with --resume never"
            )
        return None

    def _get_best(self, target: Path) -> None:
        temporary = target.with_name(f".{target.name}.tmp")
        try:
            self._fs.get_file(self._at(BEST), str(temporary))
        except FileNotFoundError:
            return
        _sync(temporary)
        temporary.replace(target)


def _sync(path: Path) -> None:
    with path.open("rb") as file:
        os.fsync(file.fileno())


# ---------------------------------------------------------------------------------------------
# The process


class Orders:
    """What the training has asked for and was not done yet: of states the newest alone."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._buffer = b""
        self._selector = selectors.DefaultSelector()
        self._selector.register(stream, selectors.EVENT_READ)
        self.state: int | None = None
        self.record = False
        self.ended = False

    @property
    def any(self) -> bool:
        """Whether there is anything to do."""
        return self.state is not None or self.record

    def read(self, timeout: float | None) -> None:
        """Take in what has come; wait for the first for so many seconds, None for ever."""
        while not self.ended and self._selector.select(timeout):
            part = os.read(self._stream.fileno(), _LINE_BYTES)
            if not part:
                self.ended = True
                signal.alarm(LAST_WORDS_SECONDS)
                return
            *lines, self._buffer = (self._buffer + part).split(b"\n")
            for line in lines:
                order = json.loads(line)
                self.state = order.get("state", self.state)
                self.record = self.record or bool(order.get("record"))
            timeout = 0.0


def serve(url: str, run_id: str, save_dir: Path, *, keep: int) -> None:
    """Upload what is asked for until the training is gone; failures are told and tried again.

    Orders are lines `{"state": N}` and `{"record": true}`; answers `{"state": N}`,
    `{"record": true}` and `{"error": TEXT}`.
    """
    orders = Orders(sys.stdin.buffer)
    folder = save_dir / FOLDER
    remote: Remote | None = None
    pause = FIRST_RETRY_SECONDS
    while not orders.ended or orders.any:
        orders.read(None if not orders.any else 0.0)
        if not orders.any:
            continue
        try:
            remote = remote or Remote(url, run_id, keep=keep)
            if (sequence := orders.state) is not None:
                with contextlib.suppress(FileNotFoundError):  # superseded: a newer one is coming
                    remote.put_state(folder, sequence)
                orders.state = None
                _answer({"state": sequence})
            if orders.record:
                remote.put_record(folder)
                orders.record = False
                _answer({"record": True})
            pause = FIRST_RETRY_SECONDS
        except Exception as error:  # noqa: BLE001 -- whatever a back end raises
            _answer({"error": f"{type(error).__name__}: {error}"[:500]})
            if orders.ended:
                return
            _wait(orders, pause)
            pause = min(2 * pause, LAST_RETRY_SECONDS)


def _wait(orders: Orders, seconds: float) -> None:
    """Wait before the next try, taking in what comes meanwhile; not for a training that is gone."""
    until = time.monotonic() + seconds
    while not orders.ended and (left := until - time.monotonic()) > 0:
        orders.read(left)


def _answer(document: dict[str, Any]) -> None:
    with contextlib.suppress(BrokenPipeError):
        os.write(_ANSWERS, json.dumps(document).encode() + b"\n")


def main(arguments: list[str]) -> int:
    """Run one of the three parts; answers are JSON on standard output."""
    part, url, run_id, *rest = arguments
    os.dup2(1, _ANSWERS)
    os.dup2(2, 1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)  # meant for the training, whose end ends this too
    if part == "serve":
        serve(url, run_id, Path(rest[0]), keep=int(rest[1]))
        return 0
    try:
        remote = Remote(url, run_id)
        if part == "record":
            content = remote.record()
            _answer({"record": None if content is None else content.decode()})
        else:
            _answer({"state": remote.fetch(Path(rest[0]), rest[1], after=int(rest[2]))})
    except StatesDamaged as error:
        _answer({"damaged": str(error)})
    except Exception as error:  # noqa: BLE001 -- whatever a back end raises
        _answer({"error": f"{type(error).__name__}: {error}"[:500]})
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
