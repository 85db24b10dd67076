"""Streams of real vLLM that are killed behind every event go on on the other replica as if nothing had happened."""

from __future__ import annotations

import asyncio
import json
import os
import random
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import pytest

from tests.real.cutter import Cut, Cutter
from tests.real.router_process import Router
from tests.real.talk import prose
from tests.real.vllm_server import MODEL, Replica
from tests.support.speaking import chunks_of, said_in

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
TOKENS = 40
TIMEOUT_S = 420.0
PROMPTS = int(os.environ.get("WARMROUTE_CONTINUING_PROMPTS", "1"))
PROMPTS_MAX = PROMPTS + 20  # until one is killed within its text: on a busy machine a stream may have two events
"""Prompts of each API and set of fields; each is asked once for every event of its answer."""


@asynccontextmanager
async def cut(replicas: list[Replica], folder: Path) -> AsyncIterator[tuple[list[Cutter], Router]]:
    """A router before both replicas, and what breaks their streams."""
    async with AsyncExitStack() as stack:
        made = Cut()
        cutters = [await stack.enter_async_context(Cutter(replica.port, made)) for replica in replicas]
        budget = ("--set", "upstream.retry_floor_per_s=1000")
        port = cutters[0].url.rpartition(":")[2]  # a log of its own, which says where this one listens
        router = Router([cutter.url for cutter in cutters], folder, f"router-continuing-{port}", budget)
        try:
            await asyncio.to_thread(router.wait_ready)  # the cutters are served by this loop
            await asyncio.to_thread(router.wait_replicas, len(cutters))
            yield cutters, router
        finally:
            router.server.kill()


def body_of(path: str, number: int, **fields: Any) -> dict[str, Any]:
    """A greedy request."""
    text = prose(f"continuing {number}", 60)
    asked = {"messages": [{"role": "user", "content": text}]} if path == CHAT else {"prompt": text}
    more = {"stream_options": {"include_usage": True}, "max_tokens": TOKENS, "ignore_eos": True}
    return {"model": MODEL, "stream": True, "temperature": 0.0, **more, **asked, **fields}


async def streamed(
    client: httpx.AsyncClient, url: str, body: dict[str, Any], heard: Callable[[], None] = lambda: None
) -> list[dict[str, Any]]:
    """The chunks of a stream that ends well; `heard` is called for each piece of it."""
    content = b""
    async with client.stream("POST", url, json=body, headers={"x-warmroute-stream-failover": "exact"}) as answer:
        async for piece in answer.aiter_raw():
            content += piece
            heard()
    assert answer.status_code == 200, content
    assert content.endswith(b"data: [DONE]\n\n"), content[-500:]
    return chunks_of(content)


async def settle(client: httpx.AsyncClient, router: Router) -> None:
    """Have both replicas trusted again: kills in a row open a breaker, which answers close. Prompts that no replica has
    are sent together, so that the replica that is slower at the moment gets some of them, too."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            bodies = [{"model": MODEL, "prompt": f"{random.random()} is a number", "max_tokens": 8} for _ in range(12)]
            await asyncio.gather(*(client.post(router.url + COMPLETIONS, json=body) for body in bodies))
            rows = await asyncio.to_thread(router.replica_rows)
            if rows and all(row["breaker"]["state"] == "closed" and row["ready"] for row in rows):
                return
            await asyncio.sleep(0.2)


def given_on(cutters: list[Cutter]) -> list[int] | None:
    """The prompt of the last request that continued a stream; None where none did."""
    asked = [each for cutter in cutters for each in cutter.asked if b'"prompt":[' in each]
    if not asked:
        return None
    prompt: list[int] = json.loads(asked[-1].partition(b"\r\n\r\n")[2])["prompt"]
    return prompt


FIELDS: list[dict[str, Any]] = [{}, {"stop": ["zzqq", "self self self"]}, {"repetition_penalty": 1.3, "min_tokens": 20}]


@pytest.mark.parametrize("fields", FIELDS, ids=["plain", "stop", "penalty"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_every_event(
    replicas: list[Replica], folder: Path, figures: Callable[[str], None], path: str, fields: dict[str, Any]
) -> None:
    """Killed behind every event in turn, a greedy answer is the unbroken one: text, ids, reason to finish and usage.
    The other replica goes on with each that was killed before all was said, and none is begun anew. On a busy machine a
    stream may have fewer events than the one before: it ends before it is killed, or all was said when it is."""
    kills = continued = said_whole = 0
    async with (
        cut(replicas, folder) as (cutters, router),
        httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as client,
    ):
        for number in range(PROMPTS_MAX):
            if number >= PROMPTS and continued:
                break
            body = body_of(path, number, **fields)
            whole = await streamed(client, replicas[0].url + path, body | {"return_token_ids": True})
            ids = [id_ for chunk in whole for choice in chunk["choices"] for id_ in choice.get("token_ids") or ()]
            expected = said_in(whole) | {"ids": []}
            events = sum(bool(chunk["choices"]) for chunk in whole)
            for after in range(1, events):
                await settle(client, router)
                made = cutters[0].cut
                made.after = after
                made.heard.clear()
                for cutter in cutters:
                    cutter.asked.clear()
                got = said_in(await streamed(client, router.url + path, body, made.heard.set))
                assert got == expected, after
                made.after = None
                if made.made > kills:
                    kills += 1
                    if (prompt := given_on(cutters)) is not None:
                        said = prompt[expected["usage"][0][0] :]
                        assert said == ids[: len(said)], after
                        continued += 1
                    else:
                        said_whole += sum(len(cutter.asked) for cutter in cutters) == 1
    figures(f"{path} {fields or ''}: {kills} streams killed, {continued} continued, all equal to the unbroken answer")
    assert continued + said_whole == kills
    assert continued


async def test_official_client(replicas: list[Replica], folder: Path) -> None:
    """OpenAI's own client sees one stream, wherever it broke."""
    async with cut(replicas, folder) as (cutters, router):
        body = body_of(CHAT, 7)
        async with httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False) as client:
            expected = said_in(await streamed(client, replicas[0].url + CHAT, body))
        del body["ignore_eos"]  # the client takes it elsewhere
        asking = httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False)
        official_client = openai.AsyncOpenAI(base_url=f"{router.url}/v1", api_key="x", max_retries=0)
        async with asking as client, official_client as official:
            for after in (1, 2, 15, TOKENS):
                await settle(client, router)
                cutters[0].cut.after = after
                stream = await official.chat.completions.create(
                    **body, extra_body={"ignore_eos": True}, extra_headers={"x-warmroute-stream-failover": "exact"}
                )
                chunks = [chunk.model_dump(exclude_unset=True) async for chunk in stream]
                assert said_in(chunks) == expected, after


