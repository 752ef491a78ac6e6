"""A week of a small team, made up, to try `rules replay` on: every kind of job that matters. Pure.

Seven days from Monday 2026-03-02, one scrape a minute, on two nodes.
"""

from __future__ import annotations

import datetime as dt
from typing import Final

from gpuwarden.ruleengine.bulk_histories import BulkHistory, BulkJob, Dark, Stretch

BEGIN: Final = dt.datetime(2026, 3, 2, tzinfo=dt.UTC).timestamp()
SECONDS: Final = 7 * 86400.0
INTERVAL_SECONDS: Final = 60.0
_ONE, _TWO = "gpu-1:9835", "gpu-2:9835"


def _cards(node: str, *numbers: int) -> tuple[str, ...]:
    return tuple(f"GPU-{node[4]}-{number}" for number in numbers)


_JOBS: Final = (
    BulkJob(
        "proc-ana-long",
        "ana",
        _ONE,
        2,
        (Stretch(0.3, "idle", "scan"), Stretch(90), Stretch(0.5, "idle", "validate"), Stretch(40)),
        _cards(_ONE, 0, 1),
        model="yolov8m",
        batch=128,
    ),
    # Its loop saves on and on, though its cards have done nothing since Tuesday morning.
    BulkJob(
        "proc-ben-forgotten",
        "ben",
        _ONE,
        10,
        (Stretch(20), Stretch(50, "idle")),
        _cards(_ONE, 2),
        model="yolov8s",
    ),
    # Waits for a colleague's data set for most of the night, and then goes on.
    BulkJob(
        "proc-cyd-waits",
        "cyd",
        _ONE,
        30,
        (Stretch(6), Stretch(5, "idle"), Stretch(20)),
        _cards(_ONE, 3),
        model="yolo11m",
    ),
    # A notebook without a trainer: nobody knows what it has in memory.
    BulkJob(
        "proc-dan-notebook", "dan", _TWO, 9, (Stretch(4), Stretch(60, "idle")), _cards(_TWO, 0)
    ),
    BulkJob(
        "proc-eve-starved",
        "eve",
        _TWO,
        14,
        (Stretch(30, "starved"),),
        _cards(_TWO, 1),
        model="yolov8l",
    ),
    # Slurm's: its own tool would have to end it.
    BulkJob(
        "slurm-gpu-4711-0",
        "flo",
        _TWO,
        60,
        (Stretch(5), Stretch(20, "idle")),
        _cards(_TWO, 2),
        model="yolov8n",
        source="slurm",
    ),
    # Goes on while its node cannot be reached: what was seen last was idle.
    BulkJob(
        "proc-gus-dark",
        "gus",
        _TWO,
        99,
        (Stretch(1), Stretch(2.3, "idle"), Stretch(12)),
        _cards(_TWO, 3),
        model="yolov8m",
    ),
    *(
        BulkJob(
            f"proc-hal-{number}",
            "hal",
            _ONE,
            110 + 8 * number,
            (Stretch(7),),
            _cards(_ONE, 2),
            model="yolov8n",
        )
        for number in range(4)
    ),
)


def made_up_week() -> BulkHistory:
    """The week."""
    return BulkHistory(BEGIN, SECONDS, INTERVAL_SECONDS, _JOBS, dark=(Dark(_TWO, 102.0, 103.0),))
