"""Decisions as rows of pages: the facts of a request, for operators of the router and for the request's own client."""

from __future__ import annotations

import secrets
from collections.abc import Mapping
from hashlib import blake2b
from typing import Any

import msgspec

from router.core.types.cache_misses import Difference, MissReason
from router.core.types.placements import Candidate, Receipt, stage_row
from router.placement_api import RequestPrincipal
from router.telemetry.request_record import CAUSE, RequestRecord

Row = dict[str, Any]

_HASH_KEY = secrets.token_bytes(16)


def decision_row(record: RequestRecord, number: int) -> Row:
    """Return all facts of a request, for the admin pages. `number` is unique among decisions, and rises."""
    receipt = record.receipt
    return {
        "number": number,
        "id": record.id,
        "session": record.client.session or None,
        "agent": record.client.agent or None,
        "agent_id": record.client.agent_id or None,
        "agent_parent": record.client.agent_parent or None,
        "agent_final": record.client.agent_final,
        "at_s": round(record.at_s, 3),
        "route": record.route,
        "model": record.model,
        "tenant": record.client.tenant,
        "stream": record.stream,
        "status": record.status,
        "ending": record.ending,
        "error": record.error,
        "detail": record.detail,
        "retries": [{"kind": kind, "replica": replica} for kind, replica in record.retries],
        "continued": _render_failover(record),
        "not_continued": record.failover.not_continued or None,
        "queued_s": round(record.times.queued_s, 3),
        "overhead_s": record.times.overhead_s and round(record.times.overhead_s, 6),
        "ttft_s": record.times.ttft_s,
        "wanted_ttft_s": record.times.wanted_ttft_ms and round(record.times.wanted_ttft_ms / 1e3, 4),
        "in_time": record.times.in_time,
        "inter_token_s": record.times.inter_token_s,
        "duration_s": record.times.duration_s,
        "events": record.times.events,
        "usage": fields_of(record.usage) if record.usage is not None else None,
        "replica": receipt and receipt.replica,
        "policy": receipt and receipt.policy,
        "reason": receipt and receipt.reason,
        "rule": (receipt and receipt.rule) or None,
        "grade": receipt and receipt.grade,
        "prompt_tokens": receipt and receipt.prompt_tokens,
        "predicted_cached_tokens": receipt and receipt.predicted_cached_tokens,
        "predicted_tier_tokens": receipt.predicted_tier_tokens if receipt else 0,
        "predicted_pull_tokens": receipt.pull.tokens if receipt and receipt.pull else 0,
        "pull_source": receipt.pull.source if receipt and receipt.pull else None,
        "predicted_pull_ms": round(receipt.pull.fetch_ms, 2) if receipt and receipt.pull else 0.0,
        **stage_row(receipt),
        "spill": (receipt and receipt.spill) or None,
        "spilled_tokens": receipt.spilled_tokens if receipt else 0,
        "predicted_ttft_s": receipt and receipt.ttft_ms and round(receipt.ttft_ms / 1e3, 4),
        "predicted_ttft_p90_s": receipt and receipt.ttft_p90_ms and round(receipt.ttft_p90_ms / 1e3, 4),
        "candidates": [_candidate(c, receipt) for c in receipt.candidates] if receipt else [],
        "weighed": receipt.weighed if receipt else 0,
        **_render_misses(record),
        "repairs": record.repairs,
        "warning": record.warning or None,
        "trace_id": record.trace_id or None,
    }


def _render_failover(record: RequestRecord) -> Row | None:
    how, cause, replica = record.failover.continued
    return {"how": how, "cause": cause, "replica": replica} if how else None


def _render_misses(record: RequestRecord) -> Row:
    """Return the reasons that the request's tokens missed the cache; null values without an observatory."""
    miss, seen, replay = record.cache.miss, record.cache.analysis, record.receipt is not None and record.receipt.replay
    return {
        "miss": miss and miss.misses,
        "hit_tokens": miss and miss.hit,
        "loaded_tokens": miss and miss.loaded,
        "pulled_tokens": miss and miss.pulled,
        "places": record.cache.places,
        "held_by": miss and (miss.held[0] or None),
        "verified": record.usage is not None and record.usage.verified,
        "hit": ("replay" if replay else "genuine") if miss and miss.hit else None,
        "saved_ms": miss and round(miss.saved_ms, 1),
        "template": f"{seen.template:016x}" if seen and seen.template else None,
        "conversation": conversation_of(record),
        "turn": seen and seen.turn,
        "apart": seen is not None and seen.apart,
        "step": seen and seen.step,
        "difference": _difference(seen.difference) if seen and seen.difference else None,
    }


