"""House defaults for panels: every board builds from these, so that all look and behave alike.

The SDK is in public preview and renames methods between releases: it is pinned, and only this
module and the boards touch it. A panel is a builder that `Dashboard.with_panel` takes and places.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
    text,
    timeseries,
)
from grafana_foundation_sdk.models.common import (
    BigValueColorMode,
    BigValueGraphMode,
    BigValueTextMode,
    DataSourceRef,
    LegendDisplayMode,
    LegendPlacement,
    SortOrder,
    StackingMode,
    TooltipDisplayMode,
    VisibilityMode,
    VizOrientation,
)
from grafana_foundation_sdk.models.dashboard import (
    DashboardLinkType,
    DataTransformerConfig,
    DynamicConfigValue,
    FieldColorModeId,
    Threshold,
    ThresholdsMode,
    ValueMap,
    ValueMappingResult,
)
from grafana_foundation_sdk.models.prometheus import PromQueryFormat
from grafana_foundation_sdk.models.text import TextMode

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from grafana.links import Link

SOURCE = DataSourceRef("prometheus", "${datasource}")
"""The one data source: never a fixed uid, so that a board works beside any Prometheus."""

RED, ORANGE, YELLOW, GREEN, BLUE, GREY = "red", "orange", "yellow", "green", "blue", "#8e8e8e"

NOT_KNOWN = "-1"
"""What a query gives where a value cannot be had; shown as n/a, never as a number."""

STAT_HEIGHT, GRAPH_HEIGHT, TABLE_HEIGHT = 4, 8, 9

PanelT = TypeVar("PanelT", bound=Any)


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table.

    Attributes:
        field: label name, or `Value #A` for the value of query A.
        title: heading.
        unit: Grafana's unit, or an empty string for text.
        links: what a click on a cell leads to; several make a menu.
        steps: (from, colour) thresholds that colour the cell's text.
        width: in pixels; 0 leaves it to Grafana.
        names: text for single values, with their colour: states as words.
    """

    field: str
    title: str
    unit: str = ""
    links: tuple[Link, ...] = ()
    steps: tuple[tuple[float | None, str], ...] = ()
    width: int = 0
    names: tuple[tuple[str, str, str], ...] = ()


def query(expression: str, legend: str = "", ref: str = "A") -> prometheus.Dataquery:
    """A query over the range of the board, one line per legend."""
    return (
        prometheus.Dataquery()
        .datasource(SOURCE)
        .expr(_one_line(expression))
        .legend_format(legend)
        .ref_id(ref)
        .range()
    )


def now(expression: str, legend: str = "", ref: str = "A") -> prometheus.Dataquery:
    """A query of one moment, the end of the board's range: for stats and bars."""
    return query(expression, legend, ref).instant()


def rows(expression: str, ref: str = "A") -> prometheus.Dataquery:
    """A query of one moment whose series are the rows of a table."""
    return query(expression, "", ref).instant().format(PromQueryFormat.TABLE)


def number(
    title: str,
    description: str,
    target: prometheus.Dataquery,
    *,
    unit: str = "none",
    steps: Sequence[tuple[float | None, str]] = ((None, BLUE),),
    states: Sequence[tuple[str, str, str]] = (),
    named: bool = False,
    span: int = 3,
    height: int = STAT_HEIGHT,
) -> stat.Panel:
    """One figure of this moment. An empty answer shows Grafana's "No data": collection is dead.

    Args:
        title: of the panel.
        description: what it says.
        target: the query.
        unit: Grafana's.
        steps: (from, colour).
        states: (value, name, colour) of single values; without one for -1 that reads n/a.
        named: with the legend beside each figure, as for a sum per currency.
        span: columns of 24.
        height: rows of the board.
    """
    panel = (
        stat.Panel()
        .with_target(target)
        .graph_mode(BigValueGraphMode.NONE)
        .color_mode(BigValueColorMode.BACKGROUND_SOLID)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .thresholds(_steps(steps))
        .mappings([named_states(states)])
        .text_mode(BigValueTextMode.VALUE_AND_NAME if named else BigValueTextMode.AUTO)
        .height(height)
        .span(span)
    )
    return _dress(panel, title, description, unit=unit)


