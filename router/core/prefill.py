"""How long an engine takes to prefill: a three-parameter model, learned per replica, the fleet as prior.

    prefill_ms(n, context) = floor + (a + b x mean context) x n

n is the number of uncached tokens, and the mean context of those tokens is cached + n / 2: attention makes late
tokens dearer. The coefficients are fitted by non-negative least squares over exponentially forgotten observations,
one per streamed answer with at least LEARN_TOKENS_MIN uncached tokens. An observation is the replica's *service*
time: first token minus the later of placement and the first token before it, so queueing is not mistaken for work.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import combinations

LEARN_TOKENS_MIN = 1_000  # below it the floor and noise dominate
FORGET = 0.98  # weight of an observation fades to a third after about 50 more
PRIOR_WEIGHT = 3.0  # observations that the fleet's model counts for in a replica's
GUESS_WEIGHT = 0.01  # and the first guess in the fleet's: gone with the first answer, except where that says nothing
FLEET_FLOOR_MS = 20.0
FLEET_MS_PER_TOKEN = 0.1  # 10,000 tokens/s: the first guess
OUTLIER = 8.0  # an observation further than this factor from the model is clipped: a pause, not prefill


@dataclass(frozen=True, slots=True)
class PrefillModel:
    """Coefficients in milliseconds."""

    floor_ms: float = FLEET_FLOOR_MS
    per_token_ms: float = FLEET_MS_PER_TOKEN
    per_token_context_ms: float = 0.0

    def ms(self, uncached_tokens: float, cached_tokens: float) -> float:
        """Time to prefill `uncached_tokens` behind `cached_tokens`, on an otherwise idle engine."""
        context = cached_tokens + uncached_tokens / 2
        return self.floor_ms + (self.per_token_ms + self.per_token_context_ms * context) * uncached_tokens


@dataclass(slots=True)
class PrefillFit:
    """Learns a PrefillModel from (uncached tokens, cached tokens, service time)."""

    model: PrefillModel = field(default_factory=PrefillModel)
    observations: int = 0
    # Forgotten sums of x'x and x'y for x = (1, n, n * context), scaled to thousands to keep them well conditioned.
    _xx: list[list[float]] = field(default_factory=lambda: [[0.0] * 3 for _ in range(3)])
    _xy: list[float] = field(default_factory=lambda: [0.0] * 3)

    def observe(
        self, uncached_tokens: int, cached_tokens: int, service_ms: float, prior: PrefillModel, weight: float
    ) -> None:
        """Take one observation; `prior` counts for `weight` observations. Small prompts and impossible times are
        ignored."""
        if uncached_tokens < LEARN_TOKENS_MIN or service_ms < 0:
            return
        if self.observations >= PRIOR_WEIGHT:
            expected = self.model.ms(uncached_tokens, cached_tokens)
            service_ms = min(max(service_ms, expected / OUTLIER), expected * OUTLIER)
        for i in range(3):
            self._xy[i] *= FORGET
            self._xx[i] = [value * FORGET for value in self._xx[i]]
        _add(self._xx, self._xy, uncached_tokens, cached_tokens, service_ms, 1.0)
        self.observations += 1
        self.model = self._solve(prior, weight)

    def _solve(self, prior: PrefillModel, weight: float) -> PrefillModel:
        """Least squares with `prior` as pseudo-observations of this weight, over the best non-negative support."""
        xx = [row[:] for row in self._xx]
        xy = self._xy[:]
        for tokens, cached in ((100, 0), (2_000, 0), (8_000, 16_000)):
            _add(xx, xy, tokens, cached, prior.ms(tokens, cached), weight / 3)
        best, best_loss = (prior.floor_ms, prior.per_token_ms, prior.per_token_context_ms), float("inf")
        for size in (3, 2, 1):
            for support in combinations(range(3), size):
                if 1 not in support:  # work without a price per token is no model
                    continue
                beta = _solve_on(xx, xy, support)
                if beta is None or min(beta) < 0:
                    continue
                loss = sum(
                    beta[i] * (sum(xx[i][j] * beta[j] for j in range(3)) - 2 * xy[i]) for i in range(3)
                )  # up to the constant y'y
                if loss < best_loss:
                    best_loss = loss
                    best = (beta[0], beta[1] / 1e3, beta[2] / 1e6)
        return PrefillModel(*best)


def _features(uncached_tokens: float, cached_tokens: float) -> tuple[float, float, float]:
    n = uncached_tokens / 1e3
    return 1.0, n, n * (cached_tokens + uncached_tokens / 2) / 1e3


def _add(
    xx: list[list[float]], xy: list[float], uncached_tokens: float, cached_tokens: float, ms: float, weight: float
) -> None:
    x = _features(uncached_tokens, cached_tokens)
    weight /= uncached_tokens / 1e3
    for i in range(3):
        xy[i] += weight * x[i] * ms
        for j in range(3):
            xx[i][j] += weight * x[i] * x[j]


def _solve_on(xx: list[list[float]], xy: list[float], support: tuple[int, ...]) -> list[float] | None:
    """Solve the normal equations restricted to `support` by elimination; None when singular."""
    rows = [[xx[i][j] for j in support] + [xy[i]] for i in support]
    size = len(rows)
    for col in range(size):
        pivot = max(range(col, size), key=lambda r: abs(rows[r][col]))
        if abs(rows[pivot][col]) < 1e-15:
            return None
        rows[col], rows[pivot] = rows[pivot], rows[col]
        for r in range(size):
            if r != col:
                factor = rows[r][col] / rows[col][col]
                rows[r] = [a - factor * b for a, b in zip(rows[r], rows[col], strict=True)]
    beta = [0.0, 0.0, 0.0]
    for position, i in enumerate(support):
        beta[i] = rows[position][size] / rows[position][position]
    return beta
