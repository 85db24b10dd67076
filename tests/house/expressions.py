"""Whether a regular expression takes time linear in its input, whatever the input is.

Theory: `re` tries alternatives one after the other, so its time grows with the number of ways in which a part of the
input can be matched before the rest fails. That number is bounded exactly where no two states p and q of the automaton
have a word that leads from p to p, from p to q and from q to q (A. Weber and H. Seidl, On the degree of ambiguity of
finite automata, 1991; the tool recheck decides alike). A search begins at every byte, so it is the expression behind a
loop over any bytes. States in which the expression may end do not count: it has matched there, and nothing fails.

The automaton is that of Glushkov: a state is a character class of the expression. Repeats with a limit are taken for
one without a loop, which changes a constant only. Assertions match nothing and may fail.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from re import _constants as sre  # type: ignore[attr-defined]  # has no types
from re import _parser  # type: ignore[attr-defined]  # has no types
from typing import Any

ALPHABET = frozenset(range(256))  # characters beyond it are taken for the last one
REPEATS_MAX = 1_024  # a repeat with a higher limit counts as one without
_CATEGORIES = {
    sre.CATEGORY_DIGIT: r"\d",
    sre.CATEGORY_NOT_DIGIT: r"\D",
    sre.CATEGORY_SPACE: r"\s",
    sre.CATEGORY_NOT_SPACE: r"\S",
    sre.CATEGORY_WORD: r"\w",
    sre.CATEGORY_NOT_WORD: r"\W",
}
_LINE_FEED = frozenset((10,))


class Ambiguous(Exception):
    """One step of the expression can be made in two ways, as in `(a*)*`."""


@dataclass
class _Automaton:
    """Classes of the states, and the steps between them."""

    flags: int
    classes: list[frozenset[int]] = field(default_factory=list)
    follow: list[set[int]] = field(default_factory=list)

    def add(self, chars: frozenset[int]) -> int:
        self.classes.append(chars)
        self.follow.append(set())
        return len(self.classes) - 1

    def link(self, last: set[int], first: set[int]) -> None:
        for one in last:
            if self.follow[one] & first:
                raise Ambiguous
            self.follow[one] |= first


@dataclass
class _Part:
    """States in which a part of the expression may begin and end, and whether it may match nothing."""

    first: set[int]
    last: set[int]
    empty: bool


def slow_because(pattern: re.Pattern[Any], *, searched: bool) -> str:
    """Why the expression may take more than linear time; "" if it cannot. `searched`: it is looked for at every place,
    and not matched at one."""
    made = _Automaton(pattern.flags | (re.ASCII if isinstance(pattern.pattern, bytes) else 0))
    tree = _parser.parse(pattern.pattern, pattern.flags & ~re.DEBUG)
    try:
        whole = _sequence(made, list(tree))
    except Ambiguous:
        return "a repeat within a repeat"
    start = made.add(frozenset())
    made.follow[start] = set(whole.first)
    if searched:
        before = _before(list(tree), pattern.flags)
        loop = made.add(ALPHABET)
        gate = loop
        if before is not None:
            gate = made.add(before)
            made.follow[loop].add(gate)
        made.follow[loop].add(loop)
        made.follow[gate] |= whole.first
    ends = set() if _may_fail_at_end(list(tree)) else whole.last
    for one, other in _pairs(made, ends):
        if _meets(made, one, other):
            return f"state {one} and state {other}, {_shown(made.classes[other])}, share a word"
    return ""


def _pairs(made: _Automaton, ends: set[int]) -> Iterator[tuple[int, int]]:
    looping = [state for state in range(len(made.classes)) if _within(made, state) and made.classes[state]]
    for one in looping:
        for other in looping:
            if one != other and other not in ends:
                yield one, other


def _within(made: _Automaton, state: int) -> set[int]:
    """States of the loop that this one is in; none where there is no way back."""
    ahead, back = _reached(made.follow, state), _reached(_reversed(made.follow), state)
    return ahead & back


def _reversed(follow: list[set[int]]) -> list[set[int]]:
    before: list[set[int]] = [set() for _ in follow]
    for one, others in enumerate(follow):
        for other in others:
            before[other].add(one)
    return before


def _reached(follow: list[set[int]], state: int) -> set[int]:
    seen, todo = set[int](), list(follow[state])
    while todo:
        one = todo.pop()
        if one not in seen:
            seen.add(one)
            todo += follow[one]
    return seen


def _meets(made: _Automaton, one: int, other: int) -> bool:
    """Whether a word leads from `one` to itself, from `one` to `other`, and from `other` to itself."""
    loop, others = _within(made, one), _within(made, other)
    before = _reached(_reversed(made.follow), other) | {other}
    todo, seen = deque([(one, one, other)]), {(one, one, other)}
    while todo:
        first, middle, last = todo.popleft()
        for a in made.follow[first] & loop:
            for c in made.follow[last] & others:
                both = made.classes[a] & made.classes[c]
                if not both:
                    continue
                for b in made.follow[middle] & before:
                    if not both & made.classes[b]:
                        continue
                    if (a, b, c) == (one, other, other):
                        return True
                    if (a, b, c) not in seen:
                        seen.add((a, b, c))
                        todo.append((a, b, c))
    return False


def _sequence(made: _Automaton, nodes: list[tuple[Any, Any]]) -> _Part:
    part = _Part(set(), set(), True)
    for node in nodes:
        more = _node(made, *node)
        made.link(part.last, more.first)
        part = _Part(
            part.first | more.first if part.empty else part.first,
            part.last | more.last if more.empty else more.last,
            part.empty and more.empty,
        )
    return part


def _node(made: _Automaton, kind: Any, value: Any) -> _Part:
    if kind in (sre.LITERAL, sre.NOT_LITERAL, sre.IN, sre.ANY):
        state = made.add(_class(kind, value, made.flags))
        return _Part({state}, {state}, False)
    if kind is sre.SUBPATTERN:
        return _sequence(made, list(value[3]))
    if kind is sre.ATOMIC_GROUP:
        return _sequence(made, list(value))
    if kind is sre.BRANCH:
        parts = [_sequence(made, list(each)) for each in value[1]]
        return _Part(
            set().union(*(part.first for part in parts)),
            set().union(*(part.last for part in parts)),
            any(part.empty for part in parts),
        )
    if kind in (sre.MAX_REPEAT, sre.MIN_REPEAT, sre.POSSESSIVE_REPEAT):
        least, most, inner = value
        part = _sequence(made, list(inner))
        if most > REPEATS_MAX:
            made.link(part.last, part.first)
        return _Part(part.first, part.last, part.empty or least == 0)
    if kind in (sre.AT, sre.ASSERT, sre.ASSERT_NOT):
        return _Part(set(), set(), True)
    raise NotImplementedError(f"{kind} of an expression")


def _class(kind: Any, value: Any, flags: int) -> frozenset[int]:
    if kind is sre.ANY:
        return ALPHABET if flags & re.DOTALL else ALPHABET - _LINE_FEED
    if kind is sre.LITERAL:
        return _either_case({min(value, 255)}, flags)
    if kind is sre.NOT_LITERAL:
        return ALPHABET - _either_case({value}, flags)
    chars, negated = set[int](), False
    for each, what in value:
        if each is sre.NEGATE:
            negated = True
        elif each is sre.LITERAL:
            chars.add(min(what, 255))
        elif each is sre.RANGE:
            chars.update(range(min(what[0], 255), min(what[1], 255) + 1))
        elif each is sre.CATEGORY:
            known = re.compile(_CATEGORIES[what], flags & re.ASCII)
            chars.update(code for code in ALPHABET if known.match(chr(code)))
    found = _either_case(chars, flags)
    return ALPHABET - found if negated else found


def _either_case(chars: set[int], flags: int) -> frozenset[int]:
    if not flags & re.IGNORECASE:
        return frozenset(chars)
    cased = (case for char in chars for case in (chr(char).lower(), chr(char).upper()) if len(case) == 1)
    return frozenset(chars | {min(ord(each), 255) for each in cased})


def _before(nodes: list[tuple[Any, Any]], flags: int) -> frozenset[int] | None:
    """Characters that must stand before a match; None where any may."""
    if not nodes:
        return None
    kind, value = nodes[0]
    if kind is sre.AT and value is sre.AT_BEGINNING:
        return _LINE_FEED if flags & re.MULTILINE else frozenset()
    if kind is sre.AT and value is sre.AT_BEGINNING_STRING:
        return frozenset()
    if kind in (sre.ASSERT, sre.ASSERT_NOT) and value[0] == -1 and len(value[1]) == 1:
        chars = _class(*value[1][0], flags)
        return chars if kind is sre.ASSERT else ALPHABET - chars
    if kind is sre.BRANCH and all(map(len, value[1])):
        each = [_before(list(branch), flags) for branch in value[1]]
        known = [chars for chars in each if chars is not None]
        return frozenset().union(*known) if len(known) == len(each) else None
    return _before(list(value[3]), flags) if kind is sre.SUBPATTERN else None


def _may_fail_at_end(nodes: list[tuple[Any, Any]]) -> bool:
    """Whether an assertion stands at the end."""
    if not nodes:
        return False
    kind, value = nodes[-1]
    if kind is sre.SUBPATTERN:
        return _may_fail_at_end(list(value[3]))
    if kind is sre.BRANCH:
        return any(_may_fail_at_end(list(branch)) for branch in value[1])
    return kind in (sre.AT, sre.ASSERT, sre.ASSERT_NOT)


def _shown(chars: frozenset[int]) -> str:
    some = sorted(chars)
    return "".join(map(chr, some[:8])).encode("unicode_escape").decode() + ("…" if len(some) > 8 else "")
