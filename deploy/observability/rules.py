"""Recording rules and alerts.

An alert fires only on a condition that somebody can act on, and never because traffic is missing. A ratio has no value
if its whole is zero, and comparisons with the past require that there is data to compare. `for` is long enough to
ignore one restart or one burst. Each alert has a section of its name in docs/operate/runbook.md.

Recording rules keep `job` and `namespace`: one value for all routers of a deployment. They also keep `model` if a large
model's traffic would hide a small one.

There is one hit rate: hits over hits and misses. Each token counts as the engine reports it in the answer, or as
predicted if the answer does not report it. An answer with a report changes the rate only by its own tokens. Beside it
are the share of tokens with a report in the answer (`verified`) or by engines' counters (`counted`), and the hit rates
of these two alone.
"""

from __future__ import annotations

import yaml

from deploy.observability import uneven
from deploy.observability.alert import BY, BY_MODEL, PAGE, TICKET, Alert, rate, ratio

OBJECTIVE = 0.999  # of requests without a 5xx, over 30 days
ERROR_WINDOWS = ("5m", "30m", "1h", "6h")


def _hits(window: str) -> dict[str, str]:
    """Return the rules of hit rates by model.

    They are the hit rate, the shares that answers or engines' counters report, the hit rates by these reports, and the
    predicted hit rates of answers without a report and of all answers.
    """

    def tokens(name: str) -> str:
        return rate(f"warmroute_{name}_tokens_total", window, by=BY_MODEL)

    hits = f"({tokens('hit')} or 0 * {tokens('miss')})"
    prompt = f"({hits} + ({tokens('miss')} or 0 * {tokens('hit')}))"
    told, counted = tokens("reported_prompt"), tokens("counted_prompt")
    name = "warmroute:token_hit_rate"
    return {
        f"{name}:ratio_rate{window}": ratio(hits, prompt),
        f"{name}_verified_share:ratio_rate{window}": ratio(f"({told} or 0 * {prompt})", prompt),
        f"{name}_counted_share:ratio_rate{window}": ratio(f"({counted} or 0 * {prompt})", prompt),
        f"{name}_actual:ratio_rate{window}": ratio(tokens("cached"), told),
        f"{name}_counted:ratio_rate{window}": ratio(tokens("counted_cached"), counted),
        f"{name}_silent:ratio_rate{window}": ratio(
            f"({hits} - ({tokens('cached')} or 0 * {prompt}))", f"({prompt} - ({told} or 0 * {prompt}))"
        ),
        f"{name}_predicted:ratio_rate{window}": ratio(tokens("predicted_cached"), tokens("prompt")),
    }


LAST_HIT = "warmroute:token_hit_rate:ratio_rate2m"  # shows a fall after a minute, and `for` ignores a short one


def recorded() -> dict[str, str]:
    """Return expressions by their recorded names."""
    rules = {"warmroute:requests:rate5m": rate("warmroute_requests_total", "5m", by=BY_MODEL)}
    rules["warmroute:prompt_tokens:rate5m"] = rate("warmroute_prompt_tokens_total", "5m", by=BY_MODEL)
    rules["warmroute:completion_tokens:rate5m"] = rate("warmroute_completion_tokens_total", "5m", by=BY_MODEL)
    for window in ("5m", "30m"):
        rules |= _hits(window)
    rules[LAST_HIT] = _hits("2m")[LAST_HIT]
    for q in (50, 90, 99):
        buckets = rate("warmroute_ttft_seconds_bucket", "5m", by=f"{BY_MODEL}, le")
        rules[f"warmroute:ttft_seconds:p{q}_rate5m"] = f"histogram_quantile({q / 100}, {buckets})"
    for window in ERROR_WINDOWS:
        failed = rate("warmroute_requests_total", window, '{status=~"5.."}', by=BY_MODEL)
        none = f"0 * {rate('warmroute_requests_total', window, by=BY_MODEL)}"
        whole = rate("warmroute_requests_total", window, by=BY_MODEL)
        rules[f"warmroute:requests_failed:ratio_rate{window}"] = ratio(f"({failed} or {none})", whole)
    each = rate("warmroute_replica_computed_tokens_total", "15m", by=f"{BY}, replica")
    rules["warmroute:replica_computed_tokens:imbalance_rate15m"] = ratio(
        f"max by ({BY}) ({each})", f"avg by ({BY}) ({each})"
    )
    rules["warmroute:replica_computed_tokens:rate15m"] = f"sum by ({BY}) ({each})"
    rules["warmroute:spilled_tokens:rate5m"] = rate("warmroute_spilled_tokens_total", "5m", by=f"{BY_MODEL}, cause")
    rules |= uneven.recorded()
    rules["warmroute:saved_prefill_seconds:rate5m"] = rate("warmroute_saved_prefill_seconds_total", "5m", by=BY_MODEL)
    return rules


