"""What is on each dashboard. One file says it all; grafana.py makes JSON of it.

Expressions are of what routers emit themselves, not of recording rules, so that a dashboard works without these. A
ratio has no value where there was nothing to divide by: no traffic is no bad hit rate. Several routers see the same
replicas: what each knows of one is taken at its maximum, what each does with it is added up. Where one series a state
says which it is, the states become a number in each router first: of two routers' states a sum would be a third.
"""

from __future__ import annotations

from deploy.observability.grafana import GREEN, RED, YELLOW, Board, Panel, Row

OF = 'job=~"$job",namespace=~"$namespace"'
MODEL = f'{OF},model=~"$model"'
REPLICA = f'{OF},replica=~"$replica"'
R = "[$__rate_interval]"


def rate(metric: str, by: str = "", labels: str = OF) -> str:
    """Its sum over routers, a second."""
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{{{labels}}}{R}))"


def ratio(part: str, whole: str) -> str:
    """No value where there is no whole."""
    return f"{part} / ({whole} > 0)"


def quantile(q: float, metric: str, by: str = "", labels: str = OF) -> str:
    """Of a histogram of seconds."""
    return f"histogram_quantile({q}, {rate(f'{metric}_bucket', f'le, {by}' if by else 'le', labels)})"


def quantiles(metric: str, labels: str = OF) -> list[tuple[str, str]]:
    """The three that are asked for at night."""
    return [(quantile(q, metric, labels=labels), name) for q, name in ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))]


def most(metric: str, by: str, labels: str = OF) -> str:
    """What any router knows of each."""
    return f"max by ({by}) ({metric}{{{labels}}})"


def total(metric: str, by: str = "", labels: str = OF) -> str:
    """What all routers have."""
    return f"sum{f' by ({by})' if by else ''} ({metric}{{{labels}}})"


ACTUAL = ratio(
    rate("warmroute_cached_tokens_total", labels=MODEL), rate("warmroute_reported_prompt_tokens_total", labels=MODEL)
)
PREDICTED = ratio(
    rate("warmroute_predicted_cached_tokens_total", labels=MODEL), rate("warmroute_prompt_tokens_total", labels=MODEL)
)
FAILED = MODEL + ',status=~"5.."'
ASKED = rate("warmroute_requests_total", labels=MODEL)
ERRORS = ratio(f"({rate('warmroute_requests_total', labels=FAILED)} or 0 * {ASKED})", ASKED)  # nought is a figure, too
SHED = f"{rate('warmroute_shed_requests_total', 'code')} / on () group_left () ({rate('warmroute_requests_total')} > 0)"
HITS = ((None, RED), (0.3, YELLOW), (0.6, GREEN))
FAILS = ((None, GREEN), (0.001, YELLOW), (0.01, RED))
GRADES = (("2", "exact", GREEN), ("1", "catching-up", YELLOW), ("0", "estimated", "blue"))
# What goes well is green, what costs a little blue, what costs much yellow.
WELL_KNOWN = (("exact", GREEN), ("catching-up", YELLOW), ("estimated", "blue"))
SAVED = (("saved", GREEN), ("computed", YELLOW))
WENT = (
    ("warm", GREEN),
    ("only", GREEN),
    ("spill", "orange"),
    ("cold", "blue"),
    ("tie", "purple"),
    ("policy", YELLOW),
    ("retry", RED),
)
MISSED = (
    ("diverged", RED),
    ("evicted", "orange"),
    ("spilled", YELLOW),
    ("replica_lost", "purple"),
    ("cold", "blue"),
    ("new", GREEN),
)
BREAKERS = (("0", "closed", GREEN), ("1", "resting", "blue"), ("2", "half-open", YELLOW), ("3", "open", RED))

