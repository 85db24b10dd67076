"""Contents of each dashboard. All of it is in this file; grafana.py makes JSON of it.

Expressions use the routers' own metrics, not recording rules, so that a dashboard works without these. A ratio has no
value if its denominator is zero: no traffic is not a bad hit rate. There is one hit rate, hits over hits and misses.
The engines' reported rate is shown beside it, and the part that they did not report is grey. Several routers see the
same replicas: figures of a replica's state are taken at their maximum, figures of a router's actions on it are added
up. If a metric has one series per state, the states first become a number in each router: a sum of two routers' states
would be a third state.
"""

from __future__ import annotations

from itertools import accumulate

from deploy.observability.grafana import GREEN, RED, YELLOW, Board, Mark, Panel, Row
from router.core.types.cache_misses import FUNNEL_STAGES, TokenFate

OF = 'job=~"$job",namespace=~"$namespace"'
MODEL = f'{OF},model=~"$model"'
REPLICA = f'{OF},replica=~"$replica"'
ENGINE = 'namespace=~"$namespace"'  # of engines' own metrics: their job is not the routers'
TOKENS = "si:tokens/s"  # a custom unit of Grafana: 1.2 ktokens/s
SHARED = " / on () group_left () "  # each of several series by one whole
R = "[$__rate_interval]"


def rate(metric: str, by: str = "", labels: str = OF) -> str:
    """Return the metric's sum over routers, per second."""
    return f"sum{f' by ({by})' if by else ''} (rate({metric}{{{labels}}}{R}))"


def ratio(part: str, whole: str) -> str:
    """Return a ratio without a value if the whole is zero."""
    return f"{part} / ({whole} > 0)"


def quantile(q: float, metric: str, by: str = "", labels: str = OF) -> str:
    """Return a quantile of a histogram of seconds."""
    return f"histogram_quantile({q}, {rate(f'{metric}_bucket', f'le, {by}' if by else 'le', labels)})"


def quantiles(metric: str, labels: str = OF) -> list[tuple[str, str]]:
    """Return the three quantiles that matter during an incident."""
    return [(quantile(q, metric, labels=labels), name) for q, name in ((0.5, "p50"), (0.9, "p90"), (0.99, "p99"))]


def most(metric: str, by: str, labels: str = OF) -> str:
    """Return the maximum over routers for each label value."""
    return f"max by ({by}) ({metric}{{{labels}}})"


def total(metric: str, by: str = "", labels: str = OF) -> str:
    """Return the sum over all routers."""
    return f"sum{f' by ({by})' if by else ''} ({metric}{{{labels}}})"


def hits(by: str = "") -> str:
    """Return cached tokens per second: zero if there are only misses."""
    return f"({tokens('hit', by)} or 0 * {tokens('miss', by)})"


def tokens(name: str, by: str = "") -> str:
    """Return a counter of tokens by model, per second."""
    return rate(f"warmroute_{name}_tokens_total", by, MODEL)


def prompts(by: str = "") -> str:
    """Return all prompt tokens per second."""
    return f"({hits(by)} + ({tokens('miss', by)} or 0 * {tokens('hit', by)}))"


def of_engine(metric: str, by: str = "") -> str:
    """Return one of vLLM's own metrics, by the replica of the scraped address."""
    each = f'label_replace({metric}, "replica", "http://$1", "instance", "(.*)")'
    return f"sum by ({'replica, ' + by if by else 'replica'}) ({each})"


def reaching() -> list[tuple[str, str]]:
    """Return the shares of the prompt tokens that reach each stage of the funnel, over the displayed time."""

    def tokens_of(labels: str) -> str:
        return f"sum (increase(warmroute_token_fate_total{{{labels}}}[$__range]))"

    asked = tokens_of(MODEL)
    lost: list[tuple[TokenFate, ...]] = list(accumulate(FUNNEL_STAGES.values()))
    others = [f'{MODEL},fate!~"{"|".join(places)}"' for places in lost]
    parts = [f"({tokens_of(labels)} or 0 * {asked})" for labels in others]
    return [(ratio(part, asked), name) for part, name in zip([asked, *parts], ["asked", *FUNNEL_STAGES], strict=True)]


