"""The corpus of damage: agent sessions of which it is known where and why each prompt differs from the one before.

A *deployment* is one product: a system prompt, tools, an API, a few sessions that share them, and at most one damage.
Shapes of sessions (turns, tokens that each adds, length of answers, time between them) are those of recorded Claude
Code sessions; texts are made up (prose.py). Sessions of all deployments of a seed run at the same time.
"""

from __future__ import annotations

import gzip
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import msgspec

from loadtest.common.traces import SessionLine
from router.core.types.cache_misses import DifferenceKind
from tests.core.insights.conversations import MESSAGES, PATHS, RESPONSES, Call, Message, Style, Talk, Tool, body, pieces
from tests.core.insights.damage import Apply, Damage, Moment
from tests.core.insights.prose import Prose, system_prompt, tool_names, tool_schema
from tests.core.insights.released import RELEASED
from tests.core.insights.rewriting import ALL
from tests.core.insights.truth import Request, judged

RECORDED = Path(__file__).parents[3] / "loadtest" / "data" / "claude_code_sessions.jsonl.gz"
TURNS_MIN, TURNS_MAX = 4, 12
SESSIONS = 2, 3  # of a deployment, at least and at most
SCALE, HEAD_SCALE = 0.25, 0.06  # of the recorded tokens of turns, and of what is before them
CLEAN = ("append", "retry", "regenerate", "branch", "agents", "family", "again")
# They happen once a session, so that more sessions are needed to see as many.
RARE = (
    DifferenceKind.TOOL_ADDED,
    DifferenceKind.TOOL_REMOVED,
    DifferenceKind.WHITESPACE,
    DifferenceKind.TRUNCATED_HISTORY,
    DifferenceKind.OTHER,
)


# Shapes


@dataclass(frozen=True, slots=True)
class Shape:
    """What a recorded session was like; tokens."""

    head: int
    added: tuple[int, ...]  # by each turn
    answers: tuple[int, ...]
    at_s: tuple[float, ...]


@cache
def shapes() -> tuple[Shape, ...]:
    """Of the recorded sessions that are long enough; what sub-agents sent is left out."""
    rows: dict[str, list[SessionLine]] = {}
    for line in gzip.decompress(RECORDED.read_bytes()).splitlines():
        row = msgspec.json.decode(line, type=SessionLine)
        if row.a is None:
            rows.setdefault(row.s, []).append(row)
    return tuple(_shape(lines) for lines in rows.values() if len(lines) >= TURNS_MIN)


def _shape(lines: Sequence[SessionLine]) -> Shape:
    grown = [b.input_tokens - a.input_tokens - a.out for a, b in itertools.pairwise(lines)]
    return Shape(
        lines[0].input_tokens,
        (200, *(max(20, tokens) for tokens in grown)),
        tuple(max(10, line.out) for line in lines),
        tuple(line.t - lines[0].t for line in lines),
    )


# Honest sessions


