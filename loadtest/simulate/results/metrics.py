"""Figures of a run: a Result as a row.

Percentiles are over all requests, with every outcome. A request that was rejected, failed or given up counts as the
client's whole timeout with all its tries, in time to first token as well; otherwise a policy would gain if it failed
slow requests. Output tokens a second are those of complete answers. Their time runs from the first request that counts
until no request is open. An open loop has the same tokens under every policy, so there the figure differs only by the
time of the last answers after the last request. A closed loop sends fewer requests to a slow fleet.

Cached tokens are the engines' own count at a request's first admission. All tokens found cached for a prompt that was
sent before in the run are *replay*, because clients repeat a prompt less often in production than in a trace. The rest
is *genuine* reuse. The first `warm_up` requests fill the caches and count for no figure.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from loadtest.common.report import Row, merge_rows, percentile, quantiles
from loadtest.simulate.engine.world import Result, SimulatedRequest
from loadtest.simulate.scenarios.registry import Scenario

REJECTED = ("rejected", "none_ready")
"""Failures that a client receives as 429 or 503."""


def row_of(scenario: Scenario, result: Result) -> Row:
    """Return the figures of one run. The caller adds policy, seed and the names of workload and load."""
    setting, sent = scenario.setting, result.sent[scenario.workload.warm_up :]
    limit_s, longest_s = scenario.ttft_limit_s, setting.longest_s
    ttfts = [_or_longest(each, each.ttft_s, longest_s) for each in sent]
    e2es = [_or_longest(each, each.e2e_s, longest_s) for each in sent]
    tpots = [1e3 * tpot_s for each in sent if (tpot_s := _per_token_s(each)) is not None]
    failures = Counter(each.failure for each in sent if each.failure)
    rejected = sum(failures[kind] for kind in REJECTED)
    good = [each for each in sent if not each.failure]
    in_time = sum(each.ttft_s is not None and each.ttft_s <= limit_s for each in good)
    duration_s = result.duration_s - min((each.due_s for each in sent), default=0.0)
    row = Row(
        workload=scenario.workload.name,
        replicas=setting.replicas,
        load=scenario.load,
        load_unit=scenario.load_unit,
        requests=len(sent),
        errors=failures.total() - rejected,
        rejected=rejected,
        **quantiles("ttft", ttfts),
        ttft_limit_s=limit_s,
        **quantiles("e2e", e2es),
        tpot_p50_ms=percentile(tpots, 50),
        tpot_p90_ms=percentile(tpots, 90),
        patience_s=setting.patience_s,
        held=sum(each.held for each in sent),
        held_while_idle=sum(each.held_while_idle for each in sent),
        preemptions=result.preemptions,
        duration_s=duration_s,
        errors_by_kind=dict(failures),
    )
    if sent:
        row.goodput_share = in_time / len(sent)
    if duration_s > 0:
        row.goodput = in_time / duration_s
        row.output_tokens_per_s = sum(each.turn.output_tokens for each in good) / duration_s
    _set_cache_figures(row, sent, list(result.computed_tokens))
    return row


def _or_longest(sent: SimulatedRequest, took_s: float | None, longest_s: float) -> float:
    return longest_s if sent.failure or took_s is None else min(took_s, longest_s)


def _per_token_s(sent: SimulatedRequest) -> float | None:
    """Return seconds per token of a whole answer, or None for an answer of one token."""
    tokens = sent.turn.output_tokens - 1
    if sent.failure or sent.ttft_s is None or sent.e2e_s is None or not tokens:
        return None
    return (sent.e2e_s - sent.ttft_s) / tokens


def _set_cache_figures(row: Row, sent: Sequence[SimulatedRequest], replicas: Sequence[str]) -> None:
    """Set hit rates, imbalance and requests by replica, of the requests that were prefilled."""
    computed = dict.fromkeys(replicas, 0)
    asked, found, replayed = 0, 0, 0
    by_replica: Counter[str] = Counter()
    for each in sent:
        if each.ttft_s is None or each.lease is None:
            continue
        tokens = each.turn.prompt_tokens
        asked += tokens
        found += each.cached_tokens
        replayed += each.cached_tokens if each.replay else 0
        computed[each.lease.replica] += tokens - each.cached_tokens
        by_replica[each.lease.replica] += 1
    if asked:
        row.hit_rate_source = "engines"
        row.token_hit_rate, row.replay_hit_rate = found / asked, replayed / asked
        row.genuine_hit_rate = (found - replayed) / asked
    if total := sum(computed.values()):
        row.imbalance = max(computed.values()) * len(computed) / total
    row.requests_by_replica = dict(by_replica)


MEDIANS = (
    *("load", "ttft_p50_s", "ttft_p90_s", "ttft_p99_s", "e2e_p50_s", "e2e_p90_s", "e2e_p99_s", "tpot_p50_ms"),
    *("tpot_p90_ms", "output_tokens_per_s", "goodput", "goodput_share", "token_hit_rate", "replay_hit_rate"),
    *("genuine_hit_rate", "imbalance", "requests_per_wall_minute", "duration_s"),
)
SUMS = ("requests", "errors", "rejected", "held", "held_while_idle", "preemptions")


def over_seeds(rows: Sequence[Row]) -> list[Row]:
    """Return one row for each policy, workload and load, in their order: medians over seeds, and sums of counts."""
    groups: dict[tuple[object, ...], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.workload, row.load_name, row.policy, row.case), []).append(row)
    return [_over_seeds(group) for group in groups.values()]


def _over_seeds(rows: Sequence[Row]) -> Row:
    kinds: Counter[str] = Counter()
    for row in rows:
        kinds.update(row.errors_by_kind)
    p90s = [row.ttft_p90_s for row in rows if row.ttft_p90_s is not None]
    least_s, most_s = min(p90s, default=None), max(p90s, default=None)
    made = merge_rows(rows, MEDIANS, SUMS, seed=None, seeds=len(rows), errors_by_kind=dict(kinds))
    made.ttft_p90_least_s, made.ttft_p90_most_s = least_s, most_s
    return made
