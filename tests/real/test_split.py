"""Prefill apart from decode, over two real vLLM servers that hand KV blocks over by NIXL (two_legs.py)."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from tests.real.conftest import CLIENT_TIMEOUT_S
from tests.real.exact_drive import send
from tests.real.install import installed
from tests.real.nixl_server import EXPIRED, NixlReplica
from tests.real.router_process import Router, routing
from tests.real.two_legs import (
    FETCHED,
    LEAVE_WITHIN_S,
    LEAVERS_TOKENS,
    ROUNDS_MAX,
    USED,
    VLLM_PATHS,
    Figures,
    call,
    calls,
    decoding,
    in_flight,
    judge_killed,
    judge_two_legs,
    leave,
    read_counter,
    send_all,
    split_settings,
    two_legs,
    until,
    wait_out_times,
    wait_warm,
)
from tests.real.vllm_server import BLOCK_TOKENS, SEQUENCES_MAX, serving

WAVES, LEAVERS = 2, 10  # clients of each wave
CLIENTS = 6  # that ask for one long prompt after the other while a replica is killed


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
    prefiller, decoder = started_replicas
    more = split_settings("nixl", prefiller, decoder)
    yield from routing(Router([prefiller.url, decoder.url], folder, "router-split", more))


@pytest.fixture
def router(replicas: list[NixlReplica], module_router: Router) -> Router:
    """The file's router, which has warmed the pair."""
    return wait_warm(module_router, len(replicas))


@pytest.fixture
async def direct(replicas: list[NixlReplica]) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of the replica that prefills."""
    async with httpx.AsyncClient(base_url=replicas[0].url, timeout=CLIENT_TIMEOUT_S, trust_env=False) as made:
        yield made


async def free(replica: NixlReplica) -> None:
    """Return when a replica has no KV blocks in use; TimeoutError long before its lease of them ends."""
    await until(f"no blocks in use at the {replica.name}", lambda: replica.told(USED) == 0)


async def test_answers_in_two_legs_are_those_of_one_engine(
    client: httpx.AsyncClient, direct: httpx.AsyncClient, replicas: list[NixlReplica], figures: Figures
) -> None:
    """Most long prompts are computed at the one replica and fetched by the other one, and the text is that of one
    engine that does it all."""
    split = await judge_two_legs(client, direct, replicas, figures, "NIXL", rounds=2)
    assert {answer.cached_tokens for answer in split} == {0}


async def test_clients_are_told_what_the_prefilling_engine_found_cached(
    client: httpx.AsyncClient, direct: httpx.AsyncClient, replicas: list[NixlReplica]
) -> None:
    """Of a prompt that the prefilling replica holds, usage says its cached part, and not the whole that came."""
    prefiller, decoder = replicas
    for turn in range(ROUNDS_MAX):
        asked = calls(VLLM_PATHS, f"told {turn}")
        alone = await send_all(direct, asked)
        async with decoding(client, decoder, f"beside told {turn}"):
            before = await read_counter(decoder, FETCHED)
            answers = await send_all(client, asked, beside=1)
            fetched = await read_counter(decoder, FETCHED) - before
        split = two_legs(prefiller, decoder, answers)
        assert fetched >= sum(answer.prompt_tokens for answer in split)
        for answer in split:
            assert answer.cached_tokens == (answer.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        assert [answer.text for answer in answers] == [answer.text for answer in alone]
        if 2 * len(split) >= len(asked):
            return
        if turn < ROUNDS_MAX - 1:
            await wait_out_times()
    pytest.fail(f"of {[answer.reason for answer in answers]} too few in two legs")


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
            asked = [call(rng.choice(VLLM_PATHS), name, rng.random() < 0.5, LEAVERS_TOKENS) for name in names]
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
    client: httpx.AsyncClient, direct: httpx.AsyncClient, replicas: list[NixlReplica], router: Router, figures: Figures
) -> None:
    """Killed under load it takes no request with it: what the replica that decodes did not get it computes alone. Back
    again, the pair is warmed anew and takes requests in two legs."""
    await judge_killed(client, direct, replicas, router, figures, "NIXL", CLIENTS)
