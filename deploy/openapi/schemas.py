"""Contents of bodies: errors, models, requests that ended, and rows of the admin pages."""

from __future__ import annotations

from deploy.openapi.answers import GRADES
from deploy.openapi.parts import Part, by_name, each, flag, maybe, number, one_of, record, ref, rows, text, whole
from router.admin.prewarm_endpoint import REQUESTS_MAX, TEMPLATES_MAX, TOKENS_MAX
from router.core.fleet.breaker import State
from router.core.placement.spill import SpillCause
from router.core.types.disagg_types import KvConnector, PairState, Role
from router.core.types.misses import FUNNEL_STAGES, MissReason, TokenFate
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
                    "Description of the error.",
                    {
                        "message": words,
                        "type": text("OpenAI's name of this kind of error."),
                        "param": maybe(text("The invalid field of the body.")),
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
                    "Description of the error.",
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
                "param": maybe(text("The invalid field of the body.")),
                "code": text("As in `Error`."),
            },
        ),
        "AdminError": record(
            "An error of the admin listener.",
            {
                "error": record(
                    "Description of the error.",
                    {"code": text("A code that will not change (docs/guide/access.md)."), "message": words},
                )
            },
        ),
    }


def _models() -> Part:
    model = {
        "id": text("Its name."),
        "object": one_of("model"),
        "created": whole("Unix seconds, from its engine."),
        "owned_by": text("Kind of engine, as reported by it."),
        "root": maybe(text("Name of the stored model.")),
        "parent": maybe(text("An adapter's base model.")),
        "max_model_len": maybe(whole("Maximum tokens of a prompt and its answer together.")),
    }
    return {
        "Model": record(
            "A model of at least one ready replica: the row of its engine, with all fields.",
            model,
            optional=[name for name in model if name != "id"],
        ),
        "Version": record("The router's version.", {"version": text("Such as `1.2.3`.")}),
        "Models": record("All models.", {"object": one_of("list"), "data": rows(ref("Model"))}),
        "EngineBody": {
            "type": "object",
            "description": "Body for the engine, forwarded unchanged.",
            "properties": {
                "model": text("Required if replicas serve several models."),
                "stream": flag("Answer as a stream of events."),
            },
        },
        "EngineAnswer": {"description": "Answer of the engine, unchanged."},
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
        "lost_bytes": whole("Identical bytes after it."),
    }
    texts = {
        "shape": text("The differing part, with letters and digits replaced."),
        "piece_hash": text("Keyed hash of the part."),
        **each(text("Empty without `insights.excerpts`."), "before after"),
        "token_bytes": whole("Bytes of the part."),
    }
    receipt = {
        **each(maybe(text()), "replica reason grade"),
        **each(maybe(whole()), "prompt_tokens predicted_cached_tokens"),
        "waited_s": number("Seconds in the router's queue."),
        "retries": rows(text("Kind of the failure.")),
        "spill": maybe(text("Reason why it was not placed on the replica with most of its prompt.")),
        **each(maybe(whole()), "spilled_tokens hit_tokens"),
        "miss": maybe(ref("Misses")),
        "turn": maybe(whole("Number of the turn in its conversation.")),
        "difference": maybe(ref("Place")),
    }
    reasons, places = ({each.value: whole() for each in kinds} for kinds in (MissReason, TokenFate))
    return {
        "Usage": record("An engine's own counts.", usage),
        "Misses": record("Computed prompt tokens by reason.", reasons, optional=reasons),
        "Funnel": record("Prompt tokens by final place, from requested to hit.", places, optional=places),
        "Place": record("First difference of a prompt from an earlier one.", place),
        "Difference": record("The same, with the differing texts.", {**place, **texts}),
        "OwnRequest": record(
            "Outcome of a request. Fields after `usage` are missing if receipts are turned off.",
            {**_ended(), **receipt},
            optional=receipt,
        ),
        "Candidate": record("A candidate for a request, with every term of its price.", _candidate()),
        "Decision": record("A request that ended, and the reason of its placement.", _decision()),
    }


