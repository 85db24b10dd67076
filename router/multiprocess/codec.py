"""Conversion between objects and the messages of hub and workers.

Placement needs sizes and keys of a prompt, never its text. So the text stays with the worker, and also token ids,
unless the hub itself announces prompts. Candidates of a receipt stay with the hub.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from router.core.fleet.models import NoReplicaReady
from router.core.placement.placement_request import PlacementRequest
from router.core.prompts.block_keys import Chain
from router.core.prompts.token_keys import TokenPrompt
from router.core.types.disagg_types import KvConnector, PrefillStage
from router.core.types.placements import ExternalKv, Outcome, Pull, Receipt, Shed, Usage
from router.core.types.requests import ConversationRef, Prompt, RequestSpec
from router.multiprocess import protocol
from router.placement_api import UnknownResponse
from router.telemetry.record import RequestRecord

PLACE_BYTES_MAX = 8 << 20  # largest placement on the wire: a prompt of a million tokens, ids included
KEY_BYTES = 8


def encoded_size(wanted: PlacementRequest) -> int:
    """Estimate the largest number of bytes that a placement takes on the wire."""
    keys = len(wanted.chain.keys) if wanted.chain is not None else 0
    size = KEY_BYTES * keys + 4 * (len(wanted.ring_key) + len(wanted.response_id or ""))
    if wanted.tokens is not None:
        size += len(wanted.tokens.ids) + KEY_BYTES * sum(map(len, wanted.tokens.keys.values()))
    return size


def place_of(id_: int, wanted: PlacementRequest, exclude: frozenset[str], *, ids: bool) -> protocol.WantLease:
    """Encode a request's placement, with token ids if `ids`."""
    ask, chain, tokens, kin = wanted.ask, wanted.chain, wanted.tokens, wanted.conversation
    prompt = ask.prompt
    return protocol.WantLease(
        id_,
        wanted.model,
        wanted.ring_key,
        ask.stream,
        ask.output_tokens_max,
        wanted.body_tokens,
        wanted.response_id,
        tuple(exclude),
        (prompt.size, prompt.opaque_bytes, prompt.bytes_per_token) if prompt is not None else None,
        (_pack_keys(chain.keys), chain.root, chain.end_key, chain.spans, chain.first_user_key) if chain else None,
        None if tokens is None else _token_parts(tokens, ids=ids),
        wanted.tenant,
        wanted.priority,
        wanted.body_bytes,
        wanted.sighting,
        (kin.conversation, kin.parent, kin.final) if kin is not None else None,
        wanted.due_s,
        wanted.may_pull,
        wanted.may_split,
    )


def _token_parts(tokens: TokenPrompt, *, ids: bool) -> tuple[int, bytes, str, bytes, dict[int, bytes]]:
    keys = {size: _pack_keys(keys) for size, keys in tokens.keys.items()}
    return tokens.tokens, tokens.ids if ids else b"", tokens.adapter, tokens.salt, keys


def wanted_of(place: protocol.WantLease) -> PlacementRequest:
    """Decode the request as the hub needs it. Raises messages.WireError if the keys are not whole numbers of 8
    bytes."""
    prompt, chain, tokens = None, None, None
    if place.prompt is not None:
        text_bytes, opaque_bytes, ratio = place.prompt
        prompt = Prompt(b"", 0, (), opaque_bytes, ratio, skipped_bytes=text_bytes)
    if place.chain is not None:
        keys, root, end_key, spans, first_user_key = place.chain
        chain = Chain(_unpack_keys(keys), root, end_key, spans, first_user_key)
    if place.tokens is not None:
        count, ids, adapter, salt, packed = place.tokens
        tokens = CountedPrompt(ids, adapter, salt, {size: _unpack_keys(each) for size, each in packed.items()})
        tokens.count = count
    return PlacementRequest(
        ask=RequestSpec(place.model, prompt, place.stream, output_tokens_max=place.output_tokens_max),
        model=place.model,
        chain=chain,
        ring_key=place.ring_key,
        tokens=tokens,
        body_tokens=place.body_tokens,
        response_id=place.response_id,
        tenant=place.tenant,
        priority=place.priority,
        body_bytes=place.body_bytes,
        sighting=place.sighting,
        conversation=ConversationRef(*place.kin) if place.kin is not None else None,
        due_s=place.due_s,
        may_pull=place.may_pull,
        may_split=place.may_split,
    )


class CountedPrompt(TokenPrompt):
    """A prompt without its token ids, which stayed with the worker; it has only their number and their keys."""

    __slots__ = ("count",)
    count: int

    @property
    def tokens(self) -> int:
        """Number of tokens of the prompt."""
        return self.count


def _pack_keys(keys: Sequence[int]) -> bytes:
    return array("Q", keys).tobytes()


def _unpack_keys(packed: bytes) -> list[int]:
    keys = array("Q")
    try:
        keys.frombytes(packed)
    except ValueError as error:
        raise protocol.WireError(f"{len(packed)} bytes of keys") from error
    return keys.tolist()


def finish_of(id_: int, outcome: Outcome, now_s: float) -> protocol.Finish:
    """Encode the end of a lease."""
    return protocol.Finish(id_, outcome.ending, _usage_parts(outcome.usage), outcome.events, now_s)


def outcome_of(finish: protocol.Finish) -> Outcome:
    """Decode the outcome of a lease."""
    return Outcome(finish.ending, Usage(*finish.usage) if finish.usage else None, finish.events)


