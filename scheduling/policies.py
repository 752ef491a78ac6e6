"""The policy file: who may use how many cards, whose task goes first, and who has to leave.

`gpuwarden.scheduling.policy_checks` reads it; the words of its types are the reference page.
Nothing by which a job can be asked to leave has a default.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import re
import zoneinfo
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainSerializer,
    PlainValidator,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from gpuwarden.budget_terms import Limit, ScheduledBudget, written
from gpuwarden.fields import (
    Bytes,
    Ratio,
    Seconds,
    Strict,
    UserName,
    Words,
    as_tuple,
    known_zone,
    some_tuple,
)
from gpuwarden.hours import DAYS, Clock, Day
from gpuwarden.scheduling import windows as weeks
from gpuwarden.scheduling.engine_terms import (
    AtMost,
    KueueCard,
    KueueTeam,
    KueueTerms,
    LocalTerms,
    SlurmCard,
    SlurmTeam,
    SlurmTerms,
)
from gpuwarden.scheduling.policy_texts import as_written, flat

if TYPE_CHECKING:
    from gpuwarden.periods import Span

Engine = Literal["slurm", "kueue", "local"]
"""What starts the jobs."""
_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,38}[a-z0-9])?")


def _name(text: str) -> str:
    if _NAME.fullmatch(text) is None:
        likely = re.sub(r"[^a-z0-9]+", "-", text.lower())[:40].strip("-")
        raise PydanticCustomError(
            "GW107",
            "{text} is no name here: lower-case letters, digits and -, at most 40",
            {"text": f'"{text}"', "hint": f"such as {likely}" if likely else ""},
        )
    return text


Name = Annotated[
    str, AfterValidator(_name), Field(json_schema_extra={"pattern": f"^{_NAME.pattern}$"})
]
"""Lower-case letters, digits and `-`, at most 40: every engine takes it as an object's name."""
CardCount = Annotated[int, Field(ge=0, le=100_000)]
"""Number of cards."""
Cards = Mapping[Name, CardCount]
"""Kind of card -> how many."""
ModelPattern = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_.*?\[\]/-]{1,100}$")]
"""A model's name, in which `*` stands for anything, such as yolov8m*."""

_PRICE = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,4})?) ([A-Z]{3})")


def _price(value: object) -> Limit:
    if isinstance(value, Limit):
        return value
    found = _PRICE.fullmatch(value) if isinstance(value, str) else None
    if found is None:
        raise PydanticCustomError(
            "GW107",
            "{value} is not a price: write it like 1.90 EUR",
            {"value": repr(value)},
        )
    return Limit(float(found[1]), found[2])


Price = Annotated[
    Limit,
    PlainValidator(_price),
    PlainSerializer(written),
    WithJsonSchema({"type": "string", "pattern": f"^{_PRICE.pattern}$", "examples": ["1.90 EUR"]}),
]
"""Money of one currency."""
_REPOSITORY = r"[a-z0-9][a-z0-9.-]*(:[0-9]{1,5})?(/[a-z0-9][a-z0-9._-]*)+"
_PINNED = re.compile(rf"{_REPOSITORY}(:[A-Za-z0-9_][A-Za-z0-9_.-]{{0,127}})?@sha256:[0-9a-f]{{64}}")


def _pinned(text: str) -> str:
    if _PINNED.fullmatch(text) is None or len(text) > 500:
        raise PydanticCustomError(
            "GW606",
            "{text} is not pinned by its digest: what a tag names can change under a job; write "
            "it like registry.example.com/yolo@sha256:<64 hexadecimal digits>",
            {
                "text": repr(text),
                "hint": "`skopeo inspect --format '{{.Digest}}' docker://IMAGE` prints it",
            },
        )
    return text


class Operators(Strict):
    """Who may command everybody's jobs and bookings; root always may."""

    users: Annotated[tuple[UserName, ...], BeforeValidator(as_tuple)] = ()
    """By their names on the nodes."""
    groups: Annotated[tuple[UserName, ...], BeforeValidator(as_tuple)] = ()
    """Members of these groups of the machine on which they ask."""


class Card(Strict):
    """A kind of cards that the fleet has."""

    name: Name
    """What the rest of this file and `gpuwarden submit --card` call it."""
    model: Annotated[str, StringConstraints(min_length=1, max_length=200)]
    """As NVML names it, the label `name` of gpu_info; a MIG instance with its profile."""
    memory: Bytes
    """Of one card."""
    count: Annotated[int, Field(ge=1, le=100_000)]
    """How many there are."""
    price: Price | None = None
    """Of an hour of one card, such as `1.90 EUR`: shown before a job or a slot is confirmed."""
    slurm: SlurmCard | None = None
    """How Slurm knows it; mandatory with `engine: slurm`."""
    kueue: KueueCard | None = None
    """How Kubernetes knows it; mandatory with `engine: kueue`."""


