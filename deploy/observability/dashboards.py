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
from router.core.facts.misses import STAGES, TokenPlace

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
        return f"sum (increase(warmroute_funnel_tokens_total{{{labels}}}[$__range]))"

    asked = tokens_of(MODEL)
    lost: list[tuple[TokenPlace, ...]] = list(accumulate(STAGES.values()))
    others = [f'{MODEL},place!~"{"|".join(places)}"' for places in lost]
    parts = [f"({tokens_of(labels)} or 0 * {asked})" for labels in others]
    return [(ratio(part, asked), name) for part, name in zip([asked, *parts], ["asked", *STAGES], strict=True)]


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
    ("held_elsewhere", YELLOW),
    ("tier", "light-green"),
    ("pulled", "light-blue"),
    ("replay", "blue"),
    ("genuine", GREEN),
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
    "Whether routing pays: hit rate first, then what clients wait, what is saved, and what is in the way.",
    [
        Row(
            [
                Panel(
                    "Token hit rate",
                    "Part of all prompt tokens that were cached: by the engine's count where its answer told, else as"
                    " predicted. The figure to watch: if it falls after a rollout, see the grade of replicas and the"
                    " spillover below.",
                    [(RATE, "hit rate")],
                    "percentunit", "stat", colours=HITS, top=1,
                ),
                Panel(
                    "Verified",
                    "Part of prompt tokens of which an engine told: in its answers, or by its own counters. The rest"
                    " of the hit rate is predicted. Low: see docs/guide/engines.md for the engine's flag.",
                    [(TOLD, "by answers"), (TOLD_OR_COUNTED, "or by counters")],
                    "percentunit", "stat", colours=((None, "text"), (SHOWN_MIN, "blue")), top=1,
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
                    "Hit rate: all, predicted, actual",
                    "The hit rate; what was predicted of all prompts; actual, what answers told, shown where they told"
                    " of a fifth of all tokens; counted, what engines' counters say of answers that told nothing. All"
                    " low: prompts share little, or caches are too small. Predicted above actual or counted: the"
                    " router believes in what is gone; see grades and events.",
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
                    "Requests",
                    "Answered a second, by model.",
                    [(rate("warmroute_requests_total", "model", MODEL), "{{model}}")],
                    "reqps", stack=True,
                ),
                Panel(
                    "Output tokens",
                    "Tokens of answers a second, by model: by the engine's count, else events of streams.",
                    [(tokens("completion", "model"), "{{model}}")],
                    TOKENS, stack=True,
                ),
                Panel(
                    "Prompt tokens",
                    "Cached and computed, a second.",
                    [(hits(), "cached"), (tokens("miss"), "computed")],
                    TOKENS, stack=True, fixed=(("cached", GREEN), ("computed", YELLOW)),
                ),
                Panel(
                    "Replicas ready, by model",
                    "None for a model that had some: its requests get 503, though others' do not.",
                    [(f"max by (model) (warmroute_model_ready_replicas{{{MODEL}}})", "{{model}}")],
                    colours=((None, RED), (1, GREEN)),
                ),
            ]
        ),
        Row(
            [
                Panel(
                    "Failed, by model",
                    "Part of each model's requests that ended with 5xx: one model may be down while the sum looks"
                    " well.",
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
                    "By the engine's count where its answer told, else as predicted.",
                    [(ratio(hits("model"), prompts("model")), "{{model}}")],
                    "percentunit", top=1,
                ),
                Panel(
                    "TTFT, all streams",
                    "How many streams began within which time. Two bands: warm and cold prompts, or two kinds of"
                    " replicas.",
                    [(rate("warmroute_ttft_seconds_bucket", "le", MODEL), "{{le}}")],
                    "s", "heatmap",
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
                    [(rate("warmroute_miss_tokens_total", "reason", MODEL), "{{reason}}")],
                    TOKENS, stack=True, fixed=MISSED,
                ),
                Panel(
                    "Hits, genuine and replayed",
                    "Prompt tokens a second that were cached. A replay is the very prompt that was asked for before:"
                    " a hit rate that is made of those says nothing of real traffic.",
                    [(rate("warmroute_hit_tokens_total", "kind", MODEL), "{{kind}}")],
                    TOKENS, stack=True, fixed=(("genuine", GREEN), ("replay", "purple")),
                ),
                Panel(
                    "On the GPU, loaded, computed",
                    "Prompt tokens a second by where their KV came from: found on the GPU, loaded from memory or files"
                    " behind it (tiers), or computed.",
                    [
                        (f"{FOUND} - {rate('warmroute_loaded_tokens_total', 'model', MODEL)}", "GPU {{model}}"),
                        (rate("warmroute_loaded_tokens_total", "model", MODEL), "loaded {{model}}"),
                        (rate("warmroute_miss_tokens_total", "model", MODEL), "computed {{model}}"),
                    ],
                    TOKENS, stack=True,
                ),
                Panel(
                    "Prompts that are no replays",
                    "Part of prompts that were not asked for before, of late. Near 0 is a load test that repeats"
                    " itself, or clients that retry.",
                    [(f"avg (warmroute_prompt_diversity_ratio{{{OF}}})", "diversity")],
                    "percentunit",
                ),
            ]
        ),
        Row(
            [
                Panel(
                    "From asked to hit",
                    "Part of the prompt tokens over the time shown that reach each stage: seen before in a whole block,"
                    " unchanged since, kept by some replica, reached (held where the request went), hit. The longest"
                    " drop is where to begin; the panel beside this one and /dashboard say what is lost there.",
                    reaching(),
                    "percentunit", "bars", colours=((None, "blue"),), top=1,
                ),
                Panel(
                    "Where prompt tokens end",
                    "Each token in one place, a second. rewritten: whoever writes the prompts (/admin/advice);"
                    " evicted_here, evicted_by_others: more room; held_elsewhere: see the spillover below;"
                    " replica_lost: restarts. tier, pulled, replay and genuine are the hits.",
                    [(rate("warmroute_funnel_tokens_total", "place", MODEL), "{{place}}")],
                    TOKENS, stack=True, fixed=ENDED,
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
                    TOKENS, stack=True, fixed=SAVED,
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
                    [(rate("warmroute_spilled_tokens_total", "cause", MODEL), "{{cause}}")],
                    TOKENS, stack=True,
                ),
                Panel(
                    "Why requests went where they went",
                    "warm: to whoever holds most; spill: waiting there would cost more; cold: nobody holds any of it.",
                    [(rate("warmroute_decisions_total", "reason", MODEL), "{{reason}}")],
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
                        (total("warmroute_in_flight_requests", "model", MODEL), "in flight {{model}}"),
                        (total("warmroute_queued_requests", "model", MODEL), "waiting {{model}}"),
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
                    TOKENS,
                ),
                Panel(
                    "Hit rate by the engine",
                    "The engine's own hits over queries, whoever asked.",
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
                    "Of streams that each replica answered, in coarse buckets. One far above the others: a slow GPU,"
                    " or long prompts that only it gets.",
                    [(quantile(0.9, "warmroute_replica_ttft_seconds", "replica", REPLICA), EACH)],
                    "s",
                ),
                Panel(
                    "Requests",
                    "Placed there and ended, a second.",
                    [(rate("warmroute_replica_requests_total", "replica", REPLICA), EACH)],
                    "reqps", stack=True,
                ),
                Panel(
                    "Output tokens",
                    "Tokens of its answers, a second.",
                    [(rate("warmroute_replica_completion_tokens_total", "replica", REPLICA), EACH)],
                    TOKENS, stack=True,
                ),
            ],
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
                    "Running and waiting",
                    "vLLM's own batch and queue, where Prometheus scrapes the engines too.",
                    [
                        (of_engine(f"vllm:num_requests_running{{{ENGINE}}}"), "running {{replica}}"),
                        (of_engine(f"vllm:num_requests_waiting{{{ENGINE}}}"), "waiting {{replica}}"),
                    ],
                ),
                Panel(
                    "KV cache in use",
                    "vLLM's own figure.",
                    [(of_engine(f"vllm:kv_cache_usage_perc{{{ENGINE}}}"), EACH)],
                    "percentunit", top=1,
                ),
                Panel(
                    "Tokens generated",
                    "By vLLM's own count, whoever asked.",
                    [(of_engine(f"rate(vllm:generation_tokens_total{{{ENGINE}}}{R})"), EACH)],
                    TOKENS,
                ),
                Panel(
                    "TTFT p90 in the engine",
                    "From its arrival at the engine: the router's own TTFT has the way there and the queue besides.",
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
                    "Pods, nodes, models and engine versions of replicas, as far as known.",
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
                    "Part of the replica's computed tokens that came through these routers. Below 1 others use it too.",
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
                    "Verified by model",
                    "Part of prompt tokens of which answers told what was cached. What is not told is predicted.",
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
                    "Part of streams whose first token came within the predicted median, and within the predicted p90:"
                    " about a half, and nine in ten. Far below: engines have work that routers do not see.",
                    [
                        (f"{WITHIN_P50} / ({FORETOLD} > 0)", "within the median (0.5)"),
                        (f"{WITHIN_P90} / ({FORETOLD} > 0)", "within p90 (0.9)"),
                    ],
                    "percentunit", top=1,
                ),
                Panel(
                    "TTFT over its prediction",
                    "Real times to first token over their predicted medians: 1 is right, 2 twice as long.",
                    quantiles("warmroute_ttft_prediction_ratio", MODEL),
                ),
                Panel(
                    "Deadlines kept",
                    "Streams with a deadline whose first token came in time, by priority; the others were late or had "
                    "none.",
                    [
                        (
                            ratio(
                                rate("warmroute_deadlines_total", "priority", MODEL + ',kept="in_time"'),
                                rate("warmroute_deadlines_total", "priority", MODEL),
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
                    "Requests that wait for a place, by model and priority.",
                    [(total("warmroute_queued_requests", "model, priority", MODEL), "{{model}} {{priority}}")],
                    stack=True,
                ),
                Panel(
                    "Waited p90",
                    "Of requests that had to wait.",
                    [(quantile(0.9, "warmroute_queue_seconds", "model", MODEL), "{{model}}")],
                    "s",
                ),
                Panel(
                    "Turned away",
                    "overloaded: the fleet is full; rate_limited: a tenant's quota.",
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
                    TOKENS, stack=True,
                ),
                Panel(
                    "Output tokens by tenant",
                    "By the engine's count, else events of streams.",
                    [(rate("warmroute_tenant_completion_tokens_total", "tenant"), "{{tenant}}")],
                    TOKENS, stack=True,
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
        Row(
            [
                Panel(
                    "Differences",
                    "Prompts a second that differ from an earlier one before tokens that both have, by what differs."
                    " Each makes everything behind it miss; the router's own page says where.",
                    [(rate("warmroute_differences_total", "change") + " > 0 or vector(0)", "{{change}}")],
                    stack=True,
                ),
                Panel(
                    "Avoidable misses",
                    "Part of prompt tokens that were computed for a reason that somebody can do something about.",
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
                    "Requests a second whose very prompt was asked for before.",
                    [(rate("warmroute_replays_total"), "replays")],
                    "reqps",
                ),
            ],
            title="Misses and differences",
        ),
        Row(
            [
                Panel(
                    "Requests by group",
                    "By what requests are for: tenant, and the step of an agent where they name it.",
                    [(rate("warmroute_group_requests_total", "tenant, step"), "{{tenant}} {{step}}")],
                    "reqps", stack=True,
                ),
                Panel(
                    "Hit rate by group",
                    "Low for one: look at its prompts first.",
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
                    "Time to the first event of nine streams in ten, in coarse buckets.",
                    [(quantile(0.9, "warmroute_group_ttft_seconds", "tenant, step"), "{{tenant}} {{step}}")],
                    "s",
                ),
                Panel(
                    "Prompt tokens a request, by group",
                    "Mean over the interval; the metric is a histogram, too.",
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
                    "By what agents' clients say of themselves: a client's own requests, and its sub-agents' (/sub)."
                    " Empty where no client is known: see docs/guide/agents.md.",
                    [(rate("warmroute_group_requests_total", "agent", AGENTS), "{{agent}}")],
                    "reqps", stack=True,
                ),
                Panel(
                    "Hit rate by agent",
                    "Sub-agents far below their client: their prompts begin otherwise than those of whoever started"
                    " them, or there is no room where these are. See the decisions of one on the router's own page.",
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
                    "Time to the first event of nine streams in ten, in coarse buckets.",
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
