"""KV events leave the simulated replica as vLLM 0.24+ sends them."""

from __future__ import annotations

import base64
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import aiohttp
import msgspec
import pytest
import zmq
import zmq.asyncio

from loadtest.fake_engine import tokens
from loadtest.fake_engine.command import Engines, EngineSettings, KvEventsSettings
from loadtest.fake_engine.kv_pool import AllBlocksCleared, BlocksRemoved, BlockStored
from loadtest.fake_engine.kv_publisher import BUFFER_BATCHES, KvPublisher
from loadtest.fake_engine.step import Limits

BLOCK = 2  # tokens; eight bytes

# A batch as vLLM 0.32 packs it, cut down by hand to blocks of two tokens: an eviction and a salted, rooted run.
VLLM_PAYLOAD = base64.b64decode(
    "k8tB2sBWlgCvNJKEpHR5cGWsQmxvY2tSZW1vdmVkrGJsb2NrX2hhc2hlc5HP01U6vq15mFqmbWVkaXVto0dQValncm91cF9pZHgAi6R0eXBl"
    "q0Jsb2NrU3RvcmVkrGJsb2NrX2hhc2hlc5LPKUH+Hvr01XXPHVW654KN9SSxcGFyZW50X2Jsb2NrX2hhc2jAqXRva2VuX2lkc5TOYWFhYc5h"
    "YWFhzmFhYWHOYWFhYapibG9ja19zaXplAqdsb3JhX2lkwKZtZWRpdW2jR1BVqWxvcmFfbmFtZcCqZXh0cmFfa2V5c5KRqHRlbmFudC0xwKln"
    "cm91cF9pZHgAsmt2X2NhY2hlX3NwZWNfa2luZK5mdWxsX2F0dGVudGlvbgA="
)
VLLM_TIME_S = 1795250776.0106936
VLLM_EVENTS = (
    BlocksRemoved([15228142305651824730]),
    BlockStored(tokens.Text(b"a" * 16, "tenant-1"), 0, [2972936638054061429, 2113801103610869028], None),
)


Connect = Callable[[int, str], zmq.asyncio.Socket]


