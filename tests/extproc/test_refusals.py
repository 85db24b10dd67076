"""What the picker answers by itself: errors in the client's dialect, pages of ours, and what clients say in headers."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.core.fleet.lease import Lease
from router.core.placement.placement_request import PlacementRequest
from router.core.types.requests import Priority
from tests.extproc.asking import asking, chat, destinations, error_of, picking, set_headers
from tests.support.fakes import FakeEngine
from tests.support.keyring import Keyring
from tests.support.waiting import until


async def test_errors_are_in_the_clients_dialect(engine: FakeEngine) -> None:
    """OpenAI's and Anthropic's bodies, as JSON, with the reason in a header that llm-d's clients know."""
    async with picking(engine) as app:
        async with asking(app) as it:
            told = await it.pick(b"[")
            assert (error_of(told)[0], error_of(told)[1]["error"]["type"]) == (400, "invalid_request_error")
            assert set_headers(told)["content-type"] == "application/json"
        async with asking(app) as it:
            told = await it.pick(b'{"model": "none", "messages": []}')
            assert (error_of(told)[0], error_of(told)[1]["error"]["code"]) == (404, "model_not_found")
            assert set_headers(told)["x-llm-d-request-dropped-reason"] == "model_not_found"
        async with asking(app) as it:
            told = await it.pick(b'{"model": "none", "messages": []}', path="/v1/messages")
            assert (error_of(told)[0], error_of(told)[1]["type"]) == (404, "error")


async def test_paths_of_engines_own_are_refused(engine: FakeEngine) -> None:
    """A path that flushes caches reaches no engine, as at the proxy; in conformance all paths do."""
    async with picking(engine) as app, asking(app) as it:
        assert error_of(await it.pick(path="/reset_prefix_cache"))[0] == 404
    async with picking(engine, extproc__conformance=True) as app, asking(app) as it:
        await it.head("/anything", method="GET", end=True)
        told = await it.hear()
        assert told is not None
        assert len(destinations(told)) == 1


async def test_websockets_are_refused(engine: FakeEngine) -> None:
    """By name, as at the proxy."""
    async with picking(engine) as app, asking(app) as it:
        await it.head("/v1/realtime", method="GET", end=True, headers={"upgrade": "websocket"})
        told = await it.hear()
        assert told is not None
        assert (error_of(told)[0], error_of(told)[1]["error"]["code"]) == (501, "websocket_unsupported")


async def test_names_that_are_not_listed(engine: FakeEngine, other: FakeEngine) -> None:
    """`base:adapter` and an adapter that was just loaded go where the adapter is; without a name two fleets are 400."""
    rows = [{"id": "m", "owned_by": "sglang"}, {"id": "ad", "owned_by": "sglang", "parent": "m"}]
    engine.rows, other.rows = rows[:1], rows
    async with picking(engine, other, probe__models_interval_s=3600.0) as app:
        for model in ("m:ad", "ad"):
            async with asking(app) as it:
                assert destinations(await it.pick(chat(model=model))) == [f"127.0.0.1:{other.port}"]
        other.rows = [*rows, {"id": "new", "owned_by": "sglang", "parent": "m"}]
        async with asking(app) as it:
            assert destinations(await it.pick(chat(model="new"), path="/v1/chat/completions/"))
    other.rows = [{"id": "n"}]
    async with picking(engine, other) as app, asking(app) as it:
        assert error_of(await it.pick(b'{"prompt": "x"}', path="/tokenize"))[0] == 400


async def test_a_model_that_was_not_found(engine: FakeEngine) -> None:
    """A 404 has the replica's list read again: the answer's body, which would say why, may go past us."""
    async with picking(engine, probe__interval_s=3600.0, probe__models_interval_s=3600.0) as app:
        before = engine.probes["models"]
        async with asking(app) as it:
            await it.pick()
            await it.answer(404, content_type="application/json")
            await it.hear()
            await it.finish()
        await until(lambda: engine.probes["models"] > before)


async def test_conformance_lets_clients_choose(engine: FakeEngine, other: FakeEngine) -> None:
    """The upstream suite's header names who may take a request, and is told who did; otherwise it means nothing."""
    wanted = f"127.0.0.1:{other.port}"
    headers = {"test-epp-endpoint-selection": wanted}
    async with picking(engine, other, extproc__conformance=True) as app, asking(app) as it:
        assert destinations(await it.pick(headers=headers)) == [wanted]
        await it.answer(served=wanted)
        told = await it.hear()
        assert told is not None
        assert set_headers(told)["x-conformance-test-served-endpoint"] == wanted
    async with picking(engine, other) as app, asking(app) as it:
        assert len(destinations(await it.pick(headers=headers))) == 2


