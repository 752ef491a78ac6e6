"""The Helm chart: rendered and linted by Helm 4 itself, its objects held to Kubernetes' schemas.

No cluster runs here: what a kubelet and prometheus-operator would make of the objects is not
proven. What the containers are told is run: the programs take the flags and files of the chart.
"""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
import tarfile
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

import kubernetes_validate
import pytest
import yaml
from cloudcoil.models.prometheus_operator import v1 as monitoring
from tests.deploy.charts import CHART, EXAMPLES, ROOT, Json, Rendered, helm, lay_out, rendered
from tests.deploy.test_units import READING, RIGHTS
from tests.servers import Server, fetch, free_port, running

from gpuwarden.catalogue import CATALOGUE

if TYPE_CHECKING:
    from collections.abc import Iterator

COMMAND = Path(sys.executable).with_name("gpuwarden")
VERSIONS = [f"1.{minor}" for minor in range(30, 38)]
BETWEEN = [pytest.param(version, marks=pytest.mark.sweep) for version in VERSIONS[1:-1]]
ALL = [None, *EXAMPLES]
NAMES = ["defaults", *(path.stem for path in EXAMPLES)]


@pytest.fixture(scope="module", params=ALL, ids=NAMES)
def release(request: pytest.FixtureRequest) -> Rendered:
    """The chart with its own values, and with each of the examples."""
    return rendered() if request.param is None else rendered(request.param)


@pytest.fixture(scope="module")
def plain() -> Rendered:
    """The chart with its own values."""
    return rendered()


def test_helms_linter_has_nothing_to_say() -> None:
    """Strictly, for the chart alone and with each example."""
    for words in ((), *(("--values", path) for path in EXAMPLES)):
        done = helm("lint", *words)
        assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ("exporter: {prot: 9835}", "prot"),
        ("agent: {publicKeys: {engine.key: x}}", "engine.key"),
        ("monitoring: {interval: 1m}", "interval"),
        ("engine: {endPods: {namespaces: [kube-system]}}", "namespaces"),
        ("engine: {rules: {shipped: false}}", "no rule file"),
        ("engine: {ingress: {enabled: true, host: gw.example.org}}", "who may read them"),
    ],
    ids=["typo", "private-key", "interval", "system-namespace", "no-rules", "open-pages"],
)
def test_wrong_values_are_refused_with_a_reason(values: str, said: str, tmp_path: Path) -> None:
    """Before anything is sent to a cluster."""
    path = tmp_path / "values.yaml"
    path.write_text(values)
    done = helm("render", "--values", path)
    assert done.returncode == 1
    assert said in done.stderr


@pytest.mark.parametrize("version", [VERSIONS[0], *BETWEEN, VERSIONS[-1]])
def test_every_version_of_kubernetes_takes_the_objects(version: str, release: Rendered) -> None:
    """And knows every field of them: 1.30 to 1.37."""
    own = [item for item in release.objects if not item["apiVersion"].startswith("monitoring.")]
    assert len(own) > 5
    for item in own:
        with warnings.catch_warnings(action="ignore"):
            kubernetes_validate.validate(item, version, strict=True)


def test_prometheus_operator_takes_the_monitors_and_rules(release: Rendered) -> None:
    """By its own types (0.80): nothing is of the wrong kind, and no field is dropped as unknown."""
    for item in release.objects:
        if item["apiVersion"].startswith("monitoring."):
            model = getattr(monitoring, item["kind"])
            read = model.model_validate(item)
            assert read.model_dump(by_alias=True, exclude_unset=True, mode="json") == item


def test_rules_and_boards_are_those_of_the_repository(plain: Rendered) -> None:
    """The chart links to them: there is no second copy that could differ."""
    files = sorted((ROOT / "alerting" / "rules").glob("*.yml"))
    assert [item["spec"] for item in plain.kind("PrometheusRule")] == [
        yaml.safe_load(path.read_text()) for path in files
    ]
    boards = {
        name: text
        for item in plain.kind("ConfigMap")
        if item["metadata"]["labels"].get("grafana_dashboard")
        for name, text in item["data"].items()
    }
    assert boards == {
        path.name: path.read_text() for path in (ROOT / "grafana" / "dashboards").glob("*.json")
    }


def test_a_packed_chart_is_whole(tmp_path: Path) -> None:
    """Links become files, and tests stay behind."""
    done = helm("package", "--out", tmp_path)
    assert done.returncode == 0, done.stderr
    with tarfile.open(done.stdout.strip()) as archive:
        names = {member.name for member in archive.getmembers() if member.isfile()}
    assert "gpuwarden/files/alerting/health.yml" in names
    assert "gpuwarden/files/dashboards/gpuwarden-fleet.json" in names
    assert not any("/tests/" in name for name in names)


