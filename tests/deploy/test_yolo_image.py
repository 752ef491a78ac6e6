"""The image that trains: nothing in it that is not pinned, and nothing copied that is not there."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
DOCKER = ROOT / "deploy" / "docker"
DOCKERFILE = (DOCKER / "yolo.Dockerfile").read_text("utf-8")
LOCKS = sorted(DOCKER.glob("requirements-yolo-cu*.txt"))


def _locked(path: Path) -> dict[str, str]:
    """Names to versions; each entry must have a version and a sum."""
    lines = [line for line in path.read_text("utf-8").splitlines() if not line.startswith("#")]
    versions = {}
    for entry in re.split(r"\n(?=[a-z0-9])", "\n".join(lines)):
        found = re.match(r"([a-z0-9._-]+)==(\S+) \\\n", entry)
        assert found, entry
        name, version = found.groups()
        assert re.search(r"--hash=sha256:[0-9a-f]{64}", entry), name
        versions[name] = version
    return versions


@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.stem)
def test_every_package_is_pinned_with_its_sum(lock: Path) -> None:
    """And what gpuwarden's trainer needs is among them, in a version that fits."""
    locked = _locked(lock)
    asked = (DOCKER / "requirements-yolo.in").read_text("utf-8").splitlines()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"][
        "optional-dependencies"
    ]
    asked += [*extras["trainer"], *extras["yolo"], *extras["upload"], *extras["s3"]]
    for line in asked:
        if not line or line.startswith(("#", "gpuwarden")):
            continue
        wish = Requirement(line)
        assert wish.specifier.contains(locked[wish.name.lower()]), line


def test_the_image_is_built_from_what_is_there() -> None:
    """Each source that is copied exists and reaches the builder; it runs as a plain user."""
    (default,) = re.findall(r"^ARG CUDA=(.+)$", DOCKERFILE, re.MULTILINE)
    assert DOCKER / f"requirements-yolo-{default}.txt" in LOCKS
    passed = [
        line.removeprefix("!")
        for line in (DOCKER / "yolo.Dockerfile.dockerignore").read_text("utf-8").splitlines()
        if line.startswith("!")
    ]
    for words in re.findall(r"^COPY (.+)$", DOCKERFILE, re.MULTILINE):
        for source in words.replace("${CUDA}", default).split()[:-1]:
            if source.startswith("weights/"):
                continue  # the user's own, if any
            assert (ROOT / source).exists(), source
            assert any(Path(source).match(pattern) for pattern in passed), source
    assert DOCKERFILE.index("\nUSER 10001:10001\n") < DOCKERFILE.index("\nENTRYPOINT")
    assert "--require-hashes" in DOCKERFILE


def test_a_training_in_it_saves_when_the_container_is_stopped() -> None:
    """Docker signals PID 1 alone, which must be the training and no shell."""
    assert '\nENTRYPOINT ["gpuwarden", "train"]\n' in DOCKERFILE
    assert "\nSTOPSIGNAL SIGTERM\n" in DOCKERFILE
