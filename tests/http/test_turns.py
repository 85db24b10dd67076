"""Whoever sends without an end leaves seven of eight turns of the event loop to all others."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import pytest

from router.eventloop import EMPTY_S, SHARE_S, TURNS, Turns
from router.http.read_fairness import TURN_BYTES
from tests.http.test_engine_reads import Fed
from tests.http.test_read_fairness import Loop, sides
from tests.support.recorded import head


@pytest.mark.promise("A client that sends without an end has one turn in eight.", "clients")
@pytest.mark.promise("An engine is read in turns with all others, however fast it sends.", "engines")
def test_who_sends_without_an_end_has_one_turn_in_eight() -> None:
    """Clients and engines that send as fast as they are read go on in the same turn of the loop, and not in the seven
    behind it, however their bytes are cut into reads."""
    loop = Loop()
    (client,) = sides(1, loop)
    fed = Fed(client.pace, loop)
    fed.connection.data_received(head("content-type: application/json", "content-length: 100000000"))
    busy = list[bool]()
    for number in range(3 * TURNS):
        seen = (client.intake.receiver.reading_bytes, fed.got)
        while client.reading:
            client.intake.feed(b"x" * (TURN_BYTES // (number % 3 + 1)))
        while fed.transport.reading:
            fed.connection.data_received(b"x" * (TURN_BYTES // (number % 3 + 1)))
        busy.append(seen != (client.intake.receiver.reading_bytes, fed.got))
        loop.turn()
    assert sum(busy) == 3
    assert all(sum(busy[at : at + TURNS]) == 1 for at in range(2 * TURNS))


@pytest.mark.promise("An engine is read in turns with all others, however fast it sends.", "engines")
def test_short_chunks_count_for_what_they_take() -> None:
    """Chunks of one byte, in reads that are short, end the turn of a connection long before as many bytes would."""
    loop = Loop()
    fed = Fed(loop=loop)
    fed.connection.data_received(head("content-type: application/json", "transfer-encoding: chunked"))
    while fed.transport.reading:
        fed.connection.data_received(b"1\r\nx\r\n" * 100)
    assert 2_000 < fed.got < 3_000
    fed.connection.data_received(b"")
    loop.serve()
    assert fed.transport.reading


def test_work_that_waits_goes_on_in_its_order_and_within_its_time() -> None:
    """No more than so many calls in one turn, and no further one when its time is over; a call that fails costs the
    others nothing."""
    loop, called = Loop(), list[int]()
    turns = Turns(cast("asyncio.AbstractEventLoop", loop), lambda: loop.now_s, calls_max=3, turn_s=1.0)

    def work(number: int, takes_s: float) -> Callable[[], None]:
        def call() -> None:
            called.append(number)
            loop.now_s += takes_s

        return call

    def fail() -> None:
        raise RuntimeError

    for number, takes_s in enumerate((0.0, 0.0, 0.0, 2.0, 0.0)):
        turns.enqueue(work(number, takes_s))
    turns.enqueue(fail)
    turns.enqueue(work(6, 0.0))
    for expected in ([0, 1, 2], [0, 1, 2, 3]):
        loop.serve()
        assert called == expected
    with pytest.raises(RuntimeError):
        loop.serve()
    assert called == [0, 1, 2, 3, 4]
    loop.serve()
    assert called == [0, 1, 2, 3, 4, 6]
    assert loop.soon == []


def test_a_share_is_an_eighth_of_the_time_of_others() -> None:
    """Where turns are long, what waits may take an eighth of that, so that a busy loop starves none of it."""
    loop, shares = Loop(), list[float]()
    turns = Turns(cast("asyncio.AbstractEventLoop", loop), lambda: loop.now_s)
    for turn_s in (0.0, 0.01):
        turns.enqueue(lambda: shares.append(turns.share_s))
        for _ in range(TURNS):
            loop.now_s += turn_s - 0.001 + EMPTY_S
            loop.turn()
    assert shares == [SHARE_S, pytest.approx(0.01 + EMPTY_S)]


def test_empty_turns_are_left_to_nobody() -> None:
    """Where others have had a turn and nothing to do in it, what waits goes on; where they go on working, it waits."""
    loop, called = Loop(), list[int]()
    turns = Turns(cast("asyncio.AbstractEventLoop", loop), lambda: loop.now_s)
    turns.enqueue(lambda: called.append(1))
    for expected in ([], [], [], [1]):
        loop.now_s -= 0.001 if expected else 0.0
        loop.turn()
        assert called == expected
    assert loop.soon == []


async def test_a_task_waits_for_its_turn() -> None:
    """One that is cancelled meanwhile holds up no other."""
    turns = Turns(asyncio.get_running_loop())
    first, second = (asyncio.ensure_future(turns.turn()) for _ in range(2))
    await asyncio.sleep(0)
    first.cancel()
    async with asyncio.timeout(60.0):
        await second
    assert first.cancelled()
    assert not turns.waiting
