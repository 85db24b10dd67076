"""Prompts that are held back while it would do more harm than good to begin with them.

Where more conversations go on than the caches have room for, each prompt that is begun evicts another one's, which is
computed again and evicts the next: replicas compute most of the time what they had before (thrashing; Denning,
"Thrashing: its causes and prevention", AFIPS 1968, whose remedy this is: let in no more than there is room for). So a
prompt that is mostly cached nowhere, and would make others repeat far more work than it is itself, waits while the
fleet is busy. Meanwhile the turns of those who are inside, which are short, go on undisturbed.

The policy says which placement thrashes (`Choice.hold_back`). The wait is bounded in any case: a request that has been
held back for `hold_s` goes where it is cheapest. Only a few requests are tried again several times a second, since a
price takes some ten microseconds a replica: the oldest of each tenant, tenants by turns.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from typing import Generic, TypeVar

TICK_S = 0.25  # between two calls of `next_few`
TRIES_MAX = 4  # held-back requests that are tried at each call
HELD_MAX = 256  # most requests held back at once: others are not held back

T = TypeVar("T", bound=Hashable)


class Holding(Generic[T]):
    """Which requests are held back, for which tenant, and since when."""

    def __init__(self) -> None:
        self._held: dict[T, tuple[float, str]] = {}  # (since when, tenant)
        self._turns: dict[str, int] = {}  # tenant with held-back requests -> number of its last turn
        self._turn = 0

    def __len__(self) -> int:
        return len(self._held)

    def __iter__(self) -> Iterator[T]:
        return iter(self._held)

    def __contains__(self, who: T) -> bool:
        return who in self._held

    @property
    def full(self) -> bool:
        """Whether no more requests may be held back."""
        return len(self._held) >= HELD_MAX

    def add(self, who: T, since_s: float, tenant: str = "") -> None:
        """Hold a request back, as if since then: a request that comes again keeps its seniority."""
        self._held[who] = since_s, tenant

    def remove(self, who: T) -> bool:
        """Hold a request back no longer; returns whether it was held back."""
        return self._held.pop(who, None) is not None

    def over(self, now_s: float, hold_s: float) -> list[T]:
        """Requests that have been held back for so long, the oldest first."""
        due_s = now_s - hold_s
        return [who for who, (since_s, _) in self._oldest_first() if since_s <= due_s]

    def next_few(self) -> list[T]:
        """Requests to be tried now: the oldest of each tenant, tenants by turns."""
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
