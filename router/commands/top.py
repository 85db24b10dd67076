"""`warmroute top`: what the dashboard shows, in a terminal.

It asks `/admin/observatory` and nothing else. Names and labels come from clients, so they are printed as plain text:
no markup of rich, and no control characters, which a terminal would obey.
"""

from __future__ import annotations

import asyncio
import ssl
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from router.core.facts.misses import AVOIDABLE, Miss
from router.engines import fetch
from router.settings import secrets

ANSWER_S = 5.0
PAGE_BYTES_MAX = 16 << 20
INTERVAL_MIN_S = 0.2
BAR_CELLS = 20
LIVE_ROWS_MAX = 8  # rows per table if everything must fit on a screen
LIVE_ADVICE_MAX = 3
TEMPLATES_MAX = 16  # the rest are on the dashboard, and on /admin/templates
COLOURS = {
    Miss.DIVERGED: "red",
    Miss.EVICTED: "yellow",
    Miss.SPILLED: "magenta",
    Miss.REPLICA_LOST: "bright_magenta",
    Miss.IDENTITY: "green",
    Miss.MISPREDICTED: "cyan",
}
NONE = "-"


class NoPage(Exception):
    """The router's page cannot be read; the message says why, and what may help."""


def main(url: str, token_file: Path | None, *, interval_s: float, once: bool) -> int:
    """Run the command. Returns the exit status."""
    try:
        token = secrets.read("", str(token_file)) if token_file else ""
    except (OSError, UnicodeDecodeError) as error:
        return _complain(f"{token_file}: {getattr(error, 'strerror', None) or 'is no text'}")
    console = Console()
    try:
        if once or not console.is_terminal:
            asyncio.run(_print_once(url, token, console))
        else:
            asyncio.run(_watch(url, token, max(interval_s, INTERVAL_MIN_S), console))
    except NoPage as error:
        return _complain(str(error))
    except KeyboardInterrupt:
        return 0
    return 0


def _complain(problem: str) -> int:
    print(f"warmroute: {problem}", file=sys.stderr)
    return 1


async def _print_once(url: str, token: str, console: Console) -> None:
    async with fetch.session(token, ANSWER_S) as session:
        console.print(screen(await asked(session, url)))


async def _watch(url: str, token: str, interval_s: float, console: Console) -> None:
    """Show the page until interrupted. A router that never answered is an error; one that stopped is waited for."""
    async with fetch.session(token, ANSWER_S) as session:
        page = await asked(session, url)
        with Live(screen(page, live=True), console=console, screen=True, auto_refresh=False) as shown:
            while True:
                await asyncio.sleep(interval_s)
                gone = ""
                try:
                    page = await asked(session, url)
                except NoPage as error:
                    gone = str(error)
                shown.update(screen(page, live=True, gone=gone), refresh=True)


async def asked(session: aiohttp.ClientSession, url: str) -> Any:  # noqa: ANN401 - JSON
    """The observatory's page. Raises NoPage."""
    try:
        async with session.get(f"{url.rstrip('/')}/admin/observatory", allow_redirects=False) as response:
            body = await fetch.read(response, PAGE_BYTES_MAX)
    except aiohttp.InvalidURL as error:
        raise NoPage(f"{url} is no URL: http://127.0.0.1:8001 is one") from error
    except (aiohttp.ClientError, OSError, ssl.SSLError) as error:  # TimeoutError is an OSError
        why = "no answer in time" if isinstance(error, TimeoutError) else str(error)
        raise NoPage(f"cannot reach {url}: {why}; is it the admin listener's address?") from error
    if response.status == 401:
        raise NoPage(f"{url} wants the admin token: give --token-file, with the right one in it")
    if response.status == 404:
        raise NoPage(f"{url} has no observatory: it is no admin listener, or observatory.enabled is off")
    if response.status != 200:
        raise NoPage(f"{url} answered {response.status}")
    try:
        page = msgspec.json.decode(body)
    except msgspec.DecodeError as error:
        raise NoPage(f"{url} answered what is no JSON: is it the admin listener's address?") from error
    if not isinstance(page, dict) or "totals" not in page:
        raise NoPage(f"{url} answered something else than an observatory's page")
    return page


def screen(page: dict[str, Any], *, live: bool = False, gone: str = "") -> Group:
    """The whole screen. With `live` tables are cut to fit on a screen; `gone` says why the figures are old."""
    rows_max = LIVE_ROWS_MAX if live else None
    parts: list[RenderableType] = [Text(_plain(gone), style="bold red")] if gone else []
    parts += [_headline(page), Text(), _reasons(page)]
    parts += _advice(page["advice"][: LIVE_ADVICE_MAX if live else None])
    parts += [Text(), _replicas(page["replicas"][:rows_max]), Text(), _templates(page, rows_max or TEMPLATES_MAX)]
    return Group(*parts)


