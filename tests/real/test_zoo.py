"""The zoo's dense engine beside a real vLLM: each field that it has, vLLM has, of the same kind of value."""

from __future__ import annotations

import json
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from typing import Any

import httpx
import pytest

from loadtest.fake_engine.command import Engines, EngineSettings, KvEventsSettings
from loadtest.fake_engine.step import Limits
from tests.real.vllm_server import BLOCK_TOKENS, MODEL, Replica

CHAT = {"messages": [{"role": "user", "content": "tell me of the river"}], "max_tokens": 8}
ASKED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": "tell me of the river", "max_tokens": 8}),
    ("/v1/messages", CHAT),
    ("/v1/responses", {"input": "tell me of the river", "max_output_tokens": 8, "store": False}),
    ("/tokenize", {"prompt": "tell me of the river"}),
]
REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("/v1/chat/completions", CHAT | {"max_tokens": 0}),
    ("/v1/chat/completions", CHAT | {"model": "none"}),
    ("/v1/completions", {"prompt": "", "max_tokens": 8}),
]
OWN = ("ttft_s",)
NOT_VLLMS = "loadtest:"
SAMPLE = re.compile(r"^([\w:]+)(?:\{(.*)\})? \S+$", re.MULTILINE)
LABEL = re.compile(r'(\w+)="')


@pytest.fixture
async def both(replicas: list[Replica]) -> AsyncIterator[tuple[httpx.AsyncClient, httpx.AsyncClient]]:
    """Clients of the zoo's engine and of vLLM."""
    async with AsyncExitStack() as stack:
        settings = EngineSettings(
            replicas=1,
            port=0,
            model=MODEL,
            time_scale=1000.0,
            limits=Limits(block_tokens=BLOCK_TOKENS),
            kv_events=KvEventsSettings(0, 0),
        )
        engines = await stack.enter_async_context(Engines(settings))
        urls = (engines.urls[0], replicas[0].url)
        ours, theirs = [
            await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=120, trust_env=False))
            for url in urls
        ]
        yield ours, theirs


def missing(ours: object, theirs: object, at: str = "") -> list[str]:
    """Fields that only ours has, or of another kind. None stands for any kind."""
    if ours is None or theirs is None:
        return []
    if isinstance(ours, dict) and isinstance(theirs, dict):
        return [
            found
            for name, value in ours.items()
            if name not in OWN
            for found in ([f"{at}.{name}"] if name not in theirs else missing(value, theirs[name], f"{at}.{name}"))
        ]
    if isinstance(ours, list) and isinstance(theirs, list):
        return missing(ours[0], theirs[0], f"{at}[]") if ours and theirs else []
    kinds = [
        float if isinstance(each, int | float) and not isinstance(each, bool) else type(each) for each in (ours, theirs)
    ]
    return [] if kinds[0] is kinds[1] else [f"{at}: {kinds[0].__name__}, not {kinds[1].__name__}"]


def kinds(text: str) -> dict[str, dict[str, Any]]:
    """The last event of each kind in a stream."""
    found = {}
    for data in re.findall(r"^data: (\{.*)$", text, re.MULTILINE):
        event = json.loads(data)
        choices = event.get("choices")
        kind = event.get("type") or event["object"]
        if choices is not None:
            delta = choices[0].get("delta", {}) if choices else {}
            kind += " usage" if not choices else " role" if delta.get("role") else ""
        found[kind] = event
    return found


@pytest.mark.parametrize(("path", "body"), ASKED)
async def test_answers(both: tuple[httpx.AsyncClient, httpx.AsyncClient], path: str, body: dict[str, Any]) -> None:
    """Whole answers."""
    ours, theirs = [await client.post(path, json={"model": MODEL, **body}) for client in both]
    assert (ours.status_code, ours.headers["content-type"]) == (theirs.status_code, theirs.headers["content-type"])
    assert missing(ours.json(), theirs.json()) == []


@pytest.mark.parametrize(("path", "body"), ASKED[:4])
async def test_streams(
    both: tuple[httpx.AsyncClient, httpx.AsyncClient], path: str, body: dict[str, Any], figures: Callable[[str], None]
) -> None:
    """Events, kind by kind, and how a stream ends."""
    options = {"stream_options": {"include_usage": True}} if "completions" in path else {}
    ours, theirs = [
        await client.post(path, json={"model": MODEL, **body, **options, "stream": True}) for client in both
    ]
    assert (ours.status_code, ours.headers["content-type"]) == (theirs.status_code, theirs.headers["content-type"])
    here, there = kinds(ours.text), kinds(theirs.text)
    assert here.keys() <= there.keys()
    figures(f"zoo: events of {path} that only vLLM has: {sorted(there.keys() - here.keys()) or 'none'}")
    assert {kind: found for kind, event in here.items() if (found := missing(event, there[kind]))} == {}
    assert ours.text.endswith("data: [DONE]\n\n") == theirs.text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize(("path", "body"), REFUSED)
async def test_errors(both: tuple[httpx.AsyncClient, httpx.AsyncClient], path: str, body: dict[str, Any]) -> None:
    """Status and fields of refusals."""
    ours, theirs = [await client.post(path, json={"model": MODEL, **body}) for client in both]
    assert ours.status_code == theirs.status_code
    assert missing(ours.json(), theirs.json()) == []


@pytest.mark.parametrize("path", ["/v1/models", "/version", "/load", "/kv_event_sources"])
async def test_pages(both: tuple[httpx.AsyncClient, httpx.AsyncClient], path: str) -> None:
    """Pages that a router reads."""
    ours, theirs = [await client.get(path) for client in both]
    assert (ours.status_code, theirs.status_code) == (200, 200)
    assert missing(ours.json(), theirs.json()) == []


async def test_metrics(both: tuple[httpx.AsyncClient, httpx.AsyncClient]) -> None:
    """Every sample of the page is one of vLLM's, by name and by the names of its labels."""
    for client in both:  # some samples are there from the first request on
        await client.post("/v1/chat/completions", json={"model": MODEL, **CHAT})
    ours, theirs = [labelled((await client.get("/metrics")).text) for client in both]
    own = {name: labels for name, labels in ours.items() if not name.startswith(NOT_VLLMS)}
    assert {name: labels - theirs.get(name, set()) for name, labels in own.items() if name not in theirs} == {}
    assert {name: more for name, labels in own.items() if (more := labels - theirs[name])} == {}


def labelled(page: str) -> dict[str, set[str]]:
    """Names of samples, each with the names of its labels."""
    return {name: set(LABEL.findall(labels)) for name, labels in SAMPLE.findall(page)}
