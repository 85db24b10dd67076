"""Losses grouped into faults: losses that are fixed in one place are one row of advice, for any number of templates.

- Losses of one kind and place are one fault. For a date, an identifier or a number that changes, "one place" means
  within a token. Words that change are one fault only in templates that are branches of each other.
- Content that a release adds to a prompt is first compared with older prompts, and appears as words that changed. Later
  it appears as a date. Both are one fault.
- A difference that only distinguishes templates is not a fault. A number or a word that differs between the prompts of
  several agents ("You are agent 1") is the same in all conversations of each agent. A value that changes is another one
  in most conversations.
- Prompts that are never requested twice fill the caches. Tokens that were evicted under a template while it had a fault
  are charged to that fault, or to the fault of the nearest template that it begins with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import islice

from router.core.insights.ledger.lost_tokens import PIECES_MAX, Loss, note_case, place_of
from router.core.types.cache_misses import DifferenceKind

TOKEN_BYTES = 16  # bytes between two beginnings of a token that count as one place
PUT_IN_BYTES = 256  # words that changed at most this number of bytes before a token belong to its fault
# fewer different values may be names; more values may be names only if they differ in a minority of conversations
NAMES_MAX = 32
FILLS_SHARE = 0.1  # fraction of evicted tokens that a fault must cost itself to count as their cause
# if at least 1 in this number of differences is within a conversation, they are more than names of agents
OWN_SHARE_MIN = 4
ANCESTORS_MAX = 16  # levels of shorter templates that are searched

_TOKENS = (DifferenceKind.TIMESTAMP, DifferenceKind.IDENTIFIER, DifferenceKind.COUNTER)
_OF_TOOLS = (
    DifferenceKind.TOOL_ORDER,
    DifferenceKind.TOOL_ADDED,
    DifferenceKind.TOOL_REMOVED,
)  # one loss, at any place in the list
_NAMING = (DifferenceKind.COUNTER, DifferenceKind.OTHER)
_TEMPLATE_ROLES = ("", "system", "developer")
_TOOLS = (-1, "tools")

Place = tuple[int, str]  # message, path
Key = tuple[
    DifferenceKind, int, str, int
]  # change, message, path; then a token's first byte, or words' topmost template
Parent = Callable[[int], int]  # the parent of a template; 0: no parent
Head = Callable[[int], int]  # the topmost template that a template begins with


@dataclass(slots=True)
class Fault:
    """Losses that are fixed in one place. Sums are weighted (sums.Fading)."""

    loss: Loss  # sums of all, named by the most costly one
    key: Key
    templates: set[int] = field(default_factory=set)
    evicted: float = 0.0  # tokens evicted under its templates

    @property
    def tokens(self) -> float:
        """All tokens that it costs."""
        return self.loss.tokens + self.evicted


def heads(parent: Parent) -> Head:
    """Return a function that looks up topmost templates, each once."""
    known: dict[int, int] = {0: 0}

    def head(template: int) -> int:
        below: list[int] = []
        at = template
        while at not in known and len(below) < ANCESTORS_MAX and (above := parent(at)):
            below.append(at)
            at = above
        top = known.setdefault(at, at)
        known.update(dict.fromkeys(below, top))
        return top

    return head


def faults_of(losses: Iterable[Loss], head: Head, conversations: Callable[[int], int]) -> list[Fault]:
    """Return the faults, in no order. `conversations(template)` is the known number of conversations begun with a
    template."""
    alike: dict[tuple[DifferenceKind, Place], list[Loss]] = {}
    for loss in losses:
        place = _TOOLS if loss.change in _OF_TOOLS else place_of(loss.last)
        alike.setdefault((loss.change, place), []).append(loss)
    made: list[Fault] = []
    for (change, (message, path)), of_kind in alike.items():
        if change is DifferenceKind.OTHER:
            made += [
                _fault(group, (change, message, path, top)) for top, group in _group_by_head(of_kind, head).items()
            ]
        elif change in _TOKENS:
            made += [_fault(group, (change, message, path, group[0].begin_bytes)) for group in _group_by_token(of_kind)]
        else:
            made.append(_fault(of_kind, (change, message, path, 0)))
    return [fault for fault in _merge_insertions(made, head) if not _names_only(fault, head, conversations)]


def charge(faults: Iterable[Fault], evicted: Mapping[int, float], parent: Parent) -> float:
    """Charge evicted tokens, by template, to faults. Returns the sum of the charged tokens. A fault with a negligible
    cost in comparison has not filled the caches."""
    of: dict[int, Fault] = {}
    for fault in faults:
        for template in fault.templates:
            known = of.get(template)
            if template and (known is None or fault.loss.tokens > known.loss.tokens):
                of[template] = fault
    for template, tokens in evicted.items():
        found = next((of[each] for each in _upwards(template, parent) if each in of), None) if tokens > 0 else None
        if found is not None:
            found.evicted += tokens
    charged = 0.0
    for fault in {id(fault): fault for fault in of.values()}.values():
        if fault.loss.tokens < FILLS_SHARE * fault.evicted:
            fault.evicted = 0.0
        charged += fault.evicted
    return charged


def heads_of(fault: Fault, head: Head) -> set[int]:
    """Return the topmost templates that its templates begin with."""
    return {top for template in fault.templates if (top := head(template))}


def _fault(losses: list[Loss], key: Key) -> Fault:
    return Fault(_sum(losses), key, {loss.template for loss in losses})


def _upwards(template: int, parent: Parent) -> Iterable[int]:
    """Yield a template and those that it begins with."""
    for _ in range(ANCESTORS_MAX):
        if not template:
            return
        yield template
        template = parent(template)


def _group_by_head(losses: Iterable[Loss], head: Head) -> dict[int, list[Loss]]:
    found: dict[int, list[Loss]] = {}
    for loss in losses:
        found.setdefault(head(loss.template), []).append(loss)
    return found


def _group_by_token(losses: Iterable[Loss]) -> list[list[Loss]]:
    """Return losses in groups of tokens that begin within TOKEN_BYTES of the next one."""
    groups: list[list[Loss]] = []
    for loss in sorted(losses, key=lambda each: each.begin_bytes):
        if not groups or loss.begin_bytes - groups[-1][-1].begin_bytes > TOKEN_BYTES:
            groups.append([])
        groups[-1].append(loss)
    return groups


def _merge_insertions(faults: list[Fault], head: Head) -> list[Fault]:
    """Return the faults. Words that were inserted together with a token are part of that token's fault."""
    tokens = [fault for fault in faults if fault.key[0] in _TOKENS]
    tops = [heads_of(fault, head) for fault in tokens]
    left = []
    for fault in faults:
        into = None
        if fault.key[0] is DifferenceKind.OTHER and tokens:
            at, place = fault.loss.begin_bytes, fault.key[1:3]
            into = next(
                (
                    token
                    for token, of in zip(tokens, tops, strict=True)
                    if token.key[1:3] == place
                    and -TOKEN_BYTES <= token.loss.begin_bytes - at <= PUT_IN_BYTES
                    and (fault.key[3] in of or fault.templates & token.templates)
                ),
                None,
            )
        if into is None:
            left.append(fault)
        else:
            into.templates |= fault.templates
            into.loss = _sum([into.loss, fault.loss], into.loss)
    return left


