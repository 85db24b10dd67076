"""What to do about misses, most costly first: one piece of advice for each difference that costs something, and one for
each other reason that takes more than a hundredth of all prompt tokens.

A template that begins with another one has what is wrong with that as well: losses of one kind and place are one piece
of advice as far as their templates are branches of each other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from router.core.facts.misses import Change, Miss
from router.core.observatory.ledger.branches import named
from router.core.observatory.ledger.losses import PATH_CHARS_MAX, PIECES_MAX, Loss, place_of
from router.core.observatory.ledger.sums import AT, HIT, PROMPT, REPLAY, REQUESTS, SAVED_MS

WORTH = 0.01  # least share of all prompt tokens for a line about a reason
LOSS_WORTH = 0.001  # least share of all prompt tokens for a line about a difference, which says where to look
COLD_WORTH = 0.2  # least share of all prompt tokens for a line about unseen prompts: some always are
REPLAYS_WORTH = 0.5  # least share of all hits for a line about replays


@dataclass(frozen=True, slots=True)
class Situation:
    """What the advice is about: `sums` and losses of the last hour, as they fade."""

    sums: Sequence[float]  # sums of the window, their weights divided out
    weight: float  # weight that sums of losses are to be divided by
    per_hour: float  # factor that makes a sum of the window a rate by the hour
    ms_per_token: float  # price of prefill in the middle of a mean prompt
    kv_tokens: int  # tokens that the fleet has room for; 0: unknown
    label: Callable[[int], str]
    parent: Callable[[int], int] = lambda _: 0  # parent of a template; 0: none
    span: str = "an hour"  # time that rates refer to, in words


def advise(losses: Iterable[Loss], of: Situation, rows_max: int) -> list[dict[str, Any]]:
    """Rows of `/admin/advice`. That hits are replays costs nothing, but is said in any case, last."""
    least = of.sums[PROMPT] * of.weight * LOSS_WORTH
    costly = sorted([loss for loss in _branches(losses, of) if loss.tokens > least], key=lambda each: -each.tokens)
    rows = [
        row for row in [*(_of_loss(loss, of) for loss in costly[:rows_max]), *_of_reasons(of)] if row["lost_tokens"]
    ]
    rows.sort(key=lambda row: -row["lost_tokens"])
    replays = _of_replays(of)
    rows = rows[: rows_max - len(replays)] + replays
    for rank, row in enumerate(rows, 1):
        row["rank"] = rank
    return rows


def _row(change: str, text: str, lost_tokens: float, requests: float, of: Situation) -> dict[str, Any]:
    by_hour = lost_tokens * of.per_hour
    return {
        "rank": 0,
        "template": "",
        "label": "",
        "change": change,
        "message": -1,
        "role": "",
        "path": "",
        "at_bytes": 0,
        "requests": round(requests),
        "lost_tokens": round(lost_tokens),
        "lost_tokens_per_h": round(by_hour),
        "gpu_s_per_h": round(by_hour * of.ms_per_token / 1e3, 1),
        "text": text,
        "last_at_s": 0.0,
        "shape": "",
        "before": "",
        "after": "",
    }


def _of_loss(loss: Loss, of: Situation) -> dict[str, Any]:
    last = loss.last
    row = _row(loss.change.value, said_of(loss), loss.tokens / of.weight, loss.requests / of.weight, of)
    return row | {
        "template": named(loss.template),
        "label": _label(loss.template, of),
        "message": loss.message,
        "role": last.role,
        "path": last.path[:PATH_CHARS_MAX],
        "at_bytes": last.at_bytes,
        "last_at_s": round(loss.last_at_s, 3),  # time of the last request that lost: the cause may be mended since
        "shape": last.shape,
        "before": last.before,
        "after": last.after,
    }


# -- losses of templates that belong together ------------------------------------------------------------------------

# Changes of the list of tools: one loss, wherever in the list each is seen first.
_OF_TOOLS = (Change.TOOL_ORDER, Change.TOOL_ADDED, Change.TOOL_REMOVED)
_ANYWHERE = (Change.TOOL_ORDER,)  # prompts that begin with other tools have no beginning in common to be known by


def _branches(losses: Iterable[Loss], of: Situation) -> list[Loss]:
    """Losses as advice is given of them, named by the one of each that costs most."""
    alike: dict[tuple[Change, int, str], dict[int, Loss]] = {}
    for loss in losses:
        place = (-1, "tools") if loss.change in _OF_TOOLS else place_of(loss.last)
        of_kind = alike.setdefault((loss.change, *place), {})
        known = of_kind.get(loss.template)
        of_kind[loss.template] = loss if known is None else _sum([known, loss])
    summed = []
    for (change, *_), of_kind in alike.items():
        branches = [list(of_kind.values())] if change in _ANYWHERE else _by_head(of_kind, of)
        summed += [_sum(branch) for branch in branches]
    return summed


def _by_head(losses: Mapping[int, Loss], of: Situation) -> Iterable[list[Loss]]:
    """Losses in groups: that of a topmost template, with those of its branches. `losses` are by template."""
    heads: dict[int, list[Loss]] = {}
    for template, loss in losses.items():
        head = above = template
        while above := of.parent(above):
            if above in losses:
                head = above
        heads.setdefault(head, []).append(loss)
    return heads.values()


def _sum(losses: Sequence[Loss]) -> Loss:
    """One loss with the sums of all, named by the most costly."""
    if len(losses) == 1:
        return losses[0]
    most = max(losses, key=lambda each: each.tokens)
    loss = Loss(most.template, most.last)
    loss.message = min(each.message for each in losses)
    loss.last_at_s = max(each.last_at_s for each in losses)
    loss.requests = sum(each.requests for each in losses)
    loss.tokens = sum(each.tokens for each in losses)
    loss.pieces = set(islice(set().union(*(each.pieces for each in losses)), PIECES_MAX))
    return loss


def _label(template: int, of: Situation) -> str:
    """The template's own label, or that of its nearest ancestor that has one."""
    while template and not of.label(template):
        template = of.parent(template)
    return of.label(template)