def _ended() -> Part:
    return {
        "id": text("Its `x-warmroute-request-id`."),
        "at_s": number("Unix seconds of its arrival."),
        "route": text("Its path, or `other`."),
        "model": text(),
        "stream": flag(),
        "status": whole("Status of the answer; 499: the client disconnected."),
        "ending": text("End of the answer."),
        "error": maybe(text("The router's error code.")),
        "detail": maybe(text("The error's message.")),
        "ttft_s": maybe(number("Seconds to the first token of a stream.")),
        "wanted_ttft_s": maybe(number("Deadline of the first token in seconds from arrival.")),
        "in_time": maybe(flag("True if the first token of a stream met the deadline.")),
        "inter_token_s": maybe(number("Mean seconds between two tokens of a stream.")),
        "duration_s": number("Seconds to the end."),
        "events": whole("Events of the stream."),
        "usage": maybe(ref("Usage")),
    }


def _candidate() -> Part:
    return {
        "id": text(),
        **each(whole(), "cached_tokens uncached_tokens in_flight estimated_tokens tier_tokens"),
        **each(number(), "pending_ms uncached_ms evicted_ms kv_wait_ms evicted_again_ms"),
        **each(number(), "decode_ms slowed_ms stalled_ms price_ms loading_ms room_ms"),
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
        "continued": maybe(
            record("Continuation of a broken stream on another replica.", each(text(), "how cause replica"))
        ),
        "not_continued": maybe(text("Reason why a stream was not or could not be continued.")),
        "queued_s": number("Seconds in the router's queue."),
        "overhead_s": maybe(number("Seconds of router overhead.")),
        "predicted_ttft_s": maybe(number("Predicted seconds to the first token (median).")),
        "predicted_ttft_p90_s": maybe(number("The same as the 90th percentile.")),
        "agent": maybe(text("Kind of agent, as stated by its client; sub-agents end with `/sub`.")),
        "agent_id": maybe(text("Hash of the agent's name for the conversation.")),
        "agent_parent": maybe(text("Hash of the name of the parent conversation.")),
        "agent_final": flag("True if the client marked the conversation as ended."),
        **each(maybe(text()), "replica policy reason spill template conversation step warning trace_id"),
        "grade": maybe(one_of(*GRADES)),
        **each(maybe(whole()), "prompt_tokens predicted_cached_tokens hit_tokens loaded_tokens pulled_tokens turn"),
        "predicted_tier_tokens": whole("Predicted cached tokens outside the GPU, which are loaded."),
        "predicted_pull_tokens": whole("Predicted cached tokens in another replica's memory, which are transferred."),
        "predicted_pull_ms": number("Predicted milliseconds of this transfer."),
        "pull_source": maybe(text("Source replica of this transfer.")),
        "prefill_replica": maybe(text("Prefill replica, if another one decodes.")),
        "predicted_prefill_ms": number("Predicted milliseconds until the end of prefill there."),
        "predicted_transfer_ms": number("Predicted milliseconds of the transfer to the decode replica."),
        "spilled_tokens": whole(),
        "candidates": rows(ref("Candidate"), "The most relevant candidates."),
        "weighed": whole("Number of candidates."),
        "miss": maybe(ref("Misses")),
        "places": maybe(ref("Funnel")),
        "held_by": maybe(text("Replica with a longer cached prefix than the chosen one.")),
        "verified": flag("True if the engine reported cached tokens."),
        "hit": maybe(one_of("replay", "genuine")),
        "saved_ms": maybe(number("Prefill time saved by hits.")),
        "apart": flag("True if the prompt is isolated from other tenants."),
        "difference": maybe(ref("Difference")),
        "repairs": rows(text()),
    }


