"""One trouble: a quiet time in which nothing may be shown, then the trouble, with its signs on three surfaces."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import aiohttp

from loadtest.faults.on_call import alerts
from loadtest.faults.on_call.signs import Page, Rows, open_page, read_top
from loadtest.faults.on_call.staged_cluster import Cluster, run_cluster
from loadtest.faults.on_call.troubles import Trouble

LIMIT_S = 60.0
WARM_S = 60.0  # after the start: caches fill, and event streams connect
LOOK_S = 2.5  # half a step of the router's timeline
SURFACES = ("page", "top", "alert")


@dataclass(slots=True)
class Look:
    """The surfaces at one moment; times are since the beginning of the trouble, and negative before it."""

    at_s: float
    page: Rows | None
    top: Rows


@dataclass(slots=True)
class Found:
    """What one surface showed of a trouble."""

    named_s: float | None = None
    text: str = ""
    """The row that names the cause, or else the first sign."""
    first_s: float | None = None
    is_evaluated: bool = True


@dataclass(slots=True)
class Seen:
    """Result of one trouble; `false` are signs in the quiet time, by surface."""

    trouble: str
    surfaces: dict[str, Found] = field(default_factory=dict)
    false: dict[str, list[str]] = field(default_factory=dict)
    requests: int = 0
    failures: int = 0


class Watch:
    """Looks at a cluster's surfaces until stopped."""

    def __init__(self, cluster: Cluster, page: Page | None, session: aiohttp.ClientSession) -> None:
        self._cluster, self._page, self._session = cluster, page, session
        self.looks: list[Look] = []
        self.scrapes: list[alerts.Scrape] = []
        self.began_s = time.monotonic()

    async def look_for(self, seconds_s: float) -> None:
        """Look at all surfaces for this time."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._repeat(LOOK_S, seconds_s, self._look))
            group.create_task(self._repeat(alerts.SCRAPE_S, seconds_s, self._scrape))

    async def _repeat(self, every_s: float, seconds_s: float, work: Callable[[float], Awaitable[None]]) -> None:
        begin_s = time.monotonic()
        number = 0
        while (due_s := number * every_s) <= seconds_s:
            await asyncio.sleep(max(0.0, begin_s + due_s - time.monotonic()))
            await work(time.monotonic())
            number = max(number + 1, int((time.monotonic() - begin_s) / every_s))

    async def _look(self, now_s: float) -> None:
        page = await self._page.read() if self._page else None
        self.looks.append(Look(now_s, page, await read_top(self._session, self._cluster.admin_url)))

    async def _scrape(self, now_s: float) -> None:
        self.scrapes.append(await alerts.scrape(self._session, self._cluster.admin_url, now_s))


async def watch(trouble: Trouble | None, quiet_s: float, limit_s: float, folder: Path, seed: int) -> Seen:
    """Run a cluster through a quiet time, and then through a trouble, if any. Raises ProcessError, RuntimeError."""
    async with (
        run_cluster(folder, has_small=trouble is not None and trouble.has_small, seed=seed) as (cluster, session),
        open_page(cluster.admin_url, folder) as page,
    ):
        await asyncio.sleep(WARM_S)
        watched = Watch(cluster, page, session)
        await watched.look_for(quiet_s)
        quiet = len(watched.scrapes)
        cluster.choose_busiest()
        began_s = time.monotonic()
        if trouble is not None:
            begun = asyncio.ensure_future(trouble.begin(cluster, session))
            try:
                await watched.look_for(limit_s)
                await begun
            finally:
                begun.cancel()
        fired = None
        if (promtool := alerts.find_promtool()) is not None:
            fired = await alerts.evaluate(promtool, watched.scrapes, quiet, folder)
        seen = Seen(trouble.name if trouble else "quiet", requests=cluster.requests, failures=cluster.failures)
        judge(seen, trouble, cluster, watched.looks, fired, began_s)
        return seen


def judge(
    seen: Seen,
    trouble: Trouble | None,
    cluster: Cluster,
    looks: Sequence[Look],
    fired: Sequence[alerts.Alert] | None,
    began_s: float,
) -> None:
    """Fill in false signs of the quiet time, and the signs of the trouble. `fired` None: rules were not evaluated."""
    rows: dict[str, list[tuple[float, Rows]] | None] = {
        "page": [(look.at_s, look.page) for look in looks if look.page] if looks and looks[0].page else None,
        "top": [(look.at_s, look.top) for look in looks],
        "alert": None if fired is None else [(each.at_s, Rows([str(each)], [str(each)])) for each in fired],
    }
    for surface, moments in rows.items():
        before = [row for at_s, shown in moments or () if at_s < began_s for row in shown.signs]
        seen.false[surface] = list(dict.fromkeys(before))
        if trouble is None:
            continue
        found = seen.surfaces[surface] = Found(is_evaluated=moments is not None)
        known = {_plain(row) for row in before}
        for at_s, shown in moments or ():
            if at_s < began_s:
                continue
            new = [row for row in shown.signs if _plain(row) not in known]
            named = [row for row in shown.all if _names(trouble, cluster, surface, row)]
            if new and found.first_s is None:
                found.first_s, found.text = round(at_s - began_s, 1), new[0]
            if named:
                found.named_s, found.text = round(at_s - began_s, 1), named[0]
                found.first_s = found.named_s if found.first_s is None else found.first_s
                break


def _names(trouble: Trouble, cluster: Cluster, surface: str, row: str) -> bool:
    return trouble.is_named_by_alert(cluster, row) if surface == "alert" else trouble.is_named(cluster, row)


def _plain(row: str) -> str:
    """Return a row without its numbers, which change from look to look."""
    return re.sub(r"[\d.,]+", "", row)
