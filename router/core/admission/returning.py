"""Who left while it waited here: when it comes again, it goes on waiting where it was.

Clients and proxies close a request that brings nothing for 30 to 100 seconds, and ask again. Without a memory of that,
whoever has less patience than the router has time would begin anew each time, and never have its turn.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

RETURN_S = 60.0  # seconds for which a request that left is remembered
LEFT_MAX = 4_096  # requests remembered; those that left first are forgotten


class Returning:
    """Seconds that requests have waited which are not waiting now, by whatever names a request."""

    def __init__(self) -> None:
        self._left: OrderedDict[Hashable, tuple[float, float]] = OrderedDict()  # (seconds waited, when it left)

    def __len__(self) -> int:
        return len(self._left)

    def left(self, key: Hashable | None, waited_s: float, now_s: float) -> None:
        """A request waited for so long, and was not placed. A `key` of None names none: it is not remembered."""
        if key is None or waited_s <= 0:
            return
        self._left.pop(key, None)
        self._left[key] = waited_s, now_s
        if len(self._left) > LEFT_MAX:
            self._left.popitem(last=False)

    def back(self, key: Hashable | None, now_s: float) -> float:
        """Seconds that a request has waited before, and forget them; 0 for a request that is not remembered."""
        if not self._left or key is None:
            return 0.0
        waited_s, left_s = self._left.pop(key, (0.0, now_s))
        return waited_s if now_s - left_s <= RETURN_S else 0.0