def _names_only(fault: Fault, head: Head, conversations: Callable[[int], int]) -> bool:
    """True if, by current knowledge, the difference only distinguishes templates."""
    loss = fault.loss
    if loss.change not in _NAMING or loss.last.role not in _TEMPLATE_ROLES or loss.message > 0:
        return False
    values = len(loss.pieces)
    if OWN_SHARE_MIN * loss.in_conversations >= loss.times:  # words that all changed once come from a release
        return loss.change is DifferenceKind.OTHER and values < 2
    begun = sum(map(conversations, heads_of(fault, head)))
    return values < NAMES_MAX or 2 * loss.times < begun


def _sum(losses: list[Loss], name: Loss | None = None) -> Loss:
    """Return one loss with the sums of all, named by `name`, or else by the most costly."""
    if len(losses) == 1:
        return losses[0]
    most = max(losses, key=lambda each: each.tokens)
    named = name or most
    loss = Loss(named.template, named.last)
    loss.message = min(each.message for each in losses)
    loss.last_at_s = max(each.last_at_s for each in losses)
    last_cases = sorted((at_s, tenant) for each in losses for tenant, at_s in each.tenants.items())
    for at_s, tenant in last_cases:
        note_case(loss.tenants, tenant, at_s)
    loss.begin_bytes = named.begin_bytes
    loss.requests = sum(each.requests for each in losses)
    loss.tokens = sum(each.tokens for each in losses)
    loss.in_conversations = sum(each.in_conversations for each in losses)
    loss.times = sum(each.times for each in losses)
    loss.pieces = set(islice(set().union(*(each.pieces for each in losses)), PIECES_MAX))
    return loss
