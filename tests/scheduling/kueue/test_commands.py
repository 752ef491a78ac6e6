"""The commands of people, over a fake cluster: policy, submit, queue."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from click.testing import CliRunner, Result
from tests.kubernetes_manifests import job
from tests.kubernetes_servers import Cluster, User, kubernetes
from tests.kubernetes_store import BUILT_IN, KUEUE, Grant, Store
from tests.kueue_controllers import Kueue
from tests.scheduling.policy_files import TEXT

from gpuwarden.cli import gpuwarden
from gpuwarden.errors import RefusedAction, ServiceUnavailable

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def command(policy: Path, *words: str) -> Result:
    """Run a command by a policy."""
    return CliRunner().invoke(gpuwarden, [*words], env={"GPUWARDEN_POLICY": str(policy)})


def written(folder: Path, cluster: Cluster) -> Path:
    """The policy of a cluster, in a file."""
    cluster.node("node1", gpus=8)
    path = folder / "policy.yaml"
    kubeconfig = cluster.settings().kubeconfig
    path.write_text(
        TEXT.replace("engine: slurm", "engine: kueue").replace(
            "kind: hard, running: finish", "kind: soft"
        )
        + f"kueue: {{kubeconfig: {kubeconfig}}}\n"
    )
    return path


def test_from_a_policy_to_a_job_and_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Applied, without drift, a task submitted and queued, drift seen, undone."""
    monkeypatch.chdir(tmp_path)
    store = Store(BUILT_IN + KUEUE)
    record = ("--record", str(tmp_path / "record"))
    with kubernetes(tmp_path, store=store, step=Kueue()) as cluster:
        policy = written(tmp_path, cluster)
        applied = command(policy, "policy", "apply", "--yes", *record)
        assert applied.exit_code == 0, applied.output
        assert command(policy, "policy", "drift", *record).exit_code == 0
        words = ("model=yolov8m", "data=/work/x.yaml", "batch=16", "epochs=10", "--images", "1000")
        more = ("--card", "a100-40", "--time", "2h", "--image", "yolo:m-cu124", "--name", "cats")
        whose = ("--team", "vision", "--priority", "low", "--yes")
        submitted = command(policy, "submit", *words, *more, *whose)
        assert submitted.exit_code == 0, submitted.output
        listed = command(policy, "queue", "--socket", str(tmp_path / "none.sock"), "-o", "json")
        assert listed.exit_code == 0, listed.output
        entry = json.loads(listed.stdout)["entries"][0]
        assert entry["id"].startswith("vision/cats-")
        assert (entry["team"], entry["priority"], entry["gpus"]) == ("vision", "low", 1)
        assert entry["why"] == "starting"
        cluster.patch("WorkloadPriorityClass", "gpuwarden-low", {"value": 7}, None)
        drift = command(policy, "policy", "drift", *record)
        assert drift.exit_code == 1
        assert "value is 7, and was 10" in drift.output
        assert command(policy, "policy", "undo", "--yes", *record).exit_code == 0
        assert store.all("ClusterQueue") == []
        assert len(store.all("Job")) == 1, "a policy that is undone ends no job"


def test_the_queue_of_who_sees_one_namespace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No role for the whole cluster: their own team's jobs are shown, and nothing is guessed."""
    monkeypatch.chdir(tmp_path)
    with kubernetes(tmp_path, store=Store(BUILT_IN + KUEUE), step=Kueue()) as cluster:
        policy = written(tmp_path, cluster)
        record = ("--record", str(tmp_path / "record"))
        assert command(policy, "policy", "apply", "--yes", *record).exit_code == 0
        labels = {
            "kueue.x-k8s.io/queue-name": "gpuwarden",
            "kueue.x-k8s.io/priority-class": "gpuwarden-high",
        }
        for space in ("vision", "speech"):
            body = job("mine")
            body["metadata"]["labels"] = labels
            cluster.create("Job", space, body)
        groups, kinds = ("", "batch", "kueue.x-k8s.io"), ("jobs", "pods", "workloads")
        grant = Grant(groups, kinds, ("list", "get"), "vision")
        cluster.users[cluster.token] = User("ana", (grant,))
        none = ("--socket", str(tmp_path / "none.sock"))
        listed = command(policy, "queue", *none, "-o", "json")
        assert listed.exit_code == 0, listed.output
        assert [each["id"] for each in json.loads(listed.stdout)["entries"]] == ["vision/mine"]
        cluster.users[cluster.token] = User("nobody", ())
        error = command(policy, "queue", *none).exception
        assert isinstance(error, RefusedAction)
        assert "cannot list" in str(error)


def test_a_server_that_does_not_answer(tmp_path: Path) -> None:
    """A missing service is exit status 3, and nothing was done."""
    with kubernetes(tmp_path, store=Store(BUILT_IN + KUEUE), step=Kueue()) as cluster:
        policy = written(tmp_path, cluster)
        cluster.fail("GET", "", 503, times=1000)
        record = ("--record", str(tmp_path / "record"))
        for words in (
            ("policy", "apply", "--yes", *record),
            ("queue", "--socket", str(tmp_path / "none.sock")),
        ):
            error = command(policy, *words).exception
            assert isinstance(error, ServiceUnavailable)
            assert error.exit_code == 3
