"""What a policy comes to in Kubernetes is valid there, and says what the policy says."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING, Any

import kubernetes_validate
import pytest
import yaml
from click.testing import CliRunner
from tests.kueue_validations import API_VERSION, findings
from tests.scheduling.kueue.clusters import kueue_policy
from tests.scheduling.policy_files import DIGEST, a_policy
from tests.scheduling.policy_files import TEXT as POLICY_TEXT

from gpuwarden.errors import InvalidInput
from gpuwarden.scheduling.kueue import names
from gpuwarden.scheduling.kueue.renderings import render, version_numbers
from gpuwarden.scheduling.scheduler_cli import scheduler

if TYPE_CHECKING:
    from pathlib import Path

    from tests.kubernetes_store import Json

    from gpuwarden.scheduling.policies import Policy

IMAGE = f"registry.example.com/gpuwarden@{DIGEST}"
FULL: dict[str, Any] = {
    "engine": "kueue",
    "kueue": {
        "own_preemption": "fallback",
        "image": IMAGE,
        "engine_url": "https://engine.gpuwarden.svc:9837",
        "volume": {"claim": "training", "mount": "/work"},
    },
}
LADDER = [
    {"name": "low", "value": 10},
    {"name": "normal", "value": 100, "preempts": ["low"]},
    {"name": "high", "value": 1000, "preempts": ["low", "normal"]},
]


def bodies(policy: Policy, **more: Any) -> list[Json]:
    """The objects of a policy."""
    return [yaml.safe_load(each.text) for each in render(policy, **more).objects]


def of(policy: Policy, kind: str) -> dict[str, Json]:
    """The objects of one kind, by name."""
    return {body["metadata"]["name"]: body for body in bodies(policy) if body["kind"] == kind}


@pytest.mark.parametrize(
    "version",
    [
        "1.34",
        *(
            pytest.param(f"1.{minor}", marks=pytest.mark.sweep)
            for minor in (30, 31, 32, 33, 35, 36, 37)
        ),
    ],
)
def test_every_object_is_valid(version: str) -> None:
    """Kueue's by its own schemas with their rules across fields, the others by Kubernetes'."""
    found = bodies(a_policy(**FULL))
    kinds = {body["kind"] for body in found}
    assert kinds == {*names.KINDS}, "every kind is made, and read again by the adapter"
    for body in found:
        if body["apiVersion"] == API_VERSION:
            assert findings(body) == []
        else:
            with warnings.catch_warnings(action="ignore"):
                kubernetes_validate.validate(body, version, strict=True)


def test_the_schemas_would_have_said_so() -> None:
    """Unknown fields, wrong words and fields that exclude each other are refused by them."""
    body = of(a_policy(**FULL), "ClusterQueue")["gpuwarden-vision"]
    spec = body["spec"]
    wrong = {
        "cohort": {**spec, "cohort": "x"},
        "none of": {**spec, "queueingStrategy": "Fifo"},
        "borrowingLimit must be nil": {k: v for k, v in spec.items() if k != "cohortName"},
        "reclaimWithinCohort=Never": {
            **spec,
            "preemption": {
                "reclaimWithinCohort": "Never",
                "borrowWithinCohort": {"policy": "LowerPriority"},
            },
        },
        "no quantity": {
            **spec,
            "fairSharing": {"weight": "much"},
        },
    }
    for words, each in wrong.items():
        assert any(words in said for said in findings({**body, "spec": each})), words


def test_quotas() -> None:
    """A team's own cards, what it borrows and lends; the rest is the cohort's."""
    policy = a_policy(**FULL)
    queues = of(policy, "ClusterQueue")
    groups = queues["gpuwarden-speech"]["spec"]["resourceGroups"]
    gpus = {each["name"]: each["resources"][0] for each in groups[1]["flavors"]}
    assert gpus["gpuwarden-a100-40"] == {
        "name": "nvidia.com/gpu",
        "nominalQuota": "12",
        "borrowingLimit": "0",
        "lendingLimit": "6",
    }
    assert gpus["gpuwarden-h100-80"]["nominalQuota"] == "0"
    assert gpus["gpuwarden-h100-80"]["borrowingLimit"] == "4"
    cohort = of(policy, "Cohort")["gpuwarden"]["spec"]["resourceGroups"]
    spare = {each["name"]: each["resources"][0]["nominalQuota"] for each in cohort[0]["flavors"]}
    assert spare == {"gpuwarden-a100-40": "4", "gpuwarden-h100-80": "4"}


def test_pods_that_ask_for_processors_are_admitted() -> None:
    """Kueue admits nothing that asks for a resource that its queue does not know."""
    for queue in of(kueue_policy(), "ClusterQueue").values():
        covered = {name for g in queue["spec"]["resourceGroups"] for name in g["coveredResources"]}
        assert {"cpu", "memory", "ephemeral-storage", "nvidia.com/gpu"} <= covered


def test_parts_of_cards_are_a_resource_of_their_own() -> None:
    """A flavor belongs to one group, and a group has one list of resources."""
    mig = {
        "name": "mig",
        "model": "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "memory": "5GiB",
        "count": 7,
        "kueue": {
            "node_labels": {"nvidia.com/gpu.product": "NVIDIA-A100-SXM4-40GB-MIG"},
            "resource": "nvidia.com/mig-1g.5gb",
        },
    }
    cards = [*kueue_policy().model_dump(mode="json", by_alias=True)["cards"]]
    cards[0]["memory"] = "40GiB"
    teams = [{"name": "vision", "users": ["ana"], "quota": {"a100-40": 4, "mig": 7}}]
    policy = kueue_policy(
        cards=[{k: v for k, v in cards[0].items() if v is not None}, mig], teams=teams
    )
    groups = of(policy, "ClusterQueue")["gpuwarden-vision"]["spec"]["resourceGroups"]
    assert [group["coveredResources"] for group in groups[1:]] == [
        ["nvidia.com/gpu"],
        ["nvidia.com/mig-1g.5gb"],
    ]
    for body in bodies(policy):
        if body["apiVersion"] == API_VERSION:
            assert findings(body) == []


def test_kueue_ends_nothing_by_itself_unless_it_is_allowed_to() -> None:
    """Without `own_preemption: fallback`, or without `preemption`, nobody is evicted."""
    never = {
        "withinClusterQueue": "Never",
        "reclaimWithinCohort": "Never",
        "borrowWithinCohort": {"policy": "Never"},
    }
    allowed = {"own_preemption": "fallback"}
    for policy in (
        kueue_policy(),
        kueue_policy(kueue=allowed, preemption=None, priorities=[{"name": "low", "value": 1}]),
    ):
        for queue in of(policy, "ClusterQueue").values():
            assert queue["spec"]["preemption"] == never
    ladder = kueue_policy(kueue=allowed, priorities=LADDER)
    found = of(ladder, "ClusterQueue")["gpuwarden-vision"]["spec"]["preemption"]
    assert found["withinClusterQueue"] == "LowerPriority"
    assert found["reclaimWithinCohort"] == "Any"


def test_kueue_never_ends_whom_the_policy_spares() -> None:
    """Where `preempts` is not all lower priorities, Kueue would take others: it takes none."""
    some = [*LADDER[:2], {"name": "high", "value": 1000, "preempts": ["low"]}]
    policy = kueue_policy(kueue={"own_preemption": "fallback"}, priorities=some)
    found = of(policy, "ClusterQueue")["gpuwarden-vision"]["spec"]["preemption"]
    assert found["withinClusterQueue"] == "Never"
    assert any("exactly all lower" in each.text for each in render(policy).remarks)


def test_hard_budgets_are_a_check_of_ours() -> None:
    """Only teams that have one wait for it."""
    queues = of(a_policy(**FULL), "ClusterQueue")
    assert queues["gpuwarden-vision"]["spec"]["admissionChecksStrategy"] == {
        "admissionChecks": [{"name": "gpuwarden.budget"}]
    }
    assert "admissionChecksStrategy" not in queues["gpuwarden-speech"]["spec"]
    check = of(a_policy(**FULL), "AdmissionCheck")["gpuwarden.budget"]
    assert check["spec"] == {"controllerName": "gpuwarden.io/budget"}
    assert of(kueue_policy(), "AdmissionCheck") == {}


def test_it_is_the_same_each_time_and_says_what_it_cannot() -> None:
    """Rendering is pure; what Kueue lacks is told with its place in the policy."""
    policy = a_policy(**FULL)
    assert render(policy) == render(policy)
    assert {each.path for each in render(policy).remarks} >= {"budgets[0]", "windows", "bookings"}


def test_versions() -> None:
    """An old Kueue is refused with what to do; gates need 0.19."""
    with pytest.raises(InvalidInput, match=r"0\.15"):
        render(kueue_policy(), version="0.14.3")
    gated = kueue_policy(kueue={"own_preemption": "fallback"})
    with pytest.raises(InvalidInput, match=r"0\.19"):
        render(gated, version="v0.18.1")
    render(gated, version="v0.19.2")
    assert version_numbers("v0.19.2") == (0, 19)
    assert version_numbers("main") == (0, 0)


def test_the_deployment_starts_a_scheduler(tmp_path: Path) -> None:
    """Its command line is one that `gpuwarden scheduler` takes, word for word."""
    spec = of(a_policy(**FULL), "Deployment")["gpuwarden-scheduler"]["spec"]["template"]["spec"]
    container = spec["containers"][0]
    assert container["command"] == ["gpuwarden", "scheduler"]
    places = {
        "/etc/gpuwarden": tmp_path,
        "/secrets": tmp_path,
        "/var/lib/gpuwarden-scheduler": tmp_path,
    }
    words = [*container["args"], "--check"]
    for place, real in places.items():
        words = [word.replace(place, str(real)) for word in words]
    (tmp_path / "policy.yaml").write_text(POLICY_TEXT.replace("engine: slurm", "engine: kueue"))
    (tmp_path / "token").write_text("x" * 40)
    (tmp_path / "token").chmod(0o600)
    done = CliRunner().invoke(scheduler, words)
    assert done.exit_code == 0, done.output


def test_without_an_image_no_deployment() -> None:
    """The controller then runs where somebody starts it; its rights are there all the same."""
    assert of(kueue_policy(), "Deployment") == {}
    assert {*of(kueue_policy(), "ClusterRole")} == {"gpuwarden-scheduler"}
