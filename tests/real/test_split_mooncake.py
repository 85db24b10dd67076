"""Prefill apart from decode, over two real vLLM servers that hand KV blocks over by Mooncake (two_legs.py)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from tests.real.conftest import CLIENT_TIMEOUT_S
from tests.real.install import installed
from tests.real.mooncake_server import MooncakeReplica
from tests.real.processes import wait_until
from tests.real.router_process import Router, routing
from tests.real.two_legs import (
    USED,
    VLLM_PATHS,
    Figures,
    in_flight,
    judge_killed,
    judge_two_legs,
    leave_at_random,
    split_settings,
    until,
    wait_warm,
)
from tests.real.vllm_server import serving

LEAVERS, LEAVE_WITHIN_S = 16, 4.0
CLIENTS = 4  # that ask for one long prompt after the other while a replica is killed
FREE_WITHIN_S = 200.0  # far below the 480 s for which engines keep what nobody fetches, and wait for what does not come


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
    return wait_warm(module_router, len(replicas))


@pytest.fixture
async def direct(replicas: list[MooncakeReplica]) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of the replica that prefills."""
    async with httpx.AsyncClient(base_url=replicas[0].url, timeout=CLIENT_TIMEOUT_S, trust_env=False) as made:
        yield made


async def free(replica: MooncakeReplica, when: str) -> None:
    """Return when a replica has no KV blocks in use; TimeoutError long before it would let them go by itself."""
    what = f"no blocks in use at the {replica.name} {when}"
    await asyncio.to_thread(wait_until, what, lambda: replica.told(USED) == 0, FREE_WITHIN_S)


async def test_answers_in_two_legs_are_those_of_one_engine(
    client: httpx.AsyncClient, direct: httpx.AsyncClient, replicas: list[MooncakeReplica], figures: Figures
) -> None:
    """Most long prompts are computed at the one replica and fetched by the other one, and the text is that of one
    engine that does it all."""
    split = await judge_two_legs(client, direct, replicas, figures, "Mooncake", rounds=1)
    # Usage counts all transferred tokens as cached (docs/guide/disaggregated-prefill.md): Mooncake's decode engine has
    # no other count.
    assert all(answer.cached_tokens == answer.prompt_tokens for answer in split)


async def test_clients_that_leave_leave_no_blocks(
    client: httpx.AsyncClient, replicas: list[MooncakeReplica], router: Router, figures: Figures
) -> None:
    """While their prefill waits or runs, while their blocks come, or while they are answered: nothing stays in use at
    either replica, and nothing open at the router."""
    prefiller, decoder = replicas
    await free(prefiller, "before the clients")
    await free(decoder, "before the clients")
    left = await leave_at_random(client, VLLM_PATHS, LEAVERS, LEAVE_WITHIN_S)
    figures(f"Mooncake: {left} of {LEAVERS} clients left")
    assert left > 0
    await free(prefiller, "after the clients")
    await free(decoder, "after the clients")
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
    await judge_killed(client, direct, replicas, router, figures, "Mooncake", CLIENTS)
