"""How far jobs that came back have got, by Prometheus: who gets on is in no loop.

Looked up by the job, which the node names with its attempts, and not by the run, which the training
does. Where nobody can be asked nothing is known, and then only how often a job came back counts.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Final

import structlog

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.platforms.slurm import parse_attempt_id
from gpuwarden.scheduling.prometheus_queries import instant

if TYPE_CHECKING:
    from collections.abc import Collection

REFRESH_SECONDS: Final = 30.0
TIMEOUT_SECONDS: Final = 5.0
LOOK_BACK: Final = "6h"
MOST_JOBS: Final = 200
"""That are asked for at once: more do not come back at a time."""
MOST_BYTES: Final = 1024 * 1024
_NUMBER = re.compile(r"[0-9]{1,10}(?:_[0-9]{1,10})?")

log = structlog.get_logger(__name__)


class Epochs:
    """Asks one server, or a query layer that folds several.

    Args:
        url: such as http://127.0.0.1:9090.
    """

    def __init__(self, url: str) -> None:
        self._url = url.rstrip("/")
        self._asked_at: float | None = None
        self._known: dict[str, int] = {}

    def known(self, cluster: str, numbers: Collection[str], now: float) -> dict[str, int]:
        """The highest epoch of any attempt of these jobs, of those where it is known.

        Args:
            cluster: Slurm's name of it.
            numbers: such as 12 or 12_3.
            now: Unix time.
        """
        asked = sorted(number for number in numbers if _NUMBER.fullmatch(number))[:MOST_JOBS]
        fresh = self._asked_at is not None and 0 <= now - self._asked_at < REFRESH_SECONDS
        if asked and not fresh:
            self._asked_at = now
            try:
                self._known = asyncio.run(self._ask(cluster, asked, now))
            except ServiceUnavailable as error:
                log.warning("how far jobs have got is not known", problem=str(error))
        return {number: self._known[number] for number in asked if number in self._known}

    async def _ask(self, cluster: str, numbers: Collection[str], now: float) -> dict[str, int]:
        jobs = f"slurm-{re.escape(cluster)}-({'|'.join(numbers)})-[0-9]+".replace("\\", "\\\\")
        query = f'max by (job_id) (last_over_time(yolo_epoch{{job_id=~"{jobs}"}}[{LOOK_BACK}]))'
        rows = await instant(self._url, query, at=now, timeout=TIMEOUT_SECONDS, limit=MOST_BYTES)
        found: dict[str, int] = {}
        for labels, epoch in rows:
            attempt = parse_attempt_id(labels.get("job_id", ""))
            if attempt is not None and attempt.cluster == cluster:
                found[attempt.number] = max(found.get(attempt.number, 0), int(epoch))
        return found
