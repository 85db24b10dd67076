"""Fleets with one of four replicas behind a proxy or a link that delays its requests or its answers.

Its probes and its KV events do not pass the proxy, so only first tokens show the delay.
"""

from __future__ import annotations

from loadtest.simulate.engine.machine import Hop, Machine
from loadtest.simulate.scenarios.odd import fleet_of, groups_of
from loadtest.simulate.scenarios.scenario import Scenario

GROUPS = 40


def _behind(hop: Hop, name: str, load: str, seed: int) -> Scenario:
    return fleet_of(name, load, seed, groups_of(name, seed, GROUPS), (Machine(hop=hop),), replicas=4)


def hop_late_requests(load: str, seed: int) -> Scenario:
    """One of four replicas is behind a proxy that forwards each request 3 s later; 40 groups."""
    return _behind(Hop(request_s=3.0), "hop_late_requests", load, seed)


def hop_late_tokens(load: str, seed: int) -> Scenario:
    """One of four replicas is behind a proxy that forwards each token 3 s later; 40 groups."""
    return _behind(Hop(reply_s=3.0), "hop_late_tokens", load, seed)


def hop_gathers(load: str, seed: int) -> Scenario:
    """One of four replicas is behind a proxy that forwards an answer only when it is complete; 40 groups."""
    return _behind(Hop(gathers=True), "hop_gathers", load, seed)


def hop_nagle(load: str, seed: int) -> Scenario:
    """One of four replicas is behind a proxy that forwards each token 40 ms later, the time of a delayed TCP
    acknowledgement; 40 groups."""
    return _behind(Hop(reply_s=0.04), "hop_nagle", load, seed)


def hop_thin(load: str, seed: int) -> Scenario:
    """One of four replicas is behind a link that forwards requests at 1 MB/s; 40 groups."""
    return _behind(Hop(bytes_per_s=1e6), "hop_thin", load, seed)
