"""`leaves` in engine.yaml: how many running jobs a scheduler may have asked to leave.

A request to leave ends nothing, and still costs a job its place: nothing here has a default, so
that a scheduler that is wrong, or that somebody else commands, cannot empty the fleet.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, StrictInt

from gpuwarden.fields import Ratio, Seconds, Strict

MAX_DEADLINE_SECONDS = 3600.0
"""An agent holds a request for an hour at most."""


class LeaveSettings(Strict):
    """Leave requests of a scheduler (`POST /v1/leaves`), by a token with the role scheduler."""

    per_hour: Annotated[StrictInt, Field(ge=0)]
    """Jobs that may be asked in any 60 minutes, over the whole fleet; 0 is none."""
    per_run_per_day: Annotated[StrictInt, Field(ge=0)]
    """How often one run may be asked in any 24 hours, over all its attempts."""
    share_of_running: Annotated[Ratio, Field(gt=0, le=1)]
    """Share of the running jobs that may be asked at the same time; one always may."""
    longest: Annotated[Seconds, Field(ge=1, le=MAX_DEADLINE_SECONDS)]
    """The longest time that a request may give a job; at most 1h."""
