"""Replicas as gateways name them: `ip:port`, the chosen one first, then the others by price.

A gateway tries the list in order until it reaches a replica, and reports the one that served. A request for one
data-parallel rank names that rank in a header, so only replicas of the same rank are valid fallbacks.
"""

from __future__ import annotations

from functools import lru_cache

from router.config.allowed_networks import is_address
from router.core.types.placements import Candidate, Receipt
from router.core.types.replicas import RANK_MARK, address_of


@lru_cache(4_096)
def endpoint_of(replica: str) -> str:
    """Return the replica's address as `ip:port`; "" if its host is a name, which no gateway accepts."""
    address = address_of(replica)
    return address if is_address(address.rpartition(":")[0]) else ""


def destinations(receipt: Receipt, chosen: str, fallbacks_max: int) -> list[str]:
    """Return endpoints for a request: the replica `chosen`, then at most `fallbacks_max` others, the cheapest first."""
    listed = [endpoint_of(chosen)]
    if not fallbacks_max:
        return listed
    rank, pull = chosen.partition(RANK_MARK)[2], receipt.pull
    others = [endpoint_of(each) for each in receipt.other_replicas]
    for candidate in sorted(receipt.candidates, key=_price_ms):
        if candidate.id == chosen or candidate.id.partition(RANK_MARK)[2] != rank:
            continue
        if pull is not None and candidate.id == pull.source:
            continue  # the serving replica gets the transfer order, and no replica can transfer from itself
        endpoint = endpoint_of(candidate.id)
        if endpoint in others:
            continue  # no server can prefill for itself
        if endpoint and endpoint not in listed:
            listed.append(endpoint)
        if len(listed) > fallbacks_max:
            break
    return listed


def _price_ms(candidate: Candidate) -> float:
    return candidate.price_ms