def prefilled_of(id_: int, receipt: Receipt, outcome: Outcome, now_s: float) -> protocol.Prefilled:
    """Encode the end of the prefill stage of a lease with this receipt."""
    leg = receipt.leg
    return protocol.Prefilled(id_, outcome.ending, _usage_parts(outcome.usage), now_s, leg is not None and leg.alone)


def prefill_outcome_of(said: protocol.Prefilled) -> Outcome:
    """Decode the outcome of the prefill stage."""
    return Outcome(said.ending, Usage(*said.usage) if said.usage else None)


def placed_of(id_: int, receipt: Receipt) -> protocol.LeaseOpened:
    """Encode a lease that was opened."""
    ttft_ms = (receipt.ttft_ms, receipt.ttft_p90_ms)
    parts, tier_tokens = _receipt_parts(receipt), receipt.predicted_tier_tokens
    pull = receipt.pull
    pulled = (pull.source, pull.address, pull.tokens) if pull is not None else None
    leg = receipt.leg
    legs = (leg.replica, leg.handshake, leg.address, leg.lease) if leg is not None else None
    return protocol.LeaseOpened(id_, parts, receipt.miss, receipt.replay, ttft_ms, tier_tokens, pulled, legs)


def receipt_of(placed: protocol.LeaseOpened, connection: int) -> Receipt:
    """Decode the receipt for a worker. The hub keeps the complete receipt under the lease of this connection."""
    median_ms, high_ms = placed.ttft_ms
    receipt = Receipt(*placed.receipt, miss=placed.miss, replay=placed.replay, at_hub=(placed.id, connection))
    receipt.ttft_ms, receipt.ttft_p90_ms = median_ms, high_ms
    if placed.tier_tokens or placed.pull is not None or placed.leg is not None:
        pull = Pull(*placed.pull, fetch_ms=0.0, uncached_ms=0.0, stalled_ms=0.0) if placed.pull is not None else None
        receipt.brought = ExternalKv(placed.tier_tokens, pull, _leg(placed.leg) if placed.leg is not None else None)
    return receipt


def _leg(told: tuple[str, KvConnector, str, int]) -> PrefillStage:
    """Decode a prefill stage for a worker. Its prices stay with the hub."""
    replica, handshake, address, lease = told
    return PrefillStage(replica, handshake, address, 0, pending_ms=0.0, uncached_ms=0.0, transfer_ms=0.0, lease=lease)


def error_of(unplaced: protocol.Unplaced) -> Exception | None:
    """Decode the reason why the hub did not place a request; None if the hub reports no reason."""
    if unplaced.failed:
        return None
    if unplaced.shed is not None:
        return Shed(*unplaced.shed)
    return NoReplicaReady() if unplaced.unknown_response is None else UnknownResponse(unplaced.unknown_response)


def report_of(record: RequestRecord, lease: int | None) -> protocol.Report:
    """Encode the end of a request. The receipt is included unless the hub has it, under the lease."""
    receipt = record.receipt
    return protocol.Report(
        record.id,
        record.route,
        record.at_s,
        record.model,
        record.status,
        record.ending,
        record.error,
        record.detail,
        record.stream,
        record.duration_s,
        record.overhead_s,
        record.ttft_s,
        record.inter_token_s,
        record.events,
        _usage_parts(record.usage),
        record.retries,
        lease,
        _receipt_parts(receipt) if receipt is not None and lease is None else None,
        record.tenant,
        record.queued_s,
        record.sighting,
        record.miss,
        receipt is not None and receipt.replay,
        record.repairs,
        record.trace_id,
        record.warning,
        record.session,
        (record.agent, record.agent_id, record.agent_parent, record.agent_final),
        (record.priority, record.wanted_ttft_ms, record.in_time),
        record.continued,
        record.not_continued,
        record.places,
    )


def record_of(report: protocol.Report, receipt: Receipt | None) -> RequestRecord:
    """Decode the record of a request. `receipt` is the hub's own, if it made one."""
    if receipt is None and report.receipt is not None:
        receipt = Receipt(*report.receipt)
    if receipt is not None:
        receipt.replay = report.replay  # after a retry only the worker knows if the request is a replay
    return RequestRecord(
        report.id,
        report.route,
        report.at_s,
        report.model,
        report.status,
        report.ending,
        report.error,
        report.detail,
        report.stream,
        report.duration_s,
        report.overhead_s,
        report.ttft_s,
        report.inter_token_s,
        report.events,
        receipt,
        Usage(*report.usage) if report.usage else None,
        report.retries,
        report.tenant,
        report.queued_s,
        sighting=report.sighting,
        miss=report.miss,
        places=report.places,
        repairs=report.repairs,
        trace_id=report.trace_id,
        warning=report.warning,
        session=report.session,
        agent=report.agent[0],
        agent_id=report.agent[1],
        agent_parent=report.agent[2],
        agent_final=report.agent[3],
        priority=report.deadline[0],
        wanted_ttft_ms=report.deadline[1],
        in_time=report.deadline[2],
        continued=report.continued,
        not_continued=report.not_continued,
    )


def _receipt_parts(receipt: Receipt) -> protocol.ReceiptParts:
    head = (receipt.replica, receipt.policy, receipt.reason, receipt.grade)
    return (*head, receipt.prompt_tokens, receipt.predicted_cached_tokens)


def _usage_parts(usage: Usage | None) -> tuple[int, int, int | None] | None:
    return (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) if usage is not None else None
