"""The recorded sessions as answers, each with or without a later prompt that extends its own.

The recordings contain the time and the length of an answer at its end. They have neither the finish reason nor names of
tools: public traces come without them.

- `claude_code`: sessions have no common clock, so they begin at random, one per minute on average, and continue at
  their recorded times. They were cut at the first prompt of more than 128,000 tokens. So the next use of a long prompt
  at the end of its session is unknown.
- `mooncake`: an hour of conversations at their recorded times, in which whole blocks of 512 tokens have names. The end
  of answers was not recorded: each counts as ended at its request. Requests after the hour are unknown.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf

from loadtest.common.traces import BYTES_PER_TOKEN, Request, shipped_trace
from loadtest.simulate.engine.workload import SimRequest, prepare
from loadtest.simulate.scenarios.recorded import BLOCK_TOKENS, OUTPUT_TOKENS_MAX, conversations
from loadtest.simulate.scenarios.scenario import CLAIM_SEEDS, TUNE_SEEDS, in_half
from router.core.estimators.reuse import TURN_BLOCKS_MAX
from router.core.prompts.block_keys import BLOCK_BYTES

HALVES = {"tune": TUNE_SEEDS[0], "claim": CLAIM_SEEDS[0]}
"""Half of the sessions -> a seed that uses it (docs/evidence/race.md)."""
BEGIN_EVERY_S = 60.0
"""Mean time between the beginnings of two sessions."""
CUT_TOKENS = 100_000
"""The next use of a longer prompt at the end of its session is unknown.

Of the 57 sessions that end with a shorter one, 9 were cut, too: their last prompt counts as never used again.
"""


@dataclass(slots=True, eq=False)
class Answer:
    """A prompt and its outcome. Times in seconds."""

    turn: SimRequest
    keys: Sequence[int]
    """The router's keys of the prompt's blocks that the recording names."""
    asked_s: float
    ended_s: float
    """End of its answer."""
    told_s: float = inf
    """Time after its end in which a next use would have been recorded."""
    again_s: float = inf
    """Time from its end until the next use; infinite without one."""
    before_s: float = inf
    """Time from the end of the previous answer of the conversation until this request; infinite without one."""


@dataclass(frozen=True, slots=True)
class SessionTrace:
    """One half of one recording."""

    name: str
    half: str
    answers: tuple[Answer, ...]
    """In order of their requests."""
    learnt_s: float
    """Time at which a router that observed everything is queried, while sessions still continue."""


def sessions(half: str) -> SessionTrace:
    """Return half of Claude Code's sessions."""
    seed = HALVES[half]
    picked = [session for session in shipped_trace("claude_code_sessions").sessions if in_half(session.name, seed)]
    rng = random.Random(f"forecasts:{half}")
    rng.shuffle(picked)
    pairs = _pairs((each.name, each.requests) for each in picked)
    turns = iter(prepare(pairs, BLOCK_TOKENS, output_tokens_max=OUTPUT_TOKENS_MAX))
    begins_s, answers = 0.0, list[Answer]()
    for session in picked:
        begins_s += rng.expovariate(1 / BEGIN_EVERY_S)
        own = [_answer(turn, begins_s) for turn in islice(turns, len(session.requests))]
        if own[-1].turn.prompt_tokens > CUT_TOKENS:
            own[-1].told_s = 0.0
        answers += own
    return _link_prompts("claude_code", half, answers, begins_s)


def mooncake(half: str) -> SessionTrace:
    """Return half of Mooncake's conversations."""
    seed = HALVES[half]
    named = conversations(shipped_trace("mooncake_conversation_whole")).items()
    pairs = _pairs((name, requests) for name, requests in named if in_half(name, seed))
    turns = prepare(sorted(pairs, key=lambda pair: pair[1].at_s), BLOCK_TOKENS, output_tokens_max=OUTPUT_TOKENS_MAX)
    ends_s = turns[-1].at_s
    answers = [Answer(turn, _get_full_keys(turn), turn.at_s, turn.at_s, ends_s - turn.at_s) for turn in turns]
    return _link_prompts("mooncake", half, answers, ends_s)


RECORDINGS: dict[str, Callable[[str], SessionTrace]] = {"claude_code": sessions, "mooncake": mooncake}
"""Name -> reader of a half of it."""


def _pairs(named: Iterable[tuple[str, Sequence[Request]]]) -> Iterator[tuple[str, Request]]:
    return ((name, request) for name, requests in named for request in requests)


def _answer(turn: SimRequest, begins_s: float) -> Answer:
    asked_s = begins_s + turn.at_s
    return Answer(turn, turn.chain, asked_s, asked_s + turn.request.answer_s)


def _get_full_keys(turn: SimRequest) -> Sequence[int]:
    """Return keys of the recorded blocks that the prompt fills.

    The last block of most prompts is not full and has a unique id, so it would not identify the next turn.
    """
    tokens, block = turn.prompt_tokens, turn.request.block_tokens
    return turn.chain[: tokens // block * block * BYTES_PER_TOKEN // BLOCK_BYTES]


def _link_prompts(name: str, half: str, answers: list[Answer], learnt_s: float) -> SessionTrace:
    """Link each prompt to the one that it extends, as `router.core.estimators.reuse` does, without a memory limit."""
    answers.sort(key=lambda answer: answer.asked_s)
    marks: dict[int, Answer] = {}
    for answer in answers:
        keys = answer.keys
        deepest = next(filter(marks.__contains__, islice(reversed(keys), TURN_BLOCKS_MAX)), None)
        if deepest is not None:
            before = marks.pop(deepest)
            before.again_s = answer.before_s = max(0.0, answer.asked_s - before.ended_s)
        if keys:
            marks[keys[-1]] = answer
        else:  # too short to be recognized again
            answer.told_s = 0.0
    return SessionTrace(name, half, tuple(answers), learnt_s)
