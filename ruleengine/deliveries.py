"""The receiver behind Alertmanager: who must have a message, sending it, and the proof on disk.

Alertmanager routes and groups; this makes the last hop, because only who talks to Slack and to the
mail server learns whether they took the message. It is idempotent on the alert, its start, its
status and the recipient: Alertmanager repeats itself after every answer that is not 2xx.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import structlog

from gpuwarden.ruleengine.channels import Undelivered
from gpuwarden.ruleengine.messages import Message
from gpuwarden.ruleengine.recipients import NO_ADDRESS, Recipients, recipients
from gpuwarden.ruleengine.records import DeliveryKey

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gpuwarden.clock import Clock
    from gpuwarden.ruleengine.channels import Channel
    from gpuwarden.ruleengine.directories import Directory
    from gpuwarden.ruleengine.ledger import Ledger

MAX_ALERTS = 1000
"""More alerts than this in one message are not from our Alertmanager."""
AT_ONCE = 8
"""Messages that are sent at the same time; the others wait their turn."""
_NANOSECONDS = re.compile(r"(\.\d{6})\d+")

log = structlog.get_logger(__name__)


class MalformedMessage(ValueError):
    """A body that Alertmanager's webhook would not send; the text names the field."""


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of one webhook message.

    Attributes:
        delivered: messages that a server took, now or earlier.
        failed: one line for each that no server took.
        retry: whether another try could help.
    """

    delivered: int
    failed: tuple[str, ...]
    retry: bool


@dataclass(frozen=True, slots=True)
class _Firing:
    """One alert of the message, as far as it is believed."""

    fingerprint: str
    starts_at: str
    labels: Mapping[str, str]
    message: Message


@dataclass(frozen=True, slots=True)
class _Delivery:
    key: DeliveryKey
    case_id: int | None
    stage: str
    message: Message


class LastHop:
    """Sends what Alertmanager has routed.

    Args:
        ledger: where recipients and proofs are written.
        channels: by name: email, slack.
        directory: the one in force at the time of the call.
        clock: for the record.
    """

    def __init__(
        self,
        ledger: Ledger,
        channels: Mapping[str, Channel],
        *,
        directory: Callable[[], Directory],
        clock: Clock,
    ) -> None:
        self._ledger = ledger
        self._channels = channels
        self._directory = directory
        self._clock = clock
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._in_flight: dict[DeliveryKey, asyncio.Future[Undelivered | None]] = {}

    @property
    def channel_names(self) -> tuple[str, ...]:
        """Channels that are configured."""
        return tuple(self._channels)

    async def receive(
        self, body: object, channels: Sequence[str], *, channel_target: str | None = None
    ) -> Receipt:
        """Deliver one message of Alertmanager's webhook (version 4).

        Args:
            body: the decoded JSON.
            channels: names of configured channels, as the address names them.
            channel_target: a Slack channel that is told instead of the owner, or None.

        Raises:
            MalformedMessage: it is not such a message.
        """
        deliveries: list[_Delivery] = []
        failed: list[str] = []
        for firing in _firing(body, self._clock.wall()):
            found, missing = self._deliveries(firing, channels, channel_target)
            if missing:
                failed.append(f"{firing.labels.get('alertname', '?')}: {missing}")
            deliveries += found
        results = await asyncio.gather(*(self._deliver(item) for item in deliveries))
        undelivered = [
            (item, error)
            for item, error in zip(deliveries, results, strict=True)
            if error is not None
        ]
        failed += [f"{item.key.channel} {item.key.recipient}: {e}" for item, e in undelivered]
        return Receipt(
            delivered=len(deliveries) - len(undelivered),
            failed=tuple(failed),
            retry=any(not error.permanent for _, error in undelivered),
        )

    def _deliveries(
        self, firing: _Firing, channels: Sequence[str], channel_target: str | None
    ) -> tuple[list[_Delivery], str]:
        """Who gets this alert, written down as required before anything is sent.

        Returns:
            The messages, and why nobody who counts gets one, or an empty string.
        """
        directory, labels = self._directory(), firing.labels
        if labels.get("level") == "page" or labels.get("target") == "gpu":
            everyone = [(c, to) for c in channels for to in directory.operators.addresses(c)]
            found = [self._delivery(firing, *to, case_id=None) for to in everyone]
            return found, "" if found else NO_ADDRESS
        if channel_target:
            return [self._delivery(firing, "slack", channel_target, case_id=None)], ""
        user, case_id = labels.get("user", ""), None
        stored = self._ledger.open_case(labels.get("rule", ""), labels.get("job_id", ""))
        if stored is not None and labels.get("stage"):
            # What the ledger knows outranks what came over the network.
            user, case_id = stored.case.user, stored.id
        told = recipients(directory, user, channels, now=self._clock.wall())
        if case_id is not None:
            self._require(firing, told, channels, user=user, case_id=case_id)
        elif not told.required:
            for channel in channels:
                self._failed(firing, channel, _nobody(user), error=told.why_not, case_id=None)
        if told.why_not:
            log.warning(
                "owner cannot be told",
                user=user,
                rule=labels.get("rule"),
                why=told.why_not,
                deputy=told.deputy,
            )
        found = [self._delivery(firing, *to, case_id=case_id) for to in told.required]
        found += [self._delivery(firing, *to, case_id=None) for to in told.informed]
        return found, "" if told.required else told.why_not

    def _require(
        self,
        firing: _Firing,
        told: Recipients,
        channels: Sequence[str],
        *,
        user: str,
        case_id: int,
    ) -> None:
        """Write down whose proof the case waits for; a nobody's never comes."""
        required = told.required or tuple((channel, _nobody(user)) for channel in channels)
        self._ledger.require(
            case_id, _stage(firing.labels), required, channels=channels, time=self._clock.wall()
        )
        for channel in () if told.required else channels:
            self._failed(firing, channel, _nobody(user), error=told.why_not, case_id=case_id)

    def _failed(
        self, firing: _Firing, channel: str, recipient: str, *, error: str, case_id: int | None
    ) -> None:
        self._ledger.record_failure(
            self._key(firing, channel, recipient),
            case_id=case_id,
            stage=_stage(firing.labels),
            error=error,
            time=self._clock.wall(),
        )

    def _delivery(
        self, firing: _Firing, channel: str, recipient: str, *, case_id: int | None
    ) -> _Delivery:
        return _Delivery(
            self._key(firing, channel, recipient), case_id, _stage(firing.labels), firing.message
        )

    def _key(self, firing: _Firing, channel: str, recipient: str) -> DeliveryKey:
        return DeliveryKey(firing.fingerprint, firing.starts_at, "firing", channel, recipient)

    async def _deliver(self, item: _Delivery) -> Undelivered | None:
        """Send once; an overlapping repeat waits for the first try instead of sending again."""
        running = self._in_flight.get(item.key)
        if running is not None:
            return await asyncio.shield(running)
        future: asyncio.Future[Undelivered | None] = asyncio.get_running_loop().create_future()
        self._in_flight[item.key] = future
        result: Undelivered | None = Undelivered("the try was cancelled", permanent=False)
        try:
            async with self._turns:
                result = await self._deliver_once(item)
        finally:
            self._in_flight.pop(item.key, None)
            future.set_result(result)
        return result

    async def _deliver_once(self, item: _Delivery) -> Undelivered | None:
        key, wall = item.key, self._clock.wall
        proof = self._ledger.delivered(key)
        if proof is not None:
            return None
        try:
            proof = await self._channels[key.channel].send(key.recipient, item.message)
        except Undelivered as error:
            self._ledger.record_failure(
                key, case_id=item.case_id, stage=item.stage, error=str(error), time=wall()
            )
            log.warning(
                "notice not delivered",
                channel=key.channel,
                recipient=key.recipient,
                error=str(error),
                permanent=error.permanent,
            )
            return error
        self._ledger.record_delivery(
            key, case_id=item.case_id, stage=item.stage, proof=proof, time=wall()
        )
        log.info("notice delivered", channel=key.channel, recipient=key.recipient, proof=proof)
        return None


