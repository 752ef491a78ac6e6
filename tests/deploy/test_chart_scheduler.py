"""The chart's scheduler: refused where it cannot work, and run with what the chart gives it.

The account and the rights are `gpuwarden policy apply`'s; tests/scheduling/kueue/test_rights.py
holds those to the calls that the controller makes. Here the daemon runs with them, by the chart's
flags and files, on a fake API server.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import yaml
from tests.deploy.charts import EXAMPLES, Rendered, helm, rendered
from tests.kubernetes_servers import User
from tests.scheduling.kueue.clusters import scene
from tests.scheduling.kueue.test_rights import grants_of
from tests.servers import Server, fetch, free_port, running, until

from gpuwarden.schedule_api import ScheduleDocument
from gpuwarden.scheduling.kueue import names
from gpuwarden.scheduling.kueue.leases import holder_of
from gpuwarden.scheduling.kueue.renderings import render
from gpuwarden.scheduling.policy_checks import load_policy

if TYPE_CHECKING:
    from tests.deploy.charts import Json

    from gpuwarden.scheduling.policies import Policy

COMMAND = Path(sys.executable).with_name("gpuwarden")
(EXAMPLE,) = [path for path in EXAMPLES if path.stem == "kueue"]
NAME = "gpuwarden-scheduler"


@pytest.fixture(scope="module")
def release() -> Rendered:
    """The chart with the example that has a scheduler."""
    return rendered(EXAMPLE)


def policy_of(release: Rendered, folder: Path) -> Policy:
    """The policy as the daemon's pod sees it."""
    path = folder / "policy.yaml"
    path.write_text(release.named("ConfigMap", NAME)["data"]["policy.yaml"])
    return load_policy(path, now=1_800_000_000.0)


def applied(policy: Policy) -> list[Json]:
    """What `gpuwarden policy apply` makes."""
    return [yaml.safe_load(each.text) for each in render(policy).objects]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"policy": ""}, "engine: kueue"),
        ({"policy": "engine: slurm"}, "engine: kueue"),
        ({"policy": "engine: [kueue"}, "no YAML"),
        ({"policy": "{engine: kueue, kueue: {namespace: other}}"}, "both must be the same"),
        ({"policy": "{engine: kueue, kueue: {image: some}}"}, "a Deployment of its own"),
        ({"policy": "{engine: kueue, kueue: {kubeconfig: /root/config}}"}, "the pod has not"),
        ({"policy": "engine: kueue", "engine": {"tokenKey": "planner"}}, "name of the Secret"),
        ({"tokens": [{"name": "a", "role": "admin", "key": "a"}]}, "role"),
    ],
    ids=["none", "slurm", "yaml", "namespace", "image", "kubeconfig", "secret", "role"],
)
def test_a_scheduler_that_could_not_work_is_refused(
    changed: dict[str, object], said: str, tmp_path: Path
) -> None:
    """With what to do, before anything is sent."""
    path = tmp_path / "values.yaml"
    path.write_text(yaml.safe_dump({"scheduler": {"enabled": True, **changed}}))
    done = helm("render", "--values", path)
    assert done.returncode == 1
    assert said in done.stderr


def test_the_pod_runs_as_the_account_that_the_policy_makes(
    release: Rendered, tmp_path: Path
) -> None:
    """By name and namespace; the chart itself gives it no right."""
    (item,) = release.kind("Deployment")
    assert item["spec"]["strategy"] == {"type": "Recreate"}
    assert item["spec"]["replicas"] == 1
    policy = policy_of(release, tmp_path)
    account = {
        "namespace": item["metadata"]["namespace"],
        "name": item["spec"]["template"]["spec"]["serviceAccountName"],
    }
    made = [each["metadata"] for each in applied(policy) if each["kind"] == "ServiceAccount"]
    assert [{key: one[key] for key in account} for one in made] == [account]
    bound = {
        (subject["namespace"], subject["name"])
        for kind in ("ClusterRoleBinding", "RoleBinding")
        for each in release.kind(kind)
        for subject in each["subjects"]
    }
    assert (account["namespace"], account["name"]) not in bound


