"""Sends one prompt to one replica, and counts it in the Router.

A warmed replica counts as holding the prompt just as after a client's request, because the lease has the same chain.
Bodies are parsed and hashed in a thread, because a prompt may have megabytes.
"""

from __future__ import annotations

import asyncio
import io
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import aiohttp

from router.core.dialects import PATHS, InvalidBody, prefill_only
from router.core.dialects.rank_field import RANK_HEADER
from router.core.dialects.sglang import with_rank
from router.core.dialects.tenant_isolation import GENERATE
from router.core.fleet.lease import PREFILL, Lease
from router.core.fleet.models import NoReplicaReady, UnknownModel
from router.core.placement.placement_request import PlacementRequest
from router.core.placement.router import Router
from router.core.prompts.block_keys import Chain, chain_of
from router.core.types.placements import EndReason, Outcome, Shed, Usage
from router.core.types.replicas import Replica
from router.core.types.requests import RequestSpec
from router.engines import http_client
from router.prewarm.prefixes import WarmupPrompt

ANSWER_BYTES_MAX = 1 << 20
BYTES_PER_TOKEN = 4  # assumed for a body if its prompt cannot be read
CUTS_MAX = 8  # maximum of attempts to cut a learned template's request


class LeaseAccounting(Protocol):
    """Interface for counting leases outside of the Router (control/admission_controller.py)."""

    def register_external_lease(self, lease: Lease) -> None:
        """Count a lease that was opened without admission."""

    def window(self, replica: str) -> int | None:
        """Return the maximum of leases on the replica; None for no limit."""

    def finish(self, lease: Lease, outcome: Outcome, now_s: float) -> None:
        """Give a lease back, to the Router too."""


class WarmupSkipped(Exception):
    """Raised with the reason if the prompt was not sent."""


class SendFailed(Exception):
    """Raised if the request failed. `gone`: True if the replica did not answer, so that further prompts need not be
    tried."""

    def __init__(self, why: str, *, gone: bool = False) -> None:
        super().__init__(why)
        self.gone = gone


@dataclass(frozen=True, slots=True)
class _WarmupUsage:
    """Request as it is sent, with its parsed prompt, model and chain for the Router."""

    body: bytes
    ask: RequestSpec
    model: str
    chain: Chain | None