class Team(Strict):
    """People who share cards and budgets."""

    name: Name
    """Shown to people; also the name of the engine's objects, unless those have names of their
    own here."""
    users: Annotated[tuple[UserName, ...], BeforeValidator(as_tuple)]
    """Who submits for it, by their names on the nodes."""
    quota: Cards
    """Kind of card -> how many are the team's own at any time; not named is none."""
    borrow: Cards = Field(default_factory=dict)
    """Kind of card -> how many more it may use while nobody else needs them; not named is none.
    Who borrows leaves when the owners come back, in the way that `preemption` tells."""
    lend: Cards | None = None
    """Kind of card -> how many of its own others may use meanwhile; not named is none. Left out
    altogether, all of them."""
    share: Annotated[int, Field(ge=1, le=1000)] = 1
    """Its weight where cards are shared beyond quotas: 2 gets twice as much as 1."""
    priorities: Annotated[tuple[Name, ...], BeforeValidator(some_tuple)] | None = None
    """Which priorities its people may choose; all by default."""
    slurm: SlurmTeam | None = None
    """How Slurm knows it."""
    kueue: KueueTeam | None = None
    """How Kubernetes knows it."""

    @property
    def account(self) -> str:
        """Its account in Slurm."""
        return self.name if self.slurm is None else self.slurm.account

    @property
    def namespace(self) -> str:
        """Its namespace in Kubernetes."""
        return self.name if self.kueue is None else self.kueue.namespace

    def own(self, card: str) -> int:
        """How many cards of a kind are its own."""
        return self.quota.get(card, 0)

    def most(self, card: str) -> int:
        """How many cards of a kind it may use at any time, borrowed ones included."""
        return self.own(card) + self.borrow.get(card, 0)

    def lends(self, card: str) -> int:
        """How many of its own cards of a kind others may use while it does not."""
        return self.own(card) if self.lend is None else min(self.own(card), self.lend.get(card, 0))

    def may_choose(self, priority: str) -> bool:
        """Whether its people may submit with a priority."""
        return self.priorities is None or priority in self.priorities


class Priority(Strict):
    """A class of tasks."""

    name: Name
    """What `gpuwarden submit --priority` calls it."""
    value: Annotated[int, Field(ge=0, le=1_000_000)]
    """The higher one goes first."""
    preempts: Annotated[tuple[Name, ...], BeforeValidator(as_tuple)] = ()
    """Lower priorities whose running jobs are asked to leave for it, as `preemption` tells; nobody
    by default."""
    default: bool = False
    """Whether it is chosen where a task names none; else the lowest is."""
    description: Words | None = None
    """For people."""


class Window(Strict):
    """Some hours of some days of the week, by the clocks of `timezone`."""

    name: Name
    """What `gpuwarden submit --window` calls it."""
    days: Annotated[tuple[Day, ...], BeforeValidator(some_tuple)] = DAYS
    """On which days it opens; all by default."""
    from_: Clock = Field(alias="from")
    """When it opens."""
    to: Clock
    """When it closes; if that is not later than `from`, on the next day."""
    running: Literal["finish", "leave"]
    """What becomes of jobs that run when it closes: `finish` lets them, `leave` asks them to save
    and leave, and starts them again when it opens."""

    @model_validator(mode="after")
    def _some_time(self) -> Self:
        if self.from_ in (self.to, 24 * 60):
            raise PydanticCustomError(
                "GW107",
                'this window has no length: a whole day is from: "00:00", to: "24:00"',
                {"at": ("to",)},
            )
        return self

    def openings(self, zone: str, around: float) -> tuple[Span, ...]:
        """When it is open in the nine days before and after a moment.

        Args:
            zone: the policy's.
            around: Unix time.
        """
        return weeks.openings(self.days, self.from_, self.to, zone=zone, around=around)

    def is_open(self, zone: str, now: float) -> bool:
        """Whether tasks that wait for it may start at a Unix time."""
        return weeks.opening_at(self.openings(zone, now), now) is not None


class Preemption(Strict):
    """How a running job is asked to leave for another."""

    minimum_run: Annotated[Seconds, Field(ge=0)]
    """A job is left alone for so long after its start, and until one epoch past its last save."""
    notice: Literal["step", "epoch"]
    """Up to where it may go on: `epoch` lets it finish the one it is in, `step` saves at once."""
    deadline: Annotated[Seconds, Field(gt=0)]
    """It is ended if it is still there so long after the notice."""
    back_off: Annotated[Seconds, Field(ge=0)]
    """A job that had to leave is not asked again for so long after it came back."""
    at_most: AtMost
    """A job that had to leave more often than this is not asked again, but told of."""


class Image(Strict):
    """A container image that jobs may use."""

    name: Annotated[str, StringConstraints(pattern=r"^[a-z0-9][a-z0-9._:-]{0,62}$")]
    """What `gpuwarden submit --image` calls it, such as yolo:m-cu124."""
    image: Annotated[str, AfterValidator(_pinned)]
    """Where it is, pinned by digest."""
    models: Annotated[tuple[ModelPattern, ...], BeforeValidator(some_tuple)]
    """For which models it is recommended."""

    def serves(self, model: str) -> bool:
        """Whether it is recommended for a model."""
        return any(fnmatch.fnmatchcase(model, pattern) for pattern in self.models)


