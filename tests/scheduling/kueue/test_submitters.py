"""A task becomes one Job that Kueue queues, whatever is lost on the way."""

from __future__ import annotations

import json
import time
import warnings
from typing import TYPE_CHECKING, Any

import kubernetes_validate
import pytest
import yaml
from tests.kubernetes_store import Grant
from tests.scheduling.kueue.clusters import kueue_policy, scene
from tests.scheduling.policy_files import DIGEST, a_policy

from gpuwarden.errors import RefusedAction, ServiceUnavailable
from gpuwarden.platforms.kubernetes import condition, value_at
from gpuwarden.scheduling.kueue import leases, names
from gpuwarden.scheduling.kueue.manifests import grace_seconds, job_of
from gpuwarden.scheduling.kueue.submitters import KueueSubmitter
from gpuwarden.scheduling.tasks import Task

if TYPE_CHECKING:
    from pathlib import Path

    from tests.kubernetes_store import Json

TOKEN = "0123456789abcdef"


def task(**parts: Any) -> Task:
    """A task of the team vision."""
    base: dict[str, Any] = {
        "name": "cats.v2",
        "run_id": "cats-v2",
        "words": ("model=yolov8m", "data=/work/cats.yaml", "name=$(reboot); 'x"),
        "user": "ana",
        "team": "vision",
        "priority": "low",
        "gpus": 1,
        "directory": "/work",
        "image": f"registry.example.com/yolo@{DIGEST}",
        "epoch_seconds": 600.0,
        "save_seconds": 20.0,
        "time_limit_seconds": 7200.5,
    }
    return Task(**(base | parts))


def rendered(found: Task, policy: Any = None, **more: Any) -> Json:
    """The Job of a task."""
    said = {"token": TOKEN, "gated": True, "noticed": False} | more
    return job_of(policy or kueue_policy(), found, **said)


def test_a_run_whose_states_are_not_on_the_volume_is_doubted() -> None:
    """What a pod has written beside it is gone; states that are uploaded come back."""
    volume = {"volume": {"claim": "training", "mount": "/work"}, "job_files": None}
    mounted = KueueSubmitter(a_policy(engine="kueue", kueue=volume))
    assert mounted.doubts(task()) == ()
    (beside,) = mounted.doubts(task(words=("model=yolov8m", "project=/root/runs")))
    assert "not on the volume (/work)" in beside
    assert "project=/work/cats.v2" in beside
    bare = KueueSubmitter(a_policy(engine="kueue", kueue={"job_files": None}))
    (none,) = bare.doubts(task())
    assert "kueue.volume" in none
    assert bare.doubts(task(options=("--upload=s3://bucket/cats",))) == ()


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
def test_jobs_are_valid(version: str) -> None:
    """In old and new versions: of one kind of cards, of any, of several, with a volume, without."""
    policy = a_policy(
        engine="kueue", kueue={"volume": {"claim": "training", "mount": "/work"}, "job_files": None}
    )
    for each, by in (
        (task(), kueue_policy()),
        (task(gpu_type="h100-80", window="off-peak", after=("vision/other-1",)), policy),
        (task(memory_bytes=50 * 1024**3), policy),
        (task(gpus=4, not_before=1_800_000_000.0), policy),
    ):
        with warnings.catch_warnings(action="ignore"):
            kubernetes_validate.validate(rendered(each, by), version, strict=True)


def test_the_training_is_the_first_process() -> None:
    """No shell stands before it, so what a user wrote is one argument and SIGTERM is its own."""
    container = value_at(rendered(task()), "spec.template.spec")["containers"][0]
    assert container["command"][:4] == ["gpuwarden", "train", "--run-id", "cats-v2"]
    assert "name=$(reboot); 'x" in container["command"]
    assert "args" not in container
    assert container["image"].endswith(DIGEST)


def test_leaving_is_no_failure() -> None:
    """75 and drained nodes count as nothing; faults end the Job; kills count against a limit."""
    spec = rendered(task())["spec"]
    rules = [
        (rule["action"], value_at(rule, "onExitCodes.values") or rule["onPodConditions"][0]["type"])
        for rule in spec["podFailurePolicy"]["rules"]
    ]
    assert rules == [("Ignore", [75]), ("Ignore", "DisruptionTarget"), ("FailJob", [1, 2, 76])]
    assert spec["backoffLimit"] == 6
    assert spec["podReplacementPolicy"] == "Failed"
    assert spec["template"]["spec"]["restartPolicy"] == "Never"


