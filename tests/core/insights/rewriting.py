"""Damage to what was said already: white space, edited and truncated history, passages in another order."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace

from router.core.types.cache_misses import DifferenceKind
from tests.core.insights.conversations import Message, Talk
from tests.core.insights.damage import (
    ADDED,
    COUNTERS,
    IDENTIFIERS,
    KEYS,
    ORDERS,
    OTHERS,
    REMOVED,
    TIMESTAMPS,
    Apply,
    Damage,
    Make,
    Moment,
)
from tests.core.insights.prose import Prose

Edit = Callable[[Message], Message]


def _each(edit: Callable[[Message, int, Sequence[Message], Moment], Message]) -> Make:
    """Every message by itself, knowing where it stands."""

    def apply(talk: Talk, moment: Moment) -> Talk:
        all_ = talk.messages
        return replace(talk, messages=tuple(edit(message, i, all_, moment) for i, message in enumerate(all_)))

    return lambda prose, talk: apply


def _text(message: Message, text: str) -> Message:
    return replace(message, text=text)


def _last(messages: Sequence[Message], role: str) -> int:
    return max((i for i, message in enumerate(messages) if message.role == role), default=-1)


def _early_tool(messages: Sequence[Message]) -> int:
    """The first result of a tool, or what the assistant said first where there is none."""
    found = [i for i, message in enumerate(messages) if message.role == "tool"]
    return found[0] if found else next((i for i, message in enumerate(messages) if message.role == "assistant"), 0)


def _once(change: Callable[[str, Moment], str]) -> Make:
    """One old message, from some time on."""

    def edit(message: Message, at: int, all_: Sequence[Message], moment: Moment) -> Message:
        old = moment.late and at == _early_tool(all_) and at < len(all_) - 2
        return _text(message, change(message.text, moment)) if old else message

    return _each(edit)


# White space


def _trailing(message: Message, at: int, all_: Sequence[Message], moment: Moment) -> Message:
    """What the model said ends in white space, until it is stored."""
    newest = message.role == "assistant" and message.text and at == _last(all_, "assistant")
    return _text(message, message.text + " \n") if newest else message


def _crlf(message: Message, at: int, all_: Sequence[Message], moment: Moment) -> Message:
    """Typed on Windows, and normalised when the conversation is loaded again."""
    typed = message.role == "user" and at == 0 and not moment.late
    return (
        _text(message, message.text.replace("\n", "\r\n") + "\r\nThanks.")
        if typed
        else (_text(message, message.text + "\nThanks.") if message.role == "user" and at == 0 else message)
    )


def _json_results(dense_from_late: bool) -> Make:
    def edit(message: Message, at: int, all_: Sequence[Message], moment: Moment) -> Message:
        if message.role != "tool":
            return message
        wide = not (moment.late and at < len(all_) - 2) if dense_from_late else at == _last(all_, "tool")
        given = {"result": message.text.split("\n"), "ok": True}
        return _text(message, json.dumps(given, indent=2) if wide else json.dumps(given, separators=(",", ":")))

    return _each(edit)


def _tabs(text: str, moment: Moment) -> str:
    return "\n".join(f"    {line}" for line in text.split("\n"))


def _ends_otherwise(prose: Prose, talk: Talk) -> Apply:
    """The system prompt is read from a file that some editor saved with blank lines at its end."""
    return lambda talk, moment: talk.with_system(talk.system[0] + "\n\n") if moment.late else talk


def _indented(prose: Prose, talk: Talk) -> Apply:
    """The system prompt is a literal in code, and somebody removed its indentation."""
    return lambda talk, moment: talk if moment.late else talk.with_system(talk.system[0].replace("\n", "\n    "))


W = DifferenceKind.WHITESPACE
SPACES = [
    Damage(W, "trailing, gone when stored", "history", _each(_trailing)),
    Damage(W, "CRLF", "user", _each(_crlf)),
    Damage(W, "JSON made dense", "history", _json_results(dense_from_late=False), 4, asks=0.2),
    Damage(W, "old text indented", "history", _once(_tabs)),
    Damage(W, "blank lines at the end of the system prompt", "system", _ends_otherwise),
    Damage(W, "blank lines joined", "history", _once(lambda text, moment: text.replace("\n", "\n\n"))),
    Damage(W, "indentation of the system prompt", "system", _indented),
]

# Edited


def _cleared(message: Message, at: int, all_: Sequence[Message], moment: Moment) -> Message:
    """Results of tools are dropped when they are three messages old."""
    old = message.role == "tool" and at < len(all_) - 4
    return _text(message, "[Old tool result content cleared]") if old else message


def _thoughts(message: Message, at: int, all_: Sequence[Message], moment: Moment) -> Message:
    """Reasoning stays with the newest answer only, as many templates and clients have it."""
    newest = message.role == "assistant" and message.text and at == _last(all_, "assistant")
    return _text(message, f"<think>{_reason(message)}</think>\n{message.text}") if newest else message


def _reason(message: Message) -> str:
    return f"Let me consider this carefully: {message.text[:80]} ... I should go on with the next step."


def _reminder(message: Message, at: int, all_: Sequence[Message], moment: Moment) -> Message:
    """A reminder stands before the newest message, and leaves with it."""
    newest = at == len(all_) - 1
    text = f"<system-reminder>Keep the plan up to date.</system-reminder>\n{message.text}"
    return _text(message, text) if newest else message


def _redacted(message: Message, at: int, all_: Sequence[Message], moment: Moment) -> Message:
    """A password that the user told is hidden later on."""
    if message.role != "user" or at:
        return message
    secret = "[REDACTED]" if moment.late else "the word swordfish twice"
    return _text(message, f"My password is {secret}. {message.text}")


def _shortened(text: str, moment: Moment) -> str:
    return text[: len(text) // 3] + "... [truncated]"


def _summary(text: str, moment: Moment) -> str:
    return "Summary of this result: nothing in it needed attention, all that matters was said already."


E = DifferenceKind.EDITED_HISTORY
EDITED = [
    Damage(E, "old results cleared", "history", _each(_cleared), 4, asks=0.2),
    Damage(E, "summary in place of a result", "history", _once(_summary), 4, asks=0.25),
    Damage(E, "thoughts of old answers removed", "history", _each(_thoughts)),
    Damage(E, "reminder before the newest message", "history", _each(_reminder)),
    Damage(E, "old result cut short", "history", _once(_shortened), 4, asks=0.25),
    Damage(E, "secret of the user's hidden", "user", _each(_redacted)),
]

# Truncated


def _rounds(messages: Sequence[Message]) -> list[list[Message]]:
    """A round begins with the user."""
    found: list[list[Message]] = []
    for message in messages:
        if message.role == "user" or not found:
            found.append([])
        found[-1].append(message)
    return found


def _kept(messages: Sequence[Sequence[Message]]) -> tuple[Message, ...]:
    return tuple(message for round_ in messages for message in round_)


def _rounds_of(choose: Callable[[list[list[Message]], Moment], Sequence[Sequence[Message]]]) -> Make:
    return lambda prose, talk: (
        lambda talk, moment: replace(talk, messages=_kept(choose(_rounds(talk.messages), moment)))
    )


def _budget(prose: Prose, talk: Talk) -> Apply:
    """Whole rounds are dropped from the front until the rest fits."""

    def apply(talk: Talk, moment: Moment) -> Talk:
        limit = moment.state.setdefault("limit", 3 * sum(len(message.text) for message in talk.messages) + 3000)
        rounds = _rounds(talk.messages)
        while len(rounds) > 1 and sum(len(m.text) for r in rounds for m in r) > limit:
            rounds.pop(0)
        return replace(talk, messages=_kept(rounds))

    return apply


def _without_two(rounds: list[list[Message]], moment: Moment) -> list[list[Message]]:
    return rounds[2:] if moment.late and len(rounds) > 3 else rounds


NOTE = Message("user", "[Earlier parts of this conversation were left out.]")


def _noted(rounds: list[list[Message]], moment: Moment) -> Sequence[Sequence[Message]]:
    return [rounds[0], [NOTE], *rounds[3:]] if moment.late and len(rounds) > 4 else rounds


X = DifferenceKind.TRUNCATED_HISTORY
TRUNCATED = [
    Damage(
        X,
        "first two rounds dropped",
        "history",
        _rounds_of(lambda r, m: r[2:] if m.late and len(r) > 3 else r),
        asks=0.8,
    ),
    Damage(X, "the last four rounds kept", "history", _rounds_of(lambda r, m: r[-4:]), asks=0.85),
    Damage(X, "cut in the middle", "history", _rounds_of(lambda r, m: [r[0], *r[1:][-3:]]), asks=0.85),
    Damage(X, "within a budget", "history", _budget, asks=0.8),
    Damage(X, "left out, and said so", "history", _rounds_of(_noted), asks=0.85),
]

# Reordered


def _passages(prose: Prose, count: int) -> list[str]:
    return [prose.prose(prose.rng.randint(150, 500)).replace("\n\n", " ") for _ in range(count)]


def _documents(texts: Sequence[str]) -> str:
    return "<documents>\n" + "\n".join(f"<document>\n{text}\n</document>" for text in texts) + "\n</documents>"


def _listed(texts: Sequence[str]) -> str:
    return "Relevant memories:\n" + "\n".join(f"- {text}" for text in texts)


def _numbered(texts: Sequence[str]) -> str:
    return "Context:\n\n" + "\n\n".join(f"[{i}] {text}" for i, text in enumerate(texts, 1))


def _sourced(texts: Sequence[str]) -> str:
    return "\n---\n".join(f"Source: kb/{text.split()[-1].strip('.')}.md\n{text}" for text in texts)


def _as_json(texts: Sequence[str]) -> str:
    return "Search results: " + json.dumps([{"text": text, "kind": "page"} for text in texts], indent=1)


def _retrieved(where: str, write: Callable[[Sequence[str]], str]) -> Make:
    def make(prose: Prose, talk: Talk) -> Apply:
        shared = _passages(prose, prose.rng.randint(4, 9))

        def apply(talk: Talk, moment: Moment) -> Talk:
            if where == "system":
                texts = shared.copy()
                moment.fresh.shuffle(texts)
                return talk.with_system(f"{talk.system[0]}\n\n{write(texts)}\n\nCite what you use.")
            own = moment.state.setdefault("passages", _passages(Prose(repr(moment.own.random())), 6))
            texts = list(own)
            moment.fresh.shuffle(texts)
            first = talk.messages[0]
            return talk.with_message(0, _text(first, f"{write(texts)}\n\nQuestion: {first.text}"))

        return apply

    return make


def _reordered(name: str, where: str, write: Callable[[Sequence[str]], str]) -> Damage:
    return Damage(DifferenceKind.REORDERED_CONTEXT, f"{name}, {where}", where, _retrieved(where, write))


REORDERED = [
    _reordered("documents in tags", "system", _documents),
    _reordered("list of memories", "user", _listed),
    _reordered("passages between lines", "system", _sourced),
    _reordered("numbered passages", "user", _numbered),
    _reordered("JSON of a search", "user", _as_json),
]

ALL: dict[DifferenceKind, list[Damage]] = {
    variants[0].kind: variants
    for variants in (
        TIMESTAMPS, IDENTIFIERS, COUNTERS, ORDERS, ADDED, REMOVED, KEYS, SPACES, EDITED, TRUNCATED, REORDERED, OTHERS,
    )
}  # fmt: skip