HIT = "warmroute:token_hit_rate:ratio_rate30m"
FELL = " or ".join(f"({now} < 0.7 * ({HIT} offset {ago} > 0.1))" for now in (LAST_HIT, HIT) for ago in ("1h", "1d"))
FAILED = "warmroute:requests_failed:ratio_rate"
SILENT = "warmroute:token_hit_rate_silent:ratio_rate30m"
COUNTED = "warmroute:token_hit_rate_counted:ratio_rate30m"
REQUESTS = "warmroute:requests:rate5m"
ALL_REQUESTS = f"sum by ({BY}) ({REQUESTS})"
OVERLOADED = rate("warmroute_shed_requests_total", "5m", '{code="overloaded"}', by=BY_MODEL)
OVER = rate("warmroute_overpredicted_tokens_total", "30m")
CACHED = rate("warmroute_cached_tokens_total", "30m")
# Every base model that recently had a ready replica in some router, and now has one in no router.
MODEL_READY = f"max by ({BY_MODEL}) (warmroute_model_ready_replicas)"
MODEL_WAS_READY = f"max by ({BY_MODEL}) (max_over_time(warmroute_model_ready_replicas[6h])) > 0"
EXACT = 'warmroute_replica_grade{grade="exact"}'
# A router that restarts is another `instance`, an engine that restarts another `replica`. So an earlier `exact` is
# searched among all routers for each replica, and, if no replica is exact now, among all replicas.
NO_LONGER = " or ".join(
    f"({EXACT} == 0 and on ({of}) {now}max by ({of}) (max_over_time({EXACT}[6h])) == 1)"
    for of, now in ((f"{BY}, replica", ""), (BY, f"max by ({BY}) ({EXACT}) == 0 and on ({BY}) "))
)
ROUTERS = f"max by ({BY}) (warmroute_build_info)"
WAS_READY = f"max by ({BY}) (max_over_time(warmroute_replica_ready[1d])) == 1"
BUDGET = round(1 - OBJECTIVE, 6)


FAILURES_MIN = 10  # in the longer window: one failed request at night is a large part of few


def _burn(factor: float, short: str, long: str) -> str:
    failures = f'sum by ({BY_MODEL}) (increase(warmroute_requests_total{{status=~"5.."}}[{long}]))'
    parts = [f"{FAILED}{window} > {factor} * {BUDGET}" for window in (short, long)]
    return " and ".join([*parts, f"{failures} > {FAILURES_MIN}"])


