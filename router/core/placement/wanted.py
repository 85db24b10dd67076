"""What placing needs to know of one request."""

from __future__ import annotations

from msgspec import Struct

from router.core.facts.misses import Sighting
from router.core.facts.requests import Ask, Kin, Priority
from router.core.prompts.blocks import Chain
from router.core.prompts.token_keys import TokenPrompt


class Wanted(Struct, eq=False):  # a Struct for speed: core/facts/requests.py
    """A request as far as placing needs it."""

    ask: Ask  # the parsed request, without the decoded body
    model: str | None
    chain: Chain | None
    ring_key: str
    tokens: TokenPrompt | None = None  # the prompt's token ids; None where they are not known or tell nothing
    body_tokens: int = 0
    response_id: str | None = None  # a stored response, which one replica made and can continue
    tenant: str = ""  # the client's tenant; "" where none is known
    priority: Priority = Priority.NORMAL
    body_bytes: int = 0
    queued_s: float = 0.0  # seconds that the request waited for a place; set by whoever placed it
    sighting: Sighting | None = None  # None without an observatory
    among: frozenset[str] | None = (
        None  # addresses of the only replicas that may take it (facts/replicas.py); None: all
    )
    unseen: bool = False  # its answer goes to the client without coming by here
    kin: Kin | None = None  # the conversation that its client names; None where it names none
    due_s: float | None = None  # time by which its first token is wanted, on time.monotonic(); None: any time
    may_pull: bool = True  # whether the engine may be told to bring blocks of the prompt from another replica
    may_split: bool = False  # whether one replica may prefill it and another one decode it
    charged: bool = False  # the request was taken from its tenant's rate before its body was read