def _added(container: Json) -> set[str]:
    context = container["securityContext"]
    assert context["capabilities"]["drop"] == ["ALL"]
    assert context["readOnlyRootFilesystem"] is True
    assert context["allowPrivilegeEscalation"] is False
    assert context["privileged"] is False
    return {f"CAP_{name}" for name in context["capabilities"].get("add", ())}


def test_containers_have_the_rights_of_the_units_and_no_other(release: Rendered) -> None:
    """Pods are only watched by the agent, which takes no right to signal until it is asked to."""
    containers = release.containers()
    assert _added(containers["exporter"]) == RIGHTS["gpuwarden-exporter"]
    mounts = {mount["mountPath"] for mount in containers["agent"]["volumeMounts"]}
    signals = "/sys/fs/cgroup" in mounts
    wanted = RIGHTS["gpuwarden-agent"] if signals else READING
    assert _added(containers["agent"]) == wanted
    for name in {"engine", "scheduler"} & set(containers):
        assert _added(containers[name]) == set()


@pytest.mark.parametrize("kind", ["StatefulSet", "Deployment"])
def test_engine_and_scheduler_may_run_where_only_restricted_pods_may(
    kind: str, release: Rendered
) -> None:
    """What the Pod Security Standard `restricted` asks for, and none of the node's namespaces."""
    for item in release.kind(kind):
        pod = item["spec"]["template"]["spec"]
        context = pod["securityContext"]
        assert context["runAsNonRoot"] is True
        assert context["runAsUser"] != 0
        assert context["seccompProfile"] == {"type": "RuntimeDefault"}
        assert not {"hostPID", "hostNetwork", "hostIPC"} & set(pod)
        allowed = {"projected", "secret", "emptyDir", "configMap", "persistentVolumeClaim"}
        assert all(set(volume) <= {"name", *allowed} for volume in pod["volumes"])


def test_no_pod_has_a_token_that_it_does_not_need(release: Rendered) -> None:
    """Exporter and agent ask their node only; the engine has the rights that are proven."""
    (node,) = release.kind("DaemonSet")
    assert node["spec"]["template"]["spec"]["automountServiceAccountToken"] is False
    shipped = {
        item["metadata"]["name"].removeprefix("gpuwarden-engine-"): item["rules"]
        for item in yaml.safe_load_all((ROOT / "deploy/kubernetes/engine-rbac.yaml").read_text())
        if item["kind"] == "ClusterRole"
    }
    given = {
        item["metadata"]["name"].rpartition("-")[2]: item["rules"]
        for item in release.kind("ClusterRole")
    }
    assert given == shipped


def test_pods_may_be_ended_in_some_namespaces_only() -> None:
    """By a RoleBinding in each: there is no binding over the whole cluster then."""
    (path,) = [path for path in EXAMPLES if path.stem == "locked-down"]
    release = rendered(path)
    assert [item["metadata"]["namespace"] for item in release.kind("RoleBinding")] == [
        "lab",
        "vision",
    ]
    (over_all,) = release.kind("ClusterRoleBinding")
    assert over_all["roleRef"]["name"].endswith("-nodes")
    engine = release.named("ConfigMap", "gpuwarden-engine")["data"]["engine.yaml"]
    assert yaml.safe_load(engine)["kubernetes"]["namespaces"] == ["lab", "vision"]


def test_scrapes_are_those_that_the_rules_count_on(plain: Rendered) -> None:
    """Interval and limits as in prometheus.yml; engine.yaml says the same interval."""
    (nodes,) = plain.kind("PodMonitor")
    (endpoint,) = nodes["spec"]["podMetricsEndpoints"]
    jobs = yaml.safe_load((ROOT / "alerting" / "prometheus.yml").read_text())["scrape_configs"]
    (wanted,) = [job for job in jobs if job["job_name"] == "gpuwarden"]
    assert endpoint["interval"] == wanted["scrape_interval"]
    assert endpoint["scrapeTimeout"] == wanted["scrape_timeout"]
    assert nodes["spec"]["sampleLimit"] == wanted["sample_limit"]
    assert nodes["spec"]["bodySizeLimit"] == wanted["body_size_limit"]
    engine = plain.named("ConfigMap", "gpuwarden-engine")["data"]["engine.yaml"]
    assert yaml.safe_load(engine)["scrape_interval"] == endpoint["interval"]


