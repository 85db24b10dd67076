"""Requests that make a replica, joined late by the router, report its cached blocks of clients' prompts again. Opt-in.

An engine does not repeat the blocks that it stored before the router subscribed. vLLM (0.30 and later) repeats them for
one request with `kv_cache_report_mode: full` in its `vllm_xargs`: it reports every block that the prompt hit as stored
again. If an answer shows more cached tokens than the events did, a request with just those tokens is sent. It asks for
one token of answer, and at most one such request is sent every INTERVAL_S.

Every router of the engine receives these events. If one router sends such requests, all of them must know that a Stored
event can be a repetition and not a second copy (core/cache_state/engine_blocks.py). `events.request_full_reports` must
therefore be on in all of them, or in none.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from array import array
from collections import deque

import aiohttp

from router.core.placement.answer_feedback import UnreportedHit
from router.core.prompts.token_keys import ID_BYTES
from router.core.types.replicas import Replica
from router.engines import http_client

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
TIMEOUT_S = 30.0


class EventReplayTrigger:
    """Sends requests for repeated reports, one at a time."""

    def __init__(self, unreported: deque[UnreportedHit], *, api_key: str, tls: ssl.SSLContext | None = None) -> None:
        """`unreported`: hits for which a repeated report is needed, to which the Router adds."""
        self._unreported = unreported
        self._session = http_client.session(api_key, TIMEOUT_S, tls)

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def watch(self) -> None:
        """Send the requests that the Router wants, until cancelled."""
        while True:
            if self._unreported:
                await self.announce(self._unreported.pop())
            await asyncio.sleep(INTERVAL_S)

    async def announce(self, wanted: UnreportedHit) -> None:
        """Send one request. A failure is logged; its only effect is that the blocks stay unknown."""
        try:
            await self._request(wanted)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            fields = {"replica": wanted.replica, "why": http_client.describe_error(error)}
            log.warning(
                "request to a replica to publish its cached blocks failed",
                extra={"event": "announce_failed", "fields": fields},
            )

    async def _request(self, wanted: UnreportedHit) -> None:
        # One token more than is cached: the engine never takes the last token from its cache.
        ids = array("I", wanted.prompt.ids[: (wanted.cached_tokens + 1) * ID_BYTES]).tolist()
        body = {"model": wanted.model, "prompt": ids, "max_tokens": 1, "temperature": 0}
        body["vllm_xargs"] = {"kv_cache_report_mode": "full"}
        if wanted.prompt.salt:
            body["cache_salt"] = wanted.prompt.salt.decode(errors="surrogatepass")
        replica = Replica(wanted.replica)
        headers = {} if replica.rank is None else {"X-data-parallel-rank": str(replica.rank)}
        url = f"{replica.url}/v1/completions"
        async with self._session.post(url, json=body, headers=headers, allow_redirects=False) as response:
            await response.read()
            if response.status != 200:
                raise aiohttp.ClientError(f"status {response.status}")