class _Maker:
    """Makes what one session would honestly send: append-only."""

    def __init__(self, prose: Prose, shape: Shape, base: Talk, asks: float) -> None:
        self.prose, self.shape, self.base, self.asks = prose, shape, base, asks
        self.calls = 0

    def talks(self, turns: int) -> list[Talk]:
        """One a turn."""
        messages: tuple[Message, ...] = (Message("user", self.prose.question(self._size(self.shape.added[0], 1500))),)
        made = [replace(self.base, messages=messages)]
        for turn in range(1, turns):
            messages += self.step(turn)
            made.append(replace(self.base, messages=messages))
        return made

    def step(self, turn: int) -> tuple[Message, ...]:
        """What the model answered, and what came back: a question, or results of tools."""
        size, said = self._size(self.shape.added[turn], 6000), self._size(self.shape.answers[turn - 1], 2500)
        rng = self.prose.rng
        if not self.base.tools or rng.random() < self.asks:
            return (Message("assistant", self.prose.prose(said)), Message("user", self.prose.question(size)))
        count = 2 if rng.random() < 0.2 else 1
        calls = tuple(self._call(rng.choice(self.base.tools)) for _ in range(count))
        text = self.prose.prose(min(said, 300)) if rng.random() < 0.6 else ""
        results = tuple(Message("tool", self.prose.result(size // count), call_id=call.id) for call in calls)
        return (Message("assistant", text, calls), *results)

    def _size(self, tokens: int, most: int) -> int:
        return max(60, min(most, int(4 * tokens * SCALE)))

    def _call(self, tool: Tool) -> Call:
        self.calls += 1
        names = list(tool.schema["properties"])
        self.prose.rng.shuffle(names)
        arguments = {name: self._argument(tool.schema["properties"][name]["type"]) for name in names[:4]}
        return Call(f"call_{self.prose.digits(12)}_{self.calls}", tool.name, arguments)

    def _argument(self, kind: str) -> object:
        rng = self.prose.rng
        if kind in ("integer", "number"):
            return rng.randint(0, 5000)
        if kind == "object":
            return {"value": self.prose.word(), "field": self.prose.name()}
        return rng.random() < 0.5 if kind == "boolean" else f"src/{self.prose.name()}.py"


def _disturbed(clean: str, talks: list[Talk], maker: _Maker) -> list[Talk]:
    """What clients do that is no damage: everything that was said stays, or nothing behind it is said again.

    `agents`: several of one kind at the same time. `family`: one that calls others of another kind, which say that
    they belong to its session. `again`: a session begins just as another did.
    """
    rng = maker.prose.rng
    at = rng.randrange(1, len(talks) - 1)
    if clean == "retry":
        return [*talks[: at + 1], talks[at], *talks[at + 1 :]]
    if clean in ("regenerate", "branch"):  # back to an earlier turn, on with something else
        start = at if clean == "regenerate" else rng.randrange(at)
        messages = talks[start].messages
        made = talks[: at + 2]
        for turn in range(at + 2, len(talks) + 1):
            messages += maker.step(min(turn, len(talks) - 1))
            made.append(replace(talks[0], messages=messages))
        return made
    return talks


# Deployments


class _Deployment:
    """A product and its sessions."""

    def __init__(self, seed: str, damage: Damage | None, clean: str = "") -> None:
        self.seed, self.damage, self.clean = seed, damage, clean
        self.prose = Prose(seed)
        self.rng = self.prose.rng
        self.name = f"{damage.kind}: {damage.name}" if damage else f"clean: {clean}"
        self.base = self._base()
        self.agent = self._base(self.path) if clean == "family" else self.base
        self.apply: Apply = damage.make(self.prose, self.base) if damage else lambda talk, moment: talk

    def _base(self, path: str = "") -> Talk:
        rng, tools_min = self.rng, self.damage.tools_min if self.damage else 0
        self.path = path or rng.choice(PATHS)
        count = max(tools_min, rng.choice((0, 3, 5, 8, 12, 20, 40 if rng.random() < 0.3 else 6)))
        tools = [Tool(name, self.prose.prose(120), tool_schema(self.prose)) for name in tool_names(self.prose, count)]
        size = int(rng.choice(shapes()).head * 4 * HEAD_SCALE * rng.uniform(0.3, 1.6))
        system = system_prompt(self.prose, size)
        parts = (system, self.prose.prose(300)) if self.path != RESPONSES and rng.random() < 0.25 else (system,)
        return Talk(tuple(tools), parts, ())

    def sent(self) -> list[list[Request]]:
        """Of each session, its requests; without truth."""
        together = self.clean in ("agents", "family")
        count = self.rng.randint(*SESSIONS) + 2 * together
        count += 2 if self.damage and (self.damage.kind in RARE or self.damage in RELEASED) else 0
        start_s = self.rng.uniform(0, 3600)
        return [self._session(i, start_s + i * (0.4 if together else self.rng.uniform(20, 900))) for i in range(count)]

    def _session(self, index: int, start_s: float) -> list[Request]:
        rng, gaps = self.rng, self.damage.gaps if self.damage else 1.0
        shape = rng.choice(shapes())
        talks = self._talks(index, shape)
        name = f"{self.seed}/{index}"
        known_as = f"{self.seed}/0" if self.clean == "family" else name  # agents go by the name of who called them
        style = self._style(known_as)
        hint = known_as if (rng.random() < 0.5 or self.clean == "family") and not style.key else ""
        state: dict[str, object] = {}
        made: list[Request] = []
        for turn, talk in enumerate(talks):
            at_s = start_s + gaps * shape.at_s[min(turn, len(shape.at_s) - 1)] + turn
            fresh, own = random.Random(f"{name}/{turn}"), random.Random(name)
            given = self.apply(talk, Moment(turn, len(talks), at_s, index, fresh, own, state))
            request = body(given, style, turn, f"{fresh.getrandbits(64):016x}")
            written = tuple(pieces(given, style))
            text = b"".join(written)
            made.append(Request(name, turn, at_s, self.name, given, style, hint, request, written, text))
        return made

    def _talks(self, index: int, shape: Shape) -> list[Talk]:
        """What a session honestly has in hand, turn by turn."""
        turns = min(len(shape.at_s), self.rng.randint(TURNS_MIN, TURNS_MAX))
        prose = Prose(f"{self.seed}/{0 if self.clean == 'again' else index}")
        base = self.agent if index else self.base
        maker = _Maker(prose, shape, base, self.damage.asks if self.damage else 0.35)
        return _disturbed(self.clean, maker.talks(turns), maker)

    def _style(self, session: str) -> Style:
        rng = random.Random(f"{self.seed}/style")  # one client program
        anthropic = self.path == MESSAGES
        parts = rng.random() < 0.4
        escaped, spaced = rng.random() < 0.5, rng.random() < 0.5
        marked, billed = anthropic and parts, anthropic and rng.random() < 0.3
        keyed = rng.random() < 0.25
        return Style(self.path, parts, escaped, spaced, marked, billed, session if keyed else "")


def corpus(seed: int) -> list[Request]:
    """All requests of a seed, in the order of time: twelve damaged deployments, one that a release damages, and clean
    ones of each sort.

    Even seeds are for development, odd ones are held out. Which variant of a kind a seed has goes by turns, so that
    as many seeds of one sort as there are variants show all of them.
    """
    made: list[Request] = []
    for kind, variants in ALL.items():
        damage = variants[seed // 2 % len(variants)]
        made += judged(_Deployment(f"{seed}/{kind}", damage).sent(), damage)
    release = RELEASED[seed // 2 % len(RELEASED)]
    made += judged(_Deployment(f"{seed}/released", release).sent(), release)
    for clean in CLEAN:
        made += judged(_Deployment(f"{seed}/{clean}", None, clean).sent(), None)
    return sorted(made, key=lambda request: request.at_s)
