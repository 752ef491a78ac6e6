"""The Helm chart as its tests read it: rendered by Helm's own code, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parents[2]
CHART = ROOT / "deploy" / "helm" / "gpuwarden"
EXAMPLES = sorted((ROOT / "deploy" / "helm" / "examples").glob("*.yaml"))

Json = dict[str, Any]


def helm(deed: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    """Run tools/charts.py to its end."""
    command = [sys.executable, str(ROOT / "tools" / "charts.py"), deed, *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)


@dataclass(frozen=True, slots=True)
class Rendered:
    """What a release would send.

    Attributes:
        objects: in the order of the templates.
        notes: what the user would read.
    """

    objects: tuple[Json, ...]
    notes: str

    def kind(self, kind: str) -> list[Json]:
        """Every object of a kind."""
        return [item for item in self.objects if item["kind"] == kind]

    def named(self, kind: str, name: str) -> Json:
        """The object of this kind and name; there is just one."""
        (found,) = [item for item in self.kind(kind) if item["metadata"]["name"] == name]
        return found

    def containers(self) -> dict[str, Json]:
        """Containers of every pod by name."""
        pods = [*self.kind("DaemonSet"), *self.kind("StatefulSet"), *self.kind("Deployment")]
        return {
            container["name"]: container
            for item in pods
            for container in item["spec"]["template"]["spec"]["containers"]
        }


def rendered(*files: Path) -> Rendered:
    """Render the chart with files of values."""
    words = [word for path in files for word in ("--values", path)]
    done = helm("render", *words)
    assert done.returncode == 0, done.stderr
    objects = [item for item in yaml.safe_load_all(done.stdout) if item is not None]
    notes = [line for line in done.stdout.splitlines() if line.startswith("#")]
    return Rendered(tuple(objects), "\n".join(notes))


def lay_out(release: Rendered, folder: Path) -> None:
    """Lay what the engine's pod mounts of ConfigMaps and Secrets below a folder, at its paths."""
    (item,) = release.kind("StatefulSet")
    pod = item["spec"]["template"]["spec"]
    mounts = {mount["name"]: mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]}
    for volume in pod["volumes"]:
        for source in volume.get("projected", {}).get("sources", ()):
            for kind, reference in source.items():
                held = {"configMap": "ConfigMap", "secret": "Secret"}[kind]
                content = release.named(held, reference["name"])
                texts = content.get("data") or content["stringData"]
                for entry in reference["items"]:
                    path = folder / mounts[volume["name"]].lstrip("/") / entry["path"]
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_text(texts[entry["key"]])