class Bookings(Strict):
    """What may be booked, and what happens around it."""

    lead_time: Annotated[Seconds, Field(ge=0)]
    """Who must leave is told so long before the slot begins."""
    longest: Annotated[Seconds, Field(gt=0)]
    """Of one slot."""
    ahead: Annotated[Seconds, Field(gt=0)]
    """How far in the future a slot may begin."""
    no_show_after: Annotated[Seconds, Field(gt=0)]
    """A slot in which no job of the team ran for so long is released."""
    at_most_share: Annotated[Ratio, Field(gt=0, le=1)]
    """Of the cards of each kind that may be booked for any one moment."""


class Policy(Strict):
    """policy.yaml."""

    version: Literal[1]
    """Of this file's format."""
    timezone: Annotated[str, AfterValidator(known_zone)]
    """By whose clocks windows, days and months are counted: an IANA name such as Europe/Berlin."""
    engine: Engine
    """What starts jobs here; commands take another by `--engine`."""
    operators: Operators = Field(default_factory=Operators)
    """Who may command everybody's jobs and bookings."""
    cards: Annotated[tuple[Card, ...], BeforeValidator(some_tuple)]
    """Kinds of cards, the cheapest first."""
    teams: Annotated[tuple[Team, ...], BeforeValidator(some_tuple)]
    """Who shares them."""
    priorities: Annotated[tuple[Priority, ...], BeforeValidator(some_tuple)]
    """Classes of tasks."""
    budgets: Annotated[tuple[ScheduledBudget, ...], BeforeValidator(as_tuple)] = ()
    """How much a team may use in a day, a week or a month; one for each team and period at most."""
    windows: Annotated[tuple[Window, ...], BeforeValidator(as_tuple)] = ()
    """Hours of the week that tasks may wait for."""
    preemption: Preemption | None = None
    """How jobs are asked to leave. Without it nobody is, and nothing here may need it."""
    images: Annotated[tuple[Image, ...], BeforeValidator(as_tuple)] = ()
    """The images that jobs may use, and no others."""
    bookings: Bookings | None = None
    """What may be booked. Without it nothing can be."""
    slurm: SlurmTerms = Field(default_factory=SlurmTerms)
    """Of the Slurm cluster."""
    kueue: KueueTerms = Field(default_factory=KueueTerms)
    """Of the Kubernetes cluster."""
    local: LocalTerms = Field(default_factory=LocalTerms)
    """Of the lab box."""

    @property
    def zone(self) -> zoneinfo.ZoneInfo:
        """Whose clocks count."""
        return zoneinfo.ZoneInfo(self.timezone)

    @property
    def usual_priority(self) -> Priority:
        """That of tasks which name none."""
        chosen = [each for each in self.priorities if each.default]
        return chosen[0] if chosen else min(self.priorities, key=lambda each: each.value)

    def card(self, name: str) -> Card | None:
        """A kind of cards by its name, or None."""
        return next((each for each in self.cards if each.name == name), None)

    def team(self, name: str) -> Team | None:
        """A team by its name, or None."""
        return next((each for each in self.teams if each.name == name), None)

    def priority(self, name: str) -> Priority | None:
        """A priority by its name, or None."""
        return next((each for each in self.priorities if each.name == name), None)

    def window(self, name: str) -> Window | None:
        """A window by its name, or None."""
        return next((each for each in self.windows if each.name == name), None)

    def image(self, name: str) -> Image | None:
        """An image by its name, or None."""
        return next((each for each in self.images if each.name == name), None)

    def teams_of(self, user: str) -> tuple[Team, ...]:
        """The teams that somebody submits for; a user in several has to say for which."""
        return tuple(each for each in self.teams if user in each.users)

    def team_of(self, user: str) -> str:
        """The only team that somebody submits for; an empty string for nobody's and several."""
        found = self.teams_of(user)
        return found[0].name if len(found) == 1 else ""

    def budgets_of(self, team: str) -> tuple[ScheduledBudget, ...]:
        """Every budget of a team."""
        return tuple(each for each in self.budgets if each.team == team)

    def preempts(self, higher: str, lower: str) -> bool:
        """Whether jobs of one priority are asked to leave for those of another."""
        found = self.priority(higher)
        return found is not None and lower in found.preempts

    def unassigned(self, card: str) -> int:
        """How many cards of a kind are no team's own."""
        known = self.card(card)
        count = 0 if known is None else known.count
        return count - sum(team.own(card) for team in self.teams)

    def lendable(self, card: str, team: str) -> int:
        """How many cards of a kind a team could borrow if nobody else used any."""
        others = sum(each.lends(card) for each in self.teams if each.name != team)
        return max(0, self.unassigned(card)) + others


def policy_hash(policy: Policy) -> str:
    """Sixteen hexadecimal digits that stand for all that a policy says, whatever its layout."""
    cards = [card.name for card in policy.cards]
    text = json.dumps([cards, flat(as_written(policy))], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
