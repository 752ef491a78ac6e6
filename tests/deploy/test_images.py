"""The images: linted, put together from what is there, and, as a sweep, built without Docker."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from tests.deploy.dockerfiles import FOLDER, ROOT, Builder, Stage, let_through, lineage, stages

STAGES = stages(FOLDER / "Dockerfile")
IMAGES = ("engine", "scheduler", "node", "exporter", "agent", "simulated-node", "sinks")
ENVIRONMENTS = ("engine", "scheduler", "node", "simulated-node", "sinks")
PORTS = {"engine": 9837, "scheduler": 9839, "exporter": 9835, "agent": 9836, "sinks": 8025}


def steps(name: str) -> list[tuple[str, str]]:
    """Every instruction that makes an image."""
    return [step for stage in lineage(STAGES, name) for step in stage.steps]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*Dockerfile")), ids=lambda path: path.name)
def test_hadolint_has_nothing_to_say(path: Path) -> None:
    """Dockerfiles and the shell in them, with no rule left out but where it says why."""
    hadolint = Path(sys.executable).with_name("hadolint")
    done = subprocess.run(
        [hadolint, "--no-color", path], capture_output=True, text=True, check=False, timeout=60
    )
    assert (done.returncode, done.stdout) == (0, "")


@pytest.mark.parametrize("stage", STAGES.values(), ids=lambda stage: stage.name)
def test_what_is_copied_is_there_and_reaches_the_builder(stage: Stage) -> None:
    """From this folder, or from a stage of this file."""
    for words in stage.all("COPY"):
        *sources, _ = words.split()
        if sources[0].startswith("--from="):
            assert sources[0].removeprefix("--from=") in STAGES
            continue
        for source in sources:
            assert (ROOT / source).exists(), source
            assert let_through(FOLDER / "Dockerfile.dockerignore", source), source


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_runs_as_a_plain_user(name: str) -> None:
    """By number, so that Kubernetes can prove it; and nothing is done after it as root."""
    made = [instruction for instruction, _ in steps(name)]
    last = len(made) - 1 - made[::-1].index("USER")
    assert steps(name)[last] == ("USER", "10001:10001")
    assert not {"RUN", "COPY"} & set(made[last:])


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_has_neither_compiler_nor_anything_unpinned(name: str) -> None:
    """All of it comes from stages that are thrown away, where every package has its sum."""
    commands = " ".join(words for instruction, words in steps(name) if instruction == "RUN")
    assert not re.search(r"\b(pip|apt-get|gcc|cc|curl|wget)\b", commands)
    bases = {stage.base for stage in lineage(STAGES, name) if stage.base not in STAGES}
    assert bases == {"${PYTHON}"}


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_every_package_is_installed_by_its_sum(name: str) -> None:
    """It takes what is in the list with its hash, and from this source no more than itself."""
    (run,) = [words for words in STAGES[f"{name}-env"].all("RUN") if "install" in words][-1:]
    installs = re.findall(r"pip --python \S+ install (.*?)(?: &&|$)", run)
    assert installs[0] == f"--require-hashes --requirement /requirements/requirements-{name}.txt"
    assert installs[1:] in ([], ["--no-deps /wheels/gpuwarden-*.whl"])
    assert (FOLDER / f"requirements-{name}.txt").is_file()


@pytest.mark.parametrize("name", IMAGES)
def test_an_image_says_what_it_is(name: str) -> None:
    """Title, licence, version and revision; the program is started without a shell."""
    labels = " ".join(words for instruction, words in steps(name) if instruction == "LABEL")
    for key in ("title", "description", "licenses", "version", "revision"):
        assert f"org.opencontainers.image.{key}=" in labels
    entry = [words for instruction, words in steps(name) if instruction == "ENTRYPOINT"][-1]
    assert json.loads(entry)
    assert ("STOPSIGNAL", "SIGTERM") in steps(name)


@pytest.mark.parametrize(("name", "port"), PORTS.items())
def test_a_program_of_its_own_port_has_a_health_check(name: str, port: int) -> None:
    """It asks whether the program is ready, in less time than Docker gives it."""
    (check,) = STAGES[name].all("HEALTHCHECK")
    assert f"http://127.0.0.1:{port}/-/ready', timeout=4" in check
    assert "--timeout=5s" in check


def _base() -> Path:
    """Python 3.13 if it is here, as in the images, else the Python of the tests."""
    found = sorted(Path.home().glob(".pyenv/versions/3.13*/bin/python3"))
    return found[-1] if found else Path(sys.executable).resolve()


@pytest.mark.sweep
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_the_commands_of_an_image_make_what_runs(name: str, tmp_path: Path) -> None:
    """The Dockerfile's own commands, in their order, from the hashed lists; then the program."""
    builder = Builder(tmp_path, _base())
    builder.carry_out(lineage(STAGES, f"{name}-env"))
    python = tmp_path / "opt/gpuwarden/bin/python"
    environment = {"PATH": str(python.parent), "HOME": "/nonexistent"}
    scenario = tmp_path / "scenario"
    scenario.write_text("card index=0\n")
    jobs = f"--jobs.directory={tmp_path / 'jobs'}"
    policy = ROOT / "deploy" / "examples" / "policy.yaml"
    words = {
        "engine": ["-m", "gpuwarden", "engine", "--help"],
        # The commands that people run besides need what it needs.
        "scheduler": ["-m", "gpuwarden", "scheduler", "--check", f"--policy={policy}"],
        "node": ["-m", "gpuwarden", "exporter", "--once", jobs],
        # Its PATH has no compiler.
        "simulated-node": ["-m", "gpuwarden", "exporter", f"--gpus=simulated:{scenario}", "--once"],
        "sinks": [str(ROOT / "deploy/compose/sinks.py"), "--help"],
    }[name]
    if name == "simulated-node":
        environment["XDG_CACHE_HOME"] = str(tmp_path / "opt/gpuwarden/cache")
        words.append(jobs)
    done = subprocess.run(
        [python, *words], env=environment, capture_output=True, text=True, check=False, timeout=60
    )
    assert done.returncode == 0, done.stderr
    if name == "simulated-node":
        assert 'gpu_up{gpu="0"' in done.stdout
    assert not (tmp_path / "opt/gpuwarden/bin/pip").exists()


@pytest.mark.sweep
@pytest.mark.timeout(600)
def test_the_same_source_gives_the_same_wheel(tmp_path: Path) -> None:
    """Built twice, at different times and in different folders: byte for byte the same."""
    sums = set()
    for folder in ("one", "another"):
        builder = Builder(tmp_path / folder, _base())
        builder.carry_out(lineage(STAGES, "builder"))
        (wheel,) = (tmp_path / folder / "wheels").glob("gpuwarden-*.whl")
        sums.add(hashlib.sha256(wheel.read_bytes()).hexdigest())
    assert len(sums) == 1
