"""Requests in two legs over simulated engines that enforce the handshakes: what comes back, and what is left."""

from __future__ import annotations

import asyncio
from itertools import product
from typing import Any

import pytest
from openai import AsyncOpenAI

from loadtest.fake_engine.disagg_http import Moment
from router.core.types.disagg_types import KvConnector, Role
from router.core.types.placements import EndReason
from router.proxy.disagg_calls import caller
from tests.support.fakes import FakeEngine, error_event
from tests.support.splitting import PROMPT, Fleet, ask, fleet, splitting, stop_clocks
from tests.support.waiting import until


@pytest.mark.parametrize("handshake", KvConnector)
@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_goes_in_two_legs(handshake: KvConnector, stream: bool) -> None:
    """One engine prefills it, another one fetches its blocks and decodes; the client sees one answer, and the placer
    hears of the prefilling engine's own count."""
    async with fleet(handshake) as it:
        async with AsyncOpenAI(base_url=it.http.url + "/v1", api_key="x", max_retries=0) as client:
            if stream:
                chunks = [
                    chunk
                    async for chunk in await client.completions.create(
                        model="sim", prompt=PROMPT, max_tokens=5, stream=True
                    )
                ]
                text = "".join(chunk.choices[0].text for chunk in chunks if chunk.choices)
                assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
            else:
                text = (await client.completions.create(model="sim", prompt=PROMPT, max_tokens=5)).choices[0].text
        assert len(text) == 5 * 4
        await it.idle()
        assert it.fetched() == 1
        ((replica, outcome),) = it.placer.ended
        assert (replica, outcome.ending) == (it.prefill[0], EndReason.OK)
        assert outcome.usage is not None
        assert (outcome.usage.completion_tokens, outcome.usage.cached_tokens) == (1, 0)
        assert it.placer.failures == []


@pytest.mark.parametrize("handshake", KvConnector)
async def test_many_at_once_get_their_own_blocks(handshake: KvConnector) -> None:
    """Ids and rooms are each request's own: none is fetched twice, and no engine crashes."""
    async with fleet(handshake, 2, 2) as it:
        said = await asyncio.gather(*(ask(it.http.url, prompt=f"{n} {PROMPT}", stream=n % 2 == 0) for n in range(24)))
        assert {status for status, _ in said} == {200}
        await it.idle()
        assert it.fetched() == 24
        assert not any(link.gone for link in it.engines.links)
        assert not any(len(link.legs) for link in it.engines.links)


@pytest.mark.parametrize("handshake", [KvConnector.NIXL, KvConnector.MOONCAKE, KvConnector.OFFLOADING])
async def test_what_may_not_be_split_goes_in_one_leg(handshake: KvConnector) -> None:
    """Two choices are computed where they are decoded."""
    async with fleet(handshake) as it:
        status, _ = await ask(it.http.url, n=2)
        assert (status, it.placer.placed) == (200, [("", it.decode[0])])
        await it.idle()
        assert it.fetched() == 0


async def test_a_prompt_without_blocks_is_computed_where_it_is_decoded() -> None:
    """NIXL answers null for a prompt shorter than a block."""
    async with fleet(KvConnector.NIXL) as it:
        status, _ = await ask(it.http.url, prompt="short")
        assert status == 200
        await it.idle()
        assert (it.fetched(), it.placer.failures) == (0, [])
        assert [outcome.ending for _, outcome in it.placer.ended] == [
            EndReason.REFUSED_BY_ENGINE
        ]  # nothing to learn from


@pytest.mark.parametrize("handshake", KvConnector)
async def test_a_request_that_no_engine_takes_is_refused_once(handshake: KvConnector) -> None:
    """The client gets the engine's own refusal; nobody is blamed, and nothing is tried again."""
    async with fleet(handshake) as it:
        status, body = await ask(it.http.url, prompt="")
        assert (status, "error" in body) == (400, True)
        await it.idle()
        assert (len(it.placer.placed), it.placer.failures) == (1, [])


