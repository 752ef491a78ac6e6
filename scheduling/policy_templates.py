"""A policy to begin with, for `gpuwarden policy init`: every part once, with a word on each."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from gpuwarden.scheduling.policies import Engine

_KNOWN_AS = {
    "slurm": '  slurm: {gres: a100}                 # "a100" of gres/gpu:a100 in gres.conf\n',
    "kueue": (
        "  kueue:                              # `kubectl get nodes --show-labels`\n"
        "    node_labels: {nvidia.com/gpu.product: NVIDIA-A100-SXM4-40GB}\n"
    ),
    "local": "",
}
_MORE = {
    "slurm": """
# Containers that jobs may use, pinned by digest; `skopeo inspect docker://IMAGE` prints it.
# images:
# - name: yolo:m-cu124
#   image: registry.example.com/yolo@sha256:<64 hexadecimal digits>
#   models: ["yolov8*", "yolo11*"]
""",
    "kueue": """
# The images that pods may use, pinned by digest; `skopeo inspect docker://IMAGE` prints it.
images:
- name: yolo:m-cu124
  image: registry.example.com/yolo@sha256:{zeros}
  models: ["yolov8*", "yolo11*"]

kueue:
  admission: warn                     # of Jobs written by hand; deny, once it warns of none
  requeues: {times: 3, per: 1h}       # a job that only comes back is held after that
""".replace("{zeros}", "0" * 64),
    "local": "",
}


def policy_template(engine: Engine, zone: str) -> str:
    """A policy file with a comment on each part.

    Args:
        engine: that it is for.
        zone: IANA name of a time zone.
    """
    return f"""\
# What each key means: docs/policy-reference.md, or `gpuwarden policy reference`.
# After each change: gpuwarden policy check FILE, then gpuwarden policy diff FILE.
# For editors: gpuwarden policy schema > policy.schema.json
# yaml-language-server: $schema=policy.schema.json

version: 1
timezone: {zone}
engine: {engine}
operators: {{users: [root], groups: []}}  # may command everybody's jobs and bookings

# Kinds of cards, the cheapest first. `nvidia-smi -L` prints the model's name.
cards:
- name: a100-40
  model: NVIDIA A100-SXM4-40GB
  memory: 40GiB
  count: 8
{_KNOWN_AS[engine]}
# Quotas are a team's own at any time. What it does not use, others may borrow.
teams:
- name: vision
  users: [ana, bo]                    # names on the nodes
  quota: {{a100-40: 4}}
  borrow: {{a100-40: 4}}
- name: speech
  users: [cy]
  quota: {{a100-40: 4}}
  borrow: {{a100-40: 4}}

# The higher value goes first. Only what `preempts` names has to leave for it.
priorities:
- {{name: low, value: 10}}
- {{name: normal, value: 100, default: true}}
- {{name: high, value: 1000, preempts: [low]}}

# How a running job is asked to leave: it saves, leaves, and goes on later where it stopped.
preemption:
  minimum_run: 30m                    # nobody is asked sooner after a start
  notice: epoch                       # finish the epoch first; or step: save at once
  deadline: 20m                       # ended if it is still there: an epoch and a save must fit
  back_off: 30m                       # nor so soon after it came back
  at_most: {{times: 3, per: 24h}}       # then it is left alone, and its owner is told

# hard: no further job starts. running says what becomes of those that run: finish, or leave.
budgets:
- {{team: vision, per: month, limit: 2000 GPU-hours, kind: hard, running: finish}}
- {{team: speech, per: month, limit: 2000 GPU-hours, kind: soft}}

# `gpuwarden submit --window off-peak` waits for these hours, by the clocks of `timezone`.
windows:
- name: off-peak
  days: [mon, tue, wed, thu, fri]
  from: "20:00"
  to: "07:00"                         # of the next day
  running: leave                      # at seven they save, and go on in the evening

# Slots that a team books for itself.
bookings:
  lead_time: 20m                      # who must leave is told so long before
  longest: 7d
  ahead: 90d
  no_show_after: 30m                  # then the slot is released
  at_most_share: 50%                  # of the cards of a kind, at any moment
""" + _MORE[engine]
