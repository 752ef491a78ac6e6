"""What a rank other than the first has in place of what speaks for the training.

It takes part in the loop and in the states, but writes no file: the node, the disk and the user
hear from rank 0 alone.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gpuwarden.trainer.saving import Saver
from gpuwarden.trainer.status import StatusBoard

if TYPE_CHECKING:
    from pathlib import Path

    from gpuwarden.job_files import RunDescription


class PeerBoard(StatusBoard):
    """Counts as rank 0's does, for the loop's own use, and publishes nothing."""

    def begin(self) -> None:
        """The description is rank 0's to withdraw."""

    def describe(self, description: RunDescription) -> None:
        """It is rank 0's process that is described."""

    def _write(self, path: Path, content: bytes) -> None:
        """Not a file of this rank."""


class PeerSaver(Saver):
    """Takes no states by itself: its part goes into rank 0's."""

    @property
    def due_at(self) -> float:
        """Rank 0 knows."""
        return float("inf")

    def save(self, *_: Any, **__: Any) -> bool:
        """Rank 0 does, and knows whether it could."""
        return True
