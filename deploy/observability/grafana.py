"""Panels as Grafana's JSON, by Grafana's own builders, so that no field of its schema is hard-coded here.

A dashboard is rows of panels, 24 columns wide; a row's panels share its width. Every query is of the data source
`$datasource`. Every panel's description has its meaning and the action to take.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from grafana_foundation_sdk.builders import (
    bargauge,
    dashboard,
    heatmap,
    prometheus,
    stat,
    statetimeline,
    table,
    timeseries,
)
from grafana_foundation_sdk.builders import common as build
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common
from grafana_foundation_sdk.models import dashboard as model
from grafana_foundation_sdk.models import heatmap as heatmap_model
from grafana_foundation_sdk.models import prometheus as prom

COLUMNS = 24
TAG = "warmroute"
ROUTER_URL = "http://127.0.0.1:8001"  # after `kubectl port-forward`
SOURCE = model.DataSourceRef("prometheus", "${datasource}")
GREEN, YELLOW, RED = "green", "yellow", "red"
CALCULATED = ["mean", "lastNotNull", "max"]

Colours = tuple[tuple[float | None, str], ...]  # lower bound of each colour; None: the lowest value
States = tuple[tuple[str, str, str], ...]  # value, text, colour


@dataclass(frozen=True)
class Panel:
    """One panel. `queries` are (expression, legend); `unit` is one of Grafana's."""

    title: str
    text: str  # meaning, and action to take
    queries: Sequence[tuple[str, str]]
    unit: str = "short"
    kind: str = "timeseries"  # or stat, bars, states, table; heatmap takes buckets, with `le` as legend
    stack: bool = False
    colours: Colours = ()
    states: States = ()
    top: float | None = None  # of the axis
    fixed: tuple[tuple[str, str], ...] = ()  # colours of series by legend, for colours with a meaning


@dataclass(frozen=True)
class Mark:
    """A line across all panels at times at which the expression has a value."""

    name: str
    expr: str
    colour: str


@dataclass(frozen=True)
class Row:
    """Panels side by side; a `title` begins a section."""

    panels: Sequence[Panel]
    height: int = 8
    title: str = ""


@dataclass(frozen=True)
class Board:
    """One dashboard. `variables` are further label names beside job and namespace: (label, metric)."""

    uid: str
    title: str
    text: str
    rows: Sequence[Row]
    variables: Sequence[tuple[str, str]] = ()
    marks: Sequence[Mark] = ()


