"""Replicas with work in progress, for which a silent stream is no sign of a broken one.

Engines hide some of their output: thinking that the client did not request, or the arguments of a tool call until they
are complete. A stream is then silent for minutes, but its replica is not: its counters move, or other answers come from
it. For an engine without counters, the only known fact is that it answers its health checks.
"""

from __future__ import annotations

from router.core.fleet.registry import Fleet


def list_active(fleet: Fleet, since_s: float) -> tuple[list[str], list[str]]:
    """Return the ids of replicas with requests of ours, in two lists.

    - The first: replicas that have shown a sign of life since this time.
    - The second: other replicas with engines that publish no counters, if their health checks succeed.
    """
    moving, uncounted = list[str](), list[str]()
    for member in fleet.members.values():
        if not member.leases:
            continue
        if member.evidence.alive_s >= since_s:
            moving.append(member.id)
        elif member.load.generation_tokens_total is None and member.health.fit and not member.health.failures:
            uncounted.append(member.id)
    return moving, uncounted
