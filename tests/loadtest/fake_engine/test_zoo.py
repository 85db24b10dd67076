"""Each member of the zoo shows what it deviates in, and the router's readers take its pages and events."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import aiohttp
import msgspec
import pytest

from loadtest.fake_engine import tokens
from loadtest.fake_engine.calibration import CALIBRATION, CALIBRATIONS
from loadtest.fake_engine.command import settings
from loadtest.fake_engine.kv_pool import AllBlocksCleared, BlocksRemoved, BlockStored
from loadtest.fake_engine.zoo.kv_encoding import SglangEvents, VllmEvents, encoding_of
from loadtest.fake_engine.zoo.member import DENSE, Member
from loadtest.fake_engine.zoo.members import MEMBERS
from loadtest.fake_engine.zoo.pages import page_of
from loadtest.simulate.engine.machine import Machine
from loadtest.simulate.engine.replicas import VirtualReplica
from router.core import dialects
from router.core.fleet.engine_metrics import parse_load
from router.core.kv_events.batch_decoder import Stored, decode
from tests.loadtest.fake_engine.test_http import BLOCK, running

CHAT = {"messages": [{"role": "user", "content": "tell me of the river " * 20}], "max_tokens": 12}
SALTED = tokens.Text(bytes(range(256)) * 2, "tenant-1")


def sample(page: str, name: str, labels: str = "") -> list[float]:
    """Values of the samples of that name whose labels have the given part."""
    found = re.findall(rf"^{re.escape(name)}\{{([^\n]*)\}} (\S+)$", page, re.MULTILINE)
    return [float(value) for label, value in found if labels in label]


async def page(session: aiohttp.ClientSession, path: str = "/metrics") -> str:
    """The text of a page."""
    async with session.get(path) as response:
        assert response.status == 200
        return await response.text()


@pytest.fixture
async def session(request: pytest.FixtureRequest) -> AsyncIterator[aiohttp.ClientSession]:
    """A client of one replica of the member that the test names."""
    async with (
        running(member=MEMBERS[request.param], time_scale=1000.0) as engines,
        aiohttp.ClientSession(engines.urls[0]) as made,
    ):
        yield made


async def events(session: aiohttp.ClientSession, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The data of a stream's events, without `[DONE]`."""
    async with session.post(path, json={**body, "stream": True}) as response:
        assert response.status == 200, await response.text()
        text = await response.text()
    datas = re.findall(r"^data: (.*)$", text, re.MULTILINE)
    return [json.loads(data) for data in datas if data != "[DONE]"]


def test_names(capsys: pytest.CaptureFixture[str]) -> None:
    """A member is known by its name, says where its difference was read, and an unknown name lists all."""
    for name, member in MEMBERS.items():
        assert name == member.name == settings(["--like", name]).member.name
        assert member is DENSE or member.source
    for argv in (["--like", "nothing"], ["--like"]):
        with pytest.raises(SystemExit):
            settings(argv)
        listed = capsys.readouterr().err
        assert all(f" {name} " in listed for name in MEMBERS), argv


@pytest.mark.parametrize("session", sorted(MEMBERS), indirect=True)
async def test_every_member_answers(session: aiohttp.ClientSession) -> None:
    """Chats, completions, Messages, Responses, transcriptions and speech, as streams and whole."""
    async with session.post("/wake_up"):  # 404 where there is no sleep mode
        pass
    speech = {"input": "the river is wide", "max_tokens": 6}
    for path, body in (
        ("/v1/chat/completions", CHAT),
        ("/v1/completions", {"prompt": "the river", "max_tokens": 6}),
        ("/v1/messages", CHAT | {"system": "be brief"}),
        ("/v1/responses", {"input": "the river", "max_output_tokens": 6}),
        ("/v1/audio/speech", speech),
    ):
        wholes = []
        for streams in (False, True):
            async with session.post(path, json={**body, "stream": streams}) as response:
                assert response.status == 200, await response.text()
                assert (response.content_length is None) == streams
                wholes.append(await response.read())
        assert all(wholes)
        dialect = dialects.dialect_of(path)
        if path != "/v1/audio/speech":
            assert dialect.usage(wholes[0]) is not None, path
    for wanted in ("false", "true"):
        data = aiohttp.FormData({"max_tokens": "6", "stream": wanted})
        data.add_field("file", b"RIFF", filename="a.wav")
        async with session.post("/v1/audio/transcriptions", data=data) as response:
            assert response.status == 200, await response.text()
            assert await response.read()
    assert await events(session, "/v1/audio/speech", speech | {"stream_format": "sse"})


