"""How long an engine takes to prefill: a three-parameter model, learned per replica, the fleet as prior.

    prefill_ms(n, context) = floor + (a + b x mean context) x n

n is the number of uncached tokens, and the mean context of those tokens is cached + n / 2: attention makes late
tokens dearer. The coefficients are fitted by non-negative least squares over exponentially forgotten observations,
one per streamed answer with at least LEARN_TOKENS_MIN uncached tokens. An observation is the replica's *service*
time: first token minus the later of placement and the first token before it, so queueing is not mistaken for work.
Engines prefill what waits in one batch (Orca, OSDI '22): its first tokens come together, and each has its part of the
batch's time. That they follow each other at once does not mean that all but the first took no time.

A replica that seems AVOIDED times slower than the fleet is not asked while others are free, and would seem slow for
ever after a first request that compiled kernels (Triton, torch.compile), or a minute in which a neighbour took its
cores. So what was seen of it fades while nothing is. Below that, one prompt that waits elsewhere is reason to ask it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from operator import add

LEARN_TOKENS_MIN = 1_000  # below it the floor and noise dominate
FORGET = 0.98  # weight of an observation fades to a third after about 50 more
AVOIDED = 2.0  # times, at AVOIDED_TOKENS
AVOIDED_TOKENS = 2_000
FADE_S = 30.0  # without an observation, in which half of those of a slow replica are forgotten
PRIOR_WEIGHT = 3.0  # observations that the fleet's model counts for in a replica's
GUESS_WEIGHT = 0.01  # and the first guess in the fleet's: gone with the first answer, except where that says nothing
FLEET_FLOOR_MS = 20.0
FLEET_MS_PER_TOKEN = 0.1  # 10,000 tokens/s: the first guess
OUTLIER = 8.0  # an observation further than this factor from the model is clipped: a pause, not prefill

PSEUDO = ((100, 0), (2_000, 0), (8_000, 16_000))  # (uncached, cached) tokens at which a fit agrees with its prior
SUPPORTS = ((0, 1, 2), (0, 1), (1, 2), (1,))  # of the coefficients: work without a price per token is no model


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

    def saved_ms(self, cached_tokens: float) -> float:
        """What it saves that a prompt's first `cached_tokens` are held: `ms` of all of it less `ms` of the rest, which
        is the same however long the prompt is."""
        return (self.per_token_ms + self.per_token_context_ms * cached_tokens / 2) * cached_tokens


@dataclass(slots=True)
class PrefillFit:
    """Learns a PrefillModel from (uncached tokens, cached tokens, service time)."""

    model: PrefillModel = field(default_factory=PrefillModel)
    observations: int = 0
    fades_s: float = float("inf")  # from then on half may be forgotten, if nothing is observed before
    # Forgotten sums of x'x (row by row) and x'y for x = (1, n, n * context), in thousands to be well conditioned.
    _xx: list[float] = field(default_factory=lambda: [0.0] * 9)
    _xy: list[float] = field(default_factory=lambda: [0.0] * 3)

    def observe(
        self,
        uncached_tokens: int,
        cached_tokens: int,
        service_ms: float,
        prior: PrefillModel,
        weight: float,
        now_s: float = float("inf"),
    ) -> None:
        """Take one observation; `prior` counts for `weight` observations. Small prompts and impossible times are
        ignored. Made at `now_s`, it fades if no other follows."""
        if uncached_tokens < LEARN_TOKENS_MIN or service_ms < 0:
            return
        if self.observations >= PRIOR_WEIGHT or weight >= PRIOR_WEIGHT:
            known = self.model if self.observations >= PRIOR_WEIGHT else prior
            expected = known.ms(uncached_tokens, cached_tokens)
            service_ms = min(max(service_ms, expected / OUTLIER), expected * OUTLIER)
        xx, x = _squares(uncached_tokens, cached_tokens, 1.0)
        self._xx = [old * FORGET + new for old, new in zip(self._xx, xx, strict=True)]
        self._xy = [old * FORGET + each * service_ms for old, each in zip(self._xy, x, strict=True)]
        self.observations += 1
        self.fades_s = now_s + FADE_S
        self.model = self._solve(prior, weight)

    def fade(self, prior: PrefillModel, weight: float, now_s: float) -> None:
        """Where `prior` is much faster and nothing was observed for FADE_S: forget half, and the last of it whole.
        Arguments as in `observe`."""
        if now_s < self.fades_s or self.model.ms(AVOIDED_TOKENS, 0) <= AVOIDED * prior.ms(AVOIDED_TOKENS, 0):
            return
        counting = min(self.observations, 1 / (1 - FORGET))  # of many, the sums hold no more than so many
        self.observations = int(counting / 2)
        self.fades_s = now_s + FADE_S if self.observations else float("inf")
        part = 0.5 if self.observations else 0.0
        self._xx = [part * each for each in self._xx]
        self._xy = [part * each for each in self._xy]
        self.model = self._solve(prior, weight)

    def _solve(self, prior: PrefillModel, weight: float) -> PrefillModel:
        """Least squares with `prior` as pseudo-observations of this weight, over the best non-negative support."""
        xx, xy = self._xx, self._xy
        for (tokens, cached), (more, x) in zip(PSEUDO, _pseudo_squares(weight), strict=True):
            ms = prior.ms(tokens, cached)
            xx = list(map(add, xx, more))
            xy = [xy[0] + x[0] * ms, xy[1] + x[1] * ms, xy[2] + x[2] * ms]
        best, best_loss = (prior.floor_ms, prior.per_token_ms, prior.per_token_context_ms), float("inf")
        for support in SUPPORTS:
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
                best_loss, best = loss, (b0, b1 / 1e3, b2 / 1e6)
        return PrefillModel(*best)


def _squares(uncached_tokens: float, cached_tokens: float, weight: float) -> tuple[list[float], list[float]]:
    """What an observation adds to x'x, and to x'y for each millisecond."""
    n = uncached_tokens / 1e3
    x = 1.0, n, n * (cached_tokens + uncached_tokens / 2) / 1e3
    weight /= n
    weighted = [weight * each for each in x]
    return [w * each for w in weighted for each in x], weighted


@lru_cache(maxsize=8)
def _pseudo_squares(weight: float) -> list[tuple[list[float], list[float]]]:
    return [_squares(tokens, cached, weight / len(PSEUDO)) for tokens, cached in PSEUDO]


def _solve_on(xx: list[float], xy: list[float], support: tuple[int, ...]) -> list[float] | None:
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
