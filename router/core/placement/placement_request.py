"""Placement input of one request."""

from __future__ import annotations

from msgspec import Struct

from router.core.prompts.block_keys import Chain
from router.core.prompts.token_keys import TokenPrompt
from router.core.types.cache_misses import PromptAnalysis
from router.core.types.requests import ConversationRef, Priority, RequestSpec


class PlacementRequest(Struct, eq=False):  # a Struct for speed: core/types/requests.py
    """The parts of a request that placement reads."""

    ask: RequestSpec  # the parsed request without the decoded body
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
    sighting: PromptAnalysis | None = None  # None without an observatory
    allowed_addresses: frozenset[str] | None = (
        None  # addresses of the only replicas that may take the request (types/replicas.py); None: all
    )
    response_bypasses_router: bool = False  # the answer reaches the client without passing this router
    conversation: ConversationRef | None = None  # conversation that the client names; None if it names none
    due_s: float | None = None  # deadline of the first token, on time.monotonic(); None: no deadline
    may_pull: bool = True  # True if the engine may be instructed to fetch blocks of the prompt from another replica
    may_split: bool = False  # True if the prompt may be prefilled by one replica and decoded by another
    charged: bool = False  # the request was charged to its tenant's rate before its body was read

    def require_one_replica(self) -> None:
        """Exclude placements that need blocks of another replica."""
        self.may_pull = self.may_split = False
