"""Whose names a person reads, and the pseudonyms that stand in their place.

A pseudonym is a keyed hash of the name: the same for the same user on every page and in every
answer, also after a restart, and without the engine's secret nobody can tell whose it is. All that
leaves the engine for a reader goes through `veil`: no page or endpoint decides for itself.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import hmac
import json
import re
import secrets
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import structlog

from gpuwarden.catalogue import CATALOGUE
from gpuwarden.refusals import Refusal
from gpuwarden.ruleengine.alertmanager import rfc3339
from gpuwarden.ruleengine.roles import Person, Role
from gpuwarden.ruleengine.texts.english import ENGLISH
from gpuwarden.ruleengine.unknown_reasons import REASONS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gpuwarden.ruleengine.engine import Engine

MAX_OPEN_SECONDS = 8 * 3600.0
"""For longer nobody needs every name at once."""
DEFAULT_OPEN_SECONDS = 3600.0
_PERSONS = frozenset({"user", "by", "owner"})
"""Keys that name a person."""
_KEPT = frozenset({"schema", "job_id", "rule", "id", "uuid", "state", "mode", "kind", "level"})
"""Keys by which pages and programs find things again."""
_RUN = re.compile(r"[^\W_]+")
_ALIAS = re.compile(r"user-[a-z2-7]{6}")
_HIDDEN = "hidden"
_TEMPLATES = Path(__file__).resolve().parent / "templates"
_SENTENCES = (
    "admin administrator daemon guest nobody operator owner root service system ubuntu debian",
    "a an and are as at be been before but by can done ended ends every for from has have held",
    "here if in into is it its job last limit may more most must no not nothing now of on one only",
    "or other our out over owner rule since so than that the their them then there these they this",
    "to until wait was what when where which while who why will with within without you your",
    "batch cuda data dataset demo detect dev epoch gpu image images lab loader model pose project",
    "seg student students team test tests train training user users val work yolo",
)
"""Words of sentences that are put together elsewhere, and names that nodes often have."""

log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Known:
    """Everybody whose name could appear.

    Attributes:
        teams: user name -> team.
        words: first run of letters of a name or an address, in small letters -> those words.
        owners: name or address, in small letters -> user name.
    """

    teams: Mapping[str, str]
    words: Mapping[str, tuple[str, ...]]
    owners: Mapping[str, str]


class Pseudonyms:
    """What stands in the place of names.

    Args:
        key: a secret, from which they follow.
    """

    def __init__(self, key: bytes) -> None:
        self._key = hmac.digest(key, b"gpuwarden pseudonyms v1", "sha256")

    def of(self, user: str) -> str:
        """The pseudonym of a user."""
        mac = hmac.digest(self._key, user.encode(), "sha256")
        return f"user-{base64.b32encode(mac).decode()[:6].lower()}"


class Names:
    """Tells who may read which names, and takes the others out.

    Args:
        engine: whose users they are.
        key: the engine's secret, or None: pseudonyms then last as long as this process.
        identified: whether people can sign in at all.
    """

    def __init__(self, engine: Engine, key: bytes | None, *, identified: bool) -> None:
        self._engine = engine
        self._pseudonyms = Pseudonyms(key or secrets.token_bytes(32))
        self._identified = identified
        self._opened: dict[str, float] = {}

    def alias(self, user: str) -> str:
        """The pseudonym of a user."""
        return self._pseudonyms.of(user)

    def channel(self, *teams: str) -> Person:
        """Whoever reads a channel, as a reader of names: a member of these teams, and nobody."""
        return Person("", Role.OWNER, teams=teams)

    # -- opening

    def opened_until(self, person: Person) -> float | None:
        """Until when (Unix time) a person has opened the names, or None."""
        until = self._opened.get(_session(person))
        return until if until is not None and until > self._engine.clock.wall() else None

    def must_open(self, person: Person) -> bool:
        """Whether names are to be opened by this person before they are read."""
        closed = self._engine.settings.web.operator_names == "opened"
        return closed and bool(person.name) and person.role.includes(Role.OPERATOR)

    def open(self, person: Person, *, reason: str, seconds: float | None) -> float:
        """Let a person read every name for a while, in this session alone; it is in the audit.

        Args:
            person: an operator.
            reason: why.
            seconds: for how long, or None for an hour.

        Returns:
            Until when, as Unix time.

        Raises:
            Refusal: they need not, or not for so long.
            LedgerUnusable: it cannot be written, and so does not hold.
        """
        if not self.must_open(person):
            raise Refusal(409, "names_open", "names are open to you already")
        length = DEFAULT_OPEN_SECONDS if seconds is None else seconds
        if length > MAX_OPEN_SECONDS:
            raise Refusal(400, "too_long", f"at most {MAX_OPEN_SECONDS / 3600:g}h")
        now = self._engine.clock.wall()
        until = now + length
        self._note("names_opened", person, reason=reason, until=rfc3339(until))
        self._opened = {who: end for who, end in self._opened.items() if end > now}
        self._opened[_session(person)] = until
        log.warning("names opened", by=person.name, reason=reason, seconds=length)
        return until

    def close(self, person: Person) -> None:
        """End it before its time."""
        if self._opened.pop(_session(person), None) is not None:
            self._note("names_closed", person)

    def _note(self, kind: str, person: Person, **more: str) -> None:
        detail = {"by": person.name, "role": person.role.value, **more}
        with self._engine.ledger.transaction() as db:
            db.execute(
                "INSERT INTO events (time, rule_id, job_id, kind, mode, detail) "
                "VALUES (?, '', '', ?, '', ?)",
                (self._engine.clock.wall(), kind, json.dumps(detail, sort_keys=True)),
            )

    # -- reading

    def veils(self, person: Person) -> bool:
        """Whether any name at all may be hidden from a person."""
        if self._engine.settings.web.names == "everyone" and not self.must_open(person):
            return False
        if not person.name:
            return self._identified
        if not person.sees_all:
            return True
        return self.must_open(person) and self.opened_until(person) is None

    def reads(self, person: Person, user: str, team: str) -> bool:
        """Whether a person reads a user's name."""
        if not user or not self.veils(person):
            return True
        if person.sees_all:
            return user == person.name
        if self._engine.settings.web.names == "nobody":
            return user == person.name
        return person.knows(user, team)

    def shown(self, person: Person, user: str) -> str:
        """A user's name, or the pseudonym."""
        team = self._engine.rulebook.directory.user(user).team
        return user if self.reads(person, user, team) else self.alias(user)

    def shown_team(self, person: Person, user: str, team: str) -> str:
        """A user's team, where it may be told."""
        told = self._engine.settings.web.names != "nobody" or self.reads(person, user, team)
        return team if told else ""

    def veil(self, person: Person | None, value: Any) -> Any:
        """Plain values without the names that a person may not read.

        Args:
            person: who reads it, or None: nobody that is known by name, who sees what is theirs.
            value: dicts, lists, tuples and texts are gone through; anything else stays.
        """
        if person is None or not self.veils(person):
            return value
        found: set[str] = set()
        _users(value, found)
        return _Veil(self, person, self._known(found)).of("", value)

    def _known(self, more: Iterable[str]) -> _Known:
        directory, facts = self._engine.rulebook.directory, self._engine.view.facts
        teams = {name: user.team for name, user in directory.users.items()}
        for job in () if facts is None else facts.jobs.values():
            if job.user:
                teams.setdefault(job.user, job.team)
        for user in more:
            teams.setdefault(user, "")
        owners = {name.lower(): name for name in teams}
        for name, listed in directory.users.items():
            owners.update(dict.fromkeys((to.lower() for to in listed.addresses), name))
        words: dict[str, tuple[str, ...]] = {}
        for word in owners:
            first = _RUN.search(word)
            if first is not None and word not in own_words():
                words[first[0]] = (*words.get(first[0], ()), word)
        return _Known(teams, words, owners)


