"""Limits of what routers say to each other, and when."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SharingLimits:
    """Times in seconds. Whatever is beyond a limit is left out, and counted (Sharing.left_out)."""

    every_s: float = 0.05  # between two messages while anything changes
    idle_s: float = 0.25  # between two messages otherwise, and between two that are whole
    urgent_s: float = 0.01  # least time before a message that does not wait for `every_s`
    models_s: float = 1.0  # between two messages with what was learned; a new router is told at once
    silent_s: float = 1.0  # a router that was not heard for so long is there no more
    # What one message has is taken in at once, which must not take the event loop longer than a millisecond: it is
    # measured in keys of blocks, and whatever else is in it takes as long as so many of them.
    keys_max: int = 1_600  # keys that a message may take, but for one placement that is longer alone
    growing_max: int = 64  # prompts with more keys, which are taken in so many at a time
    row_keys: int = 16
    placement_keys: int = 40  # keys for a placement, beside its own
    end_keys: int = 30
    # Messages that are believed may take so many times as long to hear, but for the first placement, which may be long.
    heard_factor: int = 4
    first_token_keys: int = 8
    rows_max: int = 64  # replicas whose rows are in a message's arc; half as many more may have changed
    queue_keys_max: int = 1 << 17  # keys that wait for a message: a megabyte
    fits_max: int = 4  # replicas whose own speeds are in a message
    queue_news_max: int = 4_096  # placements, first tokens, and ends, that wait for a message
    told_max: int = 256  # messages whose news are kept for those that missed them: some seconds
    gaps_max: int = 8  # gaps that a message asks for, or fills
    leases_max: int = 8_192  # open leases of another router whose blocks are kept from eviction
    lease_keys_max: int = 1 << 20  # keys of their prompts: 130 million tokens, 40 MB
    peers_max: int = 64  # other routers that are listened to
