"""Model of an engine's load time from a tier into its GPU: two parameters, learned per replica and tier.

    load_ms(n) = floor + a x n

n is the number of tokens. The first guess follows from the bytes per token and the speed of the link, which are both
settings. Half of the bytes per token take half of the time, independent of the model's computation. So unlike prefill
the time does not grow with the context. At 256 KiB per token and 54 GB/s (PCIe as measured on an H20 and on an H100) it
is 5 us per token, and computing a token takes 60 us. The observations of all replicas of the same models are the prior
of each.

An observation is the part of an answer's time to first token beyond waiting and prefill, if the load before it on the
same link had ended (core/fleet/tier_loads.py). Loads are short compared with an engine's steps, and the engine notices
their completion only at the end of a step. The floor learns the mean cost of that.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from router.core.estimators.least_squares import Sums, squares
from router.core.types.tiers import CPU, EXTERNAL, LEG, PEER, SHARED, STORAGE

LEARN_TOKENS_MIN = 512  # minimum of tokens to learn from: a shorter load is lost in the engine's steps
FORGET = 0.98  # weight of an observation fades to a third after about 50 more
PRIOR_WEIGHT = 3.0  # weight of the prior in observations
GUESS_WEIGHT = 0.3  # weight of the first guess in the fit of all replicas, in observations
OUTLIER = 4.0  # an observation further than this factor from the model is clipped: a pause, not a load
CLIPPED_FROM = 8  # observations after which the model is known well enough to detect a pause
PSEUDO_TOKENS = (1_000, 16_000)  # tokens at which a fit agrees with its prior
SUPPORTS = ((0, 1), (1,))  # coefficients in use: a load without a cost per token is not a model


@dataclass(frozen=True, slots=True)
class LoadModel:
    """Coefficients in milliseconds."""

    floor_ms: float
    per_token_ms: float

    def ms(self, tokens: float) -> float:
        """Return the time to load `tokens`, once the link is free."""
        return self.floor_ms + self.per_token_ms * tokens


def guess(floor_ms: float, kv_bytes_per_token: float, gb_per_s: float) -> LoadModel:
    """Return the model of a link that moves `gb_per_s` gigabytes (10^9 bytes) per second."""
    return LoadModel(floor_ms, kv_bytes_per_token / gb_per_s / 1e6)


KV_BYTES_PER_TOKEN = 262_144.0  # Qwen3-32B in bf16
# Milliseconds, mostly the engine's step. A transfer begins within one step (loadtest/data/transfers_h100.json). Between
# a prefill's end and the decoding replica's first token are two steps of that replica and a pass through the router.
FLOOR_MS = {CPU: 10.0, STORAGE: 20.0, EXTERNAL: 20.0, SHARED: 30.0, PEER: 35.0, LEG: 50.0}
# PCIe 5 as measured, an NVMe drive, an object store, two NICs of 200 Gbit/s followed by the way to the GPU, and the
# same from GPU to GPU.
GB_PER_S = {CPU: 54.0, STORAGE: 6.0, EXTERNAL: 6.0, SHARED: 2.0, PEER: 30.0, LEG: 30.0}
GUESSES = {tier: guess(FLOOR_MS[tier], KV_BYTES_PER_TOKEN, GB_PER_S[tier]) for tier in GB_PER_S}


@dataclass(slots=True)
class LoadFit:
    """Learns a LoadModel from (tokens, milliseconds)."""

    model: LoadModel = GUESSES[CPU]  # meaningful once there are observations
    observations: int = 0
    _sums: Sums = field(default_factory=Sums)

    def observe(self, tokens: int, took_ms: float, prior: LoadModel, weight: float) -> None:
        """Add one observation; `prior` counts for `weight` observations."""
        if tokens < LEARN_TOKENS_MIN:
            return
        took_ms = max(0.0, took_ms)
        if self.observations >= CLIPPED_FROM:
            took_ms = min(took_ms, OUTLIER * self.model.ms(tokens))
        x = (1.0, tokens / 1e3, 0.0)
        self._sums.observe(x, took_ms, 1 / x[1], FORGET)
        self.observations += 1
        pseudo = []
        for each in PSEUDO_TOKENS:
            at = (1.0, each / 1e3, 0.0)
            xx, xy = squares(at, weight / len(PSEUDO_TOKENS) / at[1])
            pseudo.append((xx, xy, prior.ms(each)))
        best = self._sums.solve(pseudo, SUPPORTS)
        self.model = prior if best is None else LoadModel(best[0], best[1] / 1e3)


class LoadFits:
    """Observations of each tier from all replicas of the same models, and the guesses before that."""

    def __init__(self, guesses: dict[str, LoadModel] | None = None) -> None:
        self.guesses = GUESSES if guesses is None else guesses
        self._fits: dict[str, LoadFit] = {}

    def model(self, tier: str, own: LoadFit) -> LoadModel:
        """Return the model of one replica: its own, or that of all such replicas if it has none, or the guess."""
        if own.observations:
            return own.model
        fit = self._fits.get(tier)
        return fit.model if fit is not None else self.guesses[tier]

    def forget(self, tier: str) -> None:
        """Drop the observations of a tier, except those of the replicas' own fits."""
        self._fits.pop(tier, None)

    def observe(self, tier: str, own: LoadFit, tokens: int, took_ms: float) -> None:
        """Record that a load of `tokens` took `took_ms` at the replica with the fit `own`."""
        fit = self._fits.get(tier)
        if fit is None:
            fit = self._fits[tier] = LoadFit()
        fit.observe(tokens, took_ms, self.guesses[tier], GUESS_WEIGHT)
        own.observe(tokens, took_ms, fit.model, PRIOR_WEIGHT)
