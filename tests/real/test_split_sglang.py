"""Prefill apart from decode, over real SGLang servers that hand KV pages over by rooms of a bootstrap server.

A server that prefills and one that decodes take requests in two legs alone. A third one, which does all, says what one
engine answers, and takes what no pair does: behind a router of its own, since before the other router no request has
that way out.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import pytest

from tests.real import install_sglang
from tests.real.conftest import CLIENT_TIMEOUT_S, CONNECTIONS_MAX
from tests.real.exact_workload import CHAT, COMPLETIONS, RESPONSES, Call
from tests.real.install import model_dir
from tests.real.router_process import Router, routing
from tests.real.sglang_split_server import SplitSGLangReplica
from tests.real.sglang_workload import GENERATE
from tests.real.talk import Answer
from tests.real.two_legs import (
    Figures,
    ask_on,
    call,
    calls,
    endless,
    in_flight,
    judge_texts,
    leave_at_random,
    read_counter,
    send_all,
    split_settings,
    two_legs,
    until,
    wait_warm,
    warmed,
)
from tests.real.vllm_server import serving

PATHS = (CHAT, COMPLETIONS, RESPONSES, GENERATE)
LEAVERS, LEAVE_WITHIN_S = 24, 4.0
CLIENTS = 3  # of each router while a replica is killed
COMPUTED = "sglang:realtime_tokens_total", 'mode="prefill_compute"'
USED = "sglang:kv_used_tokens"
"""Tokens whose pages a request holds; those that are only cached are not among them."""
QUEUES = (
    "sglang:num_running_reqs",
    "sglang:num_queue_reqs",
    "sglang:num_prefill_bootstrap_queue_reqs",
    "sglang:num_prefill_inflight_queue_reqs",
    "sglang:num_decode_prealloc_queue_reqs",
    "sglang:num_decode_transfer_queue_reqs",
)


@pytest.fixture(scope="module")
def started_replicas(folder: Path, figures: Figures) -> Iterator[list[SplitSGLangReplica]]:
    """A server that prefills, one that decodes, and one that does all, in place of the folder's own."""
    if not install_sglang.installed():
        pytest.skip("SGLang is not installed: python -m tests.real.install_sglang")
    modes = {"sgl-prefiller": "prefill", "sgl-decoder": "decode", "sgl-whole": "null"}
    yield from serving([SplitSGLangReplica(name, folder, mode) for name, mode in modes.items()], figures)


def split_router(replicas: list[SplitSGLangReplica], folder: Path, name: str) -> Router:
    """A router before these servers, of which the first one prefills and the second one decodes."""
    prefiller, decoder = replicas[:2]
    endpoint = f"disagg.endpoints={prefiller.url}=127.0.0.1:{prefiller.bootstrap_port}"
    more = split_settings("sglang", prefiller, decoder, endpoint)
    more += ["--tokenizer", str(model_dir(name=prefiller.weights))]
    return Router([replica.url for replica in replicas], folder, name, more)


@pytest.fixture(scope="module")
def module_router(started_replicas: list[SplitSGLangReplica], folder: Path) -> Iterator[Router]:
    """A router that has the pair alone."""
    yield from routing(split_router(started_replicas[:2], folder, "router-sglang-pair"))


@pytest.fixture(scope="module")
def module_mixed(started_replicas: list[SplitSGLangReplica], folder: Path) -> Iterator[Router]:
    """A router that has the server which does all besides."""
    yield from routing(split_router(started_replicas, folder, "router-sglang-mixed"))


@pytest.fixture
def router(replicas: list[SplitSGLangReplica], module_router: Router) -> Router:
    """The router that has the pair alone, which is warm."""
    return wait_warm(module_router, 2)


@pytest.fixture
def mixed(replicas: list[SplitSGLangReplica], module_mixed: Router) -> Router:
    """The router that has all three, with a warm pair."""
    return wait_warm(module_mixed, 3)


