"""The HTTP side of `loadtest agree`: a slice replayed through a fresh router, ours or a rival, and fresh engines."""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import aiohttp
import msgspec

from loadtest.common import rivals
from loadtest.common.client import read_counters
from loadtest.common.processes import Process, engines, free_port, router, run_process, wait_until_ready
from loadtest.common.traces import Trace
from loadtest.replay.run import Progress, ReplaySettings, replay_trace
from loadtest.sim_vs_http.report import AgreeRun
from router.config.schema import AdmissionSettings

HOST = "127.0.0.1"
READY_EVERY_S = 0.1
READINESS = "/readiness"
"""Path at which all three rivals report the number of their healthy workers."""
_TTFT = re.compile(r"^vllm:time_to_first_token_seconds_(sum|count)(?:\{.*\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class HttpTarget:
    """The engines of a router."""

    replicas: int
    model: str
    calibration: str
    kv_tokens: int
    tick_s: float | None = None
    """Wall-clock time in which an answer has at most one event, except its first and last token.

    None: the engine's default.
    """
    scaled: bool = False
    """True if the times for which our router defers requests are simulated seconds, as the answers' are.

    A rival's timers run by the wall clock.
    """


@dataclass(frozen=True, slots=True)
class HttpRun(AgreeRun):
    """One replay over HTTP."""

    urls: tuple[str, ...]
    """URLs of the replicas, in order."""
    wire_s: float
    """Mean time to first token in simulated seconds beyond the engines' own.

    It is the real time of client, router and HTTP, times the time scale. The time that a router reports as deferred is
    left out.
    """


class _Readiness(msgspec.Struct):
    healthy_workers: int = 0


async def over_http(
    trace: Trace,
    settings: ReplaySettings,
    behind: HttpTarget,
    policy: str | rivals.Rival,
    progress: Progress | None = None,
) -> HttpRun:
    """Replay through a policy of warmroute, or through a rival as its maker ships it.

    Raises ProcessError, RivalError, ReplayError.
    """
    async with (
        engines(
            *(behind.replicas, behind.model, behind.calibration, behind.kv_tokens, settings.time_scale),
            tick_s=behind.tick_s,
            tell_ttft=behind.scaled,
        ) as urls,
        _ours(urls, policy, _waits(settings, behind)) if isinstance(policy, str) else _rival(urls, policy) as url,
    ):
        chosen = replace(settings, url=url, replicas=tuple(urls), model=behind.model)
        row, sent = await replay_trace(trace, chosen, progress)
        async with aiohttp.ClientSession() as session:
            counted = await read_counters(session, urls)
            engines_s = await _engines_ttft_s(session, urls)
    answers = [each.answer for each in sent if each.answer.ttft_s is not None]
    waited = [((each.ttft_s or 0.0) - each.waited_s) * settings.time_scale for each in answers]
    wire_s = max(0.0, fmean(waited) - engines_s) if waited else 0.0
    return HttpRun(row, sent, counted, tuple(urls), wire_s)


async def _engines_ttft_s(session: aiohttp.ClientSession, urls: Sequence[str]) -> float:
    """Return the mean time to first token since the engines started, as they measured it."""
    sums: defaultdict[str, float] = defaultdict(float)
    for url in urls:
        async with session.get(f"{url}/metrics") as response:
            for kind, value in _TTFT.findall(await response.text()):
                sums[kind] += float(value)
    return sums["sum"] / sums["count"] if sums["count"] else 0.0


def _waits(settings: ReplaySettings, behind: HttpTarget) -> list[str]:
    """Return settings of our router: the times for which it defers requests and lets them wait."""
    if not behind.scaled:
        return []
    ours = AdmissionSettings()
    times_s = {"defer_max_s": ours.defer_max_s, "queue_timeout_s": ours.queue_timeout_s}
    return [f"admission.{name}={time_s / settings.time_scale:g}" for name, time_s in times_s.items()]


@asynccontextmanager
async def _ours(urls: Sequence[str], policy: str, settings: Sequence[str]) -> AsyncIterator[str]:
    async with router(urls, policy=policy, host=HOST, settings=settings) as (url, _):
        yield url


@asynccontextmanager
async def _rival(urls: Sequence[str], rival: rivals.Rival) -> AsyncIterator[str]:
    with tempfile.TemporaryDirectory(prefix="warmroute-agree-") as temporary:
        folder, port = Path(temporary), free_port()
        async with run_process(rival.name, rival.words(port, urls, folder), folder) as process:
            await _ready(process, f"http://{HOST}:{port}", len(urls))
            yield f"http://{HOST}:{port}"


async def _ready(process: Process, url: str, replicas: int) -> None:
    """Wait until the router sees all replicas.

    They register one by one, and until then the first would get every request.
    """
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=5)) as session:

        async def missing() -> str:
            try:
                async with session.get(url + READINESS) as response:
                    seen = msgspec.json.decode(await response.read(), type=_Readiness).healthy_workers
            except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError):
                return f"{READINESS} does not answer"
            return "" if response.status == 200 and seen == replicas else f"it sees {seen} of {replicas} replicas"

        await wait_until_ready(process, missing, READY_EVERY_S)
