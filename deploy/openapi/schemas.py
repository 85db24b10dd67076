"""Contents of bodies: errors, models, requests that ended, and rows of the admin pages."""

from __future__ import annotations

from deploy.openapi.answers import GRADES
from deploy.openapi.parts import Part, by_name, each, flag, maybe, number, one_of, record, ref, rows, text, whole
from router.admin.prewarm_endpoint import REQUESTS_MAX, TEMPLATES_MAX, TOKENS_MAX
from router.core.fleet.breaker import State
from router.core.placement.spill import SpillCause
from router.core.types.cache_misses import FUNNEL_STAGES, MissReason, TokenFate
from router.core.types.disagg_types import KvConnector, PairState, Role
from router.core.types.replicas import CapacitySource, Sleep

SUMS = (
    "prompt_tokens predicted_tokens hit_tokens genuine_tokens replay_tokens verified_tokens verified_hit_tokens"
    " verified_predicted_tokens"
)


def schemas() -> Part:
    """Return all schemas by name."""
    return {
        **_errors(),
        **_models(),
        **_requests(),
        **_history(),
        **_replicas(),
        **_branches(),
        **_observatory(),
        **_prewarming(),
    }


def _errors() -> Part:
    words = text("Text for people, which may change.")
    return {
        "Error": record(
            "An error of the router, in OpenAI's form.",
            {
                "error": record(
                    "The error.",
                    {
                        "message": words,
                        "type": text("OpenAI's name of this kind of error."),
                        "param": maybe(text("The field of the body with the error.")),
                        "code": text("A code that will not change (docs/reference/errors.md)."),
                    },
                )
            },
        ),
        "AnthropicError": record(
            "An error of the router, in Anthropic's form: on `/v1/messages` and below.",
            {
                "type": one_of("error"),
                "error": record(
                    "The error.",
                    {"type": text("Anthropic's name of this kind of error."), "message": words, "code": text()},
                ),
            },
        ),
        "SglangError": record(
            "An error of the router, in SGLang's form: on `/generate`.",
            {
                "object": one_of("error"),
                "message": words,
                "type": text("The status in words."),
                "param": maybe(text("The field of the body with the error.")),
                "code": text("As in `Error`."),
            },
        ),
        "AdminError": record(
            "An error of the admin listener.",
            {
                "error": record(
                    "The error.",
                    {"code": text("A code that will not change (docs/guide/access.md)."), "message": words},
                )
            },
        ),
    }


def _models() -> Part:
    model = {
        "id": text("Its name."),
        "object": one_of("model"),
        "created": whole("Unix seconds, by its engine."),
        "owned_by": text("The kind of engine, as it reports it."),
        "root": maybe(text("The name that it is stored under.")),
        "parent": maybe(text("An adapter's base model.")),
        "max_model_len": maybe(whole("Maximum tokens of a prompt and its answer together.")),
    }
    return {
        "Model": record(
            "A model of at least one ready replica: the engine's own row with all its fields.",
            model,
            optional=[name for name in model if name != "id"],
        ),
        "Version": record("The router's version.", {"version": text("Such as `1.2.3`.")}),
        "Models": record("All models.", {"object": one_of("list"), "data": rows(ref("Model"))}),
        "EngineBody": {
            "type": "object",
            "description": "Body for the engine; every byte is forwarded.",
            "properties": {
                "model": text("Required if more than one model is served."),
                "stream": flag("Answer in events."),
            },
        },
        "EngineAnswer": {"description": "The engine's response, byte for byte."},
    }


