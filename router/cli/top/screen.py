"""Content of `top`: lines and tables made of the observatory's page, independent of how they are drawn.

Names and labels come from clients, so they are made printable here: control characters, which a terminal would
interpret, are removed.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from router.core.types.cache_misses import AVOIDABLE, MissReason

BAR_CELLS = 20
LIVE_ADVICE_MAX = 3
FALLS_MIN = 3  # of a replica's grade in ten minutes, from which they are shown, as on the dashboard
NAMED_MAX = 3  # replicas, models or tenants that one line names
TENANTS_MAX = 5
TEMPLATES_MAX = 16  # the rest are on the dashboard, and on /admin/templates
LABEL_CHARS_MAX = 60
COLOURS = {
    MissReason.DIVERGED: "red",
    MissReason.EVICTED: "yellow",
    MissReason.SPILLED: "magenta",
    MissReason.REPLICA_LOST: "bright_magenta",
    MissReason.IDENTITY: "green",
    MissReason.MISPREDICTED: "cyan",
}
NONE = "-"
UNNAMED = ("none", "other")  # labels that stand for no tenant, or for many
# least share of prompt tokens with a cached-token count by the engine; below it the actual rate is shown in grey
VERIFIED_MIN = 0.2


@dataclass(frozen=True, slots=True)
class Cell:
    """Printable text on one line, in a style of rich."""

    text: str
    style: str = ""


@dataclass(frozen=True, slots=True)
class Line:
    """Cells that follow each other on one line."""

    cells: tuple[Cell, ...] = ()


@dataclass(frozen=True, slots=True)
class Column:
    """Head of a column. Numbers are right-aligned and never cut; a column that folds may take several lines. A minor
    column is left out of a narrow terminal."""

    name: str
    number: bool = False
    folds: bool = False
    minor: bool = False


@dataclass(frozen=True, slots=True)
class Grid:
    """Table with typed columns and rows of cells."""

    columns: tuple[Column, ...]
    rows: Sequence[tuple[Cell, ...]]


def screen(page: dict[str, Any], *, height: int | None = None, gone: str = "", foot: str = "") -> list[Line | Grid]:
    """Return the whole screen. With a `height` in lines, tables are cut until all fits. `gone` gives the reason that
    the figures are old, and `foot` is the last line."""
    head: list[Line | Grid] = [_line(printable(gone), "bold red")] if gone else []
    head += _headline(page)
    end = [_line(foot, "bright_black")] if foot else []
    grids = [_reasons(page), _advice(page["advice"]), _replicas(page), _tenants(page), _templates(page)]
    grids = [grid for grid in grids if grid.rows]
    if height is None:
        for grid in grids:
            head += [Line(), grid]
        return [*head, *end]
    room = height - len(head) - len(end) - len(grids)
    most = [min(len(grid.rows), LIVE_ADVICE_MAX) if grid.columns[0].name == "#" else len(grid.rows) for grid in grids]
    counts = distribute_rows(room, most)
    apart = [Line()] if room - sum(counts) >= len(grids) else []
    cut = (_cut(grid, count) for grid, count in zip(grids, counts, strict=True))
    for grid in cut:
        head += [*apart, grid]
    return [*head, *end]


def distribute_rows(room: int, most: Sequence[int]) -> list[int]:
    """Distribute `room` lines among the tables, one line to each in turn. Returns the number of rows of each table."""
    counts = [0] * len(most)
    while room > 0 and counts != list(most):
        for place, wanted in enumerate(most):
            if counts[place] < wanted and room > 0:
                counts[place] += 1
                room -= 1
    return counts


def _cut(grid: Grid, rows: int) -> Grid:
    """Return the first rows of a table; its head then shows how many rows there are."""
    if rows >= len(grid.rows):
        return grid
    first, *others = grid.columns
    named = Column(f"{first.name} {rows}/{len(grid.rows)}", first.number, first.folds)
    return Grid((named, *others), grid.rows[:rows])


def _line(text: str, style: str = "") -> Line:
    return Line((Cell(text, style),))


# -- the head ----------------------------------------------------------------------------------------------------


def _headline(page: dict[str, Any]) -> list[Line]:
    totals, recent = page["totals"], _recent(page)
    prompt, decisions = recent["prompt_tokens"], page["decisions"]
    failed = sum(_is_failed(row) for row in decisions)
    errors = f"errors {failed} of the last {len(decisions)}" if decisions else "errors -"
    taking = sum(_takes_requests(row) for row in page["replicas"])
    down = taking < len(page["replicas"])
    genuine, replay = (_percent(recent[name], prompt) for name in ("genuine_tokens", "replay_tokens"))
    return [
        Line(
            (
                Cell("warmroute", "bold"),
                Cell(f" {printable(page['version'])}   up {_span(page['uptime_s'])}   "),
                Cell(f"{_count(totals['requests'])} requests   "),
                Cell(errors, "bold red" if failed else ""),
            )
        ),
        Line(
            (
                Cell("hit rate "),
                Cell(_percent(recent["hit_tokens"], prompt), "bold"),
                Cell(f" (genuine {genuine}, replay {replay})"),
                Cell(f"   ever {_percent(totals['hit_tokens'], totals['prompt_tokens'])}"),
                Cell(f"   diversity {_format_fixed(totals['diversity'])}"),
            )
        ),
        _render_verified(recent, totals),
        Line(
            (
                Cell("TTFT of 10 min  "),
                Cell(f"p50 {_seconds(totals['ttft_p50_s'])}", "bold"),
                Cell(f"  p90 {_seconds(totals['ttft_p90_s'])}  p99 {_seconds(totals['ttft_p99_s'])}"),
                Cell(f"   {taking} of {len(page['replicas'])} take requests", "bold red" if down else ""),
            )
        ),
        *_render_troubles(page),
    ]


def _render_verified(recent: dict[str, int], totals: dict[str, Any]) -> Line:
    """Return the line of verified tokens: the share with an engine's count, how many of those were cached, and how many
    were predicted."""
    prompt, verified = recent["prompt_tokens"], recent["verified_tokens"]
    if verified:
        few = "bright_black" if verified < VERIFIED_MIN * prompt else ""
        actual, predicted = (
            _percent(recent[name], verified) for name in ("verified_hit_tokens", "verified_predicted_tokens")
        )
        told = Cell(f"verified {_percent(verified, prompt)}: actual {actual}, predicted {predicted}", few)
    else:
        told = Cell("verified: no engine reported cached tokens" if prompt else "verified -", "bright_black")
    counted = totals.get("counted_tokens", 0)
    engines = f"   engines count {_percent(totals['counted_hit_tokens'], counted)}" if counted else ""
    return Line((told, Cell(engines)))


def _render_troubles(page: dict[str, Any]) -> list[Line]:
    """Return lines of troubles: replicas that take no requests, requested models without a ready replica, and the
    reason for which routers share no state."""
    down = [row for row in page["replicas"] if not _takes_requests(row) and not row["warming"]]
    named = _first_few([f"{_name(row)} ({row['why'] or row['state']})" for row in down])
    lines = [f"no requests to {named}"] if down else []
    lines += [f"model {row['model']} has no ready replica: {row['why']}" for row in _unserved(page)]
    if why := page.get("router", {}).get("unshared"):
        lines.append(f"routers share no state: {why}")
    return [_line(printable(line), "bold red") for line in lines]


def _first_few(names: Sequence[str]) -> str:
    """Return the first names, and how many more there are."""
    more = f" and {len(names) - NAMED_MAX} more" if len(names) > NAMED_MAX else ""
    return ", ".join(names[:NAMED_MAX]) + more


def _unserved(page: dict[str, Any]) -> list[dict[str, Any]]:
    return list(page.get("unserved_models", ()))[:NAMED_MAX]


NUMBERS = ("prompt_tokens", "hit_tokens", "genuine_tokens", "replay_tokens", "verified_tokens", "verified_hit_tokens",
           "verified_predicted_tokens")  # fmt: skip


def _recent(page: dict[str, Any]) -> dict[str, int]:
    """Return sums of the last ten minutes."""
    points = page["timeline"]["points"]
    return {name: sum(point.get(name, 0) for point in points) for name in NUMBERS}


def _is_failed(decision: dict[str, Any]) -> bool:
    """True if a request of the page ended in an error of the router's side, or if its answer ended early."""
    return decision["status"] >= 500 or decision["ending"] in ("failed", "unreached", "drained")


