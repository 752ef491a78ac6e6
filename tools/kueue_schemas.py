"""Write tests/kueue_schemas.json: what Kueue's own CRDs allow, without what no test needs.

    git clone --depth 1 --branch v0.19.2 https://github.com/kubernetes-sigs/kueue
    python tools/kueue_schemas.py kueue

Descriptions go, and so does the schema of the pod inside a Workload, 1.3 MB that the schemas of
Kubernetes (kubernetes-validate) cover. Kueue is licensed under the Apache License 2.0.
"""

from __future__ import annotations

import argparse
import json
import subprocess
from pathlib import Path
from typing import Any

import yaml

VERSION = "v1beta2"
KINDS = (
    "admissionchecks",
    "clusterqueues",
    "cohorts",
    "localqueues",
    "resourceflavors",
    "workloadpriorityclasses",
    "workloads",
)
OUT = Path(__file__).parents[1] / "tests/kueue_schemas.json"
_OPEN = {"type": "object", "x-kubernetes-preserve-unknown-fields": True}


def main() -> None:
    """Read a checkout of Kueue; write the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("checkout", type=Path, help="a clone of kubernetes-sigs/kueue, with .git")
    checkout = parser.parse_args().checkout
    git = ["git", "-C", str(checkout)]
    commit = subprocess.run(
        [*git, "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()
    kinds = {}
    for plural in KINDS:
        path = f"config/components/crd/bases/kueue.x-k8s.io_{plural}.yaml"
        text = subprocess.run(
            [*git, "show", f"HEAD:{path}"], capture_output=True, text=True, check=True
        ).stdout
        spec = yaml.safe_load(text)["spec"]
        version = next(item for item in spec["versions"] if item["name"] == VERSION)
        kinds[spec["names"]["kind"]] = {
            "plural": plural,
            "namespaced": spec["scope"] == "Namespaced",
            "schema": compact(version["schema"]["openAPIV3Schema"]),
        }
    content = {
        "source": "https://github.com/kubernetes-sigs/kueue config/components/crd/bases",
        "commit": commit,
        "licence": "Apache-2.0, Copyright The Kubernetes Authors; shortened by tools/"
        "kueue_schemas.py: descriptions and the pod template of a Workload are left out",
        "apiVersion": f"kueue.x-k8s.io/{VERSION}",
        "kinds": kinds,
    }
    OUT.write_text(json.dumps(content, indent=1, sort_keys=True) + "\n", encoding="utf-8")


def compact(found: Any, path: tuple[str, ...] = ()) -> Any:
    """A schema without descriptions and without what a pod template is made of."""
    if isinstance(found, list):
        return [compact(item, path) for item in found]
    if not isinstance(found, dict):
        return found
    if path[-4:] == ("podSets", "items", "properties", "template"):
        return _OPEN
    # `description` is also the name of a field.
    own = {
        name: value
        for name, value in found.items()
        if name != "description" or not isinstance(value, str)
    }
    return {name: compact(value, (*path, name)) for name, value in own.items()}


if __name__ == "__main__":
    main()
