"""Pods of queued jobs, as the API tells of them. Pure."""

from __future__ import annotations

import datetime as dt
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpuwarden.platforms.kubernetes import value_at
from gpuwarden.scheduling.kueue.shapes import part_at, rows_at

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping

    from gpuwarden.platforms.kubernetes import Json

_COUNT = re.compile(r"[0-9]{1,6}")
_WORDS = 300


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod of a queued job.

    Attributes:
        uid: of it.
        node: that it was put on, or empty.
        phase: Pending, Running, Succeeded, Failed or Unknown.
        leaving: whether it was told to go.
        goes_by: Unix time by which it is to be gone then, its grace included, or None.
        exit_code: of its training, once it has ended.
        started: Unix time at which its training began, or None.
        ended: Unix time at which it ended, or None.
        grace: seconds between its signal and its end.
        node_ready: whether its node reports; None where that is not known.
        gpus: cards that it asks for.
        unplaced: why no node will have it, in the scheduler's words; empty where one does.
    """

    uid: str
    node: str = ""
    phase: str = "Pending"
    leaving: bool = False
    goes_by: float | None = None
    exit_code: int | None = None
    started: float | None = None
    ended: float | None = None
    grace: float = 30.0
    node_ready: bool | None = None
    gpus: int = 0
    unplaced: str = ""

    @property
    def holds(self) -> bool:
        """Whether it has, or may yet have, its cards: until it is over or gone.

        What a node that does not report says of it is old: its cards are not known to be free.
        """
        return self.phase not in ("Succeeded", "Failed")


def read_pod(found: Json, ready: Mapping[str, bool], resources: Collection[str] = ()) -> Pod:
    """A pod.

    Args:
        found: of the API.
        ready: node -> whether it reports.
        resources: what cards are asked for by.
    """
    states = [part_at(item, "state") for item in rows_at(found, "status.containerStatuses")]
    over = next((item for state in states if (item := part_at(state, "terminated"))), {})
    code = over.get("exitCode")
    running = [value_at(state, "running.startedAt") for state in states]
    began = next((moment for moment in [*running, over.get("startedAt")] if moment), None)
    node = text_at(found, "spec.nodeName")
    grace = value_at(found, "spec.terminationGracePeriodSeconds")
    return Pod(
        uid=text_at(found, "metadata.uid"),
        node=node,
        phase=text_at(found, "status.phase") or "Pending",
        leaving=value_at(found, "metadata.deletionTimestamp") is not None,
        goes_by=moment_of(value_at(found, "metadata.deletionTimestamp")),
        exit_code=code if isinstance(code, int) else None,
        started=moment_of(began) or moment_of(value_at(found, "status.startTime")),
        ended=moment_of(over.get("finishedAt")),
        grace=float(grace) if isinstance(grace, int) and grace >= 0 else 30.0,
        node_ready=ready.get(node) if node else None,
        gpus=cards_asked(part_at(found, "spec"), resources),
        unplaced="" if node else _unplaced(found),
    )


def cards_asked(spec: Json, resources: Collection[str]) -> int:
    """Cards that the containers of a pod ask for.

    Args:
        spec: of the pod, or of a template.
        resources: by which they are asked for.
    """
    total = 0
    for container in rows_at(spec, "containers"):
        limits = part_at(container, "resources.limits")
        asked = part_at(container, "resources.requests")
        total += sum(whole(limits.get(each, asked.get(each, 0))) for each in resources)
    return total


def _unplaced(found: Json) -> str:
    """Why the scheduler finds no node for it."""
    for row in rows_at(found, "status.conditions"):
        if row.get("type") == "PodScheduled" and row.get("status") == "False":
            return " ".join(str(row.get("message") or row.get("reason") or "").split())[:_WORDS]
    return ""


def moment_of(value: Any) -> float | None:
    """A time of the API in Unix seconds, or None."""
    if not isinstance(value, str):
        return None
    try:
        return dt.datetime.fromisoformat(value).timestamp()
    except (ValueError, OverflowError):
        return None


def whole(value: Any) -> int:
    """A count, as a number or a text; 0 of what is none."""
    if isinstance(value, bool):
        return 0
    if isinstance(value, int):
        return max(0, value)
    return int(value) if isinstance(value, str) and _COUNT.fullmatch(value) else 0


def text_at(found: Any, path: str) -> str:
    """A text at a dotted path; empty where there is none."""
    value = value_at(found, path)
    return value if isinstance(value, str) else ""