def _headline(page: dict[str, Any]) -> Text:
    totals, recent = page["totals"], _recent(page)
    prompt, since = recent["prompt_tokens"], totals["prompt_tokens"]
    return Text.assemble(
        ("warmroute", "bold"), f" {_plain(page['version'])}   up {_span(page['uptime_s'])}   ",
        f"{_count(totals['requests'])} requests\n",
        "hit rate ", (_percent(recent["hit_tokens"], prompt), "bold"),
        f" (genuine {_percent(recent['genuine_tokens'], prompt)}, replay {_percent(recent['replay_tokens'], prompt)})",
        f"  predicted {_percent(recent['predicted_tokens'], prompt)}",
        f"  ever {_percent(totals['hit_tokens'], since)}\n",
        "TTFT ", (f"p50 {_seconds(totals['ttft_p50_s'])}", "bold"), f"  p90 {_seconds(totals['ttft_p90_s'])}",
        f"  p99 {_seconds(totals['ttft_p99_s'])}   diversity {_fixed(totals['diversity'])}",
    )  # fmt: skip


def _recent(page: dict[str, Any]) -> dict[str, int]:
    """Sums of the last ten minutes."""
    numbers = ("prompt_tokens", "predicted_tokens", "hit_tokens", "genuine_tokens", "replay_tokens")
    return {name: sum(point[name] for point in page["timeline"]["points"]) for name in numbers}


def _reasons(page: dict[str, Any]) -> Table:
    """Bars of the reasons of misses in the last ten minutes, the avoidable ones first."""
    table = _table("Why computed", ">last 10 min", ">of prompts", "", ">since start")
    prompt = _recent(page)["prompt_tokens"]
    points, total = page["timeline"]["points"], page["totals"]["misses"]
    recent = {miss: sum(point["misses"].get(miss, 0) for point in points) for miss in Miss}
    longest = max([*recent.values(), 1])
    for miss in Miss:
        if recent[miss] or total.get(miss):
            name = _cell(miss.replace("_", " "), "" if miss in AVOIDABLE else "bright_black")
            bar = _cell("█" * round(BAR_CELLS * recent[miss] / longest), COLOURS.get(miss, "bright_black"))
            table.add_row(name, _count(recent[miss]), _percent(recent[miss], prompt), bar, _count(total.get(miss, 0)))
    return table


def _advice(advice: Sequence[dict[str, Any]]) -> list[RenderableType]:
    if not advice:
        return []
    table = _table("#", ">cost", ">GPU-s/h", "What to do")
    for row in advice:
        label = _plain(row["label"])[:60]
        words = Text(_plain(row["text"]) + (f" ({label})" if label else ""), overflow="fold")
        table.add_row(str(row["rank"]), row["cost"] or NONE, _fixed(row["gpu_s_per_h"], 1), words)
    return [Text(), table]


def _replicas(replicas: Iterable[dict[str, Any]]) -> Table:
    table = _table("Replica", ">requests", ">ahead", ">waiting", ">KV", "cache", "state")
    for row in replicas:
        window = f" of {row['window']}" if row["window"] else ""
        table.add_row(
            _cell(_name(row)), f"{row['in_flight']}{window}", f"{row['pending_prefill_ms']:.0f} ms",
            _count(row["waiting"]), _percent(row["kv_usage"], 1), _cell(row["grade"]), _standing(row),
        )  # fmt: skip
    return table


def _name(replica: dict[str, Any]) -> str:
    """The replica's name, or its address without one."""
    return str(replica["name"] or replica["id"].removeprefix("http://"))


def _standing(replica: dict[str, Any]) -> Text:
    """Whether the replica takes requests, and if not, why."""
    if replica["warming"]:
        return _cell("warming", "yellow")
    if replica["ready"] and replica["state"] == "closed":
        return _cell("ready", "green")
    state = replica["state"] if replica["ready"] else "not ready"
    return _cell(f"{state}: {replica['why']}" if replica["why"] else state, "red")


def _templates(page: dict[str, Any], rows_max: int) -> Table:
    """Templates, the most used first."""
    names = {row["id"]: _name(row) for row in page["replicas"]}
    table = _table("Shared prefix", ">tokens", ">served/h", ">hit rate", "held by")
    for row in sorted(page["map"], key=lambda row: -row["served_tokens"])[:rows_max]:
        held = ", ".join(names.get(id_) or _name({"name": "", "id": id_}) for id_ in row["holders"]) or "nobody"
        label = row["label"][:60] or f"template {row['id'][:6]}"
        table.add_row(
            _cell(label), _count(row["prompt_tokens"]), _count(row["served_tokens"]), _percent(row["hit_rate"], 1),
            _cell(held),
        )  # fmt: skip
    return table


def _table(*columns: str) -> Table:
    """A table without lines. A name that begins with `>` marks a column of numbers, which are never cut."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for name in columns:
        number = name.startswith(">")
        table.add_column(name.lstrip(">"), justify="right" if number else "left", no_wrap=number)
    return table


def _cell(words: str, style: str = "") -> Text:
    """Plain text on one line, cut if there is no room."""
    return Text(_plain(words), style=style, no_wrap=True, overflow="ellipsis")


def _plain(text: str) -> str:
    """Text on one line, without characters that a terminal would obey."""
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


def _fixed(value: float | None, digits: int = 2) -> str:
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
