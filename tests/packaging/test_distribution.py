"""What is shipped: every module, and for each machine only what it needs."""

import json
import os
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPONENTS = ("exporter", "trainer", "ruleengine", "scheduling")
SHIPPED = (".py", ".c", ".css", ".html", ".json", ".toml", ".yaml", ".typed")

pytestmark = pytest.mark.timeout(300)


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Output of a command that must succeed, and that sees no sources but those installed."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        check=False,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel that is built from the sdist, as PyPI and distributions do."""
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", out, ROOT)
    (built,) = out.glob("*.whl")
    return built


def test_every_source_file_is_in_the_wheel_built_from_the_sdist(wheel: Path) -> None:
    """The component folders are links in src/: a build that loses one is noticed here."""
    tracked = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).split()
    wanted = {
        "gpuwarden/" + name.removeprefix("src/gpuwarden/")
        for name in tracked
        if name.split("/")[0] in (*COMPONENTS, "src")
        and name.endswith(SHIPPED)
        and (ROOT / name).is_file()
    }
    assert len(wanted) > 40
    assert wanted - set(zipfile.ZipFile(wheel).namelist()) == set()


IMPORT_ALL = """
import importlib, importlib.metadata, json, pkgutil, sys
package = importlib.import_module("gpuwarden." + sys.argv[1])
for module in pkgutil.walk_packages(package.__path__, package.__name__ + "."):
    if module.name not in sys.argv[2:]:
        importlib.import_module(module.name)
names = sorted(d.name.lower().replace("_", "-") for d in importlib.metadata.distributions())
print(json.dumps(names))
"""


def installed(wheel: Path, folder: Path, extra: str) -> Path:
    """Python of a clean environment that has the wheel with one extra."""
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", f"{wheel}{extra}")
    return python


def test_a_node_gets_the_exporter_and_it_runs(wheel: Path, tmp_path: Path) -> None:
    """The extra alone serves the page of a node without a driver, and brings no heavy package."""
    python = installed(wheel, tmp_path, "[exporter]")
    others = "gpuwarden.exporter.grpc_calls"  # of the extra [kubelet], imported where it is called
    names = set(json.loads(run(python, "-c", IMPORT_ALL, "exporter", others, cwd=tmp_path)))
    heavy = {"torch", "ultralytics", "numpy", "pydantic", "httpx", "pyyaml", "rich"}
    assert not names & heavy
    command = python.with_name("gpuwarden")
    page = run(command, "exporter", "--once", "--jobs.directory", tmp_path / "jobs", cwd=tmp_path)
    assert "gpuwarden_nvml_up 0.0" in page.splitlines()
    run(command, "agent", "keys", "--out", tmp_path / "keys", cwd=tmp_path)
    assert (tmp_path / "keys" / "engine.key").stat().st_mode & 0o777 == 0o600


def test_the_engine_needs_nothing_of_the_node(wheel: Path, tmp_path: Path) -> None:
    """The extra alone imports its whole folder and checks the rules that it ships."""
    python = installed(wheel, tmp_path, "[ruleengine]")
    names = set(json.loads(run(python, "-c", IMPORT_ALL, "ruleengine", cwd=tmp_path)))
    assert not names & {"torch", "ultralytics", "nvidia-ml-py"}
    (rules,) = (tmp_path / "venv").rglob("gpuwarden/ruleengine/rules/defaults.yaml")
    assert "0 errors" in run(python.with_name("gpuwarden"), "rules", "check", rules)


def test_the_trainer_needs_nothing_of_the_node_or_the_server(wheel: Path, tmp_path: Path) -> None:
    """A training image brings torch; gpuwarden adds click and rich, and imports without torch."""
    python = installed(wheel, tmp_path, "[trainer]")
    code = "import gpuwarden.trainer, sys; assert 'torch' not in sys.modules"
    run(python, "-c", code, cwd=tmp_path)
    names = {item["name"] for item in json.loads(run(python, "-m", "pip", "list", "--format=json"))}
    rich = {"rich", "markdown-it-py", "mdurl", "Pygments", "pygments"}
    assert names <= {"gpuwarden", "click", "pip", "setuptools"} | rich


def test_the_base_alone_needs_only_the_standard_library(wheel: Path, tmp_path: Path) -> None:
    """Every contract of the kernel can be imported with no dependency installed."""
    python = installed(wheel, tmp_path, "")
    code = (
        "from gpuwarden import agent_api, catalogue, clock, diagnostics, durations, errors, "
        "estimate_tables, estimates, job_files, node_api\n"
        "card = 'NVIDIA A100-SXM4-40GB'\n"
        "found = estimate_tables.expected('yolov8m', 64, imgsz=640, amp=True, hardware=card)\n"
        "assert isinstance(found, estimates.Expectation)"
    )
    run(python, "-c", code, cwd=tmp_path)
