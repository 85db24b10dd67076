"""Where prompt tokens end: metrics tell it live, and the log offline."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import aiohttp
import pytest

from router.cli.main import main
from tests.engines.test_exact import replicas
from tests.proxy.test_funnel import sums, traffic
from tests.support.command import CHAT, Command, command


async def logged(running: Command, requests: int) -> list[str]:
    """The router's whole log, once it has so many lines of requests."""
    async with asyncio.timeout(60):
        while sum(line["event"] == "request" for line in running.lines) < requests:
            await asyncio.sleep(0.02)
    return list(running.wrote)


@pytest.mark.long
@pytest.mark.timeout(180)
async def test_audit_of_the_routers_log_tells_what_its_metrics_do(tmp_path: Path) -> None:
    """`warmroute audit` of a router's own log has every place with the tokens of the metric, whatever else the log
    says, and why what is held elsewhere was not asked for there; requests that came to nothing are told apart."""
    asked = traffic()
    path, out = tmp_path / "router.log", tmp_path / "out.json"
    async with replicas(2, kv_tokens=2_048) as engines, aiohttp.ClientSession() as client:
        options = {"log__requests": "true", "routing__policy": "round_robin"}
        async with command(*engines.urls, **options) as running:
            for body in asked:
                async with client.post(running.url + CHAT, json=body) as answer:
                    assert answer.status == 200
            async with client.post(running.url + CHAT, json={"model": "sim", "messages": "none"}) as answer:
                assert answer.status == 400
            lines = await logged(running, len(asked))
            live = Counter[str]()
            async with asyncio.timeout(60):
                while live.total() < sum(map(prompt_tokens, lines)):
                    live = await sums(client, running.admin_url, "warmroute_token_fate_total", "fate")
    path.write_text("".join(lines))
    assert main(["audit", str(path), "--json", str(out)]) == 0
    rows = json.loads(out.read_text())["rows"]
    (figures,) = [row for row in rows if row["case"] == "log"]
    served = Counter({row["place"]: row["served_tokens"] for row in rows if row["case"] == "place"})
    assert served == +live
    assert served["cached_on_other_replica"] > 500
    assert figures["served_held"] == {"policy": served["cached_on_other_replica"]}
    assert figures["served_requests"] - figures["served_untold"] == len(asked)
    assert figures["requests"] == figures["unread_lines"] == 0


def prompt_tokens(line: str) -> int:
    """Prompt tokens of a line of the log, by its places."""
    return sum(json.loads(line).get("places", {}).values()) if line.startswith("{") else 0
