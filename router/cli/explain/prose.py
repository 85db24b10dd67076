"""A decision in words: the request's replica and the reason for it, the prediction and the result, the times, and
possible improvements. Names come from clients, so characters that a terminal would interpret are removed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from router.core.insights.ledger.advice import said_of
from router.core.insights.ledger.lost_tokens import Loss
from router.core.placement.spill import SpillCause
from router.core.types.misses import Difference, DifferenceKind, MissReason, TokenFate
from router.core.types.placements import PlacementReason
from router.former_names import SPILL_CAUSES

Row = Mapping[str, Any]

_REASONS = {
    PlacementReason.WARM: "it holds the longest part of the prompt that any candidate holds",
    PlacementReason.SPILL: (
        "another replica holds more of it, but waiting there would have cost more than computing here"
    ),
    PlacementReason.COLD: "no candidate holds any of the prompt, and this one was the cheapest",
    PlacementReason.TIE: "prices were too close to tell apart, and the hash ring decided",
    PlacementReason.ONLY: "it was the only candidate: others are not ready, or do not serve the model",
    PlacementReason.POLICY: "the policy does not look at caches",
    PlacementReason.RETRY: "another replica had failed before",
    PlacementReason.PULL: "another replica holds more of it, and its memory sends that here",
    PlacementReason.SPLIT: (
        "another replica prefills it and sends the blocks here, which cost less than doing both here"
    ),
}
_CAUSES: Mapping[str, str] = {
    SpillCause.QUEUE: "prefill work waited there",
    SpillCause.KV_SPACE: "its KV memory had no room yet",
    SpillCause.EVICTION: "it would have dropped what others need",
    SpillCause.SPEED: "it computes more slowly",
    SpillCause.DECODE_LOAD: "too many answers were being decoded there",
    SpillCause.TIE: "prices were too close to tell apart",
    SpillCause.POLICY: "the policy does not look at caches, or weighs something else",
    SpillCause.FULL: "it had as many requests as it may have",
    SpillCause.RETRY: "it had been tried, and failed",
    SpillCause.UNHEALTHY: "it was not ready, resting, or behind an open breaker",
    SpillCause.ROLE: "it only prefills for others, and one replica was to do it all",
}
_MISSES = {
    MissReason.DIVERGED: "an earlier prompt had these tokens too, behind something that differs now",
    MissReason.EVICTED: "a replica held them, and dropped them",
    MissReason.SPILLED: "another replica holds them, and computing them here was cheaper",
    MissReason.REPLICA_LOST: "the replica that held them is gone, or was restarted",
    MissReason.IDENTITY: "they are held for another model, adapter, salt or tenant",
    MissReason.MISPREDICTED: "the router predicted a hit, and the engine reported a miss",
    MissReason.UNSUPPORTED: "the router cannot read this prompt",
    MissReason.COLD: "no earlier prompt begins like this one",
    MissReason.NEW: "they stand behind what was seen before: unavoidable",
    MissReason.TAIL: "a partial block and the last token, which engines always compute",
}
_HELP = {
    MissReason.EVICTED: "More KV memory would have kept {n} tokens: more replicas, KV offloading, or shorter prompts.",
    MissReason.SPILLED: (
        "Nothing had to: computing {n} tokens again was quicker than to wait. More replicas need less of it."
    ),
    MissReason.REPLICA_LOST: (
        "Restart replicas one at a time, and warm new ones (prewarm.templates): {n} tokens were lost."
    ),
    MissReason.IDENTITY: "One model, adapter, salt and tenant for what may be shared: {n} tokens are held for another.",
    MissReason.MISPREDICTED: "KV events of the replicas, which say what they hold: {n} tokens were thought to be held.",
}
_ENDINGS = {"ok": "a whole answer", "client_left": "the client left", "failed": "the answer broke off"}
_DEAREST = 3  # about 3 milliseconds: a smaller cost is not named as a cause of delay
_COLUMNS = (
    ("cached", "cached_tokens"), ("to compute", "uncached_tokens"), ("open", "in_flight"), ("queue", "pending_ms"),
    ("KV wait", "kv_wait_ms"), ("load", "loading_ms"), ("prefill", "uncached_ms"),
    ("decode", "decode_ms"), ("takes room", "room_ms"), ("evicts", "evicted_ms"), ("slows", "slowed_ms"),
    ("stalls", "stalled_ms"), ("price", "price_ms"),
)  # fmt: skip


def explain_row(row: Row) -> list[str]:
    """Return lines of plain text about one decision."""
    lines = [*_head(row), *_placement(row), *_cache(row), *_times(row), *_render_remedies(row)]
    return [plain(line) for line in lines]


def _head(row: Row) -> Iterator[str]:
    at = datetime.fromtimestamp(row["at_s"], UTC).isoformat(" ", "milliseconds").removesuffix("+00:00")
    yield f"Request {row['id']}"
    whose = f", tenant {row['tenant']}" if row["tenant"] else ""
    model = f"model {row['model']}" if row["model"] else "no model"
    yield f"  came      {at} UTC, {row['route']}, {model}{whose}"
    if row.get("conversation"):
        step = f", step {row['step']}" if row.get("step") else ""
        yield f"  is        turn {row['turn'] + 1} of conversation {row['conversation']}{step}"
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
    final = "; the client says that it is over" if row.get("agent_final") else ""
    return f"{row.get('agent') or 'of no client that is known'}, its conversation {row['agent_id']}{parent}{final}"


def _placement(row: Row) -> Iterator[str]:
    yield ""
    if not row["replica"]:
        yield "Went nowhere: it was answered before a replica was chosen."
        return
    why = _REASONS.get(row["reason"], "")
    yield f"Went to {row['replica']}: {row['reason']}{' - ' + why if why else ''}."
    for each in row["retries"]:
        yield f"Tried before: {each['replica']}, which failed ({each['kind']})."
    if row.get("spill"):
        spill = str(row["spill"])
        spill = SPILL_CAUSES.get(spill, spill)
        cause = _CAUSES.get(spill, spill)
        more = f"holds {_count(row['spilled_tokens'])} tokens more"
        who = f"{row['held_by']}, which {more}," if row.get("held_by") else f"A replica that {more}"
        yield f"{who} was passed over: {cause}."
    if row["candidates"]:
        yield ""
        yield f"Candidates, {len(row['candidates'])} of {row['weighed']} that were weighed; times and prices in ms:"
        yield from _candidates(row["candidates"], row["replica"])
    else:
        yield "What the other candidates would have cost is not known: the worker placed it without the hub."


def _candidates(candidates: Sequence[Row], chosen: str) -> Iterator[str]:
    """Yield the lines of a table. The chosen candidate has a star, and columns with only zeros are left out."""
    columns = [(title, name) for title, name in _COLUMNS if any(each.get(name) for each in candidates)]
    rows = [["  replica", *(title for title, _ in columns), "grade"]]
    for each in candidates:
        mark = "* " if each["id"] == chosen else "  "
        rows.append([mark + each["id"], *(_count(each.get(name) or 0) for _, name in columns), str(each["grade"])])
    widths = [max(len(row[n]) for row in rows) for n in range(len(rows[0]))]
    last = len(widths) - 1
    for row in rows:
        cells = [
            cell.ljust(width) if n in (0, last) else cell.rjust(width)
            for n, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()


def _cache(row: Row) -> Iterator[str]:
    if not row["replica"] or row["prompt_tokens"] is None:
        return
    yield ""
    yield (
        f"Predicted: {_count(row['predicted_cached_tokens'])} of {_count(row['prompt_tokens'])} prompt tokens cached "
        f"(grade {row['grade']})."
    )
    if row.get("predicted_tier_tokens"):
        yield f"Of these {_count(row['predicted_tier_tokens'])} are not on the GPU: they are loaded from behind it."
    if row.get("predicted_pull_tokens"):
        pulled, took = _count(row["predicted_pull_tokens"]), _count(row["predicted_pull_ms"])
        yield f"Of these {pulled} are pulled from {row['pull_source']}, in {took} ms."
    if row.get("prefill_replica"):
        computed, sent = _count(row["predicted_prefill_ms"]), _count(row["predicted_transfer_ms"])
        yield f"{row['prefill_replica']} prefills it, in {computed} ms, and sends its blocks, in {sent} ms more."
    usage = row["usage"]
    if usage and usage["cached_tokens"] is not None:
        yield f"The engine counted {_count(usage['cached_tokens'])} of {_count(usage['prompt_tokens'])}."
    elif usage:
        yield "The engine does not say how many it found: what follows is as predicted."
    if not row["miss"]:
        yield "No token missed." if row["hit_tokens"] else "Why tokens missed is not known of this request."
        return
    kind = ", all a replay of the very same prompt" if row["hit"] == "replay" else ""
    yield f"Hits: {_count(row['hit_tokens'] or 0)} tokens{kind}. Misses:"
    width = max(len(_count(tokens)) for tokens in row["miss"].values())
    for miss, tokens in row["miss"].items():
        yield f"  {_count(tokens).rjust(width)}  {miss.replace('_', ' '):<12}  {_MISSES.get(miss, '')}".rstrip()
    if others := (row.get("places") or {}).get(TokenFate.EVICTED_BY_OTHERS):
        yield f"Of the evicted tokens {_count(others)} were dropped by other replicas than this one."
    if row["difference"]:
        yield from _difference(row["difference"])


def _difference(found: Row) -> Iterator[str]:
    place = found["path"] or "the beginning"
    kind = str(found["change"]).replace("_", " ")
    yield f"First difference from an earlier prompt: {kind} at {place}, byte {_count(found['at_bytes'])}."
    if found["lost_bytes"]:
        yield f"  {_count(found['lost_bytes'])} bytes behind it are the same, and had to be computed again."
    if found.get("before") or found.get("after"):
        yield f"  It was {found['before']!r} and is {found['after']!r}."
    elif found.get("shape"):
        yield f"  Its shape: {found['shape']!r} (letters as a, digits as 0)."


def _times(row: Row) -> Iterator[str]:
    yield ""
    yield "Times:"
    times = (
        ("waited in the router for a place", row["queued_s"] or None),
        ("in the router before it was sent on", row.get("overhead_s")),
        ("from then to the first token", row["ttft_s"]),
        ("between two tokens, on average", row.get("inter_token_s")),
        ("altogether", row["duration_s"]),
    )
    for name, value in times:
        if value is not None:
            yield f"  {span(value):>9}  {name}"
    if row.get("predicted_ttft_s") and row["ttft_s"] is not None:
        most = span(row["predicted_ttft_p90_s"])
        yield f"  {span(row['predicted_ttft_s']):>9}  of that were predicted, and {most} for the slowest in ten"
    if row.get("wanted_ttft_s"):
        kept = {True: "in time", False: "too late", None: "not told of a stream's first token"}[row.get("in_time")]
        yield f"  {span(row['wanted_ttft_s']):>9}  was the deadline of the first token, from its arrival: {kept}"


def _render_remedies(row: Row) -> Iterator[str]:
    """Yield changes that would have made this request faster, or would have kept it from failing."""
    advice = list(_advice(row))
    yield ""
    yield "What would have helped:"
    for text in advice or ["Nothing: no token missed that could have been kept, and it did not wait."]:
        yield f"  - {text}"


def _advice(row: Row) -> Iterator[str]:
    misses = row["miss"] or {}
    if row["difference"] and misses.get(MissReason.DIVERGED):
        yield f"{_advise_on_difference(row['difference'])} ({_count(misses[MissReason.DIVERGED])} tokens)"
    for miss, text in _HELP.items():
        if misses.get(miss):
            yield text.format(n=_count(misses[miss]))
    if row["queued_s"] * 1e3 >= _DEAREST:
        yield f"Room at a replica: it waited {span(row['queued_s'])} in the router. More replicas, or fewer at once."
    chosen = next((each for each in row["candidates"] if each["id"] == row["replica"]), None)
    before_ms = chosen["pending_ms"] + chosen["kv_wait_ms"] if chosen is not None else 0.0
    if chosen is not None and before_ms > max(chosen["uncached_ms"], _DEAREST):
        yield f"An idler fleet: it came behind some {_count(before_ms)} ms of other work at the replica."
    if row["retries"]:
        yield "Healthy replicas: an attempt failed before. /admin/replicas says how they are."
    if row["status"] >= 500 or row["ending"] == "failed":
        yield "An engine that answers: its own log has the reason, under this request id."


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
