"""What a router says that it has open at a replica, as a fact that nobody changes. Others may have written it."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

Count = Annotated[int, Meta(ge=0, le=1 << 53)]
Whole = Annotated[int, Meta(ge=-(1 << 53), le=1 << 53)]
Moment = Whole
"""Milliseconds of the clock of whoever speaks."""


class PeerSums(msgspec.Struct, array_like=True, gc=False):
    """What one router has open at one replica. It stays the same object for as long as nothing changes."""

    waiting_ms: Count = 0  # modelled prefill of all that waits there, what is done of it included
    head_ms: Count = 0  # part of it that is the head's
    head_at_ms: Moment = 0  # time at which the head was placed
    open: Count = 0  # open leases
    waiting: Count = 0  # open leases whose prefill is not over
    context_tokens: Count = 0  # prompts of open leases
    decoding_tokens: Count = 0  # prompts of open leases whose prefill is over
    sent_tokens: Count = 0  # prompt tokens sent since the router began
    stall_ms: Count = 0  # modelled prefill that interrupted streams, since the router began
    placed_ms: Whole = 0  # sum of the open leases' times of placement


NOTHING = PeerSums()
