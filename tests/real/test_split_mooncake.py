"""Prefill apart from decode, over two real vLLM servers that hand KV blocks over by Mooncake (two_legs.py)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from tests.real.conftest import CLIENT_TIMEOUT_S
from tests.real.exact_workload import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Call
from tests.real.install import installed
from tests.real.mooncake_server import MooncakeReplica
from tests.real.processes import wait_until
from tests.real.router_process import Router, routing
from tests.real.talk import Answer
from tests.real.test_replica_loss import RUNNING, first_under_load
from tests.real.two_legs import (
    LEAVERS_TOKENS,
    STREAM_PROMPT_TOKENS_MAX,
    STREAMS,
    WAIT_S,
    Figures,
    answered,
    ask_on,
    call,
    decoding,
    endless,
    in_flight,
    judge_texts,
    leave,
    read_counter,
    send_until_split,
    split_settings,
    two_legs,
    until,
    warmed,
)
from tests.real.vllm_server import serving

PATHS = (CHAT, COMPLETIONS, MESSAGES, RESPONSES)
LEAVERS, LEAVE_WITHIN_S = 16, 4.0
CLIENTS = 4  # that ask for one long prompt after the other while a replica is killed
FREE_WITHIN_S = 60.0  # far below the 480 s for which engines keep what nobody fetches, and wait for what does not come
USED = "vllm:kv_cache_usage_perc"
SOURCES, COMPUTED = "vllm:prompt_tokens_by_source_total", 'source="local_compute"'
FETCHED = "vllm:external_prefix_cache_hits_total"


@pytest.fixture(scope="module")
def started_replicas(folder: Path, figures: Figures) -> Iterator[list[MooncakeReplica]]:
    """A replica that prefills and one that decodes, in place of the folder's own."""
    if not installed():
        pytest.fail("vLLM is not installed: python -m tests.real.install", pytrace=False)
    roles = {"moon-prefiller": "kv_producer", "moon-decoder": "kv_consumer"}
    yield from serving([MooncakeReplica(name, folder, kv_role) for name, kv_role in roles.items()], figures)


@pytest.fixture(scope="module")
def module_router(started_replicas: list[MooncakeReplica], folder: Path) -> Iterator[Router]:
    """One router for this file, told which replica does what, in place of the folder's own."""
    prefiller, decoder = started_replicas
    endpoint = f"disagg.endpoints={prefiller.url}=127.0.0.1:{prefiller.bootstrap_port}"
    more = split_settings("mooncake", prefiller, decoder, endpoint)
    yield from routing(Router([prefiller.url, decoder.url], folder, "router-mooncake", more))


@pytest.fixture
def router(replicas: list[MooncakeReplica], module_router: Router) -> Router:
    """The file's router, which has warmed the pair."""
    module_router.wait_replicas(len(replicas))
    wait_until("a warm pair", lambda: warmed(module_router) > 0, WAIT_S)
    return module_router


