"""Two simulated engines and the legs between them, over HTTP, as a careless router would find them."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from aiohttp import ClientError, ClientSession

from loadtest.fake_engine.command import Engines, EngineSettings
from loadtest.fake_engine.peers import PeerLimits
from loadtest.fake_engine.prefill_export import LEASE_S
from router.core.disagg.bodies import decode_body, kv_transfer_params, prefill_body
from router.core.types.disagg_types import KvConnector

COMPLETIONS = "/v1/completions"
ASKED = {"model": "sim", "prompt": "abcd" * 400, "max_tokens": 3}
BODY = json.dumps(ASKED).encode()


def _engines(handshake: KvConnector) -> Engines:
    return Engines(
        EngineSettings(
            replicas=2, port=0, time_scale=20.0, handshake=handshake, prefills=1, peers=PeerLimits(1e-3, 1e-6)
        )
    )


def _address(engines: Engines) -> str:
    address = engines.addresses[0] if engines.addresses else ""
    return f"{address}#{engines.links[0].engine_id}"


def _bodies(engines: Engines, handshake: KvConnector, id_: str) -> tuple[bytes, bytes]:
    address = _address(engines) if handshake is KvConnector.MOONCAKE else _address(engines).partition("#")[0]
    return (
        prefill_body(COMPLETIONS, BODY, handshake, id_, address, None),
        decode_body(BODY, handshake, id_, address, None, b""),
    )


async def _post(url: str, body: bytes) -> tuple[int, bytes]:
    headers = {"Content-Type": "application/json"}
    async with ClientSession() as client, client.post(url + COMPLETIONS, data=body, headers=headers) as response:
        return response.status, await response.read()


@pytest.mark.parametrize("handshake", [KvConnector.MOONCAKE, KvConnector.OFFLOADING, KvConnector.SGLANG])
@pytest.mark.parametrize("first", [0, 1])
async def test_what_one_computes_the_other_does_not(handshake: KvConnector, first: int) -> None:
    """Whichever leg comes first, the prompt is computed once, and the answer is as that of one engine."""
    async with _engines(handshake) as engines:
        bodies = _bodies(engines, handshake, "17")
        asking = [asyncio.create_task(_post(engines.urls[first], bodies[first]))]
        await asyncio.sleep(0)
        asking.append(asyncio.create_task(_post(engines.urls[1 - first], bodies[1 - first])))
        told = {}
        for leg, task in zip((first, 1 - first), asking, strict=True):
            told[leg] = await task
        assert (told[0][0], told[1][0]) == (200, 200)
        assert len(json.loads(told[1][1])["choices"][0]["text"]) == 3 * 4
        counted = [replica.model.counters for replica in engines.replicas]
        computed = [each.prompt_tokens - each.prompt_cached_tokens for each in counted]
        assert computed[0] == 400
        assert computed[1] == 16  # the block of the last token, which no cache is asked for


async def test_nixls_blocks_are_fetched_once() -> None:
    """The object of the answer names them; a second decode leg with it fails, and so does one whose lease is over."""
    now_s = 1e6
    async with _engines(KvConnector.NIXL) as engines:
        for link in engines.links:
            link.clock, link.legs.limits = lambda: now_s, PeerLimits(0.0, 0.0)
        prefill = prefill_body(COMPLETIONS, BODY, KvConnector.NIXL, "", "", None)
        status, answer = await _post(engines.urls[0], prefill)
        params = kv_transfer_params(KvConnector.NIXL, answer)
        assert status == 200
        assert params is not None
        decode = decode_body(BODY, KvConnector.NIXL, "", "", None, params)
        assert [(await _post(engines.urls[1], decode))[0] for _ in range(2)] == [200, 500]
        _, answer = await _post(engines.urls[0], prefill)
        late = kv_transfer_params(KvConnector.NIXL, answer)
        assert late is not None
        now_s += LEASE_S[KvConnector.NIXL]
        assert (await _post(engines.urls[1], decode_body(BODY, KvConnector.NIXL, "", "", None, late)))[0] == 500


async def test_nixls_usage_says_what_the_prefill_found() -> None:
    """Nothing for a new prompt, and its cached part for a known one: what came besides is not called cached."""
    async with _engines(KvConnector.NIXL) as engines:
        prefill = prefill_body(COMPLETIONS, BODY, KvConnector.NIXL, "", "", None)
        told = []
        for _ in range(2):
            params = kv_transfer_params(KvConnector.NIXL, (await _post(engines.urls[0], prefill))[1])
            assert params is not None
            answer = (await _post(engines.urls[1], decode_body(BODY, KvConnector.NIXL, "", "", None, params)))[1]
            told.append(json.loads(answer)["usage"]["prompt_tokens_details"]["cached_tokens"])
        assert told == [0, 384]  # all blocks but that of the last token


async def test_a_room_in_use_ends_the_process() -> None:
    """As both schedulers of SGLang's crash."""
    async with _engines(KvConnector.SGLANG) as engines:
        prefill, _ = _bodies(engines, KvConnector.SGLANG, "17")
        waiting = asyncio.create_task(_post(engines.urls[0], prefill))
        async with asyncio.timeout(60):
            while "17" not in engines.links[0].legs:
                await asyncio.sleep(0.002)
        for asked in (_post(engines.urls[0], prefill), waiting):
            with pytest.raises(ClientError):
                await asked
        with pytest.raises(ClientError):
            await _post(engines.urls[0], prefill)


async def test_sglangs_servers_want_a_room() -> None:
    """A request without one is refused by both."""
    async with _engines(KvConnector.SGLANG) as engines:
        told: list[Any] = [await _post(url, BODY) for url in engines.urls]
        assert [status for status, _ in told] == [400, 400]
        assert all(b"without bootstrap room id" in body for _, body in told)