# fmt: off
ALERTS = (
    Alert(
        "WarmrouteDown",
        # A router that drains does not accept connections, those of Prometheus included: longer than the default drain.
        "up == 0 and on (job, instance) max by (job, instance) (last_over_time(warmroute_build_info[6h]))",
        "5m", TICKET,
        "A router cannot be scraped",
        "{{ $labels.instance }} was a router within six hours, and does not answer Prometheus.",
    ),
    Alert(
        "WarmrouteAbsent",
        f"absent(warmroute_build_info) or (max by ({BY}) (last_over_time(warmroute_build_info[6h])) unless {ROUTERS})",
        "2m", PAGE,
        "No router is being scraped",
        "No series of any router{{ with $labels.job }} of {{ . }}{{ end }}: no router runs, or Prometheus does not"
        " find it.",
    ),
    Alert(
        "WarmrouteNoReadyReplicas",
        "(sum by (job, namespace, instance) (warmroute_replica_ready) == 0 or"
        " (sum by (job, namespace, instance) (warmroute_build_info)"
        " unless sum by (job, namespace, instance) (warmroute_replica_ready)))"
        f" and on ({BY}) {WAS_READY}",
        "1m", PAGE,
        "A router has no replica to send requests to",
        "{{ $labels.instance }} answers every request with 503.",
    ),
    Alert(
        "WarmrouteModelDown",
        f"({MODEL_WAS_READY}) unless ({MODEL_READY} > 0) and on ({BY}) {ROUTERS}",
        "2m", PAGE,
        "No replica of a model is ready",
        "Every request for {{ $labels.model }} of {{ $labels.job }} is answered with 503.",
    ),
    Alert(
        "WarmrouteNoReplicaYet",
        f"{ROUTERS} unless on ({BY}) {WAS_READY}",
        "30m", TICKET,
        "Routers wait for their first replica",
        "No router of {{ $labels.job }} has had a ready replica for a day, or since it was installed.",
    ),
    Alert(
        "WarmrouteErrorBudgetBurnsFast",
        _burn(14.4, "5m", "1h"),
        "2m", PAGE,
        "Requests fail, 14 times faster than the objective allows",
        "{{ $value | humanizePercentage }} of requests for {{ $labels.model }} of {{ $labels.job }} ended with 5xx in"
        " the last five minutes.",
    ),
    Alert(
        "WarmrouteErrorBudgetBurns",
        _burn(6, "30m", "6h"),
        "15m", TICKET,
        "Requests fail, 6 times faster than the objective allows",
        "{{ $value | humanizePercentage }} of requests for {{ $labels.model }} of {{ $labels.job }} ended with 5xx in"
        " the last half hour.",
    ),
    Alert(
        "WarmrouteHitRateFell",
        f"({FELL}) and {REQUESTS} > 0.1",
        "15m", TICKET,
        "The cache hit rate has fallen",
        "{{ $value | humanizePercentage }} of prompt tokens for {{ $labels.model }} of {{ $labels.job }} are cached,"
        " which is less than 70 % of the value an hour or a day ago.",
    ),
    Alert(
        "WarmrouteHitRateUnproven",
        # The prediction for answers without a report, against the engines' counters for them.
        f"({SILENT} - {COUNTED} > 0.15) and warmroute:token_hit_rate_counted_share:ratio_rate30m > 0.2"
        f" and {REQUESTS} > 0.1",
        "30m", TICKET,
        "Engines count fewer hits than the hit rate shows",
        "For prompt tokens of {{ $labels.model }} of {{ $labels.job }} without a cached-token count in the answer, the"
        " predicted hit rate exceeds that of the engines' counters by {{ $value | humanizePercentage }}.",
    ),
    Alert(
        "WarmrouteGradeNotExact",
        f"({NO_LONGER}) and on ({BY}) {ALL_REQUESTS} > 0.1",
        "15m", TICKET,
        "A replica's cache is no longer known exactly",
        "{{ $labels.replica }} or its predecessors were followed exactly within six hours. {{ $labels.instance }} has"
        " not followed them exactly for 15 minutes.",
    ),
    Alert(
        "WarmrouteEventsLost",
        "increase(warmroute_replica_event_lost_total[15m]) > 0",
        "0m", TICKET,
        "KV events of a replica were lost permanently",
        "{{ $labels.replica }}: missing batches that no replay contained, {{ $value | humanize }} times in 15 minutes.",
    ),
    Alert(
        "WarmrouteEventGaps",
        "increase(warmroute_replica_event_gaps_total[10m]) > 0",
        "30m", TICKET,
        "KV events of a replica are missing repeatedly",
        "{{ $labels.replica }}: batches have been missing for half an hour. So far replays have restored them.",
    ),
    Alert(
        "WarmrouteImbalance",
        "warmroute:replica_computed_tokens:imbalance_rate15m > 2 and warmroute:replica_computed_tokens:rate15m > 1000",
        "30m", TICKET,
        "One replica does far more work than the others",
        "The busiest replica of {{ $labels.job }} computes {{ $value | humanize }} times the mean.",
    ),
    Alert(
        "WarmrouteShedding",
        f"{OVERLOADED} / ({REQUESTS} > 0) > 0.01",
        "5m", PAGE,
        "Requests are refused because the fleet is full",
        "{{ $value | humanizePercentage }} of requests for {{ $labels.model }} of {{ $labels.job }} get 429 because of"
        " missing capacity.",
    ),
    Alert(
        "WarmrouteQueue",
        f"sum by ({BY_MODEL}) (warmroute_queued_requests) > 0",
        "10m", TICKET,
        "Requests have been waiting for ten minutes without interruption",
        "{{ $value }} requests for {{ $labels.model }} of {{ $labels.job }} wait for a place or for space in the"
        " caches.",
    ),
    Alert(
        "WarmrouteBreakerOpen",
        # The breaker is half-open at each trial, which takes long if the replica hangs.
        'max_over_time(warmroute_replica_breaker{state="open"}[3m]) == 1',
        "5m", TICKET,
        "A replica fails or hangs although its health checks pass",
        "{{ $labels.replica }} gets no requests except an occasional trial.",
    ),
    Alert(
        "WarmroutePredictionDrift",
        f"{OVER} / ({OVER} + {CACHED} > 100) > 0.15",
        "30m", TICKET,
        "Caches contain less than the router predicts",
        "{{ $value | humanizePercentage }} of the tokens that {{ $labels.job }} predicted to be cached were not"
        " cached.",
    ),
    Alert(
        "WarmrouteDiscoveryStale",
        "warmroute_discovery_fresh == 0",
        "2m", TICKET,
        "A router no longer receives the list of replicas",
        "{{ $labels.instance }} keeps the last valid view of {{ $labels.source }}; new replicas are not found.",
    ),
    Alert(
        "WarmrouteLoopStalls",
        "rate(warmroute_loop_stall_seconds_count[5m]) - ignoring (le)"
        ' rate(warmroute_loop_stall_seconds_bucket{le="0.1"}[5m]) > 0.1',
        "10m", TICKET,
        "A router's event loop stalls",
        "{{ $labels.instance }}: {{ $value | humanize }} stalls of more than 100 ms per second.",
    ),
    Alert(
        "WarmrouteLogLinesDropped",
        "increase(warmroute_log_lines_dropped_total[15m]) > 0",
        "5m", TICKET,
        "A router drops log lines",
        "{{ $labels.instance }}: standard error is not read fast enough.",
    ),
    Alert(
        "WarmroutePanicPlacements",
        "increase(warmroute_panic_mode_placements_total[10m]) > 0",
        "5m", TICKET,
        "Requests go to replicas that may not be healthy",
        "{{ $labels.instance }} has no other replica left for a model.",
    ),
    Alert(
        "WarmrouteAlone",
        "warmroute_peering_connected == 0",
        "2m", TICKET,
        "A router does not receive its own messages through the shared store",
        "{{ $labels.instance }}: the store is down, or cannot be reached from this router. The router decides by"
        " itself.",
    ),
    Alert(
        "WarmrouteReloadRefused",
        'increase(warmroute_reloads_total{result="refused"}[15m]) > 0',
        "0m", TICKET,
        "New settings were refused",
        "{{ $labels.instance }} continues with the old settings.",
    ),
    *uneven.ALERTS,
)
# fmt: on


def to_yaml() -> str:
    """Return the rule file."""
    recording = [{"record": name, "expr": expr} for name, expr in recorded().items()]
    groups = [
        {"name": "warmroute.recording", "rules": recording},
        {"name": "warmroute.alerts", "rules": [alert.rule for alert in ALERTS]},
    ]
    head = "# Made by `python -m deploy.observability`: change deploy/observability/rules.py, not this file.\n"
    return head + yaml.safe_dump({"groups": groups}, sort_keys=False, width=120, allow_unicode=True)