# -- differences ---------------------------------------------------------------------------------------------------

_AWAY = "Everything behind it is computed again each time: move it to the end, into the last user message."
_TOOLS = "All behind them is computed again. Bring the same tools with every request, and narrow them with tool_choice."

# `{place}` begins a sentence, `{at}` is a byte, `{orders}` says how many were seen.
_SAID: Mapping[Change, str] = {
    Change.TIMESTAMP: "{place} holds a date or a time at byte {at} that changes. " + _AWAY,
    Change.IDENTIFIER: "{place} holds an identifier (a UUID, a request id) at byte {at} that changes. " + _AWAY,
    Change.COUNTER: "{place} holds a number at byte {at} that changes. " + _AWAY,
    Change.TOOL_ORDER: "The tools come in {orders}. Sort them, or let the router do it (observatory.repairs: "
    "sort_tools): in another order they are another prompt.",
    Change.TOOL_ADDED: "Tools are added from one request to the next. " + _TOOLS,
    Change.TOOL_REMOVED: "Tools are left out from one request to the next. " + _TOOLS,
    Change.KEY_ORDER: "{place} has JSON whose keys change their order. Serialise it canonically{repair}.",
    Change.WHITESPACE: "{place} differs in white space only, at byte {at}. Write it the same way every time.",
    Change.EDITED_HISTORY: "History is rewritten at message {message}. Append instead of changing what was said: "
    "all behind the change is computed again.",
    Change.TRUNCATED_HISTORY: "Old messages are dropped, from message {message} on. Keep the prefix, or cut rarely and "
    "much at a time.",
    Change.REORDERED_CONTEXT: "{place} has the same passages in another order. Sort retrieved passages by a key that "
    "does not change, such as their id.",
    Change.OTHER: "{place} changes at byte {at}. Keep it the same, or move what changes to the end.",
}


def said_of(loss: Loss) -> str:
    """One or two sentences: what is wrong, and what to do about it."""
    last, count = loss.last, len(loss.pieces)
    return _SAID[loss.change].format(
        place=_place(loss),
        at=last.at_bytes,
        message=loss.message,
        orders=f"{count}{' or more' * (count >= PIECES_MAX)} orders" if count > 1 else "changing order",
        repair=" (observatory.repairs: canonical_tools)" if last.path.startswith("tools") else "",
    )


