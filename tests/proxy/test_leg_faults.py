"""Faults of requests in two legs: which leg, at which moment, under which handshake. An engine that is left alone with
its wait would wait for 60 to 540 s, far beyond what these tests wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from openai import APIError, AsyncOpenAI

from loadtest.fake_engine.disagg_http import LegRefused, Moment
from router.core.types.disagg_types import KvConnector, Role
from router.core.types.placements import EndReason
from router.http.failures import ClosedBeforeResponse
from router.proxy.attempts import AttemptHistory
from tests.support.splitting import PROMPT, Fleet, ask, fleet
from tests.support.waiting import until

Trip = Callable[[Role, Moment], Awaitable[None]]


def _once(role: Role, moment: Moment, act: Callable[[], Awaitable[None]]) -> tuple[Trip, list[Role]]:
    """What happens at this moment of the first such leg, and a list that tells whether it did."""
    done: list[Role] = []

    async def trip(of: Role, at: Moment) -> None:
        if (of, at) == (role, moment) and not done:
            done.append(of)
            await act()

    return trip, done


async def _fails() -> None:
    raise LegRefused(500, "Internal server error")


async def _breaks() -> None:
    raise asyncio.CancelledError  # the connection is closed without a word


def _arm(it: Fleet, trip: Trip) -> None:
    for link in it.engines.links:
        link.trip = trip


BEFORE = [
    (Role.PREFILL, Moment.ARRIVED),
    (Role.PREFILL, Moment.READY),
    (Role.DECODE, Moment.ARRIVED),
    (Role.DECODE, Moment.READY),
]


@pytest.mark.parametrize("handshake", KvConnector)
@pytest.mark.parametrize(("role", "moment"), BEFORE)
async def test_a_leg_that_fails_is_made_good_by_another_pair(
    handshake: KvConnector, role: Role, moment: Moment
) -> None:
    """Before the first byte: an error, a closed connection, and a process that dies. The other leg ends at once, the
    replica of the leg that failed is blamed, both legs are tried once more without it, and the client notices
    nothing. Where the decoding engine says that it failed, one leg is tried, but for SGLang."""
    async with fleet(handshake, 2, 2, time_scale=1.0, upstream__retries_max=1) as it:
        at = 0 if role is Role.PREFILL else 1

        async def dies() -> None:
            await _killed(it, it.placer.placed[-1][at])

        for act in (_fails, _breaks, dies):
            before = len(it.placer.placed)
            trip, done = _once(role, moment, act)
            _arm(it, trip)
            status, body = await ask(it.http.url, stream=act is not _breaks)
            assert (status, done) == (200, [role])
            assert '"error"' not in body
            await it.idle()
            if act is _breaks and handshake is KvConnector.MOONCAKE and role is Role.PREFILL:
                # The connection had been used: the stage is sent again in place, for blocks that are waited for.
                assert len(it.placer.placed[before:]) == 1
                continue
            first, second = it.placer.placed[before:]  # and no third
            alone = role is Role.DECODE and act is _fails and handshake is not KvConnector.SGLANG
            assert all(first)
            assert all(second) is not alone
            assert first[at] != second[at]
            replica, kind = it.placer.failures[-1]
            assert replica == first[at]
            assert kind.startswith("prefill_") is (role is Role.PREFILL)
        resent = handshake is KvConnector.MOONCAKE and role is Role.PREFILL
        assert len(it.placer.failures) == 3 - resent


@pytest.mark.parametrize("handshake", KvConnector)
async def test_a_pair_that_fails_twice_is_an_error(handshake: KvConnector) -> None:
    """There is one retry of a pair, within the budget: the official client sees a clean error, and no storm comes of
    many such requests."""
    async with fleet(handshake, 2, 2, upstream__retry_ratio=0.0, upstream__retry_floor_per_s=0.0) as it:

        async def always(role: Role, _: Moment) -> None:
            if role is Role.PREFILL:
                await _fails()

        _arm(it, always)
        async with AsyncOpenAI(base_url=it.http.url + "/v1", api_key="x", max_retries=0) as client:
            with pytest.raises(APIError) as caught:
                await client.completions.create(model="sim", prompt=PROMPT, max_tokens=5)
        assert getattr(caught.value, "status_code", 0) == 502
        assert len(it.placer.placed) == 2
        said = await asyncio.gather(*(ask(it.http.url, prompt=f"{n} {PROMPT}") for n in range(30)))
        assert {status for status, _ in said} <= {502, 503}
        await it.idle()
        assert len(it.placer.placed) <= 2 + 30 + 10  # ten retries are in stock


@pytest.mark.parametrize("handshake", KvConnector)
@pytest.mark.parametrize("role", [Role.PREFILL, Role.DECODE])
async def test_a_leg_that_hangs_ends_both(handshake: KvConnector, role: Role) -> None:
    """At the time in which any first byte must come its own replica is blamed, though the other one may have waited for
    it; where that cannot be told nobody is, and the pair rests. The client is told, and neither engine goes on."""
    async with fleet(handshake) as it:

        async def hangs() -> None:
            await asyncio.Event().wait()

        trip, done = _once(role, Moment.ARRIVED, hangs)
        _arm(it, trip)
        asking = asyncio.create_task(ask(it.http.url))
        answers_first = role is Role.DECODE and handshake is not KvConnector.SGLANG  # before anybody has fetched
        await until(lambda: done and (it.placer.ended or not answers_first))
        it.http.upstream.limits = replace(it.http.upstream.limits, first_byte_timeout_s=0.1)
        status, body = await asking
        assert (status, "timed_out" in body, done) == (504, True, [role])
        await it.idle()
        if handshake is KvConnector.SGLANG or (role is Role.DECODE and handshake is not KvConnector.NIXL):
            assert it.placer.failures == [(it.decode[0], "decode_blocks_timeout")]
            assert it.placer.broken == [(it.prefill[0], it.decode[0])]
        elif role is Role.PREFILL:
            assert it.placer.failures == [(it.prefill[0], "prefill_timeout")]
        else:
            assert it.placer.failures == [(it.decode[0], "decode_timeout")]


@pytest.mark.long
async def test_sglangs_decode_servers_that_hang_bring_no_prefill_server_down() -> None:
    """Prefill servers answer when their blocks were taken, and are silent, too: whatever is tried, none of them is
    blamed."""
    async with fleet(KvConnector.SGLANG, 2, 1, upstream__retries_max=1, upstream__retry_on_timeout=True) as it:

        async def hangs(role: Role, _: Moment) -> None:
            if role is Role.DECODE:
                await asyncio.Event().wait()

        _arm(it, hangs)
        it.http.upstream.limits = replace(it.http.upstream.limits, first_byte_timeout_s=0.1)
        for _ in range(4):
            assert (await ask(it.http.url))[0] == 504
        await it.idle()
        assert {kind for _, kind in it.placer.failures} == {"decode_blocks_timeout"}
        assert {outcome.ending for _, outcome in it.placer.ended} == {EndReason.CLIENT_LEFT}
        assert not any(member.breaker.failures for member in it.control.router.fleet.members.values())


@pytest.mark.parametrize("handshake", KvConnector)
async def test_an_answer_that_breaks_off_ends_in_an_error(handshake: KvConnector) -> None:
    """After the first byte nothing is tried again; the official client is told, and the prefill leg ends."""
    async with fleet(handshake, time_scale=1.0) as it:
        trip, done = _once(Role.DECODE, Moment.ANSWERED, _breaks)
        _arm(it, trip)
        async with AsyncOpenAI(base_url=it.http.url + "/v1", api_key="x", max_retries=0) as client:
            stream = await client.completions.create(model="sim", prompt=PROMPT, max_tokens=50, stream=True)
            with pytest.raises(APIError):
                async for _ in stream:
                    pass
        assert done == [Role.DECODE]
        await it.idle()
        assert len(it.placer.placed) == 1
        assert [replica for replica, _ in it.placer.failures] == it.decode


@pytest.mark.parametrize("handshake", [KvConnector.MOONCAKE, KvConnector.OFFLOADING, KvConnector.SGLANG])
async def test_a_prefill_that_never_ends_is_dropped_behind_its_decode(handshake: KvConnector) -> None:
    """The answer is whole, and the prefilling engine does not say so: it has a little time left, and no more."""
    async with fleet(handshake) as it:
        it.http.legs.linger_s = 3_600.0
        forever = asyncio.Event()
        for link in it.engines.links:
            link.linger = forever.wait
        status, _ = await ask(it.http.url, stream=True)
        assert status == 200
        assert it.http.legs.open == 1
        it.http.legs.linger_s = 0.0
        await it.idle()
        assert it.placer.failures == []


async def _killed(it: Fleet, replica: str) -> None:
    """The replica's process dies, and with it whatever it was doing."""
    it.kills.append(asyncio.create_task(it.engines.kill(it.engines.urls.index(replica))))
    await asyncio.Event().wait()