@pytest.mark.inside
async def test_a_client_that_leaves_between_the_legs_of_nixl_frees_the_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """The decode leg has no connection yet: its engine is sent the request all the same, and told that nobody wants
    it, so that the prefilling engine need not keep the blocks for its lease."""
    monkeypatch.setattr(caller, "RELEASE_S", 60.0)
    async with fleet(KvConnector.NIXL) as it:
        stop_clocks(it.engines)
        upstream, connecting, go_on = it.http.upstream, asyncio.Event(), asyncio.Event()
        connect = upstream._connect

        async def slowly(pool: Any) -> Any:
            if upstream._pools.get(it.decode[0]) is pool and not go_on.is_set():
                connecting.set()
                await go_on.wait()
            return await connect(pool)

        upstream._connect = slowly  # type: ignore[method-assign]
        asking = asyncio.create_task(ask(it.http.url))
        async with asyncio.timeout(60):
            await connecting.wait()
        assert len(it.engines.links[0].legs) == 1
        asking.cancel()
        await until(lambda: it.http.proxy.in_flight == 0)
        assert len(it.engines.links[0].legs) == 1
        go_on.set()
        await until(lambda: not len(it.engines.links[0].legs))
        await it.idle()
        assert it.engines.links[0].legs.expired == 0


async def _holding(it: Fleet, role: Role, moment: Moment) -> tuple[asyncio.Event, asyncio.Event]:
    """Have all legs of this role stop at this moment: an event that says that one has, and one that lets them go on."""
    reached, go_on = asyncio.Event(), asyncio.Event()

    async def hold(of: Role, at: Moment) -> None:
        if (of, at) == (role, moment):
            reached.set()
            await go_on.wait()

    for link in it.engines.links:
        link.trip = hold
    return reached, go_on


@pytest.mark.parametrize("moment", [Moment.ARRIVED, Moment.READY])
async def test_a_client_of_mooncake_that_leaves_strands_no_room(moment: Moment) -> None:
    """The decoding engine keeps room for the blocks that it has asked for until they have come: the prefill that they
    come of goes on behind the client, and then nothing is left at either engine, and nobody is blamed."""
    async with fleet(KvConnector.MOONCAKE) as it:
        reached, go_on = await _holding(it, Role.PREFILL, moment)
        asking = asyncio.create_task(ask(it.http.url))
        async with asyncio.timeout(60):
            await reached.wait()
        prefill, decode = it.engines.links
        await until(lambda: decode.waiting == 1)
        asking.cancel()
        await until(lambda: it.http.proxy.in_flight == decode.waiting == 0)
        assert (prefill.waiting, it.http.legs.open) == (1, 1)
        go_on.set()
        await it.idle()
        assert (len(prefill.legs), prefill.legs.stranded, it.placer.failures) == (0, 0, [])


