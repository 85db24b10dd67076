"""What tests of prefill apart from decode share, whatever the handshake: long prompts of their own, streams that decode
meanwhile, clients that leave, and what the router and the engines say of it all.

Whether a request goes in two legs is for the price to say, so each test counts those that did, and fails where too few
of them were: streams decode at the one replica all the time, and prompts are long.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from router.core.disagg.pairs import TIMES_S
from tests.real.exact_drive import send
from tests.real.exact_workload import CHAT, COMPLETIONS, MESSAGES, RESPONSES, Call
from tests.real.processes import wait_until
from tests.real.router_process import Router
from tests.real.sglang_workload import GENERATE, generate
from tests.real.talk import Answer, ask, prose
from tests.real.test_replica_loss import RUNNING, first_under_load
from tests.real.vllm_server import MODEL, Replica

STREAMS = 6
STREAM_WORDS, STREAM_TOKENS, STREAM_PROMPT_TOKENS_MAX = 30, 3_500, 100
PROMPT_WORDS, ANSWER_TOKENS = 2_000, 24
BESIDE = 3  # requests with long prompts that are open at a time
ROUNDS_MAX = 3  # of prompts, until the speeds of both replicas are learned, which a busy machine moves
LEAVERS_TOKENS, LEAVE_WITHIN_S = 60, 5.0  # so that some of them are fetched for and answered before they leave
WAIT_S = 300.0  # a limit for what must come
VLLM_PATHS = (CHAT, COMPLETIONS, MESSAGES, RESPONSES)
USED = "vllm:kv_cache_usage_perc"
SOURCES, COMPUTED = "vllm:prompt_tokens_by_source_total", 'source="local_compute"'
FETCHED = "vllm:external_prefix_cache_hits_total"

Figures = Callable[[str], None]


def split_settings(handshake: str, prefiller: Replica, decoder: Replica, *more: str) -> list[str]:
    """Words of the router's command line that tell it who does what."""
    told = (
        f"disagg.kv_connector={handshake}",
        f"disagg.prefill={prefiller.url}",
        f"disagg.decode={decoder.url}",
        *more,
    )
    return [word for setting in told for word in ("--set", setting)]


def warmed(router: Router) -> int:
    """How often the router has had the pair hand a prompt over."""
    return router.server.log_text().count('"pair_warmed"')


def wait_warm(router: Router, replicas: int) -> Router:
    """The router, once its replicas are ready and its pair has handed a prompt over."""
    router.wait_replicas(replicas)
    wait_until("a warm pair", lambda: warmed(router) > 0, WAIT_S)
    return router


async def until(what: str, ready: Callable[[], bool]) -> None:
    """Return when that is so; TimeoutError naming it after WAIT_S."""
    await asyncio.to_thread(wait_until, what, ready, WAIT_S)


# -- requests ----------------------------------------------------------------------------------------------------------


def call(path: str, name: str, stream: bool, answer_tokens: int = ANSWER_TOKENS) -> Call:
    """A greedy request with a long prompt of its own."""
    text = prose(name, PROMPT_WORDS)
    said = [{"role": "user", "content": text}]
    body: dict[str, Any] = {"model": MODEL, "temperature": 0.0}
    if path == GENERATE:
        sampling = {"temperature": 0.0, "max_new_tokens": answer_tokens}
        return Call("generate", path, {"text": text, "sampling_params": sampling, "stream": stream})
    if path == RESPONSES:
        body |= {"input": said, "store": False, "max_output_tokens": answer_tokens}
    else:
        body |= {"prompt": text} if path == COMPLETIONS else {"messages": said}
        body |= {"max_tokens": answer_tokens}
    if stream:
        body |= {"stream": True}
        body |= {"stream_options": {"include_usage": True}} if path in (CHAT, COMPLETIONS) else {}
    return Call("streamed" if stream else "whole", path, body)


def calls(paths: Sequence[str], name: str, rounds: int = 1) -> list[Call]:
    """Such requests through each API, whole and streamed."""
    kinds = itertools.product(range(rounds), paths, (False, True))
    return [call(path, f"{name} {number}", stream) for number, (_, path, stream) in enumerate(kinds)]


def endless(paths: Sequence[str], name: str, stream: bool) -> Iterator[Call]:
    """Such requests without end, through one API after the other."""
    return (call(path, f"{name} {turn}", stream) for turn, path in enumerate(itertools.cycle(paths)))


async def answered(client: httpx.AsyncClient, each: Call) -> Answer:
    """Make one call and read its answer; never raises: what broke is in `failure`."""
    return await (generate if each.path == GENERATE else send)(client, each)


