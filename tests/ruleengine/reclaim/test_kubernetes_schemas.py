"""What the engine writes, and what it leaves of others' objects, meets each version's schemas."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import warnings
from typing import TYPE_CHECKING

import kubernetes_validate
import pytest
import yaml
from tests.ruleengine.reclaim.pods import hands
from tests.ruleengine.reclaim.test_kubernetes_rights import ROLE, end_all

if TYPE_CHECKING:
    from pathlib import Path

    from tests.kubernetes_store import Json

VERSIONS = [f"1.{minor}" for minor in range(30, 38)]


def valid(document: Json, version: str) -> None:
    """Raise for what a version would refuse, or would drop without a word."""
    with warnings.catch_warnings(action="ignore"):
        kubernetes_validate.validate(document, version, strict=True)


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> list[Json]:
    """The objects that the engine sent, and those that it changed, after ending all kinds."""
    folder = tmp_path_factory.mktemp("written")

    async def run() -> list[Json]:
        async with hands(folder) as found:
            assert await end_all(found) == []
            changed = [
                item
                for kind in ("Job", "Deployment", "StatefulSet", "ReplicaSet")
                for item in found.cluster.store.all(kind)
            ]
            sent = [body for body in found.cluster.bodies if "kind" in body]
            return [*sent, *changed]

    return asyncio.run(run())


@pytest.mark.parametrize("version", VERSIONS)
def test_what_is_written(written: list[Json], version: str) -> None:
    """Events, evictions, suspended Jobs and scaled services, in every version from 1.30 on."""
    kinds = {item["kind"] for item in written}
    assert {"Event", "Eviction", "Job", "Deployment", "StatefulSet", "ReplicaSet"} <= kinds
    for document in written:
        valid(document, version)


@pytest.mark.parametrize("version", VERSIONS)
def test_the_role(version: str) -> None:
    """deploy/kubernetes/engine-rbac.yaml."""
    documents = list(yaml.safe_load_all(ROLE.read_text()))
    assert len(documents) == 6
    for document in documents:
        valid(document, version)


def test_every_change_says_which_object_is_meant(tmp_path: Path) -> None:
    """By its uid, and for a controller also by its version: never by a name alone."""

    async def run() -> list[Json]:
        async with hands(tmp_path) as found:
            assert await end_all(found) == []
            return found.cluster.bodies

    sent = [body for body in asyncio.run(run()) if body.get("kind") != "Event"]
    evictions = [body for body in sent if body.get("kind") == "Eviction"]
    assert [body["deleteOptions"]["preconditions"].keys() for body in evictions] == [{"uid"}]
    changes = [body["metadata"] for body in sent if "kind" not in body]
    assert len(changes) >= 8
    assert all(metadata["uid"] and metadata["resourceVersion"] for metadata in changes)


def test_without_the_extra(tmp_path: Path) -> None:
    """The engine says what to install; without `kubernetes` it needs none of it."""
    code = (
        "import sys; sys.modules['lightkube.config.kubeconfig'] = None\n"
        "from pathlib import Path\n"
        "import gpuwarden.ruleengine.serving\n"
        "assert not {'lightkube', 'httpx2'} & sys.modules.keys()\n"
        "from gpuwarden.ruleengine.kubernetes_settings import KubernetesSettings\n"
        "from gpuwarden.ruleengine.reclaim.kubernetes import Kubernetes\n"
        "Kubernetes.from_settings(KubernetesSettings(), Path())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert "MissingExtra" in done.stderr
    assert "pip install 'gpuwarden[kubernetes]'" in done.stderr
