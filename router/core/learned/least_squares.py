"""Non-negative least squares with three coefficients, over observations that are forgotten exponentially.

The prefill model (prefill.py) and the step model (steps.py) are both sums of three terms that cannot be negative. With
three of them the best non-negative fit is found by solving the normal equations on each admissible support and keeping
the one with the least loss (Lawson & Hanson, "Solving Least Squares Problems", 1974, ch. 23, by enumeration).
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
        """Take one observation of this weight; `keep` is the part that is left of all earlier ones, 0 to 1."""
        weighted = [weight * each for each in x]
        self.xx = [
            old * keep + new for old, new in zip(self.xx, [w * each for w in weighted for each in x], strict=True)
        ]
        self.xy = [old * keep + each * y for old, each in zip(self.xy, weighted, strict=True)]

    def solve(
        self,
        prior: Iterable[tuple[list[float], list[float], float]],
        supports: Iterable[Support],
        told: ToldSums | None = None,
    ) -> Vector | None:
        """The coefficients with the least squared error. `prior` has pseudo-observations as (x'x, weighted x, y), see
        `squares`; `told` are observations of others. None where the equations are singular on every one of the
        `supports`, or only negative there."""
        xx, xy = self.xx, self.xy
        if told is not None:
            told_xx, told_xy = told.added()
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


class ToldSums:
    """What other routers have observed: the sum of their Sums."""

    __slots__ = ("_added", "_of")

    def __init__(self) -> None:
        self._of: dict[str, tuple[list[float], list[float]]] = {}
        self._added: tuple[list[float], list[float]] | None = None  # None: they have told since

    def put(self, router: str, xx: list[float], xy: list[float]) -> None:
        """Take the Sums of one of them, in place of those that it told before."""
        self._of[router] = xx, xy
        self._added = None

    def drop(self, router: str) -> None:
        """One of them is there no more."""
        if self._of.pop(router, None) is not None:
            self._added = None

    def added(self) -> tuple[list[float], list[float]]:
        """Sums of x'x and x'y over all of them. Not to be changed."""
        if self._added is None:
            xx, xy = [0.0] * 9, [0.0] * 3
            for more_xx, more_xy in self._of.values():
                xx, xy = list(map(add, xx, more_xx)), list(map(add, xy, more_xy))
            self._added = xx, xy
        return self._added


def squares(x: Vector, weight: float) -> tuple[list[float], list[float]]:
    """What an observation adds to x'x, and to x'y for each unit of y."""
    weighted = [weight * each for each in x]
    return [w * each for w in weighted for each in x], weighted


def _solve_on(xx: list[float], xy: list[float], support: Support) -> list[float] | None:
    """Solve the normal equations restricted to `support` by elimination; None when singular."""
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