# -- the tables --------------------------------------------------------------------------------------------------


def _reasons(page: dict[str, Any]) -> Grid:
    """Return bars of the reasons of misses in the last ten minutes, the avoidable ones first."""
    prompt = _recent(page)["prompt_tokens"]
    points, total = page["timeline"]["points"], page["totals"]["misses"]
    recent = {miss: sum(point["misses"].get(miss, 0) for point in points) for miss in MissReason}
    longest = max([*recent.values(), 1])
    rows = []
    for miss in MissReason:
        if recent[miss] or total.get(miss):
            name = Cell(miss.replace("_", " "), "" if miss in AVOIDABLE else "bright_black")
            bar = Cell("█" * round(BAR_CELLS * recent[miss] / longest), COLOURS.get(miss, "bright_black"))
            share = Cell(_percent(recent[miss], prompt))
            rows.append((name, Cell(_count(recent[miss])), share, bar, Cell(_count(total.get(miss, 0)))))
    return Grid(_columns("Why computed", ">last 10 min", ">of prompts", "", ">since start"), rows)


def _advice(advice: Iterable[dict[str, Any]]) -> Grid:
    """Return advice. Rows without a case in the last minute are grey."""
    rows = []
    for row in advice:
        label, style = printable(row["label"])[:LABEL_CHARS_MAX], "" if row["recent"] else "bright_black"
        about = [label, f"tenants: {_first_few(row['tenants'])}" if row["tenants"] else ""]
        about += [] if row["recent"] else ["no case in the last minute"]
        named = "; ".join(filter(None, about))
        text = printable(row["text"] + (f" ({named})" if named else ""))
        cells = (str(row["rank"]), printable(row["cost"] or NONE), _format_fixed(row["gpu_s_per_h"], 1), text)
        rows.append(tuple(Cell(each, style) for each in cells))
    return Grid((*_columns(">#", ">cost", ">GPU-s/h"), Column("Advice", folds=True)), rows)