def _requests() -> Part:
    """Return requests that ended, as their senders and as operators see them."""
    usage = {**each(whole(), "prompt_tokens completion_tokens"), "cached_tokens": maybe(whole("Null: not reported."))}
    place = {
        "change": text("Kind of the difference."),
        "message": whole("Number of the message; -1 before the first."),
        "role": text("Role of that message."),
        "path": text("JSON path in the body."),
        "offset_bytes": whole("Bytes from the beginning of that message."),
        "at_bytes": whole("Bytes from the beginning of the prompt."),
        "lost_bytes": whole("Equal bytes after the difference."),
    }
    texts = {
        "shape": text("The differing piece, with letters and digits replaced."),
        "piece_hash": text("Its keyed hash."),
        **each(text("Empty without `insights.excerpts`."), "before after"),
        "token_bytes": whole("Bytes of the part."),
    }
    receipt = {
        **each(maybe(text()), "replica reason grade"),
        **each(maybe(whole()), "prompt_tokens predicted_cached_tokens"),
        "waited_s": number("Seconds in the router's queue."),
        "retries": rows(text("Kind of the failure.")),
        "spill": maybe(text("Cause of the spill.")),
        **each(maybe(whole()), "spilled_tokens hit_tokens"),
        "miss": maybe(ref("Misses")),
        "turn": maybe(whole("Number of the turn in its conversation.")),
        "difference": maybe(ref("Place")),
    }
    reasons, places = ({each.value: whole() for each in kinds} for kinds in (MissReason, TokenFate))
    return {
        "Usage": record("An engine's own counts.", usage),
        "Misses": record("Prompt tokens that were computed, by reason.", reasons, optional=reasons),
        "Funnel": record("Prompt tokens by fate, from requested to hit.", places, optional=places),
        "Place": record("First difference of a prompt from an earlier one.", place),
        "Difference": record("The same, with the differing text.", {**place, **texts}),
        "OwnRequest": record(
            "Outcome of a request. The fields after `usage` are absent if responses carry no receipts.",
            {**_ended(), **receipt},
            optional=receipt,
        ),
        "Candidate": record("An eligible replica, and every term of its price.", _candidate()),
        "Decision": record("A request that ended, and the reason of its placement.", _decision()),
    }


def _ended() -> Part:
    return {
        "id": text("Its `x-warmroute-request-id`."),
        "at_s": number("Unix seconds of its arrival."),
        "route": text("Its path, or `other`."),
        "model": text(),
        "stream": flag(),
        "status": whole("Its answer's status; 499: its client left."),
        "ending": text("End of the response."),
        "error": maybe(text("The router's error code.")),
        "detail": maybe(text("The error's message.")),
        "ttft_s": maybe(number("Seconds to the first token of a stream.")),
        "wanted_ttft_s": maybe(number("Deadline of the first token, in seconds from arrival.")),
        "in_time": maybe(flag("True if the first token of a stream met the deadline.")),
        "inter_token_s": maybe(number("Seconds between two tokens of a stream.")),
        "duration_s": number("Seconds to the end."),
        "events": whole("Events of the stream."),
        "usage": maybe(ref("Usage")),
    }


def _candidate() -> Part:
    return {
        "id": text(),
        **each(whole(), "cached_tokens uncached_tokens in_flight estimated_tokens tier_tokens"),
        **each(number(), "pending_ms uncached_ms evicted_ms kv_wait_ms evicted_again_ms"),
        **each(number(), "decode_ms slowed_ms stalled_ms price_ms loading_ms room_ms delay_ms"),
        "price_terms": by_name(
            number(), "Milliseconds that add up to `price_ms`; empty if the policy compares no prices."
        ),
        "grade": one_of(*GRADES),
    }


