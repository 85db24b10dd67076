"""Draw a dashboard: `python drawing.py DATA.json PICTURE.png`, with matplotlib, which is in .venv-k8s.

Its input is the output of picture.py: the dashboard's JSON, and Prometheus' answer for each panel. The layout is
Grafana's, 24 columns wide.
"""

from __future__ import annotations

import json
import math
import sys
import textwrap
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot as plt
from matplotlib.ticker import FuncFormatter

WIDTH_IN, UNIT_IN, HEAD_IN, DPI = 15.0, 0.335, 0.62, 100
PAGE, CARD, INK, FAINT = "#111217", "#181b1f", "#d5d6da", "#7b8087"
COLOURS = ("#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#f2495c", "#b877d9", "#37872d", "#8ab8ff", "#e0b400")
NAMED = {
    "green": "#73bf69",
    "yellow": "#f2cc0c",
    "red": "#f2495c",
    "blue": "#5794f2",
    "orange": "#ff9830",
    "purple": "#b877d9",
    "text": "#ccccdc",
    "dark-orange": "#fa6400",
    "light-green": "#96d98d",
}

Series = tuple[str, list[float], list[float]]  # legend, minutes, values


def told(value: float, unit: str) -> str:
    """Return a figure with its unit, as short as possible."""
    if unit == "percentunit":
        return f"{value * 100:.3g} %"
    if unit == "s":
        if value >= 120:
            return f"{value / 60:.1f} min"
        return f"{value * 1e3:.0f} ms" if value < 1 else f"{value:.3g} s"
    after = "/s" if unit == "reqps" or unit.endswith("/s") else ""
    for limit, letter in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= limit:
            return f"{value / limit:.3g}{letter}{after}"
    return f"{value:.3g}{after}"


def series_of(panel: dict[str, Any], begun_s: float) -> list[Series]:
    """Return a panel's series without values that are not finite; in a stack also without series of only zeros."""
    found = []
    keep_noughts = not _stacked(panel)
    for target, answer in zip(panel["targets"], panel["answers"], strict=True):
        for each in answer:
            legend = target["legendFormat"]
            for label, value in each["metric"].items():
                legend = legend.replace("{{" + label + "}}", value)
            points = [(float(at), float(value)) for at, value in each["values"]]
            points = [(at, value) for at, value in points if math.isfinite(value)]
            if points and (keep_noughts or any(value for _, value in points)):
                found.append((legend, [(at - begun_s) / 60 for at, _ in points], [value for _, value in points]))
    return found


def _stacked(panel: dict[str, Any]) -> bool:
    stacking = panel["fieldConfig"]["defaults"].get("custom", {}).get("stacking") or {}
    return bool(stacking.get("mode") == "normal")


def _fixed(panel: dict[str, Any]) -> dict[str, str]:
    """Return the panel's fixed colours, by legend."""
    return {
        each["matcher"]["options"]: NAMED[setting["value"]["fixedColor"]]
        for each in panel["fieldConfig"].get("overrides", ())
        for setting in each["properties"]
        if setting["id"] == "color"
    }


def draw(data: dict[str, Any]) -> Any:  # noqa: ANN401 - matplotlib's figure
    """Draw the whole page."""
    mpl.rcParams.update({"font.family": "DejaVu Sans", "text.color": INK, "axes.edgecolor": "#2c3235"})
    mpl.rcParams.update({"xtick.color": FAINT, "ytick.color": FAINT, "font.size": 8})
    panels = [panel for panel in data["panels"] if panel["type"] not in {"row", "heatmap"}]
    rows = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    height_in = HEAD_IN + rows * UNIT_IN + 0.1
    figure = plt.figure(figsize=(WIDTH_IN, height_in), facecolor=PAGE)
    figure.text(0.008, 1 - 0.24 / height_in, data["title"], size=13, weight="bold", va="center")
    figure.text(0.008, 1 - 0.47 / height_in, data["caption"], size=8.5, color=FAINT, va="center")
    for panel in panels:
        place = panel["gridPos"]
        top = height_in - HEAD_IN - place["y"] * UNIT_IN
        left, width = place["x"] / 24 + 0.004, place["w"] / 24 - 0.008
        low, high = (top - place["h"] * UNIT_IN + 0.06) / height_in, (top - 0.02) / height_in
        card = figure.add_axes((left, low, width, high - low), facecolor=CARD)
        card.set_xticks([])
        card.set_yticks([])
        figure.text(left + 0.006, high - 0.15 / height_in, panel["title"], size=9, va="center")
        inner = (left, low, width, high - low)
        drawn = {"stat": _stat, "bargauge": _bars}.get(panel["type"], _curves)
        drawn(figure, panel, inner, height_in, data)
    return figure


