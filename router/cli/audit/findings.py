"""Results of a log as rows: totals, advice, templates, groups of requests."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

from router.cli.audit.counts import Audit
from router.core.insights.ledger.advice import HOURLY_S_MIN, AdviceContext, advise
from router.core.insights.ledger.decaying_sums import AT, HIT, PROMPT, REPLAY, REPLAYS, misses_of, ratio
from router.core.insights.ledger.template_tree import Views
from router.core.types.cache_misses import FUNNEL_STAGES, MissReason, TokenFate

ADVICE_MAX, TEMPLATES_MAX, GROUPS_MAX, DIFFERENCES_MAX = 50, 50, 50, 16

UNSUPPORTED_SHARE_MAX = 0.5
EXCESS_MAX = 0.01  # of the actual hit rate over the best possible one: rounding to blocks and estimated tokens

Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Findings:
    """Findings of a whole log."""

    figures: dict[str, Any]
    advice: Rows  # rows of `/admin/advice` for the whole log; by the hour if times were logged
    templates: Rows  # rows of `/admin/templates`
    groups: Rows
    places: Rows  # tokens by place, from asked to hit: with one big cache, and by routers' own logs

    def rows(self) -> Rows:
        """Return all rows, each with the name of its table."""
        rows = [{"case": "log", **self.figures}]
        tables = {"advice": self.advice, "template": self.templates, "group": self.groups, "place": self.places}
        for case, table in tables.items():
            rows += [{"case": case, **row} for row in table]
        return rows


def findings_of(audit: Audit, *, prefill_tokens_per_s: float) -> Findings:
    """Return the findings of an audit. `prefill_tokens_per_s` is the assumed prefill speed of a GPU."""
    audit.settle()
    ledger = audit.ledger
    span_s = audit.last_s - audit.first_s
    per_hour = 3_600 / span_s if span_s >= HOURLY_S_MIN else None
    views = Views(ledger.branches, 1.0, bytes_per_token=audit.bytes_per_token, holders=_nobody)
    differences = ledger.losses.make_row_lookup(1.0, DIFFERENCES_MAX)
    templates = [views.template(id_, differences(id_)) for id_ in views.most[:TEMPLATES_MAX]]
    groups = ledger.groups.rows(GROUPS_MAX)
    for row in (*templates, *groups):
        for of_replicas in ("holders", "can_prewarm", "ttft_p50_s", "ttft_p90_s", "step"):
            row.pop(of_replicas, None)
    figures, advice = _figures(audit, span_s, prefill_tokens_per_s), _advice(audit, per_hour, prefill_tokens_per_s)
    return Findings(figures, advice, templates, groups, _places(audit))


def _figures(audit: Audit, span_s: float, prefill_tokens_per_s: float) -> dict[str, Any]:
    sums = audit.ledger.totals
    prompt, hit, replay = sums[PROMPT], sums[HIT], sums[REPLAY]
    return {
        "requests": audit.requests,
        "body_bytes": audit.body_bytes,
        "span_s": round(span_s, 3),
        "prompt_tokens": round(prompt),
        "counted_by": dict(audit.counted_by),
        "hit_rate": ratio(hit, prompt),
        "genuine_hit_rate": ratio(hit - replay, prompt),
        "replay_hit_rate": ratio(replay, prompt),
        "mended_hit_rate": ratio(hit + sums[AT[MissReason.DIVERGED]], prompt),
        "logged_hit_rate": ratio(audit.logged_hits, audit.logged_tokens),
        "logged_prompt_tokens": audit.logged_tokens,
        "replays": round(sums[REPLAYS]),
        "diversity": ratio(audit.requests - sums[REPLAYS], audit.requests),
        "hit_tokens": round(hit),
        "misses": misses_of(sums),
        "prefill_tokens_per_s": prefill_tokens_per_s,
        "forgot": audit.forgot,
        "warnings": _warnings(audit),
        "served_requests": audit.served.requests,
        "served_untold": audit.served.untold,
        "served_held": dict(audit.served.held.most_common()),
    }


def _warnings(audit: Audit) -> list[str]:
    """Return the reasons for which the figures may be wrong."""
    sums, warnings = audit.ledger.totals, list[str]()
    unsupported, best = ratio(sums[AT[MissReason.UNSUPPORTED]], sums[PROMPT]), ratio(sums[HIT], sums[PROMPT])
    if unsupported is not None and unsupported > UNSUPPORTED_SHARE_MAX:
        warnings.append(
            f"{unsupported:.0%} of the prompt tokens are `unsupported`: the log has no readable prompt for them. "
            "The hit rates are too low."
        )
    actual = ratio(audit.logged_hits, audit.logged_tokens)
    if actual is not None and actual > (best or 0.0) + EXCESS_MAX:
        warnings.append(
            f"The actual hit rate ({actual:.1%}) exceeds the best possible hit rate ({best or 0.0:.1%}). The log "
            "lacks a part of the prompts, such as tools or system prompts, or earlier requests. "
            "Do not rely on these figures."
        )
    return warnings


def _places(audit: Audit) -> Rows:
    """Return a row for each place that has tokens, in the order from asked to hit. `left_share` is the share of tokens
    that remain after the place; it is None at hits."""
    lost = {place for places in FUNNEL_STAGES.values() for place in places}
    rows: Rows = [{"place": place.value} for place in TokenFate if audit.places[place] or audit.served.places[place]]
    for prefix, tokens in (("", audit.places), ("served_", audit.served.places)):
        total = left = tokens.total()
        for row in rows if total else ():
            place = TokenFate(row["place"])
            left -= tokens[place]
            row[f"{prefix}tokens"], row[f"{prefix}share"] = tokens[place], ratio(tokens[place], total)
            row[f"{prefix}left_share"] = ratio(left, total) if place in lost else None
    return rows


def _advice(audit: Audit, per_hour: float | None, prefill_tokens_per_s: float) -> Rows:
    ledger = audit.ledger
    prompt = ledger.totals[PROMPT]
    situation = AdviceContext(
        sums=ledger.totals,
        weight=1.0,
        per_hour=per_hour,
        span="in this log",
        ms_per_token=1e3 / prefill_tokens_per_s,
        kv_tokens=0,
        branches=ledger.branches,
    )
    rows = advise(ledger.losses.all.values(), situation, ADVICE_MAX)
    for row in rows:
        lost = row["lost_tokens"]
        row["lost_share"] = ratio(lost, prompt)
        row["gpu_s"] = round(lost / prefill_tokens_per_s, 1)
        if row["lost_tokens_per_h"] is None:  # too few requests, or their time span is unknown
            del row["lost_tokens_per_h"], row["gpu_s_per_h"]
    return rows


def _nobody(_key: int) -> Collection[str]:
    return ()