def _decision() -> Part:
    return {
        "number": whole("Number of this decision, for `before`."),
        "session": maybe(text("Hash of the session's name.")),
        **_ended(),
        "tenant": text(),
        "retries": rows(record("An attempt that failed.", each(text(), "kind replica"))),
        "continued": maybe(record("Stream failover of a broken stream.", each(text(), "how cause replica"))),
        "not_continued": maybe(text("Reason against stream failover.")),
        "queued_s": number("Seconds in the router's queue."),
        "overhead_s": maybe(number("Seconds that the router itself took.")),
        "predicted_ttft_s": maybe(number("Predicted seconds to the first token: the median.")),
        "predicted_ttft_p90_s": maybe(number("The same at the 90th percentile.")),
        "agent": maybe(text("Kind of agent as its client reports it, with the suffix `/sub` for a sub-agent.")),
        "agent_id": maybe(text("Hash of the agent's own name of the conversation.")),
        "agent_parent": maybe(text("Hash of the name of the conversation that started it.")),
        "agent_final": flag("True if the client reported the end of the conversation."),
        **each(maybe(text()), "replica policy reason rule spill template conversation step warning trace_id"),
        "grade": maybe(one_of(*GRADES)),
        **each(maybe(whole()), "prompt_tokens predicted_cached_tokens hit_tokens loaded_tokens pulled_tokens turn"),
        "predicted_tier_tokens": whole("Predicted cached tokens that must be loaded from a tier."),
        "predicted_pull_tokens": whole(
            "Predicted cached tokens that must be transferred from another replica's memory."
        ),
        "predicted_pull_ms": number("Predicted milliseconds of that transfer."),
        "pull_source": maybe(text("Source replica of that transfer.")),
        "prefill_replica": maybe(text("The replica of the prefill stage, if another one decodes.")),
        "predicted_prefill_ms": number("Milliseconds until its prompt is prefilled there."),
        "predicted_transfer_ms": number("Milliseconds from then until its blocks are on the decode replica."),
        "spilled_tokens": whole(),
        "candidates": rows(ref("Candidate"), "The most relevant candidates."),
        "weighed": whole("Number of eligible replicas."),
        "miss": maybe(ref("Misses")),
        "places": maybe(ref("Funnel")),
        "held_by": maybe(text("The replica with more of the prompt cached than the chosen one.")),
        "verified": flag("True if the engine reported its cached tokens."),
        "hit": maybe(one_of("replay", "genuine")),
        "saved_ms": maybe(number("Prefill time saved by hits, in milliseconds.")),
        "apart": flag("True if the prompt is isolated from other tenants'."),
        "difference": maybe(ref("Difference")),
        "repairs": rows(text()),
    }


def _history() -> Part:
    kept = {
        "since_s": number("Unix seconds from which figures are kept."),
        "decisions_since_s": maybe(number("The same for decisions; null: no decision is kept.")),
        "decisions_in_memory": whole(),
        "memory_s": whole("Seconds of figures that memory holds."),
        "path": flag("True if the history has a file."),
        "state": one_of("off", "ok", "failing"),
        "why": text("Reason of the failure."),
        **each(whole(), "bytes bytes_max days_max dropped"),
    }
    found = {
        "decisions": rows(ref("Decision")),
        "more": flag("True if older decisions exist."),
        "next_before": maybe(whole("Value of `before` that returns them.")),
        "kept": ref("Kept"),
    }
    causes = {cause.value: whole() for cause in SpillCause}
    quantiles = " ".join(f"{name}_p{part}_s" for name in ("ttft", "itl", "e2e") for part in (50, 90, 99))
    counts = {
        **each(whole(), f"requests placed answered errors_5xx errors_4xx shed left broken retries {SUMS}"),
        "completion_tokens": whole(),
        "misses": ref("Misses"),
        "places": ref("Funnel"),
        "held": record(
            "Tokens cached on another replica, by the cause of the placement off it.", causes, optional=causes
        ),
        **each(maybe(number()), f"{quantiles} waited_p90_s in_flight waiting in_flight_max waiting_max"),
    }
    known = {
        "at_s": whole("Unix seconds of its beginning."),
        "known": flag("False: no data for this step, and no other field."),
    }
    model = {"model": text(), **each(whole(), "requests failed shed hit_tokens verified_tokens")}
    model |= each(whole(), "prompt_tokens completion_tokens")
    group = {**each(text(), "route tenant step agent"), "tools": flag()}
    group |= each(whole(), "requests prompt_tokens hit_tokens replay_tokens")
    span = {
        "now_s": number(),
        **each(whole(), "from_s to_s step_s"),
        "kept": ref("Kept"),
        "points": rows(ref("Point")),
        "models": rows(record("Sums of a model over the span, to the minute.", model)),
        "groups": rows(record("Sums of a group of requests over the span, to the minute.", group)),
    }
    return {
        "Kept": record("Age of the oldest data, and state of the history file.", kept),
        "Decisions": record("Decisions that fit, newest first.", found),
        "Point": record("Sums of requests in one step.", {**known, **counts}, optional=counts),
        "Series": record("Figures over time in even steps.", span),
    }


