"""Model of a history: times of served requests by tenant, and stored responses with the routers that know them."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field

MINUTE_S, HOUR_S = 60.0, 3_600.0
SETTLED_S = 2.0
"""Time after which routers connected to the store know a response stored by another, and reconnect after a fault."""


def excess(times_s: Sequence[float], per_min: float, window_s: float = HOUR_S) -> float:
    """Return the largest excess of served requests in any window of at most `window_s`.

    The excess is the number beyond a full bucket and the rate, in parts of a window's worth. At most 0.05 means at most
    1.05 of the rate. `times_s` must ascend.
    """
    per_s, most = per_min / MINUTE_S, 0.0
    lows: deque[tuple[float, float]] = (
        deque()
    )  # (time of a window's first request, requests beyond the rate before it), ascending
    for number, at_s in enumerate(times_s):
        due = number - per_s * at_s
        while lows and lows[-1][1] >= due:
            lows.pop()
        lows.append((at_s, due))
        while at_s - lows[0][0] > window_s:
            lows.popleft()
        most = max(most, due - lows[0][1] + 1 - per_min)
    return most / (per_s * window_s)


@dataclass(slots=True)
class Stored:
    """A response that was stored for a tenant."""

    id: str
    tenant: str
    at_s: float
    known_to: set[tuple[int, int]]
    """Routers that certainly know it, each with its life (number of its process, counted from the router's first)."""


@dataclass
class Model:
    """The expected state, derived from faults and responses. Routers are numbers."""

    routers: int
    lives: list[int] = field(init=False)
    stored: dict[str, Stored] = field(default_factory=dict)
    served_s: dict[str, list[float]] = field(default_factory=dict)
    anomalies: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    _hears_since_s: list[float | None] = field(init=False)
    _open: list[Stored] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.lives = [0] * self.routers
        self._hears_since_s = [-math.inf] * self.routers

    # -- faults --------------------------------------------------------------------------------------------------

    def on_deaf(self, router: int, now_s: float) -> None:
        """Record that a router is cut off from the store, or stopped."""
        self.settle(now_s)
        self._hears_since_s[router] = None

    def on_hearing(self, router: int, now_s: float) -> None:
        """Record that a router is connected to the store again."""
        self._hears_since_s[router] = now_s

    def on_killed(self, router: int, now_s: float) -> None:
        """Record that a router's process was killed, and lost all it had not published."""
        self.on_deaf(router, now_s)
        self.lives[router] += 1

    # -- answers -------------------------------------------------------------------------------------------------

    def on_stored(self, id_: str, tenant: str, router: int, life: int, now_s: float) -> None:
        """Record that a response was stored for a tenant, through this process of a router."""
        if id_ in self.stored:
            self._wrong("an id of two responses", f"{id_} at router {router}")
        self.stored[id_] = found = Stored(id_, tenant, now_s, {(router, life)})
        self._open.append(found)

    def on_served(self, tenant: str, at_s: float) -> None:
        """Record that a request of a tenant with a rate was served."""
        self.served_s.setdefault(tenant, []).append(at_s)

    def on_read(self, id_: str, tenant: str, router: int, life: int, status: int, content: str) -> None:
        """Check the result of a tenant's request for a stored response. `life`: process of the router; the engine was
        available."""
        found = self.stored[id_]
        if status == 200 and tenant != found.tenant:
            self._wrong("a response in another tenant's hands", f"{id_} of {found.tenant} to {tenant} at {router}")
        elif status == 200 and content != found.tenant:
            self._wrong("another response than the one asked for", f"{id_} at {router}")
        elif status == 404 and tenant == found.tenant and (router, life) in found.known_to:
            self._wrong("a response unknown to a router that knew it", f"{id_} at {router}: {status}")

    def on_failed(self, what: str, example: str) -> None:
        """Record a failed request without an excuse."""
        self._wrong(f"a request that failed: {what}", example)

    # -- the end -------------------------------------------------------------------------------------------------

    def due_everywhere(self) -> list[Stored]:
        """Return the responses that each router must know at the end: those that a still running process knew.

        All faults must be over, and the settling time must have passed.
        """
        there = set(enumerate(self.lives))
        return [each for each in self.stored.values() if each.known_to & there]

    def on_read_at_end(self, id_: str, tenant: str, router: int, status: int) -> None:
        """Check a read of a response that is due everywhere; otherwise the same as `on_read`."""
        if tenant == self.stored[id_].tenant and status != 200:
            self._wrong("a response that a router does not know in the end", f"{id_} at {router}: {status}")
        elif tenant != self.stored[id_].tenant and status == 200:
            self._wrong("a response in another tenant's hands", f"{id_} to {tenant} at {router}, in the end")

    def settle(self, now_s: float) -> None:
        """Record which routers know the responses stored until now. Must be called before each fault."""
        waiting, self._open = self._open, []
        for each in waiting:
            hearing = [router for router in range(self.routers) if self._hears(router, each.at_s)]
            ((made_by, life),) = each.known_to
            if made_by not in hearing or life != self.lives[made_by]:
                continue  # others may learn of it later, or never
            if now_s - each.at_s < SETTLED_S:
                self._open.append(each)
            else:
                each.known_to.update((router, self.lives[router]) for router in hearing)

    def _hears(self, router: int, since_s: float) -> bool:
        """True if the router has been connected to the store since then without a pause, and connected well before."""
        began_s = self._hears_since_s[router]
        return began_s is not None and began_s + SETTLED_S <= since_s

    def _wrong(self, what: str, example: str) -> None:
        self.anomalies[what] += 1
        self.examples.setdefault(what, example)
