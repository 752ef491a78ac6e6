"""Having running jobs asked to leave: the client of the rule engine, which alone can sign.

Nothing here guesses. A request is taken on, refused with the engine's reason, or its fate is not
known; then, and only then, it is repeated with the same key, which asks nobody a second time.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import json
import math
import ssl
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx

from gpuwarden.errors import RefusedAction, ServiceUnavailable
from gpuwarden.exchanges import exchange
from gpuwarden.files import read_secret
from gpuwarden.schedule_api import STEPS

if TYPE_CHECKING:
    from pathlib import Path

    from gpuwarden.exchanges import Answer

TRIES = 3
"""How often a request whose fate is not known is made, with one key."""
PAUSE_SECONDS = 1.0
"""Before the second try; twice as long before the third."""
TIMEOUT_SECONDS = 20.0
"""For one exchange: the engine waits for the agents of all nodes of a job."""
MAX_REASON = 300
"""Characters of a reason that the engine takes."""
_NOT_KNOWN = frozenset({408, 500, 502, 503, 504})
"""Statuses after which nobody knows whether it was taken on, or that pass by themselves."""


class LeaveState(StrEnum):
    """How far a leave has come."""

    ASKED = "asked"
    WAITING = "waiting"
    LEFT = "left"
    UNHEEDED = "unheeded"
    UNDELIVERABLE = "undeliverable"
    REFUSED = "refused"
    LAPSED = "lapsed"
    WITHDRAWN = "withdrawn"
    OVERTAKEN = "overtaken"
    UNKNOWN = "unknown"
    """A newer engine's word: neither over, nor of use."""

    @property
    def over(self) -> bool:
        """Whether nothing more becomes of it."""
        return self not in (LeaveState.ASKED, LeaveState.WAITING, LeaveState.UNKNOWN)


@dataclass(frozen=True, slots=True)
class LeaveOrder:
    """What is asked for.

    Attributes:
        key: names this request and no other, `[A-Za-z0-9_.:-]{1,64}`; whoever repeats it gives it
            again.
        cause: priority, booking, window or budget.
        reason: one line for the owner; longer ones are cut.
        deadline_seconds: how long the job has, 1 to 3600.
        at: step or epoch.
        then: requeue or hold.
        job_id: the exporter's id of the attempt, or empty.
        run_id: the trainer's run, or empty; one of both is needed.
        successor: what is to start in its place.
    """

    key: str
    cause: str
    reason: str
    deadline_seconds: float
    at: str = "epoch"
    then: str = "requeue"
    job_id: str = ""
    run_id: str = ""
    successor: str = ""

    def body(self) -> bytes:
        """What is sent."""
        reason = " ".join(self.reason.split())[:MAX_REASON]
        fields: dict[str, Any] = {name: getattr(self, name) for name in self.__slots__}
        return json.dumps({**fields, "reason": reason}).encode()


@dataclass(frozen=True, slots=True)
class Leave:
    """A leave as the engine tells it. Times are Unix seconds.

    Attributes:
        id: the engine's name of it.
        job_id, run_id: whom it asks.
        state: how far it has come.
        why: of a result that is not what was asked for.
        deadline: until when the job has time.
        steps: notified, acknowledged, saved, left, freed -> when; what was not seen is absent.
    """

    id: str
    job_id: str
    run_id: str
    state: LeaveState
    why: str
    deadline: float
    steps: dict[str, float]


