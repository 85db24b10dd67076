"""Placement input of one request."""

from __future__ import annotations

from msgspec import Struct

from router.core.facts.misses import Sighting
from router.core.facts.requests import Ask, Kin, Priority
from router.core.prompts.blocks import Chain
from router.core.prompts.token_keys import TokenPrompt


class Wanted(Struct, eq=False):  # a Struct for speed: core/facts/requests.py
    """The parts of a request that placement reads."""

    ask: Ask  # the parsed request without the decoded body
    model: str | None
    chain: Chain | None
    ring_key: str
    tokens: TokenPrompt | None = None  # token ids of the prompt; None if they are unknown or useless
    body_tokens: int = 0
    response_id: str | None = None  # id of a stored response, which only the replica that created it can continue
    tenant: str = ""  # tenant of the client; "" if unknown
    priority: Priority = Priority.NORMAL
    body_bytes: int = 0
    queued_s: float = 0.0  # seconds in the admission queue; set by the caller of the Router
    sighting: Sighting | None = None  # None without an observatory
    among: frozenset[str] | None = (
        None  # addresses of the only replicas that may take the request (facts/replicas.py); None: all
    )
    unseen: bool = False  # the answer reaches the client without passing this router
    kin: Kin | None = None  # conversation that the client names; None if it names none
    due_s: float | None = None  # deadline of the first token, on time.monotonic(); None: no deadline
    may_pull: bool = True  # True if the engine may be instructed to fetch blocks of the prompt from another replica
    may_split: bool = False  # True if the prompt may be prefilled by one replica and decoded by another
    charged: bool = False  # the request was charged to its tenant's rate before its body was read
