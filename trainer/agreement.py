"""How the ranks of a training act as one: whether to leave or to save is agreed at each batch.

A rank that acted alone would leave the others waiting for it for good. So every rank's wish goes
into a reduction that is started at one boundary and read at the next, beside the training's own
collectives and on the CPU: nothing waits for a device, and all ranks read the same answer.
"""

from __future__ import annotations

import contextlib
import os
import threading
from dataclasses import astuple, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from gpuwarden.trainer import ranks
from gpuwarden.trainer.ranks import Place

if TYPE_CHECKING:
    from collections.abc import Callable

T = TypeVar("T")

_TIMEOUT = timedelta(hours=3)
"""As ultralytics' own: rank 0 may scan a large data set while the others wait."""
_JOIN_TIMEOUT = timedelta(minutes=10)
_CLOSE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Wish:
    """What a rank wants, or what all have agreed on: for each field the largest counts.

    Attributes:
        leave: leave at this boundary.
        save: take a state at this boundary.
        stop: the training's last epoch is over.
        signal: number of the signal that came, for the others to tell; 0 for none.
    """

    leave: int = 0
    save: int = 0
    stop: int = 0
    signal: int = 0


class Team(Protocol):
    """The processes of one training, as one of them sees them."""

    place: Place
    alone: bool
    """There is one process: what it wants is agreed at once."""

    def exchange(self, wish: Wish) -> Wish:
        """What was agreed at the former boundary; each rank calls it at the same ones."""

    def settle(self, wish: Wish) -> Wish:
        """What is agreed at this boundary, waiting for all; includes what is still open."""

    def decide(self, answer: Callable[[], bool]) -> bool:
        """Rank 0's answer, for all."""

    def tell(self, value: T) -> T:
        """Rank 0's value, for all."""

    def gather(self, part: Callable[[], Any]) -> list[Any]:
        """Every other rank's part, at rank 0; elsewhere nothing."""

    def fewest(self, count: int) -> int:
        """The least of all ranks' counts."""

    def close(self) -> bool:
        """Leave the team; returns whether that worked."""


class Alone:
    """A training of one process: what it wants is agreed at once."""

    place = Place()
    alone = True

    def exchange(self, wish: Wish) -> Wish:
        """The wish itself."""
        return wish

    def settle(self, wish: Wish) -> Wish:
        """The wish itself."""
        return wish

    def decide(self, answer: Callable[[], bool]) -> bool:
        """Its own answer."""
        return answer()

    def tell(self, value: T) -> T:
        """The value itself."""
        return value

    def gather(self, part: Callable[[], Any]) -> list[Any]:  # noqa: ARG002 -- as the protocol
        """There are no others."""
        return []

    def fewest(self, count: int) -> int:
        """Its own count."""
        return count

    def close(self) -> bool:
        """Nothing to leave."""
        return True


class Ranks:
    """One rank of several, over gloo on the CPU.

    Args:
        place: this rank's.
        group: for these messages alone.
    """

    alone = False

    def __init__(self, place: Place, group: Any) -> None:
        self.place, self._group = place, group
        self._open: tuple[Any, Any] | None = None

    def exchange(self, wish: Wish) -> Wish:
        """What was agreed at the former boundary; starts the agreement on this one.

        Args:
            wish: of this rank; it is read by all at the next call.
        """
        agreed = self._take()
        if not agreed.leave:
            self._start(wish)
        return agreed

    def settle(self, wish: Wish) -> Wish:
        """What is agreed at this boundary, with what had not been read yet."""
        former = self._take()
        self._start(Wish(*map(max, astuple(former), astuple(wish))))
        return self._take()

    def _start(self, wish: Wish) -> None:
        import torch
        import torch.distributed as dist

        votes = torch.tensor(astuple(wish), dtype=torch.int32)
        work = dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._open = (votes, work)

    def _take(self) -> Wish:
        if self._open is None:
            return Wish()
        (votes, work), self._open = self._open, None
        work.wait()
        numbers: list[int] = votes.tolist()
        return Wish(*numbers)

    def decide(self, answer: Callable[[], bool]) -> bool:
        """Rank 0's answer, for all."""
        return self.tell(self.place.leads and answer())

    def tell(self, value: T) -> T:
        """Rank 0's value, for all; any that can be pickled.

        Args:
            value: looked at on rank 0 only.
        """
        import torch.distributed as dist

        box = [value]
        dist.broadcast_object_list(box, 0, group=self._group)
        return box[0]

    def gather(self, part: Callable[[], Any]) -> list[Any]:
        """Every other rank's part, at rank 0.

        Args:
            part: makes this rank's; not called on rank 0.
        """
        import torch.distributed as dist

        if not self.place.leads:
            dist.gather_object(part(), None, 0, group=self._group)
            return []
        parts: list[Any] = [None] * self.place.world
        dist.gather_object(None, parts, 0, group=self._group)
        return parts[1:]

    def fewest(self, count: int) -> int:
        """The least of all ranks' counts."""
        import torch
        import torch.distributed as dist

        least = torch.tensor([count], dtype=torch.int64)
        dist.all_reduce(least, op=dist.ReduceOp.MIN, group=self._group)
        return int(least.item())

    def close(self) -> bool:
        """Leave the team.

        Returns:
            Whether that worked in time: a communicator whose peers are gone may wait for good.
        """
        import torch.distributed as dist

        global _team  # noqa: PLW0603 -- see join
        _team = None

        def destroy() -> None:
            with contextlib.suppress(RuntimeError, ValueError, AssertionError):
                dist.destroy_process_group()

        thread = threading.Thread(target=destroy, name="gpuwarden-close", daemon=True)
        thread.start()
        thread.join(_CLOSE_SECONDS)
        return not thread.is_alive()


_team: Team | None = None


def join(*, cuda: bool) -> Team:
    """Meet the other ranks of this training, if it has any; once per process.

    The default process group becomes the training's own (NCCL between cards, gloo between CPU
    processes), before ultralytics would make it.

    Args:
        cuda: the ranks train on cards; this process sees its own as the current one.
    """
    global _team  # noqa: PLW0603 -- torch's default group is the process's, so is the team
    if _team is None:
        place = Place.of()
        _team = _meet(place, cuda=cuda) if place.world > 1 else Alone()
    return _team


def leave() -> bool:
    """Part from the other ranks, if there are any; returns whether that worked in time."""
    return _team is None or _team.close()


def _meet(place: Place, *, cuda: bool) -> Team:
    import torch.distributed as dist

    nccl = cuda and dist.is_nccl_available()
    if nccl:
        os.environ["TORCH_NCCL_BLOCKING_WAIT"] = "1"  # as ultralytics: makes the timeout hold
    known: dict[str, Any] = {"rank": place.rank, "world_size": place.world}
    line = ranks.line()
    if line is not None:
        # The launcher listens already: no port that another could take meanwhile.
        owned = {"is_master": True, "master_listen_fd": line.store} if place.leads else {}
        known["store"] = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            int(os.environ["MASTER_PORT"]),
            place.world,
            timeout=_JOIN_TIMEOUT,
            wait_for_workers=False,
            **owned,
        )
    if not dist.is_initialized():
        dist.init_process_group("nccl" if nccl else "gloo", timeout=_TIMEOUT, **known)
    return Ranks(place, dist.new_group(backend="gloo", timeout=_TIMEOUT))
