"""What placing needs to know of one request."""

from __future__ import annotations

from msgspec import Struct

from router.core.facts.misses import Sighting
from router.core.facts.requests import Ask, Priority
from router.core.prompts.blocks import Chain
from router.core.prompts.token_keys import TokenPrompt


class Wanted(Struct, eq=False):  # see core/facts/requests.py
    """A request as far as placing needs it."""

    ask: Ask  # without what was decoded
    model: str | None
    chain: Chain | None
    ring_key: str
    tokens: TokenPrompt | None = None  # where they are known and tell something
    body_tokens: int = 0
    response_id: str | None = None  # belongs to the replica that made it
    tenant: str = ""  # who asks, where that is known
    priority: Priority = Priority.NORMAL
    body_bytes: int = 0
    queued_s: float = 0.0  # waited for a place so far; said by whoever placed it
    sighting: Sighting | None = None  # None without an observatory
