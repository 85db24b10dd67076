"""What is on the list of advice, so that it does not flicker.

Shares of all tokens move with every request, so a row at the limit would come and go. It comes when it is worth a line,
and goes when it has been worth less than half of that for a minute. And a row passes another one only when it costs a
quarter more, so that two that cost about the same do not change places, nor the last of a short list with the next one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

STAYS_S = 60.0  # seconds for which a row stays that is worth too little by now
STAYS_SHARE = 0.5  # part of the limit from which on a row that is shown is still worth it
PASSES_RATIO = 1.25  # how much more a row must cost to pass one that was before it
ROWS_MAX = 2_048


class Shown:
    """The rows that are shown. Times ascend."""

    def __init__(self) -> None:
        self._worth_s: OrderedDict[Hashable, float] = OrderedDict()  # when each was worth it last
        self._ranks: dict[Hashable, int] = {}

    def wants(self, key: Hashable, share: float, least: float, now_s: float) -> bool:
        """Whether to show a row that is a `share` of all and should be `least`."""
        known = self._worth_s
        if share > least or (key in known and share > least * STAYS_SHARE):
            known[key] = now_s
            known.move_to_end(key)
            if len(known) > ROWS_MAX:
                known.popitem(last=False)
            return True
        return key in known and now_s - known[key] < STAYS_S

    def ordered(self, costs: Sequence[tuple[Hashable, float]], now_s: float) -> list[Hashable]:
        """The keys of all rows that are shown now, most costly first, but for those that cost about the same."""
        while self._worth_s and now_s - next(iter(self._worth_s.values())) >= STAYS_S:
            self._worth_s.popitem(last=False)
        before, cost = self._ranks, dict(costs)
        new = len(before)
        order: list[Hashable] = []
        for key, of in sorted(costs, key=lambda each: (before.get(each[0], new), -each[1])):
            ratio = PASSES_RATIO if key in before else 1.0
            order.insert(next((at for at, other in enumerate(order) if of > cost[other] * ratio), len(order)), key)
        self._ranks = {key: rank for rank, key in enumerate(order)}
        return order
