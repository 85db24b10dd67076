"""Transfer of the state of a replica's events from one process to another, complete and as of one batch.

A written state is not trusted. Its blocks get no credit until a replay from its last batch, with the same bytes, has
proved that the publisher is still the same process (core/kv_events/stream.py). The replay also brings the batches since
then. Without a replay endpoint there is no such proof, and no state is adopted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from router.core.kv_events.event_state_codec import EngineState, Page, StreamState
from router.core.kv_events.sink import StateSink
from router.core.kv_events.stream import KvStream
from router.core.kv_events.stream_steps import Phase
from router.core.types.placements import Confidence
from router.eventloop import CooperativeBudget

DIGEST_BYTES = 16
ANOTHER = "the publisher is a different process"


@dataclass(slots=True)
class SnapshotResume:
    """Offered states by replica, and a callback for the outcome of each.

    `told(replica, blocks, why)` gets the number of adopted blocks; 0 if none was adopted, for the reason `why`.
    """

    state_sink: StateSink
    told: Callable[[str, int, str], None] = lambda *_: None
    offers: dict[str, EngineState] = field(default_factory=dict)


async def state_of(stream: KvStream, keeper: StateSink, replica: str, pace: CooperativeBudget) -> EngineState | None:
    """Return the replica's state; None if it is not certain at the moment. No batch may be applied during the call."""
    at, shape = stream.position, keeper.shape(replica)
    if at is None or shape is None:
        return None
    pages = list[Page]()
    try:
        for page in keeper.pages(replica):
            pages.append(page)
            await pace.step()
    except RuntimeError:  # blocks were given up for other replicas
        return None
    if keeper.shape(replica) != shape:  # cleared during the copy
        return None
    digest = at[1].to_bytes(DIGEST_BYTES, "big")
    return EngineState(StreamState(at[0], digest, stream.grade is Confidence.EXACT, stream.why, shape), pages)


async def import_state(state: EngineState, keeper: StateSink, replica: str, pace: CooperativeBudget) -> None:
    """Replace the replica's blocks by those of a state. Raises UnreadableState."""
    keeper.reset_to(replica, state.stream.shape)
    for page in state.pages:
        keeper.import_page(replica, page)
        await pace.step()


def why_not_resumable(stream: KvStream, state: EngineState) -> str | None:
    """Return the reason why a stream must not continue from a state; "" if it may, None if that is not known yet."""
    told = state.stream
    if not stream.replays:
        return "without a replay endpoint the engine cannot be verified as the same"
    if stream.last_seq < 0:
        return ""
    if stream.suspended or stream.phase is not Phase.FOLLOWING:
        return None
    if stream.grade is Confidence.EXACT:
        return "its own events have already covered the saved state"
    if told.seq > stream.last_seq:
        return None
    same = stream.is_applied(told.seq, int.from_bytes(told.digest, "big"))
    if same is None:
        return "batches since then are incomplete"
    return "" if same else ANOTHER
