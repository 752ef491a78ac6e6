"""Who may ask this node for what: signature, node, boot, expiry, checked before anything else."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gpuwarden import agent_api
from gpuwarden.agent_api import ActionRequest, ApiError
from gpuwarden.errors import PermanentError
from gpuwarden.job_files import RUN_ID

if TYPE_CHECKING:
    from gpuwarden.clock import Clock
    from gpuwarden.exporter.agent.keys import KeyRing


class Rejected(PermanentError):
    """A request is not taken on.

    Attributes:
        status: HTTP status.
        error: machine-readable word.
    """

    def __init__(self, status: int, error: str, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.error = error


SET_BACK_SECONDS = 5.0
"""A wall clock that goes back by more than this makes requests good again that were over."""


class Latest:
    """The latest Unix time that was seen. Safe for threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._time = 0.0

    def reach(self, time: float) -> float:
        """Take in a time; gives the latest of all."""
        with self._lock:
            self._time = max(self._time, time)
            return self._time


@dataclass(frozen=True, slots=True)
class Authoriser:
    """Reads requests and believes those that the engine signed for this node, boot and moment.

    Attributes:
        keys: the engine's public keys.
        node: this node's name.
        boot_id: this boot.
        clock: the node's.
        latest: what its wall clock has shown.
    """

    keys: KeyRing
    node: str
    boot_id: str
    clock: Clock
    latest: Latest = field(default_factory=Latest)

    def read(self, body: bytes, signature: str | None) -> ActionRequest:
        """Read a request that the engine signed for this node, whenever that was.

        Nothing may be done for it before `admit`; what is known of its decision may be told.

        Args:
            body: as received.
            signature: value of the signature's header, or None where there was none.

        Raises:
            Rejected: it is malformed, or not authorised.
        """
        self._check_signature(body, signature)
        try:
            request = ActionRequest.decode(body)
        except ApiError as error:
            raise Rejected(400, "malformed", str(error)) from error
        if request.run_id is not None and not RUN_ID.fullmatch(request.run_id):
            raise Rejected(400, "malformed", "run_id is not 1 to 64 of A-Z a-z 0-9 _ -")
        if request.node != self.node:
            raise Rejected(403, "wrong_node", f"this node is {self.node!r}, not {request.node!r}")
        return request

    def admit(self, request: ActionRequest) -> None:
        """Go on only with a request of this boot and this moment.

        Raises:
            Rejected: it is of another boot, or its time is over.
        """
        if request.boot_id != self.boot_id:
            raise Rejected(403, "wrong_boot", "the node was rebooted since it was looked at")
        wall = self.clock.wall()
        latest = self.latest.reach(wall)
        if latest - wall > SET_BACK_SECONDS:
            raise Rejected(
                403,
                "clock",
                f"this node's clock was set back by {latest - wall:.0f} s, and what had expired "
                "would hold again: nothing is taken on until it has caught up, or the agent is "
                "started anew with the right time",
            )
        left = request.expires - latest
        if left <= 0:
            raise Rejected(
                403, "expired", f"it expired {-left:.1f} s ago by this node's clock: compare clocks"
            )
        if left > agent_api.MAX_LIFETIME_SECONDS:
            raise Rejected(
                403,
                "lifetime",
                f"it would hold for {left:.0f} s, more than {agent_api.MAX_LIFETIME_SECONDS:.0f} s "
                "by this node's clock",
            )

    def _check_signature(self, body: bytes, signature: str | None) -> None:
        if signature is None:
            raise Rejected(401, "unsigned", f"the header {agent_api.SIGNATURE_HEADER} is missing")
        try:
            key_id, value = agent_api.parse_signature(signature)
        except ApiError as error:
            raise Rejected(401, "unsigned", str(error)) from error
        holds = self.keys.verify(key_id, value, agent_api.signing_bytes(body))
        if holds is None:
            raise Rejected(401, "unknown_key", f"key {key_id} is not one of this node's")
        if not holds:
            raise Rejected(401, "bad_signature", "the signature does not cover this body")
