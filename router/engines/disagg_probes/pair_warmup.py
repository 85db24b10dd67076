"""Warm-up of new pairs of a prefilling and a decoding replica with a test prompt, before they get requests.

The first transfer between two engines takes seconds, because they exchange connection data (vLLM's NIXL connector:
about 5 s). It also shows if they can reach each other at all, which no check from the router shows. A small request of
our own therefore passes through both replicas, in a prefill stage and a decode stage. The Router selects the next pair,
and sets a cooldown for one that fails.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import ssl
from collections.abc import Callable, Mapping, Sequence

import aiohttp

from router.core.dialects.rank_field import RANK_HEADER
from router.core.dialects.tenant_isolation import COMPLETIONS
from router.core.disagg.bodies import decode_body, kv_transfer_params, prefill_body
from router.core.disagg.prefill_hosts import ForeignHost, OwnHosts, check_transfer_params, hosts_of
from router.core.placement.router import Router
from router.core.types.disagg_types import KvConnector
from router.core.types.replicas import Replica
from router.engines import http_client

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
TIMEOUT_S = 45.0  # maximum time of both stages together
WORDS = 512  # words of the prompt, enough for a block of any size
ANSWER_BYTES_MAX = 1 << 20
ID_BITS = 63


class PairFailed(Exception):
    """The pair did not transfer the prompt's blocks."""


class PairWarmer:
    """Warms up the pairs that the Router selects. `addresses` are those of prefilling replicas (kv_connectors.py)."""

    def __init__(
        self,
        router: Router,
        connector: KvConnector,
        addresses: Mapping[str, str],
        *,
        api_key: Callable[[], str],
        clock: Callable[[], float],
        tls: ssl.SSLContext | None = None,
        hosts: Sequence[str] = (),
    ) -> None:
        """`hosts`: hosts that prefilling engines may name in addition to their own (`disagg.hosts`)."""
        self._router = router
        self._connector = connector
        self._addresses = addresses
        self._api_key = api_key
        self._hosts = OwnHosts(hosts)
        self._clock = clock
        self._session = http_client.session("", TIMEOUT_S, tls)
        self._tasks: set[asyncio.Task[None]] = set()

    async def close(self) -> None:
        """Stop all warm-ups, and close all connections."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._session.close()

    async def watch(self) -> None:
        """Warm up new pairs, until cancelled."""
        while True:
            for prefill, decode in self._router.disaggregator.pairs_to_warm(self._clock()):
                task = asyncio.create_task(self._warm(prefill, decode))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)
            await asyncio.sleep(INTERVAL_S)

    async def _warm(self, prefill: str, decode: str) -> None:
        why = ""
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await self._hand_over(prefill, decode)
        except PairFailed as error:
            why = str(error)
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
            why = http_client.describe_error(error)
        self._router.disaggregator.pair_warmed(prefill, decode, ok=not why, now_s=self._clock())
        fields = {"prefill": prefill, "decode": decode}
        if why:
            what = "KV transfer between a pair of replicas failed: the pair gets no disaggregated requests for now"
            log.warning(what, extra={"event": "disagg_pair_failed", "fields": {**fields, "why": why}})
        else:
            log.info("a pair of replicas gets disaggregated requests", extra={"event": "pair_warmed", "fields": fields})

    async def _hand_over(self, prefill: str, decode: str) -> None:
        """Prefill a new prompt on one replica, and decode it on the other. Raises PairFailed."""
        base = self._base(prefill, decode)
        traits = self._connector.traits
        id_ = str(secrets.randbits(ID_BITS)) if traits.integer_ids else secrets.token_hex(16)
        address, rank = self._addresses.get(prefill, ""), Replica(prefill).rank
        first = prefill_body(COMPLETIONS, base, self._connector, id_, address, rank)
        if not traits.concurrent:
            answer, peer = await self._answer(prefill, first)
            params = kv_transfer_params(self._connector, answer)
            if params is None:
                raise PairFailed("the prefill engine returned no blocks: check the configuration of its KV connector")
            try:
                params = check_transfer_params(params, hosts_of(prefill, address, peer), self._hosts)
            except ForeignHost as error:
                raise PairFailed(f"the prefill engine returned a foreign host: {error}") from None
            await self._post(decode, decode_body(base, self._connector, id_, address, rank, params))
            return
        second = decode_body(base, self._connector, id_, address, rank, b"")
        legs = [asyncio.ensure_future(self._post(*leg)) for leg in ((prefill, first), (decode, second))]
        try:
            await asyncio.gather(*legs)
        finally:  # if one stage fails, the other one would wait for minutes
            for leg in legs:
                leg.cancel()

    def _base(self, prefill: str, decode: str) -> bytes:
        members = self._router.fleet.member(prefill), self._router.fleet.member(decode)
        if members[0] is None or members[1] is None:
            raise PairFailed("one of the two replicas was removed")
        models = sorted(set(members[0].models) & set(members[1].models))
        if not models:
            raise PairFailed("they have no common model")
        prompt = f"{secrets.token_hex(8)} {'warm ' * WORDS}"
        return json.dumps({"model": models[0], "prompt": prompt, "max_tokens": 1, "temperature": 0}).encode()

    async def _post(self, replica: str, body: bytes) -> bytes:
        """Return the answer of one stage. Raises PairFailed."""
        return (await self._answer(replica, body))[0]

    async def _answer(self, replica: str, body: bytes) -> tuple[bytes, str]:
        """Return the answer of one stage, and the address of the server. Raises PairFailed."""
        there = Replica(replica)
        headers = {"Content-Type": "application/json"}
        if there.rank is not None:
            headers[RANK_HEADER] = str(there.rank)
        if key := self._api_key():
            headers["Authorization"] = f"Bearer {key}"
        url = there.url + COMPLETIONS
        async with self._session.post(url, data=body, headers=headers, allow_redirects=False) as response:
            connection = response.connection  # the connection returns to the pool after the whole answer is read
            there_is = connection.transport if connection is not None else None
            peer = there_is.get_extra_info("peername") if there_is is not None else None
            answer = await http_client.read_body(response, ANSWER_BYTES_MAX)
            if response.status != 200:
                raise PairFailed(f"{replica} answered with status {response.status}")
            return answer, str(peer[0]) if isinstance(peer, tuple) else ""
