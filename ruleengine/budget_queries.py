"""The PromQL of `over_budget`: what the engine exports of budgets, brought to jobs.

It goes through Prometheus like every signal, so that a replay judges by what was known at the time.
"""

from __future__ import annotations

FRESH_SECONDS = 60
"""The engine is scraped every 15 s; what it said longer ago is not known any more."""

_FRESH = "{series} and timestamp({series}) >= time() - {seconds}"
_USED = """
max by (job_id) (
  max by (job_id, user) (gpu_job_info)
  * on (user) group_left (team) max by (user, team) ({teams})
  * on (team) group_left () max by (team) ({used})
)
or
  0 * max by (job_id) (
    max by (job_id, user) (gpu_job_info)
    unless on (user)
      (max by (user, team) ({teams}) * on (team) group_left () max by (team) ({limits}))
  )
  and on () ({alive})
"""


def used_share(period: str) -> str:
    """The used share of the fullest hard budget of a period, one number for each job.

    0 where its team has none; no row while the engine does not say what is used, or itself is not
    scraped.

    Args:
        period: day, week or month.
    """
    chosen = f'{{period="{period}",kind="hard"}}'

    def fresh(series: str) -> str:
        return _FRESH.format(series=series, seconds=FRESH_SECONDS)

    text = _USED.format(
        teams=fresh("gpuwarden_user_info"),
        used=fresh(f"gpuwarden_budget_used_ratio{chosen}"),
        limits=fresh(f"gpuwarden_budget_limit{chosen}"),
        alive=f"count({fresh('gpuwarden_engine_start_timestamp_seconds')})",
    )
    return " ".join(text.split())
