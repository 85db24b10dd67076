"""Model of an engine's prefill time: three parameters, learned from all replicas of a kind.

    prefill_ms(n, context) = floor + (a + b x mean context) x n

n is the number of uncached tokens, and the mean context of those tokens is cached + n / 2: attention makes late tokens
more expensive. The coefficients are fitted by non-negative least squares with exponential forgetting. There is one
observation per streamed answer with at least LEARN_TOKENS_MIN uncached tokens. Its value is the replica's *service*
time: first token minus the later of placement and the previous first token, so queueing is not mistaken for work.

Engines prefill waiting prompts in one batch (Orca, OSDI '22). The first tokens of a batch come together, and each
counts with its part of the batch's time. Although they follow each other immediately, all of them took time.

A single replica's speed is this model times one factor (speed_factor.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from router.core.estimators.least_squares import PeerSums, Sums, Vector, squares

LEARN_TOKENS_MIN = 1_000  # minimum of uncached tokens to learn from: below, the floor and noise dominate
FORGET = 0.98  # weight of an observation fades to a third after about 50 more
CLIPPED_FROM = 3  # observations after which further ones may be outliers
GUESS_WEIGHT = 0.01  # weight of the first guess in observations: the first answer outweighs it
FLEET_FLOOR_MS = 20.0
FLEET_MS_PER_TOKEN = 0.1  # 10,000 tokens/s: the first guess
PACE_CONTEXT_TOKENS = 4_000  # context of the tokens that define a model's pace
OUTLIER = 8.0  # an observation further than this factor from the model is clipped: a pause, not prefill

PSEUDO = ((100, 0), (2_000, 0), (8_000, 16_000))  # (uncached, cached) tokens at which a fit agrees with the first guess
SUPPORTS = ((0, 1, 2), (0, 1), (1, 2), (1,))  # coefficients in use: work without a cost per token is not a model


@dataclass(frozen=True, slots=True)
class PrefillModel:
    """Coefficients in milliseconds."""

    floor_ms: float = FLEET_FLOOR_MS
    per_token_ms: float = FLEET_MS_PER_TOKEN
    per_token_context_ms: float = 0.0

    def ms(self, uncached_tokens: float, cached_tokens: float) -> float:
        """Return the time to prefill `uncached_tokens` after `cached_tokens`, on an otherwise idle engine."""
        context = cached_tokens + uncached_tokens / 2
        return self.floor_ms + (self.per_token_ms + self.per_token_context_ms * context) * uncached_tokens

    @property
    def pace_ms(self) -> float:
        """Time of one more token after a context of PACE_CONTEXT_TOKENS; never 0."""
        return self.per_token_ms + self.per_token_context_ms * PACE_CONTEXT_TOKENS or FLEET_MS_PER_TOKEN

    def times(self, factor: float) -> PrefillModel:
        """Return the model of a replica that takes `factor` times as long."""
        a, b, c = self.floor_ms * factor, self.per_token_ms * factor, self.per_token_context_ms * factor
        return PrefillModel(a, b, c)

    def saved_ms(self, cached_tokens: float) -> float:
        """Return the prefill time that is saved if a prompt's first `cached_tokens` are cached: `ms` of the whole
        prompt less `ms` of the rest. It does not depend on the length of the prompt."""
        return (self.per_token_ms + self.per_token_context_ms * cached_tokens / 2) * cached_tokens


@dataclass(slots=True)
class PrefillFit:
    """Learns a PrefillModel from (uncached tokens, cached tokens, service time)."""

    model: PrefillModel = field(default_factory=PrefillModel)
    observations: int = 0
    told: PeerSums | None = None  # observations of other routers
    _sums: Sums = field(default_factory=Sums)

    def observe(self, uncached_tokens: int, cached_tokens: int, service_ms: float) -> None:
        """Add one observation. Small prompts and impossible times are ignored."""
        if uncached_tokens < LEARN_TOKENS_MIN or service_ms < 0:
            return
        if self.observations >= CLIPPED_FROM:
            expected_ms = self.model.ms(uncached_tokens, cached_tokens)
            service_ms = min(max(service_ms, expected_ms / OUTLIER), expected_ms * OUTLIER)  # a pause, not prefill
        x = _terms(uncached_tokens, cached_tokens)
        self._sums.observe(x, service_ms, 1 / x[1], FORGET)
        self.observations += 1
        self._solve()

    def tell(self, router: str, xx: list[float], xy: list[float]) -> None:
        """Store the sums of another router's fit: they count as if observed here."""
        if self.told is None:
            self.told = PeerSums()
        self.told.put(router, xx, xy)
        self._solve()

    def forget(self, router: str) -> None:
        """Drop the sums of another router that is gone. They remain in the model until the next observation here."""
        if self.told is not None:
            self.told.drop(router)

    def adopt(self, xx: list[float], xy: list[float], observations: int) -> None:
        """Start with the sums of `observations` from before this router started, unless it has observations."""
        if self.observations or observations <= 0:
            return
        self._sums.xx, self._sums.xy, self.observations = list(xx), list(xy), observations
        self._solve()

    @property
    def sums(self) -> Sums:
        """The sums that the model is fitted to. They must not be modified."""
        return self._sums

    def _solve(self) -> None:
        """Fit the model with the first guess as pseudo-observations; if there is no fit, use the guess."""
        best = self._sums.solve(_GUESS, SUPPORTS, self.told)
        self.model = PrefillModel() if best is None else PrefillModel(best[0], best[1] / 1e3, best[2] / 1e6)


def _terms(uncached_tokens: float, cached_tokens: float) -> Vector:
    """Return the variables of the coefficients: 1, n and n x context, in thousands of tokens."""
    n = uncached_tokens / 1e3
    return 1.0, n, n * (cached_tokens + uncached_tokens / 2) / 1e3


def _guess() -> list[tuple[list[float], list[float], float]]:
    terms, guess = [(at, _terms(*at)) for at in PSEUDO], PrefillModel()
    return [(*squares(x, GUESS_WEIGHT / len(PSEUDO) / x[1]), guess.ms(*at)) for at, x in terms]


_GUESS = _guess()
