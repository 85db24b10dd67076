"""Model of an engine's decode step time: three parameters, learned from all replicas of a kind.

    step_ms(streams, context) = floor + b x streams + c x context

A step reads all weights once (the floor), computes one token for each stream, and reads the KV cache of every stream.
The sizes of these caches in tokens add up to `context`. The coefficients are fitted by non-negative least squares with
exponential forgetting. There is one observation for each streamed answer of at least ANSWER_TOKENS_MIN tokens:

- Its value is the time from the first token to the end of the answer, divided by the answer's tokens. The prefills that
  interrupted the stream are subtracted before (chunked prefill: Agrawal et al., "Sarathi-Serve", OSDI '24).
- The duration of these prefills is taken from the prefill model when the answer has ended, because the model may have
  been untrained when they began.
- Its variables are the mean number of streams and the mean context during that time.

If an engine produces several tokens per step (speculative decoding), the model describes the time per token, which is
the time that clients wait for.

Consecutive answers resemble each other: their streams and contexts hardly distinguish the three coefficients. A fit to
such answers alone may find that one more stream costs nothing, so that every request goes there. So the first guess
determines the proportions of the model, and observations first of all determine its scale. To the extent of the guess's
weight, the fit agrees with a model that has the guess's proportions and the step times observed.

A single replica's speed is this model times one factor (speed_factor.py).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from msgspec import Struct

from router.core.estimators.least_squares import PeerSums, Sums, Vector, squares

ANSWER_TOKENS_MIN = 8  # a shorter answer contains little information about a step
FORGET = 0.98  # weight of an observation fades to a third after about 50 more
GUESS_WEIGHT = 0.3  # weight of the first guess in observations
SCALE_WEIGHT = 3.0  # weight of the guess's own scale in observations: one answer may have waited for a compiler
SCALE_MAX = 64.0  # a fleet is at most this many times as slow, or as fast, as the guess
CLIPPED_FROM = 3  # observations after which further ones may be outliers
OUTLIER = 8.0  # an observation further than this factor from the model is clipped: a pause, not a step
STALL_SHARE_MAX = 0.9  # share of an answer's time that modelled prefills may explain: the prefill model may be wrong

PSEUDO = ((1, 2_000), (16, 32_000), (64, 512_000))  # (streams, context tokens) at which a fit agrees with the guess
SUPPORTS = ((0, 1, 2), (0, 1), (0, 2), (0,))  # a step without a floor is not possible


@dataclass(frozen=True, slots=True)
class StepModel:
    """Coefficients in milliseconds; the defaults are a first guess, of a 30B model on two H100."""

    floor_ms: float = 20.0
    per_stream_ms: float = 0.1
    per_context_token_ms: float = 5e-5

    def ms(self, streams: float, context_tokens: float) -> float:
        """Return the time of one step with `streams` streams and `context_tokens` in total."""
        return self.floor_ms + self.per_stream_ms * streams + self.per_context_token_ms * context_tokens

    def times(self, factor: float) -> StepModel:
        """Return the model of a replica that takes `factor` times as long."""
        a, b, c = self.floor_ms * factor, self.per_stream_ms * factor, self.per_context_token_ms * factor
        return StepModel(a, b, c)


@dataclass(slots=True)
class StepFit:
    """Learns a StepModel from (streams, context tokens, milliseconds per step)."""

    model: StepModel = field(default_factory=StepModel)
    observations: int = 0
    told: PeerSums | None = None  # observations of other routers
    _sums: Sums = field(default_factory=Sums)

    def observe(self, streams: float, context_tokens: float, step_ms: float) -> None:
        """Add one observation. Impossible times are ignored."""
        if step_ms <= 0:
            return
        if self.observations >= CLIPPED_FROM:
            expected_ms = self.model.ms(streams, context_tokens)
            step_ms = min(max(step_ms, expected_ms / OUTLIER), expected_ms * OUTLIER)
        self._sums.observe(_terms(streams, context_tokens), step_ms, 1.0, FORGET)
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
        scale = self._scale()
        best = self._sums.solve([(xx, x, scale * guess_ms) for xx, x, guess_ms in _GUESS], SUPPORTS, self.told)
        if best is not None:
            self.model = StepModel(best[0], best[1] / 10, best[2] / 1e5)

    def _scale(self) -> float:
        """Return the ratio of the observed step times to the first guess, including those of other routers."""
        xx, xy, guess = self._sums.xx, self._sums.xy, StepModel()
        answers, tens, contexts, took_ms = xx[0], xx[1], xx[2], xy[0]
        if self.told is not None:
            told_xx, told_xy = self.told.get_totals()
            answers, tens, contexts = answers + told_xx[0], tens + told_xx[1], contexts + told_xx[2]
            took_ms += told_xy[0]
        anchor_ms = SCALE_WEIGHT * guess.ms(*PSEUDO[1])
        guessed_ms = guess.floor_ms * answers + 10 * guess.per_stream_ms * tens
        guessed_ms += 1e5 * guess.per_context_token_ms * contexts
        return min(max((took_ms + anchor_ms) / (guessed_ms + anchor_ms), 1 / SCALE_MAX), SCALE_MAX)


def _terms(streams: float, context_tokens: float) -> Vector:
    """Return the variables of the coefficients: 1, tens of streams, hundreds of thousands of context tokens."""
    return 1.0, streams / 10, context_tokens / 1e5


def _guess() -> list[tuple[list[float], list[float], float]]:
    return [(*squares(_terms(*at), GUESS_WEIGHT / len(PSEUDO)), StepModel().ms(*at)) for at in PSEUDO]


_GUESS = _guess()


class ClockReading(Struct, gc=False):  # a Struct for speed: core/types/requests.py
    """State of a replica's clock at an answer's first token."""

    at_s: float
    streams_s: float
    context_s: float
    prefill_tokens: float


class DecodeInterval(Struct, gc=False):
    """Conditions of one answer's decoding between two times: duration, mean load, and prefill in between."""

    ms: float
    streams: float
    context_tokens: float
    prefill_tokens: float  # prefill of other prompts there in that time, in tokens of PrefillModel.pace_ms each

    def step_ms(self, tokens: int, pace_ms: float) -> float:
        """Return the time of a step if `tokens` came in this time, and prefill takes `pace_ms` per token."""
        return (self.ms - min(self.prefill_tokens * pace_ms, STALL_SHARE_MAX * self.ms)) / tokens


