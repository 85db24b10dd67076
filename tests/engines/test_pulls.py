"""Replicas that send each other what their CPU memory holds, over HTTP: who is ordered to, and what stays as it was."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from aiohttp import ClientSession

from loadtest.fake_engine.command import Engines, EngineSettings, KvEventsSettings
from loadtest.fake_engine.host_tier import TierLimits
from loadtest.fake_engine.peers import PeerLimits
from loadtest.fake_engine.step import Limits
from router.config.runtime import resolve
from router.config.schema import P2pSettings
from router.core.dialects.p2p_body import with_pull
from router.core.types.placements import Confidence
from router.core.types.replicas import Replica
from router.engines.p2p_prober import P2pProber, accepts_zmtp
from router.extproc.request_body import STREAMED
from router.extproc.response_tracker import UNANSWERED_REQUESTS_MAX
from router.router_server import RouterServer
from tests.extproc.asking import asking, destinations, set_headers
from tests.support import fakes
from tests.support.keyring import Keyring
from tests.support.waiting import until

BLOCK = 16
COMPLETIONS = "/v1/completions"
PROMPT = "abcd" * 20_000
GATEWAY: dict[str, Any] = {
    "listen__mode": "both", "extproc__port": 0, "extproc__health_port": 0, "extproc__response_sample_ratio": 0.0
}  # fmt: skip
SOURCE = "x-kv-cache-source-host-port"
REASON, HOME, PREDICTED = "x-warmroute-reason", "x-warmroute-replica", "x-warmroute-predicted-cached-tokens"


@asynccontextmanager
async def _fleet(**overrides: Any) -> AsyncIterator[tuple[Engines, RouterServer]]:
    """Two replicas with CPU memory that pull from each other, and a router that knows where."""
    settings = EngineSettings(
        replicas=2,
        port=0,
        time_scale=4.0,  # a prompt takes longer to compute than a pull is first guessed to take
        limits=Limits(block_tokens=BLOCK, context_tokens_max=40_000),
        tier=TierLimits(200_000),
        peers=PeerLimits(1e-3, 1e-6),
        kv_events=KvEventsSettings(0, 0),
    )
    async with Engines(settings) as engines, ClientSession() as client:
        for url in engines.urls:  # a stream begins with its first batch
            async with client.post(url + COMPLETIONS, json={"model": "sim", "prompt": f"{url:>64}", "max_tokens": 2}):
                pass
        named = [f"{url}={address}" for url, address in zip(engines.urls, engines.addresses, strict=True)]
        more = {"p2p__endpoints": tuple(named), "p2p__gb_per_s": 1_000.0, **overrides}
        async with RouterServer(resolve(fakes.settings(*engines.urls, tokens__deadline_s=20.0, **more))) as app:
            await app.control.probe_now()
            async with asyncio.timeout(60):
                while any(member.grade is not Confidence.EXACT for member in app.router.members):
                    await asyncio.sleep(0.01)
                while "p2p__port" not in overrides and len(app.router.fleet.pulls.peers) < 2:
                    await asyncio.sleep(0.01)
            yield engines, app


async def _ask(url: str, prompt: str, **fields: Any) -> tuple[dict[str, str], dict[str, Any]]:
    """(headers, last chunk) of a stream of a prompt's first tokens; the whole answer with `stream=False`."""
    asked = {"stream": True, "stream_options": {"include_usage": True}, **fields}
    async with ClientSession() as client:
        body = {"model": "sim", "prompt": prompt, "max_tokens": 2, **(asked if asked["stream"] else {})}
        async with client.post(url + COMPLETIONS, json=body) as response:
            assert response.status == 200
            said = await response.text()
    chunks = [line.removeprefix("data: ") for line in said.splitlines() if line and line != "data: [DONE]"]
    return dict(response.headers), json.loads(chunks[-1])


async def _told(app: RouterServer, holder: str, prompt: str) -> None:
    """Return when the router knows that the holder has the prompt in CPU memory."""
    async with asyncio.timeout(60):
        while True:
            ledger = app.router.knowledge.engine_blocks(holder)
            if ledger is not None and "cpu" in ledger.tiers and ledger.tiers["cpu"].blocks >= len(prompt) // 4 // BLOCK:
                return
            await asyncio.sleep(0.01)


