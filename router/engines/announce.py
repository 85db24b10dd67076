"""Have a replica that was joined late tell what it holds of prompts that are asked for. Opt-in.

An engine never repeats what it stored before we listened. vLLM (0.30 and later) does so for one request whose
`vllm_xargs` hold `kv_cache_report_mode: full`: it stores again, in words only, every block the prompt hit. So when an
answer shows more cached tokens than the events knew, a request of one token with just those tokens is sent, at most
one every INTERVAL_S. Every router of the engine hears the answer, so where any of them asks, all have to know that
stores may be repetitions and no second copies: `events.announce` is to be on in all of them, or in none (see
core/cache/engine_blocks.py).
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from array import array

import aiohttp

from router.core.facts.replicas import Replica
from router.core.placement.learner import Unannounced
from router.core.placement.router import Router
from router.core.prompts.token_keys import ID_BYTES
from router.engines import fetch

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
TIMEOUT_S = 30.0


class Announcer:
    """One request at a time."""

    def __init__(self, router: Router, *, api_key: str, tls: ssl.SSLContext | None = None) -> None:
        self._router = router
        self._session = fetch.session(api_key, TIMEOUT_S, tls)

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    async def watch(self) -> None:
        """Until cancelled."""
        while True:
            if self._router.unannounced:
                await self.announce(self._router.unannounced.pop())
            await asyncio.sleep(INTERVAL_S)

    async def announce(self, wanted: Unannounced) -> None:
        """Send one request; a failure costs nothing but the knowledge."""
        try:
            await self._request(wanted)
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            fields = {"replica": wanted.replica, "why": type(error).__name__}
            log.warning("replica was asked in vain to announce what it holds", extra={"fields": fields})

    async def _request(self, wanted: Unannounced) -> None:
        # One token more than is cached: the engine never takes the last one from its cache.
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