def _replicas() -> Part:
    load = {
        **each(maybe(number()), "running waiting kv_usage kv_tokens_max block_tokens prompt_tokens_total"),
        **each(maybe(number()), "generation_tokens_total cache_query_tokens_total cache_hit_tokens_total started_s"),
        "computed_tokens_total": maybe(number()),
        "prefix_caching": maybe(flag()),
        **each(maybe(whole()), "deferred kv_blocks"),
        "kv_source": maybe(one_of(*CapacitySource)),
        "sleep": maybe(one_of(*Sleep)),
    }
    blocks = "blocks_aside unknown_removals blocks_forgotten hash_conflicts blocks_of_other_size"
    stream = {
        **each(text(), "state why endpoint"),
        "grade": one_of(*GRADES),
        "last_seq": whole("Number of the last batch of which all events are applied."),
        "lag_s": maybe(number("The router's clock minus the engine's, at the last batch.")),
        **each(whole(), "events blocks answers_compared answers_equal"),
        "counts": by_name(whole(), "Counts of batches and errors."),
        "block_tokens": maybe(whole()),
        **each(whole(), blocks),
    }
    breaker = {"state": one_of(*State), "why": text(), "for_s": number("Seconds until the next trial.")}
    replica = {
        **each(text(), "id name node instance version why grade_why"),
        "added": flag("Added at run time."),
        "warming": flag("Its cache is being filled."),
        "ready": flag("True if the replica may receive requests."),
        "failures_in_a_row": whole(),
        "breaker": record("State of the circuit breaker.", breaker),
        "grade": one_of(*GRADES),
        "events": maybe(ref("EventStream")),
        "models": rows(text()),
        **each(whole(), "in_flight blocks blocks_max unseen_answers"),
        "window": maybe(whole("Limit of open requests.")),
        **each(number(), "pending_prefill_ms answer_tokens"),
        "load": ref("Load"),
        "metrics_of_several": flag("True if several processes answer its `/metrics`, one after the other."),
        "share": number("Part of its work that this router sent."),
        **each(by_name(number(), "Learned coefficients."), "prefill decode_step"),
        "role": one_of(*Role),
        "split": maybe(ref("Hand")),
        "pull_address": maybe(text("Address at which its engine accepts P2P transfers, `host:port`.")),
    }
    source = {"fresh": flag(), "why": text(), "stale_s": number(), **each(whole(), "errors replicas")}
    link = {
        "router": text("This router's name."),
        "fleet": text("`peering.fleet`."),
        "whole": flag("True if this router receives its own messages."),
        "why": text("Reason, if it does not."),
        "refused": text("Reason for which the store accepts no writes."),
        "delay_ms": maybe(number("Time that the last message took.")),
        "routers": rows(
            record("A router with received messages.", {"name": text(), "age_s": number("Since its last message.")})
        ),
    }
    held = record("Values of one replica.", each(whole(), "blocks blocks_max"))
    address = record("A replica's address.", {"url": text("`http://ADDRESS:PORT`, within `admin.replicas_allowed`.")})
    return {
        "Load": record("Values of an engine's metrics; null: not available.", load),
        "EventStream": record("A replica's stream of KV events, and its blocks.", stream, optional=stream),
        "Replica": record("Health, load, and learned coefficients.", replica),
        "Hand": _hand(),
        "Replicas": record(
            "All replicas, the age of each source's list, and the connected routers.",
            {
                "replicas": rows(ref("Replica")),
                "discovery": by_name(record("A source.", source)),
                "sharing": maybe(ref("RouterLink")),
                "unshared": text("Reason for which routers share no state; empty: no such condition."),
            },
        ),
        "RouterLink": record("The link to other routers; null: turned off.", link),
        "ReplicaUrl": {**address, "additionalProperties": False},
        "Index": record(
            "Size of the prefix index, and its part from a snapshot.",
            {**each(whole(), "keys bytes bytes_max"), "replicas": by_name(held), "state": maybe(ref("StateKept"))},
        ),
        "StateKept": _state_kept(),
    }


def _hand() -> Part:
    pairs = "Number of pairs by state: ready, warming up, and in cooldown after a failure."
    hand = {
        "handshake": one_of(*KvConnector),
        "address": text("Address for decode engines, `host:port`; empty: the prefill response names it."),
        "answers": flag("True if its KV connector answers."),
        "pairs": record(pairs, each(whole(), "warm new resting")),
    }
    return record("KV connector of a replica with a prefill or decode role; null: no role.", hand)


