"""The keys of `gpuwarden top`: bytes of any terminal, and what each makes of the view."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.ruleengine.test_top_layouts import a_job, a_picture

from gpuwarden.ruleengine.fleet_documents import SORTS
from gpuwarden.ruleengine.top_pictures import Question
from gpuwarden.ruleengine.top_screens import NAMES, Keys
from gpuwarden.ruleengine.top_views import HELP, Mode, View, press, read_filter, settled

if TYPE_CHECKING:
    from gpuwarden.ruleengine.top_pictures import Picture


def pictured(offset: int = 0, size: int = 3, total: int = 8) -> Picture:
    """A page of a fleet."""
    numbers = range(offset, min(total, offset + size))
    jobs = [a_job(job_id=f"job-{number}") for number in numbers]
    return a_picture(*jobs, total=total, offset=offset)


def walked(keys: list[str], size: int = 3) -> View:
    """The view after some keys, each with the page that it asked for."""
    view = settled(View(Question(limit=size)), pictured(size=size))
    for key in keys:
        view = press(view, key, pictured(view.question.offset, size))
        view = settled(view, pictured(view.question.offset, size))
    return view


@pytest.mark.parametrize(
    ("keys", "chosen"),
    [
        ([], "job-0"),
        (["down"], "job-1"),
        (["down"] * 3, "job-3"),
        (["down"] * 20, "job-7"),
        (["down"] * 4 + ["up"] * 2, "job-2"),
        (["up"], "job-0"),
        (["pagedown"], "job-3"),
        (["pagedown"] * 9, "job-6"),
        (["pagedown", "pagedown", "pageup"], "job-5"),
        (["end"], "job-7"),
        (["end", "home"], "job-0"),
        (["pagedown", "s"], "job-0"),
    ],
)
def test_the_mark_goes_through_all_pages(keys: list[str], chosen: str) -> None:
    """Row by row, page by page, and not beyond either end."""
    assert walked(keys).chosen_id == chosen


def test_the_mark_stays_with_its_job() -> None:
    """When another order puts it elsewhere; when it is gone, with the place."""
    view = settled(View(), a_picture(a_job(job_id="a"), a_job(job_id="b")))
    view = press(view, "down", a_picture(a_job(job_id="a"), a_job(job_id="b")))
    moved = settled(view, a_picture(a_job(job_id="b"), a_job(job_id="c"), a_job(job_id="a")))
    assert (moved.chosen, moved.chosen_id) == (0, "b")
    gone = settled(moved, a_picture(a_job(job_id="c")))
    assert (gone.chosen, gone.chosen_id) == (0, "c")
    assert settled(gone, a_picture()).chosen_id == ""


def test_sorting_goes_round() -> None:
    """Through every order, and either way."""
    view, seen = View(), []
    for _ in SORTS:
        seen.append(view.question.sort)
        view = press(view, "s", None)
    assert seen == list(SORTS)
    assert view.question.sort == SORTS[0]
    assert press(view, "S", None).question.reverse


def test_a_filter_is_typed() -> None:
    """Enter takes it, Esc does not; what is typed begins with what holds."""
    view = View()
    for key in ["u", *"ali", "backspace", "x", "enter"]:
        view = press(view, key, None)
    assert view.question.user == "alx"
    assert view.mode is Mode.ROWS
    view = press(view, "t", None)
    assert view.typed == "user:alx team:"
    kept = press(press(view, "v", None), "escape", None)
    assert kept.question.team == ""
    assert press(view, "q", None).typed.endswith("q")
    assert press(kept, "c", None).question == Question()


def test_a_filter_that_means_nothing_is_refused() -> None:
    """It stays to be mended, with what it could be."""
    view = replace(View(), mode=Mode.PROMPT, typed="usr:alice")
    refused = press(view, "enter", None)
    assert "usr: is no filter: user:, team:" in refused.message
    assert (refused.mode, refused.typed) == (Mode.PROMPT, "usr:alice")
    whole = read_filter("user:a team:b node:c rule:d broken", Question())
    assert whole == Question("a", "b", "c", rule="d", broken=True)
    assert read_filter("ali", Question()) == Question("ali")


def test_leaving_goes_back_first() -> None:
    """The same key closes help and details; on the table it ends."""
    view = press(View(), "?", None)
    assert view.mode is Mode.HELP
    assert press(view, "down", None).scroll == 1
    back = press(view, "q", None)
    assert (back.mode, back.left) == (Mode.ROWS, False)
    assert press(back, "q", None).left


def test_details_need_a_job() -> None:
    """Of an empty fleet there is nothing to tell."""
    assert press(View(), "enter", a_picture()).mode is Mode.ROWS
    assert press(View(chosen_id="a"), "enter", None).mode is Mode.DETAILS


def test_every_key_that_does_something_is_in_the_help() -> None:
    """And what the help names does something."""
    text = " ".join(keys for keys, _ in HELP)
    assert all(key in text for key in "qjksSutnbcp?/")
    picture = pictured()
    for key in "sSutnbcp?/":
        view = replace(View(Question(user="a")), chosen_id="job-0")
        assert press(view, key, picture) != view, key


@pytest.mark.parametrize(("sent", "name"), NAMES.items())
def test_keys_are_known_however_they_come(sent: str, name: str) -> None:
    """At once, or byte by byte over a slow line; an escape alone after a moment."""
    whole = Keys()
    found = whole.feed(sent.encode())
    assert (found or whole.feed(b"", last=True)) == [name]
    slow = Keys()
    parts = [key for byte in sent.encode() for key in slow.feed(bytes([byte]))]
    assert (parts or slow.feed(b"", last=True)) == [name]


def test_what_is_no_key_is_passed_over() -> None:
    """A mouse's report, a function key, half a letter; what follows is read."""
    assert Keys().feed(b"\x1b[15~q") == ["q"]
    assert Keys().feed(b"\x1b[<0;12;3Mq") == ["q"]
    assert Keys().feed(b"\x1bq") == ["escape", "q"]
    assert Keys().feed(b"\xff\xffq")[-1:] == ["q"]
    assert Keys().feed("é语".encode()) == ["é", "语"]
    halves = Keys()
    assert halves.feed("语".encode()[:2]) == []
    assert halves.feed("语".encode()[2:]) == ["语"]


@given(st.lists(st.binary(max_size=20), max_size=8))
def test_no_bytes_break_the_keyboard(parts: list[bytes]) -> None:
    """Whatever comes: keys with a name or of one letter, and never a growing rest."""
    keys = Keys()
    for part in parts:
        for key in keys.feed(part):
            assert key in NAMES.values() or len(key) == 1
    keys.feed(b"", last=True)
    keys.feed(b"", last=True)


@given(st.lists(st.sampled_from([*NAMES.values(), *"qsSrb/futncph?dgjkG xyz:"]), max_size=30))
def test_no_keys_leave_the_fleet(keys: list[str]) -> None:
    """Whatever is pressed: the question is one that the engine takes."""
    view = walked([key for key in keys if key != "q"])
    assert 0 <= view.question.offset < 8
    assert view.question.sort in SORTS
    assert view.question.limit == 3