@pytest.mark.parametrize("handshake", [KvConnector.NIXL, KvConnector.MOONCAKE, KvConnector.OFFLOADING])
async def test_a_decoding_engine_that_closes_the_connection_may_compute_alone(handshake: KvConnector) -> None:
    """The replica that prefilled dies, and the decoding engine ends its leg without a status, as vLLM does on paths
    other than chat: the request is computed where it was to be decoded, as no other replica is left."""
    async with fleet(handshake, upstream__retries_max=1) as it:

        async def loses_blocks() -> None:
            await it.engines.kill(it.engines.urls.index(it.prefill[0]))
            await _breaks()

        trip, done = _once(Role.DECODE, Moment.READY, loses_blocks)
        _arm(it, trip)
        status, _ = await ask(it.http.url)
        assert (status, done) == (200, [Role.DECODE])
        await it.idle()
        assert it.placer.placed[-1] == ("", it.decode[0])


def test_only_a_decode_stage_that_broke_is_tried_on_its_replica_again() -> None:
    """A prefill replica that closes the connection is left out, also if no other replica remains."""
    decode, prefill = AttemptHistory(), AttemptHistory()
    decode.note("d", ClosedBeforeResponse("closed"), in_two=True)
    prefill.note("p", ClosedBeforeResponse("closed"))
    assert decode.excluded == [{"d"}, set()]
    assert prefill.excluded == [{"p"}]


