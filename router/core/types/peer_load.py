"""A router's open work at a replica, as it reports it. The values are untrusted."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=0, le=1 << 53)]
Whole = Annotated[int, Meta(ge=-(1 << 53), le=1 << 53)]
Moment = Whole
"""Milliseconds of the sender's clock."""


class PeerLoad(msgspec.Struct, array_like=True, gc=False):
    """Open work of one router at one replica. It stays the same object while its values do not change."""

    waiting_ms: Count = 0  # modelled prefill of all waiting requests, including completed parts
    head_ms: Count = 0  # part of it that belongs to the head
    head_at_ms: Moment = 0  # time of placement of the head
    open: Count = 0  # open leases
    waiting: Count = 0  # open leases with an incomplete prefill
    context_tokens: Count = 0  # prompts of open leases
    decoding_tokens: Count = 0  # prompts of open leases with a completed prefill
    sent_tokens: Count = 0  # prompt tokens sent since the router began
    stall_ms: Count = 0  # modelled prefill that stalled streams, since the router began
    placed_ms: Whole = 0  # sum of the open leases' times of placement


ZERO_LOAD = PeerLoad()