def _replicas(page: dict[str, Any]) -> Grid:
    """Return replicas, those that take no requests first, each with its errors among the last requests. Rates and times
    are of the last two minutes, and fade."""
    errors = _errors(page["decisions"])
    rows = []
    for row in sorted(page["replicas"], key=_takes_requests):
        window, failed = f"/{row['window']}" if row["window"] else "", errors[row["id"]]
        rows.append(
            (Cell(printable(_name(row))), Cell(_format_fixed(row.get("requests_per_s"), 1)),
             Cell(_percent(row.get("request_share"), 1)), Cell(_seconds(row.get("ttft_p50_s"))),
             Cell(_seconds(row.get("ttft_p90_s"))), Cell(f"{row['in_flight']}{window}"), Cell(_count(row["waiting"])),
             Cell(f"{row['pending_prefill_ms']:.0f} ms"), Cell(_percent(row["kv_usage"], 1)),
             Cell(str(failed), "bold red" if failed else ""), Cell(printable(row["grade"])), _render_readiness(row))
        )  # fmt: skip
    names = _columns("Replica", ">req/s", ">share", ">TTFT 2 min p50", ">p90", ">open", ">waiting", ">ahead", ">KV",
                     ">errors", "cache", "state", minor={"share", "waiting", "ahead"})  # fmt: skip
    return Grid(names, rows)


def _tenants(page: dict[str, Any]) -> Grid:
    """Return the tenants with the most requests in flight, if any tenant is named. Rates and shares are of the last two
    minutes, and fade."""
    rows = sorted(page.get("tenants", ()), key=lambda row: (-row["in_flight"], -row["computed_share"]))
    named = any(row["tenant"] not in UNNAMED for row in rows)
    cells = [
        (Cell(printable(row["tenant"])), Cell(_count(row["in_flight"])), Cell(_count(row["waiting"])),
         Cell(_format_fixed(row["requests_per_s"], 1)), Cell(_percent(row["request_share"], 1)),
         Cell(_percent(row["computed_share"], 1)))
        for row in rows[:TENANTS_MAX] if named
    ]  # fmt: skip
    return Grid(_columns("Tenant", ">in flight", ">waiting", ">req/s", ">share", ">of computed tokens"), cells)