class EngineLeaves:
    """The engine's leaves, in one scheduler's name.

    Args:
        url: of the engine, such as https://engine.example.org:9837.
        token: with the role scheduler; see `from_file`.
        ca_file: certificates that its TLS is checked against, or None for the system's.
        timeout: seconds for one exchange.
        pause: seconds before a second try.
    """

    def __init__(
        self,
        url: str,
        token: str,
        *,
        ca_file: Path | None = None,
        timeout: float = TIMEOUT_SECONDS,
        pause: float = PAUSE_SECONDS,
    ) -> None:
        self._url = url.rstrip("/")
        self._timeout = timeout
        self._pause = pause
        context: ssl.SSLContext | bool = True
        if ca_file is not None:
            context = ssl.create_default_context(cafile=str(ca_file))
        # No proxy sees the token, and nobody sends it elsewhere.
        self._client = httpx.AsyncClient(
            verify=context,
            timeout=timeout,
            trust_env=False,
            follow_redirects=False,
            headers={"Authorization": f"Bearer {token}"},
        )

    @classmethod
    def from_file(
        cls, url: str, token_file: Path, *, ca_file: Path | None = None, timeout: float
    ) -> EngineLeaves:
        """With the token in a file.

        Raises:
            InvalidInput: it cannot be read.
        """
        secret = read_secret(token_file, "the engine's token")
        return cls(url, secret, ca_file=ca_file, timeout=timeout)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._client.aclose()

    async def ask(self, order: LeaveOrder) -> Leave:
        """Have a job asked to leave; safe to repeat with the same order.

        Raises:
            RefusedAction: the engine would not; `reason` is its word (`protected`, `paused`,
                `limit_per_hour`, `unknown_job`, ...). Nobody was asked.
            ServiceUnavailable: not known whether the job was asked: repeat it with the same key.
        """
        return _leave(await self._certain("POST", "/v1/leaves", order.body()))

    async def look(self, leave_id: str) -> Leave:
        """How far a leave has come.

        Raises:
            RefusedAction: there is no such leave.
            ServiceUnavailable: not known now.
        """
        return _leave(await self._certain("GET", f"/v1/leaves/{quote(leave_id, safe='')}"))

    async def withdraw(self, leave_id: str) -> Leave:
        """Take a leave back; safe to repeat, and nothing where it has its result.

        Raises:
            RefusedAction: there is no such leave.
            ServiceUnavailable: not known whether it was taken back.
        """
        return _leave(await self._certain("DELETE", f"/v1/leaves/{quote(leave_id, safe='')}"))

    async def _certain(self, method: str, path: str, content: bytes | None = None) -> Answer:
        """An answer that says what is so, after several tries."""
        problem = ""
        for attempt in range(TRIES):
            if attempt:
                await asyncio.sleep(self._pause * 2 ** (attempt - 1))
            try:
                answer = await exchange(
                    self._client,
                    method,
                    self._url + path,
                    seconds=self._timeout,
                    content=content,
                    headers={"Content-Type": "application/json"} if content else None,
                )
            except ServiceUnavailable as error:
                problem = f"does not answer: {error}"
                continue
            if 200 <= answer.status < 300:
                return answer
            word, message = _failure(answer)
            if answer.status not in _NOT_KNOWN:
                raise RefusedAction(word, message)
            problem = f"HTTP {answer.status}: {message}"
        raise ServiceUnavailable(f"unreachable: the engine at {self._url} {problem}")


def _failure(answer: Answer) -> tuple[str, str]:
    try:
        data = answer.json()
    except ValueError:
        data = None
    if isinstance(data, dict) and isinstance(data.get("error"), str):
        return data["error"][:64], str(data.get("message", data["error"]))[:1000]
    return f"http_{answer.status}", f"HTTP {answer.status} without a reason: is it the engine?"


def _leave(answer: Answer) -> Leave:
    """Read an answer.

    Raises:
        ServiceUnavailable: it is none of the engine's.
    """
    try:
        data = answer.json()
        word, steps = data["state"], data["steps"]
        return Leave(
            id=str(data["id"]),
            job_id=str(data["job_id"]),
            run_id=str(data["run_id"]),
            state=LeaveState(word) if word in set(LeaveState) else LeaveState.UNKNOWN,
            why=str(data["why"])[:1000],
            deadline=dt.datetime.fromisoformat(data["deadline"]).timestamp(),
            steps={name: _moment(steps[name]) for name in STEPS if name in steps},
        )
    except (ValueError, TypeError, KeyError, OverflowError) as error:
        raise ServiceUnavailable(f"the engine's answer is not a leave: {error!r}") from error


def _moment(value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{value!r} is no time")
    return float(value)
