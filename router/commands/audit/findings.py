"""The results of a log as rows: figures of the whole, advice, templates, groups of requests."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, cast

from router.commands.audit.counting import Audit
from router.core.facts.misses import Change, Miss
from router.core.observatory.ledger.advice import Situation, advise
from router.core.observatory.ledger.branches import Views
from router.core.observatory.ledger.losses import PATH_CHARS_MAX, Key, Loss
from router.core.observatory.ledger.sums import AT, HIT, PROMPT, REPLAY, REPLAYS, misses_of, ratio

ADVICE_MAX, TEMPLATES_MAX, GROUPS_MAX, DIFFERENCES_MAX = 50, 50, 50, 16
SPAN_S_MIN = 60.0  # a shorter log gets no figures by the hour

Rows = list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Findings:
    """The findings of a whole log."""

    figures: dict[str, Any]
    advice: Rows  # rows of `/admin/advice` for the whole log; by the hour if times were logged
    templates: Rows  # rows of `/admin/templates`
    groups: Rows

    def rows(self) -> Rows:
        """All rows, each with the name of its table."""
        rows = [{"case": "log", **self.figures}]
        for case, table in (("advice", self.advice), ("template", self.templates), ("group", self.groups)):
            rows += [{"case": case, **row} for row in table]
        return rows


def findings_of(audit: Audit, *, prefill_tokens_per_s: float) -> Findings:
    """The findings of an audit; `prefill_tokens_per_s` is the assumed speed of a GPU at computing prompts."""
    audit.settle()
    ledger = audit.ledger
    span_s = audit.last_s - audit.first_s
    per_hour = 3_600 / span_s if span_s >= SPAN_S_MIN else None
    views = Views(ledger.branches, 1.0, bytes_per_token=audit.bytes_per_token, holders=_nobody)
    differences = ledger.losses.by_template(1.0, DIFFERENCES_MAX)
    templates = [views.template(id_, differences(id_)) for id_ in views.most[:TEMPLATES_MAX]]
    groups = ledger.groups.rows(GROUPS_MAX)
    for row in (*templates, *groups):
        for of_replicas in ("holders", "can_prewarm", "ttft_p50_s", "ttft_p90_s", "step"):
            row.pop(of_replicas, None)
    return Findings(
        _figures(audit, span_s, prefill_tokens_per_s), _advice(audit, per_hour, prefill_tokens_per_s), templates, groups
    )


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
        "mended_hit_rate": ratio(hit + sums[AT[Miss.DIVERGED]], prompt),
        "logged_hit_rate": ratio(audit.logged_hits, audit.logged_tokens),
        "logged_prompt_tokens": audit.logged_tokens,
        "replays": round(sums[REPLAYS]),
        "diversity": ratio(audit.requests - sums[REPLAYS], audit.requests),
        "hit_tokens": round(hit),
        "misses": misses_of(sums),
        "prefill_tokens_per_s": prefill_tokens_per_s,
        "forgot": audit.forgot,
    }


def _advice(audit: Audit, per_hour: float | None, prefill_tokens_per_s: float) -> Rows:
    ledger = audit.ledger
    prompt = ledger.totals[PROMPT]
    situation = Situation(
        ledger.totals, 1.0, 1.0, 1e3 / prefill_tokens_per_s, 0, ledger.branches.label, span="of this log"
    )
    templates, losses = _together(ledger.losses.all)
    rows = advise(losses, situation, ADVICE_MAX)
    for row in rows:
        lost, by_hour = row["lost_tokens"], ("lost_tokens_per_h", "gpu_s_per_h")
        row["templates"] = templates.get((row["change"], row["message"], row["path"]), 0)
        row["lost_share"] = ratio(lost, prompt)
        row["gpu_s"] = round(lost / prefill_tokens_per_s, 1)
        for name in by_hour:
            if per_hour is None:
                del row[name]  # the time span of these requests is not known
            else:
                row[name] = round(row[name] * per_hour, 1)
    return rows


def _together(all_: Mapping[Key, Loss]) -> tuple[dict[tuple[str, int, str], int], list[Loss]]:
    """Equal differences of several templates as one row, since they are fixed in one place, and the number of templates
    of each."""
    merged: dict[tuple[Change, int, str], Loss] = {}
    found: dict[tuple[Change, int, str], int] = {}
    for (template, *where), loss in sorted(all_.items(), key=lambda each: -each[1].tokens):
        key = cast("tuple[Change, int, str]", tuple(where))
        one = merged.get(key)
        found[key] = found.get(key, 0) + (template != 0)
        if one is None:
            one = merged[key] = Loss(template, loss.last)
        else:
            one.template = 0
        one.message = min(one.message, loss.message)
        one.requests += loss.requests
        one.tokens += loss.tokens
        one.pieces |= loss.pieces
    named = {(one.change.value, one.message, one.last.path[:PATH_CHARS_MAX]): found[key] for key, one in merged.items()}
    return named, list(merged.values())


def _nobody(_key: int) -> Collection[str]:
    return ()