RATE = ratio(hits(), prompts())
ACTUAL = ratio(tokens("cached"), tokens("reported_prompt"))
COUNTED = ratio(tokens("counted_cached"), tokens("counted_prompt"))
PREDICTED = ratio(tokens("predicted_cached"), tokens("prompt"))
TOLD = ratio(f"({tokens('reported_prompt')} or 0 * {prompts()})", prompts())
TOLD_OR_COUNTED = f"{TOLD} + ({ratio(tokens('counted_prompt'), prompts())} or 0 * {prompts()})"
SHOWN_MIN = 0.2  # share of prompt tokens below which the reported part is not representative
FAILED = MODEL + ',status=~"5.."'
FORETOLD = rate("warmroute_ttft_predictions_total", labels=MODEL)
WITHIN_P50 = rate("warmroute_ttft_predictions_total", labels=MODEL + ',within="p50"')
WITHIN_P90 = rate("warmroute_ttft_predictions_total", labels=MODEL + ',within=~"p50|p90"')
AGENTS = OF + ',agent!=""'
AVOIDABLE = MODEL + ',reason=~"diverged|evicted|spilled|replica_lost|identity|mispredicted"'
ASKED = rate("warmroute_requests_total", labels=MODEL)
ERRORS = ratio(f"({rate('warmroute_requests_total', labels=FAILED)} or 0 * {ASKED})", ASKED)  # zero is a value, too
SHED = f"{rate('warmroute_shed_requests_total', 'code', MODEL)} / on () group_left () ({ASKED} > 0)"
HITS = ((None, RED), (0.3, YELLOW), (0.6, GREEN))
FAILS = ((None, GREEN), (0.001, YELLOW), (0.01, RED))
GRADES = (("2", "exact", GREEN), ("1", "catching-up", YELLOW), ("0", "estimated", "blue"))
# Good outcomes are green, those that cost a little blue, those that cost much yellow.
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
    ("pull", "text"),
    ("split", "light-green"),
)
FOUND = (
    f"sum by (model) (rate(warmroute_hit_tokens_total{{{MODEL}}}{R}))"  # cached prompt tokens of each model, per second
)
MISSED = (
    ("diverged", RED),
    ("evicted", "orange"),
    ("spilled", YELLOW),
    ("replica_lost", "purple"),
    ("cold", "blue"),
    ("new", GREEN),
)
ENDED = (
    ("never_seen", "text"),
    ("tail", "text"),
    ("rewritten", RED),
    ("replica_lost", "purple"),
    ("evicted_here", "orange"),
    ("evicted_by_others", "dark-orange"),
    ("cached_on_other_replica", YELLOW),
    ("tier", "light-green"),
    ("pulled", "light-blue"),
    ("replay", "blue"),
    ("gpu_hit", GREEN),
)
MARKS = (
    Mark("Settings read again", f'sum(increase(warmroute_reloads_total{{{OF},result="ok"}}[2m])) > 0', "blue"),
    Mark(
        "Replica joined",
        f"max by (replica) (warmroute_replica_info{{{OF}}})"
        f" unless max by (replica) (warmroute_replica_info{{{OF}}} offset 2m)",
        GREEN,
    ),
)
BREAKERS = (("0", "closed", GREEN), ("1", "resting", "blue"), ("2", "half-open", YELLOW), ("3", "open", RED))