@pytest.mark.parametrize("kind", ["PodMonitor", "ServiceMonitor"])
def test_a_restarted_pod_goes_on_with_its_series(kind: str, plain: Rendered) -> None:
    """Labels that the operator adds and a new pod changes are dropped; none is a metric's."""
    (item,) = plain.kind(kind)
    (endpoint,) = item["spec"].get("podMetricsEndpoints") or item["spec"]["endpoints"]
    fixed = {rule["targetLabel"] for rule in endpoint["relabelings"] if "targetLabel" in rule}
    assert fixed == {"instance", "job"}
    (dropped,) = [
        rule["regex"] for rule in endpoint["relabelings"] if rule["action"] == "labeldrop"
    ]
    changing = {"container", "endpoint", "namespace", "pod"}
    assert all(re.fullmatch(dropped, label) for label in changing)
    assert not any(re.fullmatch(dropped, label) for label in fixed)
    metrics = {label for metric in CATALOGUE.values() for label in metric.labels}
    assert not changing & metrics


def test_a_node_is_known_by_name_or_by_address(tmp_path: Path) -> None:
    """With hostIP an address of IPv6 gets the brackets that a port needs."""
    path = tmp_path / "values.yaml"
    path.write_text("monitoring: {instanceFrom: hostIP}")
    (item,) = rendered(path).kind("PodMonitor")
    rules = item["spec"]["podMetricsEndpoints"][0]["relabelings"]
    for address, instance in (("10.0.0.7", "10.0.0.7:9835"), ("fd00::7", "[fd00::7]:9835")):
        named = [
            rule["replacement"].replace("$1", address)
            for rule in rules
            if rule.get("targetLabel") == "instance" and re.fullmatch(rule["regex"], address)
        ]
        assert named == [instance]


def test_pods_and_monitors_select_one_another(release: Rendered) -> None:
    """Each selector of the chart meets the labels of what it is to find, and of nothing else."""
    pods = [
        item["spec"]["template"]["metadata"]["labels"]
        for item in release.objects
        if item["kind"] in {"DaemonSet", "StatefulSet", "Deployment"}
    ]

    def met(wanted: Json) -> int:
        return sum(wanted.items() <= labels.items() for labels in pods)

    services = release.kind("Service")
    for service in services:
        assert met(service["spec"]["selector"]) == 1
    for monitor in release.kind("ServiceMonitor"):
        wanted = monitor["spec"]["selector"]["matchLabels"]
        assert sum(wanted.items() <= one["metadata"]["labels"].items() for one in services) == 1
    for monitor in release.kind("PodMonitor"):
        assert met(monitor["spec"]["selector"]["matchLabels"]) == 1
    for policy in release.kind("NetworkPolicy"):
        assert met(policy["spec"]["podSelector"]["matchLabels"]) == 1
        for peer in policy["spec"]["ingress"][0]["from"]:
            if "namespaceSelector" not in peer:
                assert met(peer["podSelector"]["matchLabels"]) == 1


