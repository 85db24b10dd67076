"""Learned speeds and sizes of one base model: prefill and decode times of its engines, and the sizes of its requests.

Replicas that serve the same base models share one ModelSpeeds. Each replica's own speed differs from it by one factor
(speed_factor.py). Replicas of other models have another one: a 70B model and an 8B model differ by a factor of ten, and
the mean of both describes neither.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from router.core.estimators.decode_step import StepFit
from router.core.estimators.output_length import OutputLength
from router.core.estimators.prefill import PrefillFit, PrefillModel
from router.core.estimators.tier_load import LoadFits
from router.core.estimators.ttft_quantiles import TtftQuantiles

WORK_FADE = 0.95  # part of a mean that remains after another request
ANSWER_FADE = 0.995  # part of a longest time that remains after another answer
TIE_TOKENS = 1_000  # prices within the learned time of this many prefill tokens cannot be distinguished
BACKLOG_TOKENS = 16_000  # unit of the backlog: about a second of prefill on the GPUs of the first study


@dataclass(slots=True)
class ModelSpeeds:
    """Speeds learned from all replicas that serve the same base models. Times are in milliseconds."""

    prefill: PrefillFit = field(default_factory=PrefillFit)
    steps: StepFit = field(default_factory=StepFit)
    answer_tokens: OutputLength = field(default_factory=OutputLength)
    first_tokens: TtftQuantiles = field(default_factory=TtftQuantiles)
    first_tokens_split: TtftQuantiles = field(default_factory=TtftQuantiles)  # for requests that two replicas serve
    answers: int = 0  # answers that ended well
    mean_work_ms: float = 0.0  # mean prefill time of a request's uncached part
    mean_prompt_tokens: float = 0.0
    mean_open_ms: float = 0.0  # mean duration of a lease, from placement to end
    mean_decode_ms: float = 0.0  # mean duration of a streamed answer, from its first token to its end
    mean_answer_tokens: float = 0.0
    decodes: int = 0  # number of answers in `mean_decode_ms`
    answer_ms_max: float = 0.0  # longest recent lease
    token_ms_max: float = 0.0  # longest recent lease divided by the tokens of its answer
    longest_tokens: float = 0.0  # most prompt tokens recently computed for one request
    short_ms: float = 0.0  # mean duration of prefills that are too short to learn a speed from
    shorts: int = 0  # number of prefills in `short_ms`
    loads: LoadFits = field(default_factory=LoadFits)  # times of loads from tiers
    _units_of: PrefillModel | None = None
    _tie_ms: float = 0.0
    _unit_ms: float = 0.0

    def forget_other(self, router: str) -> None:
        """Drop the observations of another router that is gone."""
        self.prefill.forget(router)
        self.steps.forget(router)
        self.answer_tokens.forget(router)

    def units(self) -> tuple[float, float]:
        """Return (`tie_ms`, within which prices cannot be distinguished; `unit_ms`, the unit of a backlog)."""
        model = self.prefill.model
        if self._units_of is not model:
            self._units_of = model
            self._tie_ms, self._unit_ms = model.ms(TIE_TOKENS, 0) - model.floor_ms, model.ms(BACKLOG_TOKENS, 0)
        return self._tie_ms, self._unit_ms

    def note_response(self, open_ms: float, tokens: int, uncached_tokens: int) -> None:
        """Record an answer to a client's request that ended well.

        - `open_ms`: duration of its lease.
        - `tokens`: tokens of the answer.
        - `uncached_tokens`: computed tokens of its prompt.
        """
        self.answers += 1
        self.answer_tokens.note_length(tokens)
        self.answer_ms_max = _faded_max(self.answer_ms_max, open_ms)
        self.token_ms_max = _faded_max(self.token_ms_max, open_ms / tokens if tokens else open_ms)
        self.longest_tokens = _faded_max(self.longest_tokens, uncached_tokens)
        fade = max(1 - WORK_FADE, 1 / self.answers)
        self.mean_answer_tokens += fade * (tokens - self.mean_answer_tokens)
        self.mean_open_ms += fade * (open_ms - self.mean_open_ms)

    def note_prefill(self, uncached_tokens: int) -> None:
        """Record the computed tokens of a prompt that is answered by another replica, or not at all."""
        self.longest_tokens = max(self.longest_tokens, uncached_tokens)

    def note_unobserved(self, open_ms: float) -> None:
        """Record the end, after `open_ms`, of an answer that did not pass this router."""
        self.answer_ms_max = _faded_max(self.answer_ms_max, open_ms)
        self.mean_open_ms += (1 - WORK_FADE) * (open_ms - self.mean_open_ms)

    def note_decode(self, decode_ms: float) -> None:
        """Record an answer that streamed for `decode_ms` after its first token."""
        self.decodes += 1
        self.mean_decode_ms += max(1 - WORK_FADE, 1 / self.decodes) * (decode_ms - self.mean_decode_ms)

    def note_request(self, prompt_tokens: int, prefill_ms: float) -> None:
        """Record a request's prompt tokens and its estimated prefill time."""
        self.mean_prompt_tokens += (1 - WORK_FADE) * (prompt_tokens - self.mean_prompt_tokens)
        self.mean_work_ms += (1 - WORK_FADE) * (prefill_ms - self.mean_work_ms)

    def note_short_prefill(self, service_ms: float) -> None:
        """Record a prefill that was too short to learn a speed from."""
        self.shorts += 1
        self.short_ms += max(1 - WORK_FADE, 1 / self.shorts) * (service_ms - self.short_ms)


def _faded_max(known: float, new: float) -> float:
    known *= ANSWER_FADE
    return max(known, new)