def _stat(figure: Any, panel: dict[str, Any], place: tuple[float, ...], height_in: float, data: Any) -> None:  # noqa: ANN401
    left, low, width, height = place
    defaults = panel["fieldConfig"]["defaults"]
    shown = series_of(panel, data["begun_s"])
    if not shown:
        figure.text(left + width / 2, low + height * 0.45, "no data", size=14, ha="center", va="center", color=FAINT)
        return
    _, minutes, values = shown[0]
    colour = NAMED["green"]
    for step in defaults["thresholds"]["steps"]:
        if step["value"] is None or values[-1] >= step["value"]:
            colour = NAMED[step["color"]]
    spark = figure.add_axes((left + 0.002, low + 0.03 / height_in, width - 0.004, height * 0.36))
    spark.axis("off")
    spark.fill_between(minutes, values, alpha=0.18, color=colour, linewidth=0)
    spark.plot(minutes, values, color=colour, linewidth=1)
    spark.set_ylim(0, (max(values) * 1.08) or 1)
    spark.set_xlim(0, data["minutes"])
    text = told(values[-1], defaults["unit"])
    figure.text(
        left + width / 2, low + height * 0.53, text, size=20, ha="center", va="center", color=colour, weight="bold"
    )


def _bars(figure: Any, panel: dict[str, Any], place: tuple[float, ...], height_in: float, data: Any) -> None:  # noqa: ANN401
    left, low, width, height = place
    defaults = panel["fieldConfig"]["defaults"]
    shown = series_of(panel, data["begun_s"])
    axes = figure.add_axes((left + 0.06, low + 0.1 / height_in, width - 0.1, height - 0.44 / height_in), facecolor=CARD)
    axes.axis("off")
    axes.set_xlim(0, defaults.get("max") or max([values[-1] for _, _, values in shown], default=1.0))
    axes.set_ylim(len(shown) - 0.5, -0.5)
    for n, (legend, _, values) in enumerate(shown):
        axes.barh(n, values[-1], height=0.7, color=NAMED["green"])
        axes.text(-0.02, n, legend, size=8, ha="right", va="center", transform=axes.get_yaxis_transform())
        text = told(values[-1], defaults["unit"])
        axes.text(1.02, n, text, size=8, ha="left", va="center", transform=axes.get_yaxis_transform())


def _curves(figure: Any, panel: dict[str, Any], place: tuple[float, ...], height_in: float, data: Any) -> None:  # noqa: ANN401
    left, low, width, height = place
    unit = panel["fieldConfig"]["defaults"]["unit"]
    shown = series_of(panel, data["begun_s"])
    axes = figure.add_axes(
        (left + 0.034, low + 0.54 / height_in, width - 0.042, height - 0.88 / height_in), facecolor=CARD
    )
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(visible=True, color="#2c3235", linewidth=0.5)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: told(value, unit)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{int(value)}:{round(value * 60) % 60:02d}"))
    axes.locator_params(axis="y", nbins=5)
    axes.locator_params(axis="x", nbins=7)
    axes.tick_params(length=0, labelsize=7.5)
    fixed = _fixed(panel)
    colours = [fixed.get(legend, COLOURS[n % len(COLOURS)]) for n, (legend, _, _) in enumerate(shown)]
    if _stacked(panel):
        _stack(axes, shown, colours)
    else:
        for (_, minutes, values), colour in zip(shown, colours, strict=True):
            axes.plot(minutes, values, color=colour, linewidth=1.5)
    top = panel["fieldConfig"]["defaults"].get("max")
    axes.set_ylim(0, top or axes.get_ylim()[1])
    axes.set_xlim(0, data["minutes"])
    for minute, text in data["marks"]:
        axes.axvline(minute, color="#8e9299", linewidth=0.8, linestyle=(0, (3, 3)))
        if width > 0.4:
            late = minute > 0.85 * data["minutes"]
            where = {"transform": axes.get_xaxis_transform(), "ha": "right" if late else "left", "va": "bottom"}
            axes.text(minute, 1.0, text, size=7, color=FAINT, **where)
    _legend(figure, shown, colours, unit, place, height_in)


def _stack(axes: Any, shown: list[Series], colours: list[str]) -> None:  # noqa: ANN401
    at = sorted({minute for _, minutes, _ in shown for minute in minutes})
    layers = [
        [dict(zip(minutes, values, strict=True)).get(minute, 0.0) for minute in at] for _, minutes, values in shown
    ]
    if layers:
        axes.stackplot(at, layers, colors=colours, alpha=0.75, linewidth=0)


def _legend(
    figure: Any,  # noqa: ANN401
    shown: list[Series],
    colours: list[str],
    unit: str,
    place: tuple[float, ...],
    height_in: float,
) -> None:
    left, low, width, _ = place
    columns = max(1, min(4, round(width * 9)))
    if not shown:
        figure.text(left + width / 2, low + 0.3 / height_in, "no data", size=8, color=FAINT, ha="center")
    ranked = sorted(zip(shown, colours, strict=True), key=lambda each: -sum(each[0][2]))[: 2 * columns]
    for number, ((legend, _, values), colour) in enumerate(ranked):
        x = left + 0.012 + (number % columns) * (width - 0.016) / columns
        y = low + (0.24 - 0.15 * (number // columns)) / height_in
        text = textwrap.shorten(legend, 26, placeholder="...")
        figure.text(x, y, "\u25a0", size=7, color=colour, va="center")
        figure.text(x + 0.008, y, f"{text}  {told(values[-1], unit)}", size=7.5, color=INK, va="center")


if __name__ == "__main__":
    read = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
    draw(read).savefig(sys.argv[2], dpi=DPI, facecolor=PAGE)
