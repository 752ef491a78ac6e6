"""What the tests of the daemon have in common: a policy, a job that waits, a booking."""

from __future__ import annotations

import os
import pwd

from tests.scheduling.policy_files import NOW, TEXT

from gpuwarden.schedule_api import (
    EntryState,
    Interval,
    QueueEntry,
)

ME = pwd.getpwuid(os.geteuid()).pw_name
HOUR = 3600.0
POLICY = TEXT.replace("users: [ana, bo]", f"users: [ana, bo, {ME}]").replace(
    "operators: {users: [root], groups: [ops]}", "operators: {users: [olga]}"
)
LOCAL = POLICY.replace("engine: slurm", "engine: local")
WAITS = QueueEntry(
    engine="slurm",
    id="7",
    name="night",
    user="ana",
    state=EntryState.PENDING,
    gpus=2,
    submitted=NOW - 600,
    team="vision",
    priority="high",
    start=Interval(NOW + 60, NOW + 120, 6),
)
BOOKING = {"gpus": 4, "card": "a100-40", "from": "+2h", "for": "4h"}
