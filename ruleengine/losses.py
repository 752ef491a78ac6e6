"""What an end costs: the work since the last saved state, in GPU time and money. Pure.

Before an end it is an estimate from what the trainer says is saved; a saved state of the future
does not count, and without one it is everything since the start. Afterwards the node counts what
was lost when it clears the run's files away, ten minutes after its death.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from gpuwarden.ruleengine import guards
from gpuwarden.ruleengine.alertmanager import rfc3339
from gpuwarden.ruleengine.messages import about
from gpuwarden.ruleengine.prices import Money
from gpuwarden.ruleengine.verdicts import MAX_SKEW_SECONDS

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from gpuwarden.ruleengine.prices import Prices
    from gpuwarden.ruleengine.verdicts import JobFacts

    Reading = Mapping[str, float]
    """Reason -> GPU seconds that one user had lost on a node."""


@dataclass(frozen=True, slots=True)
class Risk:
    """What an end at one moment would cost.

    Attributes:
        seconds: of work since the last saved state, or since the start.
        cards: that it was done on; a MIG instance is one.
        saved: whether it counts from a saved state.
        hourly: price of an hour of all the cards together, or None: not known.
    """

    seconds: float
    cards: int
    saved: bool
    hourly: Money | None = None

    @property
    def gpu_seconds(self) -> float:
        """GPU time that would be lost."""
        return self.seconds * self.cards

    @property
    def cost(self) -> Money | None:
        """The same in money, or None where a price is not known."""
        if self.hourly is None:
            return None
        return Money(self.hourly.amount * self.seconds / 3600, self.hourly.currency)

    def document(self) -> dict[str, Any]:
        """For the API and the pages."""
        return {
            "seconds": round(self.seconds, 3),
            "gpu_seconds": round(self.gpu_seconds, 3),
            "cards": self.cards,
            "since": "saved_state" if self.saved else "start",
            "cost": None if self.cost is None else self.cost.document(),
        }


def at_risk(job: JobFacts, now: float, prices: Prices | None) -> Risk | None:
    """What an end now would cost, or None where not even the job's start is known.

    Args:
        job: its facts; a card that it shares counts whole, since all of it stands still.
        now: Unix time.
        prices: of engine.yaml, or None.
    """
    seconds = guards.work_lost(job, now)
    if seconds is None:
        return None
    return Risk(seconds, len(job.gpus), _counts_from_saved(job, now), _hourly(job, now, prices))


def _counts_from_saved(job: JobFacts, now: float) -> bool:
    """Whether the work counts from a saved state of this attempt, and not from its start."""
    saved = None if job.run is None else job.run.checkpoint_time
    if saved is None or saved > now + MAX_SKEW_SECONDS:
        return False
    return job.start_time is None or saved >= job.start_time


def _hourly(job: JobFacts, now: float, prices: Prices | None) -> Money | None:
    """What an hour of all its cards costs now; None where a price is not known, or they differ."""
    if prices is None or not job.gpus:
        return None
    rates = [prices.rate(gpu.name, now) for gpu in job.gpus]
    known = [rate.price for rate in rates if rate is not None]
    if len(known) < len(rates) or len({price.currency for price in known}) > 1:
        return None
    return Money(sum(price.amount for price in known), known[0].currency)


@dataclass(frozen=True, slots=True)
class Loss:
    """What one end cost: as it was foretold, and as it was counted.

    Attributes:
        risk: at the moment of the decision, or None: not known.
        gpu_seconds: as the node counted, or None: not known, or not yet.
        counted_at: Unix time, or None: not yet.
        why_not: why it is not known, in words, or an empty string.
    """

    risk: Risk | None
    gpu_seconds: float | None = None
    counted_at: float | None = None
    why_not: str = ""

    @property
    def cost(self) -> Money | None:
        """What was counted in money, or None where it or a price is not known."""
        risk = self.risk
        if self.gpu_seconds is None or risk is None or risk.hourly is None or not risk.cards:
            return None
        each = risk.hourly.amount / risk.cards
        return Money(each * self.gpu_seconds / 3600, risk.hourly.currency)

    def document(self) -> dict[str, Any]:
        """For the API and the pages."""
        return {
            "estimated": None if self.risk is None else self.risk.document(),
            "lost_gpu_seconds": None if self.gpu_seconds is None else round(self.gpu_seconds, 3),
            "cost": None if self.cost is None else self.cost.document(),
            "counted_at": None if self.counted_at is None else rfc3339(self.counted_at),
            "why_not": self.why_not,
        }


def counted(
    before: Iterable[Reading | None], after: Iterable[Reading | None]
) -> tuple[float | None, str]:
    """How much more was lost between two moments, over all nodes of a job.

    Args:
        before: what each node said before the end; None where it was not scraped.
        after: the same nodes, in the same order, once the run's files were cleared away.

    Returns:
        GPU seconds, or None; and why not.
    """
    total = 0.0
    for then, now in zip(before, after, strict=True):
        if then is None or now is None:
            return None, "the node was not scraped before its end or after it"
        for reason, seconds in now.items():
            more = seconds - then.get(reason, 0.0)
            if more < 0:
                return None, "the node's exporter began to count anew meanwhile"
            total += more
    return total, ""


# -- in words, of the documents: the pages and `gpuwarden why` tell the same


def risk_line(risk: Mapping[str, Any]) -> str:
    """What an end would cost, in one line."""
    cards = f" on {risk['cards']} cards" if risk["cards"] > 1 else ""
    since = "" if risk["since"] == "saved_state" else ", everything since its start"
    return f"{about(risk['seconds'])}{cards}: {_gpu_time(risk['gpu_seconds'], risk['cost'])}{since}"


def loss_lines(loss: Mapping[str, Any]) -> list[str]:
    """What an end cost: foretold, and counted."""
    lines = []
    if loss["estimated"] is not None:
        lines.append(f"foretold: {risk_line(loss['estimated'])}")
    if loss["lost_gpu_seconds"] is not None:
        lines.append(f"counted by the node: {_gpu_time(loss['lost_gpu_seconds'], loss['cost'])}")
    else:
        lines.append(f"not counted: {loss['why_not'] or 'the node counts ten minutes later'}")
    return lines


def _gpu_time(seconds: float, cost: Mapping[str, Any] | None) -> str:
    money = "" if cost is None else f", {Money(cost['amount'], cost['currency'])}"
    return f"{seconds / 3600:.2f} GPU-hours{money}"
