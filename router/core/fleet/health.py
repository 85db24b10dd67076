"""State machine of a replica's fitness, driven by observations; only changes of its state are reported.

A refused connection is proof, and removes a replica at once. A failed health check may be a transient error, so a few
in a row are needed. One good check restores the replica, because the engine's own /health is 503 until it can serve.
Checks that time out remove a replica like failed ones. If no other replica is left, such a replica may still serve
(registry.py).
"""

from __future__ import annotations

from dataclasses import dataclass

FAILURES_MAX = 2  # failed checks in a row that remove a replica


@dataclass(slots=True)
class Health:
    """Fitness of one replica. It starts unfit, and serves after its first good check."""

    fit: bool = False
    failures: int = 0
    why: str = "not probed yet"
    served: bool = False  # it was fit at least once
    silent: bool = False  # the last check timed out without any answer, which proves nothing

    @property
    def asked(self) -> bool:
        """True if at least one observation was recorded."""
        return self.served or self.failures > 0

    def observe(self, ok: bool, why: str = "", *, proof: bool = False, silent: bool = False) -> bool:
        """Record one observation and its reason. Return True if `fit` changed.

        - `proof`: one failure is enough (connection refused).
        - `silent`: the check had neither an answer nor a refusal.
        """
        before = self.fit
        self.why, self.silent = why, silent and not ok and not proof
        if ok:
            self.failures, self.fit, self.served = 0, True, True
        else:
            self.failures += 1
            if proof or self.failures >= FAILURES_MAX:
                self.fit = False
        return self.fit != before
