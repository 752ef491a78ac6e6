"""How each figure of a report is made, and what may be wrong with it."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

FOOTNOTES: Final[Mapping[str, str]] = MappingProxyType(
    {
        "coverage": "Data coverage: seconds in which nodes answered their scrape, over the "
        "seconds in which the nodes that Prometheus had as targets were to answer. While "
        "Prometheus itself was down, as many nodes as before are expected. Every other figure is "
        "about the covered time alone.",
        "card_hours": "Card-hours: cards that answered, added up over the covered time. A MIG "
        "instance is a card. In a team's report: the part of the cards that the team held.",
        "utilization": "Utilisation: the share of time in which a kernel ran, as NVML tells it; "
        "the mean over cards, weighted by card-hours. It does not say how well a card was used. "
        "In a team's report it is that of the cards which its jobs held, where it can be measured.",
        "band": "p10, p50, p90: of the cards at one moment, a tenth, a half and nine tenths were "
        "below; averaged over the moments of a day.",
        "held": "Hours held: a card counts for a job from the moment a process of it is on the "
        "card. A card that n jobs hold counts 1/n for each, so that people add up to teams and "
        "teams to the whole. Of a MIG instance its share of the card counts where a rule recorded "
        "that share, else the whole. Teams are those of the directory, or as they were recorded.",
        "idle": "Held idle: held, while the job used the card at most 5 % for five minutes. A job "
        "that waits for data or loads a model for longer counts as idle too; where its use cannot "
        "be measured it does not.",
        "jobs_per_card": "Jobs per card and day: different jobs that held a card at some time of "
        "the day, over all cards that answered.",
        "cost": "Cost: hours held at the price of the card's model at that time, as the recording "
        "rules wrote it. Currencies are never added up. Without a price there is no cost.",
        "lost": "Work lost: GPU time since the last saved state, as the nodes counted it after a "
        "job's death; foretold where no node counted.",
        "reclaimed": "Reclaimed, proven: the ended processes were gone from NVML, and so much "
        "memory came back. Reclaimed hours, recorded: hours for which others held the cards "
        "within a day after. At most: hours until the end of the period, a day at the longest, as "
        "if the job had stayed; an estimate, and never added to what is proven.",
        "waiting": "Waiting: from when a job could have started until it did, of jobs with a GPU "
        "that started in the period; by Slurm's accounting.",
        "gap": "A gap is shown as a gap: time without samples is neither use nor idleness.",
        "names": "Names: a team's report names its own people; others are pseudonyms, as on the "
        "engine's pages.",
    }
)
