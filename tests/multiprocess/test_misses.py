"""Why requests missed the cache, with several workers: what the hub knows, its workers tell."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import aiohttp
import pytest

from router.core.insights.breakdown import Explainer, with_actual_usage
from router.core.placement.placement_request import PlacementRequest
from router.core.prompts.block_keys import Chain
from router.core.types.misses import Difference, DifferenceKind, MissReason, PromptAnalysis
from router.core.types.placements import EndReason, Outcome, Usage
from router.core.types.requests import Prompt, RequestSpec
from router.telemetry.record import RequestRecord
from tests.multiprocess.stubs import StubHub, serving, until, worker
from tests.multiprocess.test_hub_lost import NOBODY
from tests.multiprocess.test_processes import CHAT, body, command, json_of, pytestmark
from tests.support.fakes import FakeEngine

__all__ = ["pytestmark"]

TEXT = "tell me more " * 300
USAGE = Usage(1_000, 5, 100)


def wanted(sighting: PromptAnalysis | None) -> PlacementRequest:
    """A prompt of a thousand tokens."""
    prompt = Prompt(b"", 0, (), skipped_bytes=4_000)
    return PlacementRequest(
        RequestSpec("m", prompt), "m", Chain([1, 2, 3, 4, 5, 6, 7], 1, 9, (), 1), "key", sighting=sighting
    )


async def test_a_worker_is_told_why_and_tells_what_came_of_it(tmp_path: Path) -> None:
    """The hub explains a placement by what the worker's texts say; the worker has it for the header, and reports what
    the engine counted, and what its texts said, with the candidates that the hub has kept. The same prompt through
    another worker is a replay. Without the hub nothing is explained."""
    path, hub = tmp_path / "hub", StubHub("http://a")
    hub.router.explainer = Explainer(1_000, replay_window_s=60.0)
    difference = Difference(DifferenceKind.COUNTER, 0, "system", "messages[0].content", 9, 8, 2_000, "0", 2**64 - 1)
    seen = PromptAnalysis(known_bytes=100, repeated_bytes=2_000, template=2**64 - 1, turn=2, difference=difference)
    async with worker(path) as one:
        async with serving(hub, path), worker(path, 1) as two:
            await until(lambda: one.placing and two.placing)
            for placer, replay in ((one, False), (two, True)):
                lease = await placer.place(wanted(seen), NOBODY)
                assert lease.receipt.miss is not None
                assert lease.receipt.replay is replay
                assert replay or lease.receipt.miss.misses[MissReason.DIVERGED] == 500
                placer.finish(lease, Outcome(EndReason.OK, USAGE), 1.0)
                record = RequestRecord(
                    "1", CHAT, receipt=lease.receipt, usage=USAGE, ending=EndReason.OK, sighting=seen
                )
                record.miss = with_actual_usage(lease.receipt.miss, USAGE)
                placer.record_request(record)
                await until(lambda: hub.records)
                got = hub.records.pop()
                assert got.sighting == seen
                assert got.miss == record.miss
                assert got.receipt is not None
                assert got.receipt.candidates
                assert got.receipt.replay is replay
        await until(lambda: not one.placing)
        assert (await one.place(wanted(seen), NOBODY)).receipt.miss is None


async def observed(workers: int) -> tuple[list[str], list[dict[str, Any]], dict[str, float]]:
    """What clients, pages and metrics tell of four requests on one connection: cold, replay, new, and cold."""
    asked = [[TEXT], [TEXT], [TEXT, "answer", "more"], ["other " + TEXT]]
    headers = []
    async with FakeEngine() as engine, command(engine, workers=workers) as running:
        connector = aiohttp.TCPConnector(limit=1)
        async with aiohttp.ClientSession(connector=connector) as session:
            for texts in asked:
                messages = [{"role": ("user", "assistant")[n % 2], "content": text} for n, text in enumerate(texts)]
                async with session.post(running.url + CHAT, json={**body(), "messages": messages}) as answer:
                    await answer.read()
                    headers.append(answer.headers["x-warmroute-miss"])
        rows: list[dict[str, Any]] = []
        while len(rows) < len(asked):
            rows = (await json_of(running.admin_url + "/admin/decisions"))["decisions"]
        names = ("warmroute_miss_tokens_total", "warmroute_hit_tokens_total", "warmroute_duplicate_prompts_total")
        async with aiohttp.ClientSession() as session, session.get(running.admin_url + "/metrics") as page:
            lines = [line.rpartition(" ") for line in (await page.text()).splitlines() if line.startswith(names)]
        figures = {series: float(value) for series, _, value in lines}
    told = ("miss", "hit_tokens", "hit", "saved_ms", "turn", "step", "difference", "reason", "usage")
    return headers, [{name: row[name] for name in told} for row in rows], figures


@pytest.mark.long
@pytest.mark.timeout(120)
async def test_two_workers_tell_what_one_process_does() -> None:
    """Headers, decisions and metrics are the same, however many processes serve clients."""
    alone, two = await observed(1), await observed(2)
    assert alone == two
    headers, rows, figures = alone
    assert [row["hit"] for row in rows] == ["genuine", "genuine", "replay", "genuine"]
    assert headers[0].startswith("cold=")
    assert (
        sum(figures.values()) - figures["warmroute_duplicate_prompts_total"] == 400
    )  # four prompts of 100, by the engine
