"""Ledgers and records of requests."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

from router.core.insights.ledger.template_tree import Views
from router.core.insights.ledger.totals import Ledger
from router.core.types.cache_misses import Difference, DifferenceKind, MissReason, PromptAnalysis, TokenBreakdown
from router.core.types.placements import Confidence, PlacementReason, Receipt, Usage
from router.telemetry.request_record import RequestRecord
from tests.support.request_records import make_record

BEGAN_S = 1_700_000_000.0


def ledger(**more: Any) -> Ledger:
    """A small one, in which everybody may be named."""
    limits: dict[str, Any] = {"templates_max": 16, "groups_max": 12, "steps_max": 4, "excerpts": False}
    return Ledger(**{**limits, "tenant": str, "now_s": BEGAN_S, **more})


def record(at_s: float = 0.0, hit: int = 0, misses: dict[MissReason, int] | None = None, **more: Any) -> RequestRecord:
    """A request that ended so long after the ledger began."""
    misses = misses or {}
    tokens = hit + sum(misses.values())
    receipt = Receipt("http://a", "warm", PlacementReason.WARM, Confidence.ESTIMATED, tokens, hit)
    receipt.replay = more.pop("replay", False)
    miss = TokenBreakdown(tokens, hit, misses, more.pop("saved_ms", 0.0))
    return make_record(**{"at_s": BEGAN_S + at_s, "model": "m", "receipt": receipt, "miss": miss, **more})


def difference(change: DifferenceKind = DifferenceKind.OTHER, **more: Any) -> Difference:
    """One in the system prompt."""
    where: dict[str, Any] = {"message": 0, "role": "system", "path": "messages[0].content", "offset_bytes": 60}
    return Difference(change, **{**where, "at_bytes": 41, "lost_bytes": 400, **more})


def page(of: Ledger, rows_max: int = 50, kv_tokens: int = 0) -> list[dict[str, Any]]:
    """Advice, where a token of prefill takes a millisecond."""
    return of.advice(rows_max, ms_per_token=lambda _: 1.0, kv_tokens=kv_tokens)


def views(of: Ledger, holders: Any = lambda _: ()) -> Views:
    """Its templates, at four bytes a token."""
    return Views(of.branches, of.fading.weight, bytes_per_token=lambda _: 4.0, holders=holders)


requests = st.builds(
    record,
    at_s=st.floats(0, 900),
    hit=st.integers(0, 1_000),
    misses=st.dictionaries(st.sampled_from(MissReason), st.integers(1, 1_000), max_size=3),
    replay=st.booleans(),
    route=st.sampled_from(["/v1/completions", "/v1/chat/completions"]),
    tenant=st.sampled_from(["", "acme", "zeta"]),
    ttft_s=st.none() | st.floats(0, 400),
    usage=st.none() | st.builds(Usage, st.integers(0, 9), st.just(1), st.none() | st.integers(0, 9)),
    analysis=st.none()
    | st.builds(
        PromptAnalysis,
        template=st.integers(0, 30),
        tools=st.booleans(),
        tool_calls=st.integers(0, 5),
        step=st.sampled_from(["", "plan", "act", "look", "think", "say"]),
        difference=st.none() | st.builds(difference, st.sampled_from(DifferenceKind), piece_hash=st.integers(0, 99)),
    ),
)