# fmt: off
OVERVIEW = Board(
    "warmroute-overview",
    "warmroute / Overview",
    "Benefit of routing: the hit rate first, then the waiting time of clients, the savings, and the obstacles.",
    [
        Row(
            [
                Panel(
                    "Token hit rate",
                    "Fraction of all prompt tokens that were cached: by the engine's count if the answer reports one,"
                    " otherwise as predicted. This is the main figure. If it falls after a rollout, see the grade of"
                    " replicas and the spillover below.",
                    [(RATE, "hit rate")],
                    "percentunit", "stat", colours=HITS, top=1,
                ),
                Panel(
                    "Verified",
                    "Fraction of prompt tokens with a cached-token count from an engine: in its answers, or in its own"
                    " counters. The rest of the hit rate is predicted. If it is low, see docs/guide/engines.md for the"
                    " engine's flag.",
                    [(TOLD, "by answers"), (TOLD_OR_COUNTED, "or by counters")],
                    "percentunit", "stat", colours=((None, "text"), (SHOWN_MIN, "blue")), top=1,
                ),
                Panel(
                    "TTFT p90",
                    "Time within which nine of ten streams began, including time in the queue.",
                    [(quantile(0.9, "warmroute_ttft_seconds", labels=MODEL), "p90")],
                    "s", "stat",
                ),
                Panel(
                    "Prefill tokens saved",
                    "Prompt tokens in the time range that no GPU had to compute, because they were cached on the"
                    " replica of the request.",
                    [(f"sum (increase(warmroute_saved_prefill_tokens_total{{{MODEL}}}[$__range]))", "tokens")],
                    "short", "stat",
                ),
                Panel(
                    "Replica time saved",
                    "Computation time of these tokens in the time range: an estimate by each replica's learned prefill"
                    " speed. A replica on 2 GPUs saves two GPU-seconds per second.",
                    [(f"sum (increase(warmroute_saved_prefill_seconds_total{{{MODEL}}}[$__range]))", "time")],
                    "s", "stat",
                ),
                Panel(
                    "Errors",
                    "Fraction of requests that ended with 5xx. The dashboard of requests shows it by route, status and"
                    " tenant, and the dashboard of replicas by replica.",
                    [(ERRORS, "5xx")],
                    "percentunit", "stat", colours=FAILS,
                ),
                Panel(
                    "Replicas ready",
                    "Replicas to which at least one router may send requests. If there are 0, clients get 503: check"
                    " the engines first.",
                    [(f"sum(max by (replica) (warmroute_replica_ready{{{OF}}}))", "ready")],
                    "short", "stat", colours=((None, RED), (1, GREEN)),
                ),
            ],
            height=4,
        ),
        Row(
            [
                Panel(
                    "Hit rate: all, predicted, actual",
                    "hit rate: the rate of all prompts. predicted: the prediction for all prompts. actual: the"
                    " engines' counts in answers, shown if they cover at least a fifth of all tokens. counted: the"
                    " engines' counters for answers without a count. If all are low, prompts share few tokens, or"
                    " caches are too small. If predicted is above actual or counted, the router's estimate contains"
                    " evicted blocks: see grades and events.",
                    [
                        (RATE, "hit rate"),
                        (PREDICTED, "predicted"),
                        (f"({ACTUAL}) and ({TOLD} > {SHOWN_MIN})", "actual"),
                        (COUNTED, "counted"),
                    ],
                    "percentunit", top=1, fixed=(("predicted", "blue"), ("actual", "purple"), ("counted", "text")),
                ),
                Panel(
                    "Time to first token",
                    "Time from the complete request to the first event of its stream. If it rises while the hit rate"
                    " does not fall, replicas are busy: see the queue.",
                    quantiles("warmroute_ttft_seconds", MODEL),
                    "s",
                ),
            ]
        ),
        Row(
            [
                Panel(
                    "Requests",
                    "Requests answered per second, by model.",
                    [(rate("warmroute_requests_total", "model", MODEL), "{{model}}")],
                    "reqps", stack=True,
                ),
                Panel(
                    "Output tokens",
                    "Tokens of answers per second, by model: by the engine's count, otherwise by stream events.",
                    [(tokens("completion", "model"), "{{model}}")],
                    TOKENS, stack=True,
                ),
                Panel(
                    "Prompt tokens",
                    "Cached and computed prompt tokens per second.",
                    [(hits(), "cached"), (tokens("miss"), "computed")],
                    TOKENS, stack=True, fixed=(("cached", GREEN), ("computed", YELLOW)),
                ),
                Panel(
                    "Replicas ready, by model",
                    "Ready replicas of each model. If a model has 0 after it had some, its requests get 503, although"
                    " those for other models do not.",
                    [(f"max by (model) (warmroute_model_ready_replicas{{{MODEL}}})", "{{model}}")],
                    colours=((None, RED), (1, GREEN)),
                ),
            ]
        ),
        Row(
            [
                Panel(
                    "Failed, by model",
                    "Fraction of each model's requests that ended with 5xx. One model may be down although the sum is"
                    " normal.",
                    [
                        (
                            ratio(
                                f"({rate('warmroute_requests_total', 'model', FAILED)}"
                                f" or 0 * {rate('warmroute_requests_total', 'model', MODEL)})",
                                rate("warmroute_requests_total", "model", MODEL),
                            ),
                            "{{model}}",
                        )
                    ],
                    "percentunit", colours=FAILS,
                ),
                Panel(
                    "Hit rate by model",
                    "Cached fraction of prompt tokens: by the engine's count if the answer reports one, otherwise as"
                    " predicted.",
                    [(ratio(hits("model"), prompts("model")), "{{model}}")],
                    "percentunit", top=1,
                ),
                Panel(
                    "TTFT, all streams",
                    "Number of streams by the time within which they began. Two bands mean warm and cold prompts, or"
                    " two kinds of replicas.",
                    [(rate("warmroute_ttft_seconds_bucket", "le", MODEL), "{{le}}")],
                    "s", "heatmap",
                ),
            ]
        ),
        Row(
            [
                Panel(
                    "Computed tokens by reason",
                    "Prompt tokens per second that were not cached, by reason. diverged, evicted, spilled,"
                    " replica_lost, identity and mispredicted are avoidable. diverged is fixed in the client that"
                    " writes the prompts (/admin/advice shows the place), and evicted by larger caches. new, cold and"
                    " tail are inherent in the traffic.",
                    [(rate("warmroute_miss_tokens_total", "reason", MODEL), "{{reason}}")],
                    TOKENS, stack=True, fixed=MISSED,
                ),
                Panel(
                    "Hits, genuine and replayed",
                    "Cached prompt tokens per second. A replay is a prompt that was requested before in exactly this"
                    " form. A hit rate that consists of replays does not predict that of real traffic.",
                    [(rate("warmroute_hit_tokens_total", "kind", MODEL), "{{kind}}")],
                    TOKENS, stack=True, fixed=(("genuine", GREEN), ("replay", "purple")),
                ),
                Panel(
                    "On the GPU, loaded, computed",
                    "Prompt tokens per second by the source of their KV: found on the GPU, loaded from memory or files"
                    " outside the GPU (tiers), or computed.",
                    [
                        (f"{FOUND} - {rate('warmroute_loaded_tokens_total', 'model', MODEL)}", "GPU {{model}}"),
                        (rate("warmroute_loaded_tokens_total", "model", MODEL), "loaded {{model}}"),
                        (rate("warmroute_miss_tokens_total", "model", MODEL), "computed {{model}}"),
                    ],
                    TOKENS, stack=True,
                ),
                Panel(
                    "Prompts that are no replays",
                    "Fraction of recent prompts that were not requested before. A value near 0 means a load test that"
                    " repeats itself, or clients that retry.",
                    [(f"avg (warmroute_prompt_diversity_ratio{{{OF}}})", "diversity")],
                    "percentunit",
                ),
            ]
        ),
        Row(
            [
                Panel(
                    "From requested to hit",
                    "Fraction of the prompt tokens in the time range that reach each stage: seen before in a whole"
                    " block, unchanged since, kept by some replica, reached (cached on the replica of the request),"
                    " hit. Begin with the largest drop. The next panel and /dashboard show its causes.",
                    reaching(),
                    "percentunit", "bars", colours=((None, "blue"),), top=1,
                ),
                Panel(
                    "Final places of prompt tokens",
                    "Prompt tokens per second by final place, each token in one place. rewritten: fix the client that"
                    " writes the prompts (/admin/advice). evicted_here, evicted_by_others: enlarge caches."
                    " cached_on_other_replica: see the spillover below. replica_lost: restarts. tier, pulled,"
                    " replay and gpu_hit are the hits.",
                    [(rate("warmroute_token_fate_total", "fate", MODEL), "{{fate}}")],
                    TOKENS, stack=True, fixed=ENDED,
                ),
            ]
        ),
        Row(
            [
                Panel(
                    "Prefill: saved and computed",
                    "Cached prompt tokens per second, and those predicted to be computed.",
                    [
                        (rate("warmroute_saved_prefill_tokens_total", labels=MODEL), "saved"),
                        (rate("warmroute_replica_computed_tokens_total"), "computed"),
                    ],
                    TOKENS, stack=True, fixed=SAVED,
                ),
                Panel(
                    "Replicas' worth of prefill saved",
                    "Replica-seconds saved per second: the number of replicas that would be fully occupied with"
                    " computing cached tokens again. This is an estimate by learned prefill speed.",
                    [(rate("warmroute_saved_prefill_seconds_total", "model", MODEL), "{{model}}")],
                    "short", stack=True,
                ),
            ]
        ),
        Row(
            [
                Panel(
                    "Spillover and why",
                    "Tokens per second that are computed again although another replica caches them. queue: that"
                    " replica has too much work. kv_space, eviction: its cache is too small. decode_load: too many"
                    " streams decode there. delay: a proxy or the network delays it. full, retry, unhealthy: it could"
                    " not be used. tie: the difference is too small to matter. policy: the policy ignores caches.",
                    [(rate("warmroute_spilled_tokens_total", "cause", MODEL), "{{cause}}")],
                    TOKENS, stack=True,
                ),
                Panel(
                    "Reasons of placements",
                    "Requests per second by reason of the placement. warm: placed on the replica that caches most of"
                    " the prompt. spill: waiting there would cost more. cold: no replica caches any part of the"
                    " prompt.",
                    [(rate("warmroute_decisions_total", "reason", MODEL), "{{reason}}")],
                    "reqps", stack=True, fixed=WENT,
                ),
            ]
        ),
        Row(
            [
                Panel(
                    "Errors and rejected requests",
                    "Fractions of requests. 5xx: errors of the router or an engine. overloaded: the fleet is full."
                    " rate_limited: a tenant has used its quota.",
                    [
                        (ERRORS, "5xx"),
                        (SHED, "{{code}}"),
                    ],
                    "percentunit",
                ),
                Panel(
                    "In flight and waiting",
                    "Requests being answered, and those that wait in the router's queue. If the queue stays, add"
                    " replicas, or raise admission limits if engines have spare capacity.",
                    [
                        (total("warmroute_in_flight_requests", "model", MODEL), "in flight {{model}}"),
                        (total("warmroute_queued_requests", "model", MODEL), "waiting {{model}}"),
                    ],
                ),
                Panel(
                    "Knowledge of caches",
                    "Replicas by grade: exact by the engine's events, catching-up after a gap or a late join,"
                    " estimated without events. A replica that falls from exact stays usable, with a lower hit rate.",
                    [(f"sum by (grade) (avg by (replica, grade) (warmroute_replica_grade{{{OF}}}))", "{{grade}}")],
                    stack=True, fixed=WELL_KNOWN,
                ),
            ]
        ),
    ],
    [("model", "warmroute_requests_total")],
    MARKS,
)



