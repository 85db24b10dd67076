"""Findings as text, in tables of rich if it is installed, otherwise in plain ones.

Text of a log may come from any client: characters that a terminal would interpret are not shown.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import wrap
from typing import Any

from router.cli.audit.findings import Findings
from router.core.insights.ledger.advice import NOTHING

ADVICE_SHOWN_MAX, TEMPLATES_SHOWN_MAX, GROUPS_SHOWN_MAX = 20, 10, 10  # --json has more
WIDTH = 100
GAP = "  "
TEXT_WIDTH_MIN = 40


@dataclass(frozen=True, slots=True)
class Table:
    """Table of text. Cells of columns named in `words` are wrapped and aligned left, others right."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    words: Sequence[str]


def print_findings(findings: Findings, unread: Sequence[str], *, excerpts: bool) -> None:
    """Print the findings to standard output."""
    tables = [_reasons(findings), _places(findings), _advice(findings, excerpts=excerpts)]
    tables.append(_templates(findings, excerpts=excerpts))
    if len(findings.groups) > 1:
        tables.append(_groups(findings))
    head = _headline(findings.figures)
    head += [f"Warning: {each}" for each in findings.figures["warnings"]]
    if findings.figures["requests"] and not findings.advice:
        head.append(f"{NOTHING} can be saved by changes of prompts.")
    foot = [*_remarks(findings.figures), *map(_clean, unread)]
    if importlib.util.find_spec("rich") is not None and sys.stdout.isatty():
        _print_rich(head, [table for table in tables if table.rows], foot)
    else:
        parts = ["\n".join(head), *(plain(table) for table in tables if table.rows), "\n".join(foot)]
        print("\n\n".join(part for part in parts if part))


# -- contents ----------------------------------------------------------------------------------------------------------


def _headline(figures: dict[str, Any]) -> list[str]:
    now, genuine, replay, mended = (
        _percent(figures[name]) for name in ("hit_rate", "genuine_hit_rate", "replay_hit_rate", "mended_hit_rate")
    )
    served = [f"{figures['served_requests']:,} requests in a router's own log."] if figures["served_requests"] else []
    if not figures["requests"]:
        return [*served, "The log has no prompts. Advice needs a log with prompts."]
    lines = [
        *served,
        (
            f"{figures['requests']:,} requests, {figures['prompt_tokens']:,} prompt tokens"
            f" ({_describe_counting(figures)})."
        ),
        "Best possible hit rate, with one cache that is large enough for all prompts:",
        f"  {now} with the prompts as logged ({genuine} genuine, {replay} replays)",
        f"  {mended} without the differences below",
    ]
    if figures["logged_hit_rate"] is not None:
        part = figures["logged_prompt_tokens"] / max(1, figures["prompt_tokens"])
        of = "" if part > 0.99 else f" (logged for {part:.0%} of all tokens)"
        lines.append(f"Actual hit rate, by the usage in the log: {_percent(figures['logged_hit_rate'])}{of}.")
    if figures["replays"]:
        lines.append(
            f"{figures['replays']:,} requests are replays of an earlier identical prompt. "
            f"{_percent(figures['diversity'])} of the prompts are not replays."
        )
    return lines


def _describe_counting(figures: dict[str, Any]) -> str:
    names = {
        "usage": "by logged usage",
        "tokenizer": "by the tokenizer",
        "ids": "given as ids",
        "bytes": "estimated by bytes",
    }
    counted = figures["counted_by"]
    if not counted:
        return "estimated by bytes"
    if len(counted) == 1:
        return names[next(iter(counted))]
    return ", ".join(f"{requests:,} requests {names[by]}" for by, requests in counted.items())


def _remarks(figures: dict[str, Any]) -> list[str]:
    lines = []
    if figures["requests"]:
        rate = figures["prefill_tokens_per_s"]
        lines.append(f"GPU seconds assume {rate:,.0f} prefill tokens per second (--prefill-tokens-per-s).")
    if held := figures["served_held"]:
        total = sum(held.values())
        why = ", ".join(f"{cause} {tokens / total:.0%}" for cause, tokens in held.items())
        lines.append(f"Reasons why requests were not placed on a replica with more cached tokens: {why}.")
    if figures["served_untold"]:
        untold = figures["served_untold"]
        lines.append(f"{untold:,} requests of the router's log have no token places: no engine computed them.")
    if figures["forgot"]:
        lines.append(
            "The memory for prompt texts was too small for the log, so hits and differences may be missing. "
            "Increase --memory-mb."
        )
    return lines


def _reasons(findings: Findings) -> Table:
    figures = findings.figures
    total = max(1, figures["prompt_tokens"])
    tokens = {"hit": figures["hit_tokens"], **figures["misses"]}
    rows = [(name, f"{count:,}", f"{count / total:.1%}") for name, count in tokens.items() if count]
    return Table("Prompt tokens by reason", ("reason", "tokens", "share"), rows, ("reason",))