def _history() -> Part:
    kept = {
        "since_s": number("Unix time of the oldest interval."),
        "decisions_since_s": maybe(number("Unix time of the oldest decision; null: none.")),
        "decisions_in_memory": whole(),
        "memory_s": whole("Seconds of intervals in memory."),
        "path": flag("State of the history file."),
        "state": one_of("off", "ok", "failing"),
        "why": text("Reason of the failure."),
        **each(whole(), "bytes bytes_max days_max dropped"),
    }
    found = {
        "decisions": rows(ref("Decision")),
        "more": flag("True if older decisions exist."),
        "next_before": maybe(whole("Value of `before` for older decisions.")),
        "kept": ref("Kept"),
    }
    causes = {cause.value: whole() for cause in SpillCause}
    quantiles = " ".join(f"{name}_p{part}_s" for name in ("ttft", "itl", "e2e") for part in (50, 90, 99))
    counts = {
        **each(whole(), f"requests placed answered errors_5xx errors_4xx shed left broken retries {SUMS}"),
        "completion_tokens": whole(),
        "misses": ref("Misses"),
        "places": ref("Funnel"),
        "held": record("Tokens cached on another replica, by reason against that replica.", causes, optional=causes),
        **each(maybe(number()), f"{quantiles} waited_p90_s in_flight waiting in_flight_max waiting_max"),
    }
    known = {
        "at_s": whole("Unix time of its beginning."),
        "known": flag("False: the router did not run, and other fields are missing."),
    }
    span = {"now_s": number(), **each(whole(), "from_s to_s step_s"), "kept": ref("Kept"), "points": rows(ref("Point"))}
    return {
        "Kept": record("Time range of the stored data, and state of the history file.", kept),
        "Decisions": record("Matching decisions, newest first.", found),
        "Point": record("Sums over requests in one step.", {**known, **counts}, optional=counts),
        "Series": record("Time series in equal steps.", span),
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
        "last_seq": whole(),
        "lag_s": maybe(number("The router's clock minus the engine's, at the last batch.")),
        **each(whole(), "events blocks answers_compared answers_equal"),
        "counts": by_name(whole(), "Received events, and errors."),
        "block_tokens": maybe(whole()),
        **each(whole(), blocks),
    }
    breaker = {"state": one_of(*State), "why": text(), "for_s": number("Seconds until the next attempt.")}
    replica = {
        **each(text(), "id name node instance version why grade_why"),
        "added": flag("Added at run time."),
        "warming": flag("Prewarming is in progress."),
        "ready": flag("The replica may receive requests."),
        "failures_in_a_row": whole(),
        "breaker": record("Cooldown of the replica.", breaker),
        "grade": one_of(*GRADES),
        "events": maybe(ref("EventStream")),
        "models": rows(text()),
        **each(whole(), "in_flight blocks blocks_max unseen_answers"),
        "window": maybe(whole("Limit of open requests.")),
        **each(number(), "pending_prefill_ms answer_tokens"),
        "load": ref("Load"),
        "metrics_of_several": flag("`/metrics` alternates between several processes."),
        "share": number("Fraction of its work that comes from this router."),
        **each(by_name(number(), "Learned values."), "prefill decode_step"),
        "role": one_of(*Role),
        "split": maybe(ref("Hand")),
        "pull_address": maybe(text("Address of its engine for P2P KV transfers, `host:port`.")),
    }
    source = {"fresh": flag(), "why": text(), "stale_s": number(), **each(whole(), "errors replicas")}
    link = {
        "router": text("This router's name."),
        "fleet": text("`peering.fleet`."),
        "whole": flag("This router receives its own messages, so other routers can receive them."),
        "why": text("Why not."),
        "refused": text("Reason why the store accepts no writes."),
        "delay_ms": maybe(number("Time of the last message through the store.")),
        "routers": rows(
            record(
                "A router with received messages.", {"name": text(), "age_s": number("Seconds since its last message.")}
            )
        ),
    }
    held = record("Values of one replica.", each(whole(), "blocks blocks_max"))
    address = record("A replica's address.", {"url": text("`http://ADDRESS:PORT`, within `admin.replicas_allowed`.")})
    return {
        "Load": record("Values of an engine's metrics; null: not reported.", load),
        "EventStream": record("A replica's stream of KV events, and its blocks.", stream, optional=stream),
        "Replica": record("Health, load and learned values.", replica),
        "Hand": _hand(),
        "Replicas": record(
            "All replicas, state of each discovery source, and connected routers.",
            {
                "replicas": rows(ref("Replica")),
                "discovery": by_name(record("A source.", source)),
                "sharing": maybe(ref("RouterLink")),
            },
        ),
        "RouterLink": record("The link to other routers; null: turned off.", link),
        "ReplicaUrl": {**address, "additionalProperties": False},
        "Index": record(
            "Size of the prefix index, and its restored part.",
            {**each(whole(), "keys bytes bytes_max"), "replicas": by_name(held), "state": maybe(ref("StateKept"))},
        ),
        "StateKept": _state_kept(),
    }