def state(of_routers: str, metric: str, label: str, *weights: tuple[int, str]) -> str:
    """Return one number for each replica; `of_routers`, min or max, decides if routers differ."""
    terms = (f'{weight} * {metric}{{{REPLICA},{label}="{value}"}}' for weight, value in weights)
    return f"{of_routers} by (replica) ({f' + ignoring ({label}) '.join(terms)})"


GRADE_OF = state("min", "warmroute_replica_grade", "grade", (2, "exact"), (1, "catching-up"))
BREAKER_OF = state("max", "warmroute_replica_breaker", "state", (3, "open"), (2, "half-open"), (1, "resting"))
def of_probes(metric: str) -> str:
    """Return the rate of an engine's counter that every router reads, as the maximum over routers."""
    return f"max by (replica) (rate({metric}{{{REPLICA}}}{R}))"


COMPUTED = rate("warmroute_replica_computed_tokens_total", "replica")
PLACED = rate("warmroute_replica_placed_tokens_total", "replica")
EACH = "{{replica}}"

REPLICAS = Board(
    "warmroute-replicas",
    "warmroute / Replicas",
    "Each replica: its load, the knowledge about its cache, and its health.",
    [
        Row(
            [
                Panel(
                    "Grade",
                    "Confidence in the knowledge about each cache, from the router with the least knowledge. If it"
                    " falls below exact, check gaps and lost batches below, then the router's log, which states the"
                    " reason.",
                    [(GRADE_OF, EACH)],
                    kind="states", states=GRADES,
                ),
                Panel(
                    "Breaker",
                    "State of each replica's circuit breaker, from the results of requests. open: the replica fails or"
                    " hangs, and gets no requests until a trial succeeds. resting: it asked for a pause. Check its"
                    " failures below and its own log.",
                    [(BREAKER_OF, EACH)],
                    kind="states", states=BREAKERS,
                ),
                Panel(
                    "Ready",
                    "Result of each replica's health checks. Only ready replicas get requests.",
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
                    "Computed tokens of the busiest replica, divided by the mean; 1 is even. If it is high with spills"
                    " by queue, there is one hot prefix. If it is high without them, there are few long conversations,"
                    " or a replica that others cannot relieve.",
                    [
                        (f"max({COMPUTED}) / (avg({COMPUTED}) > 0)", "computed"),
                        (f"max({PLACED}) / (avg({PLACED}) > 0)", "placed"),
                    ],
                    colours=((None, GREEN), (2, YELLOW)),
                ),
                Panel(
                    "Tokens computed",
                    "Prompt tokens per second that each replica is predicted to compute: its actual work.",
                    [(rate("warmroute_replica_computed_tokens_total", "replica", REPLICA), EACH)],
                    TOKENS,
                ),
                Panel(
                    "Hit rate by the engine",
                    "Hits divided by queries, both counted by the engine for all of its clients.",
                    [
                        (
                            ratio(
                                of_probes("warmroute_replica_cache_hit_tokens_total"),
                                of_probes("warmroute_replica_cache_query_tokens_total"),
                            ),
                            EACH,
                        )
                    ],
                    "percentunit", top=1,
                ),
            ],
            title="Work",
        ),
        Row(
            [
                Panel(
                    "TTFT p90",
                    "Time to first token of the streams of each replica, in coarse buckets. If one is far above the"
                    " others, it has a slow GPU, or it alone gets long prompts.",
                    [(quantile(0.9, "warmroute_replica_ttft_seconds", "replica", REPLICA), EACH)],
                    "s",
                ),
                Panel(
                    "Requests",
                    "Finished requests per second, by replica.",
                    [(rate("warmroute_replica_requests_total", "replica", REPLICA), EACH)],
                    "reqps", stack=True,
                ),
                Panel(
                    "Output tokens",
                    "Tokens of each replica's answers per second.",
                    [(rate("warmroute_replica_completion_tokens_total", "replica", REPLICA), EACH)],
                    TOKENS, stack=True,
                ),
            ],
        ),
        Row(
            [
                Panel(
                    "Open requests",
                    "Requests sent by all routers and not finished.",
                    [(total("warmroute_replica_in_flight", "replica", REPLICA), EACH)],
                ),
                Panel(
                    "Prefill that waits",
                    "Estimated time until a request placed now is computed, over all routers. If it rises everywhere,"
                    " there are too few replicas.",
                    [(total("warmroute_replica_pending_prefill_seconds", "replica", REPLICA), EACH)],
                    "s",
                ),
                Panel(
                    "Running and waiting, by the engine",
                    "Batch and queue, by the engine's own count.",
                    [
                        (most("warmroute_replica_running", "replica", REPLICA), "running {{replica}}"),
                        (most("warmroute_replica_waiting", "replica", REPLICA), "waiting {{replica}}"),
                    ],
                ),
                Panel(
                    "KV pool in use",
                    "KV pool usage by live requests. Near 1 the engine preempts: reduce concurrent requests, or add"
                    " replicas.",
                    [(most("warmroute_replica_kv_usage_ratio", "replica", REPLICA), EACH)],
                    "percentunit", top=1, colours=((None, GREEN), (0.9, RED)),
                ),
            ],
            title="Load",
        ),
        Row(
            [
                Panel(
                    "Event lag",
                    "Age of the last batch of KV events on arrival. If it is seconds, the network is slow, or a router"
                    " lacks CPU.",
                    [(most("warmroute_replica_event_lag_seconds", "replica", REPLICA), EACH)],
                    "s",
                ),
                Panel(
                    "Events missed",
                    "Batches that were missing when the next batch arrived (most are replayed), and batches that were"
                    " lost permanently. If batches are lost, raise the engine's buffer for replays and the publisher's"
                    " high-water mark.",
                    [
                        (rate("warmroute_replica_event_gaps_total", "replica", REPLICA), "gaps {{replica}}"),
                        (rate("warmroute_replica_event_lost_total", "replica", REPLICA), "lost {{replica}}"),
                        (rate("warmroute_replica_event_malformed_total", "replica", REPLICA), "malformed {{replica}}"),
                    ],
                ),
                Panel(
                    "Events",
                    "Batches of KV events per second. If there are 0 under load, the engine publishes no events, or"
                    " cannot be reached.",
                    [(f"max by (replica) (rate(warmroute_replica_event_batches_total{{{REPLICA}}}{R}))", EACH)],
                ),
                Panel(
                    "Predicted to the token",
                    "Fraction of the last 200 answers with exactly predicted cached tokens. Below 0.99 the replica is"
                    " not graded exact on this evidence.",
                    [(f"min by (replica) (warmroute_replica_predictions_equal_ratio{{{REPLICA}}})", EACH)],
                    "percentunit", top=1,
                ),
            ],
            title="Knowledge",
        ),
        Row(
            [
                Panel(
                    "Blocks held",
                    "Blocks cached on the replica, according to its KV events. A fall to 0 is a restart or a cleared"
                    " cache.",
                    [(most("warmroute_replica_cached_blocks", "replica", REPLICA), EACH)],
                ),
                Panel(
                    "Blocks estimated",
                    "Blocks in the router's own estimate. Its capacity is that of the engine, multiplied by the"
                    " routers' share of the engine's work.",
                    [(most("warmroute_replica_index_blocks", "replica", REPLICA), EACH)],
                ),
                Panel(
                    "Prefill speed",
                    "Tokens per second, learned from answers. If one is far below the others, check its GPU, or"
                    " requests that bypass the router.",
                    [(most("warmroute_replica_prefill_tokens_per_second", "replica", REPLICA), EACH)],
                ),
                Panel(
                    "Failures",
                    "Failed attempts per second, by kind: see docs/reference/metrics.md, Kinds of failures.",
                    [(rate("warmroute_replica_failures_total", "replica, kind", REPLICA), "{{kind}} {{replica}}")],
                ),
            ],
        ),
        Row(
            [
                Panel(
                    "Running and waiting",
                    "Batch and queue by vLLM's own metrics, if Prometheus also scrapes the engines.",
                    [
                        (of_engine(f"vllm:num_requests_running{{{ENGINE}}}"), "running {{replica}}"),
                        (of_engine(f"vllm:num_requests_waiting{{{ENGINE}}}"), "waiting {{replica}}"),
                    ],
                ),
                Panel(
                    "KV cache in use",
                    "KV cache usage, by vLLM's own metric.",
                    [(of_engine(f"vllm:kv_cache_usage_perc{{{ENGINE}}}"), EACH)],
                    "percentunit", top=1,
                ),
                Panel(
                    "Tokens generated",
                    "Generated tokens per second for all clients, by vLLM's own count.",
                    [(of_engine(f"rate(vllm:generation_tokens_total{{{ENGINE}}}{R})"), EACH)],
                    TOKENS,
                ),
                Panel(
                    "TTFT p90 in the engine",
                    "Time to first token from arrival at the engine. The router's TTFT also includes the way to the"
                    " engine and the queue.",
                    [
                        (
                            "histogram_quantile(0.9, "
                            + of_engine(f"rate(vllm:time_to_first_token_seconds_bucket{{{ENGINE}}}{R})", "le")
                            + ")",
                            EACH,
                        )
                    ],
                    "s",
                ),
            ],
            title="Engines (vLLM)",
        ),
        Row(
            [
                Panel(
                    "Which pod is which",
                    "Pods, nodes, models and engine versions of replicas, if known.",
                    [
                        (
                            most(
                                "warmroute_replica_info",
                                "replica, namespace, pod, node, model, engine, version",
                                REPLICA,
                            ),
                            "",
                        )
                    ],
                    kind="table",
                ),
                Panel(
                    "Our share",
                    "Fraction of the replica's computed tokens that these routers sent. Below 1, other clients also"
                    " use the replica.",
                    [(f"clamp_max({total('warmroute_replica_share_ratio', 'replica', REPLICA)}, 1)", EACH)],
                    "percentunit", top=1,
                ),
            ],
        ),
    ],
    [("replica", "warmroute_replica_ready")],
    MARKS,
)

