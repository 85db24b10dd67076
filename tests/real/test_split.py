"""Prefill apart from decode, over two real vLLM servers that hand KV blocks over by NIXL.

Whether a request goes in two legs is for the price to say, so each test counts those that did, and fails where too few
of them were: streams decode at the one replica all the time, and prompts are long.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.real.conftest import CLIENT_TIMEOUT_S
from tests.real.exact_drive import send
from tests.real.exact_workload import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Call
from tests.real.install import installed
from tests.real.nixl_server import EXPIRED, NixlReplica
from tests.real.processes import wait_until
from tests.real.router_process import Router, routing
from tests.real.talk import Answer, ask, prose
from tests.real.test_replica_loss import RUNNING, first_under_load
from tests.real.vllm_server import BLOCK_TOKENS, MODEL, SEQUENCES_MAX, serving

PATHS = (CHAT, COMPLETIONS, MESSAGES, RESPONSES)
STREAMS = 6
STREAM_WORDS, STREAM_TOKENS, STREAM_PROMPT_TOKENS_MAX = 30, 3_500, 100
PROMPT_WORDS, ANSWER_TOKENS = 2_000, 24
BESIDE = 3  # requests with long prompts that are open at a time
WAVES, LEAVERS = 2, 10  # clients of each wave
LEAVERS_TOKENS, LEAVE_WITHIN_S = 60, 5.0  # so that some of them are fetched for and answered before they leave
CLIENTS = 6  # that ask for one long prompt after the other while a replica is killed
WAIT_S = 300.0  # a limit for what must come
USED = "vllm:kv_cache_usage_perc"
SOURCES, COMPUTED = "vllm:prompt_tokens_by_source_total", 'source="local_compute"'
FETCHED = "vllm:external_prefix_cache_hits_total"

Figures = Callable[[str], None]


@pytest.fixture(scope="module")
def started_replicas(folder: Path, figures: Figures) -> Iterator[list[NixlReplica]]:
    """A replica that prefills and one that decodes, in place of the folder's own."""
    if not installed():
        pytest.fail("vLLM is not installed: python -m tests.real.install", pytrace=False)
    roles = {"prefiller": "kv_producer", "decoder": "kv_consumer"}
    yield from serving([NixlReplica(name, folder, kv_role) for name, kv_role in roles.items()], figures)


@pytest.fixture(scope="module")
def module_router(started_replicas: list[NixlReplica], folder: Path) -> Iterator[Router]:
    """One router for this file, told which replica does what, in place of the folder's own."""
    prefiller, decoder = (replica.url for replica in started_replicas)
    settings = ("split.handshake=nixl", f"split.prefill={prefiller}", f"split.decode={decoder}")
    more = [word for setting in settings for word in ("--set", setting)]
    yield from routing(Router([prefiller, decoder], folder, "router-split", more))


@pytest.fixture
def router(replicas: list[NixlReplica], module_router: Router) -> Router:
    """The file's router, which has warmed the pair."""
    module_router.wait_replicas(len(replicas))
    wait_until("a warm pair", lambda: warmed(module_router) > 0, WAIT_S)
    return module_router