def _full(app: RouterServer, replica: str) -> None:
    """Have the replica look as if it had minutes of prefill to do."""
    member = app.router.fleet.members[replica]
    member.counters.untracked_waiting = 100.0
    member.counters._foreign.extend([100] * 3)


async def _busy_holder(app: RouterServer) -> str:
    """The replica that was sent the prompt, holds it in memory by the router's word, and has much to do."""
    headers, _ = await _ask(app.url, PROMPT)
    await _told(app, headers[HOME], PROMPT)
    _full(app, headers[HOME])
    return headers[HOME]


async def test_a_prompt_comes_from_the_holders_memory() -> None:
    """The holder has much to do: the other replica is sent the request with an order, brings the prompt from the
    holder, and counts it as cached, as was predicted."""
    async with _fleet() as (engines, app):
        holder = await _busy_holder(app)
        headers, answer = await _ask(app.url, PROMPT)
        assert (headers[HOME] != holder, headers[REASON]) == (True, "pull")
        assert engines.peers is not None
        assert (engines.peers.transfers, engines.peers.sent_tokens) == (1, 20_000 // BLOCK * BLOCK - BLOCK)
        cached = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
        assert cached == int(headers[PREDICTED]) == 20_000 - BLOCK


@pytest.mark.parametrize(
    ("settings", "stream"),
    [
        pytest.param({}, False, id="does-not-stream"),  # nothing comes before the end: a pull that stalls is not seen
        pytest.param({"p2p__endpoints": (), "p2p__port": 0}, True, id="without-an-address"),
    ],
)
async def test_what_pulls_nothing(settings: dict[str, Any], stream: bool) -> None:
    """An answer that does not stream, and a holder of which neither settings nor discovery name the address."""
    async with _fleet(**settings) as (engines, app):
        await _busy_holder(app)
        headers, _ = await _ask(app.url, PROMPT, stream=stream)
        assert headers[REASON] == "spill"
        assert engines.peers is not None
        assert engines.peers.transfers == 0


async def test_a_stalled_pull_is_sent_again_without() -> None:
    """The source cannot be reached from the replica, though from the router: the request is sent again without an
    order, its replica is blamed for nothing, and nothing is pulled from there for a while."""
    async with _fleet(p2p__timeout_s=0.2, upstream__retries_max=0) as (engines, app):
        headers, _ = await _ask(app.url, PROMPT)
        holder = headers[HOME]
        other = next(url for url in engines.urls if url != holder)
        await _told(app, holder, PROMPT)
        _full(app, holder)
        assert engines.peers is not None
        engines.peers.leave(engines.addresses[engines.urls.index(holder)])
        headers, _ = await _ask(app.url, PROMPT)
        assert headers[REASON] == "retry"
        (kind, replica), *more = app.control.pages.decisions[-1].retries
        assert (kind, replica, more) == ("pull", other, [])
        members = app.router.fleet.members
        assert (members[other].breaker.failures, members[holder].breaker.failures) == (0, 0)
        assert holder not in app.router.fleet.pulls.sources(asyncio.get_running_loop().time())


async def test_a_gateways_sidecar_is_told_the_source() -> None:
    """The picker names the source in llm-d's header, whatever the client has put there, and leaves the body alone."""
    async with _fleet(**GATEWAY) as (engines, app):
        holder = await _busy_holder(app)
        await _shows_heads(app)
        async with asking(app) as it:
            told = await it.pick(_body(PROMPT), path=COMPLETIONS, headers={SOURCE: "10.0.0.9:1"})
        address = engines.addresses[engines.urls.index(holder)]
        assert set_headers(told)[SOURCE] == address
        assert destinations(told)[0] != holder.removeprefix("http://")
        assert not told.request_body.response.HasField("body_mutation")


async def _held(app: RouterServer, prompts: Sequence[str]) -> str:
    """The replica that holds all of these in memory, by the router's word, and has much to do."""
    headers, _ = await _ask(app.url, prompts[0])
    holder = headers[HOME]
    for prompt in prompts:
        async with ClientSession() as client:
            async with client.post(holder + COMPLETIONS, json={"model": "sim", "prompt": prompt, "max_tokens": 2}):
                pass
    for prompt in prompts:
        await _told(app, holder, prompt)
    _full(app, holder)
    return holder


async def _shows_heads(app: RouterServer) -> None:
    """Have the gateway show the head of an answer."""
    async with asking(app) as it:
        await it.pick(_body("x"), path=COMPLETIONS)
        await it.answer()
        await it.hear()


def _body(prompt: str) -> bytes:
    return json.dumps({"model": "sim", "prompt": prompt, "max_tokens": 2, "stream": True}).encode()


async def test_a_stall_behind_a_gateway_rests_the_source() -> None:
    """A first piece that comes ends the watch; where none comes in time the source rests, and nobody is blamed. A
    gateway that shows no answers by itself is asked for that of a request that pulls."""
    async with _fleet(p2p__timeout_s=0.2, **GATEWAY) as (engines, app):
        prompts = [letter * 20_000 for letter in ("abcd", "bcde", "cdef")]
        holder = await _held(app, prompts)
        await _shows_heads(app)
        members, clock = app.router.fleet.members, asyncio.get_running_loop().time
        async with asking(app) as it:
            assert SOURCE in set_headers(await it.pick(_body(prompts[0]), path=COMPLETIONS))
            await it.answer()
            shown = await it.hear()
            assert shown is not None
            assert shown.mode_override.response_body_mode == STREAMED
            await it.piece(b'data: {"choices": [{"index": 0, "text": "a", "finish_reason": null}]}\n\n')
            await it.hear()
            assert holder in app.router.fleet.pulls.sources(clock())
            async with asking(app) as other:
                assert SOURCE in set_headers(await other.pick(_body(prompts[1]), path=COMPLETIONS))
                await other.answer()
                await until(lambda: holder not in app.router.fleet.pulls.sources(clock()))
            async with asking(app) as third:
                assert SOURCE not in set_headers(await third.pick(_body(prompts[2]), path=COMPLETIONS))
        assert [members[url].breaker.failures for url in engines.urls] == [0, 0]


async def test_a_gateway_that_shows_answers_late_has_nothing_pulled() -> None:
    """One that buffers answers would show the first piece with the last, so that nobody would see that a pull stalls.
    One that shows not even heads cannot be asked for more, and one that shows nothing, whatever it is asked, says
    nothing of a source by its silence."""
    async with _fleet(p2p__timeout_s=0.05, **GATEWAY) as (_, app):
        prompts = [f"{n:04}" * 20_000 for n in range(4)]
        holder = await _held(app, prompts)
        async with asking(app) as it:
            assert SOURCE not in set_headers(await it.pick(_body(prompts[0]), path=COMPLETIONS))
        await _shows_heads(app)
        async with asking(app, response="buffered") as it:
            assert SOURCE not in set_headers(await it.pick(_body(prompts[3]), path=COMPLETIONS))
        async with asking(app) as it:
            assert SOURCE in set_headers(await it.pick(_body(prompts[1]), path=COMPLETIONS))
            await it.answer()
            await it.hear()
            assert app.extproc._parts.asked == 1
            app.extproc._parts.asked = UNANSWERED_REQUESTS_MAX  # as after so many answers that were asked for in vain
            async with asking(app) as other:
                assert SOURCE not in set_headers(await other.pick(_body(prompts[2]), path=COMPLETIONS))
        assert holder in app.router.fleet.pulls.sources(asyncio.get_running_loop().time())


async def test_no_replica_is_told_to_pull_from_itself() -> None:
    """A gateway goes down its list with the order as it is, so the source is not on the list."""
    async with _fleet(**{**GATEWAY, "extproc__fallbacks_max": 2}) as (engines, app):
        headers, _ = await _ask(app.url, PROMPT)
        holder = headers[HOME]
        await _told(app, holder, PROMPT)
        other = next(url for url in engines.urls if url != holder)
        async with asking(app) as it:
            told = await it.pick(_body(PROMPT), path=COMPLETIONS)
        assert SOURCE not in set_headers(told)
        assert destinations(told) == [url.removeprefix("http://") for url in (holder, other)]
        _full(app, holder)
        await _shows_heads(app)
        async with asking(app) as it:
            told = await it.pick(_body(PROMPT), path=COMPLETIONS)
        assert SOURCE in set_headers(told)
        assert destinations(told) == [other.removeprefix("http://")]


async def test_a_tenants_order_is_taken_out(tmp_path: Path) -> None:
    """What a client with a key says in that field never reaches an engine, nor does the header of llm-d's sidecar."""
    ring = Keyring(tmp_path, one={})
    async with fakes.FakeEngine(owned_by="vllm") as engine, fakes.running(engine, **ring.settings) as app:
        mine = {"remote_kv_source": {"kv_request_id": "x", "remote_host": "10.0.0.9", "remote_port": 1}}
        body = {"model": "m", "messages": [], "kv_transfer_params": mine}
        headers = {**ring.of("one"), SOURCE: "10.0.0.9:1"}
        async with (
            ClientSession() as client,
            client.post(app.url + "/v1/chat/completions", json=body, headers=headers) as response,
        ):
            assert response.status == 200
        assert engine.seen[-1].json["kv_transfer_params"] is None
        assert "x-kv-cache-source-host-port" not in engine.seen[-1].headers


def test_the_routers_order_is_the_last_word() -> None:
    """Of two fields with one name parsers take the last."""
    body = with_pull(b'{"kv_transfer_params": {"a": 1}, "x": 2}', "10.0.0.1:5710", "id-1")
    source = {"kv_request_id": "id-1", "remote_host": "10.0.0.1", "remote_port": 5710}
    assert json.loads(body) == {"kv_transfer_params": {"remote_kv_source": source}, "x": 2}
    assert json.loads(with_pull(b"{}", "[fd00::1]:7", "i"))["kv_transfer_params"]["remote_kv_source"] == {
        "kv_request_id": "i",
        "remote_host": "fd00::1",
        "remote_port": 7,
    }


@pytest.mark.parametrize("greets", [b"\xff" + bytes(8) + b"\x7f", b"HTTP/1.1 400 Bad Request\r\n", b"", None])
async def test_an_address_is_proved_by_its_greeting(greets: bytes | None) -> None:
    """Somebody who greets as ZeroMQ does takes orders; not an HTTP server, nor one that closes, nor nobody."""

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greets or b"")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    if greets is None:
        server.close()
        await server.wait_closed()
    proved: list[tuple[str, str]] = []
    heard = asyncio.Event()

    def prove(replica: str, address: str) -> None:
        proved.append((replica, address))
        heard.set()

    address = f"127.0.0.1:{port}"
    prober = P2pProber(prove, P2pSettings(endpoints=("http://a=" + address,)))
    task = asyncio.create_task(prober.watch(Replica("http://a")))
    async with asyncio.timeout(60):
        await heard.wait()
    task.cancel()
    server.close()
    good = greets is not None and greets[:1] == b"\xff"
    assert proved[0] == ("http://a", address if good else "")
    assert await accepts_zmtp("127.0.0.1:notaport") is False


