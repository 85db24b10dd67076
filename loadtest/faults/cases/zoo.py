"""Goal 28: engines other than the dense one, which the router observes through other pages and events.

The replicas are simulated engines (`loadtest engine --like NAME`), a process for each kind, with the pages, errors and
KV events of its kind. Only counts are judged.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import aiohttp

from loadtest.common.processes import READY, run_process
from loadtest.common.report import Row
from loadtest.faults.bench import Bench, FaultAnswer, Run, failures, poll_until, row, send_concurrently
from loadtest.faults.upstream.answers import MODEL
from router.core.cache_state.calibration import CHECKS

GOAL = 28
KV_TOKENS, BLOCK = 4_096, 16
SHARE_MIN = 0.5  # smallest part of an equal share
EVENTS = ("--kv-events", "--kv-events-port", "0", "--kv-replay-port", "0")
PROBES = ("--set", "probe.interval_s=0.2")
PREDICTED, GRADE, REPLICA = "x-warmroute-predicted-cached-tokens", "x-warmroute-grade", "x-warmroute-replica"
TAUGHT_BY = {"vllm-hybrid": CHECKS, "vllm-dcp": 0, "vllm-eagle": CHECKS, "sglang": 0}
"""Kind -> responses that teach the router the facts missing from its events, before predictions are judged."""
PAGES = ("vllm-hybrid", "vllm-dcp", "vllm-0.15", "sglang-pp", "sglang-tp", "sglang-priority", "sglang-0.5.8")


@dataclass(frozen=True, slots=True)
class Answer:
    """One completion: predicted cached tokens, and those that the engine reports."""

    status: int
    grade: str
    predicted: int
    cached: int
    replica: str


@asynccontextmanager
async def engines(bench: Bench, kinds: Sequence[str], *words: str) -> AsyncIterator[list[str]]:
    """Yield the URLs of one replica of each kind. Raises ProcessError."""
    common = ["--port", "0", "--replicas", "1", "--model", MODEL, "--time-scale", "200", "--kv-tokens", str(KV_TOKENS)]
    common += ["--block-size", str(BLOCK), "--max-model-len", str(KV_TOKENS), *words]
    async with AsyncExitStack() as stack:
        urls = []
        for number, kind in enumerate(kinds):
            command = [sys.executable, "-m", "loadtest", "engine", "--like", kind, *common]
            process = await stack.enter_async_context(run_process(f"{kind}.{number}", command, bench.folder))
            (said,) = await process.wait_for_output(READY)
            urls.append(said[1])
        yield urls


async def complete(run: Run, prompt: str) -> Answer:
    """Request a completion of eight tokens. Raises ClientError if there is no complete response."""
    body = {"model": MODEL, "prompt": prompt, "max_tokens": 8}
    async with run.http.post(run.url + "/v1/completions", json=body) as response:
        said, heads = await response.json(), response.headers
        details = (said.get("usage") or {}).get("prompt_tokens_details") or {}
        predicted, cached = int(heads.get(PREDICTED, 0)), int(details.get("cached_tokens", 0))
        return Answer(response.status, heads.get(GRADE, ""), predicted, cached, heads.get(REPLICA, ""))


async def replicas_of(run: Run) -> dict[str, dict[str, Any]]:
    """Return the page /admin/replicas, by replica; empty without a response."""
    status, text = await run.page("/admin/replicas", admin=True)
    return {each["id"]: each for each in json.loads(text)["replicas"]} if status == 200 else {}


def predicted_by(kind: str) -> Callable[[Bench], Awaitable[list[Row]]]:
    """Return the rows of predictions for one kind as a separate function."""

    async def rows(bench: Bench) -> list[Row]:
        bench.only_ours("its predictions")
        return await _count_wrong_predictions(bench, kind, TAUGHT_BY[kind])

    rows.__name__ = f"predictions of {kind}"
    return rows


async def _count_wrong_predictions(bench: Bench, kind: str, taught_by: int) -> list[Row]:
    """Goal 28: prompts with common prefixes, one after the other, through a cache that holds a few."""
    asked, wrong, exact, hits = bench.scale.pick_count(60, 240), 0, 0, 0
    async with engines(bench, [kind], *EVENTS) as urls, bench.run_cluster(0, urls=urls) as run:

        async def followed() -> bool:
            grades = ("catching-up", "exact") if taught_by else ("exact",)
            return any(each["grade"] in grades for each in (await replicas_of(run)).values())

        await complete(run, "first" * 200)  # a stream begins with its first batch
        await poll_until(followed, bench.scale.patience_s(10.0))
        for n in range(taught_by + asked):
            prompt = f"{n if n % 2 else n % 6:04d}" * 600 + f"{n % 4:04d}" * (n % 5 * 40)
            answer = await complete(run, prompt)
            if n >= taught_by:
                wrong += answer.predicted != answer.cached
                exact += answer.grade == "exact"
                hits += answer.cached > 0
    case = f"{kind}: of {asked} answers, one after the other, with wrongly predicted cached tokens"
    return [
        row(GOAL, case, 0, wrong, ok=wrong == 0 and hits > 0, note=f"{hits} of them found some"),
        row(GOAL, "... of them not exact", 0, asked - exact),
    ]


async def pages(bench: Bench) -> list[Row]:
    """Goal 28: values that the router reads from pages in other formats, while four requests run and none waits."""
    bench.only_ours("/admin/replicas")
    expected = (KV_TOKENS, 4, 0)
    found: dict[str, tuple[Any, ...]] = {}
    async with (
        engines(bench, PAGES, "--time-scale", "1") as urls,
        bench.run_cluster(0, PROBES, urls=urls, asked=False) as run,
    ):
        tasks = [asyncio.create_task(_long(run.http, url)) for url in urls for _ in range(4)]

        async def read() -> bool:
            at = await replicas_of(run)
            loads = [at[url]["load"] for url in urls if url in at]
            found.update(
                (kind, (load["kv_tokens_max"], load["running"], load["waiting"]))
                for kind, load in zip(PAGES, loads, strict=len(loads) == len(PAGES))
            )
            return list(found.values()) == [expected] * len(PAGES)

        await poll_until(read, bench.scale.patience_s(10.0))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    wrong = {kind: figures for kind, figures in found.items() if figures != expected}
    case = f"of {len(PAGES)} kinds of pages, capacity, running or waiting read otherwise than it is"
    return [row(GOAL, case, 0, len(PAGES) - len(found) + len(wrong), note=str(wrong) if wrong else "")]


async def _long(http: aiohttp.ClientSession, url: str) -> None:
    """Send a request directly to an engine, which runs until it is cancelled."""
    body = {"model": MODEL, "prompt": "long", "max_tokens": 900, "stream": True}
    async with http.post(url + "/v1/completions", json=body) as response:
        async for _ in response.content.iter_any():
            pass


async def deferred(bench: Bench) -> list[Row]:
    """Goal 28: a replica with requests that wait for another reason than capacity, beside a dense one."""
    asked = bench.scale.pick_count(80, 800)
    async with (
        engines(bench, ["vllm-deferred", "vllm-dense"]) as urls,
        bench.run_cluster(0, PROBES, urls=urls, asked=False) as run,
    ):
        await asyncio.sleep(0.5)
        found = await send_concurrently(16, asked, lambda _: run.ask(stream=False))
        seen = [answer.headers.get(REPLICA, "") for answer in found]
    share = seen.count(urls[0]) * len(urls) / asked
    case = "473 requests deferred at 1 of 2 replicas: its part of an equal share, at least"
    return [
        row(GOAL, case, SHARE_MIN, share, ok=share >= SHARE_MIN),
        failures(GOAL, "... client errors", found),
    ]


async def asleep(bench: Bench) -> list[Row]:
    """Goal 28: a sleeping replica gets no requests, and gets some again after it wakes up."""
    asked = bench.scale.pick_count(40, 400)
    async with (
        engines(bench, ["vllm-asleep", "vllm-dense"]) as urls,
        bench.run_cluster(0, PROBES, urls=urls, asked=False) as run,
    ):

        async def ready() -> bool:
            at = await replicas_of(run)
            return any(each["ready"] for each in at.values())

        await poll_until(ready, bench.scale.patience_s(10.0))
        found = await send_concurrently(8, asked, lambda _: run.ask(stream=False))
        there = sum(answer.headers.get(REPLICA) == urls[0] for answer in found)
        async with run.http.post(urls[0] + "/wake_up"):
            pass

        async def used() -> bool:
            answers = await send_concurrently(8, 16, lambda _: run.ask(stream=False))
            return any(answer.headers.get(REPLICA) == urls[0] for answer in answers)

        awake = await poll_until(used, bench.scale.patience_s(10.0))
    return [
        failures(GOAL, "1 of 2 replicas asleep: client errors", found),
        row(GOAL, "... requests sent there", 0, there),
        row(GOAL, "... awake again: it still gets none", 0, int(not awake)),
    ]


async def processes(bench: Bench) -> list[Row]:
    """Goal 28: each `/metrics` page comes from another process behind one URL. Knowledge of the cache must survive
    that."""
    bench.only_ours("its predictions")
    lost, asked = 0, bench.scale.pick_count(10, 60)
    async with engines(bench, ["vllm-processes"]) as urls, bench.run_cluster(0, PROBES, urls=urls) as run:
        await asyncio.sleep(2.0)  # ten probes
        await complete(run, "river " * 200)
        for _ in range(asked):
            await asyncio.sleep(0.25)
            answer = await complete(run, "river " * 200)
            lost += answer.cached > 0 and not answer.predicted
    return [row(GOAL, f"three processes behind one page: of {asked} hits, not predicted", 0, lost)]


async def full_queue(bench: Bench) -> list[Row]:
    """Goal 28: more requests than fit SGLang's queue: shed with Retry-After, and no breaker opens."""
    asked = bench.scale.pick_count(48, 480)
    async with (
        engines(bench, ["sglang-queue"], "--max-num-seqs", "2", "--time-scale", "20") as urls,
        bench.run_cluster(0, PROBES, urls=urls) as run,
    ):
        found = await send_concurrently(24, asked, lambda n: run.ask(stream=bool(n % 2), timeout_s=60.0))
        silent = sum(not _says_when(answer) for answer in found)

        async def served() -> bool:
            return (await run.ask(stream=False)).ok

        back = await poll_until(served, bench.scale.patience_s(10.0))
        opened = sum(each["breaker"] == "open" for each in (await replicas_of(run)).values()) if bench.ours else 0
    refused = sum(answer.status in (429, 503) for answer in found)
    case = f"a full queue, {asked} requests: no answer and no time for a retry"
    return [
        row(GOAL, case, 0, silent, found=found, note=f"{refused} refused"),
        row(GOAL, "... breakers opened, or nothing answered behind it", 0, opened + (not back)),
    ]


def _says_when(answer: FaultAnswer) -> bool:
    """True for an answer, or for a refusal with Retry-After; a stream reports a full queue in an event."""
    if answer.status in (429, 503):
        return "retry-after" in answer.headers
    return answer.ok


ROWS = (*map(predicted_by, TAUGHT_BY), pages, deferred, asleep, processes, full_queue)