async def send_all(client: httpx.AsyncClient, asked: Sequence[Call], beside: int = BESIDE) -> list[Answer]:
    """Send them, so many at a time; their answers in the same order."""
    turn = asyncio.Semaphore(beside)

    async def one(each: Call) -> Answer:
        async with turn:
            return await answered(client, each)

    return await asyncio.gather(*map(one, asked))


async def send_until_split(
    client: httpx.AsyncClient, prefiller: Replica, decoder: Replica, paths: Sequence[str], name: str, rounds: int = 1
) -> tuple[list[Call], list[Answer]]:
    """Such requests, until most of those of one turn go in two legs; AssertionError after ROUNDS_MAX. All requests and
    their answers. One is open at a time: prompts that wait at the replica that prefills are a price of two legs, and
    how long they wait depends on the machine."""
    asked, answers = list[Call](), list[Answer]()
    for turn in range(ROUNDS_MAX):
        now = calls(paths, f"{name}, turn {turn}", rounds)
        got = await send_all(client, now, beside=1)
        asked += now
        answers += got
        if 2 * len(two_legs(prefiller, decoder, got)) >= len(got):
            return asked, answers
        if turn < ROUNDS_MAX - 1:
            await wait_out_times()
    pytest.fail(f"of {[answer.reason for answer in answers]} too few in two legs")


async def wait_out_times() -> None:
    """Wait until the router forgets slow transfers. On a busy machine one may have taken seconds, and until it is
    forgotten no prompt goes in two legs."""
    await asyncio.sleep(TIMES_S + 1.0)


