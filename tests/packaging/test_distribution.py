"""What is shipped: every module, and for each machine only what it needs."""

import json
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COMPONENTS = ("exporter", "trainer", "ruleengine")
SHIPPED = (".py", ".c", ".json", ".yaml", ".typed")

pytestmark = pytest.mark.timeout(300)


def run(*command: str | Path, cwd: Path | None = None) -> str:
    """Output of a command that must succeed."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
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
    importlib.import_module(module.name)
names = sorted(d.name.lower().replace("_", "-") for d in importlib.metadata.distributions())
print(json.dumps(names))
"""


@pytest.mark.parametrize("component", ["exporter", "ruleengine"])
def test_an_extra_alone_imports_its_whole_folder(
    wheel: Path, tmp_path: Path, component: str
) -> None:
    """In a clean environment each component has what it needs, and nothing of the others."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", f"{wheel}[{component}]")
    installed = set(json.loads(run(python, "-c", IMPORT_ALL, component, cwd=tmp_path)))
    foreign = {"torch", "ultralytics", "numpy", "grafana-foundation-sdk"}
    if component == "exporter":
        foreign |= {"pydantic", "httpx", "pyyaml", "rich", "promql-parser"}
    else:
        foreign |= {"nvidia-ml-py"}
    assert not installed & foreign


def test_the_trainer_needs_nothing_of_the_node_or_the_server(wheel: Path, tmp_path: Path) -> None:
    """A training image brings torch; gpuwarden adds click, and imports without torch."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", f"{wheel}[trainer]")
    code = "import gpuwarden.trainer, sys; assert 'torch' not in sys.modules"
    run(python, "-c", code, cwd=tmp_path)
    names = {item["name"] for item in json.loads(run(python, "-m", "pip", "list", "--format=json"))}
    assert names <= {"gpuwarden", "click", "pip", "setuptools"}


def test_the_base_alone_needs_only_the_standard_library(wheel: Path, tmp_path: Path) -> None:
    """Every contract of the kernel can be imported with no dependency installed."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    run(python, "-m", "pip", "install", "-q", wheel)
    code = (
        "from gpuwarden import agent_api, catalogue, clock, diagnostics, durations, errors, "
        "job_files"
    )
    run(python, "-c", code, cwd=tmp_path)