@pytest.fixture
async def direct(replicas: list[NixlReplica]) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of the replica that prefills."""
    async with httpx.AsyncClient(base_url=replicas[0].url, timeout=CLIENT_TIMEOUT_S, trust_env=False) as made:
        yield made


def warmed(router: Router) -> int:
    """How often the router has had the pair hand a prompt over."""
    return router.server.log_text().count('"pair_warmed"')


def call(path: str, name: str, stream: bool, answer_tokens: int = ANSWER_TOKENS) -> Call:
    """A greedy request with a long prompt of its own."""
    text = prose(name, PROMPT_WORDS)
    said = [{"role": "user", "content": text}]
    body: dict[str, Any] = {"model": MODEL, "temperature": 0.0}
    if path == RESPONSES:
        body |= {"input": said, "store": False, "max_output_tokens": answer_tokens}
    else:
        body |= {"prompt": text} if path == COMPLETIONS else {"messages": said}
        body |= {"max_tokens": answer_tokens}
    if stream:
        body |= {"stream": True}
        body |= {"stream_options": {"include_usage": True}} if path in (CHAT, COMPLETIONS) else {}
    return Call("streamed" if stream else "whole", path, body)


def calls(name: str, rounds: int = 1) -> list[Call]:
    """Such requests through each API, whole and streamed."""
    kinds = itertools.product(range(rounds), PATHS, (False, True))
    return [call(path, f"{name} {number}", stream) for number, (_, path, stream) in enumerate(kinds)]


async def send_all(client: httpx.AsyncClient, asked: Sequence[Call]) -> list[Answer]:
    """Send them, BESIDE at a time; their answers in the same order."""
    turn = asyncio.Semaphore(BESIDE)

    async def one(each: Call) -> Answer:
        async with turn:
            return await send(client, each)

    return await asyncio.gather(*map(one, asked))


@asynccontextmanager
async def decoding(
    client: httpx.AsyncClient, decoder: NixlReplica, name: str, streams: int = STREAMS
) -> AsyncIterator[list[Answer]]:
    """Streams that decode all the time, each asked for anew when it ends; none may fail. The list has all of them."""
    seen: list[Answer] = []

    async def stream(number: int) -> None:
        for turn in itertools.count():
            said = [{"role": "user", "content": prose(f"{name} {number} {turn}", STREAM_WORDS)}]
            seen.append(answer := Answer())
            body = {"model": MODEL, "messages": said, "max_tokens": STREAM_TOKENS, "temperature": 0.0}
            await ask(client, {**body, "ignore_eos": True, "stream": True}, answer)
            if answer.failure:
                return

    tasks = [asyncio.create_task(stream(number)) for number in range(streams)]
    try:
        await first_under_load([decoder], RUNNING, streams)
        yield seen
        assert not [answer.failure for answer in seen if answer.failure]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def until(what: str, ready: Callable[[], bool]) -> None:
    """Return when that is so; TimeoutError naming it after WAIT_S."""
    await asyncio.to_thread(wait_until, what, ready, WAIT_S)


async def free(replica: NixlReplica) -> None:
    """Return when a replica has no KV blocks in use; TimeoutError long before its lease of them ends."""
    await until(f"no blocks in use at the {replica.name}", lambda: replica.told(USED) == 0)


def in_flight(router: Router, replica: NixlReplica) -> int:
    """How many requests the router has open there, prefill legs among them; -1 when it does not answer."""
    return sum([row["in_flight"] for row in router.replica_rows() if row["id"] == replica.url] or [-1])


async def leave(clients: Sequence[asyncio.Task[Answer]], after_s: float = 0.0) -> None:
    """Close the connections of these clients."""
    await asyncio.sleep(after_s)
    for each in clients:
        each.cancel()
    await asyncio.gather(*clients, return_exceptions=True)


def two_legs(replicas: list[NixlReplica], answers: list[Answer]) -> list[Answer]:
    """Those that went in two legs; all were answered by the replica that decodes."""
    prefiller, decoder = replicas
    lost = [(answer.status, answer.failure, answer.replica) for answer in answers if answer.failure]
    assert not lost
    assert {answer.replica for answer in answers} == {decoder.url}
    assert {answer.prefiller for answer in answers} <= {prefiller.url, ""}
    return [answer for answer in answers if answer.prefiller]


async def judge_texts(direct: httpx.AsyncClient, asked: list[Call], answers: list[Answer]) -> None:
    """Each answer has the text that the replica which prefills gives alone, with nothing cached."""
    (await direct.post("/reset_prefix_cache")).raise_for_status()
    alone = [await send(direct, each) for each in asked]
    assert [answer.text for answer in answers] == [answer.text for answer in alone]
    assert not [answer.failure for answer in alone if answer.failure]
    assert len({answer.text for answer in alone}) == len(asked), "answers do not depend on their prompts"


async def test_answers_in_two_legs_are_those_of_one_engine(
    client: httpx.AsyncClient, direct: httpx.AsyncClient, replicas: list[NixlReplica], figures: Figures
) -> None:
    """Long prompts through each API, whole and streamed, beside streams that decode: most are computed at the one
    replica alone and fetched by the other one whole, and the text is that of one engine that does it all."""
    prefiller, decoder = replicas
    asked = calls("two legs", rounds=2)
    async with decoding(client, decoder, "beside") as streams:
        before = prefiller.told(SOURCES, COMPUTED), decoder.told(SOURCES, COMPUTED), decoder.told(FETCHED)
        answers = await send_all(client, asked)
        after = prefiller.told(SOURCES, COMPUTED), decoder.told(SOURCES, COMPUTED), decoder.told(FETCHED)
    split = two_legs(replicas, answers)
    computed, computed_there, fetched = (now - then for now, then in zip(after, before, strict=True))
    figures(
        f"{len(split)} of {len(asked)} long prompts in two legs beside {STREAMS} streams: {computed:.0f} tokens "
        f"computed at the prefiller, {fetched:.0f} fetched and {computed_there:.0f} computed at the decoder"
    )
    assert 2 * len(split) >= len(asked)
    prompt_tokens = sum(answer.prompt_tokens for answer in split)
    # Of streams that began meanwhile, in however many legs.
    begun_tokens_max = STREAM_PROMPT_TOKENS_MAX * (len(streams) - STREAMS)
    assert prompt_tokens <= computed <= prompt_tokens + begun_tokens_max
    assert prompt_tokens <= fetched <= prompt_tokens + begun_tokens_max
    others = sum(answer.prompt_tokens for answer in answers) - prompt_tokens
    assert computed_there <= others + begun_tokens_max
    assert {answer.cached_tokens for answer in split} == {0}
    await judge_texts(direct, asked, answers)


async def test_clients_are_told_what_the_prefilling_engine_found_cached(
    client: httpx.AsyncClient, direct: httpx.AsyncClient, replicas: list[NixlReplica]
) -> None:
    """Of a prompt that the prefilling replica holds, usage says its cached part, and not the whole that came."""
    _, decoder = replicas
    asked = calls("told")
    alone = await send_all(direct, asked)
    async with decoding(client, decoder, "beside told"):
        before = decoder.told(FETCHED)
        answers = await send_all(client, asked)
        fetched = decoder.told(FETCHED) - before
    split = two_legs(replicas, answers)
    assert 2 * len(split) >= len(asked)
    assert fetched >= sum(answer.prompt_tokens for answer in split)
    for answer in split:
        assert answer.cached_tokens == (answer.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
    assert [answer.text for answer in answers] == [answer.text for answer in alone]


async def test_clients_that_leave_leave_no_blocks(
    client: httpx.AsyncClient, replicas: list[NixlReplica], router: Router, figures: Figures
) -> None:
    """Behind the prefill, while the decode leg waits, fetches or answers: nothing stays in use at either replica,
    though vLLM would keep it for hours, and nothing open at the router."""
    prefiller, decoder = replicas
    await free(prefiller)
    rng, left, placed = random.Random("leave"), 0, SEQUENCES_MAX - 1 + LEAVERS // 2
    # One place is left at the decoder, which the prompts take one after the other.
    async with decoding(client, decoder, "nearly full", SEQUENCES_MAX - 1):
        for wave in range(WAVES):
            names = [f"leaver {wave} {number}" for number in range(LEAVERS)]
            asked = [call(rng.choice(PATHS), name, rng.random() < 0.5, LEAVERS_TOKENS) for name in names]
            leavers = [asyncio.create_task(send(client, each)) for each in asked]
            try:
                await until("prompts on their way", lambda: in_flight(router, decoder) >= placed)
                await until("no prefill left", lambda: in_flight(router, prefiller) == 0)
                moments_s = [rng.uniform(0.0, LEAVE_WITHIN_S) for _ in leavers]
                await asyncio.gather(*(leave([each], at_s) for each, at_s in zip(leavers, moments_s, strict=True)))
            finally:
                await leave(leavers)
            left += sum(each.cancelled() for each in leavers)
            await free(prefiller)
    figures(f"{left} of {WAVES * LEAVERS} clients left behind their prefill")
    assert left > 0
    await free(decoder)
    await until("nothing open", lambda: in_flight(router, prefiller) == in_flight(router, decoder) == 0)
    assert EXPIRED not in prefiller.running().log_text()


async def test_a_prefilling_replica_that_is_killed_fails_no_request(
    client: httpx.AsyncClient,
    direct: httpx.AsyncClient,
    replicas: list[NixlReplica],
    router: Router,
    figures: Figures,
) -> None:
    """Killed under load it takes no request with it: what the replica that decodes did not get it computes alone. Back
    again, the pair is warmed anew and takes requests in two legs."""
    prefiller, decoder = replicas
    asked, answers = list[Call](), list[Answer]()
    killed, once = asyncio.Event(), warmed(router)

    async def clients(number: int) -> None:
        """Ask again and again, and once more behind the kill."""
        for turn in itertools.count():
            last = killed.is_set()
            each = call(PATHS[turn % len(PATHS)], f"killed {number} {turn}", stream=number % 2 == 0)
            answer = await send(client, each)
            asked.append(each)
            answers.append(answer)
            if last or answer.failure:
                return

    async with decoding(client, decoder, "beside the killed"):
        tasks = [asyncio.create_task(clients(number)) for number in range(CLIENTS)]
        await until("answers in two legs", lambda: sum(bool(answer.prefiller) for answer in answers) >= CLIENTS)
        busy, _ = await first_under_load([prefiller], RUNNING, 1)
        await asyncio.to_thread(busy.kill)
        killed.set()
        await asyncio.gather(*tasks)
    split = two_legs(replicas, answers)
    assert len(answers) - len(split) >= CLIENTS
    figures(f"killed: {len(split)} long prompts in two legs, then {len(answers) - len(split)} at the decoder alone")
    figures(f"restart: {prefiller.name} ready after {await asyncio.to_thread(prefiller.restart):.0f} s")
    await asyncio.to_thread(router.wait_replicas, 2)
    await until("the pair warm again", lambda: warmed(router) > once)
    again = calls("back")
    async with decoding(client, decoder, "beside the restarted"):
        back = await send_all(client, again)
    assert 2 * len(two_legs(replicas, back)) >= len(back)
    await judge_texts(direct, [*asked, *again], [*answers, *back])
