"""What Prometheus knows of the states that a cluster's jobs have saved, for receipts.

Looked up by the attempt, which the node names, and not by the run, which the job's user does. An
answer that does not come says nothing; it is not asked for again for a while.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING, Final

import structlog

from gpuwarden.errors import ServiceUnavailable
from gpuwarden.platforms.slurm import attempt_id
from gpuwarden.scheduling.prometheus_queries import instant
from gpuwarden.scheduling.slurm.receipts import Signs

if TYPE_CHECKING:
    from collections.abc import Callable

    from gpuwarden.platforms.slurm_listings import ListedJob

TIMEOUT_SECONDS: Final = 5.0
PAUSE_SECONDS: Final = 30.0
MOST_BYTES: Final = 64 * 1024
_TAKEN: Final = "yolo_checkpoint_timestamp_seconds"
_DURABLE: Final = "yolo_checkpoint_durable_timestamp_seconds"

log = structlog.get_logger(__name__)


class SavedStates:
    """Asks one server, or a query layer that folds several.

    Args:
        url: such as http://127.0.0.1:9090.
        cluster: tells the name of Slurm's cluster, by which the nodes name jobs.
    """

    def __init__(self, url: str, cluster: Callable[[], str]) -> None:
        self._url = url.rstrip("/")
        self._cluster = cluster
        self._silent_until = 0.0

    def __call__(self, job: ListedJob, _run_id: str | None) -> Signs | None:
        """When an attempt's newest state was taken, and when it was on disk."""
        now = time.monotonic()
        if now < self._silent_until:
            return None
        try:
            rows = asyncio.run(self._ask(attempt_id(job.job, self._cluster())))
        except ServiceUnavailable as error:
            self._silent_until = now + PAUSE_SECONDS
            log.warning("what jobs have saved is not known", problem=str(error))
            return None
        taken, durable = rows.get(_TAKEN), rows.get(_DURABLE)
        if taken is None or durable is None or durable < taken:
            return None  # a newer one is being written
        return Signs(durable=taken, on_disk=durable)

    async def _ask(self, job_id: str) -> dict[str, float]:
        where = f'{{job_id="{job_id}"}}[10m]'
        query = " or ".join(
            f'label_replace(max(last_over_time({name}{where})), "which", "{name}", "", "")'
            for name in (_TAKEN, _DURABLE)
        )
        rows = await instant(self._url, query, timeout=TIMEOUT_SECONDS, limit=MOST_BYTES)
        return {labels.get("which", ""): value for labels, value in rows}