class DecodeClock:
    """Load of decoding on one replica: number and context of streams, now and integrated over time."""

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
        self.began_sum_s = 0.0  # sum of the start times of the streams
        self._at_s = 0.0
        self._streams_s = self._context_s = self._prefill_tokens = 0.0

    def join(self, prompt_tokens: int, prefill_tokens: float, now_s: float) -> ClockReading:
        """Add a stream: its prompt was prefilled (`prefill_tokens` at the model's pace), and its answer decodes from
        now on."""
        self._advance(now_s)
        self._prefill_tokens += prefill_tokens  # before the reading: an answer's own prefill does not interrupt it
        self.streams += 1
        self.context_tokens += prompt_tokens
        self.began_sum_s += now_s
        return ClockReading(now_s, self._streams_s, self._context_s, self._prefill_tokens)

    def set_peer_load(self, streams: int, context_tokens: int, prefill_tokens: float, now_s: float) -> None:
        """Set the streams of other routers from now on, and add their recent prefill, which interrupted all streams."""
        self._advance(now_s)
        self.other_streams, self.other_tokens = streams, context_tokens
        self._prefill_tokens += prefill_tokens

    def leave(self, prompt_tokens: int, mark: ClockReading, now_s: float, answer_tokens: float) -> DecodeInterval:
        """Remove a stream at the end of its answer. The mean context of a stream is its prompt and half of
        `answer_tokens`."""
        self._advance(now_s)
        self.streams -= 1
        self.context_tokens -= prompt_tokens
        self.began_sum_s = self.began_sum_s - mark.at_s if self.streams else 0.0
        ran_s = now_s - mark.at_s
        if ran_s <= 0:
            return DecodeInterval(0.0, 1.0, prompt_tokens, 0.0)
        streams = (self._streams_s - mark.streams_s) / ran_s
        context = (self._context_s - mark.context_s) / ran_s + streams * answer_tokens / 2
        return DecodeInterval(1e3 * ran_s, streams, context, self._prefill_tokens - mark.prefill_tokens)

    def running_s(self, now_s: float) -> float:
        """Return the seconds since their first tokens, summed over all streams."""
        return self.streams * now_s - self.began_sum_s

    def under_way_tokens(self, model: StepModel, now_s: float) -> float:
        """Return the tokens of answers in progress so far, by the decode step model of the replica."""
        streams, context_tokens = self.streams + self.other_streams, self.context_tokens + self.other_tokens
        return self.running_s(now_s) * 1e3 / model.ms(streams, context_tokens)

    def _advance(self, now_s: float) -> None:
        past_s = now_s - self._at_s
        if past_s > 0:
            self._streams_s += past_s * (self.streams + self.other_streams)
            self._context_s += past_s * (self.context_tokens + self.other_tokens)
        self._at_s = now_s
