"""Who held cards from when to when: what every account of GPU time is made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Holding:
    """One attempt of a job, and the cards that it held.

    A job that came back is several holdings of one `entry`, with different starts: `(engine, entry,
    part, start)` is the key by which each is counted once, whoever tells of it and however often.

    Attributes:
        engine: slurm, kueue or local.
        entry: the engine's id of the job.
        user: who submitted it.
        team: by the policy; empty where the user is of none.
        gpus: whole cards.
        start: Unix time.
        end: Unix time, or None while it runs.
        card: name of the policy's kind of cards; empty where the engine does not tell.
        run_id: the trainer's run, or None.
        project: of the training; empty where nobody told.
        suspended_seconds: of it during which the cards were not held.
        part: which of several that a job has at a time, such as a pod; empty where it has one, so
            that its attempts follow one another.
    """

    engine: str
    entry: str
    user: str
    team: str
    gpus: int
    start: float
    end: float | None = None
    card: str = ""
    run_id: str | None = None
    project: str = ""
    suspended_seconds: float = 0.0
    part: str = ""

    @property
    def key(self) -> tuple[str, str, str, float]:
        """By which it is counted once."""
        return (self.engine, self.entry, self.part, self.start)
