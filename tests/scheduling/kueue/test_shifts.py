"""A booking in force is no drift; what only looks like one is, with words."""

from __future__ import annotations

import asyncio
import copy
import json
from typing import TYPE_CHECKING, Any

import pytest
from tests.scheduling.kueue.clusters import Scene, kueue_policy
from tests.scheduling.kueue.lives import Life, life
from tests.scheduling.kueue.test_limits import BOOKINGS, HOUR, booked, quota

from gpuwarden.scheduling.engines import Plan, carry_out, plan, undoing
from gpuwarden.scheduling.kueue import names, shifts
from gpuwarden.scheduling.kueue.adapters import KueueAdapter
from gpuwarden.scheduling.kueue.quotas import shares_of
from gpuwarden.scheduling.kueue.renderings import cluster_queue
from gpuwarden.scheduling.kueue.shifts import NotAShift, shift_of, without_shifts

if TYPE_CHECKING:
    from pathlib import Path

POLICY = kueue_policy(bookings=BOOKINGS)
NOW = 1_800_000_000.0


def compared(found: Scene, *, act: bool = False, undo: bool = False) -> Plan:
    """What `policy drift` sees, or what `policy apply` and `policy undo` did."""

    async def run() -> Plan:
        adapter = KueueAdapter(found.policy, clock=found.time)
        try:
            wanted = adapter.render(found.policy, version=None)
            there = await adapter.read(wanted)
            todo = undoing(there) if undo else plan(wanted, there)
            if act:
                outcome = await carry_out(adapter, todo.steps, lambda _number, _step: None)
                assert outcome.failed is None, outcome.error
            return todo
        finally:
            await adapter.aclose()

    return asyncio.run(run())


def in_force(found: Life) -> float:
    """Have a booking of all cards be in force; when it ends."""
    found.tick()
    slot = booked("speech", found.scene.time.now + 10.0)
    assert found.driver is not None
    found.driver.book([slot], found.scene.time.now)
    found.tick(2, seconds=15.0)
    assert (quota(found, "vision"), quota(found, "speech")) == ("0", "4")
    return slot.end


def said(todo: Plan) -> str:
    """All changes, as people read them."""
    return " ".join(str(change) for step in todo.steps for change in step.changes)


def test_a_booking_is_no_drift_and_outlives_an_apply(tmp_path: Path) -> None:
    """Another field that somebody changed is put back, and the booked cards stay where they are."""
    with life(tmp_path, POLICY) as found:
        in_force(found)
        assert compared(found.scene).nothing
        weight = {"spec": {"fairSharing": {"weight": "9"}}}
        found.scene.cluster.patch("ClusterQueue", "gpuwarden-vision", weight, None)
        assert said(compared(found.scene)) == "spec.fairSharing.weight: 9 -> 1"
        compared(found.scene, act=True)
        assert compared(found.scene).nothing
        assert (quota(found, "vision"), quota(found, "speech")) == ("0", "4")
        assert [step.kind for step in compared(found.scene, act=True, undo=True).steps][-1:] == [
            "Lease"
        ]
        assert found.scene.cluster.store.all("Lease") == []


def test_a_hand_in_moved_quotas_is_drift(tmp_path: Path) -> None:
    """An apply puts the policy's own quotas in place, and the next round moves them anew."""
    with life(tmp_path, POLICY) as found:
        in_force(found)
        queue = found.scene.cluster.get("ClusterQueue", "gpuwarden-vision", None)
        groups = queue["spec"]["resourceGroups"]
        groups[0]["flavors"][0]["resources"][0]["nominalQuota"] = "7"
        body = {"spec": {"resourceGroups": groups}}
        found.scene.cluster.patch("ClusterQueue", "gpuwarden-vision", body, None)
        assert "were changed since booking b1" in said(compared(found.scene))
        compared(found.scene, act=True)
        assert quota(found, "vision") == "2"
        found.tick()
        assert (quota(found, "vision"), quota(found, "speech")) == ("0", "4")
        assert compared(found.scene).nothing


def test_half_a_booking_and_one_that_nobody_ends(tmp_path: Path) -> None:
    """A crash between two queues is no drift; past its end a shift is, and an apply undoes it."""
    with life(tmp_path, POLICY) as found:
        end = in_force(found)
        found.kill()
        found.scene.time.now = end + shifts.LATE_SECONDS + 1.0
        assert "booking b1 is over" in said(compared(found.scene))
        # Somebody else's hand owns the note now: it goes all the same.
        note = {"metadata": {"annotations": {names.BOOKINGS_ANNOTATION: "b1,b2"}}}
        found.scene.cluster.patch("ClusterQueue", "gpuwarden-speech", note, None)
        compared(found.scene, act=True)
        assert (quota(found, "vision"), quota(found, "speech")) == ("2", "2")
        assert compared(found.scene).nothing


def a_queue(*, team: int = 0) -> dict[str, Any]:
    """A queue with cards that a booking of all has moved."""
    own = POLICY.teams[team]
    base = cluster_queue(POLICY, own, shares_of(POLICY))
    body = cluster_queue(POLICY, own, shares_of(POLICY, [booked("speech", NOW)]))
    body["metadata"]["annotations"] = shifts.annotations_of("b1", base, body, until=NOW + HOUR)
    return body


def test_a_crash_between_two_queues_leaves_less_and_is_believed() -> None:
    """Who gives went first; the other one has its own still."""
    plain, refused = without_shifts([a_queue()], NOW)
    assert refused == {}
    assert plain[0]["spec"] == cluster_queue(POLICY, POLICY.teams[0], shares_of(POLICY))["spec"]


def test_more_cards_than_there_are_is_no_booking() -> None:
    """Only who gets some says so, and nobody who gives: all is told as it is."""
    taker = a_queue(team=1)
    plain, refused = without_shifts([taker], NOW)
    assert plain == [taker]
    assert "more cards than there are" in refused["ClusterQueue gpuwarden-speech"]


def note_with(**parts: object) -> str:
    """A note of which something is otherwise."""
    note = json.loads(a_queue()["metadata"]["annotations"][names.SHIFT_ANNOTATION])
    return json.dumps(note | parts)


def lent() -> str:
    """A note by which the queue borrowed less before."""
    base = copy.deepcopy(
        json.loads(a_queue()["metadata"]["annotations"][names.SHIFT_ANNOTATION])["base"]
    )
    base[1]["flavors"][0]["resources"][0]["borrowingLimit"] = "3"
    return note_with(base=base)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "cannot be read"),
        ("[" * 20_000, "cannot be read"),
        ("x" * 70_000, "do not go along"),
        ("[]", "cannot be read"),
        (note_with(base={}), "cannot be read"),
        (note_with(base=[{"coveredResources": [1], "flavors": []}]), "cannot be read"),
        (note_with(base=[{"coveredResources": [], "flavors": [], "more": {}}]), "cannot be read"),
        (note_with(until="never"), "cannot be read"),
        (note_with(until=float("inf")), "cannot be read"),
        (note_with(until=NOW - HOUR), "is over"),
        (note_with(digest="0"), "were changed"),
        (lent(), "not what it borrows"),
    ],
)
def test_a_note_that_no_booking_wrote(text: str, words: str) -> None:
    """It is refused with words, and the quotas are told as they are."""
    queue = a_queue()
    queue["metadata"]["annotations"][names.SHIFT_ANNOTATION] = text
    with pytest.raises(NotAShift, match=words):
        shift_of(queue, NOW)
    plain, refused = without_shifts([queue], NOW)
    assert plain == [queue]
    assert words in refused["ClusterQueue gpuwarden-vision"]
