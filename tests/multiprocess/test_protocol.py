"""Frames, however they are cut, and facts through the wire and back."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.placement.placement_request import PlacementRequest
from router.core.prompts.block_keys import Chain
from router.core.prompts.token_keys import TokenPrompt
from router.core.types.disagg_types import KvConnector, PrefillStage
from router.core.types.misses import Difference, DifferenceKind, MissReason, PromptAnalysis, TokenBreakdown
from router.core.types.placements import Confidence, EndReason, ExternalKv, Outcome, PlacementReason, Receipt, Usage
from router.core.types.requests import ConversationRef, Priority, Prompt, RequestSpec
from router.multiprocess import codec, protocol
from router.telemetry.record import RequestRecord

key = st.integers(0, 2**64 - 1)
name = st.text(max_size=20)
usages = st.none() | st.builds(
    Usage, st.integers(0, 1 << 30), st.integers(0, 1 << 30), st.none() | st.integers(0, 1 << 30)
)
chains = st.none() | st.builds(
    Chain, st.lists(key, max_size=30), key, key, st.lists(st.tuples(key, key, key), max_size=4).map(tuple), key
)
prompts = st.none() | st.builds(
    Prompt, st.binary(max_size=100), st.just(0), st.just(()), st.integers(0, 99), st.none() | st.floats(0.5, 9)
)
token_prompts = st.none() | st.builds(
    TokenPrompt,
    st.integers(0, 50).map(lambda n: bytes(4 * n)),
    name,
    st.binary(max_size=8),
    st.dictionaries(st.integers(1, 64), st.lists(key, max_size=9), max_size=3),
)
tokens = st.integers(0, 1 << 30)
differences = st.builds(
    Difference,
    st.sampled_from(DifferenceKind),
    st.integers(-1, 99),
    name,
    name,
    tokens,
    tokens,
    tokens,
    name,
    key,
    name,
    name,
)
sightings = st.none() | st.builds(
    PromptAnalysis,
    tokens,
    tokens,
    tokens,
    key,
    key,
    tokens,
    st.booleans(),
    st.booleans(),
    tokens,
    name,
    st.none() | differences,
)
misses = st.none() | st.builds(
    TokenBreakdown, tokens, tokens, st.dictionaries(st.sampled_from(MissReason), tokens), st.floats(0, 1e6)
)
wanted = st.builds(
    PlacementRequest,
    ask=st.builds(
        RequestSpec, st.none(), prompts, st.booleans(), output_tokens_max=st.none() | st.integers(0, 1 << 20)
    ),
    model=st.none() | name,
    chain=chains,
    ring_key=name,
    tokens=token_prompts,
    body_tokens=st.integers(0, 1 << 20),
    response_id=st.none() | name,
    sighting=sightings,
    conversation=st.none() | st.builds(ConversationRef, key, key, st.booleans()),
    due_s=st.none() | st.floats(0, 1e6),
    may_pull=st.booleans(),
    may_split=st.booleans(),
)


@given(st.lists(st.binary(max_size=50), max_size=8), st.lists(st.integers(0, 500), max_size=12))
def test_frames_come_out_whole_wherever_they_are_cut(bodies: list[bytes], cuts: list[int]) -> None:
    """Any cutting of the bytes gives the same frames in the same order, and keeps nothing back."""
    data = b"".join(len(body).to_bytes(4, "little") + body for body in bodies)
    at = sorted({0, *(min(cut, len(data)) for cut in cuts), len(data)})
    frames = protocol.Frames(bytes_max=50)
    out = [body for start, end in pairwise(at) for body in frames.feed(data[start:end])]
    assert out == bodies


@given(st.binary(max_size=200), st.integers(1, 20))
def test_garbage_is_a_wire_error_and_nothing_else(data: bytes, step: int) -> None:
    """Bytes that nobody of ours sent are refused as such: no other exception, and no long frame is waited for."""
    for decode in (protocol.batch_of, protocol.answers_of):
        frames = protocol.Frames(bytes_max=100)
        try:
            for start in range(0, len(data), step):
                for body in frames.feed(data[start : start + step]):
                    decode(body)
        except protocol.WireError:
            continue


@given(st.recursive(st.none() | st.integers(-5, 2**40) | st.text(max_size=5) | st.binary(max_size=5), st.lists))
def test_messages_of_wrong_shape_are_wire_errors(value: object) -> None:
    """msgpack that decodes and is no message of ours is refused as such."""
    body = msgspec.msgpack.encode([0, [value]])
    try:
        for message in protocol.batch_of(body).messages:
            if isinstance(message, protocol.WantLease):
                codec.wanted_of(message)
    except protocol.WireError:
        return


def test_a_frame_that_is_too_long_is_refused_at_its_head() -> None:
    """Four bytes that promise too much are enough: nothing is kept for them."""
    with pytest.raises(protocol.WireError):
        protocol.Frames().feed((protocol.FRAME_BYTES_MAX + 1).to_bytes(4, "little"))


@given(wanted, st.frozensets(name, max_size=3), st.booleans())
def test_a_placement_arrives_as_it_was_wanted(want: PlacementRequest, exclude: frozenset[str], ids: bool) -> None:
    """All that placing looks at is the same on the other side; texts and, unless wanted, token ids stay here."""
    body = protocol.frame(protocol.WorkerFrame(3, [codec.place_of(7, want, exclude, ids=ids)]))[4:]
    (place,) = protocol.batch_of(body).messages
    assert isinstance(place, protocol.WantLease)
    got = codec.wanted_of(place)
    assert (got.model, got.chain, got.ring_key) == (want.model, want.chain, want.ring_key)
    assert (got.body_tokens, got.response_id) == (want.body_tokens, want.response_id)
    assert (got.sighting, got.conversation, got.due_s) == (want.sighting, want.conversation, want.due_s)
    assert (got.may_pull, got.may_split) == (want.may_pull, want.may_split)
    assert (got.ask.stream, got.ask.output_tokens_max) == (want.ask.stream, want.ask.output_tokens_max)
    assert frozenset(place.exclude) == exclude
    here, there = want.ask.prompt, got.ask.prompt
    assert (here is None) is (there is None)
    if here and there:
        assert (here.size, here.opaque_bytes, here.bytes_per_token) == (
            there.size,
            there.opaque_bytes,
            there.bytes_per_token,
        )
    assert (want.tokens is None) is (got.tokens is None)
    if want.tokens is not None and got.tokens is not None:
        assert (got.tokens.tokens, got.tokens.keys) == (want.tokens.tokens, want.tokens.keys)
        assert got.tokens.ids == (want.tokens.ids if ids else b"")


@given(
    st.builds(
        RequestRecord,
        name,
        name,
        ending=st.sampled_from([each.value for each in EndReason]),
        error=st.none() | name,
        duration_s=st.floats(0, 1e6),
        ttft_s=st.none() | st.floats(0, 1e6),
        usage=usages,
        retries=st.lists(st.tuples(name, name), max_size=2).map(tuple),
        receipt=st.none()
        | st.builds(
            Receipt,
            name,
            name,
            st.sampled_from(PlacementReason),
            st.sampled_from(Confidence),
            st.integers(0, 9),
            st.integers(0, 9),
            replay=st.booleans(),
        ),
        sighting=sightings,
        miss=misses,
        agent=name,
        agent_id=name,
        agent_parent=name,
        agent_final=st.booleans(),
        priority=st.sampled_from(Priority),
        wanted_ttft_ms=st.none() | st.floats(0, 1e6),
        in_time=st.none() | st.booleans(),
    )
)
def test_a_report_arrives_as_it_was_made(record: RequestRecord) -> None:
    """Metrics in the hub are made of what the worker saw."""
    (report,) = protocol.batch_of(protocol.frame(protocol.WorkerFrame(0, [codec.report_of(record, None)]))[4:]).messages
    assert isinstance(report, protocol.Report)
    assert codec.record_of(report, None) == record


@given(st.builds(Outcome, st.sampled_from(EndReason), usages, st.integers(0, 99)))
def test_an_outcome_arrives_as_it_was(outcome: Outcome) -> None:
    """What became of a lease is the same on the other side."""
    (finish,) = protocol.batch_of(
        protocol.frame(protocol.WorkerFrame(0, [codec.finish_of(1, outcome, 2.5)]))[4:]
    ).messages
    assert isinstance(finish, protocol.Finish)
    assert codec.outcome_of(finish) == outcome


@given(st.builds(Outcome, st.sampled_from(EndReason), usages), st.booleans())
def test_the_end_of_a_prefill_leg_arrives_as_it_was(outcome: Outcome, alone: bool) -> None:
    """What became of it, what it found cached, and whether nothing came of it, is the same on the other side."""
    receipt = Receipt("a", "warm", PlacementReason.SPLIT, Confidence.EXACT, 9, 5)
    receipt.brought = ExternalKv(leg=PrefillStage("b", KvConnector.NIXL, "", 3, 1.0, 2.0, 3.0, alone=alone))
    (said,) = protocol.batch_of(
        protocol.frame(protocol.WorkerFrame(0, [codec.prefilled_of(1, receipt, outcome, 2.5)]))[4:]
    ).messages
    assert isinstance(said, protocol.Prefilled)
    assert (said.id, said.now_s, said.alone, codec.prefill_outcome_of(said)) == (1, 2.5, alone, outcome)


@given(name, st.sampled_from(KvConnector), name, st.integers(0, 1 << 40))
def test_a_worker_is_told_of_both_legs(replica: str, handshake: KvConnector, address: str, lease: int) -> None:
    """Which replica prefills, and how and where the decoding one asks it."""
    receipt = Receipt("a", "warm", PlacementReason.SPLIT, Confidence.EXACT, 9, 5)
    receipt.brought = ExternalKv(leg=PrefillStage(replica, handshake, address, 3, 1.0, 2.0, 3.0, lease=lease))
    (placed,) = protocol.answers_of(protocol.frame([codec.placed_of(1, receipt)])[4:])
    assert isinstance(placed, protocol.LeaseOpened)
    leg = codec.receipt_of(placed, 0).leg
    assert leg is not None
    assert (leg.replica, leg.handshake, leg.address, leg.lease) == (replica, handshake, address, lease)


@given(misses, st.booleans())
def test_a_receipt_tells_a_worker_why(miss: TokenBreakdown | None, replay: bool) -> None:
    """The breakdown of a placement is the same on the other side, reasons in the same order, and so are the predicted
    times."""
    receipt = Receipt("a", "warm", PlacementReason.WARM, Confidence.EXACT, 9, 5, miss=miss, replay=replay)
    receipt.ttft_ms, receipt.ttft_p90_ms, receipt.brought = 12.5, 40.25, ExternalKv(640)
    (placed,) = protocol.answers_of(protocol.frame([codec.placed_of(1, receipt)])[4:])
    assert isinstance(placed, protocol.LeaseOpened)
    assert (placed.miss, placed.replay) == (miss, replay)
    there = codec.receipt_of(placed, 1)
    assert (there.ttft_ms, there.ttft_p90_ms, there.predicted_tier_tokens) == (12.5, 40.25, 640)
    if miss is not None and placed.miss is not None:
        assert list(placed.miss.misses) == list(miss.misses)
