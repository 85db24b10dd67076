"""Where one process leaves off and another goes on: what a replica's events have said, as a whole and at one batch.

Nothing is believed for being written down. What another process knew is held without any credit until a replay from its
last batch, byte for byte the same, has proved that the publisher is still the same process (core/kv_events/stream.py);
the replay brings what came since. Where there is no replay endpoint nothing can prove that, and nothing is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from router.core.facts.placements import Grade
from router.core.kv_events.sink import StateSink
from router.core.kv_events.states import EngineState, Page, StreamState
from router.core.kv_events.steps import Phase
from router.core.kv_events.stream import KvStream
from router.loop import LongWork

DIGEST_BYTES = 16
ANOTHER = "another process publishes"


@dataclass(slots=True)
class Handover:
    """States of replicas that wait to be gone on from, by replica, and who hears what became of each: `told(replica,
    blocks, why)`, where no block was taken for that reason."""

    keeper: StateSink
    told: Callable[[str, int, str], None] = lambda *_: None
    offers: dict[str, EngineState] = field(default_factory=dict)


async def state_of(stream: KvStream, keeper: StateSink, replica: str, pace: LongWork) -> EngineState | None:
    """The replica's state; None where it is not certain at the moment. No batch may be applied meanwhile."""
    at, shape = stream.position, keeper.shape(replica)
    if at is None or shape is None:
        return None
    pages = list[Page]()
    try:
        for page in keeper.pages(replica):
            pages.append(page)
            await pace.step()
    except RuntimeError:  # blocks were given up for others' room
        return None
    if keeper.shape(replica) != shape:  # cleared
        return None
    digest = at[1].to_bytes(DIGEST_BYTES, "big")
    return EngineState(StreamState(at[0], digest, stream.grade is Grade.EXACT, stream.why, shape), pages)


async def begin_with(state: EngineState, keeper: StateSink, replica: str, pace: LongWork) -> None:
    """Hold what is in a state, and nothing else. Raises UnreadableState."""
    keeper.begin(replica, state.stream.shape)
    for page in state.pages:
        keeper.take_in(replica, page)
        await pace.step()


def objection(stream: KvStream, state: EngineState) -> str | None:
    """Why a stream must not go on from a state; "" where it may, None where that cannot be said yet."""
    told = state.stream
    if not stream.replays:
        return "no replay endpoint, so nothing proves that the engine is still the same"
    if stream.last_seq < 0:
        return ""
    if stream.suspended or stream.phase is not Phase.FOLLOWING:
        return None
    if stream.grade is Grade.EXACT:
        return "its own events have told all of it"
    if told.seq > stream.last_seq:
        return None
    same = stream.applied(told.seq, int.from_bytes(told.digest, "big"))
    if same is None:
        return "batches since are not all known"
    return "" if same else ANOTHER
