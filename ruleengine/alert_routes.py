"""Alertmanager's routes as it walks them, with their places in the file. Pure.

Only what decides where an alert goes, when, and what silences it is read; `amtool check-config`
says whether the rest is right. Semantics are those of Alertmanager 0.25 and later
(https://prometheus.io/docs/alerting/latest/configuration/): settings of a route are its parent's
where it has none of its own, but for its time intervals, which are its own alone; children are
tried in order, and one that matches without `continue` ends the search.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from gpuwarden import durations

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from gpuwarden.diagnostics import Span
    from gpuwarden.yaml_files import Node

MAX_ROUTES = 5000
_MATCHER = re.compile(
    r'\s*(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*|"(?:[^"\\]|\\.)+")\s*(?P<op>=~|!~|!=|=)\s*'
    r'(?P<value>"(?:[^"\\]|\\.)*"|[^,"]*?)\s*(?=,|\Z)'
)
_LITERALS = re.compile(r"[\w.@:/ -]*(?:\|[\w.@:/ -]*)*")
"""A pattern that is a list of words."""


class UnreadableRoutes(ValueError):
    """The file is not one that Alertmanager would take; the text says what is wrong.

    Attributes:
        span: where.
    """

    def __init__(self, text: str, span: Span) -> None:
        super().__init__(text)
        self.span = span


@dataclass(frozen=True, slots=True)
class Pattern:
    """A value of a label of which only this is known: a pattern of the file matches it."""

    text: str

    def __str__(self) -> str:
        return f"~{self.text}"


Value = str | Pattern


@dataclass(frozen=True, slots=True)
class Matcher:
    """One condition on one label; a label that an alert lacks is empty."""

    name: str
    op: str
    value: str

    def matches(self, labels: Mapping[str, Value]) -> bool:
        """Whether an alert with these labels is meant."""
        found = labels.get(self.name, "")
        if self.op in ("=", "!="):
            same = found == self.value
        elif isinstance(found, Pattern):
            same = self.value in (found.text, ".*", ".+")
        else:
            same = re.fullmatch(f"(?:{self.value})", found, re.DOTALL) is not None
        return same is (self.op in ("=", "=~"))

    def values(self) -> tuple[Value, ...]:
        """Values of the label that this condition tells from others."""
        if self.op in ("=", "!="):
            return (self.value,)
        if _LITERALS.fullmatch(self.value):
            return tuple(self.value.split("|"))
        return (Pattern(self.value),)


@dataclass(frozen=True, slots=True)
class Route:
    """A route with what it takes over from its parents.

    Attributes:
        span: where it begins.
        receiver: whom it leads to.
        matchers: of this route alone.
        children: tried in order.
        goes_on: whether its siblings after it are tried as well.
        muted: names of its time intervals, of those that mute and of those that do not.
        waits: seconds that an alert waits here at most: for its group, or until the group's next
            message.
        plain: whether it has no conditions.
    """

    span: Span
    receiver: str
    matchers: tuple[Matcher, ...]
    children: tuple[Route, ...] = ()
    goes_on: bool = False
    muted: tuple[str, ...] = ()
    waits: float = 0.0

    def reached(self, labels: Mapping[str, Value]) -> Iterator[Route]:
        """The routes by which an alert leaves, as Alertmanager finds them."""
        if not all(matcher.matches(labels) for matcher in self.matchers):
            return
        found = False
        for child in self.children:
            below = list(child.reached(labels))
            yield from below
            found = found or bool(below)
            if below and not child.goes_on:
                break
        if not found:
            yield self

    def every(self) -> Iterator[Route]:
        """This route and all below it."""
        yield self
        for child in self.children:
            yield from child.every()


@dataclass(frozen=True, slots=True)
class _Settings:
    receiver: str
    group_wait: float = 30.0
    group_interval: float = 300.0


def read_routes(root: Node) -> Route:
    """The tree of routes of an alertmanager.yml.

    Raises:
        UnreadableRoutes: it has none, or one cannot be understood.
    """
    node = root.child("route")
    if node is None or not isinstance(node.value, dict):
        raise UnreadableRoutes("route: is missing, so that nobody is told anything", root.span)
    tree = _Reader().route(node, _Settings(""))
    if tree.matchers:
        raise UnreadableRoutes(
            "route: the first route must take every alert, so that Alertmanager refuses it with "
            "conditions: move them to a route below it",
            node.span,
        )
    return tree


class _Reader:
    def __init__(self) -> None:
        self._count = 0

    def route(self, node: Node, parent: _Settings) -> Route:
        self._count += 1
        if self._count > MAX_ROUTES:
            raise UnreadableRoutes(f"more than {MAX_ROUTES} routes", node.span)
        settings = replace(
            parent,
            receiver=text_of(node, "receiver") or parent.receiver,
            group_wait=_seconds(node, "group_wait", parent.group_wait),
            group_interval=_seconds(node, "group_interval", parent.group_interval),
        )
        if not settings.receiver:
            raise UnreadableRoutes("route: names no receiver", node.span)
        routes = inside(node, "routes")
        return Route(
            span=node.span,
            receiver=settings.receiver,
            matchers=tuple(read_matchers(node)),
            children=tuple(
                self.route(item, settings) for item in (routes.items() if routes else ())
            ),
            goes_on=_flag(node, "continue"),
            muted=(
                *(f"mute {name}" for name in texts_of(node, "mute_time_intervals")),
                *(f"active only in {name}" for name in texts_of(node, "active_time_intervals")),
            ),
            waits=max(settings.group_wait, settings.group_interval),
        )


def read_matchers(node: Node, prefix: str = "") -> Iterator[Matcher]:
    """The conditions of a route, or of a side of an inhibition.

    Args:
        node: of which `matchers`, `match` and `match_re` are read.
        prefix: `source_` or `target_`.

    Raises:
        UnreadableRoutes: one is none.
    """
    for key, op in ((f"{prefix}match", "="), (f"{prefix}match_re", "=~")):
        found = inside(node, key)
        if found is not None and isinstance(found.value, dict):
            for name, value in found.value.items():
                yield _checked(Matcher(name, op, str(value.value)), value)
    listed = inside(node, f"{prefix}matchers")
    for item in listed.items() if listed is not None else ():
        yield from _parsed(item)


def _parsed(node: Node) -> Iterator[Matcher]:
    text = str(node.value).strip()
    if text.startswith("{") and text.endswith("}"):
        text = text[1:-1].strip().removesuffix(",")
    at = 0
    while at < len(text):
        found = _MATCHER.match(text, at)
        if found is None or (found.end() < len(text) and text[found.end()] != ","):
            raise UnreadableRoutes(f'{text!r} is no matcher: write name="value"', node.span)
        yield _checked(Matcher(_plain(found["name"]), found["op"], _plain(found["value"])), node)
        at = found.end() + 1


def _plain(text: str) -> str:
    if not text.startswith('"'):
        return text
    escapes = {"n": "\n", "t": "\t"}
    return re.sub(r"\\(.)", lambda match: escapes.get(match[1], match[1]), text[1:-1])


def _checked(matcher: Matcher, node: Node) -> Matcher:
    if matcher.op in ("=~", "!~"):
        try:
            re.compile(matcher.value)
        except re.error as error:
            raise UnreadableRoutes(
                f"{matcher.value!r} is not a pattern: {error}", node.span
            ) from error
    return matcher


def inside(node: Node, key: str) -> Node | None:
    """What a mapping says of a key, by itself or by YAML's merge keys, or None."""
    found = node.child(key)
    merged = node.child("<<")
    if found is not None or merged is None:
        return found
    others = merged.items() if isinstance(merged.value, list) else (merged,)
    return next((item for other in others if (item := inside(other, key)) is not None), None)


def text_of(node: Node, key: str) -> str:
    """A text of a mapping, or an empty string."""
    found = inside(node, key)
    return "" if found is None or found.value is None else str(found.value)


def texts_of(node: Node, key: str) -> Sequence[str]:
    """A list of texts of a mapping; empty if there is none."""
    found = inside(node, key)
    return () if found is None else [str(item.value) for item in found.items()]


def _flag(node: Node, key: str) -> bool:
    found = inside(node, key)
    return found is not None and found.value is True


def _seconds(node: Node, key: str, default: float) -> float:
    found = inside(node, key)
    if found is None or found.value is None:
        return default
    try:
        return durations.parse(str(found.value))
    except ValueError as error:
        raise UnreadableRoutes(f"{key}: {error}", found.span) from error