def conversation_of(record: RequestRecord) -> str | None:
    """Return the name of the conversation that the prompt belongs to, by texts of prompts; None if it is unknown."""
    seen = record.cache.analysis
    return f"{seen.conversation:016x}" if seen is not None and seen.conversation else None


def _difference(difference: Difference) -> Row:
    row = fields_of(difference)
    # Hashed with a key: if the shape shows that a piece has few digits, a plain hash would reveal its text.
    named = blake2b(difference.piece_hash.to_bytes(8), digest_size=8, key=_HASH_KEY).hexdigest()
    return {**row, "piece_hash": named}


def _candidate(candidate: Candidate, receipt: Receipt) -> Row:
    row, cost = fields_of(candidate), receipt.cost_of(candidate)
    del row["extras"]
    row |= {"tier_tokens": candidate.tier_tokens, "loading_ms": candidate.loading_ms, "delay_ms": candidate.delay_ms}
    if cost is not None:
        row["price_ms"] = cost.total()
    terms = fields_of(cost) if cost is not None else {}
    return {name: round(value, 2) if isinstance(value, float) else value for name, value in row.items()} | {
        "price_terms": {name: round(value, 2) for name, value in terms.items()}
    }


def fields_of(record: msgspec.Struct) -> Row:
    """Return the fields of a record. A compiled record is no Struct (deploy/compiled_sources.py)."""
    return {name: getattr(record, name) for name in record.__struct_fields__}


# -- for the request's own client --------------------------------------------------------------------------------------

_OWN = (
    "id",
    "at_s",
    "route",
    "model",
    "stream",
    "status",
    "ending",
    "error",
    "detail",
)  # known to its client
# Also known: the client could measure these times itself.
_TIMES = ("ttft_s", "wanted_ttft_s", "in_time", "inter_token_s", "duration_s", "events", "usage")
_TOLD = ("replica", "reason", "grade", "prompt_tokens", "predicted_cached_tokens")  # headers of receipts
_WHERE = (
    "change",
    "message",
    "role",
    "path",
    "offset_bytes",
    "at_bytes",
    "lost_bytes",
)  # places in the client's own body


def client_row(row: Mapping[str, Any], owner: RequestPrincipal) -> Row:
    """Return the part of a request's row that its own client may read. If answers carry no receipts, this is the part
    that the client knows anyway. Otherwise it also contains the receipt's fields and the reasons for them, but never
    another replica's load, nor another prompt's text."""
    shown = {name: row.get(name) for name in (*_OWN, *_TIMES)}
    if not owner.receipts:
        detail = shown["detail"]
        return shown | {"detail": detail and detail.partition(CAUSE)[0]}
    shown |= {name: row.get(name) for name in _TOLD}
    miss = row.get("miss")
    difference = row.get("difference")
    return shown | {
        "waited_s": row.get("queued_s"),
        "retries": [each["kind"] for each in row.get("retries") or ()],
        "spill": row.get("spill"),
        "spilled_tokens": row.get("spilled_tokens"),
        "hit_tokens": row.get("hit_tokens"),
        "miss": _not_of_others(miss) if miss and (owner.isolated or row.get("apart")) else miss,
        "turn": row.get("turn"),
        "difference": difference and {name: difference[name] for name in _WHERE},
    }


def _not_of_others(miss: Mapping[str, int]) -> dict[str, int]:
    """Return the misses without any information about prompts of other identities, as in `x-warmroute-miss` for an
    isolated tenant: those tokens count as cold."""
    if MissReason.IDENTITY not in miss:
        return dict(miss)
    unknown = (MissReason.IDENTITY.value, MissReason.NEW.value)
    cold = miss.get(MissReason.COLD.value, 0) + sum(miss.get(reason, 0) for reason in unknown)
    return {
        MissReason.COLD.value: cold,
        **{why: tokens for why, tokens in miss.items() if why not in (*unknown, MissReason.COLD)},
    }
