"""A decision in words: the request's replica and the reason for it, the prediction and the result, the times, and
possible improvements. Names come from clients, so characters that a terminal would interpret are removed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from router.core.insights.ledger.advice import said_of
from router.core.insights.ledger.lost_tokens import Loss
from router.core.placement.spill import SpillCause
from router.core.types.cache_misses import Difference, DifferenceKind, MissReason, TokenFate
from router.core.types.placements import PlacementReason
from router.former_names import SPILL_CAUSES

Row = Mapping[str, Any]

_REASONS = {
    PlacementReason.WARM: "it has the longest cached prefix of all candidates",
    PlacementReason.SPILL: (
        "another replica has a longer cached prefix, but waiting for it would have cost more than computing here"
    ),
    PlacementReason.COLD: "no candidate has any part of the prompt cached, and this one was the cheapest",
    PlacementReason.TIE: "prices were nearly equal, and the hash ring decided",
    PlacementReason.ONLY: "it was the only candidate: no other replica is ready and serves the model",
    PlacementReason.POLICY: "the policy ignores caches",
    PlacementReason.RETRY: "an earlier attempt on another replica failed",
    PlacementReason.PULL: "another replica has a longer cached prefix and transfers those blocks here",
    PlacementReason.SPLIT: (
        "another replica prefills the prompt and transfers the blocks here, which cost less than both stages here"
    ),
}
_RULES = {
    "price": "the price: no other candidate is within the tie band",
    "ring_guess": "the hash ring: another router probably placed this prompt there",
    "last_replica": "a tie: the conversation's last answer came from there",
    "predicted_replica": "a tie: the agent's headers predict this replica",
    "prefix_holder": "a tie: it can begin first of those with the longest cached prefix",
    "hash_ring": "a tie: it has fewer open requests of two places on the hash ring",
}
"""Rule of the policy `warm` (core/placement/policies/warm/tie_break.py) -> its sentence."""
_CAUSES: Mapping[str, str] = {
    SpillCause.QUEUE: "prefill work was queued there",
    SpillCause.KV_SPACE: "its KV memory was full at the time",
    SpillCause.DELAY: "its first tokens come later than its work explains",
    SpillCause.EVICTION: "it would have evicted blocks that other requests need",
    SpillCause.SPEED: "it computes more slowly",
    SpillCause.DECODE_LOAD: "too many answers were decoded there at the time",
    SpillCause.TIE: "prices were nearly equal",
    SpillCause.POLICY: "the policy ignores caches, or weighs other factors",
    SpillCause.FULL: "its concurrency limit was reached",
    SpillCause.RETRY: "an earlier attempt on it failed",
    SpillCause.UNHEALTHY: "it was not ready, in cooldown, or its circuit breaker was open",
    SpillCause.ROLE: "it only prefills, and the request was placed on one replica",
}
_MISSES = {
    MissReason.DIVERGED: "an earlier prompt had the same tokens after a part that differs now",
    MissReason.EVICTED: "a replica had cached them and evicted them",
    MissReason.SPILLED: "another replica has them cached, but computing them here was cheaper",
    MissReason.REPLICA_LOST: "the replica with these tokens was removed or restarted",
    MissReason.IDENTITY: "they are cached for another model, adapter, salt or tenant",
    MissReason.MISPREDICTED: "the router predicted a hit, and the engine reported a miss",
    MissReason.UNSUPPORTED: "the router cannot parse this prompt",
    MissReason.COLD: "no earlier prompt has the same beginning",
    MissReason.NEW: "they follow the known part of the prompt: unavoidable",
    MissReason.TAIL: "a partial block and the last token, which engines always compute",
}
_HELP = {
    MissReason.EVICTED: "More KV memory would have kept {n} tokens: add replicas or KV offloading, or shorten prompts.",
    MissReason.SPILLED: (
        "No change is necessary: computing {n} tokens again was faster than waiting. "
        "More replicas reduce such recomputation."
    ),
    MissReason.REPLICA_LOST: (
        "{n} tokens were lost: restart replicas one at a time, and prewarm new ones (prewarm.templates)."
    ),
    MissReason.IDENTITY: (
        "{n} tokens are cached for another model, adapter, salt or tenant: use the same one if prompts may be shared."
    ),
    MissReason.MISPREDICTED: (
        "{n} tokens were predicted as cached and were not: turn on KV events of the replicas (events.enabled)."
    ),
}
_ENDINGS = {"ok": "complete answer", "client_left": "client disconnected", "failed": "incomplete answer"}
_DEAREST = 3  # about 3 milliseconds: a smaller cost is not named as a cause of delay
_FACTS = {"cached_tokens": "cached", "uncached_tokens": "to compute", "in_flight": "open"}
_TERMS = {
    "wait_ms": "wait",
    "uncached_ms": "prefill",
    "transfer_ms": "transfer",
    "load_ms": "delays queue",
    "room_ms": "occupies",
    "evicted_ms": "evicts",
    "evicted_again_ms": "evicts again",
    "stalled_ms": "stalls",
    "decode_ms": "decode",
    "slowed_ms": "slows",
}
"""Term of a price (core/placement/policies/warm/cost.py) -> its column."""


def explain_row(row: Row) -> list[str]:
    """Return lines of plain text about one decision."""
    lines = [*_head(row), *_placement(row), *_cache(row), *_times(row), *_render_remedies(row)]
    return [plain(line) for line in lines]


def _head(row: Row) -> Iterator[str]:
    at = datetime.fromtimestamp(row["at_s"], UTC).isoformat(" ", "milliseconds").removesuffix("+00:00")
    yield f"Request {row['id']}"
    whose = f", tenant {row['tenant']}" if row["tenant"] else ""
    model = f"model {row['model']}" if row["model"] else "no model"
    yield f"  received  {at} UTC, {row['route']}, {model}{whose}"
    if row.get("conversation"):
        step = f", step {row['step']}" if row.get("step") else ""
        yield f"  position  turn {row['turn'] + 1} of conversation {row['conversation']}{step}"
    if row.get("agent_id"):
        yield f"  agent     {_agent(row)}"
    usage = row["usage"]
    told = f", {usage['completion_tokens']} tokens" if usage else ""
    ending = _ENDINGS.get(row["ending"], row["ending"])
    yield f"  ended     {row['status']}, {ending}{told}, after {span(row['duration_s'])}"
    if row["error"]:
        yield f"  error     {row['error']}{': ' + row['detail'] if row['detail'] else ''}"
    if row.get("warning"):
        yield f"  warning   {row['warning']}"
    if row.get("trace_id"):
        yield f"  trace     {row['trace_id']}"


def _agent(row: Row) -> str:
    """Return the client's statements about its agent. Names are hashed, as on the admin pages."""
    parent = f", started by {row['agent_parent']}" if row.get("agent_parent") else ""
    final = "; marked as final by the client" if row.get("agent_final") else ""
    return f"{row.get('agent') or 'unknown client'}, conversation {row['agent_id']}{parent}{final}"


