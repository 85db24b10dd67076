"""The recorded sessions as answers that were, or were not, followed by a prompt that goes on behind theirs.

What the recordings tell of an answer's end is its time and its length. Neither has the reason to finish nor names of
tools: public traces come without them.

- `claude_code`: sessions have no common clock, so they begin at random, one a minute on average, and go on at their
  recorded times. They were cut at the first prompt of more than 128,000 tokens: whether a long prompt that is the last
  of its session was asked for again is not known.
- `mooncake`: an hour of conversations at their recorded times, of which whole blocks of 512 tokens have names. When
  answers ended was not recorded: each counts as ended when it was asked for. What came behind the hour is not known.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from math import inf

from loadtest.common.traces import BYTES_PER_TOKEN, Request, shipped_trace
from loadtest.simulate.scenarios.recorded import BLOCK_TOKENS, OUTPUT_TOKENS_MAX, conversations
from loadtest.simulate.scenarios.scenario import CLAIM_SEEDS, TUNE_SEEDS, in_half
from loadtest.simulate.world.turns import Turn, prepare
from router.core.learned.reuse import TURN_BLOCKS_MAX
from router.core.prompts.blocks import BLOCK_BYTES

HALVES = {"tune": TUNE_SEEDS[0], "claim": CLAIM_SEEDS[0]}
"""Half of the sessions -> a seed that uses it (docs/evidence/race.md)."""
BEGIN_EVERY_S = 60.0
"""Mean time between the beginnings of two sessions."""
CUT_TOKENS = 100_000
"""Nothing is known of what follows a longer prompt that is the last of its session. Of the 57 sessions that end with a
shorter one, 9 were cut, too: their last prompt counts as never asked for again."""


@dataclass(slots=True, eq=False)
class Answer:
    """A prompt and what became of it. Times in seconds."""

    turn: Turn
    keys: Sequence[int]
    """The router's keys of the prompt's blocks, as far as the recording names them."""
    asked_s: float
    ended_s: float
    """When its answer ended."""
    told_s: float = inf
    """Time behind its end for which it is known whether it was asked for again."""
    again_s: float = inf
    """Time from its end until it was asked for again; infinite where it was not."""
    before_s: float = inf
    """Time from the end of the answer before, of which it is the next turn, until it was asked for; infinite where
    there is none."""


@dataclass(frozen=True, slots=True)
class Recording:
    """One half of one recording."""

    name: str
    half: str
    answers: tuple[Answer, ...]
    """In the order in which they were asked for."""
    learnt_s: float
    """Time at which a router that saw all of it is asked what it learned, while sessions still go on."""


def sessions(half: str) -> Recording:
    """Half of Claude Code's sessions."""
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
    return _followed("claude_code", half, answers, begins_s)


def mooncake(half: str) -> Recording:
    """Half of Mooncake's conversations."""
    seed = HALVES[half]
    named = conversations(shipped_trace("mooncake_conversation_whole")).items()
    pairs = _pairs((name, requests) for name, requests in named if in_half(name, seed))
    turns = prepare(sorted(pairs, key=lambda pair: pair[1].at_s), BLOCK_TOKENS, output_tokens_max=OUTPUT_TOKENS_MAX)
    ends_s = turns[-1].at_s
    answers = [Answer(turn, _whole(turn), turn.at_s, turn.at_s, ends_s - turn.at_s) for turn in turns]
    return _followed("mooncake", half, answers, ends_s)


RECORDINGS: dict[str, Callable[[str], Recording]] = {"claude_code": sessions, "mooncake": mooncake}
"""Name -> what reads a half of it."""


def _pairs(named: Iterable[tuple[str, Sequence[Request]]]) -> Iterator[tuple[str, Request]]:
    return ((name, request) for name, requests in named for request in requests)


def _answer(turn: Turn, begins_s: float) -> Answer:
    asked_s = begins_s + turn.at_s
    return Answer(turn, turn.chain, asked_s, asked_s + turn.request.answer_s)


def _whole(turn: Turn) -> Sequence[int]:
    """Keys of the recorded blocks that the prompt fills. The last block of most prompts is not full and has an id of
    its own, so the next turn would not be known by it."""
    tokens, block = turn.prompt_tokens, turn.request.block_tokens
    return turn.chain[: tokens // block * block * BYTES_PER_TOKEN // BLOCK_BYTES]


def _followed(name: str, half: str, answers: list[Answer], learnt_s: float) -> Recording:
    """Which prompt goes on behind which: as `router.core.learned.reuse` finds it, without a limit of memory."""
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
        else:  # too short to be known again
            answer.told_s = 0.0
    return Recording(name, half, tuple(answers), learnt_s)
