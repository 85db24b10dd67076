"""Twelve kinds of damage that agent frameworks do to their own prompts, each in several ways.

A damage is made once for a deployment (what its developers wrote) and then applied to every request: it takes what an
honest, append-only client would send and gives what this one sends. It declares where it works; it says nothing of
offsets: those follow from the two prompts (corpus.py), and a difference that is not where it was declared is an error
of the corpus.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

from router.core.types.cache_misses import DifferenceKind
from tests.core.insights.conversations import Call, Talk, Tool
from tests.core.insights.prose import Prose, tool_schema

START = datetime(2026, 11, 20, 22, 31, 7, 412_000, tzinfo=UTC)
BASE62 = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"


@dataclass(slots=True)
class Moment:
    """When a request is made."""

    turn: int  # from 0
    turns: int
    at_s: float
    session: int
    fresh: random.Random  # another for every request
    own: random.Random  # begins alike for every request of a session: its ids, its passages
    state: dict[str, Any] = field(default_factory=dict)  # of the session, from request to request

    @property
    def late(self) -> bool:
        """Whether it is the time for something that happens once, in the middle of a session."""
        return self.turn >= max(2, self.turns // 2)


Apply = Callable[[Talk, Moment], Talk]
Make = Callable[[Prose, Talk], Apply]


@dataclass(frozen=True, slots=True)
class Damage:
    """One way of one kind."""

    kind: DifferenceKind
    name: str
    region: str  # where it works: "tools", "system", "user" (the first message of the user's), "history"
    make: Make
    tools_min: int = 0
    asks: float = 0.35  # share of turns that are the user's; the others are results of tools
    gaps: float = 1.0  # how much slower than recorded the session goes
    templated: bool = False  # whether the user's first message is the same in all sessions, but for the damage


# A line that changes, in a place of the prompt


def _into(where: str, prose: Prose, talk: Talk) -> Callable[[Talk, str], Talk]:
    """How a line gets into the prompt, at a place that was chosen once."""
    pick, middle = prose.rng.random(), prose.rng.random()

    def put(talk: Talk, line: str) -> Talk:
        if where == "user":
            at = next(i for i, message in enumerate(talk.messages) if message.role == "user")
            return talk.with_message(at, replace(talk.messages[at], text=f"{line}\n\n{talk.messages[at].text}"))
        if where == "tool":
            at = int(pick * len(talk.tools))
            tool = talk.tools[at]
            changed = replace(tool, description=f"{tool.description} {line}. Ask if unsure.")
            return talk.with_tools([*talk.tools[:at], changed, *talk.tools[at + 1 :]])
        paragraphs = talk.system[0].split("\n\n")
        at = {"top": 0, "middle": max(1, int(middle * len(paragraphs))), "end": len(paragraphs)}[where]
        return talk.with_system("\n\n".join([*paragraphs[:at], line, *paragraphs[at:]]))

    return put


def _line(kind: DifferenceKind, where: str, name: str, line: Callable[[Moment], str], **options: Any) -> Damage:
    def make(prose: Prose, talk: Talk) -> Apply:
        put = _into(where, prose, talk)
        return lambda talk, moment: put(talk, line(moment))

    region = {"user": "user", "tool": "tools"}.get(where, "system")
    return Damage(kind, f"{name}, {where}", region, make, tools_min=4 if where == "tool" else 0, **options)


def _now(moment: Moment) -> datetime:
    return START + timedelta(seconds=moment.at_s)


def _twelve(at: datetime) -> str:
    return at.strftime("%A, %B %d, %Y, %I:%M %p")


def _epoch_ms(moment: Moment) -> int:
    return int(_now(moment).timestamp() * 1000)


def _job(prose: Prose, talk: Talk) -> Apply:
    """A task that is given again and again, by a program, with the time at which it was started."""
    task = prose.bullets(1500)

    def apply(talk: Talk, moment: Moment) -> Talk:
        started = moment.state.setdefault("started", f"Scheduled run of {_now(moment):%Y-%m-%d %H:%M:%S} UTC")
        return talk.with_message(0, replace(talk.messages[0], text=f"{started}\n\n{task}"))

    return apply


T, ID, N, Z = DifferenceKind.TIMESTAMP, DifferenceKind.IDENTIFIER, DifferenceKind.COUNTER, DifferenceKind.OTHER
TIMESTAMPS = [
    _line(T, "top", "ISO 8601", lambda m: f"Current time: {_now(m).isoformat(timespec='seconds')}"),
    _line(T, "middle", "in words", lambda m: f"Today is {_twelve(_now(m))}."),
    _line(T, "end", "RFC 2822", lambda m: f"<env>\nDate: {_now(m):%a, %d %b %Y %H:%M:%S} GMT\nPlatform: linux\n</env>"),
    _line(T, "user", "with a space", lambda m: f"[{_now(m):%Y-%m-%d %H:%M:%S}]"),
    _line(T, "tool", "milliseconds since 1970", lambda m: f"Current timestamp: {_epoch_ms(m)}"),
    _line(T, "top", "date alone", lambda m: f"Today's date: {_now(m):%Y-%m-%d}", gaps=300.0),
    _line(T, "middle", "microseconds", lambda m: f"generated_at={_now(m).isoformat()}"),
    _line(T, "end", "American", lambda m: f"The local time is {_now(m):%m/%d/%Y, %I:%M:%S %p}."),
    _line(T, "top", "seconds since 1970", lambda m: f'<context now="{int(_now(m).timestamp())}" tz="UTC"/>'),
    _line(T, "user", "time of day", lambda m: f"(It is {_now(m):%H:%M} now.)", gaps=5.0),
    _line(T, "tool", "German", lambda m: f"Stand: {_now(m):%d.%m.%Y %H:%M:%S}"),
    Damage(T, "job started, user", "user", _job, templated=True),
    _line(T, "end", "day and month in words", lambda m: f"Date: {_now(m):%d %B %Y}", gaps=300.0),
]


def _uuid(rng: random.Random) -> str:
    return str(UUID(int=rng.getrandbits(128), version=4))


def _token(rng: random.Random, alphabet: str, length: int) -> str:
    return "".join(rng.choices(alphabet, k=length))


HEX = "0123456789abcdef"


def _nonce(prose: Prose, talk: Talk) -> Apply:
    """Tags around what is not to be trusted, which nobody can guess."""

    def apply(talk: Talk, moment: Moment) -> Talk:
        tag = f"untrusted-{_token(moment.fresh, HEX, 12)}"
        paragraphs = talk.system[0].split("\n\n")
        return talk.with_system("\n\n".join([paragraphs[0], f"<{tag}>", *paragraphs[1:], f"</{tag}>"]))

    return apply


IDENTIFIERS = [
    _line(ID, "top", "UUID of the request", lambda m: f"Request ID: {_uuid(m.fresh)}"),
    _line(ID, "end", "trace id", lambda m: f"trace_id={_token(m.fresh, HEX, 32)}"),
    _line(ID, "middle", "base62 of the session", lambda m: f"Session: sess_{_token(m.own, BASE62, 24)}"),
    _line(ID, "user", "request id", lambda m: f'<request id="req_{_token(m.fresh, BASE62, 20)}">'),
    _line(ID, "tool", "container", lambda m: f"Runs in container {_token(m.fresh, HEX, 12)}"),
    Damage(ID, "tags with a nonce, system", "system", _nonce),
    _line(ID, "top", "ULID", lambda m: f"[run 01J{_token(m.fresh, '0123456789ABCDEFGHJKMNPQRSTVWXYZ', 23)}]"),
    _line(ID, "middle", "UUID of the session", lambda m: f"Your workspace is /home/agent/{_uuid(m.own)}/src."),
]


def _tokens_left(moment: Moment) -> int:
    spent = moment.state.get("spent", 0) + moment.fresh.randint(300, 9000)
    moment.state["spent"] = spent
    return 200_000 - moment.session * 713 - int(spent)


COUNTERS = [
    _line(N, "top", "turn", lambda m: f"Turn {m.turn + 1} of {m.turns + 12}."),
    _line(N, "end", "tokens left", lambda m: f"Token budget: {_tokens_left(m)} tokens left"),
    _line(N, "user", "calls left", lambda m: f"You have {max(0, 40 - m.turn)} tool calls left."),
    _line(N, "tool", "step", lambda m: f"step={m.turn + 1}"),
    _line(N, "middle", "messages", lambda m: f"This is message {2 * m.turn + 7} of {3 * m.turn + 31} in this thread."),
    _line(N, "end", "attempt", lambda m: f"<state>\niteration: {m.turn}\nmode: autonomous\n</state>"),
    _line(N, "top", "unread", lambda m: f"The user has {m.turn * 3 + 2} unread notifications."),
]


def _phase(moment: Moment, words: Sequence[str]) -> str:
    return words[int(moment.late) + int(moment.turn >= moment.turns - 1)]


PERSONAS = ("Answer formally and in full sentences.", "Be playful, use short answers.", "Write like a lawyer would.")
MODES = (
    "You are in plan mode: propose, do not edit.",
    "You are in edit mode: apply changes directly.",
    "You are in review mode: criticise only.",
)
OTHERS = [
    _line(Z, "top", "persona", lambda m: _phase(m, PERSONAS)),
    _line(Z, "middle", "language", lambda m: f"Preferred language: {_phase(m, ('English', 'Portuguese', 'Welsh'))}."),
    _line(Z, "end", "mode", lambda m: _phase(m, MODES)),
    _line(Z, "top", "tier", lambda m: f"The customer's plan is {_phase(m, ('Basic', 'Professional', 'Enterprise'))}."),
    _line(Z, "end", "directory", lambda m: f"cwd: /srv/{_phase(m, ('shop/web', 'billing/api', 'docs/site'))}"),
    _line(Z, "middle", "branch", lambda m: f"Git branch: {_phase(m, ('main', 'feature/login', 'hotfix/cart'))}"),
    _line(Z, "tool", "owner", lambda m: f"Owned by {_phase(m, ('payments', 'logistics', 'research'))}"),
]


# Tools


def _reordering(order: Callable[[list[Tool], Moment], list[Tool]]) -> Make:
    return lambda prose, talk: lambda talk, moment: talk.with_tools(order(list(talk.tools), moment))


def _shuffled(tools: list[Tool], moment: Moment) -> list[Tool]:
    moment.fresh.shuffle(tools)
    return tools


def _rotated(tools: list[Tool], moment: Moment) -> list[Tool]:
    at = moment.fresh.randrange(len(tools))
    return tools[at:] + tools[:at]


def _swapped(tools: list[Tool], moment: Moment) -> list[Tool]:
    """Two neighbours, from some time on."""
    if moment.late:
        at = len(tools) // 2
        tools[at - 1], tools[at] = tools[at], tools[at - 1]
    return tools


def _sorted_late(tools: list[Tool], moment: Moment) -> list[Tool]:
    return sorted(tools, key=lambda tool: tool.name[::-1]) if moment.late else tools


def _servers(tools: list[Tool], moment: Moment) -> list[Tool]:
    """Tools of three servers, in the order in which the servers answered."""
    third = max(1, len(tools) // 3)
    groups = [tools[:third], tools[third : 2 * third], tools[2 * third :]]
    moment.fresh.shuffle(groups)
    return [tool for group in groups for tool in group]


def _adding(at: Callable[[int], int], count: int) -> Make:
    def make(prose: Prose, talk: Talk) -> Apply:
        news = [Tool(f"{prose.name()}", prose.prose(150), tool_schema(prose)) for _ in range(count)]
        place = at(len(talk.tools))
        return lambda talk, moment: (
            talk.with_tools([*talk.tools[:place], *news, *talk.tools[place:]]) if moment.late else talk
        )

    return make


def _removing(keep: Callable[[list[Tool]], list[Tool]]) -> Make:
    return lambda prose, talk: lambda talk, moment: talk.with_tools(keep(list(talk.tools))) if moment.late else talk


def _without(tools: list[Tool], at: int) -> list[Tool]:
    return [*tools[:at], *tools[at + 1 :]]


def _none_at_last(prose: Prose, talk: Talk) -> Apply:
    return lambda talk, moment: talk.with_tools(()) if moment.turn == moment.turns - 1 else talk


def _tools(kind: DifferenceKind, name: str, make: Make, tools_min: int = 5) -> Damage:
    return Damage(kind, name, "tools", make, tools_min)


ORDERS = [
    _tools(DifferenceKind.TOOL_ORDER, "shuffled for every request", _reordering(_shuffled)),
    _tools(DifferenceKind.TOOL_ORDER, "begun somewhere else", _reordering(_rotated)),
    _tools(DifferenceKind.TOOL_ORDER, "two neighbours swapped", _reordering(_swapped)),
    _tools(DifferenceKind.TOOL_ORDER, "sorted from some time on", _reordering(_sorted_late)),
    _tools(DifferenceKind.TOOL_ORDER, "servers as they answer", _reordering(_servers), 9),
]
ADDED = [
    _tools(DifferenceKind.TOOL_ADDED, "one behind the others", _adding(lambda n: n, 1)),
    _tools(DifferenceKind.TOOL_ADDED, "one before the others", _adding(lambda n: 0, 1)),
    _tools(DifferenceKind.TOOL_ADDED, "one in the middle", _adding(lambda n: n // 2, 1)),
    _tools(DifferenceKind.TOOL_ADDED, "a server's three", _adding(lambda n: n // 3, 3)),
]
REMOVED = [
    _tools(DifferenceKind.TOOL_REMOVED, "the first", _removing(lambda tools: tools[1:])),
    _tools(DifferenceKind.TOOL_REMOVED, "one in the middle", _removing(lambda tools: _without(tools, len(tools) // 2))),
    _tools(DifferenceKind.TOOL_REMOVED, "the last", _removing(lambda tools: tools[:-1])),
    _tools(DifferenceKind.TOOL_REMOVED, "a server's", _removing(lambda tools: tools[: len(tools) // 2])),
    _tools(DifferenceKind.TOOL_REMOVED, "none for the last answer", _none_at_last),
]


def _reversed(value: dict[str, Any]) -> dict[str, Any]:
    return dict(reversed(value.items()))


def _mixed(value: dict[str, Any], rng: random.Random) -> dict[str, Any]:
    names = list(value)
    rng.shuffle(names)
    return {name: value[name] for name in names}


def _schemas(change: Callable[[dict[str, Any], Moment], dict[str, Any]]) -> Make:
    def apply(talk: Talk, moment: Moment) -> Talk:
        return talk.with_tools([replace(tool, schema=change(tool.schema, moment)) for tool in talk.tools])

    return lambda prose, talk: apply


def _properties(schema: dict[str, Any], moment: Moment) -> dict[str, Any]:
    return schema | {"properties": _mixed(schema["properties"], moment.fresh)}


def _inner(schema: dict[str, Any], moment: Moment) -> dict[str, Any]:
    """Keys of each property's own schema, from some time on."""
    within = {name: _reversed(each) for name, each in schema["properties"].items()}
    return schema | {"properties": within} if moment.late else schema