def _places(findings: Findings) -> Table:
    heads, columns = ["place"], list[str]()
    for prefix, heading in (("", "one cache"), ("served_", "served")):
        if any(f"{prefix}tokens" in row for row in findings.places):
            heads += [heading, "share", "left"]
            columns.append(prefix)
    rows = []
    for row in findings.places:
        cells = [row["place"]]
        for prefix in columns:
            cells += [f"{row[f'{prefix}tokens']:,}", _percent(row[f"{prefix}share"])]
            left = row[f"{prefix}left_share"]
            cells.append(_percent(left) if left is not None else "")
        rows.append(cells)
    return Table("Final places of prompt tokens, from requested to hit", heads, rows, ("place",))


def _advice(findings: Findings, *, excerpts: bool) -> Table:
    rows = []
    for row in findings.advice[:ADVICE_SHOWN_MAX]:
        said = row["text"]
        if row["path"]:
            shape = row["shape"].strip()
            said += f" [{row['path']}{', like ' + shape if shape else ''}]"
        if excerpts and (row["before"] or row["after"]):
            said += f' Before: "{row["before"]}". After: "{row["after"]}".'
        share = _percent(row["lost_share"]) if row["lost_tokens"] else ""
        figures = (f"{row['requests']:,}", f"{row['lost_tokens']:,}", share, f"{row['gpu_s']:,.0f}")
        rows.append((str(row["rank"]), *figures, said))
    heads = ("", "requests", "lost tokens", "share", "GPU s", "action")
    return Table("Advice, largest loss first", heads, rows, ("action",))


def _templates(findings: Findings, *, excerpts: bool) -> Table:
    heads = ["template", "prefix tokens", "tools", "conversations", "requests", "served tokens", "hit rate"]
    rows = []
    for row in findings.templates[:TEMPLATES_SHOWN_MAX]:
        counts = (row[name] for name in ("prompt_tokens", "tools", "conversations", "requests", "served_tokens"))
        cells = [row["id"], *(f"{count:,}" for count in counts), _percent(row["hit_rate"])]
        rows.append([*cells, row["label"]] if excerpts else cells)
    if excerpts:
        heads.append("beginning")
    return Table("Templates, most served tokens first", heads, rows, ("template", "beginning"))


def _groups(findings: Findings) -> Table:
    rows = [
        (
            row["route"],
            row["tenant"],
            "yes" if row["tools"] else "no",
            f"{row['requests']:,}",
            f"{row['prompt_tokens']:,}",
            _percent(row["hit_rate"]),
        )
        for row in findings.groups[:GROUPS_SHOWN_MAX]
    ]
    heads = ("path", "tenant", "tools", "requests", "prompt tokens", "hit rate")
    return Table("Requests by kind", heads, rows, ("path", "tenant", "tools"))


def _percent(part: float | None) -> str:
    return f"{part:.1%}" if part is not None else "-"


def _clean(text: str) -> str:
    """Return the text on one line, without characters that a terminal would interpret."""
    return "".join(each if each.isprintable() else " " for each in text)


# -- layout ------------------------------------------------------------------------------------------------------------


def plain(table: Table) -> str:
    """Return a table as plain text. A column of words is wrapped if it is the last."""
    rows = [list(map(_clean, row)) for row in table.rows]
    widths = [max(len(row[at]) for row in [table.columns, *rows]) for at in range(len(table.columns))]
    last = len(widths) - 1
    room = max(TEXT_WIDTH_MIN, WIDTH - sum(width + len(GAP) for width in widths[:last]))
    wraps = table.columns[last] in table.words
    lines = [table.title]
    for row in [table.columns, *rows]:
        pieces = (wrap(row[last], room) or [""]) if wraps else [row[last]]
        for number, piece in enumerate(pieces):
            cells = [cell if not number else "" for cell in row[:last]] + [piece]
            lines.append(GAP.join(_set(table, at, cell, widths[at]) for at, cell in enumerate(cells)).rstrip())
    return "\n".join(lines)


def _set(table: Table, at: int, cell: str, width: int) -> str:
    return cell.ljust(width) if table.columns[at] in table.words else cell.rjust(width)


def _print_rich(head: Sequence[str], tables: Sequence[Table], foot: Sequence[str]) -> None:
    console = importlib.import_module("rich.console").Console(highlight=False)
    text, box = importlib.import_module("rich.text").Text, importlib.import_module("rich.box").SIMPLE
    for line in head:
        console.print(text(line))
    for table in tables:
        shown = importlib.import_module("rich.table").Table(title=table.title, title_justify="left", box=box)
        for column in table.columns:
            words = column in table.words
            shown.add_column(column, justify="left" if words else "right", no_wrap=not words)
        for row in table.rows:
            shown.add_row(*(text(_clean(cell)) for cell in row))
        console.print(shown)
    for line in foot:
        console.print(text(line))