def _nobody(user: str) -> str:
    """Stands in the ledger where a recipient should: somebody must be told, and nobody can be."""
    return f"{user or 'unknown user'} (no address)"


def _stage(labels: Mapping[str, str]) -> str:
    return f"{labels.get('stage', labels.get('level', ''))}:{labels.get('mode', '')}"


def _over(ends_at: object, now: float) -> bool:
    """Whether an alert's end is past; the year 1 is Alertmanager's word for: not known."""
    try:
        moment = dt.datetime.fromisoformat(_NANOSECONDS.sub(r"\1", str(ends_at)))
    except ValueError:
        return False
    return moment.tzinfo is not None and moment.year > 1 and moment.timestamp() <= now


def _firing(body: object, now: float) -> list[_Firing]:
    if not isinstance(body, dict) or not isinstance(body.get("alerts"), list):
        raise MalformedMessage("alerts is not a list")
    alerts: list[Any] = body["alerts"]
    if len(alerts) > MAX_ALERTS:
        raise MalformedMessage(f"more than {MAX_ALERTS} alerts")
    found = []
    for alert in alerts:
        if not isinstance(alert, dict):
            raise MalformedMessage("alerts holds something that is not an object")
        if alert.get("status") != "firing" or _over(alert.get("endsAt"), now):
            continue  # news of an end is an alert of its own
        labels, notes = alert.get("labels"), alert.get("annotations")
        if not isinstance(labels, dict) or not isinstance(notes, dict):
            raise MalformedMessage("an alert lacks labels or annotations")
        fingerprint, starts_at = alert.get("fingerprint"), alert.get("startsAt")
        if not isinstance(fingerprint, str) or not isinstance(starts_at, str):
            raise MalformedMessage("an alert lacks fingerprint or startsAt")
        texts = {str(name): str(value) for name, value in labels.items()}
        message = Message.of(notes, str(alert.get("generatorURL", "")))
        found.append(_Firing(fingerprint, starts_at, texts, message))
    return found
