"""Requests of a workload, prepared once for all rows that run it.

Text is generated from the trace's block ids. It is hashed exactly as by the router (512-byte blocks of canonical bytes)
and by the engine (its own blocks of token ids), and then dropped. One token is four bytes, as in `loadtest engine`.
Keys are kept in arrays, of eight bytes each.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import fmean

from loadtest.common.runs import shared_blocks
from loadtest.common.traces import BYTES_PER_TOKEN, Request
from router.core.prompts import block_keys
from router.core.types.requests import ConversationRef

MODEL = "sim"


@cache
def _root(model: str) -> int:
    """Return the root key of the router's chains. A test compares it, and all hashes made here, with the router's."""
    return block_keys.root_key(model.encode(), b"", b"text")


@dataclass(slots=True, eq=False)
class SimRequest:
    """One request. Times in simulated seconds, lengths in tokens."""

    number: int
    """The number of this turn in its workload, from 0."""
    session: str
    at_s: float
    """Arrival in seconds from the start (open loop)."""
    think_s: float
    """Wait after the session's previous answer (closed loop)."""
    prompt_tokens: int
    output_tokens: int
    request: Request
    """Source of the text, for rules that read it."""
    first_user_bytes: int
    """The offset at which the first message ends."""
    chain: array[int]
    """The router's keys of the prompt's blocks."""
    chain_root: int
    end_key: int
    first_user_key: int
    engine_keys: array[int]
    """Keys of the prompt's full blocks, in the engine's block size."""
    kin: ConversationRef | None = None
    """The conversation as the agent's client names it; None if the trace has no agents."""
    model: str = MODEL

    def text(self) -> str:
        """Return the prompt, four ASCII bytes a token."""
        return self.request.text()


@dataclass(frozen=True, slots=True)
class Workload:
    """The requests and their schedule. If `open`, turns are sent when they are due. Otherwise `active` sessions at a
    time wait for their answers, until `requests_max` requests were sent."""

    name: str
    sessions: tuple[tuple[SimRequest, ...], ...] = field(repr=False)
    open: bool
    block_tokens: int
    active: int = 0
    ramp_s: float = 0.0
    """Closed loop: the first sessions start at random within this time."""
    think_max_s: float = 60.0
    requests_max: int = 1_000_000
    warm_up: int = 0
    """Number of first requests that are sent and not counted."""
    answer_tokens_max: int = 0
    """Length of the longest answer of the whole trace, if this is a part of it; 0: this is all of it."""

    @property
    def request_count(self) -> int:
        """Requests of all sessions, at most `requests_max`."""
        return min(self.requests_max, sum(map(len, self.sessions)))

    @property
    def longest_answer_tokens(self) -> int:
        """Tokens of the longest answer of all sessions, those that were left out included."""
        return self.answer_tokens_max or max(turn.output_tokens for session in self.sessions for turn in session)

    @property
    def mean_prompt_tokens(self) -> float:
        """Mean prompt tokens of the turns of all sessions."""
        return fmean(turn.prompt_tokens for session in self.sessions for turn in session)


def prepare(
    requests: Iterable[tuple[str, Request]],
    block_tokens: int,
    *,
    output_tokens_max: int,
    model_of: Callable[[Request], str] = lambda _: MODEL,
) -> list[SimRequest]:
    """Return the turns of (session, request) pairs, in their order. Requests for two models have no text in common."""
    last: dict[tuple[str, int], SimRequest] = {}
    turns = []
    for number, (session, request) in enumerate(requests):
        kind = (request.namespace, request.block_tokens)
        root = _root(model := model_of(request))
        hashed = _Hashed(request, last.get(kind), block_tokens, root)
        turn = SimRequest(
            number,
            session,
            request.at_s,
            request.think_s,
            request.input_tokens,
            max(1, min(request.output_tokens, output_tokens_max)),
            request,
            hashed.first,
            hashed.chain,
            root,
            hashed.key_at(request.input_tokens * BYTES_PER_TOKEN),
            hashed.key_at(hashed.first),
            hashed.engine_keys,
            kin=_kin(session, request.agent),
            model=model,
        )
        last[kind] = turn
        turns.append(turn)
    return turns


def _kin(session: str, agent: str | None) -> ConversationRef | None:
    """Return the identity as Claude Code sends it. A sub-agent is named by its session and itself, and the session is
    its parent."""
    if agent is None:
        return None
    name = block_keys.root_key(session.encode())
    return (
        ConversationRef(block_keys.root_key(session.encode(), agent.encode()), name) if agent else ConversationRef(name)
    )


class _Hashed:
    """Keys of a prompt. The common part with the turn before it (in a conversation nearly all) is not hashed again."""

    def __init__(self, request: Request, before: SimRequest | None, block_tokens: int, chain_root: int) -> None:
        size, width = request.input_tokens * BYTES_PER_TOKEN, block_tokens * BYTES_PER_TOKEN
        self._root = chain_root
        self.first = request.cuts[0] * BYTES_PER_TOKEN if request.cuts else size
        self.chain, self.engine_keys, shared = array("Q"), array("Q"), 0
        if before is not None:
            tokens = shared_blocks(before.request.runs, request.runs) * request.block_tokens
            shared = min(size, before.prompt_tokens * BYTES_PER_TOKEN, tokens * BYTES_PER_TOKEN)
            self.chain = before.chain[: shared // block_keys.BLOCK_BYTES]
            self.engine_keys = before.engine_keys[: shared // width]
        known = min(len(self.chain) * block_keys.BLOCK_BYTES, len(self.engine_keys) * width)
        same_first = before is not None and before.first_user_bytes == self.first <= shared
        self._points = {self.first: before.first_user_key} if before is not None and same_first else {}
        if not same_first:
            known = min(known, self.first // block_keys.BLOCK_BYTES * block_keys.BLOCK_BYTES)
        skipped = known // (request.block_tokens * BYTES_PER_TOKEN)
        self._at = skipped * request.block_tokens * BYTES_PER_TOKEN
        self._text = request.text(skipped).encode()
        rest = self._text[len(self.chain) * block_keys.BLOCK_BYTES - self._at :]
        self.chain.extend(block_keys.chain(rest, self.chain[-1] if self.chain else chain_root))
        rest = self._text[len(self.engine_keys) * width - self._at :]
        root = self.engine_keys[-1] if self.engine_keys else block_keys.token_root("", b"", block_tokens)
        self.engine_keys.extend(block_keys.token_chain(rest, block_tokens, root))

    def key_at(self, end: int) -> int:
        """Return the router's key of the first `end` bytes of the prompt."""
        if end in self._points:
            return self._points[end]
        full = end // block_keys.BLOCK_BYTES
        parent = self.chain[full - 1] if full else self._root
        rest = self._text[full * block_keys.BLOCK_BYTES - self._at : end - self._at]
        return block_keys.key_at(rest, (), parent, len(rest))


def open_workload(name: str, turns: Sequence[SimRequest], block_tokens: int, **more: int) -> Workload:
    """Return a workload of turns that come when they are due."""
    return Workload(name, tuple((turn,) for turn in turns), True, block_tokens, **more)
