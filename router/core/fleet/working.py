"""Replicas that are at work, so that a stream which is silent there need not have broken.

Engines hide what they make: thinking that nobody asked to see, or the arguments of a tool call until they are whole. A
stream is silent then for minutes, and its replica is not: its counters move, or other answers come from it. Where an
engine counts nothing, all that is known is that it answers its health checks.
"""

from __future__ import annotations

from router.core.fleet.fleet import Fleet


def at_work(fleet: Fleet, since_s: float) -> tuple[list[str], list[str]]:
    """Ids of replicas with requests of ours: those that have shown life since this time, and the others of those whose
    engines count nothing and are well."""
    moving, uncounted = list[str](), list[str]()
    for member in fleet.members.values():
        if not member.leases:
            continue
        if member.alive_s >= since_s:
            moving.append(member.id)
        elif member.load.generation_tokens_total is None and member.health.fit and not member.health.failures:
            uncounted.append(member.id)
    return moving, uncounted