def _state_kept() -> Part:
    outcome = {
        "replica": text(),
        **each(whole(), "estimate_blocks events_blocks"),
        "why": text("Reason for which no estimate was restored."),
        "events_why": text("Reason for which no block from KV events was restored."),
    }
    return record(
        "Snapshots that were restored and are written; null: none.",
        {
            "file": text("`snapshot.path`."),
            "source": text("Source of the snapshot."),
            "why": text("Reason for which the file was not used."),
            "failing": text("Reason for which the file is not written."),
            "written_age_s": maybe(number("Since the file was written.")),
            "bytes": whole("Of the file."),
            "holding": flag("`/readyz` waits for it."),
            "replicas": record("Replicas by outcome.", each(whole(), "restored refused waiting")),
            "restored": rows(record("One replica.", outcome)),
        },
    )


def _branches() -> Part:
    branch = {
        **each(text(), "id parent label"),
        **each(whole(), "prompt_tokens own_tokens requests served_tokens"),
        "hit_rate": maybe(number()),
        "holders": rows(text("A replica.")),
    }
    advice = {
        **each(text(), "template label change role path cost text shape before after"),
        **each(whole(), "rank templates message at_bytes requests lost_tokens evicted_tokens"),
        **each(maybe(number()), "lost_tokens_per_h gpu_s_per_h"),
        "last_at_s": number("Unix time of the last case; 0: unknown."),
        "recent": flag("True if there was a case in the last minute. Others are last."),
        "tenants": rows(text("A tenant with a case, the one with the last case first.")),
    }
    difference: Part = {"type": "object", "description": "A difference between its prompts."}
    template = {
        **branch,
        "path": text(),
        **each(whole(), "tools messages conversations"),
        "misses": ref("Misses"),
        "differences": rows(difference),
        "can_prewarm": flag(),
    }
    return {
        "Branch": record("A prefix that conversations share.", branch),
        "TemplateRow": record("The same, with its lost tokens.", template),
        "Templates": record("Shared prefixes, most used first.", {"templates": rows(ref("TemplateRow"))}),
        "AdviceRow": record("One piece of advice against misses.", advice),
        "Advice": record(
            "Advice, the most costly first.",
            {"window_s": whole("Seconds that the advice covers."), "advice": rows(ref("AdviceRow"))},
        ),
    }