async def test_models_are_listed(engine: FakeEngine) -> None:
    """`/v1/models` is the router's own page, whatever replica a gateway would choose."""
    async with picking(engine) as app, asking(app) as it:
        await it.head("/v1/models", method="GET", end=True)
        told = await it.hear()
        assert told is not None
        status, body = error_of(told)
        assert (status, [row["id"] for row in body["data"]]) == (200, ["m"])


async def test_keys_are_asked_for_before_bodies(engine: FakeEngine, tmp_path: Path) -> None:
    """Without a key the head is refused; a tenant's key is not passed on, and its models are all it may use."""
    ring = Keyring(tmp_path, acme={"models": ["m"]}, zeta={"models": ["x"]})
    async with picking(engine, **ring.settings) as app:
        async with asking(app) as it:
            told = await it.pick()
            assert (error_of(told)[0], set_headers(told)["www-authenticate"]) == (401, "Bearer")
        async with asking(app) as it:
            told = await it.pick(headers={"authorization": f"Bearer {ring.keys['acme']}"})
            assert len(destinations(told)) == 1
            assert "authorization" in told.request_body.response.header_mutation.remove_headers
        async with asking(app) as it:
            told = await it.pick(headers={"authorization": f"Bearer {ring.keys['zeta']}"})
            assert (error_of(told)[0], error_of(told)[1]["error"]["code"]) == (403, "model_not_allowed")
        async with asking(app, "none") as it:
            await it.head(headers={"authorization": f"Bearer {ring.keys['acme']}"})
            told_unread = await it.hear()
            assert told_unread is not None
            assert error_of(told_unread)[1]["error"]["code"] == "body_needed"


async def test_an_isolated_tenants_body_is_salted(engine: FakeEngine, tmp_path: Path) -> None:
    """The salt is spliced into the body that the engine gets, in each mode."""
    engine.owned_by = "vllm"
    ring = Keyring(tmp_path, acme={})
    headers = {"authorization": f"Bearer {ring.keys['acme']}"}
    async with picking(engine, **ring.settings, auth__isolate=True) as app:
        async with asking(app) as it:
            told = await it.pick(headers=headers)
            assert b'"cache_salt":"' in told.request_body.response.body_mutation.body
        async with asking(app, "duplex", "duplex") as it:
            await it.head(headers=headers)
            await it.body(chat())
            await it.hear()
            piece = await it.hear()
            assert piece is not None
            assert b'"cache_salt":"' in piece.request_body.response.body_mutation.streamed_response.body


async def test_rates_hold(engine: FakeEngine, tmp_path: Path) -> None:
    """A tenant over its rate is 429, with the seconds to wait, as soon as the head has come and before any of the body,
    whether the gateway buffers that or sends it in pieces. A request is taken from the rate once, and one that is
    refused by its head is taken from no rate."""
    ring = Keyring(tmp_path, acme={"requests_per_min": 2})
    headers = {"authorization": f"Bearer {ring.keys['acme']}"}
    async with picking(engine, **ring.settings, limits__body_bytes_max=10_000) as app:
        async with asking(app) as it:
            told = await it.pick(headers=headers | {"content-length": "10001"})
            assert error_of(told)[0] == 413
        for request in ("buffered", "duplex"):
            async with asking(app, request) as it:
                await it.head(headers=headers)
                if request == "buffered":
                    assert (await it.hear()).HasField("request_headers")  # type: ignore[union-attr]  # an answer
                await it.body(chat())
                assert len(destinations(await it.hear())) == 1  # type: ignore[arg-type]  # likewise
        for request in ("buffered", "duplex"):
            async with asking(app, request) as it:
                await it.head(headers=headers)
                over = await it.hear()
                assert over is not None
                assert (error_of(over)[0], error_of(over)[1]["error"]["code"]) == (429, "rate_limited")
                assert int(set_headers(over)["retry-after"]) >= 1


@pytest.mark.inside  # it looks at what is asked of the placer
@pytest.mark.parametrize("names", [0, 1])
async def test_headers_of_llm_d(engine: FakeEngine, names: int) -> None:
    """Objective, fairness id and model mean what they mean there, by the present names and the old ones; ours go
    before."""
    present = names == 0
    objective = "x-llm-d-inference-objective" if present else "x-gateway-inference-objective"
    fairness = "x-llm-d-inference-fairness-id" if present else "x-gateway-inference-fairness-id"
    model = "x-llm-d-model-name-rewrite" if present else "x-gateway-model-name-rewrite"
    async with picking(engine, extproc__objectives=("batch=low",)) as app:
        seen, place = list[PlacementRequest](), app.control.placer.place

        async def spy(wanted: PlacementRequest, exclude: frozenset[str]) -> Lease:
            seen.append(wanted)
            return await place(wanted, exclude)

        app.control.placer.place = spy  # type: ignore[method-assign]
        for headers in (
            {objective: "batch", fairness: "team-a", model: "m"},
            {objective: "unheard-of", fairness: "no name at all!"},
            {objective: "batch", fairness: "team-a", "x-warmroute-priority": "high", "x-warmroute-tenant": "acme"},
        ):
            async with asking(app) as it:
                told = await it.pick(
                    chat() if model not in headers else chat().replace(b'"m"', b'"y"'), headers=headers
                )
                assert len(destinations(told)) == 1
                if model in headers:
                    assert told.request_body.response.body_mutation.body.endswith(b',"model":"m"}')
                await it.finish()
        assert [wanted.priority for wanted in seen] == [Priority.LOW, Priority.NORMAL, Priority.HIGH]
        assert [wanted.tenant for wanted in seen][::2] == ["team-a", "acme"]
        assert len(seen[1].tenant) == 16


