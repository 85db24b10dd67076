"""Limits of the messages between routers: size, content and timing."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SharingLimits:
    """Times are in seconds. Content beyond a limit is omitted, and counted (Sharing.left_out)."""

    every_s: float = 0.05  # between two messages while the state changes
    idle_s: float = 0.25  # between two checks for changes without an event, and two parts of the replicas' speeds
    urgent_s: float = 0.01  # minimum time before a message that does not wait for `every_s`
    models_s: float = 1.0  # between two messages with learned values
    # A message is applied in one step, which must not occupy the event loop longer than a millisecond. Its cost is
    # measured in keys of blocks. Any other content counts as the number of keys with the same cost.
    keys_max: int = 1_600  # cost of a message, except for one placement that is longer on its own
    growing_max: int = 64  # longer prompts, which are applied in several steps
    row_keys: int = 16
    placement_keys: int = 40  # cost of a placement, in addition to its keys
    end_keys: int = 30
    # A received message may have this multiple of the cost, except its first placement, which may be long.
    heard_factor: int = 4
    first_token_keys: int = 8
    rows_max: int = 64  # rows of changed replicas in a message, and rows of a state that are applied in one step
    queue_keys_max: int = 1 << 17  # keys that wait for a message: a megabyte
    fits_max: int = 4  # replicas with their own speeds in a message
    queue_news_max: int = 4_096  # placements, first tokens, and ends, that wait for a message
    leases_max: int = 8_192  # open leases of another router that keep their blocks from eviction
    lease_keys_max: int = 1 << 20  # keys of their prompts: 130 million tokens, 40 MB