@pytest.mark.parametrize("handshake", [KvConnector.NIXL, KvConnector.MOONCAKE, KvConnector.OFFLOADING])
async def test_blocks_that_do_not_come_are_computed(handshake: KvConnector) -> None:
    """Each decode leg's engine says that it failed, as where its way to the other one is broken: the only pair is known
    to be, and every client gets an answer in one leg, from the same replica where there is no other one."""
    async with fleet(handshake) as it:

        async def always(role: Role, _: Moment) -> None:
            if role is Role.DECODE:
                await _fails()

        _arm(it, always)
        for stream in (True, False):
            before = len(it.placer.placed)
            status, body = await ask(it.http.url, stream=stream)
            assert (status, '"error"' in body) == (200, False)
            await it.idle()
            assert it.placer.placed[before:] == [(it.prefill[0], it.decode[0]), ("", it.decode[0])]
        assert it.placer.broken == [(it.prefill[0], it.decode[0])] * 2
        assert it.placer.failures == [(it.decode[0], "decode_blocks")] * 2


@pytest.mark.parametrize("handshake", [KvConnector.MOONCAKE, KvConnector.OFFLOADING])
async def test_a_prefill_that_is_gone_behind_its_answer_is_not_waited_for(handshake: KvConnector) -> None:
    """The prefill leg has ended well, and its blocks do not come: a stream goes on in one leg when they should have
    long been there, and not at the time in which any first byte must come."""
    async with fleet(handshake, upstream__first_byte_timeout_s=600.0, p2p__timeout_s=0.05) as it:

        async def hangs() -> None:
            await asyncio.Event().wait()

        trip, done = _once(Role.DECODE, Moment.ARRIVED, hangs)
        _arm(it, trip)
        async with asyncio.timeout(60):
            status, body = await ask(it.http.url, stream=True)
        assert (status, '"error"' in body, done) == (200, False, [Role.DECODE])
        await it.idle()
        assert it.placer.placed == [(it.prefill[0], it.decode[0]), ("", it.decode[0])]
        assert it.placer.failures == [(it.decode[0], "decode_blocks_stalled")]
        assert it.placer.broken == [(it.prefill[0], it.decode[0])]


