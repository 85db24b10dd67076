"""A replica that is lost takes no client with it that had received nothing yet."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

import httpx
import pytest

from tests.real.router_process import Router
from tests.real.talk import Answer, Conversation, ask, chat, prose
from tests.real.vllm_server import SEQUENCES_MAX, Replica

CONVERSATIONS = 8
WAITING = 20
STREAMS = 4
LONG_ANSWER_TOKENS = 800
# Requests that queue on each replica when they are shared out evenly, and how many must be seen to.
QUEUED_EACH, QUEUED_MIN = 12, 2
LOAD_TIMEOUT_S = 300.0
# A machine with two cores may let one engine stand still while the other works, once for 9 s. Its requests move, and
# who loses the second replica as well has lost both.
LOADS_MAX = 3
POLL_S = 0.05
RUNNING, QUEUED = "vllm:num_requests_running", "vllm:num_requests_waiting"


async def first_under_load(replicas: list[Replica], metric: str, least: float) -> tuple[Replica, float]:
    """Wait until a replica's gauge reaches `least`; which, and the gauge. TimeoutError after LOAD_TIMEOUT_S."""
    async with asyncio.timeout(LOAD_TIMEOUT_S):
        while True:
            for replica in replicas:
                now = await asyncio.to_thread(replica.gauge, metric)
                if now >= least:
                    return replica, now
            await asyncio.sleep(POLL_S)


async def begin(client: httpx.AsyncClient, allowed: list[int], name: str) -> list[Conversation]:
    """Eight conversations of two turns each."""
    talks = [Conversation(f"{name} {number}", allowed, answer_tokens=40) for number in range(CONVERSATIONS)]
    for _ in range(2):
        answers = await asyncio.gather(*(talk.turn(client) for talk in talks))
        assert not [answer.failure for answer in answers if answer.failure]
    return talks


@asynccontextmanager
async def under_load(
    client: httpx.AsyncClient, allowed: list[int], name: str, streams: int, whole: int
) -> AsyncIterator[tuple[list[asyncio.Task[Answer]], list[Answer]]]:
    """Long requests in flight: `streams`, sent first so that they begin, and `whole`, silent before their end."""
    seen = [Answer() for _ in range(streams + whole)]
    tasks = []
    for number, answer in enumerate(seen):
        said = [{"role": "user", "content": prose(f"{name} load {number}", 150)}]
        body = chat(said, LONG_ANSWER_TOKENS, number < streams, allowed)
        tasks.append(asyncio.create_task(ask(client, body, answer)))
    try:
        yield tasks, seen
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def broken(answers: list[Answer]) -> list[Answer]:
    """Those that did not come whole. An engine that is told to stop may say so in a stream: "abort"."""
    return [answer for answer in answers if answer.failure or answer.finish != "length"]


def judge(answers: list[Answer]) -> None:
    """Only streams that had begun broke, and their clients heard of it."""
    lost = [(a.status, a.finish, a.failure) for a in broken(answers) if not (a.streamed and a.begun)]
    assert not lost, f"requests lost before their answers had begun: {lost}"
    # vLLM told to stop leaves connections open and silent for as long as clients wait.
    assert not [answer.failure for answer in answers if "Timeout" in answer.failure]


async def spread_of_new(client: httpx.AsyncClient, allowed: list[int], name: str) -> Counter[str]:
    """How eight new conversations are placed."""
    talks = [Conversation(f"{name} {number}", allowed, answer_tokens=40) for number in range(CONVERSATIONS)]
    answers = await asyncio.gather(*(talk.turn(client) for talk in talks))
    assert not [answer.failure for answer in answers if answer.failure]
    return Counter(answer.replica for answer in answers)


@dataclass
class Loss:
    """A replica about to be lost: how its end comes, under how much load, and what is on it."""

    end: Callable[[Replica], None]
    gauge: str
    least: float
    whole: int
    talks: list[Conversation] = field(default_factory=list)
    # On the victim as well, and silent until it is back.
    held_out: list[Conversation] = field(default_factory=list)
    target: Replica | None = None
    victim: str = ""

    def name(self) -> str:
        """What the texts of its conversations are drawn from."""
        return f"lose by {self.end.__name__}"