# fmt: off
OVERVIEW = Board(
    "warmroute-overview",
    "warmroute / Overview",
    "Whether routing pays: hit rate first, then what clients wait, what is saved, and what is in the way.",
    [
        Row(
            [
                Panel(
                    "Token hit rate",
                    "Part of all prompt tokens that engines found in their caches (where they say so, else as"
                    " predicted)."
                    " The figure to watch: if it falls after a rollout, see the grade of replicas and the spillover"
                    " below.",
                    [(f"({ACTUAL}) or ({PREDICTED})", "hit rate")],
                    "percentunit", "stat", colours=HITS, top=1,
                ),
                Panel(
                    "TTFT p90",
                    "Nine of ten streams began within this time, queueing included.",
                    [(quantile(0.9, "warmroute_ttft_seconds", labels=MODEL), "p90")],
                    "s", "stat",
                ),
                Panel(
                    "Prefill tokens saved",
                    "Prompt tokens over the time shown that no GPU had to compute, since they were cached where the"
                    " request"
                    " went.",
                    [(f"sum (increase(warmroute_saved_prefill_tokens_total{{{MODEL}}}[$__range]))", "tokens")],
                    "short", "stat",
                ),
                Panel(
                    "Replica time saved",
                    "What computing these tokens would have taken, over the time shown: an estimate by each replica's"
                    " learned prefill speed. A replica on 2 GPUs saves two GPU-seconds a second.",
                    [(f"sum (increase(warmroute_saved_prefill_seconds_total{{{MODEL}}}[$__range]))", "time")],
                    "s", "stat",
                ),
                Panel(
                    "Errors",
                    "Part of requests that ended with 5xx. By route, status and tenant on the dashboard of requests; by"
                    " replica on that of replicas.",
                    [(ERRORS, "5xx")],
                    "percentunit", "stat", colours=FAILS,
                ),
                Panel(
                    "Replicas ready",
                    "That some router may send requests to. None: clients get 503; look at the engines first.",
                    [(f"sum(max by (replica) (warmroute_replica_ready{{{OF}}}))", "ready")],
                    "short", "stat", colours=((None, RED), (1, GREEN)),
                ),
            ],
            height=4,
        ),
        Row(
            [
                Panel(
                    "Hit rate, predicted and actual",
                    "Predicted is what the router believed when it placed, actual what engines then counted. Both"
                    " low: prompts"
                    " share little, or caches are too small. Predicted above actual: the router believes in what is"
                    " gone;"
                    " see grades and events.",
                    [(PREDICTED, "predicted"), (ACTUAL, "actual")],
                    "percentunit", top=1,
                ),
                Panel(
                    "Time to first token",
                    "From the whole request to the first event of its stream. If it rises while the hit rate does"
                    " not fall,"
                    " replicas are busy: see the queue.",
                    quantiles("warmroute_ttft_seconds", MODEL),
                    "s",
                ),
            ]
        ),
        Row(
            [
                Panel(
                    "Computed tokens by reason",
                    "Why prompt tokens were not found cached. diverged, evicted, spilled, replica_lost, identity and"
                    " mispredicted can be helped: diverged by whoever writes the prompts (/admin/advice says where),"
                    " evicted by more room. new, cold and tail are the traffic itself.",
                    [(rate("warmroute_miss_tokens_total", "reason"), "{{reason}}")],
                    "short", stack=True, fixed=MISSED,
                ),
                Panel(
                    "Hits, genuine and replayed",
                    "Prompt tokens a second that were cached. A replay is the very prompt that was asked for before:"
                    " a hit rate that is made of those says nothing of real traffic.",
                    [(rate("warmroute_hit_tokens_total", "kind"), "{{kind}}")],
                    "short", stack=True, fixed=(("genuine", GREEN), ("replay", "purple")),
                ),
                Panel(
                    "Prompts that are no replays",
                    "Part of prompts that were not asked for before, of late. Near 0 is a load test that repeats"
                    " itself, or clients that retry.",
                    [(f"avg (warmroute_prompt_diversity{{{OF}}})", "diversity")],
                    "percentunit",
                ),
            ]
        ),
        Row(
            [
                Panel(
                    "Prefill: saved and computed",
                    "Prompt tokens a second that were cached, against those predicted to be computed.",
                    [
                        (rate("warmroute_saved_prefill_tokens_total", labels=MODEL), "saved"),
                        (rate("warmroute_replica_computed_tokens_total"), "computed"),
                    ],
                    "short", stack=True, fixed=SAVED,
                ),
                Panel(
                    "Replicas' worth of prefill saved",
                    "Replica-seconds saved each second: how many replicas would do nothing but compute again what"
                    " was cached."
                    " An estimate by learned prefill speed.",
                    [(rate("warmroute_saved_prefill_seconds_total", "model", MODEL), "{{model}}")],
                    "short", stack=True,
                ),
            ]
        ),
        Row(
            [
                Panel(
                    "Spillover and why",
                    "Tokens a second that are computed again although another replica holds them. queue: it has too"
                    " much to"
                    " do; kv_space, eviction: its cache is too small; crowd: too many decode there;"
                    " full, retry, unfit: it could not be asked;"
                    " tie: too"
                    " little to matter; policy: the policy does not look.",
                    [(rate("warmroute_spilled_tokens_total", "cause"), "{{cause}}")],
                    "short", stack=True,
                ),
                Panel(
                    "Why requests went where they went",
                    "warm: to whoever holds most; spill: waiting there would cost more; cold: nobody holds any of it.",
                    [(rate("warmroute_decisions_total", "reason"), "{{reason}}")],
                    "reqps", stack=True, fixed=WENT,
                ),
            ]
        ),
        Row(
            [
                Panel(
                    "Errors and requests turned away",
                    "5xx are ours or an engine's; overloaded means the fleet is full; rate_limited that a tenant had"
                    " its share.",
                    [
                        (ERRORS, "5xx"),
                        (SHED, "{{code}}"),
                    ],
                    "percentunit",
                ),
                Panel(
                    "In flight and waiting",
                    "Requests being answered, and those that wait in the router for a place. A queue that stays: add"
                    " replicas, or raise admission limits if engines have room.",
                    [
                        (total("warmroute_in_flight_requests"), "in flight"),
                        (total("warmroute_queued_requests"), "waiting"),
                    ],
                ),
                Panel(
                    "What is known of caches",
                    "Replicas by grade: exact by the engine's events, catching-up after a gap or late join,"
                    " estimated without"
                    " events. A replica that falls from exact stays useful, with a lower hit rate.",
                    [(f"sum by (grade) (avg by (replica, grade) (warmroute_replica_grade{{{OF}}}))", "{{grade}}")],
                    stack=True, fixed=WELL_KNOWN,
                ),
            ]
        ),
    ],
    [("model", "warmroute_requests_total")],
)