def test_engine_and_scheduler_find_each_other(release: Rendered) -> None:
    """Addresses are those of the services, ports are open both ways, tokens are shared."""
    words = release.containers()["scheduler"]["args"]
    services = [
        (one["metadata"]["name"], one["metadata"]["namespace"], one["spec"]["ports"][0]["port"])
        for one in release.kind("Service")
    ]
    addresses = {f"http://{name}.{namespace}:{port}" for name, namespace, port in services}
    engine = yaml.safe_load(release.named("ConfigMap", "gpuwarden-engine")["data"]["engine.yaml"])
    assert engine["scheduler"]["url"] in addresses
    (asked,) = [word.partition("=")[2] for word in words if word.startswith("--engine.url=")]
    assert asked in addresses
    (planner,) = [one for one in engine["web"]["tokens"] if one["role"] == "scheduler"]
    assert f"--engine.token-file={planner['file']}" in words
    tokens = yaml.safe_load(release.named("ConfigMap", NAME)["data"]["tokens.yaml"])["tokens"]
    (pages,) = [one for one in tokens if one["role"] == "reader"]
    assert engine["scheduler"]["token_file"] == pages["file"]
    open_ports = {
        item["metadata"]["name"]: {rule["port"] for rule in item["spec"]["egress"][0]["ports"]}
        for item in release.kind("NetworkPolicy")
    }
    assert 9839 in open_ports["gpuwarden-engine"]
    assert {9837, 9090, 443} <= open_ports[NAME]
    for item in release.kind("NetworkPolicy"):
        (rule,) = item["spec"]["ingress"]
        peers = [peer["podSelector"] for peer in rule["from"] if "podSelector" in peer]
        (other,) = {"gpuwarden-engine", NAME} - {item["metadata"]["name"]}
        labels = [peer["matchLabels"]["app.kubernetes.io/component"] for peer in peers]
        assert labels == [other.removeprefix("gpuwarden-")]


def test_the_daemon_works_with_the_flags_files_and_rights_that_it_is_given(
    release: Rendered, tmp_path: Path
) -> None:
    """It becomes ready where the probe looks, holds the Lease, and closes the network to others."""
    policy = policy_of(release, tmp_path)
    files = {f"/etc/gpuwarden/{name}": text for name, text in _config(release).items()}
    secrets = ("pages", "olga", "planner")
    files |= {f"/secrets/{name}": f"sixteen or more: {name}" for name in secrets}
    for path, text in files.items():
        here = tmp_path / path.lstrip("/")
        here.parent.mkdir(parents=True, exist_ok=True)
        here.write_text(text.replace("/secrets/", f"{tmp_path}/secrets/"))
    container = release.containers()["scheduler"]
    with scene(tmp_path, policy) as found:
        cluster = found.cluster
        cluster.users[cluster.token] = User("controller", grants_of(policy))
        url = f"http://127.0.0.1:{free_port()}"
        words = [
            re.sub(r"(?<==)(?=/(?:etc|run|secrets|var)/)", str(tmp_path), word)
            for word in container["args"]
        ]
        words = [re.sub(r"=0\.0\.0\.0:\d+$", f"={url[7:]}", word) for word in words]
        words.append(f"--socket={tmp_path}/s")
        given = ["/usr/bin/env", f"KUBECONFIG={found.policy.kueue.kubeconfig}"]
        server = Server(url, tmp_path / "log", [*given, str(COMMAND), "scheduler", *words])
        server.ready_path = container["readinessProbe"]["httpGet"]["path"]
        with running(server):
            assert fetch(url + container["livenessProbe"]["httpGet"]["path"])
            lease = ("Lease", names.controller_name(policy), "gpuwarden")
            until(lambda: holder_of(cluster.get(*lease)))
            with pytest.raises(OSError, match="401"):
                fetch(url + "/v1/schedule")
            bearer = "Bearer sixteen or more: pages"
            told = ScheduleDocument.decode(fetch(url + "/v1/schedule", Authorization=bearer))
            assert "refused" not in {problem.code for problem in told.problems}
            assert told.engine == "kueue"
            assert b"gpuwarden_scheduler_" in fetch(url + "/metrics")


def _config(release: Rendered) -> dict[str, str]:
    data: dict[str, str] = release.named("ConfigMap", NAME)["data"]
    return data
