"""Prompts that are held back while it would do more harm than good to begin with them.

Where more conversations go on than the caches have room for, each prompt that is begun pushes out another one's, which
is computed again and pushes out the next: replicas compute most of the time what they had before (thrashing; Denning,
"Thrashing: its causes and prevention", AFIPS 1968, whose remedy this is: let in no more than there is room for). So
whatever is mostly not cached anywhere, and would make others repeat far more work than it is itself, waits until those
who are inside pause long enough, or end. Meanwhile their turns, which are short, go on undisturbed. How long it may
wait is priced by the policy (`Choice.hold_ms`), and there is an end to it in any case: then it goes where it is
cheapest.

Some are asked again a few times a second, by turns: a price takes some ten microseconds a replica.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Iterator
from itertools import islice
from typing import Generic, TypeVar

TICK_S = 0.25  # between two calls of `next_few`
TRIES_MAX = 4  # at each of them
HELD_MAX = 256  # who comes then is not held

T = TypeVar("T", bound=Hashable)


class Holding(Generic[T]):
    """Who is held, and since when."""

    def __init__(self) -> None:
        self._since_s: OrderedDict[T, float] = OrderedDict()  # in the order in which they are to be tried

    def __len__(self) -> int:
        return len(self._since_s)

    def __iter__(self) -> Iterator[T]:
        return iter(self._since_s)

    def __contains__(self, who: T) -> bool:
        return who in self._since_s

    @property
    def full(self) -> bool:
        """Whether no more may be held."""
        return len(self._since_s) >= HELD_MAX

    def add(self, who: T, now_s: float) -> None:
        """It is held from now on."""
        self._since_s[who] = now_s

    def remove(self, who: T) -> bool:
        """It is no longer; returns whether it was."""
        return self._since_s.pop(who, None) is not None

    def next_few(self, now_s: float, hold_s: float) -> list[tuple[T, float]]:
        """Who is to be tried now, and the seconds it has been held: those first that have been for `hold_s`, by
        turns, then whose turn it is."""
        since_s = self._since_s
        over = [who for who, at_s in since_s.items() if now_s - at_s >= hold_s]
        few = list(islice(dict.fromkeys((*over, *islice(since_s, TRIES_MAX))), TRIES_MAX))
        for who in few:
            since_s.move_to_end(who)
        return [(who, now_s - since_s[who]) for who in few]