def state(of_routers: str, metric: str, label: str, *weights: tuple[int, str]) -> str:
    """One number for each replica; `of_routers`, min or max, is the view that is shown where routers differ."""
    terms = (f'{weight} * {metric}{{{REPLICA},{label}="{value}"}}' for weight, value in weights)
    return f"{of_routers} by (replica) ({f' + ignoring ({label}) '.join(terms)})"


GRADE_OF = state("min", "warmroute_replica_grade", "grade", (2, "exact"), (1, "catching-up"))
BREAKER_OF = state("max", "warmroute_replica_breaker", "state", (3, "open"), (2, "half-open"), (1, "resting"))
COMPUTED = rate("warmroute_replica_computed_tokens_total", "replica")
PLACED = rate("warmroute_replica_placed_tokens_total", "replica")
EACH = "{{replica}}"

REPLICAS = Board(
    "warmroute-replicas",
    "warmroute / Replicas",
    "Each replica: its load, what is known of its cache, and whether it is fit.",
    [
        Row(
            [
                Panel(
                    "Grade",
                    "How far the belief about each cache can be trusted, by the router that knows least. Below exact"
                    " where it was exact: look at gaps and lost"
                    " batches below, then at the router's log, which says why.",
                    [(GRADE_OF, EACH)],
                    kind="states", states=GRADES,
                ),
                Panel(
                    "Breaker",
                    "What requests say of a replica. open: it fails or hangs, and gets nothing until a trial succeeds;"
                    " resting: it asked to be left alone. Look at its failures below and at its own log.",
                    [(BREAKER_OF, EACH)],
                    kind="states", states=BREAKERS,
                ),
                Panel(
                    "Ready",
                    "Whether its health checks let requests through.",
                    [(most("warmroute_replica_ready", "replica", REPLICA), EACH)],
                    kind="states", states=(("1", "ready", GREEN), ("0", "not ready", RED)),
                ),
            ],
            height=6,
        ),
        Row(
            [
                Panel(
                    "Imbalance",
                    "The busiest replica's computed tokens over the mean; 1 is even. High with spills by queue: one"
                    " hot prefix."
                    " High without: few long conversations, or a replica that others cannot relieve.",
                    [
                        (f"max({COMPUTED}) / (avg({COMPUTED}) > 0)", "computed"),
                        (f"max({PLACED}) / (avg({PLACED}) > 0)", "placed"),
                    ],
                    colours=((None, GREEN), (2, YELLOW)),
                ),
                Panel(
                    "Tokens computed",
                    "Prompt tokens a second that each is predicted to compute: its real work.",
                    [(rate("warmroute_replica_computed_tokens_total", "replica", REPLICA), EACH)],
                ),
                Panel(
                    "Hit rate by the engine",
                    "The engine's own hits over queries since it started, whoever asked.",
                    [(most("warmroute_replica_hit_rate", "replica", REPLICA), EACH)],
                    "percentunit", top=1,
                ),
            ],
            title="Work",
        ),
        Row(
            [
                Panel(
                    "Open requests",
                    "Sent by all routers, not ended.",
                    [(total("warmroute_replica_in_flight", "replica", REPLICA), EACH)],
                ),
                Panel(
                    "Prefill that waits",
                    "Modelled time until a request placed now is computed, over routers. Rising everywhere: too few"
                    " replicas.",
                    [(total("warmroute_replica_pending_prefill_seconds", "replica", REPLICA), EACH)],
                    "s",
                ),
                Panel(
                    "Running and waiting, by the engine",
                    "The engine's own batch and queue.",
                    [
                        (most("warmroute_replica_running", "replica", REPLICA), "running {{replica}}"),
                        (most("warmroute_replica_waiting", "replica", REPLICA), "waiting {{replica}}"),
                    ],
                ),
                Panel(
                    "KV pool in use",
                    "By live requests. Near 1 the engine preempts: fewer concurrent requests, or more replicas.",
                    [(most("warmroute_replica_kv_usage", "replica", REPLICA), EACH)],
                    "percentunit", top=1, colours=((None, GREEN), (0.9, RED)),
                ),
            ],
            title="Load",
        ),
        Row(
            [
                Panel(
                    "Event lag",
                    "Age of the last batch of events when it came. Seconds: the network, or a router without CPU.",
                    [(most("warmroute_replica_event_lag_seconds", "replica", REPLICA), EACH)],
                    "s",
                ),
                Panel(
                    "Events missed",
                    "Batches missing when the next came (most are replayed), and those lost for good. Lost: raise the"
                    " engine's buffer for replays and the publisher's high-water mark.",
                    [
                        (rate("warmroute_replica_event_gaps_total", "replica", REPLICA), "gaps {{replica}}"),
                        (rate("warmroute_replica_event_lost_total", "replica", REPLICA), "lost {{replica}}"),
                        (rate("warmroute_replica_event_malformed_total", "replica", REPLICA), "malformed {{replica}}"),
                    ],
                ),
                Panel(
                    "Events",
                    "Batches a second. None under load: the engine publishes nothing, or cannot be reached.",
                    [(f"max by (replica) (rate(warmroute_replica_event_batches_total{{{REPLICA}}}{R}))", EACH)],
                ),
                Panel(
                    "Predicted to the token",
                    "Part of the last 200 answers. Below 0.99 the replica is not called exact on this evidence.",
                    [(f"min by (replica) (warmroute_replica_predictions_equal{{{REPLICA}}})", EACH)],
                    "percentunit", top=1,
                ),
            ],
            title="Knowledge",
        ),
        Row(
            [
                Panel(
                    "Blocks held",
                    "By its own events. A fall to nothing is a restart or a clear.",
                    [(most("warmroute_replica_held_blocks", "replica", REPLICA), EACH)],
                ),
                Panel(
                    "Blocks estimated",
                    "What the router's own estimate says; the room is the engine's, by our share of its work.",
                    [(most("warmroute_replica_index_blocks", "replica", REPLICA), EACH)],
                ),
                Panel(
                    "Prefill speed",
                    "Learned from answers. One far below the others: its GPU, or work that comes past the router.",
                    [(most("warmroute_replica_prefill_tokens_per_second", "replica", REPLICA), EACH)],
                ),
                Panel(
                    "Failures",
                    "Attempts that failed, by kind: see docs/reference/metrics.md, Kinds of failures.",
                    [(rate("warmroute_replica_failures_total", "replica, kind", REPLICA), "{{kind}} {{replica}}")],
                ),
            ],
        ),
        Row(
            [
                Panel(
                    "Which pod is which",
                    "Names and nodes of replicas, as discovery tells them.",
                    [(f"max by (replica, name, node) (warmroute_replica_info{{{REPLICA}}})", "")],
                    kind="table",
                ),
                Panel(
                    "Our share",
                    "Part of the replica's computed tokens that came through these routers. Below 1 others use it too.",
                    [(f"clamp_max({total('warmroute_replica_share', 'replica', REPLICA)}, 1)", EACH)],
                    "percentunit", top=1,
                ),
            ],
        ),
    ],
    [("replica", "warmroute_replica_ready")],
)