@pytest.mark.inside
async def test_prefills_behind_clients_that_left_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beyond the limit both legs end with their client, whatever that strands."""
    monkeypatch.setattr(caller, "RELEASES_MAX", 2)
    async with fleet(KvConnector.MOONCAKE) as it:
        _, go_on = await _holding(it, Role.PREFILL, Moment.ARRIVED)
        prefill, decode = it.engines.links
        asking = [asyncio.create_task(ask(it.http.url, prompt=f"{n} {PROMPT}")) for n in range(5)]
        await until(lambda: prefill.waiting == decode.waiting == 5)
        for each in asking:
            each.cancel()
        await until(lambda: it.http.proxy.in_flight == decode.waiting == 0 and prefill.waiting == 2)
        go_on.set()
        await it.idle()
        assert it.placer.failures == []


# But for prefill legs of Mooncake's, which go on.
ENDED = [
    leg for leg in product(KvConnector, (Role.PREFILL, Role.DECODE)) if leg != (KvConnector.MOONCAKE, Role.PREFILL)
]


@pytest.mark.parametrize(("handshake", "role"), ENDED)
async def test_a_client_that_leaves_ends_both_legs(handshake: KvConnector, role: Role) -> None:
    """Whichever leg is at work: both engines are told at once, nobody is blamed, and nothing is left."""
    async with fleet(handshake) as it:
        reached = asyncio.Event()

        async def hold(of: Role, _: object) -> None:
            if of is role:
                reached.set()
                await asyncio.Event().wait()

        for link in it.engines.links:
            link.trip = hold
        asking = asyncio.create_task(ask(it.http.url))
        async with asyncio.timeout(60):
            await reached.wait()
        asking.cancel()
        await it.idle()
        assert it.placer.failures == []
        assert len(it.placer.placed) == 1
        # What was computed by then, and not asked for, these keep for as long as their own rule says.
        parks = role is Role.DECODE and handshake is KvConnector.OFFLOADING
        assert parks or not any(len(link.legs) for link in it.engines.links)


async def test_blocks_behind_a_connection_that_was_closed_are_freed() -> None:
    """The engine closes a connection that was idle just when the decode leg is sent on it: it is told of the blocks
    once more, besides the retry, since it may not have read of them."""
    async with fleet(KvConnector.NIXL) as it:
        assert (await ask(it.http.url))[0] == 200
        arrived = 0

        async def closes(of: Role, moment: Moment) -> None:
            nonlocal arrived
            if (of, moment) == (Role.DECODE, Moment.ARRIVED):
                arrived += 1
                if arrived == 1:
                    raise asyncio.CancelledError  # the connection is closed without a word

        for link in it.engines.links:
            link.trip = closes
        status, _ = await ask(it.http.url, prompt=f"another {PROMPT}")
        assert status == 200
        await it.idle()
        assert arrived == 3
        assert not len(it.engines.links[0].legs)
        assert it.placer.failures == [(it.decode[0], "decode_stale")]
        assert it.engines.links[0].legs.expired == 0


@pytest.mark.inside
@pytest.mark.parametrize("leaves", [False, True])
async def test_a_prefill_stage_on_a_closed_connection_strands_no_room(
    leaves: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mooncake's decode engine has reserved memory under the transfer id when the prefill engine closes an idle
    connection unread. The stage is sent again with this id, even if the client has left, so that the blocks come."""
    monkeypatch.setattr("router.http.upstream.STALE_S", 60.0)
    async with fleet(KvConnector.MOONCAKE) as it:
        stop_clocks(it.engines)
        prefill, decode = it.engines.links
        assert (await ask(it.http.url))[0] == 200
        arrived, go_on = 0, asyncio.Event()

        async def closes(of: Role, moment: Moment) -> None:
            nonlocal arrived
            if (of, moment) != (Role.PREFILL, Moment.ARRIVED):
                return
            arrived += 1
            await go_on.wait()
            if arrived == 1:
                raise asyncio.CancelledError  # the connection is closed without a word

        for link in it.engines.links:
            link.trip = closes
        asking = asyncio.create_task(ask(it.http.url, prompt=f"another {PROMPT}"))
        await until(lambda: (arrived, decode.waiting) == (1, 1))
        if leaves:
            asking.cancel()
            await until(lambda: it.http.proxy.in_flight == decode.waiting == 0)
        go_on.set()
        assert leaves or (await asking)[0] == 200
        await it.idle()
        assert (arrived, len(it.placer.placed), it.placer.failures) == (2, 2, [])
        assert (len(prefill.legs), prefill.legs.reserved, prefill.legs.stranded) == (0, 0, 0)


async def test_an_error_of_whoever_computes_alone_is_its_own() -> None:
    """NIXL's prefill leg named no blocks, so the decoding engine had none to fetch: where its stream begins with an
    error it is blamed, and no pair is."""
    async with FakeEngine(owned_by="vllm") as prefill, FakeEngine(owned_by="vllm") as decode:
        decode.script.append(error_event)
        async with splitting(KvConnector.NIXL, [prefill.url], [decode.url], upstream__retries_max=0) as (
            http,
            placer,
            _,
        ):
            await ask(http.url, model="m", stream=True)
            assert placer.placed == [(prefill.url, decode.url)]
            assert placer.failures == [(decode.url, "decode_engine")]
            assert placer.broken == []
