"""The grid of owners: a row per card, in it the name of who holds it, coloured by how it is used.

Grafana colours a cell by the value that it writes into it, and Prometheus' values are numbers. So
the query puts both into a label, as in `ana · idle`, and one series stands for each text of a card.
Asked for as a table, that label becomes a column of words; a matrix makes a column of it for each
card; and a mapping takes the word of use away again and leaves its colour.

A time without a word for a card stays a gap. Since a state lasts until the next one, a fleet that
falls silent altogether would seem to go on: the first row counts the nodes, and always has a word.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from grafana_foundation_sdk.models.common import VisibilityMode
from grafana_foundation_sdk.models.dashboard import (
    DashboardRegexMapOptions,
    DataTransformerConfig,
    RegexMap,
    ValueMappingResult,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat

from grafana.panels import GREEN, GREY, ORANGE, RED, YELLOW, query, states_panel
from grafana.selectors import CLUSTER, NODE, TEAMS

if TYPE_CHECKING:
    from grafana_foundation_sdk.builders import statetimeline

MOST = 60
"""Rows: in a large fleet the cards that were held with little use for longest."""

EVERY = " nodes"
"""Name of the first row; the blank sorts it before every node."""

CARD = "(instance, gpu, uuid)"


@dataclass(frozen=True, slots=True)
class Use:
    """How a card is used.

    Attributes:
        word: in the text of a cell.
        percents: pattern of the utilisation in steps of five per cent, rounded down.
        colour: of the cell.
    """

    word: str
    percents: str
    colour: str


USES = (
    Use("not measured", "-.*", GREY),
    Use("idle", "0", RED),
    Use("low", "5|10|15|20|25", ORANGE),
    Use("part", "[3-6].", YELLOW),
    Use("busy", "[7-9].|100", GREEN),
)
FREE, LOST = "free", "lost"


def panel(
    title: str, *, cards: str = "", people: bool = True, height: int = 14
) -> statetimeline.Panel:
    """The grid.

    Args:
        title: of the panel.
        cards: matchers beside the node's, as `gpu=~"$gpu"`.
        people: whether the board's `user` and `team` choose who is shown.
        height: rows of the board.
    """
    built = states_panel(
        title,
        "In each row the owner of the card, coloured by its use: red idle (under 5 %), orange "
        "under 30 %, yellow under 70 %, green above; grey is held and not measurable. Dark: free. "
        "Purple: the card does not answer. A gap: nobody told, the exporter is dark. Of a large "
        f"fleet the {MOST} cards that were held with little use for longest in the shown time; "
        "choose nodes to see others.",
        [
            # shorter, and a step could lie between two samples of the recorded series
            query(expression(cards, people=people), "{{cell}}")
            .format(PromQueryFormat.TABLE)
            .interval("1m")
        ],
        height=height,
    )
    matrix = {
        "columnField": "card",
        "rowField": "Time",
        "valueField": "cell",
        "emptyValue": "null",  # or a missing word would be an empty one, and no gap
    }
    times = {"targetField": "Time\\card", "destinationType": "time"}
    for transformation in (
        DataTransformerConfig("sortBy", options={"sort": [{"field": "Time"}]}),
        DataTransformerConfig("groupingToMatrix", options=matrix),
        # some versions of Grafana make words of the times
        DataTransformerConfig("convertFieldType", options={"conversions": [times]}),
    ):
        built = built.with_transformation(transformation)
    return built.mappings(mappings()).max_data_points(120).show_value(VisibilityMode.ALWAYS)


def mappings() -> list[RegexMap]:
    """What a cell's text becomes: without the word of use, in its colour."""
    coloured = [(f"^(.+) · {use.word}$", "$1", use.colour) for use in USES]
    coloured += [
        (f"^{FREE}$", FREE, "#2f3437"),
        (f"^{LOST}$", LOST, "purple"),
        ("^(0 seen)$", "$1", RED),
        (r"^([1-9]\d* seen)$", "$1", "#2f3437"),
    ]
    return [
        RegexMap(
            DashboardRegexMapOptions(
                pattern=pattern, result=ValueMappingResult(text=text, color=colour, index=place)
            )
        )
        for place, (pattern, text, colour) in enumerate(coloured)
    ]


def expression(cards: str = "", *, people: bool = True) -> str:
    """A series per text of each card, labelled `card` and `cell`.

    A card with several owners names how many they are, and is coloured by the one who uses it most.
    """
    where = ",".join(part for part in (CLUSTER, 'instance=~"$node"', cards) if part)
    exporters = f'job="gpuwarden",{where}'
    mine = f"owner:gpu_utilization_ratio:max{{{where}}}"
    if people:
        mine = f'owner:gpu_utilization_ratio:max{{{where},user=~"$user"}}'
    owned = f"({mine} and on (user) {TEAMS})" if people else f"({mine})"
    mean = f"(avg_over_time({mine}[$__interval]) and {owned})"
    several = f"count by {CARD} ({owned}) > 1"
    # Prometheus 2.42 loses labels if that of count_values sorts before those that it groups by
    number = f'count_values by {CARD} ("value", {several})'
    named = f'label_replace({number}, "user", "$1 users", "value", "(.*)")'
    shared = f"max by {CARD} ({mean}) * on {CARD} group_left (user) {named}"
    sole = f"({mean} unless on {CARD} ({several}))"
    used = (
        "count_values by (instance, gpu, uuid, user) "
        f'("value", floor(20 * ({sole} or {shared})) * 5)'
    )
    for use in USES:
        used = f'label_replace({used}, "use", "{use.word}", "value", "{use.percents}")'
    lost = f"max by {CARD} (gpu_up{{{exporters}}} == 0)"
    # whoever holds it: the choice of a user frees no card
    held = f"owner:gpu_utilization_ratio:max{{{where}}}"
    free = f"max by {CARD} (gpu_up{{{exporters}}} == 1) unless on (instance, gpu) {held}"
    cells = (
        f'label_join({used}, "cell", " · ", "user", "use") unless on (instance, gpu) {lost} '
        f'or label_replace({free}, "cell", "{FREE}", "", "") '
        f'or label_replace({lost}, "cell", "{LOST}", "", "")'
    )
    # each five minutes: the samples of a day of ten thousand cards are too many
    little = f"sum_over_time(({owned} <= bool 0.05)[$__range:5m] @ end())"
    chosen = (
        f"topk({MOST}, max by {CARD} ({little}) "
        f"or on {CARD} 0 * max by {CARD} (gpu_up{{{exporters}}} @ end()))"
    )
    row = f'label_replace(({cells}) and on {CARD} {chosen}, "number", "GPU $1", "gpu", "(.*)")'
    row = f'label_replace({row}, "slice", " $1", "uuid", "(MIG-.{{1,8}}).*")'
    row = f'label_join({row}, "number", "", "number", "slice")'
    row = f'label_join({row}, "card", " ", "instance", "number")'
    seen = f"count(gpuwarden_snapshot_timestamp_seconds{{{NODE}}} > time() - 15)"
    nodes = f'label_replace(count_values("n", {seen} or vector(0)), "cell", "$1 seen", "n", "(.*)")'
    return f'max by (card, cell) ({row} or label_replace({nodes}, "card", "{EVERY}", "", ""))'
