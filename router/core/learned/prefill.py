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
from math import exp, log

from router.core.learned.least_squares import Sums, ToldSums, Vector, squares

LEARN_TOKENS_MIN = 1_000  # least uncached tokens to learn from: below, the floor and noise dominate
FORGET = 0.98  # weight of an observation fades to a third after about 50 more
AVOIDED = 2.0  # a replica this many times slower than the fleet at AVOIDED_TOKENS is avoided
AVOIDED_TOKENS = 2_000
FADE_S = 30.0  # time without an observation in which half of a slow replica's observations are forgotten
PRIOR_WEIGHT = 3.0  # observations that the fleet's model counts for in a replica's
GUESS_WEIGHT = 0.01  # observations that the first guess counts for in the fleet's: the first answer outweighs it
FLEET_FLOOR_MS = 20.0
FLEET_MS_PER_TOKEN = 0.1  # 10,000 tokens/s: the first guess
PACE_CONTEXT_TOKENS = 4_000  # context of the tokens whose time is a model's pace
OUTLIER = 8.0  # an observation further than this factor from the model is clipped: a pause, not prefill

PSEUDO = ((100, 0), (2_000, 0), (8_000, 16_000))  # (uncached, cached) tokens at which a fit agrees with its prior
SUPPORTS = ((0, 1, 2), (0, 1), (1, 2), (1,))  # coefficients in use: work without a price per token is no model


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

    @property
    def pace_ms(self) -> float:
        """Time of one more token behind a context of PACE_CONTEXT_TOKENS; never 0."""
        return self.per_token_ms + self.per_token_context_ms * PACE_CONTEXT_TOKENS or FLEET_MS_PER_TOKEN

    def saved_ms(self, cached_tokens: float) -> float:
        """What it saves that a prompt's first `cached_tokens` are held: `ms` of all of it less `ms` of the rest, which
        is the same however long the prompt is."""
        return (self.per_token_ms + self.per_token_context_ms * cached_tokens / 2) * cached_tokens


@dataclass(slots=True)
class PrefillFit:
    """Learns a PrefillModel from (uncached tokens, cached tokens, service time)."""

    model: PrefillModel = field(default_factory=PrefillModel)
    observations: int = 0
    fades_s: float = float("inf")  # time at which half is forgotten, unless something is observed before
    told: ToldSums | None = None  # what other routers have observed
    told_model: bool = False  # whether the model has that in it
    _sums: Sums = field(default_factory=Sums)
    _faster: float = 0.0  # forgotten sum of the logarithms of (observed / by the prior), and their weight
    _weight: float = 0.0
    _told_faster: dict[str, tuple[float, float]] = field(default_factory=dict)  # router -> the same, as it has told

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
            service_ms = min(service_ms, expected * OUTLIER)  # a pause, not prefill
            if known is not prior:
                service_ms = max(service_ms, expected / OUTLIER)
        if weight >= PRIOR_WEIGHT and (by_prior := prior.ms(uncached_tokens, cached_tokens)) > 0:
            ratio = service_ms / by_prior
            if ratio > 0:  # the smallest floats are greater than 0, and become 0 by the division
                self._faster = self._faster * FORGET + log(ratio)
                self._weight = self._weight * FORGET + 1.0
        x = _terms(uncached_tokens, cached_tokens)
        self._sums.observe(x, service_ms, 1 / x[1], FORGET)
        self.observations += 1
        self.fades_s = now_s + FADE_S
        self.model = self._solve(prior, weight)

    def tell(self, router: str, xx: list[float], xy: list[float], faster: float, weight: float) -> None:
        """Another router's fit has these sums: they count as if observed here, once `take_told` is called, or with the
        next observation."""
        if self.told is None:
            self.told = ToldSums()
        self.told.put(router, xx, xy)
        self._told_faster[router] = faster, max(0.0, weight)

    def take_told(self, prior: PrefillModel, weight: float) -> None:
        """Take into account what others have told. Arguments as in `observe`."""
        self.model = self._solve(prior, weight)
        self.told_model = self.told is not None and self.told.routers > 0

    def forget(self, router: str) -> None:
        """A router that has told something is there no more."""
        if self.told is not None:
            self.told.drop(router)
            self._told_faster.pop(router, None)
            self.told_model = self.told_model and self.told.routers > 0

    def adopt(
        self, xx: list[float], xy: list[float], observations: int, prior: PrefillModel, weight: float, now_s: float
    ) -> None:
        """Begin with the sums of so many observations that were made before this router came, unless it has made some.
        `prior` and `weight` as in `observe`."""
        if self.observations or observations <= 0:
            return
        self._sums.xx, self._sums.xy = list(xx), list(xy)
        self.observations, self.fades_s = observations, now_s + FADE_S
        self.model = self._solve(prior, weight)

    @property
    def faster(self) -> tuple[float, float]:
        """(sum of the logarithms of (observed / by the prior), their weight), as observed here."""
        return self._faster, self._weight

    @property
    def sums(self) -> Sums:
        """What the model is fitted to. Not to be changed."""
        return self._sums

    def fade(self, prior: PrefillModel, weight: float, now_s: float) -> None:
        """Where `prior` is much faster and nothing was observed for FADE_S: forget half, and the last of it whole.
        Arguments as in `observe`."""
        if now_s < self.fades_s or self.model.ms(AVOIDED_TOKENS, 0) <= AVOIDED * prior.ms(AVOIDED_TOKENS, 0):
            return
        self.observations = self._sums.halve(self.observations, FORGET)
        self.fades_s = now_s + FADE_S if self.observations else float("inf")
        part = 0.5 if self.observations else 0.0
        self._faster, self._weight = part * self._faster, part * self._weight
        self.model = self._solve(prior, weight)

    def _solve(self, prior: PrefillModel, weight: float) -> PrefillModel:
        """The best fit, with `prior` as pseudo-observations of this weight; `prior` itself where there is none. A prior
        is right about how times grow with sizes, not about the machine, so it counts at the speed that was seen: one of
        six times the speed would have its longer prompts priced by slower machines until it had many of them."""
        faster, seen = self._faster, self._weight
        for told in self._told_faster.values():
            faster, seen = faster + told[0], seen + told[1]
        pseudo, scale = (
            zip(PSEUDO, _pseudo_squares(weight), strict=True),
            exp(min(max(faster / (seen + 1.0), -9.0), 9.0)),
        )
        best = self._sums.solve([(xx, x, scale * prior.ms(*at)) for at, (xx, x) in pseudo], SUPPORTS, self.told)
        return prior if best is None else PrefillModel(best[0], best[1] / 1e3, best[2] / 1e6)


def _terms(uncached_tokens: float, cached_tokens: float) -> Vector:
    """What the coefficients are of: 1, n and n x context, in thousands of tokens."""
    n = uncached_tokens / 1e3
    return 1.0, n, n * (cached_tokens + uncached_tokens / 2) / 1e3


@lru_cache(maxsize=8)
def _pseudo_squares(weight: float) -> list[tuple[list[float], list[float]]]:
    terms = [_terms(tokens, cached) for tokens, cached in PSEUDO]
    return [squares(x, weight / len(PSEUDO) / x[1]) for x in terms]
