"""Advice against misses, most costly first: one row for each fault (faults.py) with a cost, and one for each other
reason that takes more than a hundredth of all prompt tokens.

No figure is extrapolated from seconds: hourly rates need five minutes and twenty requests. Before that, the loss of the
elapsed time is reported. The list does not flicker (advice_hysteresis.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

from router.core.insights.ledger.advice_hysteresis import AdviceHysteresis
from router.core.insights.ledger.decaying_sums import AT, HIT, PROMPT, REPLAY, REPLAYS, REQUESTS, SAVED_MS
from router.core.insights.ledger.faults import FILLS_SHARE, Fault, Head, charge, faults_of, heads, heads_of
from router.core.insights.ledger.lost_tokens import PATH_CHARS_MAX, PIECES_MAX, Cases, Loss
from router.core.insights.ledger.template_tree import TemplateTree, format_template_id
from router.core.types.cache_misses import DifferenceKind, MissReason

MIN_SHARE = 0.01  # least share of all prompt tokens for a line about a reason
LOSS_WORTH = 0.001  # least share of all prompt tokens for a line about a difference, which names a place to look at
COLD_WORTH = 0.2  # least share of all prompt tokens for a line about unseen prompts: some always are
REPLAYS_WORTH = 0.5  # least share of all hits for a line about replays
HOURLY_S_MIN, HOURLY_REQUESTS_MIN = 300.0, 20  # an hourly rate of less is meaningless
RECENT_S = 60.0  # time after its last case for which advice is recent
NOTHING = f"Nothing above {100 * LOSS_WORTH:g} % of prompt tokens"  # text shown if the list has no row


@dataclass(frozen=True, slots=True)
class AdviceContext:
    """Inputs of the advice: `sums` and losses of the last hour, as they fade."""

    sums: Sequence[float]  # sums of the window, with the weights divided out
    weight: float  # divisor for sums of losses
    per_hour: float | None  # factor from a sum of the window to an hourly rate; None: too little time has passed
    span: str  # time covered by the sums, in words
    ms_per_token: float  # price of prefill in the middle of a mean prompt
    kv_tokens: int  # KV capacity of the fleet in tokens; 0: unknown
    branches: TemplateTree
    cases: Mapping[int, Cases] = field(default_factory=dict)  # index in a sum -> last cases by tenant

    def compute_hourly_rate(self, value: float, requests: float) -> float | None:
        """Return the hourly rate of a sum over this number of requests. None if they are too few."""
        enough = self.per_hour is not None and round(requests) >= HOURLY_REQUESTS_MIN
        return value * self.per_hour if enough and self.per_hour is not None else None

    def format_sum(self, value: float, requests: float, what: str) -> str:
        """Return a sum in words: by the hour, or for the elapsed time."""
        rate = self.compute_hourly_rate(value, requests)
        return f"{_short(value)} {what} {self.span}" if rate is None else f"{_short(rate)} {what} an hour"


def advise(
    losses: Iterable[Loss], of: AdviceContext, rows_max: int, shown: AdviceHysteresis | None = None, now_s: float = 0.0
) -> list[dict[str, Any]]:
    """Return the rows of `/admin/advice`, those without a recent case last. A row about replayed hits has no cost, but
    is always included, and last.
    `shown` are the rows of the previous call, and `now_s` is the time of this one. Without `shown` no earlier rows are
    known."""
    shown = AdviceHysteresis() if shown is None else shown
    branches, parent = of.branches, cache(of.branches.parent_of)
    head = heads(parent)
    faults = faults_of(losses, head, branches.conversations)
    all_tokens = of.sums[PROMPT]
    worth_it = [fault for fault in faults if fault.loss.tokens > all_tokens * of.weight * LOSS_WORTH]
    charged = charge(worth_it, branches.crowded_out(), parent) / of.weight if of.sums[AT[MissReason.EVICTED]] else 0.0
    costs: list[tuple[Any, float]] = []
    for fault in faults:
        tokens = fault.tokens / of.weight
        if round(tokens) and shown.wants(fault.key, tokens / (all_tokens or 1), LOSS_WORTH, now_s):
            costs.append((fault.key, tokens))
    for miss in (*_BY_FIGURES, *_TEXTS):
        tokens = of.sums[AT[miss]] - (charged if miss is MissReason.EVICTED else 0.0)
        worth = COLD_WORTH if miss is MissReason.COLD else MIN_SHARE
        if round(tokens) > 0 and shown.wants(miss, tokens / (all_tokens or 1), worth, now_s):
            costs.append((miss, tokens))
    by_key: dict[Any, Fault] = {}
    for fault in sorted(faults, key=lambda each: each.tokens):
        by_key[fault.key] = fault
    cost = dict(costs)
    cases = {key: _cases_of(key, by_key, of) for key in cost}
    order = _evicted_last(shown.rank_rows(list(cost.items()), now_s), cost)
    order.sort(key=lambda key: not is_recent(cases[key], now_s))
    replays = _build_replay_rows(of)
    rows = [
        _build_reason_row(key, cost[key], order[:at], of)
        if isinstance(key, MissReason)
        else _build_fault_row(by_key[key], head, of)
        for at, key in enumerate(order[: max(0, rows_max - len(replays))])
    ]
    last = [*(cases[key] for key in order[: len(rows)]), of.cases.get(REPLAYS, {})]
    rows += replays
    for rank, (row, of_tenants) in enumerate(zip(rows, last, strict=False), 1):
        row |= {"rank": rank, "recent": is_recent(of_tenants, now_s), "tenants": [*reversed(of_tenants)]}
        if of_tenants:
            row["last_at_s"] = round(max(of_tenants.values()), 3)
    return rows


def is_recent(cases: Cases, now_s: float) -> bool:
    """True if the last case was at most RECENT_S ago. Cases without a time are recent."""
    return not cases or now_s - max(cases.values()) <= RECENT_S


def _cases_of(key: Any, by_key: Mapping[Any, Fault], of: AdviceContext) -> Cases:  # noqa: ANN401 - a reason or a fault
    return of.cases.get(AT[key], {}) if isinstance(key, MissReason) else by_key[key].loss.tenants


def _evicted_last(order: list[Any], cost: Mapping[Any, float]) -> list[Any]:
    """Return the keys of rows, with evictions after the faults that may have caused them."""
    if MissReason.EVICTED not in order:
        return order
    least = cost[MissReason.EVICTED] * FILLS_SHARE
    last = max(
        (at for at, key in enumerate(order) if not isinstance(key, MissReason) and cost[key] >= least), default=-1
    )
    at = order.index(MissReason.EVICTED)
    if last < at:
        return order
    return [*order[:at], *order[at + 1 : last + 1], MissReason.EVICTED, *order[last + 1 :]]


def _row(change: str, text: str, lost_tokens: float, requests: float, of: AdviceContext) -> dict[str, Any]:
    by_hour = of.compute_hourly_rate(lost_tokens, requests)
    return {
        "rank": 0,
        "recent": True,
        "tenants": [],
        "template": "",
        "label": "",
        "templates": 0,
        "change": change,
        "message": -1,
        "role": "",
        "path": "",
        "at_bytes": 0,
        "requests": round(requests),
        "lost_tokens": round(lost_tokens),
        "evicted_tokens": 0,
        "cost": of.format_sum(lost_tokens, requests, "tokens") if round(lost_tokens) else "",
        "lost_tokens_per_h": None if by_hour is None else round(by_hour),
        "gpu_s_per_h": None if by_hour is None else round(by_hour * of.ms_per_token / 1e3, 1),
        "text": text,
        "last_at_s": 0.0,
        "shape": "",
        "before": "",
        "after": "",
    }


def _templates(fault: Fault, head: Head, branches: TemplateTree) -> int:
    """Count the templates that have a fault. A template that extends beyond the difference is only one form of it: it
    has the time of one second, or one order of the tools."""
    heads_ = heads_of(fault, head)
    offset = fault.loss.last.offset_bytes
    return max(sum(branches.prompt_bytes(each) <= offset for each in heads_), min(1, len(heads_)))


def _build_fault_row(fault: Fault, head: Head, of: AdviceContext) -> dict[str, Any]:
    loss, evicted = fault.loss, fault.evicted / of.weight
    last, text = loss.last, said_of(loss)
    templates = _templates(fault, head, of.branches)
    if templates > 1:
        text += f" {templates} templates have this problem."
    if evicted >= FILLS_SHARE * loss.tokens / of.weight and round(evicted):
        text += f" Its prompts fill the caches: {_short(evicted)} of these tokens were evicted."
    row = _row(loss.change.value, text, fault.tokens / of.weight, loss.requests / of.weight, of)
    return row | {
        "template": format_template_id(loss.template),
        "label": of.branches.label(loss.template),
        "templates": templates,
        "message": loss.message,
        "role": last.role,
        "path": last.path[:PATH_CHARS_MAX],
        "at_bytes": loss.begin_bytes,
        "evicted_tokens": round(evicted),
        # time of the last request that lost tokens: the cause may be fixed since
        "last_at_s": round(loss.last_at_s, 3),
        "shape": last.shape,
        "before": last.before,
        "after": last.after,
    }


# -- differences ---------------------------------------------------------------------------------------------------

_AWAY = "Everything after it is recomputed each time. Move it to the end, into the last user message."
_TOOLS = (
    "Everything after them is recomputed. Send the same tools with every request, and restrict them with tool_choice."
)

# `{place}` begins a sentence, `{at}` is a byte, `{orders}` is the number of orders seen.
_SAID: Mapping[DifferenceKind, str] = {
    DifferenceKind.TIMESTAMP: "{place} contains a date or time that changes, at byte {at}. " + _AWAY,
    DifferenceKind.IDENTIFIER: "{place} contains an identifier (a UUID, a request id) that changes, at byte {at}. "
    + _AWAY,
    DifferenceKind.COUNTER: "{place} contains a number that changes, at byte {at}. " + _AWAY,
    DifferenceKind.TOOL_ORDER: "The tools have {orders}. Each order is a different prompt. "
    "Sort the tools, or set insights.normalize_tools to sort_tools.",
    DifferenceKind.TOOL_ADDED: "Tools are added from one request to the next. " + _TOOLS,
    DifferenceKind.TOOL_REMOVED: "Tools are removed from one request to the next. " + _TOOLS,
    DifferenceKind.KEY_ORDER: "{place} has JSON with a changing order of keys. Serialize it canonically{repair}.",
    DifferenceKind.WHITESPACE: "{place} differs only in white space, at byte {at}. Always write it the same way.",
    DifferenceKind.EDITED_HISTORY: ""
    "The history is changed at message {message}. Append instead: everything after the change is recomputed.",
    DifferenceKind.TRUNCATED_HISTORY: ""
    "Old messages are removed, from message {message} on. Keep the prefix, or truncate rarely and by larger amounts.",
    DifferenceKind.REORDERED_CONTEXT: ""
    "{place} has the same passages in a different order. Sort retrieved passages by a constant key such as their id.",
    DifferenceKind.OTHER: "{place} changes at byte {at}. Keep it constant, or move the changing part to the end.",
}


def said_of(loss: Loss) -> str:
    """Return one or two sentences: the problem, and its remedy."""
    last, count = loss.last, len(loss.pieces)
    return _SAID[loss.change].format(
        place=_place(loss),
        at=loss.begin_bytes,
        message=loss.message,
        orders=f"{count}{' or more' * (count >= PIECES_MAX)} orders" if count > 1 else "changing order",
        repair=" (insights.normalize_tools: canonical_tools)" if last.path.startswith("tools") else "",
    )


def _place(loss: Loss) -> str:
    if loss.message >= 0:
        return f"Message {loss.message}" + (f" ({loss.last.role})" if loss.last.role else "")
    path = loss.last.path[:PATH_CHARS_MAX]
    return f"`{path}`" if path else "The beginning of the prompt"


# -- other reasons -------------------------------------------------------------------------------------------------


def _build_reason_row(miss: MissReason, tokens: float, above: Sequence[Any], of: AdviceContext) -> dict[str, Any]:
    """Return the row of a reason, below the rows of the keys `above`."""
    mend_first = miss is MissReason.EVICTED and any(not isinstance(key, MissReason) for key in above)
    if mend_first:
        text = _crowded_out(tokens, of)
    else:
        text = _BY_FIGURES[miss](tokens, of) if miss in _BY_FIGURES else _TEXTS[miss]
    return _row(miss.value, text, tokens, of.sums[REQUESTS], of)


_EVICTED = "Prefixes were evicted before they were requested again. "


def _describe_evicted(tokens: float, of: AdviceContext) -> str:
    if not of.kv_tokens:
        return _EVICTED + "The fleet's KV memory is too small for the prompts of an hour."
    return _EVICTED + _room(tokens, of) + ": add replicas or KV offloading, or shorten prompts."


def _crowded_out(tokens: float, of: AdviceContext) -> str:
    text = _EVICTED + "Fix the rows above first: they fill the caches."
    return text + (f" {_room(tokens, of)}." if of.kv_tokens else "")


def _room(tokens: float, of: AdviceContext) -> str:
    need = of.kv_tokens + tokens
    return f"The fleet's KV memory holds {_short(of.kv_tokens)} tokens, and up to {_short(need)} are in use"


def _describe_spilled(_: float, of: AdviceContext) -> str:
    saved = of.format_sum(of.sums[SAVED_MS] / 1e3, of.sums[REQUESTS], "s of waiting")
    return (
        "Prefixes were recomputed because that was faster than waiting for the replica with the cached prefix. "
        f"This saved {saved}. More replicas reduce such recomputation."
    )


_BY_FIGURES: Mapping[MissReason, Callable[[float, AdviceContext], str]] = {
    MissReason.EVICTED: _describe_evicted,
    MissReason.SPILLED: _describe_spilled,
}
_TEXTS: Mapping[MissReason, str] = {
    MissReason.REPLICA_LOST: (
        "Replicas with cached prefixes were removed or restarted. Restart rarely and one at a time, "
        "and prewarm new replicas (prewarm.templates)."
    ),
    MissReason.IDENTITY: (
        "Prefixes are cached for another model, adapter, salt or tenant. Use the same one if prompts may be shared."
    ),
    MissReason.MISPREDICTED: (
        "Prefixes were predicted as cached and were not. Turn on KV events (events.enabled), "
        "and check that prefix caching is on."
    ),
    MissReason.COLD: "Prompts have no known beginning. If they have a common part, put it first.",
    MissReason.UNSUPPORTED: "The router cannot parse these prompts, so it places them without cache information.",
}


def _build_replay_rows(of: AdviceContext) -> list[dict[str, Any]]:
    hit, replay, prompt = of.sums[HIT], of.sums[REPLAY], of.sums[PROMPT]
    if hit <= 0 or replay < hit * REPLAYS_WORTH:
        return []
    text = (
        f"{replay / hit:.0%} of hits are replays of identical prompts: this looks like a load test. "
        f"The genuine hit rate is {(hit - replay) / prompt:.0%}."
    )
    return [_row("replays", text, 0.0, of.sums[REQUESTS], of)]


def span(seconds: float) -> str:
    """Return a time in words, in seconds up to two minutes."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min"


def _short(number: float) -> str:
    """Return a number with three digits, and a letter for thousands."""
    for letter in ("", "k", "M", "G"):
        if number < 999.5:
            return f"{number:.3g}{letter}"
        number /= 1e3
    return f"{number:.3g}T"
