"""Rows as a plain SVG picture: bars of the charted fields side by side. The picture has no external resources."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from textwrap import wrap

from loadtest.common.report import CHARTED, Column, Row, format_field, group_rows, largest

PANEL_WIDTH, LABEL_WIDTH, VALUE_WIDTH, BAR_HEIGHT, GROUP_GAP, TOP = 470, 90, 60, 20, 34, 78
NOTE_CHARACTERS = 140
COLOURS = {"round_robin": "#9aa5b1", "warm": "#e4572e", "nginx": "#9aa5b1", "warmroute": "#e4572e"}
OTHER_COLOURS = ("#4c78a8", "#72b7b2", "#eeca3b", "#b279a2", "#54a24b")


def svg_chart(rows: Sequence[Row], title: str, notes: Sequence[str], charted: Sequence[Column] = CHARTED) -> str:
    """Return the charted fields side by side as one SVG picture, with the run's fixed parameters under it."""
    panels = [(column, group_rows(rows, column)) for column in charted]
    notes = [line for note in notes for line in wrap(note, NOTE_CHARACTERS)]
    heights = [sum(GROUP_GAP + BAR_HEIGHT * len(group) for _, group in groups) for _, groups in panels]
    body_height = max(heights, default=0)
    height = TOP + body_height + 24 + 17 * len(notes)
    width = PANEL_WIDTH * len(charted) + 40
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}"'
            f' viewBox="0 0 {width} {height}" font-family="system-ui, sans-serif" font-size="13">'
        ),
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        _text(20, 30, title, 'font-size="17" font-weight="600"'),
    ]
    for i, (column, groups) in enumerate(panels):
        parts += _panel(20 + i * PANEL_WIDTH, groups, column)
    for i, note in enumerate(notes):
        style = 'font-size="12" fill="#5f6b7a"'
        parts.append(_text(20, TOP + body_height + 24 + 17 * i, note, style))
    return "\n".join([*parts, "</svg>", ""])


def _panel(left: int, groups: Sequence[tuple[str, Sequence[Row]]], column: Column) -> list[str]:
    parts = [_text(left, TOP - 18, column.title, 'font-weight="600"')]
    room = PANEL_WIDTH - LABEL_WIDTH - VALUE_WIDTH - 20
    y = TOP
    for workload, group in groups:
        top = largest(group, column)
        parts.append(_text(left, y + 12, workload, 'fill="#5f6b7a"'))
        y += 20
        for i, row in enumerate(group):
            size = room * (getattr(row, column.name) or 0.0) / top if top else 0.0
            label = row.policy or row.router or ""
            colour = COLOURS.get(label, OTHER_COLOURS[i % len(OTHER_COLOURS)])
            parts += [
                _text(left + LABEL_WIDTH - 8, y + 14, label, 'text-anchor="end"'),
                (
                    f'<rect x="{left + LABEL_WIDTH}" y="{y + 2}" width="{size:.1f}" height="{BAR_HEIGHT - 4}"'
                    f' rx="2" fill="{colour}"/>'
                ),
                _text(left + LABEL_WIDTH + int(size) + 6, y + 14, format_field(row, column)),
            ]
            y += BAR_HEIGHT
        y += GROUP_GAP - 20
    return parts


def _text(x: int, y: int, text: str, style: str = "") -> str:
    return f'<text x="{x}" y="{y}" {style}>{escape(text)}</text>'