REQUESTS = Board(
    "warmroute-requests",
    "warmroute / Requests",
    "What clients ask and get: by route, model, status and tenant.",
    [
        Row(
            [
                Panel(
                    "By route",
                    "Requests a second.",
                    [(rate("warmroute_requests_total", "route", MODEL), "{{route}}")],
                    "reqps", stack=True,
                ),
                Panel(
                    "By status",
                    "429 is capacity or quota, 499 a client that left, 502 an engine that failed, 503 no replica,"
                    " 504 silence.",
                    [(rate("warmroute_requests_total", "status", MODEL), "{{status}}")],
                    "reqps", stack=True,
                ),
                Panel(
                    "By model",
                    "Requests a second.",
                    [(rate("warmroute_requests_total", "model", MODEL), "{{model}}")],
                    "reqps", stack=True,
                ),
            ],
        ),
        Row(
            [
                Panel(
                    "TTFT p90 by model",
                    "Time to the first event of nine streams in ten.",
                    [(quantile(0.9, "warmroute_ttft_seconds", "model", MODEL), "{{model}}")],
                    "s",
                ),
                Panel(
                    "Between tokens",
                    "Mean time between the events of a stream, over streams: decoding, which routing helps only by"
                    " even load.",
                    quantiles("warmroute_inter_token_seconds", MODEL),
                    "s",
                ),
                Panel(
                    "Whole answer p90 by route",
                    "Request read to answer ended.",
                    [(quantile(0.9, "warmroute_duration_seconds", "route", MODEL), "{{route}}")],
                    "s",
                ),
                Panel(
                    "Hit rate by model",
                    "By the engines' count.",
                    [
                        (
                            (
                                f"{rate('warmroute_cached_tokens_total', 'model', MODEL)}"
                                f" / ({rate('warmroute_reported_prompt_tokens_total', 'model', MODEL)} > 0)"
                            ),
                            "{{model}}",
                        )
                    ],
                    "percentunit", top=1,
                ),
            ],
            title="Latency",
        ),
        Row(
            [
                Panel(
                    "Waiting",
                    "Requests that wait for a place, by priority.",
                    [(total("warmroute_queued_requests", "priority"), "{{priority}}")],
                    stack=True,
                ),
                Panel(
                    "Waited p90",
                    "Of requests that had to wait.",
                    [(quantile(0.9, "warmroute_queue_seconds"), "p90")],
                    "s",
                ),
                Panel(
                    "Turned away",
                    "overloaded: the fleet is full; rate_limited: a tenant's quota.",
                    [(rate("warmroute_shed_requests_total", "code, priority"), "{{code}} {{priority}}")],
                    "reqps",
                ),
            ],
            title="Admission",
        ),
        Row(
            [
                Panel(
                    "Attempts",
                    "Requests sent to replicas, by what became of them; ok is left out.",
                    [
                        (
                            rate("warmroute_attempts_total", "outcome", OF + ',outcome!="ok"') + " > 0",
                            "{{outcome}}",
                        )
                    ],
                    "reqps", stack=True,
                ),
                Panel(
                    "Retries",
                    "Failures that clients did not see, by kind.",
                    [(rate("warmroute_retries_total", "kind"), "{{kind}}")],
                    "reqps", stack=True,
                ),
                Panel(
                    "Predictions",
                    "Against the engine's own count. over: less was cached than believed, and prefill took longer.",
                    [(rate("warmroute_predictions_total", "grade, result"), "{{grade}} {{result}}")],
                    stack=True,
                ),
            ],
            title="Attempts",
        ),
        Row(
            [
                Panel(
                    "Requests by tenant",
                    "With a keys file; others are one series.",
                    [(rate("warmroute_tenant_requests_total", "tenant"), "{{tenant}}")],
                    "reqps", stack=True,
                ),
                Panel(
                    "Prompt tokens by tenant",
                    "Of whole answers.",
                    [(rate("warmroute_tenant_prompt_tokens_total", "tenant"), "{{tenant}}")],
                    stack=True,
                ),
                Panel(
                    "Hit rate by tenant",
                    "By the engine's count, else as predicted. Low for one: its prompts change near their beginning.",
                    [
                        (
                            (
                                f"{rate('warmroute_tenant_cached_tokens_total', 'tenant')}"
                                f" / ({rate('warmroute_tenant_prompt_tokens_total', 'tenant')} > 0)"
                            ),
                            "{{tenant}}",
                        )
                    ],
                    "percentunit", top=1,
                ),
            ],
            title="Tenants",
        ),
    ],
    [("model", "warmroute_requests_total")],
)