def _placement(row: Row) -> Iterator[str]:
    yield ""
    if not row["replica"]:
        yield "Not placed: the request was answered before a replica was chosen."
        return
    why = _REASONS.get(row["reason"], "")
    yield f"Placed on {row['replica']}: {row['reason']}{' - ' + why if why else ''}."
    if row.get("rule") in _RULES:
        yield f"Decided by {_RULES[row['rule']]}."
    for each in row["retries"]:
        yield f"Failed attempt: {each['replica']} ({each['kind']})."
    if row.get("spill"):
        spill = str(row["spill"])
        spill = SPILL_CAUSES.get(spill, spill)
        cause = _CAUSES.get(spill, spill)
        more = f"{_count(row['spilled_tokens'])} more cached tokens"
        who = f"{row['held_by']}, with {more}," if row.get("held_by") else f"A replica with {more}"
        yield f"{who} was not chosen: {cause}."
    if row["candidates"]:
        yield ""
        yield f"Candidates, {len(row['candidates'])} of {row['weighed']} with a price; the terms in ms add up to it:"
        yield from _candidates(row["candidates"], row["replica"])
    else:
        yield "Prices of other candidates are unknown."


def _candidates(candidates: Sequence[Row], chosen: str) -> Iterator[str]:
    """Yield the lines of a table. The chosen candidate has a star, and columns with only zeros are left out."""
    values = [_numbers(each) for each in candidates]
    columns = [title for title in (*_FACTS.values(), *_TERMS.values(), "price") if any(v.get(title) for v in values)]
    rows = [["  replica", *columns, "grade"]]
    for each, numbers in zip(candidates, values, strict=True):
        mark = "* " if each["id"] == chosen else "  "
        rows.append([mark + each["id"], *(_count(numbers.get(title, 0)) for title in columns), str(each["grade"])])
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    last = len(widths) - 1
    for row in rows:
        cells = [
            cell.ljust(width) if n in (0, last) else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _numbers(candidate: Row) -> dict[str, float]:
    """Return a candidate's numbers by column. The terms add up to the price; rows of routers before 0.2 have none."""
    facts = {title: candidate.get(name) or 0 for name, title in _FACTS.items()}
    terms = {_TERMS.get(name, name): value for name, value in (candidate.get("price_terms") or {}).items()}
    return facts | terms | {"price": candidate.get("price_ms") or 0}


def _cache(row: Row) -> Iterator[str]:
    if not row["replica"] or row["prompt_tokens"] is None:
        return
    yield ""
    yield (
        f"Predicted: {_count(row['predicted_cached_tokens'])} of {_count(row['prompt_tokens'])} prompt tokens cached "
        f"(grade {row['grade']})."
    )
    if row.get("predicted_tier_tokens"):
        loaded = _count(row["predicted_tier_tokens"])
        yield f"Of these {loaded} are not on the GPU: they are loaded from memory or files outside of it."
    if row.get("predicted_pull_tokens"):
        pulled, took = _count(row["predicted_pull_tokens"]), _count(row["predicted_pull_ms"])
        yield f"Of these {pulled} are pulled from {row['pull_source']}, in {took} ms."
    if row.get("prefill_replica"):
        computed, sent = _count(row["predicted_prefill_ms"]), _count(row["predicted_transfer_ms"])
        yield f"{row['prefill_replica']} prefills the prompt in {computed} ms and transfers its blocks in {sent} ms."
    usage = row["usage"]
    if usage and usage["cached_tokens"] is not None:
        yield f"Cached by the engine's count: {_count(usage['cached_tokens'])} of {_count(usage['prompt_tokens'])}."
    elif usage:
        yield "The engine reports no cached tokens: the following figures are predicted."
    if not row["miss"]:
        yield "No cache misses." if row["hit_tokens"] else "The reasons of cache misses are unknown for this request."
        return
    kind = ", all from an identical earlier prompt" if row["hit"] == "replay" else ""
    yield f"Hits: {_count(row['hit_tokens'] or 0)} tokens{kind}. Misses:"
    width = max(len(_count(tokens)) for tokens in row["miss"].values())
    for miss, tokens in row["miss"].items():
        yield f"  {_count(tokens).rjust(width)}  {miss.replace('_', ' '):<12}  {_MISSES.get(miss, '')}".rstrip()
    if others := (row.get("places") or {}).get(TokenFate.EVICTED_BY_OTHERS):
        yield f"Of the evicted tokens {_count(others)} were evicted by other replicas."
    if row["difference"]:
        yield from _difference(row["difference"])


def _difference(found: Row) -> Iterator[str]:
    place = found["path"] or "the beginning"
    kind = str(found["change"]).replace("_", " ")
    yield f"First difference from an earlier prompt: {kind} at {place}, byte {_count(found['at_bytes'])}."
    if found["lost_bytes"]:
        yield f"  {_count(found['lost_bytes'])} bytes after it are the same, and were computed again."
    if found.get("before") or found.get("after"):
        yield f"  Before: {found['before']!r}. Now: {found['after']!r}."
    elif found.get("shape"):
        yield f"  Shape: {found['shape']!r} (letters as a, digits as 0)."


def _times(row: Row) -> Iterator[str]:
    yield ""
    yield "Times:"
    times = (
        ("in the router's queue", row["queued_s"] or None),
        ("in the router before forwarding", row.get("overhead_s")),
        ("from forwarding to the first token", row["ttft_s"]),
        ("between two tokens, mean", row.get("inter_token_s")),
        ("total", row["duration_s"]),
    )
    for name, value in times:
        if value is not None:
            yield f"  {span(value):>9}  {name}"
    if row.get("predicted_ttft_s") and row["ttft_s"] is not None:
        most = span(row["predicted_ttft_p90_s"])
        yield f"  {span(row['predicted_ttft_s']):>9}  predicted time to first token; 90 % of streams: {most}"
    if row.get("wanted_ttft_s"):
        kept = {True: "in time", False: "too late", None: "no first token of a stream was observed"}[row.get("in_time")]
        yield f"  {span(row['wanted_ttft_s']):>9}  deadline of the first token, from arrival: {kept}"


def _render_remedies(row: Row) -> Iterator[str]:
    """Yield changes that would have made this request faster, or would have kept it from failing."""
    advice = list(_advice(row))
    yield ""
    yield "Possible improvements:"
    for text in advice or ["None: no avoidable cache miss and no queueing."]:
        yield f"  - {text}"


def _advice(row: Row) -> Iterator[str]:
    misses = row["miss"] or {}
    if row["difference"] and misses.get(MissReason.DIVERGED):
        yield f"{_advise_on_difference(row['difference'])} ({_count(misses[MissReason.DIVERGED])} tokens)"
    for miss, text in _HELP.items():
        if misses.get(miss):
            yield text.format(n=_count(misses[miss]))
    if row["queued_s"] * 1e3 >= _DEAREST:
        queued = span(row["queued_s"])
        yield f"The request waited {queued} in the router's queue: add replicas, or send fewer requests at a time."
    chosen = next((each for each in row["candidates"] if each["id"] == row["replica"]), None)
    before_ms = max(chosen["pending_ms"], chosen["kv_wait_ms"]) if chosen is not None else 0.0
    delay_ms = chosen.get("delay_ms") or 0.0 if chosen is not None else 0.0
    if delay_ms:
        yield (
            f"First tokens of {row['replica']} come {span(delay_ms / 1e3)} later than its work explains: "
            "check the network and the proxies before it."
        )
    if chosen is not None and before_ms > max(chosen["uncached_ms"], _DEAREST):
        yield f"About {_count(before_ms)} ms of other work was before it at the replica: add replicas."
    if row["retries"]:
        yield "An earlier attempt failed: /admin/replicas shows the state of the replicas."
    if row["status"] >= 500 or row["ending"] == "failed":
        yield "The engine failed: look for this request id in its log."


def _advise_on_difference(found: Row) -> str:
    """Return the advice that the router gives about such a difference."""
    fields = {name: found[name] for name in Difference.__struct_fields__ if name in found}
    fields |= {"change": DifferenceKind(found["change"]), "piece_hash": 0}
    return said_of(Loss(0, Difference(**fields)))


def plain(text: str) -> str:
    """Return the text on one line, without characters that a terminal would interpret."""
    return "".join(c if c.isprintable() else " " for c in str(text))


def span(value_s: float) -> str:
    """Return a time in a readable unit."""
    if value_s < 1:
        return f"{value_s * 1e3:.3g} ms"
    if value_s < 120:
        return f"{value_s:.3g} s"
    minutes = int(value_s) // 60
    if minutes < 120:
        return f"{minutes} min"
    return f"{minutes // 60} h" if minutes < 48 * 60 else f"{minutes // 1440} days"


def _count(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10 or value == int(value) else f"{value:.1f}"
