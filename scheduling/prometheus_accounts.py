"""Who held how much by Prometheus: the recorded series of alerting/rules/money.yml."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuwarden.scheduling.prometheus_queries import instant

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuwarden.periods import Span
    from gpuwarden.scheduling.prometheus_queries import Rows
    from gpuwarden.scheduling.usages import By, Key

_LABELS: Mapping[By, tuple[str, ...]] = {
    "team": ("team",),
    "user": ("user", "team"),
    "project": ("project", "team"),
    "job": ("job_id", "team", "user"),
}
"""What the recorded series of a level are told apart by; an attempt is one of the nodes'."""
_RECORDED_SECONDS = 300.0
_LAG_SECONDS = 15.0
"""Each five minutes are written this long after their end."""
_LIMIT_BYTES = 16 * 1024 * 1024


class PrometheusAccounts:
    """Asks one server, or a query layer that folds several.

    Args:
        url: such as http://127.0.0.1:9090.
        timeout: seconds for one query.
    """

    def __init__(self, url: str, *, timeout: float = 15.0) -> None:
        self._url = url.rstrip("/")
        self._timeout = timeout

    async def held(self, span: Span, by: By, team: str = "") -> tuple[dict[Key, float], float]:
        """GPU-seconds that were held, by name, team and user; and the share of the time recorded.

        Args:
            span: the stretch of time.
            by: what the lines are about; jobs are told by attempt, under the exporter's `job_id`.
            team: only of this one, or an empty text.

        Raises:
            ServiceUnavailable: no answer, or no whole one.
        """
        names = _LABELS[by]
        length = f"[{max(1, round(1000 * span.seconds) - 1)}ms]"
        chosen = f"{{team={_quoted(team)}}}" if team else ""
        hours = f"sum by ({', '.join(names)}) (sum_over_time({by}:gpu_hours:sum5m{chosen}{length}))"
        at = span.end + _LAG_SECONDS
        rows = await self._ask(hours, at)
        seen = await self._ask(f"count_over_time(fleet:gpus_seen:count5m{length})", at)
        found: dict[Key, float] = {}
        for labels, value in rows:
            name, team_label, user = (*(labels.get(each, "") for each in names), "", "")[:3]
            key = (name, team_label, user)
            found[key] = found.get(key, 0.0) + 3600.0 * value
        samples = max(span.seconds, _RECORDED_SECONDS) / _RECORDED_SECONDS
        covered = min(1.0, max((value for _labels, value in seen), default=0.0) / samples)
        return found, covered

    async def _ask(self, query: str, at: float) -> Rows:
        return await instant(
            self._url,
            query,
            at=at,
            timeout=self._timeout,
            whole=2 * self._timeout,
            limit=_LIMIT_BYTES,
        )


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
    return f'"{escaped}"'