TOOL = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}


async def test_tools(replicas: list[Replica], folder: Path, figures: Callable[[str], None]) -> None:
    """A chat that may call tools is the unbroken one, or ends in an error that says so."""
    exact = honest = 0
    talking = httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False)
    async with cut(replicas, folder) as (cutters, router), talking as client:
        body = body_of(CHAT, 11, tools=[TOOL], tool_choice="auto")
        expected = said_in(await streamed(client, replicas[0].url + CHAT, body))
        for after in range(1, TOKENS, 3):
            await settle(client, router)
            cutters[0].cut.after = after
            headers = {"x-warmroute-stream-failover": "exact"}
            answer = await client.post(router.url + CHAT, json=body, headers=headers)
            if b"stream_broken" in answer.content:
                honest += 1
                shown = said_in(chunks_of(answer.content.rpartition(b"data: ")[0]))["text"]
                assert expected["text"].startswith(shown)
            else:
                exact += 1
                assert said_in(chunks_of(answer.content)) == expected, after
    figures(f"chat with tools: {exact} streams continued exactly, {honest} refused honestly")
    assert exact


async def test_messages(replicas: list[Replica], folder: Path, figures: Callable[[str], None]) -> None:
    """Anthropic's own client gets an honest error where its message broke: what came is the beginning of the unbroken
    message, and nothing of it comes twice or otherwise. On a busy machine a message may end before it is killed."""
    shown_chars = list[int]()
    body: dict[str, Any] = {"model": MODEL, "max_tokens": TOKENS, "extra_body": {"temperature": 0.0}}
    body["messages"] = [{"role": "user", "content": prose("continuing 13", 60)}]
    async with cut(replicas, folder) as (cutters, router):
        unbroken = list[str]()
        async with anthropic.AsyncAnthropic(base_url=replicas[0].url, api_key="x", max_retries=0) as direct:
            assert await _read(direct, body, unbroken) == ""
        asking = httpx.AsyncClient(timeout=TIMEOUT_S, trust_env=False)
        official_client = anthropic.AsyncAnthropic(base_url=router.url, api_key="x", max_retries=0)
        async with asking as client, official_client as official:
            for after in (1, 2, 3, 10, 30):
                await settle(client, router)
                made = cutters[0].cut
                made.after = after
                made.heard.clear()
                got = list[str]()
                error = await _read(official, body, got, made.heard.set)
                if error:
                    assert "stream_broken" in error
                    assert "".join(unbroken).startswith("".join(got)), after
                    shown_chars.append(len("".join(got)))
                else:
                    assert "".join(got) == "".join(unbroken)
                made.after = None
    assert shown_chars
    figures(f"messages: broken streams ended with an error behind {shown_chars} characters of the unbroken one")


async def _read(
    client: anthropic.AsyncAnthropic, body: dict[str, Any], text: list[str], heard: Callable[[], None] = lambda: None
) -> str:
    """Read a message's text as far as it comes; `heard` is called for each event. Return the client's error, "" for
    none."""
    try:
        async with client.messages.stream(**body, extra_headers={"x-warmroute-stream-failover": "exact"}) as stream:
            async for event in stream:
                heard()
                if event.type == "text":
                    text.append(event.text)
    except anthropic.APIError as error:
        return str(error)
    return ""