def to_json(board: Board, boards: Sequence[Board]) -> str:
    """Return Grafana's JSON of a board that links to the other `boards`."""
    it = (
        dashboard.Dashboard(board.title)
        .uid(board.uid)
        .description(board.text)
        .tags([TAG])
        .editable()
        .tooltip(model.DashboardCursorSync.CROSSHAIR)
        .time("now-6h", "now")
        .refresh("30s")
        .timezone("browser")
    )
    it = it.with_variable(dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus"))
    for label, metric in (("job", "warmroute_build_info"), ("namespace", "warmroute_build_info"), *board.variables):
        it = it.with_variable(_variable(label, metric))
    it = it.with_variable(_router_url()).link(_page())
    for mark in board.marks:
        it = it.annotation(_annotation(mark))
    for other in boards:
        if other is not board:
            it = it.link(_link(other))
    y, number = 0, 0
    for row in board.rows:
        if row.title:
            it = it.with_row(dashboard.Row(row.title).id(100 + y).grid_pos(model.GridPos(1, COLUMNS, 0, y)))
            y += 1
        x, (width, wider) = 0, divmod(COLUMNS, len(row.panels))
        for column, panel in enumerate(row.panels):
            number += 1
            own = width + (column < wider)
            it = it.with_panel(_panel(panel).id(number).grid_pos(model.GridPos(row.height, own, x, y)))
            x += own
        y += row.height
    return json.dumps(it.build(), cls=JSONEncoder, indent=2, sort_keys=True, ensure_ascii=False) + "\n"


def _variable(label: str, metric: str) -> dashboard.QueryVariable:
    known = '{job=~"$job",namespace=~"$namespace"}' if label not in {"job", "namespace"} else ""
    everything = model.VariableOption(selected=True, text=["All"], value=["$__all"])
    return (
        dashboard.QueryVariable(label)
        .label(label.capitalize())
        .datasource(SOURCE)
        .query({"query": f"label_values({metric}{known}, {label})", "refId": label})
        .refresh(model.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .sort(model.VariableSort.ALPHABETICAL_ASC)
        .multi(True)
        .include_all(True)
        .all_value(".*")  # also for a series without such a label
        .current(everything)
    )


def _router_url() -> dashboard.TextBoxVariable:
    url = model.VariableOption(selected=True, text=ROUTER_URL, value=ROUTER_URL)
    it = dashboard.TextBoxVariable("router_url").label("Router's admin URL").default_value(ROUTER_URL)
    return it.current(url).description(
        "Address of a router's admin port for your browser, for the link to its dashboard."
    )


def _page() -> dashboard.DashboardLink:
    text = "The router's own page: advice, prompts, decisions, the last ten minutes. Set the admin URL above."
    link = dashboard.DashboardLink("Router's own page").type(model.DashboardLinkType.LINK)
    return link.url("${router_url}/dashboard").target_blank(True).tooltip(text)


def _annotation(mark: Mark) -> dashboard.AnnotationQuery:
    return (
        dashboard.AnnotationQuery()
        .name(mark.name)
        .datasource(SOURCE)
        .enable(True)
        .icon_color(mark.colour)
        .expr(mark.expr)
    )


def _link(other: Board) -> dashboard.DashboardLink:
    link = dashboard.DashboardLink(other.title).type(model.DashboardLinkType.LINK).url(f"/d/{other.uid}")
    return link.keep_time(True).include_vars(True).tooltip(other.text)


def _panel(panel: Panel) -> Any:  # noqa: ANN401 - of four unrelated builders with the same methods
    it = _KINDS[panel.kind](panel).title(panel.title).description(panel.text).datasource(SOURCE).unit(panel.unit)
    for number, (expr, legend) in enumerate(panel.queries):
        query = prometheus.Dataquery().expr(expr).legend_format(legend).ref_id(chr(ord("A") + number))
        if panel.kind == "table":
            query = query.instant().format(prom.PromQueryFormat.TABLE)
        if panel.kind == "heatmap":
            query = query.format(prom.PromQueryFormat.HEATMAP)
        it = it.with_target(query.datasource(SOURCE))
    steps = [model.Threshold(value, colour) for value, colour in panel.colours or ((None, GREEN),)]
    it = it.thresholds(dashboard.ThresholdsConfig().mode(model.ThresholdsMode.ABSOLUTE).steps(steps))
    if panel.states:
        results = {value: model.ValueMappingResult(text, colour) for value, text, colour in panel.states}
        it = it.mappings([model.ValueMap(results)])
    return it.no_value("no data")


def _series(panel: Panel) -> timeseries.Panel:
    legend = build.VizLegendOptions().show_legend(True).placement(common.LegendPlacement.BOTTOM)
    legend = legend.display_mode(common.LegendDisplayMode.TABLE).calcs(CALCULATED)
    it = timeseries.Panel().legend(legend).line_width(2).fill_opacity(70 if panel.stack else 8)
    it = it.tooltip(build.VizTooltipOptions().mode(common.TooltipDisplayMode.MULTI))
    it = it.show_points(common.VisibilityMode.NEVER).axis_soft_min(0)
    if panel.stack:
        it = it.stacking(build.StackingConfig().mode(common.StackingMode.NORMAL))
    if panel.colours:
        style = build.GraphThresholdsStyleConfig().mode(common.GraphThresholdsStyleMode.DASHED)
        it = it.thresholds_style(style)
    for name, colour in panel.fixed:
        it = it.override_by_name(name, [model.DynamicConfigValue("color", {"mode": "fixed", "fixedColor": colour})])
    return it.max(panel.top) if panel.top is not None else it


def _stat(panel: Panel) -> stat.Panel:
    last = build.ReduceDataOptions().calcs(["lastNotNull"])
    by_threshold = dashboard.FieldColor().mode(model.FieldColorModeId.THRESHOLDS)
    it = stat.Panel().reduce_options(last).graph_mode(common.BigValueGraphMode.AREA).color_scheme(by_threshold)
    return it.color_mode(common.BigValueColorMode.VALUE)


def _bars(panel: Panel) -> bargauge.Panel:
    last = build.ReduceDataOptions().calcs(["lastNotNull"])
    it = bargauge.Panel().reduce_options(last).orientation(common.VizOrientation.HORIZONTAL).min(0)
    it = it.display_mode(common.BarGaugeDisplayMode.BASIC).show_unfilled(True)
    return it.max(panel.top) if panel.top is not None else it


def _states(panel: Panel) -> statetimeline.Panel:
    by_threshold = dashboard.FieldColor().mode(model.FieldColorModeId.THRESHOLDS)
    it = statetimeline.Panel().merge_values(True).row_height(0.8).line_width(0).color_scheme(by_threshold)
    return it.show_value(common.VisibilityMode.NEVER)


def _heatmap(panel: Panel) -> heatmap.Panel:
    it = heatmap.Panel().calculate(False).show_legend().color(_HEAT)
    return it.y_axis(heatmap.YAxisConfig().unit(panel.unit)).cell_gap(1)


_HEAT = heatmap.HeatmapColorOptions().mode(heatmap_model.HeatmapColorMode.SCHEME).scheme("Blues").steps(32)
_KINDS: dict[str, Any] = {
    "timeseries": _series,
    "stat": _stat,
    "bars": _bars,
    "states": _states,
    "heatmap": _heatmap,
    "table": lambda panel: table.Panel(),
}