@pytest.fixture
async def direct(replicas: list[MooncakeReplica]) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of the replica that prefills."""
    async with httpx.AsyncClient(base_url=replicas[0].url, timeout=CLIENT_TIMEOUT_S, trust_env=False) as made:
        yield made


async def free(replica: MooncakeReplica) -> None:
    """Return when a replica has no KV blocks in use; TimeoutError long before it would let them go by itself."""
    what = f"no blocks in use at the {replica.name}"
    await asyncio.to_thread(wait_until, what, lambda: replica.told(USED) == 0, FREE_WITHIN_S)


async def count_tokens(prefiller: MooncakeReplica, decoder: MooncakeReplica) -> tuple[float, float, float]:
    """Prompt tokens computed at the one, and at the other one, and those that came to it."""
    computed = await read_counter(prefiller, SOURCES, COMPUTED), await read_counter(decoder, SOURCES, COMPUTED)
    return *computed, await read_counter(decoder, FETCHED)


async def judge_alone(direct: httpx.AsyncClient, asked: list[Call], answers: list[Answer]) -> None:
    """Each answer has the text that the replica which prefills gives alone, with nothing cached."""
    (await direct.post("/reset_prefix_cache")).raise_for_status()
    await judge_texts(direct, asked, answers)


async def test_answers_in_two_legs_are_those_of_one_engine(
    client: httpx.AsyncClient, direct: httpx.AsyncClient, replicas: list[MooncakeReplica], figures: Figures
) -> None:
    """Long prompts through each API, whole and streamed, beside streams that decode: most are computed at the one
    replica alone and come to the other one whole, and the text is that of one engine that does it all."""
    prefiller, decoder = replicas
    async with decoding(client, decoder, "beside") as streams:
        before = await count_tokens(prefiller, decoder)
        asked, answers = await send_until_split(client, prefiller, decoder, PATHS, "moon legs")
        after = await count_tokens(prefiller, decoder)
    split = two_legs(prefiller, decoder, answers)
    computed, computed_there, fetched = (now - then for now, then in zip(after, before, strict=True))
    figures(
        f"Mooncake: {len(split)} of {len(asked)} long prompts in two legs beside {STREAMS} streams: {computed:.0f} "
        f"tokens computed at the prefiller, {fetched:.0f} came to the decoder, which computed {computed_there:.0f}"
    )
    prompt_tokens = sum(answer.prompt_tokens for answer in split)
    # Of streams that began meanwhile, in however many legs.
    begun_tokens_max = STREAM_PROMPT_TOKENS_MAX * (len(streams) - STREAMS)
    assert prompt_tokens <= computed <= prompt_tokens + begun_tokens_max
    assert prompt_tokens <= fetched <= prompt_tokens + begun_tokens_max
    others = sum(answer.prompt_tokens for answer in answers) - prompt_tokens
    assert computed_there <= others + begun_tokens_max
    # Usage counts all transferred tokens as cached (docs/guide/disaggregated-prefill.md): Mooncake's decode engine has
    # no other count.
    assert all(answer.cached_tokens == answer.prompt_tokens for answer in split)
    await judge_alone(direct, asked, answers)


async def test_clients_that_leave_leave_no_blocks(
    client: httpx.AsyncClient, replicas: list[MooncakeReplica], router: Router, figures: Figures
) -> None:
    """While their prefill waits or runs, while their blocks come, or while they are answered: nothing stays in use at
    either replica, and nothing open at the router."""
    prefiller, decoder = replicas
    await free(prefiller)
    await free(decoder)
    rng = random.Random("leave")
    kinds = [(rng.choice(PATHS), f"leaver {number}", rng.random() < 0.5) for number in range(LEAVERS)]
    leavers = [
        asyncio.create_task(answered(client, call(path, name, stream, LEAVERS_TOKENS))) for path, name, stream in kinds
    ]
    try:
        moments_s = [rng.uniform(0.0, LEAVE_WITHIN_S) for _ in leavers]
        await asyncio.gather(*(leave([each], at_s) for each, at_s in zip(leavers, moments_s, strict=True)))
    finally:
        await leave(leavers)
    left = sum(each.cancelled() for each in leavers)
    figures(f"Mooncake: {left} of {LEAVERS} clients left")
    assert left > 0
    await free(prefiller)
    await free(decoder)
    await until("nothing open", lambda: in_flight(router, prefiller) == in_flight(router, decoder) == 0)


async def test_a_prefilling_replica_that_is_killed_fails_no_request(
    client: httpx.AsyncClient,
    direct: httpx.AsyncClient,
    replicas: list[MooncakeReplica],
    router: Router,
    figures: Figures,
) -> None:
    """Killed under load it takes no request with it: what the replica that decodes did not get it computes alone. Back
    again, with another engine id, the pair is warmed anew and takes requests in two legs."""
    prefiller, decoder = replicas
    asked, answers = list[Call](), list[Answer]()
    killed, once = asyncio.Event(), warmed(router)
    async with decoding(client, decoder, "beside the killed"):
        wishes = [endless(PATHS, f"killed {number}", stream=number % 2 == 0) for number in range(CLIENTS)]
        tasks = [asyncio.create_task(ask_on(client, each, killed, asked, answers)) for each in wishes]
        await until("answers in two legs", lambda: sum(bool(answer.prefiller) for answer in answers) >= CLIENTS)
        busy, _ = await first_under_load([prefiller], RUNNING, 1)
        await asyncio.to_thread(busy.kill)
        killed.set()
        await asyncio.gather(*tasks)
    split = two_legs(prefiller, decoder, answers)
    assert len(answers) - len(split) >= CLIENTS
    figures(f"Mooncake, killed: {len(split)} long prompts in two legs, then {len(answers) - len(split)} in one")
    figures(f"restart: {prefiller.name} ready after {await asyncio.to_thread(prefiller.restart):.0f} s")
    await asyncio.to_thread(router.wait_replicas, 2)
    await until("the pair warm again", lambda: warmed(router) > once)
    async with decoding(client, decoder, "beside the restarted"):
        again, back = await send_until_split(client, prefiller, decoder, PATHS, "moon back")
    await judge_alone(direct, [*asked, *again], [*answers, *back])