@pytest.fixture
async def publisher() -> AsyncIterator[KvPublisher]:
    """On free ports, at the recorded time."""
    started = KvPublisher(BLOCK, topic="kv-events", now=lambda: VLLM_TIME_S)
    started.start()
    yield started
    await started.stop()


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Client sockets that are closed afterwards."""
    context = zmq.asyncio.Context()
    sockets: list[zmq.asyncio.Socket] = []

    def connected(kind: int, endpoint: str) -> zmq.asyncio.Socket:
        socket = context.socket(kind)
        sockets.append(socket)
        if kind == zmq.SUB:
            socket.subscribe(b"")
        socket.connect(endpoint)
        return socket

    yield connected
    for socket in sockets:
        socket.close(linger=0)
    context.term()


async def replay(socket: zmq.asyncio.Socket, first: int) -> list[list[bytes]]:
    """Every answer to a replay request, the end marker included."""
    await socket.send_multipart([b"", first.to_bytes(8, "big")])
    answers = [await socket.recv_multipart()]
    while answers[-1][2] != b"\xff" * 8:
        answers.append(await socket.recv_multipart())
    return answers


async def test_a_batch_is_byte_for_byte_vllms(publisher: KvPublisher, connect: Connect) -> None:
    """The same events give the bytes vLLM would send: topic, number, array of time, maps and rank."""
    publisher.publish(VLLM_EVENTS)
    answers = await replay(connect(zmq.DEALER, publisher.replay_endpoint), 0)
    assert answers == [[b"", b"kv-events", bytes(8), VLLM_PAYLOAD], [b"", b"", b"\xff" * 8, b""]]


async def test_subscribers_get_numbered_batches(publisher: KvPublisher, connect: Connect) -> None:
    """Three frames each, numbers rising by one; what a late subscriber missed can be replayed."""
    subscriber = connect(zmq.SUB, publisher.endpoint)
    published = 0
    while not await subscriber.poll(10):  # until the subscription has arrived
        publisher.publish([AllBlocksCleared()])
        published += 1
    topic, seq, payload = await subscriber.recv_multipart()
    assert topic == b"kv-events"
    assert msgspec.msgpack.decode(payload) == [VLLM_TIME_S, [{"type": "AllBlocksCleared"}], 0]
    missed = await replay(connect(zmq.DEALER, publisher.replay_endpoint), 0)
    assert [int.from_bytes(frames[2], "big") for frames in missed[:-1]] == list(range(published))
    assert seq in [frames[2] for frames in missed]


async def test_replay_starts_where_asked_and_forgets_the_oldest(publisher: KvPublisher, connect: Connect) -> None:
    """From the number given, nothing but the end marker beyond the last, and a bounded buffer."""
    for _ in range(BUFFER_BATCHES + 5):
        publisher.publish([AllBlocksCleared()])
    socket = connect(zmq.DEALER, publisher.replay_endpoint)
    numbers = [int.from_bytes(frames[2], "big") for frames in await replay(socket, BUFFER_BATCHES)]
    assert numbers[:-1] == list(range(BUFFER_BATCHES, BUFFER_BATCHES + 5))
    assert len(await replay(socket, BUFFER_BATCHES + 5)) == 1
    await socket.send_multipart([b"no delimiter", bytes(8)])  # gets no answer at all, as measured
    assert len(await replay(socket, 0)) == BUFFER_BATCHES + 1


async def test_a_served_prompt_is_announced(connect: Connect) -> None:
    """Through the whole engine: prompt and answer are stored as they fill, evictions come before what replaced
    them, and a cleared cache is announced with the next step."""
    settings = EngineSettings(
        replicas=2,
        port=0,
        kv_tokens=64,
        limits=Limits(block_tokens=4, context_tokens_max=64),
        time_scale=200.0,
        kv_events=KvEventsSettings(0, 0, "kv"),
    )
    engines = Engines(settings)
    await engines.start()
    try:
        async with aiohttp.ClientSession(engines.urls[1]) as client:
            source = (await (await client.get("/kv_event_sources")).json())["0"]

            async def ask(prompt: str, outputs: int) -> str:
                body = {"prompt": prompt, "max_tokens": outputs}
                answer = await (await client.post("/v1/completions", json=body)).json()
                return str(answer["choices"][0]["text"])

            first = "f" * 80
            answered = await ask(first, 10)
            await ask("s" * 160, 5)
            await client.post("/reset_prefix_cache")
            await ask("t" * 16, 1)
        batches = [
            msgspec.msgpack.decode(frames[3])
            for frames in (await replay(connect(zmq.DEALER, source["replay_endpoint"]), 0))[:-1]
        ]
    finally:
        await engines.stop()
    events: list[dict[str, Any]] = [event for batch in batches for event in batch[1]]
    stored = [event for event in events if event["type"] == "BlockStored"]
    keys = tokens.chain((first + answered).encode(), 4)[:7]  # 29 of 30 tokens have KV
    assert [key for event in stored for key in event["block_hashes"]][:7] == keys
    assert [i for event in stored for i in event["token_ids"]][: 7 * 4] == tokens.ids((first + answered).encode())[:28]
    assert stored[0]["parent_block_hash"] is None
    assert stored[1]["parent_block_hash"] == stored[0]["block_hashes"][-1]
    removed = [event["block_hashes"] for event in events if event["type"] == "BlockRemoved"]
    # 44 tokens beside the first request's 29: 11 of 16 blocks, of which 9 hold nothing, then its tail goes.
    assert removed == [[keys[6]], [keys[5]]]
    kinds = [event["type"] for event in events]
    assert kinds.index("BlockRemoved") < kinds.index("BlockStored", kinds.index("BlockRemoved"))
    assert kinds[-2:] == ["AllBlocksCleared", "BlockStored"]
    assert source["topic"] == "kv"
    assert source["endpoint"] != source["replay_endpoint"]


async def test_a_taken_port_is_an_error(publisher: KvPublisher) -> None:
    """Two publishers cannot share a port."""
    with pytest.raises(zmq.ZMQError, match="in use"):
        KvPublisher(BLOCK, port=int(publisher.endpoint.rsplit(":", 1)[1]))


async def test_lost_batches_are_neither_sent_nor_replayed(publisher: KvPublisher, connect: Connect) -> None:
    """With `lose_every` the numbers that a subscriber receives have gaps; replays are answered again once it is 0."""
    subscriber = connect(zmq.SUB, publisher.endpoint)
    while not await subscriber.poll(10):  # until the subscription has arrived
        publisher.publish([AllBlocksCleared()])
    publisher.lose_every = 3
    for _ in range(9):
        publisher.publish([AllBlocksCleared()])
    numbers = list[int]()
    while await subscriber.poll(200):
        numbers.append(int.from_bytes((await subscriber.recv_multipart())[1], "big"))
    last = numbers[-9:]
    assert sum(b - a - 1 for a, b in itertools.pairwise(last)) >= 2
    socket = connect(zmq.DEALER, publisher.replay_endpoint)
    await socket.send_multipart([b"", bytes(8)])
    assert not await socket.poll(100)
    publisher.lose_every = 0
    assert len(await replay(socket, 0)) > 9
