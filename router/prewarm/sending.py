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

from router.core.dialects import PATHS, BadBody, warming
from router.core.dialects.ranks import RANK_HEADER
from router.core.dialects.sglang import with_rank
from router.core.dialects.tenancy import GENERATE
from router.core.facts.placements import Ending, Outcome, Shed, Usage
from router.core.facts.replicas import Replica
from router.core.facts.requests import Ask
from router.core.fleet.lease import PREFILL, Lease
from router.core.fleet.models import NoReplica, UnknownModel
from router.core.placement.router import Router
from router.core.placement.wanted import Wanted
from router.core.prompts.blocks import Chain, chain_of
from router.engines import fetch
from router.prewarm.prefixes import Prefix

ANSWER_BYTES_MAX = 1 << 20
BYTES_PER_TOKEN = 4  # assumed for a body if its prompt cannot be read
CUTS_MAX = 8  # maximum of attempts to cut a learned template's request


class Books(Protocol):
    """Interface for counting leases outside of the Router (hub/admitter.py)."""

    def adopted(self, lease: Lease) -> None:
        """Count a lease that was opened without admission."""

    def window(self, replica: str) -> int | None:
        """Return the maximum of leases on the replica; None for no limit."""

    def finish(self, lease: Lease, outcome: Outcome, now_s: float) -> None:
        """Give a lease back, to the Router too."""


class Skipped(Exception):
    """Raised with the reason if the prompt was not sent."""


class SendFailed(Exception):
    """Raised if the request failed. `gone`: True if the replica did not answer, so that further prompts need not be
    tried."""

    def __init__(self, why: str, *, gone: bool = False) -> None:
        super().__init__(why)
        self.gone = gone


@dataclass(frozen=True, slots=True)
class _Read:
    """Request as it is sent, with its parsed prompt, model and chain for the Router."""

    body: bytes
    ask: Ask
    model: str
    chain: Chain | None


class PromptSender:
    """Sends prompts. The caller must send each replica one prompt at a time."""

    def __init__(
        self,
        router: Router,
        books: Books,
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
        self._session = fetch.session("", 0.0, tls)  # no time limit

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()

    def full(self, replica: str) -> bool:
        """True if the replica has its maximum of requests."""
        member, window = self._router.member(replica), self._books.window(replica)
        return member is not None and window is not None and member.open_leases >= window

    async def send(self, replica: str, prefix: Prefix, tokens_max: int) -> Usage:
        """Send a prompt. Returns the engine's token counts, or the Router's if the engine reports none. Raises Skipped
        and SendFailed."""
        try:
            default = self._router.models.resolve(None)
        except (NoReplica, UnknownModel):
            default = ""
        read = await asyncio.get_running_loop().run_in_executor(
            None, _read, prefix, default, self._router.models.names.known_as
        )
        member = self._router.member(replica)
        if member is None:
            raise SendFailed("it left", gone=True)
        if read.model not in member.models:
            raise Skipped(f"it does not serve '{read.model}'" if read.model else "the request names no model")
        if not self._router.takes_whole(member):
            raise Skipped("it takes no whole requests")
        if self._tokens(read) > tokens_max:
            raise Skipped("it would be more than the budget of tokens")
        if prefix.key and read.chain is not None:
            shared = read.chain.keys.index(prefix.key) + 1
            if self._router.index.depth(replica, read.chain.keys[:shared]) == shared:
                raise Skipped("it is held already")
        lease = self._lease(replica, read)
        outcome = Outcome(Ending.CLIENT_LEFT)  # the outcome if this task is cancelled
        try:
            outcome = Outcome(Ending.OK, await self._post(replica, prefix.path, read.body))
        except SendFailed as error:
            # An error answer may be the prompt's fault, so it does not count as a failure of the replica.
            outcome = Outcome(Ending.FAILED if error.gone else Ending.REFUSED_BY_ENGINE)
            raise
        finally:
            self._books.finish(lease, outcome, self._clock())
        return outcome.usage or Usage(lease.prompt_tokens, 1)

    def _tokens(self, read: _Read) -> int:
        prompt = read.ask.prompt
        if prompt is None:
            return len(read.body) // BYTES_PER_TOKEN
        return self._router.models.tokens(read.model).tokens_of(prompt)

    def _lease(self, replica: str, read: _Read) -> Lease:
        wanted = Wanted(read.ask, read.model, read.chain, "", body_tokens=len(read.body) // BYTES_PER_TOKEN)
        try:
            lease = self._router.route(wanted, self._clock(), only=replica)
        except (NoReplica, Shed) as error:
            raise SendFailed("nothing may be sent there now", gone=True) from error
        lease.role = PREFILL
        # No conversation continues this answer. The record of a client's answer to the prompt stays.
        lease.end_key = None
        self._books.adopted(lease)
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
                answer = await fetch.read(response, ANSWER_BYTES_MAX)
                if response.status != 200:
                    raise SendFailed(f"status {response.status}")
        except (aiohttp.ClientError, OSError) as error:
            raise SendFailed(fetch.words(error), gone=True) from error
        return PATHS[path].usage(answer)


def _read(prefix: Prefix, default: str, known_as: Callable[[str], str]) -> _Read:
    """Parse and hash a request; safe in any thread. A learned template's request is cut after the shared part, if
    possible. A request that does not begin with the template is not sent, because an isolated tenant's salt is in no
    body. Raises Skipped."""
    try:
        whole = warming.fields_of(prefix.body)
        cuts = warming.shorter(prefix.path, whole, prefix.messages - 1)[:CUTS_MAX] if prefix.key else []
        for fields in (*cuts, whole):
            body = warming.prefill_only(prefix.path, fields)
            read = _hashed(prefix.path, body, default, known_as)
            if not prefix.key or (read.chain is not None and prefix.key in read.chain.keys):
                return read
    except (warming.NotWarmable, BadBody) as error:
        raise Skipped(str(error)) from error
    raise Skipped("its request does not begin with what is shared")


def _hashed(path: str, body: bytes, default: str, known_as: Callable[[str], str]) -> _Read:
    ask = PATHS[path].parse(path, body, keep=False)
    model = ask.model or default
    chain = chain_of(ask, known_as(model)) if ask.prompt is not None else None
    if ask.prompt is not None:
        ask.prompt.let_go()
    return _Read(body, ask, model, chain)
