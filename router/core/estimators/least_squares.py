"""Non-negative least squares with three coefficients, over observations with exponential forgetting.

The prefill model (prefill.py) and the step model (decode_step.py) are both sums of three terms that cannot be negative.
With three terms the best non-negative fit is found by enumeration: the normal equations are solved on each admissible
support, and the solution with the least loss wins. The problem is treated in Lawson & Hanson, "Solving Least Squares
Problems", 1974, ch. 23.
"""

from __future__ import annotations

from collections.abc import Iterable
from operator import add

Vector = tuple[float, float, float]
Support = tuple[int, ...]


class Sums:
    """Sums of x'x (row by row) and x'y. Keep the columns of x near 1, or the equations are badly conditioned."""

    __slots__ = ("xx", "xy")

    def __init__(self) -> None:
        self.xx = [0.0] * 9
        self.xy = [0.0] * 3

    def observe(self, x: Vector, y: float, weight: float, keep: float) -> None:
        """Add one observation of this weight; `keep` is the part of all earlier ones that remains, 0 to 1."""
        weighted = [weight * each for each in x]
        self.xx = [
            old * keep + new for old, new in zip(self.xx, [w * each for w in weighted for each in x], strict=True)
        ]
        self.xy = [old * keep + each * y for old, each in zip(self.xy, weighted, strict=True)]

    def solve(
        self,
        prior: Iterable[tuple[list[float], list[float], float]],
        supports: Iterable[Support],
        told: PeerSums | None = None,
    ) -> Vector | None:
        """Return the coefficients with the least squared error. Return None if the equations are singular or have only
        negative solutions on all `supports`.

        - `prior`: pseudo-observations as (x'x, weighted x, y), see `squares`.
        - `told`: observations of other routers.
        """
        xx, xy = self.xx, self.xy
        if told is not None:
            told_xx, told_xy = told.get_totals()
            xx, xy = list(map(add, xx, told_xx)), list(map(add, xy, told_xy))
        for more, x, y in prior:
            xx = list(map(add, xx, more))
            xy = [xy[0] + x[0] * y, xy[1] + x[1] * y, xy[2] + x[2] * y]
        best, best_loss = None, float("inf")
        for support in supports:
            beta = _solve_on(xx, xy, support)
            if beta is None or min(beta) < 0:
                continue
            b0, b1, b2 = beta
            loss = (  # up to the constant y'y
                b0 * (xx[0] * b0 + xx[1] * b1 + xx[2] * b2 - 2 * xy[0])
                + b1 * (xx[3] * b0 + xx[4] * b1 + xx[5] * b2 - 2 * xy[1])
                + b2 * (xx[6] * b0 + xx[7] * b1 + xx[8] * b2 - 2 * xy[2])
            )
            if loss < best_loss:
                best_loss, best = loss, (b0, b1, b2)
        return best


class PeerSums:
    """Observations of other routers: the total of their Sums."""

    __slots__ = ("_added", "_of")

    def __init__(self) -> None:
        self._of: dict[str, tuple[list[float], list[float]]] = {}
        self._added: tuple[list[float], list[float]] | None = None  # None: must be recomputed

    def put(self, router: str, xx: list[float], xy: list[float]) -> None:
        """Store the Sums of another router and replace its previous ones."""
        self._of[router] = xx, xy
        self._added = None

    def drop(self, router: str) -> None:
        """Drop the Sums of a router that is gone."""
        if self._of.pop(router, None) is not None:
            self._added = None

    def get_totals(self) -> tuple[list[float], list[float]]:
        """Return the total sums of x'x and x'y. They must not be modified."""
        if self._added is None:
            xx, xy = [0.0] * 9, [0.0] * 3
            for more_xx, more_xy in self._of.values():
                xx, xy = list(map(add, xx, more_xx)), list(map(add, xy, more_xy))
            self._added = xx, xy
        return self._added


def squares(x: Vector, weight: float) -> tuple[list[float], list[float]]:
    """Return the contribution of an observation to x'x, and to x'y per unit of y."""
    weighted = [weight * each for each in x]
    return [w * each for w in weighted for each in x], weighted


def _solve_on(xx: list[float], xy: list[float], support: Support) -> list[float] | None:
    """Solve the normal equations restricted to `support` by elimination; None if singular."""
    rows = [[xx[3 * i + j] for j in support] + [xy[i]] for i in support]
    size, columns = len(rows), range(len(rows) + 1)
    for col in range(size):
        pivot = col
        for r in range(col + 1, size):
            if abs(rows[r][col]) > abs(rows[pivot][col]):
                pivot = r
        top = rows[pivot]
        if abs(top[col]) < 1e-15:
            return None
        rows[col], rows[pivot] = top, rows[col]
        for row in rows:
            if row is not top:
                factor = row[col] / top[col]
                for c in columns:
                    row[c] -= factor * top[c]
    beta = [0.0, 0.0, 0.0]
    for position, i in enumerate(support):
        beta[i] = rows[position][size] / rows[position][position]
    return beta