def test_the_grace_is_an_epoch_and_a_save() -> None:
    """With a margin; unknown, it is the policy's deadline; there is a least and a most."""
    policy = kueue_policy()
    assert grace_seconds(policy, task()) == 744
    assert grace_seconds(policy, task(epoch_seconds=1.0, save_seconds=1.0)) == 60
    assert grace_seconds(policy, task(epoch_seconds=1e6)) == 4 * 3600
    assert grace_seconds(policy, task(epoch_seconds=None)) == 600


def test_cards() -> None:
    """One kind by its nodes' labels; several that are large enough by affinity; all by nothing."""
    policy = a_policy(engine="kueue")
    assert (
        rendered(task(), policy)["spec"]["template"]["spec"]
        .keys()
        .isdisjoint({"affinity", "nodeSelector"})
    )
    one = rendered(task(gpu_type="h100-80"), policy)["spec"]["template"]["spec"]
    assert one["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3"}
    large = rendered(task(memory_bytes=60 * 1024**3), policy)["spec"]["template"]["spec"]
    assert large["nodeSelector"] == one["nodeSelector"]
    with pytest.raises(RefusedAction, match="no kind of cards"):
        rendered(task(memory_bytes=1e12), policy)


def test_no_image_no_pod() -> None:
    """What a pod runs must be said; the catalogue is named."""
    with pytest.raises(RefusedAction, match="yolo:m-cu124"):
        rendered(task(image=None), a_policy(engine="kueue"))


def test_a_long_story_is_cut() -> None:
    """An estimate that is too long for an annotation is left out; the task stays readable."""
    body = rendered(task(estimate={"words": "统" * 12_000}))
    text = body["metadata"]["annotations"][names.TASK_ANNOTATION]
    assert len(text) < 4096
    assert Task.from_document(json.loads(text)).name == "cats.v2"


def test_labels_of_people() -> None:
    """A name that no label can hold is left out rather than changed into somebody else's."""
    labels = rendered(task(user="ana@example.com"))["metadata"]["labels"]
    assert names.USER_LABEL not in labels
    assert rendered(task())["metadata"]["labels"][names.USER_LABEL] == "ana"


def test_kueue_queues_and_runs_it(tmp_path: Path) -> None:
    """Without our controller: suspended, admitted, run; the priority is its class's."""
    with scene(tmp_path, kueue_policy()) as found:
        job = KueueSubmitter(found.policy).submit(task(), token=TOKEN)
        assert job.id == "vision/cats-v2-0123456789"
        workload = found.cluster.store.all("Workload")[0]
        assert workload["spec"]["priority"] == 10
        assert workload["spec"]["maximumExecutionTimeSeconds"] == 7201
        assert condition(workload, "Admitted") == "True"
        assert [pod["spec"]["nodeName"] for pod in found.cluster.pods("vision")] == ["node1"]


def test_a_lost_answer_is_no_second_job(tmp_path: Path) -> None:
    """The Job was made, or was not; either way there is one in the end."""
    with scene(tmp_path, kueue_policy()) as found:
        for status, token in ((1, "a" * 16), (503, "b" * 16), (500, "c" * 16)):
            found.cluster.fail("POST", "/jobs$", status)
            KueueSubmitter(found.policy).submit(task(), token=token)
        assert len(found.cluster.store.all("Job")) == 3
        found.cluster.fail("POST", "/jobs$", 503, times=9)
        with pytest.raises(ServiceUnavailable, match="look with kubectl"):
            KueueSubmitter(found.policy).submit(task(), token="d" * 16)


def test_another_job_of_the_name_is_not_taken_for_ours(tmp_path: Path) -> None:
    """Its token is looked at."""
    with scene(tmp_path, kueue_policy()) as found:
        KueueSubmitter(found.policy).submit(task(), token=TOKEN)
        with pytest.raises(RefusedAction, match="another Job"):
            KueueSubmitter(found.policy).submit(task(), token=TOKEN[:10] + "999999")


