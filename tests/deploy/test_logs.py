"""Shipping jobs' output to Loki. There is no Alloy and no Loki here: their files are read, not run.

Held to a small table of what the components take, written down from Alloy's reference: a component,
argument or reference that is misspelt is found; what Alloy makes of a right one is not proven.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "logs"
CONFIGS = sorted(FOLDER.glob("*.alloy"))

KNOWN = {
    "discovery.file": {"files", "refresh_interval"},
    "discovery.kubernetes": {"role", "selectors.role", "selectors.field"},
    "discovery.relabel": {
        "targets",
        *(
            f"rule.{name}"
            for name in (
                "source_labels",
                "regex",
                "action",
                "target_label",
                "replacement",
                "separator",
            )
        ),
    },
    "local.file_match": {"path_targets"},
    "loki.source.file": {"targets", "forward_to"},
    "loki.process": {
        "forward_to",
        "stage.cri",
        "stage.label_drop.values",
        "stage.limit.rate",
        "stage.limit.burst",
        "stage.limit.drop",
        "stage.limit.by_label_name",
        "stage.limit.max_distinct_labels",
    },
    "loki.write": {"endpoint.url", "external_labels", "external_labels.*"},
}
EXPORTS = {
    "discovery.file": "targets",
    "discovery.kubernetes": "targets",
    "discovery.relabel": "output",
    "local.file_match": "targets",
    "loki.process": "receiver",
    "loki.write": "receiver",
}


def read(path: Path) -> dict[tuple[str, str], dict[str, str]]:
    """(component, label) -> dotted argument -> its text, as a map or a block has it."""
    found: dict[tuple[str, str], dict[str, str]] = {}
    within: list[str] = []
    current: dict[str, str] = {}
    for line in path.read_text().splitlines():
        text = line.split("//")[0].strip() if not re.search(r'"[^"]*//', line) else line.strip()
        if opened := re.fullmatch(r'([\w.]+)(?: "(\w+)")? \{(\})?', text):
            name, label, closed = opened.groups()
            if label is not None and not within:
                current = found[name, label] = {}
                within.append("")
            elif closed:
                current[".".join((*within[1:], name))] = ""
            else:
                within.append(name)
        elif opened := re.fullmatch(r"(\w+)\s*= \{", text):
            within.append(opened[1])
        elif text == "}":
            within.pop()
        elif text:
            value = re.fullmatch(r"(\w+)\s*= (.+?),?", text)
            assert value, f"{path.name}: {line}"
            current[".".join((*within[1:], value[1]))] = value[2]
    assert not within, f"{path.name}: a brace is open at the end"
    return found


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_components_and_their_arguments_are_known(path: Path) -> None:
    """Every component, argument and block is one of Alloy's."""
    components = read(path)
    assert components
    for (name, _), arguments in components.items():
        known = KNOWN[name]
        for argument in arguments:
            assert argument in known or f"{argument.rpartition('.')[0]}.*" in known, argument


@pytest.mark.parametrize("path", CONFIGS, ids=lambda path: path.stem)
def test_what_refers_to_another_component_finds_it(path: Path) -> None:
    """From where files are found to where lines are sent there is one unbroken way."""
    components = read(path)
    referred = set()
    for arguments in components.values():
        for name in ("targets", "path_targets", "forward_to"):
            for component, label, export in re.findall(
                r"([a-z]+\.[a-z_]+)\.(\w+)\.(\w+)", arguments.get(name, "")
            ):
                assert EXPORTS[component] == export
                assert (component, label) in components
                referred.add((component, label))
    begins = {key for key in components if key[0].startswith("loki.source")}
    assert set(components) == referred | begins


def test_pods_are_called_as_gpuwarden_calls_them() -> None:
    """The label by which the boards look for a job's lines; of pods it is made from the uid."""
    rules = (FOLDER / "kubernetes.alloy").read_text()
    (rule,) = [
        part for part in rules.split("rule {") if re.search(r'target_label += "job_id"', part)
    ]
    assert '"pod-$1"' in rule
    assert "__meta_kubernetes_pod_uid" in rule


def test_a_path_of_a_pods_log_is_where_the_kubelet_writes_it() -> None:
    """/var/log/pods/<namespace>_<pod>_<uid>/<container>/<n>.log, made from the labels in order."""
    rules = (FOLDER / "kubernetes.alloy").read_text()
    (rule,) = [part for part in rules.split("rule {") if '"__path__"' in part]
    labels = re.findall(r'"__meta_kubernetes_(\w+)"', rule)
    values = {
        "namespace": "lab",
        "pod_name": "train-0",
        "pod_uid": "0badcafe-1",
        "pod_container_name": "train",
    }
    joined = "/".join(values[label] for label in labels)
    texts = dict(re.findall(r'(regex|replacement)\s+= "([^"]+)"', rule))
    match = re.fullmatch(texts["regex"], joined)
    assert match
    path = re.sub(r"\$(\d)", lambda found: match[int(found[1])], texts["replacement"])
    assert path == "/var/log/pods/lab_train-0_0badcafe-1/train/*.log"


def test_loki_and_its_data_source_are_of_one_place() -> None:
    """The port that Alloy sends to and Grafana asks is Loki's; retention is on where it is said."""
    loki = yaml.safe_load((FOLDER / "loki.yaml").read_text())
    port = loki["server"]["http_listen_port"]
    (source,) = yaml.safe_load((FOLDER / "grafana-datasource.yaml").read_text())["datasources"]
    assert source["url"] == f"http://loki:{port}"
    compose = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]
    assert f"//loki:{port}/" in compose["alloy"]["environment"]["LOKI_URL"]
    assert loki["compactor"]["retention_enabled"] is True
    assert loki["limits_config"]["retention_period"]
