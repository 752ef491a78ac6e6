"""When trainings last saved, by Prometheus: what an end without a save would cost.

Looked up by the pod, which the node names, and not by the run, which the training does. Where it is
not known everything since the start counts as lost, and so it is where nobody can be asked.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import structlog

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.scheduling.kueue.views import Progress
from gpuwarden.scheduling.prometheus_queries import instant

if TYPE_CHECKING:
    from collections.abc import Mapping

QUERY: Final = (
    "max by (job_id) "
    '(last_over_time(yolo_checkpoint_durable_timestamp_seconds{job_id=~"pod-.+"}[5m]))'
)
REFRESH_SECONDS: Final = 30.0
TIMEOUT_SECONDS: Final = 5.0
KEPT_SECONDS: Final = 600.0
"""Without an answer for longer nothing is known any more."""
AHEAD_SECONDS: Final = 5.0
"""A moment further in the future is none."""
MOST_BYTES: Final = 16 * 1024 * 1024

log = structlog.get_logger(__name__)


class Progresses:
    """Asks one server, or a query layer that folds several.

    Args:
        url: such as http://127.0.0.1:9090.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._asked: float | None = None
        self._answered: float | None = None
        self._known: dict[str, Progress] = {}

    async def known(self, now: float) -> Mapping[str, Progress]:
        """The exporter's id of a job -> what is known of it.

        Args:
            now: Unix time.
        """
        if self._asked is None or not 0 <= now - self._asked < REFRESH_SECONDS:
            self._asked = now
            try:
                self._known = await self._ask(now)
                self._answered = now
            except ServiceUnavailable as error:
                log.warning("when trainings saved is not known", problem=str(error))
        if self._answered is None or now - self._answered > KEPT_SECONDS:
            return {}
        return self._known

    async def _ask(self, now: float) -> dict[str, Progress]:
        rows = await instant(self._url, QUERY, at=now, timeout=TIMEOUT_SECONDS, limit=MOST_BYTES)
        return {
            labels.get("job_id", ""): Progress(min(moment, now))
            for labels, moment in rows
            if 0 < moment <= now + AHEAD_SECONDS
        }
