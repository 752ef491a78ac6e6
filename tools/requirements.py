"""Write what each image installs, pinned with sums: `make requirements`.

Versions are those of constraints.txt, with which the tests ran; pip then takes nothing else
(`--require-hashes`). Sums are those of every file of a version, so that x86 and Arm nodes share a
list. Needs PyPI, or an index that PIP_INDEX_URL or UV_INDEX_URL names; tests compare what is
committed with pyproject.toml and constraints.txt, without it.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "deploy" / "docker"
PYTHON = "3.13"
"""Of the images."""
SECONDS = 300


@dataclass(frozen=True, slots=True)
class Image:
    """What an image installs besides gpuwarden itself.

    Attributes:
        name: of its target in the Dockerfile.
        extras: of gpuwarden, whose requirements are installed.
        packages: others, by name.
    """

    name: str
    extras: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()

    @property
    def file(self) -> Path:
        """Its list."""
        return FOLDER / f"requirements-{self.name}.txt"


IMAGES = (
    Image("engine", extras=("ruleengine", "kubernetes")),
    Image("scheduler", extras=("scheduling", "kubernetes")),
    Image("node", extras=("exporter", "web", "kubelet")),
    Image("simulated-node", extras=("exporter", "web", "kubelet", "simulated", "local")),
    Image("sinks", packages=("aiosmtpd", "starlette", "uvicorn")),
)
# What pip itself builds the wheel with, in the first stage.
BUILD = Image("build", packages=("setuptools",))


def compiled(image: Image) -> str:
    """The list of an image, as it is to be committed."""
    source = ["pyproject.toml", *(f"--extra={extra}" for extra in image.extras)]
    if image.packages:
        source = ["-"]
    done = subprocess.run(
        [
            str(Path(sysconfig.get_path("scripts")) / "uv"),
            "pip",
            "compile",
            "--quiet",
            "--generate-hashes",
            "--no-header",
            "--no-annotate",
            f"--python-version={PYTHON}",
            "--python-platform=linux",
            "--constraint=constraints.txt",
            *source,
        ],
        input="\n".join(image.packages),
        capture_output=True,
        text=True,
        check=True,
        timeout=SECONDS,
        cwd=ROOT,
    )
    what = f"gpuwarden[{','.join(image.extras)}]" if image.extras else ", ".join(image.packages)
    return f"# {what}, Python {PYTHON} on Linux. Made by `make requirements`.\n{done.stdout}"


def main() -> int:
    """Write every list."""
    for image in (*IMAGES, BUILD):
        image.file.write_text(compiled(image), "utf-8")
        sys.stdout.write(f"{image.file.relative_to(ROOT)}\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