def _place(loss: Loss) -> str:
    if loss.message >= 0:
        return f"Message {loss.message}" + (f" ({loss.last.role})" if loss.last.role else "")
    path = loss.last.path[:PATH_CHARS_MAX]
    return f"`{path}`" if path else "The beginning of the prompt"


# -- other reasons -------------------------------------------------------------------------------------------------


def _of_reasons(of: Situation) -> list[dict[str, Any]]:
    rows = []
    for miss, said in _REASONS.items():
        tokens, all_tokens = of.sums[AT[miss]], of.sums[PROMPT]
        if all_tokens > 0 and tokens > all_tokens * (COLD_WORTH if miss is Miss.COLD else WORTH):
            rows.append(_row(miss.value, said(tokens, of), tokens, of.sums[REQUESTS], of))
    return rows


def _evicted(tokens: float, of: Situation) -> str:
    text = f"{_by_hour(tokens, of)} were evicted before they were asked for again. "
    if not of.kv_tokens:
        return text + "The fleet's KV memory is too small for what is asked for within an hour."
    need = of.kv_tokens + tokens
    return text + (
        f"The fleet's KV memory holds {_short(of.kv_tokens)} tokens, and up to {_short(need)} are in use: add replicas "
        "or KV offloading, or shorten prompts."
    )


def _spilled(tokens: float, of: Situation) -> str:
    saved_s = of.sums[SAVED_MS] / 1e3 * of.per_hour
    return (
        f"{_by_hour(tokens, of)} were computed again where it was quicker than to wait for the replica that holds "
        f"them, which saved {_short(saved_s)} s of waiting an hour. More replicas would need less of it."
    )


def _lost(tokens: float, of: Situation) -> str:
    return (
        f"{_by_hour(tokens, of)} were held by replicas that left or were restarted. Restart rarely and one at a time, "
        "and warm new replicas (prewarm.templates)."
    )


def _identity(tokens: float, of: Situation) -> str:
    return (
        f"{_by_hour(tokens, of)} are held for another model, adapter, salt or tenant. Use one for what may be shared."
    )


def _mispredicted(tokens: float, of: Situation) -> str:
    return (
        f"{_by_hour(tokens, of)} were thought to be held and were not. Let replicas tell what they hold "
        "(events.enabled), and see that prefix caching is on."
    )


def _cold(tokens: float, of: Situation) -> str:
    return (
        f"{_by_hour(tokens, of)} are of prompts that begin like none before. If they have something in common, put it "
        "first."
    )


def _unsupported(tokens: float, of: Situation) -> str:
    return f"{_by_hour(tokens, of)} are of prompts that the router cannot read, so it places them blindly."


_REASONS: Mapping[Miss, Callable[[float, Situation], str]] = {
    Miss.EVICTED: _evicted,
    Miss.SPILLED: _spilled,
    Miss.REPLICA_LOST: _lost,
    Miss.IDENTITY: _identity,
    Miss.MISPREDICTED: _mispredicted,
    Miss.COLD: _cold,
    Miss.UNSUPPORTED: _unsupported,
}


def _of_replays(of: Situation) -> list[dict[str, Any]]:
    hit, replay, prompt = of.sums[HIT], of.sums[REPLAY], of.sums[PROMPT]
    if hit <= 0 or replay < hit * REPLAYS_WORTH:
        return []
    text = (
        f"{replay / hit:.0%} of hits are replays of identical prompts: this looks like a load test. "
        f"The genuine hit rate is {(hit - replay) / prompt:.0%}."
    )
    return [_row("replays", text, 0.0, of.sums[REQUESTS], of)]


def _by_hour(tokens: float, of: Situation) -> str:
    return f"{_short(tokens * of.per_hour)} tokens {of.span}"


def _short(number: float) -> str:
    """Three digits, and a letter for thousands."""
    for letter in ("", "k", "M", "G"):
        if number < 999.5:
            return f"{number:.3g}{letter}"
        number /= 1e3
    return f"{number:.3g}T"
