"""Policy files for tests: one that is in order, and ways to change it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuwarden.scheduling.policies import Engine, Policy
from gpuwarden.scheduling.policy_checks import check_policy
from gpuwarden.yaml_files import load_located

if TYPE_CHECKING:
    from pathlib import Path

    from gpuwarden.diagnostics import Diagnostic

NOW = 1_800_000_000.0
"""2027-01-15, by UTC."""
DIGEST = "sha256:" + "0123456789abcdef" * 4
TEXT = f"""\
version: 1
timezone: Europe/Berlin
engine: slurm
operators: {{users: [root], groups: [ops]}}
cards:
- name: a100-40
  model: NVIDIA A100-SXM4-40GB
  memory: 40GiB
  count: 32
  price: 1.90 EUR
  slurm: {{gres: a100, partition: gpu}}
  kueue: {{node_labels: {{nvidia.com/gpu.product: NVIDIA-A100-SXM4-40GB}}}}
- name: h100-80
  model: NVIDIA H100 80GB HBM3
  memory: 80GiB
  count: 8
  slurm: {{gres: h100, partition: gpu}}
  kueue: {{node_labels: {{nvidia.com/gpu.product: NVIDIA-H100-80GB-HBM3}}}}
teams:
- name: vision
  users: [ana, bo]
  quota: {{a100-40: 16, h100-80: 4}}
  borrow: {{a100-40: 8}}
  share: 3
- name: speech
  users: [cy]
  quota: {{a100-40: 12}}
  borrow: {{h100-80: 4}}
  lend: {{a100-40: 6}}
priorities:
- {{name: low, value: 10}}
- {{name: normal, value: 100, default: true}}
- {{name: high, value: 1000, preempts: [low]}}
budgets:
- {{team: vision, per: month, limit: 5000 GPU-hours, kind: hard, running: finish}}
- {{team: vision, per: day, limit: 300 GPU-hours, kind: soft}}
windows:
- name: off-peak
  days: [mon, tue, wed, thu, fri]
  from: "20:00"
  to: "07:00"
  running: leave
preemption:
  minimum_run: 30m
  notice: epoch
  deadline: 20m
  back_off: 30m
  at_most: {{times: 3, per: 24h}}
images:
- {{name: "yolo:m-cu124", image: "registry.example.com/yolo@{DIGEST}", models: ["yolov8m*"]}}
bookings:
  lead_time: 20m
  longest: 7d
  ahead: 90d
  no_show_after: 30m
  at_most_share: 50%
"""


def a_policy(**parts: object) -> Policy:
    """The policy of `TEXT`, with other parts.

    Args:
        parts: key of the file -> what it is instead; None leaves it out.
    """
    root = load_located(TEXT).root
    assert root is not None
    document = root.data() | parts
    return Policy.model_validate({k: v for k, v in document.items() if v is not None})


def findings(folder: Path, text: str, *, engine: Engine | None = None) -> tuple[Diagnostic, ...]:
    """What is said of a policy file.

    Args:
        folder: where it is written.
        text: of it.
        engine: for which it must be complete; by default the one that it names.
    """
    path = folder / "policy.yaml"
    path.write_text(text)
    return check_policy(path, now=NOW, engine=engine).diagnostics