@pytest.mark.parametrize("session", ["vllm-dense"], indirect=True)
async def test_dense(session: aiohttp.ClientSession) -> None:
    """Capacity is block size times blocks, nobody is deferred, and the engine is awake."""
    text = await page(session)
    (config,) = re.findall(r"^vllm:cache_config_info\{(.*)\}", text, re.MULTILINE)
    info = dict(re.findall(r'(\w+)="([^"]*)"', config))
    assert int(info["block_size"]) * int(info["num_gpu_blocks"]) == int(info["kv_cache_size_tokens"])
    assert sample(text, "vllm:num_requests_waiting_by_reason") == [0, 0]
    assert sample(text, "vllm:engine_sleep_state") == [1, 0, 0]


async def test_hybrid() -> None:
    """At the capacity of the report, the page has the report's figures."""
    async with running(member=MEMBERS["vllm-hybrid"], kv_tokens=463_459) as engines:
        async with aiohttp.ClientSession(engines.urls[0]) as session:
            text = await page(session)
    assert 'block_size="8"' in text
    assert 'num_gpu_blocks="320"' in text
    assert f'kv_cache_size_tokens="{463_459 // BLOCK * BLOCK}"' in text


def test_groups() -> None:
    """A group of equal blocks has the same hashes, one of smaller blocks its own; all go with the block."""
    encoding = VllmEvents(BLOCK, MEMBERS["vllm-hybrid"].groups)
    keys = tokens.chain(SALTED.data, BLOCK, SALTED.salt)
    stored = encoding.encode_event(BlockStored(SALTED, 0, keys[:2], None)) + encoding.encode_event(
        BlockStored(SALTED, 2, keys[2:3], keys[1])
    )
    assert [(each["group_idx"], each["block_size"], len(each["block_hashes"])) for each in stored] == [
        *((0, BLOCK, 2), (1, BLOCK, 2), (2, BLOCK // 2, 4)),
        *((0, BLOCK, 1), (1, BLOCK, 1), (2, BLOCK // 2, 2)),
    ]
    assert stored[5]["parent_block_hash"] == stored[2]["block_hashes"][-1]
    assert stored[2]["extra_keys"] == [["tenant-1"], None, None, None]
    removed = encoding.encode_event(BlocksRemoved(keys[1:2]))
    assert [(each["group_idx"], *each["block_hashes"]) for each in removed] == [
        *((0, keys[1]), (1, keys[1])),
        *((2, each) for each in stored[2]["block_hashes"][2:]),
    ]
    batch = decode(msgspec.msgpack.encode([1.0, stored + removed, 0]))
    assert len(batch.events) == len(stored + removed)


def test_sglangs_events() -> None:
    """Hashes are signed, and a salt has its own field."""
    keys = [(1 << 63) + 5, 7]
    (stored,) = SglangEvents(BLOCK).encode_event(BlockStored(SALTED, 0, keys, None))
    assert stored["block_hashes"] == [5 - (1 << 63), 7]
    assert stored["cache_salt"] == "tenant-1"
    (event,) = decode(msgspec.msgpack.encode([1.0, [stored], 0])).events
    assert event.salt == b"tenant-1"  # type: ignore[union-attr]


async def test_context_parallel() -> None:
    """The label has a part of a block; the scheduler and its events have the whole."""
    async with running(member=MEMBERS["vllm-dcp"]) as engines, aiohttp.ClientSession(engines.urls[0]) as session:
        assert engines.replicas[0].model.limits.block_tokens == 2 * BLOCK
        assert f'block_size="{BLOCK}"' in await page(session)


@pytest.mark.parametrize(("name", "lost"), [("vllm-dense", 0), ("vllm-eagle", BLOCK)])
async def test_the_last_block_is_computed_again(name: str, lost: int) -> None:
    """EAGLE finds one block less."""
    async with running(member=MEMBERS[name]) as engines, aiohttp.ClientSession(engines.urls[0]) as session:
        for found in (0, 7 * BLOCK - lost):
            async with session.post(
                "/v1/completions", json={"prompt": "abcd" * 7 * BLOCK + "x", "max_tokens": 2}
            ) as got:
                usage = (await got.json())["usage"]
            assert usage["prompt_tokens_details"]["cached_tokens"] == found


@pytest.mark.parametrize("session", ["vllm-deferred"], indirect=True)
async def test_deferred(session: aiohttp.ClientSession) -> None:
    """Requests wait, none of them for room, and a new one is computed at once."""
    text = await page(session)
    assert sample(text, "vllm:num_requests_waiting") == [473]
    assert sample(text, "vllm:num_requests_waiting_by_reason", 'reason="capacity"') == [0]
    assert sample(text, "vllm:num_requests_waiting_by_reason", 'reason="deferred"') == [473]
    async with session.post("/v1/chat/completions", json=CHAT) as response:
        assert response.status == 200


@pytest.mark.parametrize("session", ["vllm-asleep"], indirect=True)
async def test_asleep(session: aiohttp.ClientSession) -> None:
    """A request waits for the engine to wake up; one that is under way when it goes to sleep ends with what it has."""
    assert json.loads(await page(session, "/is_sleeping")) == {"is_sleeping": True}
    assert sample(await page(session), "vllm:engine_sleep_state") == [0, 1, 0]
    asked = asyncio.create_task(events(session, "/v1/chat/completions", CHAT))
    while sample(await page(session), "vllm:num_requests_waiting") != [1]:
        await asyncio.sleep(0)
    async with session.post("/wake_up") as response:
        assert (await response.json())["status"] == "awake"
    assert (await asked)[-1]["choices"][0]["finish_reason"] == "length"

    long = asyncio.create_task(events(session, "/v1/chat/completions", CHAT | {"max_tokens": 100_000}))
    while sample(await page(session), "vllm:num_requests_running") != [1]:
        await asyncio.sleep(0)
    async with session.post("/sleep?level=2"):
        pass
    assert (await long)[-1]["choices"][0]["finish_reason"] == "abort"
    text = await page(session)
    assert sample(text, "vllm:engine_sleep_state", 'sleep_state="discard_all"') == [1]
    assert sample(text, "vllm:num_requests_running") == [0]


@pytest.mark.parametrize("session", ["vllm-processes"], indirect=True)
async def test_processes(session: aiohttp.ClientSession) -> None:
    """Each scrape reads another process: its start, and its part of the counts."""
    async with session.post("/v1/chat/completions", json=CHAT) as response:
        assert response.status == 200
    pages = [await page(session) for _ in range(6)]
    starts = [float(re.findall(r"^process_start_time_seconds (\S+)$", each, re.MULTILINE)[0]) for each in pages]
    counts = [sample(each, "vllm:prompt_tokens_total")[0] for each in pages]
    assert starts[:3] == starts[3:]
    assert len({*starts}) == 3
    assert counts[:3] == counts[3:]
    assert counts[0] > counts[1] > counts[2] > 0


@pytest.mark.parametrize("session", ["sglang", "sglang-pp", "sglang-tp", "sglang-priority"], indirect=True)
async def test_sglangs_page(session: aiohttp.ClientSession, request: pytest.FixtureRequest) -> None:
    """A number has as many samples as schedulers report it, and parts beside its total."""
    member = MEMBERS[request.node.callspec.params["session"]]
    text = await page(session)
    for name in ("sglang:num_running_reqs", "sglang:num_queue_reqs"):
        assert len(sample(text, name)) == member.pp * member.tp * (1 + len(member.priorities)), name
    assert len(sample(text, "sglang:max_total_num_tokens")) == member.pp * member.tp
    if member.priorities:
        assert len(sample(text, "sglang:num_running_reqs", 'priority=""')) == 1
    assert parse_load(text).block_tokens == BLOCK
    info = json.loads(await page(session, "/server_info"))
    assert info["kv_events"] is None
    assert json.loads(await page(session, "/v1/models"))["data"][0]["owned_by"] == "sglang"


async def test_a_full_queue() -> None:
    """The next request is refused: flat and without Retry-After, or as an event of a stream."""
    async with running(member=MEMBERS["sglang-queue"], time_scale=1.0) as engines:
        engine = engines.replicas[0]
        engine.model._sequences_max = 0  # nobody is admitted
        async with aiohttp.ClientSession(engines.urls[0]) as session:
            waiting = [asyncio.create_task(events(session, "/v1/chat/completions", CHAT)) for _ in range(2)]
            while engine.model.waiting_n < 2:
                await asyncio.sleep(0)
            async with session.post("/v1/chat/completions", json=CHAT) as response:
                assert response.status == 503
                assert "Retry-After" not in response.headers
                error = await response.json()
            assert (error["object"], error["message"]) == ("error", "The request queue is full.")
            (event,) = await events(session, "/v1/chat/completions", CHAT)
            assert event["error"]["code"] == 503
            for each in waiting:
                each.cancel()


@pytest.mark.parametrize("session", ["sglang-reasoning"], indirect=True)
async def test_reasoning_that_is_not_streamed(session: aiohttp.ClientSession) -> None:
    """The first half of the tokens comes in one event, behind the role and before the rest."""
    deltas = [each["choices"][0]["delta"] for each in await events(session, "/v1/chat/completions", CHAT)]
    reasoning = [number for number, delta in enumerate(deltas) if delta["reasoning_content"]]
    assert deltas[0]["role"] == "assistant"
    assert reasoning == [1]
    assert len(deltas[1]["reasoning_content"]) == 6 * tokens.BYTES_PER_TOKEN
    assert sum(len(delta.get("content", "")) for delta in deltas) == 6 * tokens.BYTES_PER_TOKEN


@pytest.mark.parametrize("session", ["vllm-usage", "sglang-usage"], indirect=True)
async def test_usage_that_nobody_asked_for(session: aiohttp.ClientSession) -> None:
    """A stream ends with its usage; vLLM's has it in each event as well."""
    got = await events(session, "/v1/chat/completions", CHAT)
    assert got[-1]["choices"] == []
    assert got[-1]["usage"]["completion_tokens"] == 12
    owner = json.loads(await page(session, "/v1/models"))["data"][0]["owned_by"]
    assert all("usage" in each for each in got[:-1]) == (owner == "vllm")


@pytest.mark.parametrize("name", sorted(MEMBERS))
def test_in_a_simulated_world(name: str) -> None:
    """A replica of the simulation reports what a probe would read of the member's page."""
    machine, calibration = Machine(member=MEMBERS[name]), CALIBRATIONS[CALIBRATION]
    limits = machine.limits(calibration, BLOCK)
    replica = VirtualReplica("r", calibration, 100_000, limits, _never, _never, machine=machine)
    assert limits.drops_last_block == MEMBERS[name].drops_last_block
    if name == DENSE.name:
        assert replica.load().kv_tokens_max == 100_000
    else:
        assert replica.load() == parse_load(page_of(replica.model, machine.model, machine.member, 1))


def _never(*_: object) -> None:
    raise AssertionError("nothing is asked of it")


@pytest.mark.parametrize(("name", "fields", "removed"), [("vllm-0.15", 8, 3), ("sglang-0.5.8", 6, 2)])
def test_events_of_earlier_versions(name: str, fields: int, removed: int) -> None:
    """Arrays, without groups and salts, which the router's reader takes as it takes later ones."""
    keys = tokens.chain(SALTED.data, BLOCK, "")[:2]
    plain = tokens.Text(SALTED.data, "")
    of_pool = [BlockStored(plain, 0, keys, None), BlocksRemoved(keys), AllBlocksCleared()]
    said = [[each for event in of_pool for each in encoding_of(m, BLOCK)(event)] for m in _both(name)]
    assert {(each[0], len(each)) for each in said[0] if isinstance(each, list)} == {
        *(("BlockStored", fields), ("BlockRemoved", removed), ("AllBlocksCleared", 1))
    }
    read = [decode(msgspec.msgpack.encode([1.0, each, 0])).events for each in said]
    of_either = [
        ([key for each in events if isinstance(each, Stored) for key in each.hashes], events[-1]) for events in read
    ]
    assert of_either[0] == of_either[1]
    assert b"".join(each.tokens for each in read[0] if isinstance(each, Stored)) == b"".join(
        each.tokens for each in read[1] if isinstance(each, Stored)
    )


def _both(name: str) -> tuple[Member, Member]:
    """A member of an earlier version, and the later one."""
    member = MEMBERS[name]
    return member, replace(member, earlier=False)