class PromptSender:
    """Sends prompts. The caller must send each replica one prompt at a time."""

    def __init__(
        self,
        router: Router,
        books: LeaseAccounting,
        *,
        clock: Callable[[], float],
        api_key: Callable[[], str],
        tls: ssl.SSLContext | None,
    ) -> None:
        """`api_key()`: the current key for replicas, "" for none. The caller limits the duration of an answer."""
        self._router = router
        self._books = books
        self._clock = clock
        self._api_key = api_key
        self._session = http_client.session("", 0.0, tls)  # no time limit

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    def is_at_capacity(self, replica: str) -> bool:
        """True if the replica has its maximum of requests."""
        member, window = self._router.fleet.member(replica), self._books.window(replica)
        return member is not None and window is not None and member.open_leases >= window

    async def send(self, replica: str, prefix: WarmupPrompt, tokens_max: int) -> Usage:
        """Send a prompt. Returns the engine's token counts, or the Router's if the engine reports none. Raises
        WarmupSkipped and SendFailed."""
        try:
            default = self._router.models.resolve(None)
        except (NoReplicaReady, UnknownModel):
            default = ""
        read = await asyncio.get_running_loop().run_in_executor(
            None, _read, prefix, default, self._router.models.names.cache_identity
        )
        member = self._router.fleet.member(replica)
        if member is None:
            raise SendFailed("it left", gone=True)
        if read.model not in member.models:
            raise WarmupSkipped(f"it does not serve '{read.model}'" if read.model else "the request names no model")
        if not self._router.takes_whole(member):
            raise WarmupSkipped("it accepts only disaggregated requests")
        if self._tokens(read) > tokens_max:
            raise WarmupSkipped("it would exceed the token budget")
        if prefix.key and read.chain is not None:
            shared = read.chain.keys.index(prefix.key) + 1
            if self._router.index.depth(replica, read.chain.keys[:shared]) == shared:
                raise WarmupSkipped("it is cached already")
        lease = self._lease(replica, read)
        outcome = Outcome(EndReason.CLIENT_LEFT)  # the outcome if this task is cancelled
        try:
            outcome = Outcome(EndReason.OK, await self._post(replica, prefix.path, read.body))
        except SendFailed as error:
            # An error answer may be the prompt's fault, so it does not count as a failure of the replica.
            outcome = Outcome(EndReason.FAILED if error.gone else EndReason.REFUSED_BY_ENGINE)
            raise
        finally:
            self._books.finish(lease, outcome, self._clock())
        return outcome.usage or Usage(lease.prompt_tokens, 1)

    def _tokens(self, read: _WarmupUsage) -> int:
        prompt = read.ask.prompt
        if prompt is None:
            return len(read.body) // BYTES_PER_TOKEN
        return self._router.models.tokens(read.model).tokens_of(prompt)

    def _lease(self, replica: str, read: _WarmupUsage) -> Lease:
        wanted = PlacementRequest(read.ask, read.model, read.chain, "", body_tokens=len(read.body) // BYTES_PER_TOKEN)
        try:
            lease = self._router.route(wanted, self._clock(), only=replica)
        except (NoReplicaReady, Shed) as error:
            raise SendFailed("the replica accepts no requests now", gone=True) from error
        lease.role = PREFILL
        # No conversation continues this answer. The record of a client's answer to the prompt stays.
        lease.prompt.end_key = None
        self._books.register_external_lease(lease)
        return lease

    async def _post(self, id_: str, path: str, body: bytes) -> Usage | None:
        replica, headers, key = Replica(id_), {"Content-Type": "application/json"}, self._api_key()
        if key:
            headers["Authorization"] = f"Bearer {key}"
        if replica.rank is not None:
            headers[RANK_HEADER] = str(replica.rank)
            body = with_rank(body, replica.rank) if path == GENERATE else body
        try:
            async with self._session.post(
                replica.url + path, data=io.BytesIO(body), headers=headers, allow_redirects=False
            ) as response:
                answer = await http_client.read_body(response, ANSWER_BYTES_MAX)
                if response.status != 200:
                    raise SendFailed(f"status {response.status}")
        except (aiohttp.ClientError, OSError) as error:
            raise SendFailed(http_client.describe_error(error), gone=True) from error
        return PATHS[path].usage(answer)


def _read(prefix: WarmupPrompt, default: str, known_as: Callable[[str], str]) -> _WarmupUsage:
    """Parse and hash a request; safe in any thread. A learned template's request is cut after the shared part, if
    possible. A request that does not begin with the template is not sent, because an isolated tenant's salt is in no
    body. Raises WarmupSkipped."""
    try:
        whole = prefill_only.fields_of(prefix.body)
        cuts = prefill_only.shorter(prefix.path, whole, prefix.messages - 1)[:CUTS_MAX] if prefix.key else []
        for fields in (*cuts, whole):
            body = prefill_only.prefill_only(prefix.path, fields)
            read = _parse_and_hash(prefix.path, body, default, known_as)
            if not prefix.key or (read.chain is not None and prefix.key in read.chain.keys):
                return read
    except (prefill_only.NotWarmable, InvalidBody) as error:
        raise WarmupSkipped(str(error)) from error
    raise WarmupSkipped("its request does not begin with the shared prefix")


def _parse_and_hash(path: str, body: bytes, default: str, known_as: Callable[[str], str]) -> _WarmupUsage:
    ask = PATHS[path].parse(path, body, keep=False)
    model = ask.model or default
    chain = chain_of(ask, known_as(model)) if ask.prompt is not None else None
    if ask.prompt is not None:
        ask.prompt.release()
    return _WarmupUsage(body, ask, model, chain)
