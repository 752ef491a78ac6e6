"""The receiver behind Alertmanager: who must have a message, sending it, and the proof on disk.

Alertmanager routes and groups; this makes the last hop, because only who talks to Slack and to the
mail server learns whether they took the message. It is idempotent on the alert, its start, its
status and the recipient: Alertmanager repeats itself after every answer that is not 2xx.
"""

from __future__ import annotations

import asyncio
import datetime as dt
import math
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import structlog

from gpuwarden.ruleengine.bots import GROUP
from gpuwarden.ruleengine.channels import Undelivered
from gpuwarden.ruleengine.layouts import Message
from gpuwarden.ruleengine.ledger_handles import LedgerTaken
from gpuwarden.ruleengine.recipients import NO_ADDRESS, Recipients, recipients
from gpuwarden.ruleengine.records import DeliveryKey

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from gpuwarden.clock import Clock
    from gpuwarden.ruleengine.bot_settings import BotSettings
    from gpuwarden.ruleengine.channels import Channel
    from gpuwarden.ruleengine.directories import Directory, User
    from gpuwarden.ruleengine.ledger import Ledger
    from gpuwarden.ruleengine.names import Names
    from gpuwarden.ruleengine.texts.speeches import Language

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
    annotations: Mapping[str, object]
    url: str

    def message(self, language: Language | None, *, private: bool) -> Message:
        """What is sent of it to a reader."""
        return Message.of(
            self.annotations, self.url, labels=self.labels, language=language, private=private
        )


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
        channels: by name: email, slack, and each bot's.
        directory: the one in force at the time of the call.
        clock: for the record.
        bots: which of the channels are bots in groups, by name.
        names: whose names channels read that others read along, or None: whoever is told.
    """

    def __init__(
        self,
        ledger: Ledger,
        channels: Mapping[str, Channel],
        *,
        directory: Callable[[], Directory],
        clock: Clock,
        bots: Mapping[str, BotSettings] | None = None,
        names: Names | None = None,
    ) -> None:
        self._names = names
        self._bots = bots or {}
        self._ledger = ledger
        self._channels = channels
        self._directory = directory
        self._clock = clock
        self._turns = asyncio.Semaphore(AT_ONCE)
        self._spared: dict[str, float] = {}
        """Channel -> monotonic time until which its server asks to be left alone."""
        self._in_flight: dict[DeliveryKey, asyncio.Future[Undelivered | None]] = {}

    @property
    def channel_names(self) -> tuple[str, ...]:
        """Channels that are configured."""
        return tuple(self._channels)

    async def receive(
        self,
        body: object,
        channels: Sequence[str],
        *,
        channel_target: str | None = None,
        language: Language | None = None,
    ) -> Receipt:
        """Deliver one message of Alertmanager's webhook (version 4).

        Args:
            body: the decoded JSON.
            channels: names of configured channels, as the address names them.
            channel_target: a Slack channel that is told instead of the owner, or None.
            language: what that channel reads, or None: what the directory says.

        Raises:
            MalformedMessage: it is not such a message.
        """
        found = _firing(body, self._clock.wall())
        try:
            return await self._received(found, channels, channel_target, language)
        except LedgerTaken as error:
            # Whose the ledger is by now is told again, and knows whom it has told.
            return Receipt(0, (str(error),), retry=True)

    async def _received(
        self,
        firings: Sequence[_Firing],
        channels: Sequence[str],
        channel_target: str | None,
        language: Language | None,
    ) -> Receipt:
        deliveries: list[_Delivery] = []
        failed: list[str] = []
        for firing in firings:
            if channel_target and not _for_operators(firing.labels):
                reads = language or self._directory().language
                teams = self._directory().teams_of(channel_target)
                message = self._shared(firing, reads, teams)
                found, missing = [self._delivery(firing, "slack", channel_target, message)], ""
            else:
                found, missing = self._deliveries(firing, channels)
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

    def _deliveries(self, firing: _Firing, channels: Sequence[str]) -> tuple[list[_Delivery], str]:
        """Who gets this alert, written down as required before anything is sent.

        Returns:
            The messages, and why nobody who counts gets one, or an empty string.
        """
        directory, labels = self._directory(), firing.labels
        groups = [channel for channel in channels if channel in self._bots]
        if _for_operators(labels):
            message = firing.message(directory.operators_language, private=False)
            own = [(c, to) for c in channels for to in directory.operators.addresses(c)]
            found = [self._delivery(firing, *to, message) for to in own]
            found += self._along(firing, groups, None)
            return found, "" if found else NO_ADDRESS
        if labels.get("budget"):
            return self._to_team(firing, channels, groups)
        user, case_id = labels.get("user", ""), None
        stored = self._ledger.open_case(labels.get("rule", ""), labels.get("job_id", ""))
        if stored is not None and labels.get("stage"):
            # What the ledger knows outranks what came over the network.
            user, case_id = stored.case.user, stored.id
        # In a group the owner is told only where the operator says so, and is mentioned by name.
        proving = [c for c in channels if c not in self._bots or self._bots[c].proves]
        if not proving:
            return self._along(firing, groups, directory.user(user)), ""
        kinds = {name: bot.kind for name, bot in self._bots.items()}
        told = recipients(directory, user, proving, now=self._clock.wall(), kinds=kinds)
        if case_id is not None:
            self._require(firing, told, proving, user=user, case_id=case_id)
        elif not told.required:
            for channel in proving:
                self._failed(firing, channel, _nobody(user), error=told.why_not, case_id=None)
        if told.why_not:
            log.warning(
                "owner cannot be told",
                user=user,
                rule=labels.get("rule"),
                why=told.why_not,
                deputy=told.deputy,
            )
        reached = {channel for channel, _ in told.required}
        others = [group for group in groups if group not in reached]
        found = [
            *self._to(firing, told, directory.user(told.deputy or user), case_id=case_id),
            *self._along(firing, others, directory.user(user)),
        ]
        return found, "" if told.required else told.why_not

    def _to_team(
        self, firing: _Firing, channels: Sequence[str], groups: Sequence[str]
    ) -> tuple[list[_Delivery], str]:
        """News about a team's budget: to its contact, or else to the operators."""
        directory, team = self._directory(), firing.labels.get("team", "")
        contact = directory.team(team).contact
        if contact is None:
            own = [(c, to) for c in channels for to in directory.operators.addresses(c)]
        else:
            own = [(c, to) for c in channels if (to := contact.address(c)) is not None]
        message = self._shared(firing, directory.language, (team,))
        found = [self._delivery(firing, *to, message) for to in own]
        found += self._along(firing, groups, None)
        return found, "" if found else NO_ADDRESS

    def _to(
        self, firing: _Firing, told: Recipients, person: User, *, case_id: int | None
    ) -> list[_Delivery]:
        """The message for who must have it, and for who is told as well."""
        directory = self._directory()
        reads = directory.language_of(person)
        found = [
            self._delivery(
                firing,
                *to,
                firing.message(self._reads(to[0]) or reads, private=to[0] not in self._bots),
                case_id=case_id,
            )
            for to in told.required
        ]
        # A team's contact is of the team.
        shared = self._shared(firing, directory.language, (firing.labels.get("team", ""),))
        return found + [self._delivery(firing, *to, shared) for to in told.informed]

    def _shared(self, firing: _Firing, language: Language, teams: Sequence[str]) -> Message:
        """The message for a channel that members of some teams read."""
        user = firing.labels.get("user", "")
        if self._names is None:
            return firing.message(language, private=False)
        reader = self._names.channel(*teams)
        veiled = replace(firing, annotations=self._names.veil(reader, dict(firing.annotations)))
        message = veiled.message(language, private=False)
        return message.naming(self._names.shown(reader, user)) if user else message

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
            case_id,
            _stage(firing.labels),
            required,
            channels=channels,
            time=self._clock.wall(),
            owner=user,
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

    def _along(
        self, firing: _Firing, groups: Sequence[str], person: User | None
    ) -> list[_Delivery]:
        """What groups read along: it proves nothing to anybody, and mentions whom it is about."""
        directory = self._directory()
        otherwise = directory.operators_language if person is None else directory.language
        return [
            self._delivery(
                firing,
                group,
                (None if person is None else person.address(self._bots[group].kind)) or GROUP,
                firing.message(self._reads(group) or otherwise, private=False),
            )
            for group in groups
        ]

    def _reads(self, channel: str) -> Language | None:
        """The language of a group, where engine.yaml names one."""
        bot = self._bots.get(channel)
        return None if bot is None else bot.language

    def _delivery(
        self,
        firing: _Firing,
        channel: str,
        recipient: str,
        message: Message,
        *,
        case_id: int | None = None,
    ) -> _Delivery:
        key = self._key(firing, channel, recipient)
        return _Delivery(key, case_id, _stage(firing.labels), message)

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
        wait = self._spared.get(key.channel, -math.inf) - self._clock.monotonic()
        if wait > 0:
            # Alertmanager comes again; to ask meanwhile would only put everybody off for longer.
            text = f"its server asks to be left alone for another {math.ceil(wait)} s"
            return Undelivered(text, permanent=False)
        try:
            proof = await self._channels[key.channel].send(key.recipient, item.message)
        except Undelivered as error:
            if error.retry_after:
                self._spared[key.channel] = self._clock.monotonic() + error.retry_after
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


def _for_operators(labels: Mapping[str, str]) -> bool:
    return labels.get("level") == "page" or labels.get("target") == "gpu"


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
        url = str(alert.get("generatorURL", ""))
        found.append(_Firing(fingerprint, starts_at, texts, notes, url))
    return found
