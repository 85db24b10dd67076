"""Limits of what routers say to each other, and when."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SharingLimits:
    """Times in seconds. Whatever is beyond a limit is left out, and counted (Sharing.left_out)."""

    every_s: float = 0.05  # between two messages while anything is open or has changed
    idle_s: float = 0.25  # between two messages otherwise
    urgent_s: float = 0.005  # least time before a message that does not wait for `every_s`
    silent_s: float = 1.0  # a router that was not heard for so long is there no more
    peers_max: int = 64  # other routers that are listened to
