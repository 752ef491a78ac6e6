"""Who held how much by Prometheus: the recorded series of alerting/rules/money.yml."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gpuwarden.scheduling.prometheus_queries import instant

if TYPE_CHECKING:
    from collections.abc import Mapping

    from gpuwarden.periods import Span
    from gpuwarden.scheduling.prometheus_queries import Rows
    from gpuwarden.scheduling.usages import By

_LABELS: Mapping[str, tuple[str, ...]] = {
    "team": ("team",),
    "user": ("user", "team"),
    "project": ("project", "team"),
}
"""What the recorded series of a level are told apart by."""
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

    async def held(
        self, span: Span, by: By, team: str = ""
    ) -> tuple[dict[tuple[str, str], float], float] | None:
        """GPU-seconds that were held, by name and team; and the share of the time recorded.

        Args:
            span: the stretch of time.
            by: what the lines are about.
            team: only of this one, or an empty text.

        Returns:
            None where the two accounts have no names in common: attempts of jobs are named by
            nodes.

        Raises:
            ServiceUnavailable: no answer, or no whole one.
        """
        names = _LABELS.get(by)
        if names is None:
            return None
        length = f"[{max(1, round(1000 * span.seconds) - 1)}ms]"
        chosen = f"{{team={_quoted(team)}}}" if team else ""
        hours = f"sum by ({', '.join(names)}) (sum_over_time({by}:gpu_hours:sum5m{chosen}{length}))"
        at = span.end + _LAG_SECONDS
        rows = await self._ask(hours, at)
        seen = await self._ask(f"count_over_time(fleet:gpus_seen:count5m{length})", at)
        found: dict[tuple[str, str], float] = {}
        for labels, value in rows:
            key = (labels.get(names[0], ""), labels.get("team", "") if len(names) > 1 else "")
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
