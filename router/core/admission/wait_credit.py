"""Memory of requests that left the queue: a request that returns continues its earlier wait.

Clients and proxies close a request after 30 to 100 seconds without data, and retry. Without this memory, a client with
less patience than the router's wait limit would restart its wait each time, and never get its turn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

RETURN_S = 60.0  # seconds for which a request that left is remembered
LEFT_MAX = 4_096  # maximum of remembered requests; the oldest are dropped


class WaitCredit:
    """Seconds waited by requests that have left the queue, keyed by a name of the request."""

    def __init__(self) -> None:
        self._left: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()  # (seconds waited, time of leaving)

    def __len__(self) -> int:
        return len(self._left)

    def remember(self, key: Hashable | None, waited_s: float, now_s: float) -> None:
        """Record that a request waited for `waited_s` and was not placed. A request with a `key` of None is not
        recorded."""
        if key is None or waited_s <= 0:
            return
        self._left.pop(key, None)
        self._left[key] = waited_s, now_s
        if len(self._left) > LEFT_MAX:
            self._left.popitem(last=False)

    def redeem(self, key: Hashable | None, now_s: float) -> float:
        """Return the seconds that a request waited before, and drop the record; 0 if there is no record."""
        if not self._left or key is None:
            return 0.0
        waited_s, left_s = self._left.pop(key, (0.0, now_s))
        return waited_s if now_s - left_s <= RETURN_S else 0.0