REQUESTS = Board(
    "warmroute-requests",
    "warmroute / Requests",
    "Requests and answers of clients: by route, model, status and tenant.",
    [
        Row(
            [
                Panel(
                    "By route",
                    "Requests per second, by route.",
                    [(rate("warmroute_requests_total", "route", MODEL), "{{route}}")],
                    "reqps", stack=True,
                ),
                Panel(
                    "By status",
                    "Requests per second, by status. 429: capacity or quota. 499: the client left. 502: an engine"
                    " failed. 503: no replica. 504: no answer in time.",
                    [(rate("warmroute_requests_total", "status", MODEL), "{{status}}")],
                    "reqps", stack=True,
                ),
                Panel(
                    "By model",
                    "Requests per second, by model.",
                    [(rate("warmroute_requests_total", "model", MODEL), "{{model}}")],
                    "reqps", stack=True,
                ),
            ],
        ),
        Row(
            [
                Panel(
                    "TTFT p90 by model",
                    "Time within which the first event of nine in ten streams came.",
                    [(quantile(0.9, "warmroute_ttft_seconds", "model", MODEL), "{{model}}")],
                    "s",
                ),
                Panel(
                    "Between tokens",
                    "Mean time between the events of a stream, over streams. This is decoding, which routing improves"
                    " only by even load.",
                    quantiles("warmroute_inter_token_seconds", MODEL),
                    "s",
                ),
                Panel(
                    "Whole answer p90 by route",
                    "Time from request read to end of answer.",
                    [(quantile(0.9, "warmroute_duration_seconds", "route", MODEL), "{{route}}")],
                    "s",
                ),
                Panel(
                    "Verified by model",
                    "Fraction of prompt tokens with a cached-token count in the answer. The rest is predicted.",
                    [
                        (
                            ratio(
                                f"({tokens('reported_prompt', 'model')} or 0 * {prompts('model')})", prompts("model")
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
                    "First tokens within their prediction",
                    "Fraction of streams with the first token within the predicted median and within the predicted"
                    " p90: about one half, and nine in ten. If it is far below, engines have work that routers do not"
                    " see.",
                    [
                        (f"{WITHIN_P50} / ({FORETOLD} > 0)", "within the median (0.5)"),
                        (f"{WITHIN_P90} / ({FORETOLD} > 0)", "within p90 (0.9)"),
                    ],
                    "percentunit", top=1,
                ),
                Panel(
                    "TTFT over its prediction",
                    "Real times to first token, divided by their predicted medians: 1 is correct, 2 is twice as long.",
                    quantiles("warmroute_ttft_prediction_ratio", MODEL),
                ),
                Panel(
                    "Deadlines kept",
                    "Fraction of streams with a deadline that sent their first token in time, by priority. The others"
                    " were late or sent no token.",
                    [
                        (
                            ratio(
                                rate("warmroute_ttft_deadlines_total", "priority", MODEL + ',result="in_time"'),
                                rate("warmroute_ttft_deadlines_total", "priority", MODEL),
                            ),
                            "{{priority}}",
                        )
                    ],
                    "percentunit", top=1,
                ),
            ],
            title="Predicted times",
        ),
        Row(
            [
                Panel(
                    "Waiting",
                    "Requests in the router's queue, by model and priority.",
                    [(total("warmroute_queued_requests", "model, priority", MODEL), "{{model}} {{priority}}")],
                    stack=True,
                ),
                Panel(
                    "Waited p90",
                    "Time in the queue, of requests that had to wait.",
                    [(quantile(0.9, "warmroute_queue_seconds", "model", MODEL), "{{model}}")],
                    "s",
                ),
                Panel(
                    "Turned away",
                    "Shed requests per second. overloaded: the fleet is full. rate_limited: a tenant has used its"
                    " quota.",
                    [
                        (
                            rate("warmroute_shed_requests_total", "code, model, priority", MODEL),
                            "{{code}} {{model}} {{priority}}",
                        )
                    ],
                    "reqps",
                ),
            ],
            title="Admission",
        ),
        Row(
            [
                Panel(
                    "Attempts",
                    "Requests sent to replicas per second, by outcome; the outcome ok is not shown.",
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
                    "Failures per second that were hidden from clients by a retry, by kind.",
                    [(rate("warmroute_retries_total", "kind"), "{{kind}}")],
                    "reqps", stack=True,
                ),
                Panel(
                    "Predictions",
                    "Cache predictions per second, compared with the engine's own count. over: fewer tokens were"
                    " cached than predicted, and prefill took longer.",
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
                    "Requests per second, with a keys file; other requests are one series.",
                    [(rate("warmroute_tenant_requests_total", "tenant"), "{{tenant}}")],
                    "reqps", stack=True,
                ),
                Panel(
                    "Prompt tokens by tenant",
                    "Prompt tokens of completed answers per second.",
                    [(rate("warmroute_tenant_prompt_tokens_total", "tenant"), "{{tenant}}")],
                    TOKENS, stack=True,
                ),
                Panel(
                    "Output tokens by tenant",
                    "Tokens per second: by the engine's count, otherwise by stream events.",
                    [(rate("warmroute_tenant_completion_tokens_total", "tenant"), "{{tenant}}")],
                    TOKENS, stack=True,
                ),
                Panel(
                    "Hit rate by tenant",
                    "By the engine's count, otherwise as predicted. If it is low for one tenant, its prompts change"
                    " near their beginning.",
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
                Panel(
                    "Open requests by tenant",
                    "Requests placed or in the router's queue, and those of them that wait there. One tenant with most"
                    " of them delays the others.",
                    [
                        (total("warmroute_tenant_in_flight_requests", "tenant"), "{{tenant}} open"),
                        (total("warmroute_tenant_queued_requests", "tenant"), "{{tenant}} waiting"),
                    ],
                ),
            ],
            title="Tenants",
        ),
        Row(
            [
                Panel(
                    "Differences",
                    "Prompts per second that differ from an earlier prompt before tokens that both contain, by kind of"
                    " change. Each difference makes all tokens after it miss. The router's own page shows the place.",
                    [(rate("warmroute_prompt_divergences_total", "change") + " > 0 or vector(0)", "{{change}}")],
                    stack=True,
                ),
                Panel(
                    "Avoidable misses",
                    "Fraction of prompt tokens that were computed for a reason that can be avoided.",
                    [
                        (
                            f"{rate('warmroute_miss_tokens_total', 'reason', AVOIDABLE)}{SHARED}({prompts()} > 0)",
                            "{{reason}}",
                        )
                    ],
                    "percentunit", stack=True, fixed=MISSED,
                ),
                Panel(
                    "Replays",
                    "Requests per second that repeat an earlier prompt exactly.",
                    [(rate("warmroute_duplicate_prompts_total"), "replays")],
                    "reqps",
                ),
            ],
            title="Misses and differences",
        ),
        Row(
            [
                Panel(
                    "Requests by group",
                    "Requests per second by purpose: tenant, and the step of an agent if requests name it.",
                    [(rate("warmroute_group_requests_total", "tenant, step"), "{{tenant}} {{step}}")],
                    "reqps", stack=True,
                ),
                Panel(
                    "Hit rate by group",
                    "Cached fraction of prompt tokens. If it is low for one group, check its prompts first.",
                    [
                        (
                            ratio(
                                rate("warmroute_group_hit_tokens_total", "tenant, step"),
                                rate("warmroute_group_prompt_tokens_total", "tenant, step"),
                            ),
                            "{{tenant}} {{step}}",
                        )
                    ],
                    "percentunit", top=1,
                ),
                Panel(
                    "TTFT p90 by group",
                    "Time within which the first event of nine in ten streams came, in coarse buckets.",
                    [(quantile(0.9, "warmroute_group_ttft_seconds", "tenant, step"), "{{tenant}} {{step}}")],
                    "s",
                ),
                Panel(
                    "Prompt tokens a request, by group",
                    "Mean over the interval. The metric is also available as a histogram.",
                    [
                        (
                            ratio(
                                rate("warmroute_group_prompt_tokens_total", "tenant, step"),
                                rate("warmroute_group_requests_total", "tenant, step"),
                            ),
                            "{{tenant}} {{step}}",
                        )
                    ],
                ),
            ],
            title="Groups",
        ),
        Row(
            [
                Panel(
                    "Requests by agent",
                    "Requests per second by the agent that clients report: a client's own requests, and those of its"
                    " sub-agents (/sub). It is empty if no client is known: see docs/guide/agents.md.",
                    [(rate("warmroute_group_requests_total", "agent", AGENTS), "{{agent}}")],
                    "reqps", stack=True,
                ),
                Panel(
                    "Hit rate by agent",
                    "Cached fraction of prompt tokens. If sub-agents are far below their client, their prompts begin"
                    " differently from those of the parent agent, or the parent's replica has no spare capacity. See"
                    " the decisions for one request on the router's own page.",
                    [
                        (
                            ratio(
                                rate("warmroute_group_hit_tokens_total", "agent", AGENTS),
                                rate("warmroute_group_prompt_tokens_total", "agent", AGENTS),
                            ),
                            "{{agent}}",
                        )
                    ],
                    "percentunit", top=1,
                ),
                Panel(
                    "TTFT p90 by agent",
                    "Time within which the first event of nine in ten streams came, in coarse buckets.",
                    [(quantile(0.9, "warmroute_group_ttft_seconds", "agent", AGENTS), "{{agent}}")],
                    "s",
                ),
            ],
            title="Agents",
        ),
    ],
    [("model", "warmroute_requests_total")],
    MARKS,
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
                    "Cores used by each router. If it is near one core, add routers.",
                    [(rate("process_cpu_seconds_total", "instance"), POD)],
                ),
                Panel(
                    "Memory",
                    "Resident memory of the process that tracks the replicas. It is limited by routing.index_bytes_max"
                    " and events.index_bytes_max.",
                    [(most("process_resident_memory_bytes", "instance"), POD)],
                    "bytes",
                ),
                Panel(
                    "Event loop stalls",
                    "Delays of event-loop timers per second that were longer than 50 ms. The cause is too little CPU"
                    " (check throttling), or a bug.",
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
                    "Time from request read to request forwarded: parse, hash, match, place.",
                    quantiles("warmroute_overhead_seconds"),
                    "s",
                ),
            ],
        ),
        Row(
            [
                Panel(
                    "Prefix index",
                    "Bytes of the estimate. At routing.index_bytes_max it is full, and the oldest entries are evicted.",
                    [(most("warmroute_index_bytes", "instance"), POD)],
                    "bytes",
                ),
                Panel(
                    "Blocks known",
                    "Distinct blocks: estimated, and according to KV events.",
                    [
                        (most("warmroute_index_keys", "instance"), "estimated {{instance}}"),
                        (most("warmroute_held_keys", "instance"), "by events {{instance}}"),
                    ],
                ),
                Panel(
                    "Prompts to tokens",
                    "Outcome of the conversion of prompts to token ids, which KV events need. For failures see"
                    " docs/guide/engines.md on tokenizers.",
                    [(rate("warmroute_prompts_tokenized_total", "outcome"), "{{outcome}}")],
                    stack=True,
                ),
                Panel(
                    "Waiting bodies",
                    "Bytes of the bodies of queued requests.",
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
                    "Open connections. At listen.connections_max further connections are refused.",
                    [(most("warmroute_connections", "instance"), POD)],
                ),
                Panel(
                    "Connections closed by us",
                    "Connections closed by the router per second, by the limit that was exceeded.",
                    [(rate("warmroute_connections_closed_total", "reason"), "{{reason}}")],
                ),
                Panel(
                    "Open files",
                    "Open files including sockets, and the limit of the process.",
                    [
                        (most("process_open_fds", "instance"), "open {{instance}}"),
                        (most("process_max_fds", "instance"), "limit {{instance}}"),
                    ],
                ),
                Panel(
                    "Bugs and losses",
                    "Dropped log lines, and placements on replicas that may not be healthy.",
                    [
                        (rate("warmroute_log_lines_dropped_total"), "log lines dropped"),
                        (rate("warmroute_panic_mode_placements_total"), "panic placements"),
                    ],
                ),
            ],
            title="Connections",
        ),
        Row(
            [
                Panel(
                    "Discovery is fresh",
                    "0: the last valid view is kept and is getting old. Check the API server, or DNS.",
                    [(f"min by (instance, source) (warmroute_discovery_fresh{{{OF}}})", "{{source}} {{instance}}")],
                    kind="states", states=(("1", "fresh", GREEN), ("0", "stale", RED)),
                ),
                Panel(
                    "Age of the view",
                    "Time since the last update from discovery.",
                    [(most("warmroute_discovery_stale_seconds", "instance, source"), "{{source}} {{instance}}")],
                    "s",
                ),
                Panel(
                    "Discovery errors",
                    "Failed requests to the discovery source per second.",
                    [(rate("warmroute_discovery_errors_total", "source"), "{{source}}")],
                ),
                Panel(
                    "Replicas found",
                    "Replicas by source. Routers that differ for a long time do not see the same cluster.",
                    [(most("warmroute_discovery_replicas", "instance, source"), "{{source}} {{instance}}")],
                ),
            ],
            title="Discovery",
        ),
        Row(
            [
                Panel(
                    "Settings read again",
                    "Configuration reloads in the time range. refused: the file is invalid, and the old settings stay"
                    " in force. The log states the error.",
                    [(f"sum by (result) (increase(warmroute_reloads_total{{{OF}}}[$__range]))", "{{result}}")],
                    kind="stat",
                ),
                Panel(
                    "Last reload",
                    "Time at which the last reloaded settings came into force.",
                    [(f"1000 * {most('warmroute_last_reload_timestamp_seconds', 'instance')}", POD)],
                    "dateTimeFromNow", kind="stat",
                ),
                Panel(
                    "Up for",
                    "Time since the process began.",
                    [(f"time() - {most('process_start_time_seconds', 'instance')}", POD)],
                    "s", kind="stat",
                ),
                Panel(
                    "Versions",
                    "Versions of running routers. More than one means that a rollout is in progress, or is stuck.",
                    [(f"count by (version) (warmroute_build_info{{{OF}}})", "{{version}}")],
                    kind="stat",
                ),
            ],
            height=4,
        ),
    ],
)

BOARDS = {"overview": OVERVIEW, "replicas": REPLICAS, "requests": REQUESTS, "router": ROUTER}
