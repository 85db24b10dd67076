"""Frames between the hub and its workers, in both directions."""

from __future__ import annotations

import random
from contextlib import suppress

import msgspec

from router.multiprocess import codec, protocol
from router.multiprocess.protocol import WireError
from tests.attack.cuts import cut
from tests.attack.target import Target

FRAME_BYTES_MAX = 4_000


def hub(data: bytes) -> None:
    """A connection's bytes: whole frames are the same wherever it is cut, and what they say comes back as it was."""
    cuts = cut(random.Random(data), data) if data else []
    assert _frames(cuts) == _frames([data])
    for body in _frames([data])[0]:
        with suppress(WireError):
            heard = protocol.batch_of(body)
            said = protocol.frame(heard)  # compared as bytes: a time that is not a number equals nothing
            assert protocol.frame(protocol.batch_of(said[protocol.HEAD_BYTES :])) == said
            for message in heard.messages:
                _as_facts(message)
        with suppress(WireError):
            told = protocol.answers_of(body)
            said = protocol.frame(told)
            assert protocol.frame(protocol.answers_of(said[protocol.HEAD_BYTES :])) == said
            for answer in told:
                _as_answer(answer)


def _frames(pieces: list[bytes]) -> tuple[list[bytes], bool]:
    """Bodies of frames, and whether one was refused."""
    frames, bodies = protocol.Frames(bytes_max=FRAME_BYTES_MAX), list[bytes]()
    try:
        for piece in pieces:
            bodies += frames.feed(piece)
    except WireError:
        return [], True
    return bodies, False


def _as_facts(message: protocol.FromWorker) -> None:
    if isinstance(message, protocol.WantLease):
        wanted = codec.wanted_of(message)
        again = codec.place_of(message.id, wanted, frozenset(message.exclude), ids=True)
        parts = [(each.model, each.chain, each.prompt, each.tokens) for each in (again, message)]
        assert msgspec.msgpack.encode(parts[0]) == msgspec.msgpack.encode(parts[1])
    elif isinstance(message, protocol.Finish):
        outcome = codec.outcome_of(message)
        assert protocol.frame(protocol.WorkerFrame(0, [codec.finish_of(message.id, outcome, message.now_s)]))
    elif isinstance(message, protocol.Prefilled):
        outcome = codec.prefill_outcome_of(message)
        assert (outcome.ending, bool(outcome.usage)) == (message.ending, bool(message.usage))
    elif isinstance(message, protocol.Report):
        codec.record_of(message, None)


def _as_answer(answer: protocol.FromHub) -> None:
    if isinstance(answer, protocol.LeaseOpened):
        codec.receipt_of(answer, 1)
    elif isinstance(answer, protocol.Unplaced):
        codec.error_of(answer)


WORDS = (
    *(
        bytes((number,))
        for number in (*range(16), 0x90, 0x91, 0x92, 0x9F, 0xC0, 0xC2, 0xC3, 0xC4, 0xCB, 0xCF, 0xD9, 0xDC)
    ),
    *(size.to_bytes(4, "little") for size in (0, 1, 2, 16, FRAME_BYTES_MAX, FRAME_BYTES_MAX + 1, 2**31)),
    b"\xa4warm",
    b"\xa5exact",
    b"\xa2ok",
    b"\xa6failed",
)

TARGETS = (Target(hub, WORDS),)
