"""Rows on the list of advice, with hysteresis so that the list does not flicker.

Shares of all tokens move with every request, so a row at the limit would come and go. A row is added when it reaches
the limit, and removed when it has been below half of the limit for a minute. A row moves before another one only if it
costs a quarter more. So two rows of about the same cost do not change places, nor does the last row of a short list
with the next one.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

STAYS_S = 60.0  # seconds for which a row below the limit stays
STAYS_SHARE = 0.5  # fraction of the limit above which a shown row still counts as worth it
PASSES_RATIO = 1.25  # cost ratio at which a row moves before an earlier one
ROWS_MAX = 2_048


class AdviceHysteresis:
    """The rows that are shown. Times ascend."""

    def __init__(self) -> None:
        self._worth_s: OrderedDict[Hashable, float] = OrderedDict()  # last time at which each was worth it
        self._ranks: dict[Hashable, int] = {}

    def wants(self, key: Hashable, share: float, least: float, now_s: float) -> bool:
        """True if a row with this `share` of all tokens is shown. `least` is the limit."""
        known = self._worth_s
        if share > least or (key in known and share > least * STAYS_SHARE):
            known[key] = now_s
            known.move_to_end(key)
            if len(known) > ROWS_MAX:
                known.popitem(last=False)
            return True
        return key in known and now_s - known[key] < STAYS_S

    def rank_rows(self, costs: Sequence[tuple[Hashable, float]], now_s: float) -> list[Hashable]:
        """Return the keys of all rows that are shown now, most costly first, except those of about the same cost."""
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
