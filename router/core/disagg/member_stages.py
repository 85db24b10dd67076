"""Stages of a request in the state of the replica at which they run; the pair of leases is in leases.py."""

from __future__ import annotations

from router.core.fleet.lease import Lease
from router.core.fleet.member import ReplicaState


def complete_unobserved_prefill(member: ReplicaState, lease: Lease, now_s: float) -> None:
    """Record that the prefill of a lease is complete, as another replica's first token shows. The exact time is
    unknown."""
    lease.first_token_s = now_s
    member.evidence.alive(now_s)
    member.queue.leave(lease, now_s)


def start_decode(member: ReplicaState, lease: Lease, now_s: float) -> None:
    """Record that another replica has prefilled the prompt of a decode-stage lease, so that it decodes here from now
    on. No effect when repeated."""
    member.work.awaiting_transfer.discard(lease.id)
    if lease.measurements.decode_start is None:
        member.start_decode(lease, now_s)


def compute_prompt(member: ReplicaState, lease: Lease, cached_tokens: int, now_s: float) -> None:
    """Let a member compute the prompt of a decode-stage lease itself, because the prefill stage failed.

    `cached_tokens` of the prompt are cached here. The lease joins the prefill queue like any prompt. No effect if it
    decodes already.
    """
    if lease.measurements.decode_start is not None or lease.first_token_s is not None:
        return
    model = member.prefill_model
    member.work.awaiting_transfer.discard(lease.id)
    lease.cached_tokens, lease.effective_start_s = cached_tokens, now_s
    lease.prefill_ms = model.ms(lease.prompt_tokens - cached_tokens, cached_tokens)
    lease.stall_ms = max(0.0, lease.prefill_ms - model.floor_ms)
    member.queue.join(lease, now_s)


def on_first_token(member: ReplicaState, lease: Lease, now_s: float) -> None:
    """Record the first token of a decode-stage lease. It ends a prefill of this member only if the member computed the
    prompt itself. Its time is not learned from, because an attempt at another replica preceded it."""
    lease.first_token_s = now_s
    member.evidence.alive(now_s)
    member.work.waiting_for_kv.discard(lease.id)
    if member.queue.holds(lease):
        member.queue.leave(lease, now_s)
        member.batches.interrupt(lease, now_s)
    start_decode(member, lease, now_s)