def _observatory() -> Part:
    sums = each(whole(), f"requests {SUMS}")
    totals = {
        **sums,
        **each(whole(), "counted_tokens counted_hit_tokens"),
        "misses": ref("Misses"),
        **each(maybe(number()), "diversity ttft_p50_s ttft_p90_s ttft_p99_s"),
    }
    point = {"at_s": whole(), **sums, "misses": ref("Misses"), **each(maybe(number()), "ttft_p50_s ttft_p90_s")}
    replica = {
        **each(text(), "id name pod namespace state grade_why"),
        "why": text("Reason for which it takes no requests or only trials; else the result of its health checks."),
        "slow": text("In what it is slower than its peers; empty: it is not."),
        "idle": text("Requests that its peers get, if it could take requests and gets few; else empty."),
        "models": rows(text()),
        **each(flag(), "ready warming"),
        "grade": one_of(*GRADES),
        "grade_falls": whole("Times that its grade fell in the last ten minutes."),
        "requests_per_s": number("Of the last minutes, as the three below."),
        **each(maybe(number()), "request_share ttft_p50_s ttft_p90_s"),
        **each(whole(), "in_flight blocks blocks_max"),
        **each(maybe(number()), "window running waiting kv_usage"),
        "pending_prefill_ms": number(),
    }
    counts = "requests failed in_flight waiting shed prompt_tokens completion_tokens hit_tokens verified_tokens"
    model = {"model": text(), **each(whole(), f"{counts} verified_hit_tokens")}
    group = {
        **each(text(), "route tenant step agent"),
        "tools": flag(),
        **each(whole(), "requests prompt_tokens verified_tokens"),
        **each(maybe(number()), "hit_rate genuine_hit_rate ttft_p50_s ttft_p90_s prompt_tokens_p50 tool_calls_mean"),
    }
    tenant = {
        "tenant": text(),
        **each(number(), "requests_per_s request_share computed_share"),
        "in_flight": whole("Requests placed or in the router's queue now."),
        "waiting": whole("Those in the router's queue."),
    }
    unserved = {"model": text(), "why": text("Readiness of its replicas.")}
    router = {
        "name": text("`peering.router_id`, or the machine's name and the admin port."),
        "peers": rows(text("Name of another router that reports to this one.")),
        "unshared": text("Reason for which routers share no state; empty: no such condition."),
    }
    page = {
        **each(number(), "now_s uptime_s"),
        "pages": rows(text("A path that the dashboard may request.")),
        "links": by_name(text()),
        **each(text(), "version no_advice"),
        "router": record("This router.", router),
        "build": text("Version, native code or pure Python, Python's version, and the commit if known."),
        "excerpts": flag(),
        "totals": record("Sums of all requests in the window.", totals),
        "stages": record(
            "Stages from requested to hit, each with the fates of the tokens that do not reach it.",
            {stage: rows(one_of(*places)) for stage, places in FUNNEL_STAGES.items()},
        ),
        "timeline": record("The last hour.", {"step_s": whole(), "points": rows(record("A step.", point))}),
        "replicas": rows(record("A replica in short.", replica)),
        "split": maybe(record("Disaggregated prefill; null: no replica has a KV connector.", _split())),
        "map": rows(ref("Branch")),
        "advice": rows(ref("AdviceRow")),
        "models": rows(record("A model.", model)),
        "unserved_models": rows(record("A model without a ready replica, requested in the last minutes.", unserved)),
        "groups": rows(record("A group of requests.", group)),
        "tenants": rows(record("A tenant in the last minutes and now, the most computed prompt tokens first.", tenant)),
        "decisions": rows(ref("Decision")),
    }
    return {"Observatory": record("Data of the dashboard, except time series and searches.", page)}


def _split() -> Part:
    replica = {
        "id": text(),
        "role": one_of(*Role),
        "handshake": one_of(*KvConnector),
        "answers": flag("True if its KV connector answers."),
        "pairs": record("How many pairs it is in.", each(whole(), "warm new resting")),
    }
    pair = {
        **each(text(), "prefill decode"),
        "state": one_of(*PairState),
        "rests_s": number("Seconds until the next attempt."),
        **each(whole(), "sent prefills_failed broken"),
    }
    return {
        "replicas": rows(record("A replica for disaggregated prefill.", replica)),
        "pairs": rows(record("A pair; pairs in cooldown first. Requests are counted since the pair exists.", pair)),
        "pairs_in_all": whole(),
    }


def _prewarming() -> Part:
    job = {
        **each(text(), "replica why state"),
        **each(whole(), "sent skipped failed prompt_tokens cached_tokens"),
        "seconds": number(),
        "errors": rows(text()),
    }
    request = record("A request with the prompt to send.", {"path": text(), "body": {"type": "object"}})
    call = {
        "replicas": maybe(rows(text("A replica's id."), "Default: all ready replicas.")),
        "requests": {**rows({**request, "additionalProperties": False}), "maxItems": REQUESTS_MAX},
        "templates": whole("Number of the most used learned templates.", minimum=0, maximum=TEMPLATES_MAX),
        "tokens_max": maybe(whole("Prompt tokens for each replica.", minimum=1, maximum=TOKENS_MAX)),
        "wait": flag("Answer after all prompts were sent."),
    }
    about = "Prompts for prewarming; without `requests` and `templates` those of the settings."
    asked = {
        "replicas": rows(text()),
        **each(whole(), "requests templates tokens_max"),
        "prefixes_file": text(),
    }
    return {
        "WarmCall": {**record(about, call, optional=call), "additionalProperties": False},
        "WarmJob": record("The warming of one replica.", job),
        "WarmState": record("Jobs, the last results newest first.", each(rows(ref("WarmJob")), "running queue last")),
        "WarmAsked": record("Requests that will be sent.", asked),
        "WarmDone": record("Requests that were sent.", {"replicas": rows(ref("WarmJob"))}),
    }
