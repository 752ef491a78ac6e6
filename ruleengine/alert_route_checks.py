"""Whether Alertmanager's file lets every notice through that precedes an action. Pure.

Every kind of alert that the engine makes is walked through the routes with every value of a label
that the file tells from others. What could keep a notice from its owner, or from being proven, is
an error: then no job is ended, and nobody knows why; what could delay an end is a warning.
"""

from __future__ import annotations

import itertools
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING
from urllib.parse import parse_qs, urlsplit

from gpuwarden import durations
from gpuwarden.diagnostics import Diagnostic, Severity
from gpuwarden.ruleengine.alert_routes import (
    Matcher,
    Pattern,
    Route,
    UnreadableRoutes,
    Value,
    inside,
    read_matchers,
    read_routes,
    text_of,
    texts_of,
)
from gpuwarden.ruleengine.notices import SERVICE

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

    from gpuwarden.diagnostics import Span
    from gpuwarden.yaml_files import Node

DEFAULT_LONGEST = 300.0
"""Seconds that a notice may wait in Alertmanager before somebody should ask why."""
HEARTBEAT_LONGEST = 900.0
MAX_WALKS = 200_000
_LAST_HOP = re.compile(r"/v1/notify/(?P<channels>[a-z0-9_+-]+)/?")
_FREE = ("team", "user", "rule", "node", "stage", "job_id")
"""Labels of a job's alerts whose values are the site's own."""
_OTHER = "any-other"


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of alert of the engine.

    Attributes:
        labels: that it always has, with these values.
        level: of its consequence: `precedes`, `told` or `page`.
    """

    labels: Mapping[str, str]
    level: str


def _job(name: str, level: str, weight: str) -> Kind:
    labels = {"alertname": name, "service": SERVICE, "level": level, "mode": "enforce"}
    return Kind({**labels, "target": ""}, weight)


KINDS = (
    _job("GpuwardenJobNotice", "severe", "precedes"),
    _job("GpuwardenJobNotice", "moderate", "precedes"),
    _job("GpuwardenJobNotice", "light", "mild"),
    _job("GpuwardenJobEnding", "severe", "told"),
    _job("GpuwardenJobEnded", "ended", "told"),
    _job("GpuwardenNoticeWithdrawn", "moderate", "told"),
    _job("GpuwardenJobCameBack", "moderate", "told"),
    _job("GpuwardenJobLeaving", "moderate", "told"),
    Kind(
        {
            "alertname": "GpuwardenBudget",
            "service": SERVICE,
            "level": "moderate",
            "mode": "warn",
            "target": "",
        },
        "told",
    ),
    _job("GpuwardenJobCameBack", "page", "page"),
    _job("GpuwardenNoticeUndeliverable", "page", "page"),
    _job("GpuwardenReclaimUnproven", "page", "page"),
    Kind(
        {"alertname": "GpuwardenEnforcementHalted", "service": SERVICE, "level": "page"},
        "page",
    ),
)
HEARTBEAT = {"alertname": "Watchdog", "service": "gpuwarden", "severity": "none"}


@dataclass(frozen=True, slots=True)
class _Receiver:
    """Whom a receiver tells.

    Attributes:
        span: where it stands.
        channels: of the engine's last hop, to owners.
        authorised: whether every call of the last hop carries credentials.
        truncates: whether a call leaves alerts out beyond a number.
        ways: how many integrations it has.
        unknown: whether one of them may be the last hop, by an address in a file of its own.
    """

    span: Span
    channels: frozenset[str] = frozenset()
    authorised: bool = True
    truncates: bool = False
    ways: int = 0
    unknown: bool = False


def check_routes(
    root: Node,
    *,
    channels: Iterable[str] | None = None,
    reading_along: Iterable[str] = (),
    longest: float = DEFAULT_LONGEST,
) -> list[Diagnostic]:
    """Everything that keeps notices from their owners, or from being proven.

    Args:
        root: of alertmanager.yml.
        channels: that engine.yaml configures, or None where that is not known.
        reading_along: those of them that prove nothing to an owner.
        longest: seconds that a notice may wait for its group.
    """
    try:
        tree = read_routes(root)
        receivers = _receivers(root)
        inhibitions = list(_inhibitions(root))
    except UnreadableRoutes as error:
        return [Diagnostic("GW500", Severity.ERROR, error.span, str(error))]
    check = _Check(
        tree,
        receivers,
        None if channels is None else frozenset(channels),
        frozenset(reading_along),
        longest=longest,
    )
    try:
        for kind in KINDS:
            for labels in _alerts(kind, tree, inhibitions):
                check.alert(kind, labels)
    except UnreadableRoutes as error:
        return [Diagnostic("GW500", Severity.ERROR, error.span, str(error))]
    check.heartbeat()
    for inhibition in inhibitions:
        check.inhibition(inhibition)
    return list(check.found.values())


def _alerts(
    kind: Kind, tree: Route, inhibitions: Sequence[_Inhibition]
) -> Iterator[dict[str, Value]]:
    """An alert of a kind for every way in which the file could tell it from others."""
    told: dict[str, dict[Value, None]] = {name: {} for name in _FREE}
    matchers = [matcher for route in tree.every() for matcher in route.matchers]
    matchers += [matcher for item in inhibitions for matcher in item.target]
    for matcher in matchers:
        if matcher.name in told:
            told[matcher.name].update(dict.fromkeys(matcher.values()))
    choices = [[*values, _OTHER] for values in told.values()]
    count = 1
    for values in choices:
        count *= len(values)
    if count > MAX_WALKS:
        raise UnreadableRoutes(
            f"the routes tell {count} kinds of jobs apart, which is more than can be checked",
            tree.span,
        )
    for chosen in itertools.product(*choices):
        yield {**kind.labels, **dict(zip(_FREE, chosen, strict=True))}


class _Check:
    def __init__(
        self,
        tree: Route,
        receivers: Mapping[str, _Receiver],
        channels: frozenset[str] | None,
        reading_along: frozenset[str],
        *,
        longest: float,
    ) -> None:
        self._reading_along = reading_along
        self._tree = tree
        self._receivers = receivers
        self._channels = channels
        self._longest = longest
        self.found: dict[tuple[str, Span], Diagnostic] = {}

    def alert(self, kind: Kind, labels: Mapping[str, Value]) -> None:
        """Follow one alert."""
        ways = list(self._tree.reached(labels))
        if kind.level == "page":
            self._page(ways, labels)
            return
        owners = [route for route in ways if self._tells_owner(route)]
        if not owners:
            if kind.level == "precedes":
                self._unproven(ways, labels)
            elif kind.level == "told":
                self._untold(ways, labels)
            return
        if kind.level == "told":
            return
        self._muted(kind, owners, labels)
        waits = min(route.waits for route in owners)
        if waits > self._longest:
            self._say(
                "GW503",
                Severity.ERROR if kind.level == "precedes" else Severity.WARNING,
                owners[0].span,
                f"{_such(labels)} may wait {durations.render(waits)} for its group, during which "
                "its owner knows nothing and no deadline runs",
                hint=f"group_wait and group_interval of at most {durations.render(self._longest)}",
            )
        for route in owners:
            self._last_hop(route)

    def _tells_owner(self, route: Route) -> bool:
        receiver = self._receivers.get(route.receiver)
        return receiver is not None and bool(receiver.channels - self._reading_along)

    def _unproven(self, ways: Sequence[Route], labels: Mapping[str, Value]) -> None:
        for route in ways:
            known = self._receivers.get(route.receiver)
            if known is not None and known.unknown:
                text = f'the receiver "{route.receiver}" has its address in a file: whether it is '
                text += "the engine's last hop is not known here"
                self._say("GW510", Severity.WARNING, known.span, text)
                return
        # Those before it were told to go on: this is where the owner should have been.
        route = ways[-1]
        what = "which makes no proof" if route.receiver in self._receivers else "which is not there"
        self._say(
            "GW504",
            Severity.ERROR,
            route.span,
            f'{_such(labels)} goes to the receiver "{route.receiver}", {what}: its owner is never '
            "known to have it, and no job is ended",
            hint="send it to a webhook http://ENGINE/v1/notify/<channels>, without ?channel=",
        )

    def _untold(self, ways: Sequence[Route], labels: Mapping[str, Value]) -> None:
        known = [self._receivers.get(route.receiver) for route in ways]
        route = ways[-1]
        # Where notices that precede an action are lost as well, that is what must be mended.
        lost = ("GW504", route.span) in self.found
        if lost or any(each is not None and each.unknown for each in known):
            return
        self._say(
            "GW511",
            Severity.WARNING,
            route.span,
            f'{_such(labels)} goes to the receiver "{route.receiver}" only: whom it is for, the '
            "job's owner or a budget's team, does not hear of it",
            hint="send it to a webhook http://ENGINE/v1/notify/<channels> as well",
        )

    def _muted(self, kind: Kind, owners: Sequence[Route], labels: Mapping[str, Value]) -> None:
        if any(not route.muted for route in owners):
            return
        precedes = kind.level == "precedes"
        rest = (
            "it precedes an action, which then waits for hours, unseen"
            if precedes
            else "a rule that ends jobs waits for its proof until then"
        )
        self._say(
            "GW501",
            Severity.ERROR if precedes else Severity.WARNING,
            owners[0].span,
            f"{_such(labels)} may be muted ({', '.join(owners[0].muted)}): {rest}",
            hint="mute only levels whose rules end nothing" if precedes else None,
        )

    def _last_hop(self, route: Route) -> None:
        receiver = self._receivers[route.receiver]
        name = f'the receiver "{route.receiver}"'
        if receiver.truncates:
            self._say(
                "GW505",
                Severity.ERROR,
                receiver.span,
                f"{name} has max_alerts: of a large group some notices are left out",
                hint="leave max_alerts out, or 0",
            )
        if not receiver.authorised:
            self._say(
                "GW507",
                Severity.ERROR,
                receiver.span,
                f"{name} calls the engine without credentials, which refuses it",
                hint="http_config.authorization.credentials_file: a copy of web.token_file",
            )
        if self._channels is not None and not receiver.channels <= self._channels:
            missing = ", ".join(sorted(receiver.channels - self._channels))
            self._say(
                "GW506",
                Severity.ERROR,
                receiver.span,
                f"{name} names {missing}, which engine.yaml does not configure: the engine refuses "
                "the whole call",
                hint=f"channels: {', '.join(sorted(self._channels)) or 'none'}",
            )

    def _page(self, ways: Sequence[Route], labels: Mapping[str, Value]) -> None:
        known = [self._receivers.get(route.receiver) for route in ways]
        if not any(receiver is not None and receiver.ways for receiver in known):
            self._say(
                "GW508",
                Severity.ERROR,
                ways[0].span,
                f"{_such(labels)} reaches nobody: operators do not hear that a person must look",
                hint="a receiver with a pager, mail or chat",
            )
        elif all(route.muted for route in ways):
            self._say(
                "GW501",
                Severity.ERROR,
                ways[0].span,
                f"{_such(labels)} may be muted ({', '.join(ways[0].muted)}): it says that a person "
                "must look",
            )

    def heartbeat(self) -> None:
        """Whether the alert that always fires reaches somebody who misses it."""
        ways = list(self._tree.reached(HEARTBEAT))
        alone = [
            route
            for route in ways
            if (receiver := self._receivers.get(route.receiver)) is not None
            and receiver.ways
            and not route.muted
            and route is not self._tree
        ]
        if not alone:
            self._say(
                "GW509",
                Severity.WARNING,
                ways[0].span,
                "the Watchdog has no receiver of its own: when Prometheus or Alertmanager dies, "
                "nobody hears of it",
                hint='a route for alertname="Watchdog" to a dead man\'s switch elsewhere',
            )
        elif min(route.waits for route in alone) > HEARTBEAT_LONGEST:
            text = "the Watchdog is sent so seldom that its silence says nothing"
            self._say("GW509", Severity.WARNING, alone[0].span, text, hint="every minute")

    def inhibition(self, item: _Inhibition) -> None:
        """Whether a notice that precedes an action could be silenced by another alert."""
        for kind in KINDS:
            if kind.level not in ("precedes", "page"):
                continue
            chosen = {m.name: m.values()[0] for m in item.target if m.name in _FREE}
            labels = {**kind.labels, **dict.fromkeys(_FREE, _OTHER), **chosen}
            if not all(matcher.matches(labels) for matcher in item.target):
                continue
            if kind.level == "precedes" and item.by_the_same_job(str(kind.labels["level"])):
                continue
            if kind.level == "page" and item.by_a_page():
                continue
            self._say(
                "GW502",
                Severity.ERROR,
                item.span,
                f"{_such(labels)} could be silenced by another alert, and be told to nobody",
                hint=f'only by service="{SERVICE}" of a higher level, with equal: [job_id, rule]',
            )
            return

    def _say(
        self, code: str, severity: Severity, span: Span, text: str, *, hint: str | None = None
    ) -> None:
        # Once for each place: the first alert that shows it at its worst stands for the others.
        known = self.found.get((code, span))
        if known is None or (known.severity, severity) == (Severity.WARNING, Severity.ERROR):
            self.found[code, span] = Diagnostic(code, severity, span, text, hint)


@dataclass(frozen=True, slots=True)
class _Inhibition:
    """One alert silences another while it stands."""

    span: Span
    source: tuple[Matcher, ...]
    target: tuple[Matcher, ...]
    equal: tuple[str, ...]

    def by_the_same_job(self, level: str) -> bool:
        """Whether only news of the same job that say more can silence a notice of a level."""
        if not self._only(self.source, "service", {SERVICE}) or "job_id" not in self.equal:
            return False
        order = ["light", "moderate", "severe"]
        higher = set(order[order.index(level) + 1 :])
        if "rule" not in self.equal:
            # Another rule's word is not this one's; that the job is over is.
            higher = set()
        return self._only(self.source, "level", {*higher, "ended"})

    def by_a_page(self) -> bool:
        """Whether a page is only silenced by a page of the same name."""
        return "alertname" in self.equal and any(m.name == "alertname" for m in self.source)

    @staticmethod
    def _only(matchers: Sequence[Matcher], name: str, allowed: set[str]) -> bool:
        for matcher in matchers:
            if matcher.name == name and matcher.op in ("=", "=~"):
                values = matcher.values()
                if all(not isinstance(v, Pattern) and v in allowed for v in values):
                    return True
        return False


def _inhibitions(root: Node) -> Iterator[_Inhibition]:
    found = root.child("inhibit_rules")
    for item in found.items() if found is not None else ():
        yield _Inhibition(
            item.span,
            tuple(read_matchers(item, "source_")),
            tuple(read_matchers(item, "target_")),
            tuple(texts_of(item, "equal")),
        )


def _receivers(root: Node) -> dict[str, _Receiver]:
    listed = root.child("receivers")
    return {
        text_of(item, "name"): _receiver(item)
        for item in (listed.items() if listed is not None else ())
    }


def _receiver(node: Node) -> _Receiver:
    channels: set[str] = set()
    authorised, truncates, ways, unknown = True, False, 0, False
    for key, value in node.value.items() if isinstance(node.value, dict) else ():
        if not key.endswith("_configs"):
            continue
        ways += len(value.items())
        for item in value.items() if key == "webhook_configs" else ():
            unknown = unknown or bool(text_of(item, "url_file"))
            address = urlsplit(text_of(item, "url"))
            hop = _LAST_HOP.fullmatch(address.path)
            if hop is None or "channel" in parse_qs(address.query):
                continue
            channels |= set(hop["channels"].split("+"))
            truncates = truncates or text_of(item, "max_alerts") not in ("", "0")
            authorised = authorised and _has_credentials(item)
    return _Receiver(node.span, frozenset(channels), authorised, truncates, ways, unknown)


def _has_credentials(node: Node) -> bool:
    config = inside(node, "http_config")
    names = ("authorization", "bearer_token", "bearer_token_file", "oauth2")
    return config is not None and any(inside(config, name) is not None for name in names)


def _such(labels: Mapping[str, Value]) -> str:
    shown = ("level", *_FREE)
    known = [f"{name}={labels[name]}" for name in shown if labels.get(name, _OTHER) != _OTHER]
    return f"{labels['alertname']} ({', '.join(known)})"