def _hand() -> Part:
    pairs = "Number of pairs by state: ready, warming up, and in cooldown after a failure."
    hand = {
        "handshake": one_of(*KvConnector),
        "address": text("Address for decode engines, `host:port`; empty: it is in the answer of the prefill stage."),
        "answers": flag("The address answers now."),
        "pairs": record(pairs, each(whole(), "warm new resting")),
    }
    return record("KV connector of a replica for disaggregated prefill; null: none.", hand)


def _state_kept() -> Part:
    outcome = {
        "replica": text(),
        **each(whole(), "estimate_blocks events_blocks"),
        "why": text("Why nothing of our own estimate was taken over."),
        "events_why": text("Why no block by its events was."),
    }
    return record(
        "Restored and saved state; null: turned off.",
        {
            "file": text("`snapshot.path`."),
            "source": text("Source of the state."),
            "why": text("Why nothing came from the file."),
            "failing": text("Why the file is not written."),
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
        "last_at_s": number(),
    }
    difference: Part = {"type": "object", "description": "A difference of its prompts."}
    template = {
        **branch,
        "path": text(),
        **each(whole(), "tools messages conversations"),
        "misses": ref("Misses"),
        "differences": rows(difference),
        "can_prewarm": flag(),
    }
    return {
        "Branch": record("A shared prefix of conversations.", branch),
        "TemplateRow": record("The same, with lost tokens.", template),
        "Templates": record("Shared prefixes, most used first.", {"templates": rows(ref("TemplateRow"))}),
        "AdviceRow": record("One piece of advice against cache misses.", advice),
        "Advice": record(
            "Advice, largest loss first.",
            {"window_s": whole("Covered seconds."), "advice": rows(ref("AdviceRow"))},
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
        **each(text(), "id name pod namespace why state"),
        "models": rows(text()),
        **each(flag(), "ready warming"),
        "grade": one_of(*GRADES),
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
    page = {
        **each(number(), "now_s uptime_s"),
        "pages": rows(text("A path for requests of the dashboard.")),
        "links": by_name(text()),
        **each(text(), "version no_advice"),
        "build": text("Version, native code or pure Python, Python's version, and the commit if known."),
        "excerpts": flag(),
        "totals": record("Sums of all requests in the window.", totals),
        "stages": record(
            "Stages from requested to hit, each with the places of the tokens that do not reach it.",
            {stage: rows(one_of(*places)) for stage, places in FUNNEL_STAGES.items()},
        ),
        "timeline": record("The last hour.", {"step_s": whole(), "points": rows(record("A step.", point))}),
        "replicas": rows(record("A replica in short.", replica)),
        "split": maybe(record("Disaggregated prefill; null: no replica has a KV connector.", _split())),
        "map": rows(ref("Branch")),
        "advice": rows(ref("AdviceRow")),
        "models": rows(record("A model.", model)),
        "groups": rows(record("A group of requests.", group)),
        "decisions": rows(ref("Decision")),
    }
    return {"Observatory": record("Data of the dashboard, except time series and searches.", page)}


def _split() -> Part:
    replica = {
        "id": text(),
        "role": one_of(*Role),
        "handshake": one_of(*KvConnector),
        "answers": flag("The address answers now."),
        "pairs": record("Number of its pairs by state.", each(whole(), "warm new resting")),
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
    what = "Prompts for prewarming; without `requests` and `templates` those of the settings."
    asked = {
        "replicas": rows(text()),
        **each(whole(), "requests templates tokens_max"),
        "prefixes_file": text(),
    }
    return {
        "WarmCall": {**record(what, call, optional=call), "additionalProperties": False},
        "WarmJob": record("Prewarming of one replica.", job),
        "WarmState": record("Jobs, the last results newest first.", each(rows(ref("WarmJob")), "running queue last")),
        "WarmAsked": record("Prompts that will be sent.", asked),
        "WarmDone": record("Results of the sent prompts.", {"replicas": rows(ref("WarmJob"))}),
    }
