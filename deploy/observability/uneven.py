"""Rules for answers that are slow, and for one replica or one tenant that differs from the others.

Replicas are compared within a group: those that serve the same base model, by `warmroute_replica_info`. Each comparison
has an absolute condition as well, because three times very little is no trouble.
"""

from __future__ import annotations

from deploy.observability.alert import BY, BY_MODEL, PAGE, TICKET, Alert, rate

BY_REPLICA = f"{BY}, replica"
BY_TENANT = f"{BY}, tenant"
TTFT_LIMIT = "warmroute:ttft_seconds:limit"  # the chart sets its value: `prometheusRule.ttftSeconds`
TTFT_LIMIT_S = 10
P90 = "warmroute:ttft_seconds:p90_rate5m"
TTFT_OF_REPLICA = "warmroute:replica_ttft_seconds:mean_rate10m"
REQUESTS_OF_REPLICA = "warmroute:replica_requests:rate15m"
# The model of each replica, as a factor that adds the label `model`. A router that has just started knows none yet.
_MODEL = f'on ({BY_REPLICA}) group_left (model) max by ({BY_REPLICA}, model) (warmroute_replica_info{{model!=""}})'


def recorded() -> dict[str, str]:
    """Return expressions by their recorded names."""
    count = rate("warmroute_replica_ttft_seconds_count", "10m", by=BY_REPLICA)
    mean = f"{rate('warmroute_replica_ttft_seconds_sum', '10m', by=BY_REPLICA)} / ({count} > 0.01)"
    return {
        TTFT_LIMIT: f"vector({TTFT_LIMIT_S})",
        TTFT_OF_REPLICA: f"{mean} * {_MODEL}",
        REQUESTS_OF_REPLICA: f"{rate('warmroute_replica_requests_total', '15m', by=BY_REPLICA)} * {_MODEL}",
    }


# Steps without first tokens have NaN, which `>= 0` drops.
_USUAL_P90 = f"quantile_over_time(0.5, ({P90} >= 0)[1h:1m] offset 15m)"
_ROSE = f"{P90} / ({_USUAL_P90} > 0) > 3 and {P90} > 0.5"
_SLOW_TTFT = f"{TTFT_OF_REPLICA} / on ({BY_MODEL}) group_left () quantile by ({BY_MODEL}) (0.5, {TTFT_OF_REPLICA})"
_SLOW_WORK = f"max by ({BY_REPLICA}) (max_over_time(warmroute_replica_slowness_ratio[10m])) > 1.5"
_TAKES_REQUESTS = (
    f"on ({BY_REPLICA}) min by ({BY_REPLICA}) (min_over_time(warmroute_replica_ready[15m])) == 1"
    f" unless on ({BY_REPLICA})"
    f' max by ({BY_REPLICA}) (max_over_time(warmroute_replica_breaker{{state!="closed"}}[15m])) == 1'
)
# Requests count for the replica that decodes, so a replica for prefill alone has none.
_DISAGGREGATED = rate("warmroute_disagg_decisions_total", "15m", '{decision="prefill-decode"}')
_COMPUTED = (
    f"({rate('warmroute_tenant_prompt_tokens_total', '2m', by=BY_TENANT)}"
    f" - {rate('warmroute_tenant_cached_tokens_total', '2m', by=BY_TENANT)})"
)
_TENANTS = rate("warmroute_tenant_requests_total", "2m", by=BY_TENANT)
_OVERLOADED = rate("warmroute_shed_requests_total", "5m", '{code="overloaded"}')
_STRAINED = (
    f"(sum by ({BY}) (avg_over_time(warmroute_queued_requests[5m])) > 1"
    f" or {_OVERLOADED} > 0"
    f" or max by ({BY}) ({P90}) > scalar({TTFT_LIMIT})"
    f" or max by ({BY}) ({_ROSE}))"
)

# fmt: off
ALERTS = (
    Alert(
        "WarmrouteTtftHigh",
        f"{P90} > scalar({TTFT_LIMIT})",
        "10m", PAGE,
        "First tokens are late",
        "One in ten first tokens for {{ $labels.model }} of {{ $labels.job }} takes {{ $value | humanizeDuration }} or"
        " longer.",
    ),
    Alert(
        "WarmrouteTtftRose",
        _ROSE,
        "10m", TICKET,
        "First tokens take longer than usual",
        "The 90th percentile for {{ $labels.model }} of {{ $labels.job }} is {{ $value | humanize }} times the median"
        " of the hour before.",
    ),
    Alert(
        "WarmrouteReplicaSlow",
        f"max by ({BY_REPLICA}) (({_SLOW_TTFT} > 3) and {TTFT_OF_REPLICA} > 0.5) or {_SLOW_WORK}",
        "15m", TICKET,
        "One replica is slower than its peers",
        "{{ $labels.replica }} takes {{ $value | humanize }} times as long as the replicas with the same model.",
    ),
    Alert(
        "WarmrouteReplicaDelayed",
        f"max by ({BY_REPLICA}) (max_over_time(warmroute_replica_first_token_delay_seconds[10m])) > 1",
        "10m", TICKET,
        "First tokens of one replica are delayed on their way",
        "First tokens of {{ $labels.replica }} come {{ $value | humanizeDuration }} later than its work explains.",
    ),
    Alert(
        "WarmrouteReplicaIdle",
        f"{REQUESTS_OF_REPLICA} < on ({BY_MODEL}) group_left ()"
        f" (0.1 * (avg by ({BY_MODEL}) ({REQUESTS_OF_REPLICA}) > 0.05)) and {_TAKES_REQUESTS}"
        f" unless on ({BY}) {_DISAGGREGATED} > 0",
        "15m", TICKET,
        "A ready replica gets almost no requests",
        "{{ $labels.replica }} gets {{ $value | humanize }} requests a second, less than a tenth of the mean for"
        " {{ $labels.model }}.",
    ),
    Alert(
        "WarmrouteGradeFlaps",
        "increase(warmroute_replica_grade_falls_total[15m]) > 2",
        "5m", TICKET,
        "The cache state of a replica is lost again and again",
        "{{ $labels.replica }}: its confidence grade fell {{ $value | humanize }} times in 15 minutes.",
    ),
    Alert(
        "WarmrouteTenantDominates",
        f"({_COMPUTED} / on ({BY}) group_left () (sum by ({BY}) ({_COMPUTED}) > 0) > 0.6)"
        f" and on ({BY}) (count by ({BY}) ({_TENANTS} > 0) > 1) and on ({BY}) {_STRAINED}",
        "10m", TICKET,
        "One tenant causes most of the work while requests wait",
        "Tenant {{ $labels.tenant }} of {{ $labels.job }} causes {{ $value | humanizePercentage }} of the computed"
        " prompt tokens.",
    ),
    Alert(
        "WarmrouteRestarts",
        "changes(process_start_time_seconds[1h]) >= 2 and on (job, instance) warmroute_build_info",
        "0m", TICKET,
        "A router restarts repeatedly",
        "{{ $labels.instance }} started {{ $value }} times in an hour. Its estimates of caches begin anew, or with a"
        " snapshot.",
    ),
    Alert(
        "WarmrouteRoutersUnshared",
        "warmroute_routers_unshared == 1",
        "10m", TICKET,
        "Routers send to the same replicas and share no state",
        "{{ $labels.instance }}: prompts that other senders placed are computed again.",
    ),
)
# fmt: on
