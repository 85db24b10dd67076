"""Deferred prompts: prompts that wait because starting them now would do more harm than good.

If more conversations are active than the caches can hold, each new prompt evicts another conversation's blocks. Those
are computed again and evict the next ones, so replicas mostly compute blocks that they had before. This is thrashing
(Denning, "Thrashing: its causes and prevention", AFIPS 1968). The remedy is Denning's: admit only as many as the memory
can hold. A prompt waits if the fleet is busy, if it is mostly cached nowhere, and if it would make others repeat much
more work than its own. In the meantime the turns of admitted conversations, which are short, run undisturbed.

The policy decides which placement thrashes (`PolicyDecision.hold_back`). The wait is bounded: a request that has been
deferred for `defer_max_s` goes to the cheapest replica. Only a few requests are tried again several times a second,
because pricing takes about ten microseconds per replica. These are the oldest of each tenant, in turns over the
tenants.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

TICK_S = 0.25  # interval of calls of `next_few`
TRIES_MAX = 4  # deferred requests that are tried at each call
HELD_MAX = 256  # maximum of deferred requests: further ones are not deferred

T = TypeVar("T", bound=Hashable)


class DeferredQueue(Generic[T]):
    """The deferred requests, with their tenant and the beginning of their wait."""

    def __init__(self) -> None:
        self._held: dict[T, tuple[float, str]] = {}  # (beginning of the wait, tenant)
        self._turns: dict[str, int] = {}  # tenant with deferred requests -> number of its last turn
        self._turn = 0

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[T]:
        return iter(self._held)

    def __contains__(self, who: T) -> bool:
        return who in self._held

    @property
    def full(self) -> bool:
        """True if the maximum of deferred requests is reached."""
        return len(self._held) >= HELD_MAX

    def add(self, who: T, since_s: float, tenant: str = "") -> None:
        """Defer a request as if since then: a request that returns keeps its seniority."""
        self._held[who] = since_s, tenant

    def remove(self, who: T) -> bool:
        """Stop deferring a request; returns True if it was deferred."""
        return self._held.pop(who, None) is not None

    def over(self, now_s: float, defer_max_s: float) -> list[T]:
        """Return the requests that have been deferred for `defer_max_s`, the oldest first."""
        due_s = now_s - defer_max_s
        return [who for who, (since_s, _) in self._oldest_first() if since_s <= due_s]

    def next_few(self) -> list[T]:
        """Return the requests to be tried now: the oldest of each tenant, in turns over the tenants."""
        waiting: dict[str, list[T]] = {}
        for who, (_, tenant) in self._oldest_first():
            waiting.setdefault(tenant, []).append(who)
        self._turns = {tenant: self._turns.get(tenant, 0) for tenant in waiting}
        few: list[T] = []
        tried = dict.fromkeys(waiting, 0)
        while len(few) < min(TRIES_MAX, len(self._held)):
            tenant = min((each for each in waiting if tried[each] < len(waiting[each])), key=self._turns.__getitem__)
            few.append(waiting[tenant][tried[tenant]])
            tried[tenant] += 1
            self._turn += 1
            self._turns[tenant] = self._turn
        return few

    def _oldest_first(self) -> list[tuple[T, tuple[float, str]]]:
        return sorted(self._held.items(), key=lambda item: item[1][0])
