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
    words = text("Words for people, which may change.")
    return {
        "Error": record(
            "An error of the router's own, in OpenAI's form.",
            {
                "error": record(
                    "What is wrong.",
                    {
                        "message": words,
                        "type": text("OpenAI's name of this kind of error."),
                        "param": maybe(text("The field of the body that is at fault.")),
                        "code": text("A code that will not change (docs/reference/errors.md)."),
                    },
                )
            },
        ),
        "AnthropicError": record(
            "An error of the router's own, in Anthropic's form: on `/v1/messages` and below.",
            {
                "type": one_of("error"),
                "error": record(
                    "What is wrong.",
                    {"type": text("Anthropic's name of this kind of error."), "message": words, "code": text()},
                ),
            },
        ),
        "SglangError": record(
            "An error of the router's own, in SGLang's form: on `/generate`.",
            {
                "object": one_of("error"),
                "message": words,
                "type": text("The status in words."),
                "param": maybe(text("The field of the body that is at fault.")),
                "code": text("As in `Error`."),
            },
        ),
        "AdminError": record(
            "An error of the admin listener.",
            {
                "error": record(
                    "What is wrong.",
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
        "owned_by": text("The kind of engine, by its own word."),
        "root": maybe(text("The name that it is stored under.")),
        "parent": maybe(text("An adapter's base model.")),
        "max_model_len": maybe(whole("Tokens of a prompt and its answer together.")),
    }
    return {
        "Model": record(
            "A model that at least one ready replica serves: its engine's own row, with all fields that this has.",
            model,
            optional=[name for name in model if name != "id"],
        ),
        "Version": record("The router's version.", {"version": text("Such as `1.2.3`.")}),
        "Models": record("All of them.", {"object": one_of("list"), "data": rows(ref("Model"))}),
        "EngineBody": {
            "type": "object",
            "description": "What the engine reads; every byte is passed on.",
            "properties": {
                "model": text("Needed where more than one is served."),
                "stream": flag("Answer in events."),
            },
        },
        "EngineAnswer": {"description": "What the engine answered, byte for byte."},
    }


def _requests() -> Part:
    """Return requests that ended, as their senders and as operators see them."""
    usage = {**each(whole(), "prompt_tokens completion_tokens"), "cached_tokens": maybe(whole("Null: it is not told."))}
    place = {
        "change": text("Kind of the difference."),
        "message": whole("Number of the message; -1 before the first."),
        "role": text("Role of that message."),
        "path": text("Where in the body."),
        "offset_bytes": whole("Bytes from the beginning of that message."),
        "at_bytes": whole("Bytes from the beginning of the prompt."),
        "lost_bytes": whole("Bytes behind it that were the same."),
    }
    texts = {
        "shape": text("The piece that differs, its letters and digits replaced."),
        "piece_hash": text("Its keyed hash."),
        **each(text("Empty without `insights.excerpts`."), "before after"),
        "token_bytes": whole("Bytes of the piece."),
    }
    receipt = {
        **each(maybe(text()), "replica reason grade"),
        **each(maybe(whole()), "prompt_tokens predicted_cached_tokens"),
        "waited_s": number("Seconds in the router's queue."),
        "retries": rows(text("Kind of the failure.")),
        "spill": maybe(text("Why it went elsewhere than most of its prompt.")),
        **each(maybe(whole()), "spilled_tokens hit_tokens"),
        "miss": maybe(ref("Misses")),
        "turn": maybe(whole("Number of the turn in its conversation.")),
        "difference": maybe(ref("Place")),
    }
    reasons, places = ({each.value: whole() for each in kinds} for kinds in (MissReason, TokenFate))
    return {
        "Usage": record("An engine's own counts.", usage),
        "Misses": record("Prompt tokens that were computed, by reason.", reasons, optional=reasons),
        "Funnel": record("Prompt tokens by the place where they ended, from asked to hit.", places, optional=places),
        "Place": record("Where a prompt first differs from an earlier one.", place),
        "Difference": record("The same, with what differs.", {**place, **texts}),
        "OwnRequest": record(
            "What became of a request. What is behind `usage` is left out where answers carry no receipts.",
            {**_ended(), **receipt},
            optional=receipt,
        ),
        "Candidate": record("A replica that could have taken a request, and every term of its price.", _candidate()),
        "Decision": record("A request that ended, and why it went where it went.", _decision()),
    }


def _ended() -> Part:
    return {
        "id": text("Its `x-warmroute-request-id`."),
        "at_s": number("Unix seconds of its arrival."),
        "route": text("Its path, or `other`."),
        "model": text(),
        "stream": flag(),
        "status": whole("Its answer's status; 499: its client left."),
        "ending": text("How its answer ended."),
        "error": maybe(text("The router's error code.")),
        "detail": maybe(text("The error's message.")),
        "ttft_s": maybe(number("Seconds to the first token of a stream.")),
        "wanted_ttft_s": maybe(number("Seconds from its arrival within which the first token was wanted.")),
        "in_time": maybe(flag("Whether a stream's first token came within that.")),
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
        **each(number(), "decode_ms slowed_ms stalled_ms price_ms loading_ms room_ms"),
        "price_terms": by_name(
            number(), "Milliseconds that add up to `price_ms`; empty if the policy compares no prices."
        ),
        "grade": one_of(*GRADES),
    }


def _decision() -> Part:
    return {
        "number": whole("Of this decision; `before` takes it."),
        "session": maybe(text("Hash of the session's name.")),
        **_ended(),
        "tenant": text(),
        "retries": rows(record("An attempt that failed.", each(text(), "kind replica"))),
        "continued": maybe(record("How a broken stream went on elsewhere.", each(text(), "how cause replica"))),
        "not_continued": maybe(text("Why a stream did not, or could not have.")),
        "queued_s": number("Seconds in the router's queue."),
        "overhead_s": maybe(number("Seconds that the router itself took.")),
        "predicted_ttft_s": maybe(number("Seconds to the first token as predicted: the median.")),
        "predicted_ttft_p90_s": maybe(number("The same, later than nine in ten.")),
        "agent": maybe(text("Kind of agent by what its client says; `/sub` behind a sub-agent's.")),
        "agent_id": maybe(text("Hash of the agent's own name of the conversation.")),
        "agent_parent": maybe(text("Hash of the name of the conversation that started it.")),
        "agent_final": flag("Whether its client said that the conversation is over."),
        **each(maybe(text()), "replica policy reason spill template conversation step warning trace_id"),
        "grade": maybe(one_of(*GRADES)),
        **each(maybe(whole()), "prompt_tokens predicted_cached_tokens hit_tokens loaded_tokens pulled_tokens turn"),
        "predicted_tier_tokens": whole("Part of the predicted ones that is not on the GPU, and is to be loaded."),
        "predicted_pull_tokens": whole("Part of the predicted ones that is to come from another replica's memory."),
        "predicted_pull_ms": number("Milliseconds until these are there."),
        "pull_source": maybe(text("The replica that these are to come from.")),
        "prefill_replica": maybe(text("The replica that prefills it, where another one decodes it.")),
        "predicted_prefill_ms": number("Milliseconds until its prompt is prefilled there."),
        "predicted_transfer_ms": number("Milliseconds from then on until its blocks are where it is decoded."),
        "spilled_tokens": whole(),
        "candidates": rows(ref("Candidate"), "The most telling ones."),
        "weighed": whole("How many replicas could have taken it."),
        "miss": maybe(ref("Misses")),
        "places": maybe(ref("Funnel")),
        "held_by": maybe(text("The replica that holds more of the prompt than the one that it went to.")),
        "verified": flag("Whether the engine told what it found cached."),
        "hit": maybe(one_of("replay", "genuine")),
        "saved_ms": maybe(number("Time of prefill that hits saved.")),
        "apart": flag("Whether the prompt is kept apart from others'."),
        "difference": maybe(ref("Difference")),
        "repairs": rows(text()),
    }


def _history() -> Part:
    kept = {
        "since_s": number("Unix seconds from which figures are kept."),
        "decisions_since_s": maybe(number("The same of decisions; null: there is none.")),
        "decisions_in_memory": whole(),
        "memory_s": whole("Seconds of figures that memory holds."),
        "path": flag("Whether there is a file."),
        "state": one_of("off", "ok", "failing"),
        "why": text("Why it is failing."),
        **each(whole(), "bytes bytes_max days_max dropped"),
    }
    found = {
        "decisions": rows(ref("Decision")),
        "more": flag("Whether there are older ones."),
        "next_before": maybe(whole("What `before` takes to get them.")),
        "kept": ref("Kept"),
    }
    causes = {cause.value: whole() for cause in SpillCause}
    quantiles = " ".join(f"{name}_p{part}_s" for name in ("ttft", "itl", "e2e") for part in (50, 90, 99))
    counts = {
        **each(whole(), f"requests placed answered errors_5xx errors_4xx shed left broken retries {SUMS}"),
        "completion_tokens": whole(),
        "misses": ref("Misses"),
        "places": ref("Funnel"),
        "held": record("Tokens held elsewhere, by why not there.", causes, optional=causes),
        **each(maybe(number()), f"{quantiles} waited_p90_s in_flight waiting in_flight_max waiting_max"),
    }
    known = {"at_s": whole("Unix seconds of its beginning."), "known": flag("False: nobody counted, and that is all.")}
    span = {"now_s": number(), **each(whole(), "from_s to_s step_s"), "kept": ref("Kept"), "points": rows(ref("Point"))}
    return {
        "Kept": record("How far back pages reach, and how the file of the history is doing.", kept),
        "Decisions": record("Decisions that fit, newest first.", found),
        "Point": record("What requests added up to in one step.", {**known, **counts}, optional=counts),
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
        "last_seq": whole(),
        "lag_s": maybe(number("The router's clock minus the engine's, at the last batch.")),
        **each(whole(), "events blocks answers_compared answers_equal"),
        "counts": by_name(whole(), "What came, and what went wrong."),
        "block_tokens": maybe(whole()),
        **each(whole(), blocks),
    }
    breaker = {"state": one_of(*State), "why": text(), "for_s": number("Seconds until it is tried again.")}
    replica = {
        **each(text(), "id name node instance version why grade_why"),
        "added": flag("Added at run time."),
        "warming": flag("Its cache is being filled."),
        "ready": flag("It may be sent requests."),
        "failures_in_a_row": whole(),
        "breaker": record("Whether it rests.", breaker),
        "grade": one_of(*GRADES),
        "events": maybe(ref("EventStream")),
        "models": rows(text()),
        **each(whole(), "in_flight blocks blocks_max unseen_answers"),
        "window": maybe(whole("Requests that it may have open.")),
        **each(number(), "pending_prefill_ms answer_tokens"),
        "load": ref("Load"),
        "metrics_of_several": flag("Several processes answer its `/metrics` in turn."),
        "share": number("Part of its work that this router sent."),
        **each(by_name(number(), "What was learned."), "prefill decode_step"),
        "role": one_of(*Role),
        "split": maybe(ref("Hand")),
        "pull_address": maybe(text("Where its engine takes orders of its peers, `host:port`.")),
    }
    source = {"fresh": flag(), "why": text(), "stale_s": number(), **each(whole(), "errors replicas")}
    link = {
        "router": text("This router's name."),
        "fleet": text("`peering.fleet`."),
        "whole": flag("This router hears its own messages, so that others can hear it."),
        "why": text("Why not."),
        "refused": text("Why the store takes no writes."),
        "delay_ms": maybe(number("Time that the last message took.")),
        "routers": rows(
            record("A router that is heard.", {"name": text(), "age_s": number("Since its last message.")})
        ),
    }
    held = record("Of one replica.", each(whole(), "blocks blocks_max"))
    address = record("A replica's address.", {"url": text("`http://ADDRESS:PORT`, within `admin.replicas_allowed`.")})
    return {
        "Load": record("What an engine's metrics say; null: they do not.", load),
        "EventStream": record("A replica's stream of KV events, and its blocks.", stream, optional=stream),
        "Replica": record("Health, load, and what was learned.", replica),
        "Hand": _hand(),
        "Replicas": record(
            "Every replica, how fresh the list is, by source, and which other routers are heard.",
            {
                "replicas": rows(ref("Replica")),
                "discovery": by_name(record("A source.", source)),
                "sharing": maybe(ref("RouterLink")),
            },
        ),
        "RouterLink": record("The link to other routers; null: nothing is shared.", link),
        "ReplicaUrl": {**address, "additionalProperties": False},
        "Index": record(
            "Size of the prefix index, and what of it was known before the router started.",
            {**each(whole(), "keys bytes bytes_max"), "replicas": by_name(held), "state": maybe(ref("StateKept"))},
        ),
        "StateKept": _state_kept(),
    }


def _hand() -> Part:
    pairs = "With so many replicas: pairs that take traffic, are to be warmed, and rest after a failure."
    hand = {
        "handshake": one_of(*KvConnector),
        "address": text("Where decoding engines ask it, `host:port`; empty: the prefill leg's answer says where."),
        "answers": flag("It shakes hands now."),
        "pairs": record(pairs, each(whole(), "warm new resting")),
    }
    return record("How a replica hands over what it prefills, or takes what others did; null: it does neither.", hand)


def _state_kept() -> Part:
    outcome = {
        "replica": text(),
        **each(whole(), "estimate_blocks events_blocks"),
        "why": text("Why nothing of our own estimate was taken over."),
        "events_why": text("Why no block by its events was."),
    }
    return record(
        "What is known from before the router started, and left for after; null: nothing is.",
        {
            "file": text("`snapshot.path`."),
            "source": text("Where it came from."),
            "why": text("Why nothing came from the file."),
            "failing": text("Why the file is not written."),
            "written_age_s": maybe(number("Since the file was written.")),
            "bytes": whole("Of the file."),
            "holding": flag("`/readyz` waits for it."),
            "replicas": record("By what became of them.", each(whole(), "restored refused waiting")),
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
    difference: Part = {"type": "object", "description": "A difference that its prompts showed."}
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
        "TemplateRow": record("The same, and what is lost in it.", template),
        "Templates": record("Shared prefixes, most used first.", {"templates": rows(ref("TemplateRow"))}),
        "AdviceRow": record("One thing to do against misses.", advice),
        "Advice": record(
            "Advice, the most costly first.",
            {"window_s": whole("Seconds that it is about."), "advice": rows(ref("AdviceRow"))},
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
        "pages": rows(text("A path that the dashboard may ask for.")),
        "links": by_name(text()),
        **each(text(), "version no_advice"),
        "build": text("Version, native code or pure Python, Python's version, and the commit where known."),
        "excerpts": flag(),
        "totals": record("Sums of all requests in the window.", totals),
        "stages": record(
            "Stages from asked to hit, each with the places of the tokens that do not reach it.",
            {stage: rows(one_of(*places)) for stage, places in FUNNEL_STAGES.items()},
        ),
        "timeline": record("The last hour.", {"step_s": whole(), "points": rows(record("A step.", point))}),
        "replicas": rows(record("A replica in short.", replica)),
        "split": maybe(record("Prefill apart from decode; null: no replica shakes hands.", _split())),
        "map": rows(ref("Branch")),
        "advice": rows(ref("AdviceRow")),
        "models": rows(record("A model.", model)),
        "groups": rows(record("Requests of one kind.", group)),
        "decisions": rows(ref("Decision")),
    }
    return {"Observatory": record("Everything that the dashboard shows but series and searches.", page)}


def _split() -> Part:
    replica = {
        "id": text(),
        "role": one_of(*Role),
        "handshake": one_of(*KvConnector),
        "answers": flag("It shakes hands now."),
        "pairs": record("How many pairs it is in.", each(whole(), "warm new resting")),
    }
    pair = {
        **each(text(), "prefill decode"),
        "state": one_of(*PairState),
        "rests_s": number("Until it is tried again."),
        **each(whole(), "sent prefills_failed broken"),
    }
    return {
        "replicas": rows(record("A replica that prefills for others or decodes for them.", replica)),
        "pairs": rows(record("A pair, those that rest first. Requests are counted since the two pair.", pair)),
        "pairs_in_all": whole(),
    }


def _prewarming() -> Part:
    job = {
        **each(text(), "replica why state"),
        **each(whole(), "sent skipped failed prompt_tokens cached_tokens"),
        "seconds": number(),
        "errors": rows(text()),
    }
    request = record("A request whose prompt is sent.", {"path": text(), "body": {"type": "object"}})
    call = {
        "replicas": maybe(rows(text("A replica's id."), "All that are ready unless given.")),
        "requests": {**rows({**request, "additionalProperties": False}), "maxItems": REQUESTS_MAX},
        "templates": whole("The most used learned templates.", minimum=0, maximum=TEMPLATES_MAX),
        "tokens_max": maybe(whole("Prompt tokens for each replica.", minimum=1, maximum=TOKENS_MAX)),
        "wait": flag("Answer when all is done."),
    }
    what = "What to warm with; without `requests` and `templates` those of the settings."
    asked = {
        "replicas": rows(text()),
        **each(whole(), "requests templates tokens_max"),
        "prefixes_file": text(),
    }
    return {
        "WarmCall": {**record(what, call, optional=call), "additionalProperties": False},
        "WarmJob": record("The warming of one replica.", job),
        "WarmState": record("Jobs, the last results newest first.", each(rows(ref("WarmJob")), "running queue last")),
        "WarmAsked": record("What will be sent.", asked),
        "WarmDone": record("What was sent.", {"replicas": rows(ref("WarmJob"))}),
    }