def test_refusals_say_what_to_do(tmp_path: Path) -> None:
    """No right to create Jobs; a cluster's own policy; a queue that nobody has made."""
    reading = Grant(
        ("", "batch", "kueue.x-k8s.io", "apps"),
        ("jobs", "localqueues", "deployments"),
        ("get", "list"),
    )
    with scene(tmp_path, kueue_policy(), applied=False, grants=(reading,)) as found:
        with pytest.raises(RefusedAction, match="ask for a role there"):
            KueueSubmitter(found.policy).submit(task(), token=TOKEN)
        with pytest.raises(RefusedAction, match="policy apply"):
            KueueSubmitter(found.policy).foresee(task())
        webhook = {"message": 'admission webhook "x" denied the request: no', "code": 403}
        found.cluster.fail("POST", "/jobs$", 403, body=webhook)
        with pytest.raises(RefusedAction, match="forbids such pods"):
            KueueSubmitter(found.policy).submit(task(), token=TOKEN)
        with pytest.raises(RefusedAction, match="never has 3 cards"):
            KueueSubmitter(found.policy).foresee(task(gpus=3))


def with_lease(found: Any, seconds_ago: float) -> None:
    """A Lease as the controller writes it."""
    now = time.time() - seconds_ago
    spec = leases.lease_spec("host:1", now, taken=now, changes=0)
    name = names.controller_name(found.policy)
    found.cluster.patch("Lease", name, {"spec": spec}, "gpuwarden")


def with_version(found: Any, version: str) -> None:
    """Kueue's controller, of a version."""
    labels = {"app.kubernetes.io/name": "kueue", "control-plane": "controller-manager"}
    containers = [{"name": "manager", "image": f"registry.k8s.io/kueue/kueue:v{version}"}]
    template = {"metadata": {"labels": labels}, "spec": {"containers": containers}}
    spec = {"replicas": 0, "selector": {"matchLabels": labels}, "template": template}
    body = {"metadata": {"name": "kueue-controller-manager", "labels": labels}, "spec": spec}
    found.cluster.create("Deployment", "kueue-system", body)


def test_a_job_waits_for_its_hours(tmp_path: Path) -> None:
    """Behind a gate where Kueue has them, else without a queue; either way it does not start."""
    windows = [{"name": "off-peak", "from": "20:00", "to": "07:00", "running": "leave"}]
    for version, gated in (("0.19.2", True), ("0.17.0", False)):
        with scene(tmp_path, kueue_policy(windows=windows)) as found:
            with_version(found, version)
            said = KueueSubmitter(found.policy).submit(task(window="off-peak"), token=TOKEN)
            assert "controller" in said.warnings[0]
            job = found.cluster.store.all("Job")[0]
            key = names.GATES_ANNOTATION if gated else names.WAITS_ANNOTATION
            assert job["metadata"]["annotations"][key] == names.WINDOW_GATE
            assert (names.QUEUE_LABEL in job["metadata"]["labels"]) == gated
            assert found.cluster.pods("vision") == []


def test_a_job_waits_for_notices_only_where_somebody_gives_them(tmp_path: Path) -> None:
    """A fresh Lease, and a Kueue that could end jobs by itself; else it is queued at once."""
    fallback = kueue_policy(kueue={"own_preemption": "fallback"})
    for policy, seconds_ago, gates in (
        (fallback, 5.0, names.NOTICE_GATE),
        (fallback, 600.0, None),
        (fallback, None, None),
        (kueue_policy(), 5.0, None),
    ):
        with scene(tmp_path, policy) as found:
            with_version(found, "0.19.2")
            if seconds_ago is not None:
                with_lease(found, seconds_ago)
            KueueSubmitter(found.policy).submit(task(priority="high"), token=TOKEN)
            job = found.cluster.store.all("Job")[0]
            assert job["metadata"]["annotations"].get(names.GATES_ANNOTATION) == gates


def test_leases_that_cannot_be_read_are_nobodys() -> None:
    """Odd times, no holder, nothing."""
    good = {"spec": leases.lease_spec("x", 1000.0, taken=900.0, changes=1)}
    assert leases.is_held(good, 1059.0)
    assert not leases.is_held(good, 1061.0)
    assert not leases.is_held(None, 0.0)
    for odd in ({"spec": {}}, {"spec": {"holderIdentity": "x", "renewTime": "soon"}}):
        assert not leases.is_held(odd, 0.0)


def test_render_is_what_is_sent() -> None:
    """`--dry-run` shows a manifest that kubectl takes."""
    text = KueueSubmitter(kueue_policy()).render(task())
    body = yaml.safe_load(text)
    assert body["kind"] == "Job"
    assert body["metadata"]["namespace"] == "vision"