@pytest.mark.parametrize("name", ["x-llm-d-slo-ttft-ms", "x-slo-ttft-ms"])
async def test_a_promise_that_cannot_be_kept(engine: FakeEngine, name: str) -> None:
    """Of low priority, a request whose first token is wanted sooner than it can come is 429, and holds no lease; of any
    other priority it is placed, and 400 where the header makes no sense."""
    long, low = chat("word " * 20_000), {"x-warmroute-priority": "low"}
    async with picking(engine) as app:
        async with asking(app) as it:
            told = await it.pick(long, headers={name: "0.001", **low})
            assert (error_of(told)[0], error_of(told)[1]["error"]["code"]) == (429, "slo_unreachable")
        await until(lambda: not any(member.leases for member in app.router.members))
        for headers in ({name: "0.001"}, {name: "3.6e6", **low}):
            async with asking(app) as it:
                assert len(destinations(await it.pick(long, headers=headers))) == 1
        for said in ("soon", "-1", "1e9", "nan", ""):
            async with asking(app) as it:
                told = await it.pick(long, headers={name: said})
                assert (error_of(told)[0], error_of(told)[1]["error"]["code"]) == (400, "bad_ttft")


async def test_limits_of_bodies(engine: FakeEngine) -> None:
    """A body that is too long is refused by its head, or as soon as it is; and nothing of it stays."""
    async with picking(engine, limits__body_bytes_max=100_000) as app:
        async with asking(app) as it:
            told = await it.pick(headers={"content-length": "100001"})
            assert error_of(told)[1]["error"]["code"] == "body_too_large"
        async with asking(app, "duplex") as it:
            await it.head()
            await it.body(b"x" * 60_000, end=False)
            await it.body(b"x" * 60_000, end=False)
            refused = await it.hear()
            assert refused is not None
            assert error_of(refused)[0] == 413
        await until(lambda: not app.extproc.in_flight)
        assert app.extproc.counters()["bodies_bytes"] == 0


async def test_a_slow_body_is_given_up(engine: FakeEngine) -> None:
    """One that does not come within `listen.body_timeout_s` is 408."""
    async with picking(engine, listen__body_timeout_s=0.05) as app, asking(app, "duplex") as it:
        await it.head()
        await it.body(b"{", end=False)
        told = await it.hear()
        assert told is not None
        assert (error_of(told)[0], error_of(told)[1]["error"]["code"]) == (408, "request_timeout")


async def test_a_stream_without_an_end_is_let_go(engine: FakeEngine) -> None:
    """After `extproc.stream_s_max` its lease is given back and the picker ends it, whatever the gateway does."""
    async with picking(engine, extproc__stream_s_max=0.05) as app, asking(app) as it:
        assert len(destinations(await it.pick())) == 1
        assert await it.hear() is None
        await until(lambda: not app.extproc.in_flight)
        assert not any(member.leases for member in app.router.members)


async def test_no_more_streams_than_may_be(engine: FakeEngine) -> None:
    """Beyond `extproc.streams_max` a request is told to come again."""
    async with picking(engine, extproc__streams_max=2) as app:
        async with asking(app) as one, asking(app) as two:
            await one.pick()
            await two.pick()
            async with asking(app) as three:
                told = await three.pick()
                assert (error_of(told)[0], error_of(told)[1]["error"]["code"]) == (503, "too_many_streams")
        await until(lambda: not app.extproc.in_flight)


async def test_who_waits_may_leave(engine: FakeEngine) -> None:
    """A request that waits for a place, and whose client leaves, gives its turn up at once."""
    async with picking(engine, admission__in_flight_max=1) as app:
        async with asking(app) as one:
            await one.pick()
            async with asking(app) as two:
                await two.head()
                await two.hear()
                await two.body(chat("y"))
                await until(lambda: sum(app.control.admission.count_queued()[0].values()) == 1)
                two.leave()
                await until(lambda: sum(app.control.admission.count_queued()[0].values()) == 0)
            async with asking(app) as three:
                await three.head()
                await three.hear()
                await three.body(chat("z"))
                await until(lambda: sum(app.control.admission.count_queued()[0].values()) == 1)
                await one.finish()
                told = await three.hear()
                assert told is not None
                assert len(destinations(told)) == 1