async def lose(
    loss: Loss, replicas: list[Replica], router: Router, client: httpx.AsyncClient, allowed: list[int]
) -> str:
    """Lose the replica that is first under its load, judge what clients saw, and say it in a line."""
    talks = await begin(client, allowed, loss.name())
    async with AsyncExitStack() as load:
        for _ in range(LOADS_MAX):
            before = await asyncio.to_thread(router.retries)
            tasks, seen = await load.enter_async_context(under_load(client, allowed, loss.name(), STREAMS, loss.whole))
            loss.target, busy = await first_under_load(replicas, loss.gauge, loss.least)
            if await asyncio.to_thread(router.retries) == before:
                break
            await load.aclose()
        else:
            raise AssertionError("a replica stands still under each load: none can be lost alone")
        loss.victim = f":{loss.target.port}"
        there = [talk for talk in talks if talk.answers[-1].replica.endswith(loss.victim)]
        loss.held_out, loss.talks = there[:1], [talk for talk in talks if talk not in there[:1]]
        lost_at = time.monotonic()
        await asyncio.to_thread(loss.end, loss.target)
        turns = [talk.turn(client, stream=number % 2 == 0) for number, talk in enumerate(loss.talks)]
        answers = await asyncio.gather(*turns)
        turns_s = time.monotonic() - lost_at
        await asyncio.gather(*tasks)
        all_s = time.monotonic() - lost_at
    judge([*seen, *answers])
    assert len(there) > 1, "too few conversations on the lost replica to see any move"
    reasons = dict(Counter(answer.reason for answer in answers))
    retried = sum(answer.reason == "retry" for answer in seen)
    return (
        f"{loss.name()} with {loss.gauge} at {busy:.0f}: {len(there) - 1} of {len(answers)} conversations had to move, "
        f"{reasons} in {turns_s:.1f} s; of {loss.whole} whole and {STREAMS} streamed answers in flight {retried} were "
        f"retried and {len(broken(seen))} broke after they had begun; all ended in {all_s:.1f} s"
    )


async def stay_where_they_moved(loss: Loss, client: httpx.AsyncClient) -> None:
    """Two turns after the loss, each conversation finds on the other replica what the turn before left there."""
    for _ in range(2):
        answers = await asyncio.gather(*(talk.turn(client) for talk in loss.talks))
        judge(answers)
        assert not [answer.replica for answer in answers if answer.replica.endswith(loss.victim)]
    colder = [talk.name for talk in loss.talks if talk.answers[-1].cached_tokens <= talk.answers[-2].cached_tokens]
    assert not colder, f"not kept where they moved to: {colder}"


def sigkill(replica: Replica) -> None:
    """As the kernel does when memory runs out: the whole tree at once."""
    replica.kill()


def sigterm(replica: Replica) -> None:
    """As a supervisor does: vLLM closes its listener, then leaves open connections silent."""
    replica.running().terminate()


@pytest.fixture
def losing(
    replicas: list[Replica],
    router: Router,
    client: httpx.AsyncClient,
    allowed: list[int],
    figures: Callable[[str], None],
) -> Callable[[Loss], Awaitable[None]]:
    """Lose a replica so; its conversations move, and stay where they moved."""

    async def lost(loss: Loss) -> None:
        figures(await lose(loss, replicas, router, client, allowed))
        await stay_where_they_moved(loss, client)

    return lost


async def test_killed_and_restarted(
    losing: Callable[[Loss], Awaitable[None]],
    router: Router,
    client: httpx.AsyncClient,
    allowed: list[int],
    figures: Callable[[str], None],
) -> None:
    """A replica killed at work takes begun streams only; back again, it is used and credited with nothing."""
    loss = Loss(sigkill, RUNNING, STREAMS + 1, WAITING)
    await losing(loss)
    assert loss.target is not None
    figures(f"restart: {loss.target.name} ready after {await asyncio.to_thread(loss.target.restart):.0f} s")
    figures(f"the router had noticed {await asyncio.to_thread(router.wait_replicas, 2):.1f} s later")
    for talk in loss.held_out:
        answer = await talk.turn(client)
        assert not answer.failure, answer.failure
        # Its two turns went down with the replica's memory.
        assert (answer.cached_tokens, answer.predicted_tokens) == (0, 0), answer
    spread = await spread_of_new(client, allowed, "after a restart")
    figures(f"spread of {CONVERSATIONS} new conversations after a restart: {dict(spread)}")
    assert len(spread) == 2


async def test_terminated_while_requests_wait(losing: Callable[[Loss], Awaitable[None]]) -> None:
    """Requests queued in a replica that is told to stop move, though it never closes their connections."""
    loss = Loss(sigterm, QUEUED, QUEUED_MIN, 2 * (SEQUENCES_MAX + QUEUED_EACH))
    await losing(loss)
