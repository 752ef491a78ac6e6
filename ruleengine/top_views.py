"""What somebody who watches has chosen, and what each key makes of it. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from typing import TYPE_CHECKING, Final

from gpuwarden.ruleengine.fleet_documents import SORTS
from gpuwarden.ruleengine.top_pictures import Question

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

    from gpuwarden.ruleengine.top_pictures import Picture

MAX_TYPED: Final = 200
_FIELDS = ("user", "team", "node", "rule")


class Mode(Enum):
    """What the screen shows."""

    ROWS = "rows"
    HELP = "help"
    DETAILS = "details"
    PROMPT = "prompt"


@dataclass(frozen=True, slots=True)
class View:
    """What is looked at, and how.

    Attributes:
        question: which part of the fleet.
        chosen: index of the marked row on the screen.
        chosen_id: its job, or an empty string: the mark stays with the job, not with the place.
        mode: what the screen shows.
        scroll: lines of details or help that are passed over.
        typed: what stands in the prompt.
        paused: nothing new is asked for.
        left: it is over.
        message: what was wrong with the last key, until the next.
    """

    question: Question = field(default_factory=Question)
    chosen: int = 0
    chosen_id: str = ""
    mode: Mode = Mode.ROWS
    scroll: int = 0
    typed: str = ""
    paused: bool = False
    left: bool = False
    message: str = ""


def settled(view: View, picture: Picture | None) -> View:
    """The view on a new picture: the mark is on the job that it was on, if that is still there."""
    jobs = [] if picture is None else picture.document["jobs"]
    names = [job["job_id"] for job in jobs]
    if view.chosen_id in names:
        return replace(view, chosen=names.index(view.chosen_id))
    chosen = max(0, min(view.chosen, len(names) - 1))
    return replace(view, chosen=chosen, chosen_id=names[chosen] if names else "")


def press(view: View, key: str, picture: Picture | None) -> View:
    """What a key makes of a view.

    Args:
        view: as it is.
        key: a character, or a name of `top_screens.NAMES`.
        picture: what is shown, or None.
    """
    view = replace(view, message="")
    if view.mode is Mode.PROMPT:
        return _typing(view, key)
    if key in ("q", "Q"):
        return replace(view, left=True) if view.mode is Mode.ROWS else _back(view)
    if view.mode is not Mode.ROWS:
        return _reading(view, key)
    act = _KEYS.get(key)
    return view if act is None else act(view, picture)


def _back(view: View) -> View:
    return replace(view, mode=Mode.ROWS, scroll=0, typed="")


def _reading(view: View, key: str) -> View:
    if key in ("escape", "enter", "h", "?", "left"):
        return _back(view)
    steps = {"down": 1, "j": 1, "up": -1, "k": -1, "pagedown": 10, " ": 10, "pageup": -10}
    if key == "home":
        return replace(view, scroll=0)
    return replace(view, scroll=max(0, view.scroll + steps.get(key, 0)))


def _typing(view: View, key: str) -> View:
    if key == "escape":
        return _back(view)
    if key == "enter":
        return _filtered(view)
    if key in ("backspace", "clear"):
        return replace(view, typed=view.typed[:-1] if key == "backspace" else "")
    if len(key) == 1 and key.isprintable() and len(view.typed) < MAX_TYPED:
        return replace(view, typed=view.typed + key)
    return view


def _filtered(view: View) -> View:
    found = read_filter(view.typed, view.question)
    if isinstance(found, str):
        return replace(view, message=found)
    return _ask(_back(view), found)


def read_filter(text: str, question: Question) -> Question | str:
    """A question with the filter that is typed, or what is wrong with it.

    Words are `user:NAME`, `team:NAME`, `node:NAME`, `rule:ID` and `broken`; one that is none of
    these is a part of a user's name.
    """
    given = dict.fromkeys(_FIELDS, "")
    broken = False
    for word in text.split():
        name, colon, value = word.partition(":")
        if word == "broken":
            broken = True
        elif not colon:
            given["user"] = word
        elif name not in given:
            return f"{name}: is no filter: user:, team:, node:, rule:, or broken"
        else:
            given[name] = value
    user, team, node, rule = (given[name] for name in _FIELDS)
    return replace(question, user=user, team=team, node=node, rule=rule, broken=broken)


def _ask(view: View, question: Question) -> View:
    return replace(view, question=replace(question, offset=0), chosen=0, chosen_id="")


def _next_sort(view: View, _picture: Picture | None) -> View:
    number = (SORTS.index(view.question.sort) + 1) % len(SORTS)
    return _ask(view, replace(view.question, sort=SORTS[number]))


def _reverse(view: View, _picture: Picture | None) -> View:
    return _ask(view, replace(view.question, reverse=not view.question.reverse))


def _broken(view: View, _picture: Picture | None) -> View:
    return _ask(view, replace(view.question, broken=not view.question.broken))


def _prompt(more: str) -> Callable[[View, Picture | None], View]:
    def opened(view: View, _picture: Picture | None) -> View:
        known = view.question.words()
        text = f"{known} {more}".strip()
        return replace(view, mode=Mode.PROMPT, typed=text)

    return opened


def _pause(view: View, _picture: Picture | None) -> View:
    return replace(view, paused=not view.paused)


def _help(view: View, _picture: Picture | None) -> View:
    return replace(view, mode=Mode.HELP, scroll=0)


def _details(view: View, _picture: Picture | None) -> View:
    return replace(view, mode=Mode.DETAILS, scroll=0) if view.chosen_id else view


def _clear(view: View, _picture: Picture | None) -> View:
    question = replace(view.question, user="", team="", node="", rule="", broken=False)
    return _ask(view, question)


def _moved(step: int) -> Callable[[View, Picture | None], View]:
    def move(view: View, picture: Picture | None) -> View:
        jobs = [] if picture is None else picture.document["jobs"]
        chosen = view.chosen + step
        if 0 <= chosen < len(jobs):
            return replace(view, chosen=chosen, chosen_id=jobs[chosen]["job_id"])
        return _paged(1 if step > 0 else -1)(view, picture)

    return move


def _paged(pages: int) -> Callable[[View, Picture | None], View]:
    def turn(view: View, picture: Picture | None) -> View:
        if picture is None:
            return view
        size, total = view.question.limit, picture.document["total"]
        offset = view.question.offset + pages * size
        if offset >= total or view.question.offset + offset <= 0 > pages:
            return view
        chosen = 0 if pages > 0 else size - 1
        question = replace(view.question, offset=max(0, offset))
        return replace(view, question=question, chosen=chosen, chosen_id="")

    return turn


def _first(view: View, _picture: Picture | None) -> View:
    return _ask(view, view.question)


def _last(view: View, picture: Picture | None) -> View:
    total = 0 if picture is None else picture.document["total"]
    size = max(1, view.question.limit)
    offset = max(0, (total - 1) // size * size)
    question = replace(view.question, offset=offset)
    return replace(view, question=question, chosen=max(0, total - 1 - offset), chosen_id="")


_KEYS: Final[Mapping[str, Callable[[View, Picture | None], View]]] = {
    "s": _next_sort,
    "S": _reverse,
    "r": _reverse,
    "b": _broken,
    "/": _prompt(""),
    "f": _prompt(""),
    "u": _prompt("user:"),
    "t": _prompt("team:"),
    "n": _prompt("node:"),
    "c": _clear,
    "p": _pause,
    " ": _pause,
    "h": _help,
    "?": _help,
    "enter": _details,
    "d": _details,
    "right": _details,
    "down": _moved(1),
    "j": _moved(1),
    "up": _moved(-1),
    "k": _moved(-1),
    "pagedown": _paged(1),
    "pageup": _paged(-1),
    "home": _first,
    "g": _first,
    "end": _last,
    "G": _last,
}

HELP: Final = (
    ("q, Ctrl-C", "leave"),
    ("up, down, j, k", "mark another job; at the edge, the next page"),
    ("PgUp, PgDn, Home, End", "other pages"),
    ("Enter", "everything known of the marked job: rules, numbers, what comes next"),
    ("s, S", "sort by the next column; the other way round"),
    ("/", "filter: user:NAME team:NAME node:NAME rule:ID broken"),
    ("u, t, n", "filter by user, team, node"),
    ("b", "only jobs that break a rule, or may soon"),
    ("c", "clear the filter"),
    ("p, space", "pause, and go on"),
    ("?", "this page"),
)
"""Every key and what it does."""