def test_where_orders_are_taken() -> None:
    """The settings' entry for an engine goes before discovery's word, and that before the port for all; the ports of
    its ranks are counted up from there, but for a rank's own entry."""
    prober = P2pProber(lambda *_: None, P2pSettings(port=5710, endpoints=("http://a:1=10.0.0.9:7",)))
    assert prober.address(Replica("http://a:1", peer="10.0.0.1:8")) == "10.0.0.9:7"
    assert prober.address(Replica("http://b:1", peer="10.0.0.1:8")) == "10.0.0.1:8"
    assert prober.address(Replica("http://a:1#dp2")) == "10.0.0.9:9"
    assert prober.address(Replica("http://b:1#dp2", peer="10.0.0.1:8")) == "10.0.0.1:10"
    ranked = P2pProber(lambda *_: None, P2pSettings(endpoints=("http://a:1#dp2=10.0.0.9:70", "http://a:1=10.0.0.9:7")))
    assert ranked.address(Replica("http://a:1#dp2")) == "10.0.0.9:70"
    assert prober.address(Replica("http://10.0.0.2:8000")) == "10.0.0.2:5710"
    assert prober.address(Replica("http://10.0.0.2:8000#dp3")) == "10.0.0.2:5713"
    assert prober.address(Replica("http://[fd00::1]:8000")) == "[fd00::1]:5710"
    assert P2pProber(lambda *_: None, P2pSettings()).address(Replica("http://10.0.0.2:8000")) == ""
