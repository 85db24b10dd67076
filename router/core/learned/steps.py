"""How long an engine takes for one decoding step: a three-parameter model, learned per replica, the fleet as prior.

    step_ms(streams, context) = floor + b x streams + c x context

A step reads all weights once (the floor), computes one token for each stream, and reads the KV cache of every stream,
whose sizes in tokens add up to `context`. The coefficients are fitted by non-negative least squares over exponentially
forgotten observations, one for each streamed answer of at least ANSWER_TOKENS_MIN tokens: the time from its first token
to its end, less the prefills that interrupted the stream (chunked prefill: Agrawal et al., "Sarathi-Serve", OSDI '24;
as long as the model of prefill says when the answer has ended, since it may have known nothing when they began),
divided by its tokens, against the mean number of streams and the mean context during that time. Where an engine makes
several tokens a step (speculative decoding), the model is of the time per token, which is what clients wait for.

Answers that follow each other resemble each other: their streams and contexts hardly tell the three coefficients apart.
A fit to such answers alone may say that one more stream costs nothing, so that every request goes there. So the prior
gives a model its proportions, and observations give it first of all its scale: as far as the prior counts, a fit agrees
with a model of the prior's proportions whose steps took as long as those observed.

A replica whose steps seem AVOIDED times as long as the fleet's is not asked while others are free, and would seem slow
for ever after a first answer that compiled kernels. So what was seen of it fades while nothing is, as in prefill.py.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

from msgspec import Struct

from router.core.learned.least_squares import Sums, ToldSums, Vector, squares

ANSWER_TOKENS_MIN = 8  # a shorter answer says little of a step
FORGET = 0.98  # weight of an observation fades to a third after about 50 more
PRIOR_WEIGHT = 10.0  # observations that the fleet's model counts for in a replica's
GUESS_WEIGHT = 0.3  # observations that the first guess counts for in the fleet's
SCALE_WEIGHT = 3.0  # observations that the prior's own scale counts for: one answer may have waited for a compiler
SCALE_MAX = 64.0  # a replica is at most so many times as slow, or as fast, as its prior
CLIPPED_FROM = 3  # after so many observations, those that follow may be outliers
OUTLIER = 8.0  # an observation further than this factor from the model is clipped: a pause, not a step
AVOIDED = 2.0  # a replica whose steps take this many times as long as the fleet's is avoided
FADE_S = 30.0  # time without an observation in which half of such a replica's observations are forgotten
STALL_SHARE_MAX = 0.9  # part of an answer's time that modelled prefills may explain: the model of prefill may be wrong

PSEUDO = ((1, 2_000), (16, 32_000), (64, 512_000))  # (streams, context tokens) at which a fit agrees with its prior
SUPPORTS = ((0, 1, 2), (0, 1), (0, 2), (0,))  # a step without a floor is none


@dataclass(frozen=True, slots=True)
class StepModel:
    """Coefficients in milliseconds; the defaults are a first guess, of a 30B model on two H100."""

    floor_ms: float = 20.0
    per_stream_ms: float = 0.1
    per_context_token_ms: float = 5e-5

    def ms(self, streams: float, context_tokens: float) -> float:
        """Time of one step with so many streams, whose contexts add up to `context_tokens`."""
        return self.floor_ms + self.per_stream_ms * streams + self.per_context_token_ms * context_tokens


@dataclass(slots=True)
class StepFit:
    """Learns a StepModel from (streams, context tokens, milliseconds a step)."""

    model: StepModel = field(default_factory=StepModel)
    observations: int = 0
    fades_s: float = float("inf")  # time at which half is forgotten, unless something is observed before
    told: ToldSums | None = None  # what other routers have observed
    told_model: bool = False  # whether the model has that in it
    _sums: Sums = field(default_factory=Sums)

    def observe(
        self,
        streams: float,
        context_tokens: float,
        step_ms: float,
        prior: StepModel,
        weight: float,
        now_s: float = float("inf"),
    ) -> None:
        """Take one observation; `prior` counts for `weight` observations. Impossible times are ignored. Made at
        `now_s`, it fades if no other follows."""
        if step_ms <= 0:
            return
        if self.observations >= CLIPPED_FROM:
            expected_ms = self.model.ms(streams, context_tokens)
            step_ms = min(max(step_ms, expected_ms / OUTLIER), expected_ms * OUTLIER)
        self._sums.observe(_terms(streams, context_tokens), step_ms, 1.0, FORGET)
        self.observations += 1
        self.fades_s = now_s + FADE_S
        self._solve(prior, weight)

    def tell(self, router: str, xx: list[float], xy: list[float]) -> None:
        """Another router's fit has these sums: they count as if observed here, once `take_told` is called, or with the
        next observation."""
        if self.told is None:
            self.told = ToldSums()
        self.told.put(router, xx, xy)

    def take_told(self, prior: StepModel, weight: float) -> None:
        """Take into account what others have told. Arguments as in `observe`."""
        self._solve(prior, weight)
        self.told_model = self.told is not None and self.told.routers > 0

    def forget(self, router: str) -> None:
        """A router that has told something is there no more."""
        if self.told is not None:
            self.told.drop(router)
            self.told_model = self.told_model and self.told.routers > 0

    def adopt(
        self, xx: list[float], xy: list[float], observations: int, prior: StepModel, weight: float, now_s: float
    ) -> None:
        """Begin with the sums of so many observations that were made before this router came, unless it has made some.
        `prior` and `weight` as in `observe`."""
        if self.observations or observations <= 0:
            return
        self._sums.xx, self._sums.xy = list(xx), list(xy)
        self.observations, self.fades_s = observations, now_s + FADE_S
        self._solve(prior, weight)

    @property
    def sums(self) -> Sums:
        """What the model is fitted to. Not to be changed."""
        return self._sums

    def fade(self, prior: StepModel, weight: float, now_s: float) -> None:
        """Where the steps of `prior` are much shorter and nothing was observed for FADE_S: forget half, and the last of
        it whole. Arguments as in `observe`."""
        if now_s < self.fades_s or not any(self.model.ms(*at) > AVOIDED * prior.ms(*at) for at in PSEUDO):
            return
        self.observations = self._sums.halve(self.observations, FORGET)
        self.fades_s = now_s + FADE_S if self.observations else float("inf")
        self._solve(prior, weight)

    def _solve(self, prior: StepModel, weight: float) -> None:
        pseudo, scale = zip(PSEUDO, _pseudo_squares(weight), strict=True), self._scale(prior)
        best = self._sums.solve([(xx, x, scale * prior.ms(*at)) for at, (xx, x) in pseudo], SUPPORTS, self.told)
        if best is not None:
            self.model = StepModel(best[0], best[1] / 10, best[2] / 1e5)

    def _scale(self, prior: StepModel) -> float:
        """How many times as long as by `prior` the observed steps took, told ones included."""
        xx, xy, anchor_ms = self._sums.xx, self._sums.xy, SCALE_WEIGHT * prior.ms(*PSEUDO[1])
        answers, tens, contexts, took_ms = xx[0], xx[1], xx[2], xy[0]
        if self.told is not None:
            told_xx, told_xy = self.told.added()
            answers, tens, contexts = answers + told_xx[0], tens + told_xx[1], contexts + told_xx[2]
            took_ms += told_xy[0]
        by_prior_ms = prior.floor_ms * answers + 10 * prior.per_stream_ms * tens
        by_prior_ms += 1e5 * prior.per_context_token_ms * contexts
        scale = (took_ms + anchor_ms) / (by_prior_ms + anchor_ms) if anchor_ms else 1.0
        return min(max(scale, 1 / SCALE_MAX), SCALE_MAX)


def _terms(streams: float, context_tokens: float) -> Vector:
    """What the coefficients are of: 1, tens of streams, hundreds of thousands of context tokens."""
    return 1.0, streams / 10, context_tokens / 1e5


@lru_cache(maxsize=8)
def _pseudo_squares(weight: float) -> list[tuple[list[float], list[float]]]:
    return [squares(_terms(*at), weight / len(PSEUDO)) for at in PSEUDO]


class ClockReading(Struct, gc=False):  # a Struct for speed: core/facts/requests.py
    """What a replica's clock showed at an answer's first token."""

    at_s: float
    streams_s: float
    context_s: float
    prefill_tokens: float


class Stretch(Struct, gc=False):
    """How one answer decoded between two moments: how long, beside how many, and what was prefilled meanwhile."""

    ms: float
    streams: float
    context_tokens: float
    prefill_tokens: float  # prefill of other prompts there meanwhile, in tokens that take PrefillModel.pace_ms each

    def step_ms(self, tokens: int, pace_ms: float) -> float:
        """Time of a step, where that many tokens came in this time, and prefill takes `pace_ms` a token."""
        return (self.ms - min(self.prefill_tokens * pace_ms, STALL_SHARE_MAX * self.ms)) / tokens


class DecodeClock:
    """Who decodes on one replica: how many streams and how much context, now and summed over time."""

    __slots__ = (
        "_at_s",
        "_context_s",
        "_prefill_tokens",
        "_streams_s",
        "began_sum_s",
        "context_tokens",
        "other_streams",
        "other_tokens",
        "streams",
    )

    def __init__(self) -> None:
        self.streams = 0
        self.context_tokens = 0.0  # prompt tokens of all streams
        self.other_streams = self.other_tokens = 0  # streams of other routers, and their prompt tokens
        self.began_sum_s = 0.0  # moments at which the streams began
        self._at_s = 0.0
        self._streams_s = self._context_s = self._prefill_tokens = 0.0

    def join(self, prompt_tokens: int, prefill_tokens: float, now_s: float) -> ClockReading:
        """A prompt is prefilled, so many tokens of the model's pace, and its answer decodes from now on."""
        self._advance(now_s)
        self._prefill_tokens += prefill_tokens  # before the reading: an answer's own prefill does not interrupt it
        self.streams += 1
        self.context_tokens += prompt_tokens
        self.began_sum_s += now_s
        return ClockReading(now_s, self._streams_s, self._context_s, self._prefill_tokens)

    def beside(self, streams: int, context_tokens: int, prefill_tokens: float, now_s: float) -> None:
        """Other routers have so many streams there from now on, and interrupted all by so much prefill of late."""
        self._advance(now_s)
        self.other_streams, self.other_tokens = streams, context_tokens
        self._prefill_tokens += prefill_tokens

    def leave(self, prompt_tokens: int, mark: ClockReading, now_s: float, answer_tokens: float) -> Stretch:
        """The answer ended. Streams have on average half of `answer_tokens` of context besides their prompts."""
        self._advance(now_s)
        self.streams -= 1
        self.context_tokens -= prompt_tokens
        self.began_sum_s = self.began_sum_s - mark.at_s if self.streams else 0.0
        ran_s = now_s - mark.at_s
        if ran_s <= 0:
            return Stretch(0.0, 1.0, prompt_tokens, 0.0)
        streams = (self._streams_s - mark.streams_s) / ran_s
        context = (self._context_s - mark.context_s) / ran_s + streams * answer_tokens / 2
        return Stretch(1e3 * ran_s, streams, context, self._prefill_tokens - mark.prefill_tokens)

    def running_s(self, now_s: float) -> float:
        """Seconds since their first tokens, of all streams together."""
        return self.streams * now_s - self.began_sum_s

    def _advance(self, now_s: float) -> None:
        past_s = now_s - self._at_s
        if past_s > 0:
            self._streams_s += past_s * (self.streams + self.other_streams)
            self._context_s += past_s * (self.context_tokens + self.other_tokens)
        self._at_s = now_s
