"""Sums over the open leases of one replica, and the sets of leases that wait there for memory or blocks.

The work that other routers report is in peer_leases.py, except for their reservations of KV blocks.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from router.core.fleet.kv_reservations import KvReservations
from router.core.fleet.lease import Lease


@dataclass(slots=True)
class OpenWork:
    """Open work of one replica."""

    decoding: int = 0  # open leases with a completed prefill, by observation
    placed_sum_s: float = 0.0  # sum of the open leases' times of placement
    context_tokens: int = 0  # prompts of open leases, each in full: attention reads each stream's own context
    kv: KvReservations = field(default_factory=KvReservations)  # KV pool blocks in use by prompts of open leases
    # leases without a first token that, by estimate, wait for KV headroom
    waiting_for_kv: set[int] = field(default_factory=set)
    # ids of decode-stage leases that the engine holds until their blocks arrive
    awaiting_transfer: set[int] = field(default_factory=set)
    transfers_peak: int = 0  # their maximum since `restart_transfers_peak`

    def open(self, lease: Lease, *, waits_for_kv: bool) -> None:
        """Add a placed lease."""
        if waits_for_kv:
            self.waiting_for_kv.add(lease.id)
        self.kv.open(lease.id, lease.prompt.keys, lease.prompt.unshared_tokens)
        self.placed_sum_s += lease.placed_s
        self.context_tokens += lease.prompt_tokens

    def close(self, lease: Lease, *, is_last: bool) -> None:
        """Remove a lease; `is_last` if no other is open."""
        self.waiting_for_kv.discard(lease.id)
        self.awaiting_transfer.discard(lease.id)
        self.context_tokens -= lease.prompt_tokens
        self.kv.close(lease.id, lease.prompt.keys, lease.prompt.unshared_tokens)
        self.placed_sum_s = 0.0 if is_last else self.placed_sum_s - lease.placed_s

    def start_transfer_wait(self, lease: Lease) -> None:
        """Record that the engine now holds a decode-stage lease and waits for its blocks. With NIXL, the engine gets
        the request only after they are computed."""
        self.awaiting_transfer.add(lease.id)
        self.transfers_peak = max(self.transfers_peak, len(self.awaiting_transfer))

    def restart_transfers_peak(self) -> int:
        """Return the maximum of leases that waited for blocks since the last call, and restart it at the current
        number."""
        peak, self.transfers_peak = self.transfers_peak, len(self.awaiting_transfer)
        return peak