def graph(
    title: str,
    description: str,
    targets: Sequence[prometheus.Dataquery],
    *,
    unit: str,
    span: int = 12,
    stacked: bool = False,
    highest: float | None = None,
    colours: Mapping[str, str] | None = None,
    styles: Mapping[str, str] | None = None,
    links: Sequence[Link] = (),
) -> timeseries.Panel:
    """Lines over time, or areas on one another; gaps in the data stay gaps.

    Args:
        title: of the panel.
        description: what it shows.
        targets: the queries.
        unit: Grafana's.
        span: columns of 24.
        stacked: areas on one another.
        highest: end of the axis.
        colours: of lines, by name.
        styles: lines by name: `dashed` (what is expected), `limit` (dashed, and on no other area),
            `points` (single moments).
        links: what a click on a line leads to.
    """
    panel = (
        timeseries.Panel()
        .targets(list(targets))
        .line_width(1)
        .fill_opacity(40 if stacked else 8)
        .show_points(VisibilityMode.NEVER)
        .span_nulls(span_nulls=False)
        .min(0)
        .legend(
            common.VizLegendOptions()
            .display_mode(LegendDisplayMode.LIST)
            .placement(LegendPlacement.BOTTOM)
            .show_legend(show_legend=True)
        )
        .tooltip(
            common.VizTooltipOptions().mode(TooltipDisplayMode.MULTI).sort(SortOrder.DESCENDING)
        )
        .height(GRAPH_HEIGHT)
        .span(span)
    )
    if stacked:
        panel = panel.stacking(common.StackingConfig().mode(StackingMode.NORMAL).group("A"))
    if highest is not None:
        panel = panel.max(highest)
    for name, colour in (colours or {}).items():
        fixed = {"mode": "fixed", "fixedColor": colour}
        panel = panel.override_by_name(name, [DynamicConfigValue("color", fixed)])
    if links:
        panel = panel.data_links([_data_link(link) for link in links])
    for name, style in (styles or {}).items():
        panel = panel.override_by_name(name, [DynamicConfigValue(*one) for one in _STYLES[style]])
    return _dress(panel, title, description, unit=unit)


_STYLES: dict[str, tuple[tuple[str, object], ...]] = {
    "dashed": (
        ("custom.lineStyle", {"fill": "dash", "dash": [8, 8]}),
        ("custom.fillOpacity", 0),
    ),
    "limit": (
        ("custom.lineStyle", {"fill": "dash", "dash": [8, 8]}),
        ("custom.fillOpacity", 0),
        ("custom.stacking", {"mode": "none", "group": "A"}),
    ),
    "points": (
        ("custom.drawStyle", "points"),
        ("custom.pointSize", 9),
        ("custom.showPoints", "always"),
    ),
}


def timeline(
    title: str,
    description: str,
    targets: Sequence[prometheus.Dataquery],
    *,
    states: Sequence[tuple[str, str, str]],
    span: int = 24,
    height: int = GRAPH_HEIGHT,
) -> statetimeline.Panel:
    """States over time, a row per series; a gap in the data stays a gap.

    Args:
        title: of the panel.
        description: what it shows.
        targets: queries whose values are states.
        states: (value, name, colour) of each: colours come from these alone, never from thresholds.
        span: columns of 24.
        height: rows of the board.
    """
    panel = states_panel(title, description, targets, span=span, height=height)
    return panel.mappings([named_states(states)]).legend(
        common.VizLegendOptions()
        .display_mode(LegendDisplayMode.LIST)
        .placement(LegendPlacement.BOTTOM)
        .show_legend(show_legend=True)
    )


def states_panel(
    title: str,
    description: str,
    targets: Sequence[prometheus.Dataquery],
    *,
    span: int = 24,
    height: int = GRAPH_HEIGHT,
) -> statetimeline.Panel:
    """The same without names for its states, and without a legend."""
    panel = (
        statetimeline.Panel()
        .targets(list(targets))
        .show_value(VisibilityMode.AUTO)
        .row_height(0.85)
        .merge_values(merge_values=True)
        .per_page(20)
        .span_nulls(span_nulls=False)
        .color_scheme(dashboard.FieldColor().mode(FieldColorModeId.FIXED).fixed_color(GREY))
        .legend(common.VizLegendOptions().show_legend(show_legend=False))
        .tooltip(common.VizTooltipOptions().mode(TooltipDisplayMode.SINGLE))
        .height(height)
        .span(span)
    )
    return _dress(panel, title, description, unit="none")


def named_states(states: Sequence[tuple[str, str, str]]) -> ValueMap:
    """Mapping of (value, name, colour), with n/a for what is not known."""
    texts = {NOT_KNOWN: ValueMappingResult(text="n/a", color=GREY, index=0)}
    for place, (value, name, colour) in enumerate(states, 1):
        texts[value] = ValueMappingResult(text=name, color=colour, index=place)
    return ValueMap(texts)


def heat(
    title: str,
    description: str,
    target: prometheus.Dataquery,
    *,
    unit: str,
    span: int = 12,
) -> heatmap.Panel:
    """Density over time of a classic histogram: `target` gives a series per bucket, named by `le`.

    The query is `sum by (le) (increase(<name>_bucket{...}[$__rate_interval]))` with the legend
    `{{le}}`; `unit` is that of the buckets' bounds.
    """
    panel = (
        heatmap.Panel()
        .with_target(target.format(PromQueryFormat.HEATMAP))
        .calculate(calculate=False)
        # few decisions a day: a cell of half an hour can be seen, one of a pixel cannot
        .max_data_points(60)
        .y_axis(heatmap.YAxisConfig().unit(unit))
        .cell_gap(1)
        .filter_values(heatmap.FilterValueRange().le(1e-9))
        .show_legend()
        .height(GRAPH_HEIGHT)
        .span(span)
    )
    return _dress(panel, title, description, unit=unit)


