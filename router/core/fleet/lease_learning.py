"""Learning from leases that ended well: prefill and decode speed, size of requests, duration of leases."""

from __future__ import annotations

from router.core.estimators.decode_step import ANSWER_TOKENS_MIN, DecodeInterval
from router.core.estimators.prefill import LEARN_TOKENS_MIN
from router.core.fleet.lease import PREFILL, Lease
from router.core.fleet.member import ReplicaState
from router.core.fleet.tier_loads import learn_load
from router.core.types.placements import Outcome

# an answer that arrived within this time was buffered on its way: its time teaches nothing about steps
GATHERED_MS = 10.0


def learn(member: ReplicaState, lease: Lease, outcome: Outcome, now_s: float) -> tuple[int, int]:
    """Learn from a lease that ended well. Return the numbers of computed and of cached tokens of its prompt."""
    usage, speeds, measured = outcome.usage, member.speeds, lease.measurements
    uncached, cached = lease.uncached_tokens, lease.cached_tokens
    if usage is not None and usage.cached_tokens is not None:
        uncached, cached = usage.prompt_tokens - usage.cached_tokens, usage.cached_tokens
        measured.recount(max(0, uncached))  # the engine's numbers are not trusted
    if lease.loading_ms:
        learn_load(member.links, speeds.loads, lease, cached)
    elif (service_ms := measured.service_ms) is not None:
        _learn_prefill(member, uncached, cached, service_ms, now_s)
    if lease.role == PREFILL:  # the means below are over clients' requests
        speeds.note_prefill(uncached)
        return uncached, cached
    prefill_ms = lease.receipt.prefill_ms(lease.prefill_ms)
    if outcome.unobserved:  # lengths and rates are those of observed answers
        speeds.note_unobserved((now_s - lease.placed_s) * 1e3)
        speeds.note_request(lease.prompt_tokens, prefill_ms)
        return uncached, cached
    tokens = usage.completion_tokens if usage is not None else outcome.events
    speeds.note_response((now_s - lease.placed_s) * 1e3, tokens, uncached)
    if lease.first_token_s is not None:
        speeds.note_decode((now_s - lease.first_token_s) * 1e3)
        if lease.streams and measured.decode_stats is not None and tokens >= ANSWER_TOKENS_MIN:
            _learn_steps(member, measured.decode_stats, tokens - 1, now_s)
    speeds.note_request(lease.prompt_tokens, prefill_ms)
    return uncached, cached


def _learn_prefill(member: ReplicaState, uncached: int, cached: int, service_ms: float, now_s: float) -> None:
    speeds, own = member.speeds, member.own_speed
    if uncached < LEARN_TOKENS_MIN:
        speeds.note_short_prefill(service_ms)
    elif uncached > own.longest_tokens:
        own.longest_tokens = uncached
    speeds.prefill.observe(uncached, cached, service_ms)
    if uncached >= LEARN_TOKENS_MIN:
        own.prefill_factor.observe(service_ms, speeds.prefill.model.ms(uncached, cached), now_s)


def _learn_steps(member: ReplicaState, stretch: DecodeInterval, tokens: int, now_s: float) -> None:
    step_ms = stretch.step_ms(tokens, member.prefill_model.pace_ms)
    streams, context, common = stretch.streams, stretch.context_tokens, member.speeds.steps
    if step_ms > 0 and stretch.ms >= GATHERED_MS:
        common.observe(streams, context, step_ms)
        member.own_speed.step_factor.observe(step_ms, common.model.ms(streams, context), now_s)