@pytest.fixture
async def direct(replicas: list[SplitSGLangReplica]) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of the server that does all."""
    async with talking(replicas[2].url) as made:
        yield made


def talking(url: str) -> httpx.AsyncClient:
    """An HTTP client without retries of its own."""
    limits = httpx.Limits(max_connections=CONNECTIONS_MAX)
    return httpx.AsyncClient(base_url=url, timeout=CLIENT_TIMEOUT_S, limits=limits, trust_env=False)


async def idle(replica: SplitSGLangReplica) -> None:
    """Return when no request is anywhere in this server, and none holds a page."""
    names = (*QUEUES, USED)
    await until(f"nothing left at the {replica.name}", lambda: sum(replica.told(name) for name in names) == 0)


async def test_answers_in_two_legs_are_those_of_one_engine(
    client: httpx.AsyncClient, direct: httpx.AsyncClient, replicas: list[SplitSGLangReplica], figures: Figures
) -> None:
    """Long prompts through each API, whole and streamed: all are computed at the one replica and none at the other, and
    the text is that of one engine that does it all. A prompt that comes again is cached at the prefilling replica, as
    its events have said, and clients are told so."""
    prefiller, decoder, _ = replicas
    asked = calls(PATHS, "two legs")
    before = await read_counter(prefiller, *COMPUTED), await read_counter(decoder, *COMPUTED)
    answers = await send_all(client, asked)
    after = await read_counter(prefiller, *COMPUTED), await read_counter(decoder, *COMPUTED)
    computed, computed_there = (now - then for now, then in zip(after, before, strict=True))
    split = two_legs(prefiller, decoder, answers)
    figures(
        f"SGLang: {len(split)} of {len(asked)} long prompts in two legs: {computed:.0f} tokens computed at the "
        f"prefiller, {computed_there:.0f} at the decoder"
    )
    assert len(split) == len(asked)
    assert computed >= sum(answer.prompt_tokens for answer in answers) > 0
    assert computed_there == 0
    assert {answer.cached_tokens for answer in answers} == {0}
    again = await send_all(client, asked)
    assert [answer.text for answer in again] == [answer.text for answer in answers]
    assert all(answer.cached_tokens > answer.prompt_tokens / 2 for answer in two_legs(prefiller, decoder, again))
    # Prompts of Responses are placed by estimate: SGLang makes chats of its own of them.
    known = [answer for each, answer in zip(asked, again, strict=True) if each.path != RESPONSES]
    assert [(answer.grade, answer.predicted_tokens) for answer in known] == [
        ("exact", answer.cached_tokens) for answer in known
    ]
    await judge_texts(direct, asked, answers)


async def test_what_no_pair_takes_goes_to_the_server_that_does_all(
    mixed: Router, direct: httpx.AsyncClient, replicas: list[SplitSGLangReplica]
) -> None:
    """Two choices, and an answer of one token: both servers of a pair would refuse them."""
    asked = call(CHAT, "two choices", stream=False)
    bodies = [{**asked.body, "n": 2}, {**asked.body, "max_tokens": 1}]
    async with talking(mixed.url) as client:
        came = [await client.post(CHAT, json=body) for body in bodies]
    alone = [await direct.post(CHAT, json=body) for body in bodies]
    assert {response.status_code for response in came} == {200}
    assert {response.headers["x-warmroute-replica"] for response in came} == {replicas[2].url}
    for mine, other in zip(came, alone, strict=True):
        assert [each["message"] for each in mine.json()["choices"]] == [
            each["message"] for each in other.json()["choices"]
        ]


async def test_what_no_server_takes_is_the_engines_refusal(client: httpx.AsyncClient, router: Router) -> None:
    """Before the pair alone, two choices are refused in the engine's own words, and no replica is blamed."""
    asked = call(CHAT, "two choices", stream=False)
    refused = await client.post(CHAT, json={**asked.body, "n": 2})
    assert refused.status_code == 400
    assert "without bootstrap room id" in refused.text
    assert router.ready_replicas() == 2


async def test_clients_that_leave_leave_no_pages(
    client: httpx.AsyncClient, replicas: list[SplitSGLangReplica], router: Router, figures: Figures
) -> None:
    """While their prefill waits or runs, while their pages come, or while they are answered: no request is left in any
    queue of either server, and no page in use, long before their own time for it is over (300 s)."""
    prefiller, decoder, _ = replicas
    left = await leave_at_random(client, PATHS, LEAVERS, LEAVE_WITHIN_S)
    figures(f"SGLang: {left} of {LEAVERS} clients left")
    assert left > 0
    await until("nothing open", lambda: in_flight(router, prefiller) == in_flight(router, decoder) == 0)
    await idle(prefiller)
    await idle(decoder)


async def test_a_prefilling_server_that_is_killed(
    client: httpx.AsyncClient,
    direct: httpx.AsyncClient,
    replicas: list[SplitSGLangReplica],
    router: Router,
    mixed: Router,
    figures: Figures,
) -> None:
    """Killed under load it fails no request where a server that does all is beside the pair; where none is, clients
    get an error, and none of them hangs. Back again, the pair is warmed anew, and takes requests of both routers."""
    prefiller, decoder, whole = replicas
    killed, once, once_mixed = asyncio.Event(), warmed(router), warmed(mixed)
    asked, answers, others = list[Call](), list[Answer](), list[Answer]()
    async with talking(mixed.url) as mixed_client:
        tasks = [
            asyncio.create_task(ask_on(to, endless(PATHS, f"killed {name} {number}", number % 2 == 0), killed, *seen))
            for to, name, seen in ((mixed_client, "mixed", (asked, answers)), (client, "pair", ([], others)))
            for number in range(CLIENTS)
        ]
        await until("answers in two legs", lambda: sum(bool(answer.prefiller) for answer in answers) >= CLIENTS)
        await asyncio.to_thread(prefiller.kill)
        killed.set()
        await asyncio.gather(*tasks)
    assert not [answer.failure for answer in answers if answer.failure]
    lost = [answer for answer in others if answer.failure]
    assert {answer.status for answer in lost} <= {502, 503}
    assert {answer.replica for answer in answers} <= {decoder.url, whole.url}
    split = [answer for answer in answers if answer.prefiller]
    figures(
        f"SGLang, killed: {len(split)} long prompts in two legs and {len(answers) - len(split)} at the server that "
        f"does all; before the pair alone {len(others) - len(lost)} answered, {len(lost)} refused"
    )
    await idle(decoder)
    figures(f"restart: {prefiller.name} ready after {await asyncio.to_thread(prefiller.restart):.0f} s")
    await asyncio.to_thread(router.wait_replicas, 2)
    await until("the pair warm again", lambda: warmed(router) > once and warmed(mixed) > once_mixed)
    again = calls(PATHS, "back")
    back = await send_all(client, again)
    assert len(two_legs(prefiller, decoder, back)) == len(again)
    await judge_texts(direct, [*asked, *again], [*answers, *back])
