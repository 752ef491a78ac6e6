"""Why a condition is UNKNOWN, for people: what each machine-readable reason means."""

from __future__ import annotations

REASONS = {
    "clock_skew": "the clocks of node and engine are too far apart",
    "cold_start": "it has not run for long enough to be judged",
    "dark_node": "its node does not answer",
    "estimate_too_wide": "the estimate for it is too wide to say",
    "no_data": "too few fresh samples",
    "no_gpus": "it holds no card",
    "no_profile": "nobody has said what it should show: no profile fits, and no estimate is known",
    "no_run": "it declares no training",
    "not_asked": "not looked at, since it can change nothing: another condition says NO",
    "phase": "its training is in a phase that this rule passes over for a while",
    "run_conflict": "two jobs claim its run",
    "scraped_twice": "Prometheus holds its node or its card twice, so that neither can be believed",
    "self_report": "only the job itself says so",
    "shared_card": "it shares a card, and what the card shows cannot be told apart",
}
"""Words of evidence for people; others are shown as they are."""
