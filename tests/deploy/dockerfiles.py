"""Dockerfiles as their tests read them: stages and instructions, and a builder without Docker.

The builder does what the instructions of a stage say below a folder: it copies, sets the
environment and runs the very commands, with the image's absolute paths put below the folder. It has
no layers, no other root and no other base than this machine's Python, so it shows that the commands
work in their order, and nothing about the base image.
"""

from __future__ import annotations

import fnmatch
import os
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy" / "docker"


@dataclass(frozen=True, slots=True)
class Stage:
    """A stage: its name, what it begins from, and (instruction, words) in order."""

    name: str
    base: str
    steps: tuple[tuple[str, str], ...]

    def all(self, instruction: str) -> list[str]:
        """The words of each such instruction."""
        return [words for name, words in self.steps if name == instruction]


def stages(path: Path) -> dict[str, Stage]:
    """Name -> stage; comments are gone, and lines that go on are joined."""
    lines = [line for line in path.read_text().splitlines() if not line.lstrip().startswith("#")]
    text = re.sub(r"\\\n\s*", "", "\n".join(lines))
    found: dict[str, Stage] = {}
    for part in re.split(r"^FROM ", text, flags=re.MULTILINE)[1:]:
        head, *rest = part.splitlines()
        base, _, name = head.partition(" AS ")
        steps = [line.partition(" ") for line in rest if line.strip()]
        pairs = tuple((instruction, words) for instruction, _, words in steps)
        found[name or "final"] = Stage(name or "final", base, pairs)
    return found


def lineage(found: dict[str, Stage], name: str) -> list[Stage]:
    """A stage after those that it begins from."""
    stage = found[name]
    before = lineage(found, stage.base) if stage.base in found else []
    return [*before, stage]


def let_through(path: Path, source: str) -> bool:
    """Whether a .dockerignore that begins with `*` lets a path reach the builder."""
    patterns = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    assert patterns[0] == "*"
    return any(
        fnmatch.fnmatchcase(source, pattern[1:]) for pattern in patterns if pattern.startswith("!")
    )


@dataclass(slots=True)
class Builder:
    """Carries out stages below a folder.

    Attributes:
        folder: in the place of the image's root.
        python: the interpreter of the base image.
        environment: as the instructions set it.
        workdir: likewise.
    """

    folder: Path
    python: Path
    environment: dict[str, str] = field(default_factory=dict)
    workdir: str = "/"

    PATHS = ("/build", "/opt", "/requirements", "/src", "/wheels")
    """Of the image; other absolute paths are this machine's."""

    def path(self, name: str) -> Path:
        """Where a path of the image lies."""
        return self.folder / str(Path(self.workdir) / name).lstrip("/")

    def carry_out(self, found: Sequence[Stage], *, without: str = "apt-get") -> None:
        """Do what the stages say, but for commands with a word that is not for this machine."""
        for stage in found:
            for instruction, words in stage.steps:
                match instruction:
                    case "WORKDIR":
                        self.workdir = words
                        self.path(words).mkdir(parents=True, exist_ok=True)
                    case "ENV":
                        pairs = re.findall(r"(\w+)=(\S+)", words)
                        self.environment |= {key: self._expand(value) for key, value in pairs}
                    case "ARG":
                        key, _, value = words.partition("=")
                        self.environment.setdefault(key, value)
                    case "COPY":
                        self._copy(words)
                    case "RUN" if without not in words:
                        self._run(words)

    def _expand(self, value: str) -> str:
        return re.sub(r"\$\{(\w+)\}", lambda found: self.environment[found[1]], value)

    def _copy(self, words: str) -> None:
        *sources, target = words.split()
        for source in sources:
            to = self.path(target)
            if target.endswith("/"):
                to.mkdir(parents=True, exist_ok=True)
                to /= Path(source).name
            if (ROOT / source).is_dir():
                # Copied, not linked, but links within stay what they are, as Docker has it.
                skip = shutil.ignore_patterns("__pycache__", "*.egg-info")
                shutil.copytree(ROOT / source, to, symlinks=True, ignore=skip)
            else:
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / source, to)

    def _run(self, words: str) -> None:
        command = re.sub(
            rf"(?<![\w.])({'|'.join(self.PATHS)})(?=[/\s\"]|$)", rf"{self.folder}\1", words
        )
        path = os.pathsep.join((str(self.python.parent), "/usr/bin", "/bin"))
        kept = {key: value for key, value in os.environ.items() if key.startswith("PIP_")}
        environment = {**kept, **self.environment, "PATH": path, "HOME": str(self.folder)}
        where = self.path(self.workdir)
        done = subprocess.run(
            ["/bin/sh", "-ec", command],
            cwd=where,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