def _errors(decisions: Iterable[dict[str, Any]]) -> Counter[str]:
    """Count attempts that failed, by replica, among the last requests on the page."""
    failed = Counter(retry["replica"] for row in decisions for retry in row["retries"])
    failed.update(row["replica"] for row in decisions if row["replica"] and _is_failed(row))
    return failed


def _takes_requests(replica: dict[str, Any]) -> bool:
    return replica["ready"] and replica["state"] == "closed" and not replica["warming"]


def _name(replica: dict[str, Any]) -> str:
    """Return the replica's name, or its address without one."""
    return str(replica["name"] or replica["id"].removeprefix("http://"))


def _render_readiness(replica: dict[str, Any]) -> Cell:
    """Return "warming", "ready", or the reason that the replica takes no requests."""
    if replica["warming"]:
        return Cell("warming", "yellow")
    if _takes_requests(replica):
        worse = replica.get("slow") or replica.get("idle") or _describe_falls(replica)
        return Cell(printable(f"ready: {worse}"), "yellow") if worse else Cell("ready", "green")
    state = replica["state"] if replica["ready"] else "not ready"
    return Cell(printable(f"{state}: {replica['why']}" if replica["why"] else state), "red")


def _describe_falls(replica: dict[str, Any]) -> str:
    """Return how often the confidence in the replica's cache state fell, if it fell repeatedly; else ""."""
    falls = replica.get("grade_falls", 0)
    return f"cache state fell {falls} times: {replica['grade_why']}" if falls >= FALLS_MIN else ""


def _templates(page: dict[str, Any]) -> Grid:
    """Return templates, the most used first."""
    names = {row["id"]: _name(row) for row in page["replicas"]}
    rows = []
    for row in sorted(page["map"], key=lambda row: -row["served_tokens"])[:TEMPLATES_MAX]:
        held = ", ".join(names.get(id_) or _name({"name": "", "id": id_}) for id_ in row["holders"]) or "nobody"
        label = row["label"][:LABEL_CHARS_MAX] or f"template {row['id'][:6]}"
        rows.append(
            (Cell(printable(label)), Cell(_count(row["prompt_tokens"])), Cell(_count(row["served_tokens"])),
             Cell(_percent(row["hit_rate"], 1)), Cell(printable(held)))
        )  # fmt: skip
    return Grid(_columns("Shared prefix", ">tokens", ">served/h", ">hit rate", "held by"), rows)


def _columns(*names: str, minor: Collection[str] = ()) -> tuple[Column, ...]:
    """Return columns without lines. A name that begins with `>` marks a column of numbers."""
    plain = [name.lstrip(">") for name in names]
    return tuple(
        Column(bare, number=name.startswith(">"), minor=bare in minor) for name, bare in zip(names, plain, strict=True)
    )


# -- words and numbers -------------------------------------------------------------------------------------------


def printable(text: str) -> str:
    """Return the text on one line, without characters that a terminal would interpret."""
    return "".join(c if c.isprintable() else " " for c in str(text))


def _count(value: float | None) -> str:
    if value is None:
        return NONE
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if value >= 10 * size or (unit != "k" and value >= size):
            return f"{value / size:.3g}{unit}"
    return f"{value:,.0f}"


def _percent(part: float | None, of: float) -> str:
    return NONE if part is None or not of else f"{100 * part / of:.1f} %"


def _format_fixed(value: float | None, digits: int = 2) -> str:
    return NONE if value is None else f"{value:,.{digits}f}"


def _seconds(value: float | None) -> str:
    if value is None:
        return NONE
    return f"{value * 1000:.0f} ms" if value < 1 else f"{value:.2f} s"


def _span(value_s: float) -> str:
    minutes, hours = int(value_s) // 60, int(value_s) // 3600
    if not minutes:
        return f"{value_s:.0f} s"
    return f"{minutes} min" if not hours else f"{hours} h {minutes % 60} min"
