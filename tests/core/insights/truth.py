"""What is true of each request of the corpus: whether it differs from an earlier one, where, and of which kind.

The truth of a request is not told by any classifier. The kind is that of the damage. The place is found by comparing
what the client had in hand, value by value (`first_difference`), and must be where the damage says it works. Offsets
are where the two values, and the two prompts, stop being equal byte for byte. What is compared with:

- the prompt before it of its session; the session's deepest one too, where that shares more;
- for the first of a session, any earlier prompt of the deployment: one shared prompt has many readers, and which of
  them is compared with is not for the corpus to say. If one of them has the same tools and system prompt, all that
  follows is a new conversation.

What is repeated counts from where no earlier prompt of the deployment agrees with this one any more: up to there it is
held. A difference with no text behind it that an earlier prompt had too is none (a regenerated answer, a new
question): such a request is clean. Where that text is shorter than REPEATED_BYTES_MIN it is not judged.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import accumulate

from router.core.types.cache_misses import DifferenceKind
from tests.core.insights.conversations import Keys, Message, Place, Style, Talk, dense, path_of
from tests.core.insights.damage import Damage

REPEATED_BYTES_MIN = 32
EARLIER_MAX = 64  # prompts of a deployment that the first of a session may be compared with


@dataclass(frozen=True, slots=True)
class Truth:
    """Where and why a prompt differs from an earlier one."""

    change: DifferenceKind
    place: Place
    path: str
    offset_bytes: int  # in canonical bytes
    at_bytes: int | None  # within the text at `path`; None where no text is there
    known_bytes: int  # from the beginning, that some earlier prompt of the deployment has
    repeated_bytes: int  # behind both, that the earlier prompt has behind the difference, and the piece that changed
    before: Request


@dataclass(frozen=True, slots=True)
class Request:
    """One request, as sent."""

    session: str
    turn: int
    at_s: float
    damage: str  # of its deployment: kind and name; or which kind of clean
    talk: Talk
    style: Style
    hint: str  # in the header x-session-id
    body: bytes
    pieces: tuple[bytes, ...]  # of its canonical bytes, as the corpus writes them: head, system prompt, messages
    text: bytes  # all of them
    truths: tuple[Truth, ...] = ()  # any of them is right; none: it is clean
    judged: bool = True


def judged(sessions: list[list[Request]], damage: Damage | None) -> Iterator[Request]:
    """The same requests, knowing what is true of them."""
    if damage is None:
        yield from (request for requests in sessions for request in requests)
        return
    earlier: list[Request] = []
    by_session: dict[str, list[Request]] = {}
    for request in sorted((r for requests in sessions for r in requests), key=lambda each: each.at_s):
        own = by_session.setdefault(request.session, [])
        yield _within(request, own, earlier, damage) if own else _first(request, earlier[-EARLIER_MAX:], damage)
        own.append(request)
        earlier.append(request)


def _within(request: Request, own: list[Request], earlier: list[Request], damage: Damage) -> Request:
    """Of a request that goes on with a session."""
    last, deepest = own[-1], _deepest(own, request)
    if _extends(last.text, request.text):
        return request
    if _extends(deepest.text, request.text):
        return replace(request, judged=False)  # clean, or not: it depends on which is looked at
    befores = [last] if deepest is last else [last, deepest]
    return _known(request, befores, earlier, damage)


def _first(request: Request, earlier: list[Request], damage: Damage) -> Request:
    """Of a session's first request."""
    size = 3 if damage.templated else 2  # the user's first message is of the template as well
    if not earlier or any(each.pieces[:size] == request.pieces[:size] for each in earlier):
        return request
    return _known(request, earlier, earlier, damage)


def _known(request: Request, befores: list[Request], earlier: list[Request], damage: Damage) -> Request:
    known = common(_deepest(earlier, request).text, request.text)
    truths = []
    for before in befores:
        truth, behind = _truth(before, request, damage, known)
        if before is befores[0] and behind == 0 and request.turn:
            return request
        if behind >= REPEATED_BYTES_MIN:
            truths.append(truth)
    return replace(request, truths=tuple(truths), judged=bool(truths))


def _deepest(earlier: list[Request], request: Request) -> Request:
    return max(earlier, key=lambda each: common(each.text, request.text))


