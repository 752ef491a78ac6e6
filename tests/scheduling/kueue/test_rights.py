"""The controller does everything with the rights that are rendered for it, and none is idle."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import yaml
from tests.kubernetes_servers import User
from tests.kubernetes_store import Grant
from tests.scheduling.kueue.clusters import kueue_policy
from tests.scheduling.kueue.lives import Life, life
from tests.scheduling.kueue.test_limits import BOOKINGS, booked

from gpuwarden.platforms.kubernetes import condition
from gpuwarden.scheduling.kueue import names
from gpuwarden.scheduling.kueue.renderings import render

if TYPE_CHECKING:
    from pathlib import Path

    from tests.kubernetes_store import Json

    from gpuwarden.scheduling.policies import Policy

BUDGET = {
    "team": "vision",
    "per": "month",
    "limit": "100 GPU-hours",
    "kind": "hard",
    "running": "finish",
}


def bodies(policy: Policy) -> list[Json]:
    """The rendered objects."""
    return [yaml.safe_load(each.text) for each in render(policy).objects]


def grants_of(policy: Policy) -> tuple[Grant, ...]:
    """What the controller's account may do."""
    found = []
    for body in bodies(policy):
        if body["kind"] in ("ClusterRole", "Role"):
            found += [
                Grant(
                    tuple(rule["apiGroups"]),
                    tuple(rule["resources"]),
                    tuple(rule["verbs"]),
                    body["metadata"].get("namespace"),
                    tuple(rule.get("resourceNames", ())),
                )
                for rule in body["rules"]
            ]
    return tuple(found)


def as_controller(found: Life, policy: Policy) -> None:
    """From now on requests are the controller's."""
    found.scene.cluster.used.clear()
    found.scene.cluster.users[found.scene.cluster.token] = User("controller", grants_of(policy))


def as_operator(found: Life) -> None:
    """From now on requests are of somebody who may do everything."""
    found.scene.cluster.users[found.scene.cluster.token] = User("operator")


def test_everything_with_these_rights(tmp_path: Path) -> None:
    """A preemption, a check, a window, a booking and its end: nothing is forbidden."""
    windows = [{"name": "night", "from": "00:00", "to": "24:00", "running": "leave"}]
    policy = kueue_policy(budgets=[BUDGET], bookings=BOOKINGS, windows=windows)
    with life(tmp_path, policy) as found:
        one = found.submit("one", gpus=2, window="night")
        # Somebody has taken it away: it is made anew.
        found.scene.cluster.delete("Lease", names.controller_name(policy), "gpuwarden")
        as_controller(found, policy)
        found.tick(3)
        found.start_pods()
        assert found.running() == {one}
        used = {*found.scene.cluster.used}
        as_operator(found)
        found.scene.time.pass_(100.0)
        high = found.submit("high", "high", gpus=2)
        as_controller(found, policy)
        found.tick(3, seconds=5.0)
        found.engine.see({"saved": found.scene.time.now})
        found.tick(3, seconds=3.0)
        found.let_go()
        found.tick(2)
        found.start_pods()
        found.tick(4)
        assert found.running() == {high}
        assert found.active(one)
        assert found.driver is not None
        slot = booked("speech", found.scene.time.now + 5.0)
        found.driver.book([slot], found.scene.time.now)
        found.tick(3, seconds=5.0)
        found.driver.book([], found.scene.time.now)
        found.tick(2)
        assert "refused" not in found.codes()
        check = found.scene.cluster.get("AdmissionCheck", "gpuwarden.budget", None)
        assert condition(check, "Active") == "True"
        granted = {
            (verb, group, resource)
            for grant in grants_of(policy)
            for verb in grant.verbs
            for group in grant.groups
            for resource in grant.resources
        }
        assert granted == used | found.scene.cluster.used, "no right is idle"


def test_no_right_is_dangerous() -> None:
    """Nothing runs, deletes, executes, or reads secrets; changes are bound to names or teams."""
    grants = grants_of(kueue_policy(budgets=[BUDGET], bookings=BOOKINGS))
    verbs = {verb for grant in grants for verb in grant.verbs}
    assert verbs == {"get", "list", "watch", "patch", "create"}
    for grant in grants:
        assert "*" not in (*grant.groups, *grant.resources, *grant.verbs)
        assert not {*grant.resources} & {"secrets", "pods/exec", "pods/eviction", "configmaps"}
        if "create" in grant.verbs:
            assert grant.resources == ("leases",)
            assert grant.namespace == "gpuwarden"
        if "patch" in grant.verbs:
            assert grant.names or grant.namespace, "changes are of named objects, or of teams"


def test_a_right_that_is_missing_is_said(tmp_path: Path) -> None:
    """What is forbidden is a problem with its remedy, and stops nothing else."""
    policy = kueue_policy()
    with life(tmp_path, policy) as found:
        one = found.run("one", gpus=2)
        found.scene.time.pass_(100.0)
        found.submit("high", "high")
        less = tuple(
            grant for grant in grants_of(policy) if "workloads/status" not in grant.resources
        )
        found.scene.cluster.users[found.scene.cluster.token] = User("controller", less)
        found.tick(2, seconds=5.0)
        assert found.leaving(one) is None
        assert found.driver is not None
        words = [each.words for each in found.driver.problems() if each.code == "refused"]
        assert words
        assert re.search(r"cannot patch resource.*scheduling-kueue\.md#rights", words[0])
