"""Is a replica fit to be sent requests? A tiny machine fed with observations; only its flips are news.

A refused connection is proof and takes a replica out at once; a failed health check may be a hiccup, so a few in a
row are needed. One good check brings it back: the engine's own /health is 503 until it can serve. Checks without any
answer take a replica out like others, but where no replica is left, one of those may still serve (fleet.py).
"""

from __future__ import annotations

from dataclasses import dataclass

FAILURES_MAX = 2  # failed checks in a row before a replica is taken out


@dataclass(slots=True)
class Health:
    """Starts unfit: a replica serves once it has answered."""

    fit: bool = False
    failures: int = 0
    why: str = "not asked yet"
    served: bool = False  # whether it was ever fit
    silent: bool = False  # whether the last check had no answer at all, which proves nothing

    @property
    def asked(self) -> bool:
        """Whether anything was observed yet."""
        return self.served or self.failures > 0

    def observe(self, ok: bool, why: str = "", *, proof: bool = False, silent: bool = False) -> bool:
        """Take one observation and what was heard; `proof` (connection refused) needs no second, `silent` says that
        there was neither answer nor refusal. Returns whether `fit` flipped."""
        before = self.fit
        self.why, self.silent = why, silent and not ok and not proof
        if ok:
            self.failures, self.fit, self.served = 0, True, True
        else:
            self.failures += 1
            if proof or self.failures >= FAILURES_MAX:
                self.fit = False
        return self.fit != before