@functools.cache
def own_words() -> frozenset[str]:
    """The words that pages, notices and metrics are made of, in small letters.

    A user who is called like one (`gpu`, `data`, `root`) is hidden where a field names them. As a
    word in a text it tells nobody anything, and without it the text could not be read.
    """
    texts = [path.read_text(encoding="utf-8") for path in sorted(_TEMPLATES.glob("*.html"))]
    phrases = (getattr(ENGLISH, item.name) for item in dataclasses.fields(ENGLISH))
    texts += [text for text in phrases if isinstance(text, str)]
    texts += [f"{metric.name} {metric.help} {metric.labels}" for metric in CATALOGUE.values()]
    texts += [*REASONS, *REASONS.values(), *_SENTENCES]
    return frozenset(run.lower() for text in texts for run in _RUN.findall(text))


class _Veil:
    """One document, as one person reads it."""

    def __init__(self, names: Names, person: Person, known: _Known) -> None:
        self._names = names
        self._person = person
        self._known = known

    def of(self, key: str, value: Any) -> Any:
        """A value without the names that may not be read."""
        if isinstance(value, dict):
            return self._dict(value)
        if isinstance(value, list | tuple):
            found = [self.of(key, item) for item in value]
            return found if isinstance(value, list) else tuple(found)
        if type(value) is str and key not in _KEPT:
            return self._text(key, value)
        return value

    def _dict(self, value: dict[Any, Any]) -> dict[Any, Any]:
        found = {key: self.of(str(key), item) for key, item in value.items()}
        user, team = value.get("user"), value.get("team")
        if isinstance(user, str) and isinstance(team, str):
            found["team"] = self._names.shown_team(self._person, user, team)
        return found

    def _text(self, key: str, text: str) -> str:
        if key == "recipient":
            return _HIDDEN
        if key in _PERSONS and text in self._known.teams:
            return self._shown(text)
        runs = {run.lower() for run in _RUN.findall(text)}
        words = [word for run in runs for word in self._known.words.get(run, ())]
        if not words:
            return text
        listed = "|".join(re.escape(word) for word in sorted(words, key=len, reverse=True))
        return re.sub(
            rf"(?<![^\W_])(?:{listed})(?![^\W_])",
            lambda match: self._replaced(match[0]),
            text,
            flags=re.IGNORECASE,
        )

    def _replaced(self, word: str) -> str:
        user = self._known.owners.get(word.lower(), "")
        shown = self._shown(user)
        return word if shown == user else shown

    def _shown(self, user: str) -> str:
        team = self._known.teams.get(user, "")
        return user if self._names.reads(self._person, user, team) else self._names.alias(user)


def _users(value: Any, found: set[str]) -> None:
    """Every name that stands under `user` somewhere in a document."""
    if isinstance(value, dict):
        user = value.get("user")
        if isinstance(user, str) and user and _ALIAS.fullmatch(user) is None:
            found.add(user)
        for item in value.values():
            _users(item, found)
    elif isinstance(value, list | tuple):
        for item in value:
            _users(item, found)


def _session(person: Person) -> str:
    """What an opening is bound to: one browser's session, or one token."""
    return f"{person.name}\n{person.session}"