def _outer(schema: dict[str, Any], moment: Moment) -> dict[str, Any]:
    return dict(sorted(schema.items())) if moment.late else schema


def _sorted_arguments(prose: Prose, talk: Talk) -> Apply:
    """Calls are stored in a database that sorts keys: the latest is as the model made it, those before it are not."""

    def apply(talk: Talk, moment: Moment) -> Talk:
        last = max((i for i, message in enumerate(talk.messages) if message.calls), default=-1)
        made = [
            replace(message, calls=tuple(_sorted_call(call) for call in message.calls)) if i < last else message
            for i, message in enumerate(talk.messages)
        ]
        return replace(talk, messages=tuple(made))

    return apply


def _sorted_call(call: Call) -> Call:
    return replace(call, arguments=dict(sorted(call.arguments.items())))


KEYS = [
    Damage(DifferenceKind.KEY_ORDER, "properties, every request", "tools", _schemas(_properties), 4),
    Damage(DifferenceKind.KEY_ORDER, "arguments sorted when stored", "history", _sorted_arguments, 4, asks=0.2),
    Damage(DifferenceKind.KEY_ORDER, "a property's own keys", "tools", _schemas(_inner), 4),
    Damage(DifferenceKind.KEY_ORDER, "schema sorted from some time on", "tools", _schemas(_outer), 4),
]