def _truth(before: Request, after: Request, damage: Damage, known: int) -> tuple[Truth, int]:
    """And how many bytes are repeated behind the piece that changed."""
    place = first_difference(before.talk, after.talk)
    _check(place, damage, after)
    at, changed = None, 0
    moved = damage.kind == DifferenceKind.TRUNCATED_HISTORY or place.kind == "message"
    if place.kind == "text" or (place.kind == "tool" and place.keys and damage.kind != DifferenceKind.KEY_ORDER):
        left, right = value_at(before.talk, place), value_at(after.talk, place)
        at = common(left, right)
        same = moved or damage.kind == DifferenceKind.REORDERED_CONTEXT  # what stands elsewhere was there before
        changed = 0 if same else _changed(left[at:], right[at:])
    offset = common(before.text, after.text)
    repeated, behind = _repeated(place, before, after, moved=moved, first=max(offset, known), past=offset + changed)
    if damage.kind == DifferenceKind.TOOL_ADDED and known < len(after.pieces[0]):
        repeated -= sum(len(dense(tool.parts())) for tool in after.talk.tools if tool not in before.talk.tools)
    path = path_of(place, after.talk, after.style)
    return Truth(damage.kind, place, path, offset, at, known, repeated, before), behind


def _repeated(place: Place, before: Request, after: Request, *, moved: bool, first: int, past: int) -> tuple[int, int]:
    """Bytes behind `first` that the prompt before has, too; and without those up to `past`, which changed. A message
    that `moved` was another's place before: it counts if it was said at all."""
    index, kept = place.message + 1, set(before.pieces[1:])
    ends = list(accumulate(map(len, after.pieces)))
    later = sum(
        max(0, end - max(first, end - len(piece)))
        for piece, end in zip(after.pieces[index + 1 :], ends[index + 1 :], strict=True)
        if piece in kept
    )
    if index >= len(ends) or (moved and after.pieces[index] not in kept):
        return later, later
    fields = 0
    if place.kind == "text" and place.index:  # what stands behind the message's text says nothing of it
        message = after.talk.messages[place.index - 1]
        fields = len(after.pieces[index]) - len(message.role) - 2 - len(message.text.encode())
    return max(0, ends[index] - first) + later, max(0, ends[index] - fields - max(first, past)) + later


def _check(place: Place, damage: Damage, request: Request) -> None:
    found = {"tool": "tools"}.get(place.kind, {0: "system", 1: "user"}.get(place.index, "history"))
    if found != damage.region and not (found == "user" and damage.region == "history"):
        raise AssertionError(f"{request.damage}: differs in {found} at {place}, not in {damage.region}")


def _changed(left: bytes, right: bytes) -> int:
    """Bytes of `right` before what both end with."""
    return len(right) - common(left[::-1], right[::-1])


def common(left: bytes, right: bytes) -> int:
    """How many bytes both begin with."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if left[low:middle] == right[low:middle] else (low, middle - 1)
    return low


def _extends(before: bytes, after: bytes) -> bool:
    """Append-only, or an earlier turn again."""
    return after.startswith(before) or before.startswith(after)


def first_difference(before: Talk, after: Talk) -> Place:
    """Where two prompts first differ, value by value."""
    for i, (left, right) in enumerate(zip(before.tools, after.tools, strict=False)):
        if dense(left.parts()) != dense(right.parts()):
            return Place("tool", i, keys=_keys(left.parts(), right.parts()) if left.name == right.name else ())
    if len(before.tools) != len(after.tools):
        return Place("tool", min(len(before.tools), len(after.tools)))
    for part, (old, new) in enumerate(zip(before.system, after.system, strict=True)):
        if old != new:
            return Place("text", 0, part)
    for i, (was, is_) in enumerate(zip(before.messages, after.messages, strict=False), 1):
        if was == is_ and dense([call.arguments for call in was.calls]) == dense([c.arguments for c in is_.calls]):
            continue
        if was.role != is_.role:
            return Place("message", i)
        if was.text != is_.text:
            return Place("text", i)
        return _call_place(i, was, is_)
    return Place("message", min(len(before.messages), len(after.messages)) + 1)


def _call_place(index: int, before: Message, after: Message) -> Place:
    for i, (left, right) in enumerate(zip(before.calls, after.calls, strict=False)):
        if (left.id, left.name) == (right.id, right.name) and dense(left.arguments) != dense(right.arguments):
            return Place("call", index, i, _keys(left.arguments, right.arguments))
    return Place("message", index)


def _keys(left: object, right: object) -> Keys:
    """The keys down to the value that differs; to the object, where its keys stand otherwise."""
    if isinstance(left, dict) and isinstance(right, dict) and list(left) == list(right):
        for key, value in left.items():
            if dense(value) != dense(right[key]):
                return (key, *_keys(value, right[key]))
    return ()


def value_at(talk: Talk, place: Place) -> bytes:
    """The text at a place."""
    if place.kind == "tool":
        value: object = talk.tools[place.index].parts()
        for key in place.keys:
            value = value[key]  # type: ignore[index]
        return value.encode() if isinstance(value, str) else dense(value)
    return (talk.system[place.part] if place.index == 0 else talk.messages[place.index - 1].text).encode()
