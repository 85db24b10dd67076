"""What tests of prefill apart from decode share, whatever the handshake: long prompts of their own, streams that decode
meanwhile, clients that leave, and what the router and the engines say of it all.

Whether a request goes in two legs is for the price to say, so each test counts those that did, and fails where too few
of them were: streams decode at the one replica all the time, and prompts are long.
"""

from __future__ import annotations

import asyncio
import itertools
import math
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from router.core.fleet.disagg_pairs import TIMES_S
from tests.real.exact_drive import send
from tests.real.exact_workload import CHAT, COMPLETIONS, RESPONSES, Call
from tests.real.processes import wait_until
from tests.real.router_process import Router
from tests.real.sglang_workload import GENERATE, generate
from tests.real.talk import Answer, ask, prose
from tests.real.test_replica_loss import first_under_load
from tests.real.vllm_server import MODEL, Replica

STREAMS = 6
STREAM_WORDS, STREAM_TOKENS, STREAM_PROMPT_TOKENS_MAX = 30, 3_500, 100
PROMPT_WORDS, ANSWER_TOKENS = 2_000, 24
BESIDE = 3  # requests with long prompts that are open at a time
ROUNDS_MAX = 3  # of prompts, until the speeds of both replicas are learned, which a busy machine moves
LEAVERS_TOKENS, LEAVE_WITHIN_S = 60, 5.0  # so that some of them are fetched for and answered before they leave
WAIT_S = 300.0  # a limit for what must come

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
