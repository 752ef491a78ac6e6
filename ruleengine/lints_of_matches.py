"""Lints of `match`: patterns that no job's label can fit, so that the rule judges nobody.

They are warnings: what nodes may say tomorrow is not known here.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Final

from gpuwarden.diagnostics import Severity, did_you_mean
from gpuwarden.ruleengine.linting import Finding

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from gpuwarden.ruleengine.model import Rule

LABELS: Final[Mapping[str, str]] = {
    "job_id": "As `gpuwarden jobs list` and the metrics have it: `slurm-4711-0`, `proc-...`.",
    "user": "The owner's user name on the node.",
    "team": "The owner's team, by the operator's directory.",
    "framework": "ultralytics, torch, tensorflow, jax or jupyter; nothing where not recognised.",
    "source": "What tells of the job: slurm, pod, trainer, cmdline or process.",
    "model": "The training's model without directory and suffix: `yolov8m`.",
    "project": "The training's project.",
    "run_id": "The trainer's run_id.",
    "interactive": '`"true"` for a terminal or a Jupyter kernel, else `"false"`.',
    "node": "Host of its nodes' Prometheus targets, without the port; all of them must match.",
    "gpu": "Product name of its cards, as NVML gives it; all of them must match.",
}
"""Key of `match` -> the text that its pattern is compared with."""
_WORDS: Final[Mapping[str, tuple[str, ...]]] = {
    "framework": ("ultralytics", "torch", "tensorflow", "jax", "jupyter"),
    "source": ("slurm", "pod", "trainer", "cmdline", "process"),
    "interactive": ("true", "false"),
}
"""Labels of which every text is known."""
_NO_SPACES: Final = frozenset({"job_id", "user", "node"})
_SHELL: Final = re.compile(r"(?<!\\)[A-Za-z0-9_/-]\*")
"""A letter or digit, any number of times: what a shell's pattern looks like to a regular one."""
_PORT: Final = re.compile(r"[^:]+:(?:[0-9]+|(?:\[0-9\]|\\d|\.)(?:[*+]|\{[0-9,]+\}))")
_CARD: Final = re.compile(r"(?:GPU|MIG)-.*|[0-9][0-9|,\[\]-]*")


def lint_match(rule: Rule) -> Iterator[Finding]:
    """Lint a rule's `match`; paths begin at the rule."""
    for key, pattern in rule.match.items():
        found = _unfit(key, pattern)
        if found is not None:
            yield Finding("GW317", Severity.WARNING, ("match", key), *found)


def _unfit(key: str, pattern: str) -> tuple[str, str | None] | None:
    """Why no label fits a pattern, and what to write."""
    words = _WORDS.get(key)
    if words is not None:
        if any(re.fullmatch(pattern, word) for word in words):
            return None
        message = f"no job fits: it is {', '.join(words[:-1])} or {words[-1]}"
        return message, did_you_mean(pattern.lower(), words)
    found: tuple[str, str | None] | None = None
    if _SHELL.search(pattern):
        fixed = re.sub(r"(?<![.)\]}\\*])\*", ".*", pattern)
        found = "* is any number of the character before it", f"write {fixed} for anything at all"
    elif key in _NO_SPACES and re.search(r"[\s,]", re.sub(r"\{[0-9,]+\}", "", pattern)):
        found = "no such name holds a space or a comma", "write several as ana|ben"
    elif key == "node" and _PORT.fullmatch(pattern):
        found = "no job fits: a node is its host, without the port", None
    elif key == "gpu" and _CARD.fullmatch(pattern):
        found = "no job fits: a card's label is its product's name", "NVIDIA A100.*"
    elif key == "model" and re.search(r"\.(?:pt|yaml)$", pattern):
        found = "no job fits: a model is told without its suffix", pattern.rpartition(".")[0]
    return found