def note(title: str, description: str, content: str, *, span: int = 24, height: int = 3) -> Any:
    """A text in Markdown: what is measured, what is an estimate, and by which formula."""
    panel = (
        text.Panel()
        .mode(TextMode.MARKDOWN)
        .content(content.strip())
        .title(title)
        .description(description)
        .height(height)
        .span(span)
    )
    return panel.transparent(transparent=True)


def bars(
    title: str,
    description: str,
    targets: Sequence[prometheus.Dataquery],
    *,
    unit: str,
    span: int = 8,
    height: int = GRAPH_HEIGHT,
) -> bargauge.Panel:
    """One bar per series, of this moment."""
    panel = (
        bargauge.Panel()
        .targets(list(targets))
        .orientation(VizOrientation.HORIZONTAL)
        .reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
        .color_scheme(dashboard.FieldColor().mode(FieldColorModeId.CONTINUOUS_YL_RD))
        # left to itself, Grafana draws letters as high as the bar: one bar would shout
        .text(common.VizTextDisplayOptions().title_size(14).value_size(18))
        .min(0)
        .height(height)
        .span(span)
    )
    return _dress(panel, title, description, unit=unit)


def listing(
    title: str,
    description: str,
    targets: Sequence[prometheus.Dataquery],
    *,
    columns: Sequence[Column],
    sort: tuple[str, bool] | None = None,
    span: int = 24,
    height: int = TABLE_HEIGHT,
) -> table.Panel:
    """A table of this moment; several queries are merged by the labels they share.

    `sort` is the heading of a column, and whether its highest values come first.

    A query whose series are missing would take its column with it: end such a query in
    `or <every row> * 0 - 1`, which is shown as n/a.
    """
    order = {column.field: place for place, column in enumerate(columns)}
    # One query's values are called Value, those of several Value #A, Value #B, ...
    values = {"Value", *(f"Value #{target.build().ref_id}" for target in targets)}
    panel = (
        table.Panel()
        .targets(list(targets))
        .with_transformation(DataTransformerConfig("merge", options={}))
        .with_transformation(
            DataTransformerConfig(
                "organize",
                options={
                    "includeByName": dict.fromkeys(order, True),
                    "excludeByName": dict.fromkeys(sorted({"Time", *values} - set(order)), True),
                    "indexByName": order,
                    "renameByName": {column.field: column.title for column in columns},
                },
            )
        )
        .mappings([named_states(())])
        .height(height)
        .span(span)
    )
    if sort is not None:
        panel = panel.sort_by([common.TableSortByFieldState().display_name(sort[0]).desc(sort[1])])
    for column in columns:
        properties = _properties(column)
        if properties:
            panel = panel.override_by_name(column.title, properties)
    return _dress(panel, title, description, unit="none")


def _properties(column: Column) -> list[DynamicConfigValue]:
    found = []
    if column.unit:
        found.append(DynamicConfigValue("unit", column.unit))
    if column.links:
        found.append(DynamicConfigValue("links", [_link(link) for link in column.links]))
    if column.steps:
        steps = [{"value": value, "color": colour} for value, colour in column.steps]
        found += [
            DynamicConfigValue("thresholds", {"mode": "absolute", "steps": steps}),
            DynamicConfigValue("custom.cellOptions", {"type": "color-text"}),
        ]
    if column.names:
        # an override replaces the panel's mappings: n/a has to be said again
        texts = {NOT_KNOWN: {"text": "n/a", "color": GREY, "index": 0}} | {
            value: {"text": text, "color": colour, "index": place}
            for place, (value, text, colour) in enumerate(column.names, 1)
        }
        found += [
            DynamicConfigValue("mappings", [{"type": "value", "options": texts}]),
            # what has no name of these is plain, and not in the colour of a threshold
            DynamicConfigValue(
                "thresholds", {"mode": "absolute", "steps": [{"value": None, "color": "text"}]}
            ),
            DynamicConfigValue("custom.cellOptions", {"type": "color-text"}),
        ]
    if column.width:
        found.append(DynamicConfigValue("custom.width", column.width))
    return found


def _data_link(link: Link) -> dashboard.DashboardLink:
    return (
        dashboard.DashboardLink(link.title)
        .type(DashboardLinkType.LINK)
        .url(link.url)
        .target_blank(link.elsewhere)
    )


def _link(link: Link) -> dict[str, object]:
    return {"title": link.title, "url": link.url, "targetBlank": link.elsewhere}


def _dress(panel: PanelT, title: str, description: str, *, unit: str) -> PanelT:
    return panel.title(title).description(description).unit(unit).datasource(SOURCE)


def _steps(steps: Sequence[tuple[float | None, str]]) -> dashboard.ThresholdsConfig:
    return (
        dashboard.ThresholdsConfig()
        .mode(ThresholdsMode.ABSOLUTE)
        .steps([Threshold(value, colour) for value, colour in steps])
    )


def _one_line(expression: str) -> str:
    return " ".join(expression.split())
