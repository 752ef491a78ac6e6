"""`scheduler` in engine.yaml: whose queue, bookings and budgets the engine's pages show."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gpuwarden.fields import Seconds, Strict
from gpuwarden.ruleengine.prometheus_settings import Url
from gpuwarden.ruleengine.web_settings import File


class SchedulerSettings(Strict):
    """The scheduler's API, which is only read."""

    url: Url
    """Its address, such as http://127.0.0.1:9839."""
    token_file: File | None = None
    """Bearer token for /v1/schedule, where it takes one."""
    ca_file: File | None = None
    """Certificates for its TLS; the system's by default."""
    timeout: Annotated[Seconds, Field(gt=0, le=30)] = 5.0
    """For one answer; until then a page waits, and shows what was told before."""
