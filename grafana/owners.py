"""The grid of owners: a row per card, in it the name of who holds it, coloured by how it is used.

Grafana colours a cell by the value that it writes into it, and Prometheus' values are numbers. So a
recording rule puts owner and use into labels, and the query into one, as in `ana · idle`: a series
stands for each text of a card. Asked for as a table, that label becomes a column of words; a matrix
makes a column of it for each card; and a mapping takes the word of use away and leaves its colour.

A time without a word for a card stays a gap. Since a state lasts until the next one, a fleet that
falls silent altogether would seem to go on: the first row counts the nodes, and always has a word.
"""

from __future__ import annotations

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


USES = {
    "not measured": GREY,
    "idle": RED,
    "low": ORANGE,
    "part": YELLOW,
    "busy": GREEN,
}
"""Words of the recorded series for how a held card is used, and the colours of the cells."""

FREE, LOST = "free", "lost"
"""Its words for a card that nobody holds, and for one that does not answer."""

SHORT = "idle|not measured"
"""Uses by which a card comes to the top of a large fleet."""


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
    coloured = [(f"^(.+) · {word}$", "$1", colour) for word, colour in USES.items()]
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
    whose = ',user=~"$user"' if people else ""
    # whoever holds it: the choice of a user frees no card
    others = f'card:owner_use:info{{{where},user=""}}'

    def held(extra: str = "") -> str:
        mine = f'card:owner_use:info{{{where},user!=""{whose}{extra}}}'
        return f"({mine} and on (user) {TEAMS})" if people else mine

    def seen(found: str) -> str:
        """How often in the shown time: every five minutes, or it would be too much."""
        return f"max by {CARD} (count_over_time(({found})[$__range:5m] @ end()))"

    little = held(f',use=~"{SHORT}"')
    chosen = (
        f"topk({MOST}, {seen(little)} or on {CARD} {seen(held())} / 1000 "
        f"or on {CARD} {seen(others)} * 0)"
    )
    row = f"({held()} or {others}) and on {CARD} {chosen}"
    for label, text, source, pattern in (
        ("who", "$1 · ", "user", "(.+)"),
        ("who", "$1 users · ", "owners", "([2-9]|[1-9].+)"),
        ("number", "GPU $1", "gpu", "(.*)"),
        ("slice", " $1", "uuid", "(MIG-.{1,8}).*"),
    ):
        row = f'label_replace({row}, "{label}", "{text}", "{source}", "{pattern}")'
    row = f'label_join({row}, "cell", "", "who", "use")'
    row = f'label_join({row}, "number", "", "number", "slice")'
    row = f'label_join({row}, "card", " ", "instance", "number")'
    lit = f"count(gpuwarden_snapshot_timestamp_seconds{{{NODE}}} > time() - 15)"
    nodes = f'label_replace(count_values("n", {lit} or vector(0)), "cell", "$1 seen", "n", "(.*)")'
    return f'max by (card, cell) ({row} or label_replace({nodes}, "card", "{EVERY}", "", ""))'