POD = "{{instance}}"
HALF = OF + ',le="0.05"'
ROUTER = Board(
    "warmroute-router",
    "warmroute / Router",
    "The routers themselves: CPU, memory, stalls, discovery, settings.",
    [
        Row(
            [
                Panel(
                    "CPU",
                    "Cores used by each router, workers included. Near one core a process: more workers or routers.",
                    [
                        (
                            (
                                f"sum by (instance) (rate(process_cpu_seconds_total{{{OF}}}{R})"
                                f" + on (instance, job) rate(warmroute_worker_cpu_seconds_total{{{OF}}}{R}))"
                            ),
                            POD,
                        )
                    ],
                ),
                Panel(
                    "Memory",
                    "Resident, of the process that knows the replicas. Bounded by routing.index_bytes_max and"
                    " events.index_bytes_max.",
                    [(most("process_resident_memory_bytes", "instance"), POD)],
                    "bytes",
                ),
                Panel(
                    "Event loop stalls",
                    "Times a second that a loop came 50 ms or more too late: too little CPU (look at throttling), or"
                    " a bug.",
                    [
                        (
                            (
                                f"sum by (instance) (rate(warmroute_loop_stall_seconds_count{{{OF}}}{R})"
                                f" - ignoring (le) rate(warmroute_loop_stall_seconds_bucket{{{HALF}}}{R}))"
                            ),
                            POD,
                        )
                    ],
                    colours=((None, GREEN), (0.1, RED)),
                ),
                Panel(
                    "Own overhead",
                    "Request read to request sent on: parse, hash, match, place.",
                    quantiles("warmroute_overhead_seconds"),
                    "s",
                ),
            ],
        ),
        Row(
            [
                Panel(
                    "Prefix index",
                    "Bytes that the estimate takes; full at routing.index_bytes_max, and then forgets what is oldest.",
                    [(most("warmroute_index_bytes", "instance"), POD)],
                    "bytes",
                ),
                Panel(
                    "Blocks known",
                    "Distinct blocks: estimated, and by events.",
                    [
                        (most("warmroute_index_keys", "instance"), "estimated {{instance}}"),
                        (most("warmroute_held_keys", "instance"), "by events {{instance}}"),
                    ],
                ),
                Panel(
                    "Prompts to tokens",
                    "What became of prompts on the way to token ids, which events need. Failures: see"
                    " docs/guide/engines.md on tokenizers.",
                    [(rate("warmroute_prompts_tokenized_total", "outcome"), "{{outcome}}")],
                    stack=True,
                ),
                Panel(
                    "Waiting bodies",
                    "Bytes of requests that wait for a place.",
                    [(most("warmroute_queued_bytes", "instance"), POD)],
                    "bytes",
                ),
            ],
            title="Knowledge",
        ),
        Row(
            [
                Panel(
                    "Client connections",
                    "Open now. Near listen.connections_max, more are turned away.",
                    [(most("warmroute_connections", "instance"), POD)],
                ),
                Panel(
                    "Connections closed by us",
                    "By the limit that they ran into.",
                    [(rate("warmroute_connections_closed_total", "reason"), "{{reason}}")],
                ),
                Panel(
                    "Open files",
                    "Sockets included, against the limit of the process.",
                    [
                        (most("process_open_fds", "instance"), "open {{instance}}"),
                        (most("process_max_fds", "instance"), "limit {{instance}}"),
                    ],
                ),
                Panel(
                    "What should not happen",
                    "Log lines dropped, placements on replicas that may not be fit, and by workers without their hub.",
                    [
                        (rate("warmroute_log_lines_dropped_total"), "log lines dropped"),
                        (rate("warmroute_panic_placements_total"), "panic placements"),
                        (rate("warmroute_worker_hub_lost_placements_total"), "hub lost"),
                    ],
                ),
            ],
            title="Connections",
        ),
        Row(
            [
                Panel(
                    "Discovery is fresh",
                    "0: the last good view is kept, and is getting old. Look at the API server, or at DNS.",
                    [(f"min by (instance, source) (warmroute_discovery_fresh{{{OF}}})", "{{source}} {{instance}}")],
                    kind="states", states=(("1", "fresh", GREEN), ("0", "stale", RED)),
                ),
                Panel(
                    "Age of the view",
                    "How long discovery has heard nothing.",
                    [(most("warmroute_discovery_stale_seconds", "instance, source"), "{{source}} {{instance}}")],
                    "s",
                ),
                Panel(
                    "Discovery errors",
                    "Requests to the source that failed.",
                    [(rate("warmroute_discovery_errors_total", "source"), "{{source}}")],
                ),
                Panel(
                    "Replicas found",
                    "By source. Routers that differ for long do not see the same cluster.",
                    [(most("warmroute_discovery_replicas", "instance, source"), "{{source}} {{instance}}")],
                ),
            ],
            title="Discovery",
        ),
        Row(
            [
                Panel(
                    "Settings read again",
                    "refused: the file is wrong, and the old settings hold; the log says what.",
                    [(f"sum by (result) (increase(warmroute_reloads_total{{{OF}}}[$__range]))", "{{result}}")],
                    kind="stat",
                ),
                Panel(
                    "Last reload",
                    "When settings that were read again came into force.",
                    [(f"1000 * {most('warmroute_last_reload_timestamp_seconds', 'instance')}", POD)],
                    "dateTimeFromNow", kind="stat",
                ),
                Panel(
                    "Up for",
                    "Since the process began.",
                    [(f"time() - {most('process_start_time_seconds', 'instance')}", POD)],
                    "s", kind="stat",
                ),
                Panel(
                    "Versions",
                    "More than one: a rollout is under way, or stuck.",
                    [(f"count by (version) (warmroute_build_info{{{OF}}})", "{{version}}")],
                    kind="stat",
                ),
            ],
            height=4,
        ),
    ],
)

BOARDS = {"overview": OVERVIEW, "replicas": REPLICAS, "requests": REQUESTS, "router": ROUTER}