@asynccontextmanager
async def decoding(
    client: httpx.AsyncClient, decoder: Replica, name: str, streams: int = STREAMS
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
        await first_under_load([decoder], decoder.running_metric, streams)
        yield seen
        assert not [answer.failure for answer in seen if answer.failure]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def ask_on(
    client: httpx.AsyncClient, requests: Iterator[Call], over: asyncio.Event, asked: list[Call], answers: list[Answer]
) -> None:
    """A client that sends one request after the other, and once more when it is `over`, or until one fails; both lists
    get what was asked and answered."""
    for each in requests:
        last = over.is_set()
        answer = await answered(client, each)
        asked.append(each)
        answers.append(answer)
        if last or answer.failure:
            return


async def leave(clients: Sequence[asyncio.Task[Answer]], after_s: float = 0.0) -> None:
    """Close the connections of these clients."""
    await asyncio.sleep(after_s)
    for each in clients:
        each.cancel()
    await asyncio.gather(*clients, return_exceptions=True)


async def leave_at_random(client: httpx.AsyncClient, paths: Sequence[str], clients: int, within_s: float) -> int:
    """So many clients with long prompts, each of which leaves within that time; how many had no answer before."""
    rng = random.Random("leave")
    kinds = [(rng.choice(paths), f"leaver {number}", rng.random() < 0.5) for number in range(clients)]
    leavers = [
        asyncio.create_task(answered(client, call(path, name, stream, LEAVERS_TOKENS))) for path, name, stream in kinds
    ]
    try:
        moments_s = [rng.uniform(0.0, within_s) for _ in leavers]
        await asyncio.gather(*(leave([each], at_s) for each, at_s in zip(leavers, moments_s, strict=True)))
    finally:
        await leave(leavers)
    return sum(each.cancelled() for each in leavers)


# -- what is said of them ----------------------------------------------------------------------------------------------


async def read_counter(replica: Replica, metric: str, label: str = "") -> float:
    """A metric of a replica, once its page answers; TimeoutError after WAIT_S."""
    found = math.nan

    def ready() -> bool:
        nonlocal found
        found = replica.told(metric, label)
        return not math.isnan(found)

    await until(f"{metric} of the {replica.name}", ready)
    return found


def in_flight(router: Router, replica: Replica) -> int:
    """How many requests the router has open there, prefill legs among them; -1 when it does not answer."""
    return sum([row["in_flight"] for row in router.replica_rows() if row["id"] == replica.url] or [-1])


def two_legs(prefiller: Replica, decoder: Replica, answers: Sequence[Answer]) -> list[Answer]:
    """Those that went in two legs; all were answered by the replica that decodes."""
    lost = [(answer.status, answer.failure, answer.replica) for answer in answers if answer.failure]
    assert not lost
    assert {answer.replica for answer in answers} == {decoder.url}
    assert {answer.prefiller for answer in answers} <= {prefiller.url, ""}
    return [answer for answer in answers if answer.prefiller]


async def judge_texts(direct: httpx.AsyncClient, asked: Sequence[Call], answers: Sequence[Answer]) -> None:
    """Each answer has the text that one engine gives alone."""
    alone = [await answered(direct, each) for each in asked]
    assert not [answer.failure for answer in alone if answer.failure]
    assert [answer.text for answer in answers] == [answer.text for answer in alone]
    assert len({answer.text for answer in alone}) == len(asked), "answers do not depend on their prompts"


# -- pairs of vLLM servers ---------------------------------------------------------------------------------------------


async def count_tokens(prefiller: Replica, decoder: Replica) -> tuple[float, float, float]:
    """Prompt tokens computed at the one, and at the other one, and those that it fetched."""
    computed = await read_counter(prefiller, SOURCES, COMPUTED), await read_counter(decoder, SOURCES, COMPUTED)
    return *computed, await read_counter(decoder, FETCHED)


async def judge_alone(direct: httpx.AsyncClient, asked: list[Call], answers: list[Answer]) -> None:
    """Each answer has the text that the replica which prefills gives alone, with nothing cached."""
    (await direct.post("/reset_prefix_cache")).raise_for_status()
    await judge_texts(direct, asked, answers)


async def judge_two_legs(
    client: httpx.AsyncClient,
    direct: httpx.AsyncClient,
    pair: Sequence[Replica],
    figures: Figures,
    name: str,
    rounds: int,
) -> list[Answer]:
    """Long prompts through each API, whole and streamed, beside streams that decode: most are computed at the one
    replica alone and fetched by the other one whole, and the text is that of one engine that does it all. Those that
    went in two legs."""
    prefiller, decoder = pair
    async with decoding(client, decoder, "beside") as streams:
        before = await count_tokens(prefiller, decoder)
        asked, answers = await send_until_split(client, prefiller, decoder, VLLM_PATHS, f"{name} legs", rounds)
        after = await count_tokens(prefiller, decoder)
    split = two_legs(prefiller, decoder, answers)
    computed, computed_there, fetched = (now - then for now, then in zip(after, before, strict=True))
    figures(
        f"{name}: {len(split)} of {len(asked)} long prompts in two legs beside {STREAMS} streams: {computed:.0f} "
        f"tokens computed at the prefiller, {fetched:.0f} fetched and {computed_there:.0f} computed at the decoder"
    )
    prompt_tokens = sum(answer.prompt_tokens for answer in split)
    # Of streams that began meanwhile, in however many legs.
    begun_tokens_max = STREAM_PROMPT_TOKENS_MAX * (len(streams) - STREAMS)
    assert prompt_tokens <= computed <= prompt_tokens + begun_tokens_max
    assert prompt_tokens <= fetched <= prompt_tokens + begun_tokens_max
    others = sum(answer.prompt_tokens for answer in answers) - prompt_tokens
    assert computed_there <= others + begun_tokens_max
    await judge_alone(direct, asked, answers)
    return split


async def judge_killed(
    client: httpx.AsyncClient,
    direct: httpx.AsyncClient,
    pair: Sequence[Replica],
    router: Router,
    figures: Figures,
    name: str,
    clients: int,
) -> None:
    """The prefilling replica, killed under load, takes no request with it: what the replica that decodes did not get it
    computes alone. Back again, the pair is warmed anew and takes requests in two legs."""
    prefiller, decoder = pair
    asked, answers = list[Call](), list[Answer]()
    killed, once = asyncio.Event(), warmed(router)
    async with decoding(client, decoder, "beside the killed"):
        wishes = [endless(VLLM_PATHS, f"killed {number}", stream=number % 2 == 0) for number in range(clients)]
        tasks = [asyncio.create_task(ask_on(client, each, killed, asked, answers)) for each in wishes]
        await until("answers in two legs", lambda: sum(bool(answer.prefiller) for answer in answers) >= clients)
        busy, _ = await first_under_load([prefiller], RUNNING, 1)
        await asyncio.to_thread(busy.kill)
        killed.set()
        await asyncio.gather(*tasks)
    split = two_legs(prefiller, decoder, answers)
    assert len(answers) - len(split) >= clients
    figures(f"{name}, killed: {len(split)} long prompts in two legs, then {len(answers) - len(split)} in one")
    figures(f"restart: {prefiller.name} ready after {await asyncio.to_thread(prefiller.restart):.0f} s")
    await asyncio.to_thread(router.wait_replicas, 2)
    await until("the pair warm again", lambda: warmed(router) > once)
    async with decoding(client, decoder, "beside the restarted"):
        again, back = await send_until_split(client, prefiller, decoder, VLLM_PATHS, f"{name} back")
    await judge_alone(direct, [*asked, *again], [*answers, *back])
