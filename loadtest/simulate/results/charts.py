"""Charts of the race in plain SVG: hit rate against time to first token, and time to first token over load.

Hit rate is not the goal, and the first chart shows why: a policy at the upper right finds nearly all tokens cached and
lets its clients wait. Time is on a logarithmic scale because policies differ by factors. Every point and line has its
name at the right edge, joined by a thin line: two dozen names have no other place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10
from pathlib import Path

from loadtest.common.report import Row
from loadtest.common.svg import COLOURS, OTHER_COLOURS
from loadtest.simulate.results.claims import LEAST, WARM
from loadtest.simulate.results.tables import loads_in, seconds

PLOT_WIDTH, LABELS_WIDTH, AXIS_WIDTH, GAP = 330, 230, 64, 30
TOP, FOOT, LABEL_HEIGHT, PLOT_HEIGHT_MIN = 50, 54, 14, 260
PANEL_WIDTH = AXIS_WIDTH + PLOT_WIDTH + LABELS_WIDTH + GAP
GREY, INK, FAINT = "#5f6b7a", "#1f2933", "#e4e7eb"


@dataclass(frozen=True, slots=True)
class Series:
    """A policy in a panel. `points` are (x from 0 to 1, seconds)."""

    name: str
    points: tuple[tuple[float, float], ...]
    bound: bool = False


@dataclass(frozen=True, slots=True)
class Panel:
    """One chart. `marks` are the positions of the x axis marks and their labels."""

    title: str
    x_title: str
    marks: tuple[tuple[float, str], ...]
    series: tuple[Series, ...]


def write_charts(path: Path, rows: Sequence[Row], title: str) -> None:
    """Draw rows over seeds: hit rate against TTFT for each workload, and TTFT over load if there are several loads."""
    path.write_text(svg(rows, title), encoding="utf-8")


def svg(rows: Sequence[Row], title: str) -> str:
    """Return the charts as SVG text, one line of panels for each workload."""
    lines = []
    for workload in dict.fromkeys(row.workload or "" for row in rows):
        same = [row for row in rows if (row.workload or "") == workload]
        loads = loads_in(same)
        middle = "at" if "at" in loads else loads[0]
        panels = [pareto([row for row in same if (row.load_name or "") == middle], f"{workload}, {middle}")]
        if len(loads) > 1:
            panels.append(over_load(same, workload))
        lines.append(panels)
    return _render_svg(lines, title)


def pareto(rows: Sequence[Row], title: str) -> Panel:
    """Return a chart with one point for each policy: token hit rate on the x axis, p90 TTFT on the y axis."""
    series = [
        Series(row.policy or "", ((row.token_hit_rate or 0.0, row.ttft_p90_s),), bool(row.bound))
        for row in rows
        if row.ttft_p90_s is not None
    ]
    marks = tuple((share / 100, f"{share} %") for share in range(0, 101, 20))
    return Panel(title, "tokens found cached", marks, tuple(series))


def over_load(rows: Sequence[Row], title: str) -> Panel:
    """Return a chart with one line for each policy: p90 TTFT at each load."""
    loads = loads_in(rows)
    at = {load: (i + 0.5) / len(loads) for i, load in enumerate(loads)}
    points: dict[str, list[tuple[float, float]]] = {}
    bounds = {row.policy for row in rows if row.bound}
    for row in sorted(rows, key=lambda row: at[row.load_name or ""]):
        if row.ttft_p90_s is not None:
            points.setdefault(row.policy or "", []).append((at[row.load_name or ""], row.ttft_p90_s))
    series = tuple(Series(name, tuple(found), name in bounds) for name, found in points.items())
    return Panel(f"{title}, over load", "load", tuple((x, name) for name, x in at.items()), series)


def _render_svg(lines: Sequence[Sequence[Panel]], title: str) -> str:
    width = 20 + PANEL_WIDTH * max((len(panels) for panels in lines), default=1)
    parts, y = [_text(20, 30, title, size=17, weight=600)], 44.0
    for panels in lines:
        height = max(PLOT_HEIGHT_MIN, LABEL_HEIGHT * max(len(panel.series) for panel in panels))
        for i, panel in enumerate(panels):
            parts += _panel(panel, 20 + i * PANEL_WIDTH, y, height)
        y += TOP + height + FOOT
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{y:.0f}" viewBox="0 0 {width} {y:.0f}"'
        ' font-family="system-ui, sans-serif" font-size="12">'
    )
    return "\n".join([head, f'<rect width="{width}" height="{y:.0f}" fill="#ffffff"/>', *parts, "</svg>", ""])


def _panel(panel: Panel, left: float, top: float, height: float) -> list[str]:
    x0, y0 = left + AXIS_WIDTH, top + TOP
    values = [value for series in panel.series for _, value in series.points]
    low, high = _decades(values)

    def x_of(share: float) -> float:
        return x0 + share * PLOT_WIDTH

    def y_of(value_s: float) -> float:
        return y0 + height * (high - log10(max(value_s, LEAST))) / (high - low)

    parts = [
        _text(left, top + 20, panel.title, size=14, weight=600),
        _text(left, top + 38, "p90 TTFT", colour=GREY),
        _text(x0 + PLOT_WIDTH / 2, y0 + height + 38, panel.x_title, anchor="middle", colour=GREY),
    ]
    for value in _ticks(low, high):
        y = y_of(value)
        parts.append(_line(x0, y, x0 + PLOT_WIDTH, y, FAINT))
        parts.append(_text(x0 - 8, y + 4, seconds(value), anchor="end", colour=GREY))
    for share, label in panel.marks:
        parts.append(_line(x_of(share), y0, x_of(share), y0 + height, FAINT))
        parts.append(_text(x_of(share), y0 + height + 18, label, anchor="middle", colour=GREY))
    return parts + _series(panel, x_of, y_of, (y0, y0 + height))


def _series(
    panel: Panel, x_of: Callable[[float], float], y_of: Callable[[float], float], room: tuple[float, float]
) -> list[str]:
    """Draw points and lines with their names beside them. `warm` comes last and so on top."""
    ends = sorted((y_of(series.points[-1][1]), i) for i, series in enumerate(panel.series))
    label_y = dict(zip((i for _, i in ends), _spread_labels([y for y, _ in ends], *room), strict=True))
    x_label = x_of(1.0) + 16
    parts = []
    for i in sorted(range(len(panel.series)), key=lambda i: panel.series[i].name == WARM):
        series = panel.series[i]
        ours, colour = series.name == WARM, _colour(series, i)
        points = [(x_of(x), y_of(value)) for x, value in series.points]
        dash = ' stroke-dasharray="5 3"' if series.bound else ""
        if len(points) > 1:
            path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
            weight = 3 if ours else 1.3
            parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{weight}"{dash}/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{5 if ours else 3.5}" fill="{colour}"/>' for x, y in points]
        x, y = points[-1]
        parts.append(_line(x, y, x_label - 4, label_y[i], colour, width=0.6, opacity=0.5))
        label = f"{series.name}, {seconds(series.points[-1][1])}"
        parts.append(_text(x_label, label_y[i] + 4, label, weight=600 if ours else 400, colour=INK))
    return parts


def _spread_labels(wanted: Sequence[float], first: float, last: float) -> list[float]:
    """Return places in the same ascending order, at least a label's height apart. Each is as near to its wanted place
    as possible."""
    places: list[float] = []
    for y in wanted:
        places.append(max(y, places[-1] + LABEL_HEIGHT if places else first))
    for i in reversed(range(len(places))):
        most = last if i == len(places) - 1 else places[i + 1] - LABEL_HEIGHT
        places[i] = min(places[i], most)
    return places


def _decades(values: Sequence[float]) -> tuple[float, float]:
    """Return the powers of ten, in steps of a third, around the values."""
    logs = [log10(max(value, LEAST)) for value in values] or [0.0]
    low, high = floor(3 * min(logs)) / 3, ceil(3 * max(logs)) / 3
    return (low, high) if high > low else (low, low + 1)


def _ticks(low: float, high: float) -> list[float]:
    found = [digit * 10.0**power for power in range(floor(low), ceil(high) + 1) for digit in (1, 2, 5)]
    return [value for value in found if low - 1e-9 <= log10(value) <= high + 1e-9]


def _colour(series: Series, number: int) -> str:
    if series.bound:
        return GREY
    if series.name.partition("_")[0] == WARM:
        return COLOURS[WARM]
    return COLOURS.get(series.name, OTHER_COLOURS[number % len(OTHER_COLOURS)])


def _line(x: float, y: float, x2: float, y2: float, colour: str, *, width: float = 1, opacity: float = 1) -> str:
    return (
        f'<line x1="{x:.1f}" y1="{y:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}" stroke-width="{width}"'
        f' opacity="{opacity}"/>'
    )


def _text(
    x: float, y: float, text: str, *, size: int = 12, weight: int = 400, anchor: str = "start", colour: str = INK
) -> str:
    return (
        f'<text x="{x:.1f}" y="{y:.1f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}"'
        f' fill="{colour}">{escape(text)}</text>'
    )