@pytest.mark.parametrize("handshake", [KvConnector.MOONCAKE, KvConnector.OFFLOADING])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_replica_that_dies_behind_its_prefill_is_not_waited_for(handshake: KvConnector, stream: bool) -> None:
    """The prefill leg has ended well, and its replica dies before the blocks have gone, of which the decoding engine
    hears nothing: the request goes on in one leg at once, whether it streams or not."""
    async with fleet(handshake, upstream__first_byte_timeout_s=600.0, p2p__timeout_s=600.0) as it:

        async def hangs() -> None:
            await asyncio.Event().wait()

        trip, done = _once(Role.DECODE, Moment.ARRIVED, hangs)
        _arm(it, trip)
        asking = asyncio.create_task(ask(it.http.url, stream=stream))
        await until(lambda: it.placer.ended and done)
        await it.engines.kill(0)
        await it.control.probe_now()
        async with asyncio.timeout(60):
            status, body = await asking
        assert (status, '"error"' in body) == (200, False)
        await it.idle()
        assert it.placer.placed == [(it.prefill[0], it.decode[0]), ("", it.decode[0])]
        assert it.placer.failures == [(it.decode[0], "decode_blocks_stalled")]


async def test_an_answer_that_takes_long_outlives_the_replica_of_its_prefill() -> None:
    """Its blocks have long been there when that replica dies: it is not tried again."""
    async with fleet(KvConnector.MOONCAKE, upstream__first_byte_timeout_s=600.0, p2p__timeout_s=0.01) as it:
        go_on = asyncio.Event()

        async def waits() -> None:
            await go_on.wait()

        trip, done = _once(Role.DECODE, Moment.READY, waits)
        _arm(it, trip)
        asking = asyncio.create_task(ask(it.http.url))
        await until(lambda: it.placer.ended and done)
        await until(lambda: not it.http.legs.awaited)
        await it.engines.kill(0)
        await it.control.probe_now()
        go_on.set()
        assert (await asking)[0] == 200
        await it.idle()
        assert it.placer.placed == [(it.prefill[0], it.decode[0])]
        assert it.placer.failures == []


@pytest.mark.parametrize("handshake", [KvConnector.NIXL, KvConnector.MOONCAKE, KvConnector.OFFLOADING])
async def test_a_shedding_prefill_pool_sheds_nothing_that_decoders_take(handshake: KvConnector) -> None:
    """Every replica that prefills says 429: the request goes in one leg, and no client hears of
    it."""
    async with fleet(handshake, 2, 1) as it:

        async def sheds(role: Role, moment: Moment) -> None:
            if (role, moment) == (Role.PREFILL, Moment.ARRIVED):
                raise LegRefused(429, "busy")

        _arm(it, sheds)
        status, _ = await ask(it.http.url)
        assert status == 200
        await it.idle()
        assert it.placer.placed == [(it.prefill[0], it.decode[0]), ("", it.decode[0])]
        assert it.placer.failures == [(it.prefill[0], "prefill_shed")]
