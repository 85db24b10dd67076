"""The nine troubles of the on-call table, each with the words by which its cause is named.

A cause counts as named on a surface if one row of it has the subject (a replica, a tenant, a model or a message) and
words of the cause. Words of a healthy row must not match.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import aiohttp

from loadtest.faults.on_call.staged_cluster import FLOOD_TENANT, SMALL, Cluster
from loadtest.insights.agents import ReleaseClock

LATE_S = 3.0
SLOWER = 6.0  # times, of a slow GPU
LOSE_EVERY = 5  # batches of KV events
BETWEEN_S = 20.0  # two restarts; longer than the interval at which metrics are scraped

Begin = Callable[[Cluster, aiohttp.ClientSession], Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Trouble:
    """One trouble."""

    name: str
    begin: Begin
    subject: Callable[[Cluster], str]
    """Regular expression for the subject."""
    cause: str
    """Regular expression for the cause, on the page and in `top`."""
    alerts: str
    """Regular expression for names of alerts with the cause."""
    alert_subject: str | None = None
    """Regular expression for the subject in labels of an alert, which never have prompts. None: as elsewhere."""
    has_small: bool = False
    """True if one replica serves another model."""

    def is_named(self, cluster: Cluster, row: str) -> bool:
        """True if a row of the page or a line of `top` names subject and cause."""
        return bool(re.search(self.subject(cluster), row) and re.search(self.cause, row))

    def is_named_by_alert(self, cluster: Cluster, row: str) -> bool:
        """True if an alert has a name for the cause, and a label with the subject."""
        subject = self.subject(cluster) if self.alert_subject is None else self.alert_subject
        return bool(re.match(self.alerts, row) and re.search(subject, row))


def _replica(cluster: Cluster) -> str:
    return re.escape(cluster.subject)


async def _delay_requests(cluster: Cluster, _: aiohttp.ClientSession) -> None:
    cluster.hop.before_s = LATE_S


async def _gather_answers(cluster: Cluster, _: aiohttp.ClientSession) -> None:
    cluster.hop.gathered_s = LATE_S


async def _slow_down(cluster: Cluster, _: aiohttp.ClientSession) -> None:
    cluster.engines.replicas[cluster.busiest].time_scale /= SLOWER


async def _hang(cluster: Cluster, _: aiohttp.ClientSession) -> None:
    cluster.hop.hangs = True


async def _plant_timestamp(cluster: Cluster, _: aiohttp.ClientSession) -> None:
    cluster.clock = ReleaseClock.TOP


async def _flood(cluster: Cluster, session: aiohttp.ClientSession) -> None:
    cluster.start_flood(session)


async def _kill_small(cluster: Cluster, _: aiohttp.ClientSession) -> None:
    if cluster.small is not None:
        await cluster.small.kill(0)


async def _restart_twice(cluster: Cluster, _: aiohttp.ClientSession) -> None:
    for pause_s in (BETWEEN_S, 0.0):
        await cluster.stop_router()
        await cluster.start_router()
        await asyncio.sleep(pause_s)


async def _lose_events(cluster: Cluster, _: aiohttp.ClientSession) -> None:
    cluster.engines.publishers[cluster.busiest].lose_every = LOSE_EVERY


SLOW = r"times as long|first tokens? .*(take|longer|later)|slower"
SLOW_ALERTS = "WarmrouteReplicaSlow|WarmrouteReplicaDelayed|WarmrouteBreakerOpen"
TROUBLES = (
    Trouble("a hop delays requests by 3 s", _delay_requests, _replica, SLOW, SLOW_ALERTS),
    Trouble("a hop gathers answers for 3 s", _gather_answers, _replica, SLOW, SLOW_ALERTS),
    Trouble("a GPU at a sixth of its speed", _slow_down, _replica, SLOW, SLOW_ALERTS),
    Trouble(
        "a replica hangs, its probes pass",
        _hang,
        _replica,
        r"nothing for|late|no first|no answer|stall|trial",
        "WarmrouteBreakerOpen|WarmrouteReplicaSlow",
    ),
    Trouble(
        "a timestamp in the system prompt",
        _plant_timestamp,
        lambda _: r"Message 0",
        r"date or (a )?time|timestamp",
        "WarmrouteHitRateFell",
        alert_subject="model=",
    ),
    Trouble(
        "one tenant floods the fleet",
        _flood,
        lambda _: rf"\b{FLOOD_TENANT}\b",
        r"causes|computed|of all|open|in flight|%",
        "WarmrouteTenantDominates",
    ),
    Trouble(
        "the only replica of a model is gone",
        _kill_small,
        lambda cluster: rf"\b{SMALL}\b|{re.escape(cluster.replicas[-1].removeprefix('http://'))}",
        r"refused|not ready|no ready|no replica|no requests|every request",
        "WarmrouteModelDown|WarmrouteNoReadyReplicas",
        has_small=True,
    ),
    Trouble(
        "the router restarts twice",
        _restart_twice,
        lambda _: r"router|warmroute",
        r"started \d+ s ago|up \d+ s",
        "WarmrouteRestarts",
        alert_subject="",
    ),
    Trouble(
        "every fifth batch of KV events is lost",
        _lose_events,
        _replica,
        r"times; |cache state fell|missing|lost|replay",
        "WarmrouteGradeFlaps|WarmrouteEventsLost|WarmrouteEventGaps|WarmrouteGradeNotExact",
    ),
)
