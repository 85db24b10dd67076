"""What an answer's receipt predicts of its first token, and what becomes of the prediction."""

from __future__ import annotations

import re
from typing import Any

from aiohttp import ClientSession

from tests.support.fakes import FakeEngine, running

CHAT = "/v1/chat/completions"
MEDIAN, HIGH = "x-warmroute-predicted-ttft-ms", "x-warmroute-predicted-ttft-p90-ms"
BODY: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "tell me more " * 300}]}


async def test_a_stream_is_told_when_its_first_token_comes(client: ClientSession, engine: FakeEngine) -> None:
    """Whole milliseconds, the median and the time of the slowest in ten; each prediction is counted by whether it held,
    and stands on the page of past requests. An answer in one piece has no first token to predict."""
    async with running(engine) as app:
        async with client.post(app.url + CHAT, json=BODY) as answer:
            assert not {MEDIAN, HIGH} & answer.headers.keys()
        for _ in range(5):
            async with client.post(app.url + CHAT, json={**BODY, "stream": True}) as answer:
                assert 0 <= int(answer.headers[MEDIAN]) <= int(answer.headers[HIGH])
                await answer.read()
        async with client.get(f"{app.admin_url}/admin/decisions") as page:
            rows = (await page.json())["decisions"]
        async with client.get(f"{app.admin_url}/metrics") as page:
            metrics = await page.text()
    assert all(0 < row["predicted_ttft_s"] <= row["predicted_ttft_p90_s"] for row in rows)
    counts = re.findall(r'^warmroute_ttft_predictions_total{model="m",within="\w+"} (\S+)', metrics, re.MULTILINE)
    assert len(counts) == 3
    assert sum(map(float, counts)) == 5
    assert 'warmroute_ttft_prediction_ratio_count{model="m"} 5.0' in metrics