@pytest.fixture(params=[None, "kube-prometheus-stack"], ids=["defaults", "example"])
def scratch(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A folder in which the engine's pod finds what it mounts."""
    release = rendered(*(path for path in EXAMPLES if path.stem == request.param))
    lay_out(release, tmp_path)
    secrets = tmp_path / "secrets"
    done = subprocess.run(
        [COMMAND, "agent", "keys", "--out", secrets], check=False, capture_output=True, timeout=60
    )
    assert done.returncode == 0
    config = tmp_path / "etc/gpuwarden/engine.yaml"
    text = config.read_text()
    for name in set(re.findall(r"/secrets/([\w.-]+)", text)) - {"engine.key"}:
        (secrets / name).write_text(f"sixteen or more characters: {name}")
    for path in ("/secrets/", "/var/lib/gpuwarden/"):
        text = text.replace(f" {path}", f" {tmp_path}{path}")
    config.write_text(text)
    return tmp_path


def test_the_engine_takes_what_the_chart_writes(scratch: Path) -> None:
    """`gpuwarden engine --check` on the files as they are mounted."""
    config = scratch / "etc/gpuwarden/engine.yaml"
    done = subprocess.run(
        [COMMAND, "engine", "--config", config, "--check"],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def _command(container: Json, folder: Path, **env: str) -> list[str]:
    """A container's program and flags, its paths below a folder, on a free port of the loopback."""
    words = [str(COMMAND), *container["args"]]
    for name, value in env.items():
        words = [word.replace(f"$({name})", value) for word in words]
    paths = "|".join(mount["mountPath"] for mount in container["volumeMounts"])
    words = [re.sub(rf"(?<=[=:])(?=(?:{paths})(?:/|$))", str(folder), word) for word in words]
    return [re.sub(r"=:\d+$", f"=127.0.0.1:{free_port()}", word) for word in words]


@contextlib.contextmanager
def _served(container: Json, folder: Path, **env: str) -> Iterator[Server]:
    command = _command(container, folder, **env)
    (listen,) = [word for word in command if word.startswith("--web.listen-address=")]
    server = Server(f"http://{listen.partition('=')[2]}", folder / "log", command)
    server.ready_path = container["readinessProbe"]["httpGet"]["path"]
    server.command += [f"--jobs.directory={folder}/jobs", f"--release-file={folder}/release"]
    with running(server):
        yield server


@pytest.mark.parametrize("name", ["exporter", "agent"])
def test_exporter_and_agent_serve_with_the_flags_of_the_chart(name: str, tmp_path: Path) -> None:
    """On simulated cards, as processes here; they answer where the probes will look."""
    (path,) = [path for path in EXAMPLES if path.stem == "simulated"]
    release = rendered(path)
    for folder in ("sim", "keys", "var/lib/gpuwarden"):
        (tmp_path / folder).mkdir(parents=True)
    scenario = release.named("ConfigMap", "gpuwarden-node-simulated")["data"]["gpus.scenario"]
    (tmp_path / "sim/gpus.scenario").write_text(scenario)
    made = tmp_path / "made"
    subprocess.run([COMMAND, "agent", "keys", "--out", made], check=True, capture_output=True)
    (tmp_path / "keys/engine.pub").write_bytes((made / "engine.pub").read_bytes())
    container = release.containers()[name]
    with _served(container, tmp_path, NODE_NAME="node1") as server:
        served = container["livenessProbe"]["httpGet"]["path"]
        assert b"healthy" in fetch(server.url + served)


def test_notes_say_what_is_missing(plain: Rendered) -> None:
    """Without the engine's public key nothing can be ended; the user is told how to make one."""
    assert "gpuwarden agent keys" in plain.notes
    (path,) = [path for path in EXAMPLES if path.stem == "locked-down"]
    assert "gpuwarden agent keys" not in rendered(path).notes


def test_the_chart_is_of_this_version() -> None:
    """The images that it names are those of this source."""
    about = yaml.safe_load((CHART / "Chart.yaml").read_text())
    project = (ROOT / "pyproject.toml").read_text()
    assert f'\nversion = "{about["appVersion"]}"\n' in project


def test_the_engine_may_reach_what_its_values_name(tmp_path: Path) -> None:
    """A port that is said once is open: agents', Prometheus', Alertmanager's, mail's; and DNS."""
    path = tmp_path / "values.yaml"
    path.write_text("""
node: {kubeletRootDir: /data01/kubelet}
agent: {port: 9900, publicKeys: {engine.pub: x}}
engine:
  config:
    prometheus: {url: null, shards: [["http://a:9191", "https://b"], "http://[::1]:9292/prometheus"]}
    alertmanagers: ["http://alertmanager.monitoring:9393/alerts"]
    agents: {url: "http://{host}:9901"}
    smtp: {host: mail.example.org, sender: gpuwarden@example.org, port: 465}
""")
    release = rendered(path)
    (policy,) = release.kind("NetworkPolicy")
    ports = {(rule["protocol"], rule["port"]) for rule in policy["spec"]["egress"][0]["ports"]}
    named = {443, 465, 9191, 9292, 9393, 9900, 9901}
    assert ports >= {("TCP", port) for port in named} | {("UDP", 53), ("UDP", 5353)}
    assert ("TCP", 9093) not in ports
    (node,) = release.kind("DaemonSet")
    paths = {
        volume["name"]: volume.get("hostPath")
        for volume in node["spec"]["template"]["spec"]["volumes"]
    }
    assert paths["pod-resources"]["path"] == "/data01/kubelet/pod-resources"


@pytest.mark.parametrize(
    ("url", "path"),
    [
        ("https://gw.example.org", "/"),
        ("https://gw.example.org/", "/"),
        ("https://gw.example.org/tools/gpuwarden/", "/tools/gpuwarden"),
    ],
)
def test_the_ingress_leads_where_people_find_the_pages(url: str, path: str, tmp_path: Path) -> None:
    """Below the path of external_url, if it has one."""
    values = tmp_path / "values.yaml"
    values.write_text(f"""
engine:
  config: {{external_url: "{url}", web: {{tokens: [{{name: a, role: admin, file: /secrets/a}}]}}}}
  ingress: {{enabled: true, host: gw.example.org}}
""")
    (item,) = rendered(values).kind("Ingress")
    assert [each["path"] for each in item["spec"]["rules"][0]["http"]["paths"]] == [path]


def test_no_object_is_too_large_to_be_applied(plain: Rendered) -> None:
    """`kubectl apply`, and Argo CD as it comes, keep a copy in an annotation of 256 KiB at most."""
    for item in plain.objects:
        assert len(json.dumps(item)) < 240_000, item["metadata"]["name"]


def test_who_has_kube_prometheus_stack_is_told_of_its_label(plain: Rendered) -> None:
    """Without it nothing is scraped, and nobody says why."""
    assert "monitoring.labels is empty" in plain.notes
