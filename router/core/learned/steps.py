"""How long an engine takes for one decoding step: a three-parameter model, learned from all replicas of a kind.

    step_ms(streams, context) = floor + b x streams + c x context

A step reads all weights once (the floor), computes one token for each stream, and reads the KV cache of every stream,
whose sizes in tokens add up to `context`. The coefficients are fitted by non-negative least squares over exponentially
forgotten observations, one for each streamed answer of at least ANSWER_TOKENS_MIN tokens: the time from its first token
to its end, less the prefills that interrupted the stream (chunked prefill: Agrawal et al., "Sarathi-Serve", OSDI '24;
as long as the model of prefill says when the answer has ended, since it may have known nothing when they began),
divided by its tokens, against the mean number of streams and the mean context during that time. Where an engine makes
several tokens a step (speculative decoding), the model is of the time per token, which is what clients wait for.

Answers that follow each other resemble each other: their streams and contexts hardly tell the three coefficients apart.
A fit to such answers alone may say that one more stream costs nothing, so that every request goes there. So the first
guess gives the model its proportions, and observations give it first of all its scale: as far as the guess counts, the
fit agrees with a model of the guess's proportions whose steps took as long as those observed.

A single replica's speed is this model times one factor (speed_factor.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import Struct

from router.core.learned.least_squares import Sums, ToldSums, Vector, squares

ANSWER_TOKENS_MIN = 8  # a shorter answer says little of a step
FORGET = 0.98  # weight of an observation fades to a third after about 50 more
GUESS_WEIGHT = 0.3  # observations that the first guess counts for
SCALE_WEIGHT = 3.0  # observations that the guess's own scale counts for: one answer may have waited for a compiler
SCALE_MAX = 64.0  # a fleet is at most so many times as slow, or as fast, as the guess
CLIPPED_FROM = 3  # after so many observations, those that follow may be outliers
OUTLIER = 8.0  # an observation further than this factor from the model is clipped: a pause, not a step
STALL_SHARE_MAX = 0.9  # part of an answer's time that modelled prefills may explain: the model of prefill may be wrong

PSEUDO = ((1, 2_000), (16, 32_000), (64, 512_000))  # (streams, context tokens) at which a fit agrees with the guess
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

    def times(self, factor: float) -> StepModel:
        """The model of a replica that takes so many times as long."""
        a, b, c = self.floor_ms * factor, self.per_stream_ms * factor, self.per_context_token_ms * factor
        return StepModel(a, b, c)


@dataclass(slots=True)
class StepFit:
    """Learns a StepModel from (streams, context tokens, milliseconds a step)."""

    model: StepModel = field(default_factory=StepModel)
    observations: int = 0
    told: ToldSums | None = None  # observations of other routers
    _sums: Sums = field(default_factory=Sums)

    def observe(self, streams: float, context_tokens: float, step_ms: float) -> None:
        """Take one observation. Impossible times are ignored."""
        if step_ms <= 0:
            return
        if self.observations >= CLIPPED_FROM:
            expected_ms = self.model.ms(streams, context_tokens)
            step_ms = min(max(step_ms, expected_ms / OUTLIER), expected_ms * OUTLIER)
        self._sums.observe(_terms(streams, context_tokens), step_ms, 1.0, FORGET)
        self.observations += 1
        self._solve()

    def tell(self, router: str, xx: list[float], xy: list[float]) -> None:
        """Another router's fit has these sums: they count as if observed here."""
        if self.told is None:
            self.told = ToldSums()
        self.told.put(router, xx, xy)
        self._solve()

    def forget(self, router: str) -> None:
        """Another router is gone; its observations count until the next one here."""
        if self.told is not None:
            self.told.drop(router)

    def adopt(self, xx: list[float], xy: list[float], observations: int) -> None:
        """Begin with the sums of so many observations from before this router started, unless it has made some."""
        if self.observations or observations <= 0:
            return
        self._sums.xx, self._sums.xy, self.observations = list(xx), list(xy), observations
        self._solve()

    @property
    def sums(self) -> Sums:
        """The sums behind the model. Not to be changed."""
        return self._sums

    def _solve(self) -> None:
        scale = self._scale()
        best = self._sums.solve([(xx, x, scale * guess_ms) for xx, x, guess_ms in _GUESS], SUPPORTS, self.told)
        if best is not None:
            self.model = StepModel(best[0], best[1] / 10, best[2] / 1e5)

    def _scale(self) -> float:
        """How many times as long as by the first guess the observed steps took, other routers' included."""
        xx, xy, guess = self._sums.xx, self._sums.xy, StepModel()
        answers, tens, contexts, took_ms = xx[0], xx[1], xx[2], xy[0]
        if self.told is not None:
            told_xx, told_xy = self.told.added()
            answers, tens, contexts = answers + told_xx[0], tens + told_xx[1], contexts + told_xx[2]
            took_ms += told_xy[0]
        anchor_ms = SCALE_WEIGHT * guess.ms(*PSEUDO[1])
        guessed_ms = guess.floor_ms * answers + 10 * guess.per_stream_ms * tens
        guessed_ms += 1e5 * guess.per_context_token_ms * contexts
        return min(max((took_ms + anchor_ms) / (guessed_ms + anchor_ms), 1 / SCALE_MAX), SCALE_MAX)


def _terms(streams: float, context_tokens: float) -> Vector:
    """What the coefficients are of: 1, tens of streams, hundreds of thousands of context tokens."""
    return 1.0, streams / 10, context_tokens / 1e5


def _guess() -> list[tuple[list[float], list[float], float]]:
    return [(*squares(_terms(*at), GUESS_WEIGHT / len(PSEUDO)), StepModel().ms(*at)) for at in PSEUDO]


_GUESS = _guess()


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
