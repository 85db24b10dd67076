"""Snapshot of this router's knowledge for another process, in pieces. The pieces of one replica describe it at one
moment, and leave out data that is uncertain then."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Protocol

from router.core.fleet.member import ReplicaState
from router.core.kv_events.event_state_codec import EngineState
from router.core.peer_sync import snapshot_export
from router.core.peer_sync.snapshot_format import VERSION, StateEnd, StateOrigin, StatePiece, encode_piece
from router.core.placement.router import Router
from router.eventloop import CooperativeBudget


class EventStateSource(Protocol):
    """Source of the cached blocks that events have reported (engines/kv_events/subscriber.py)."""

    async def state(self, replica: str) -> EngineState | None:
        """Return the complete state of one replica; None if it is uncertain at the moment."""


async def snapshot_chunks(
    router: Router,
    events: EventStateSource | None,
    name: str,
    *,
    bytes_max: int,
    clock: Callable[[], float],
    wall: Callable[[], float],
    pace: CooperativeBudget | None = None,
) -> AsyncGenerator[bytes, None]:
    """Yield the pieces of a state, in their order. Replicas that would make it longer than `bytes_max` are left out."""
    pace, captured = pace or CooperativeBudget(), dict[str, tuple[int, int]]()
    first = encode_piece(StateOrigin(VERSION, name, wall()))
    yield first
    count, size = 1, len(first)
    for member in router.members:
        life = member.cache_epoch
        part = [encode_piece(piece) async for piece in _capture_replica(router, events, member, clock, pace)]
        length = sum(map(len, part))
        if router.fleet.member(member.id) is not member or member.cache_epoch != life or size + length > bytes_max:
            continue
        captured[member.id] = len(captured), life
        for each in part:
            yield each
        count, size = count + len(part), size + length
    for homes in snapshot_export.homes(router, captured):
        each = encode_piece(homes)
        await pace.step()
        if size + len(each) > bytes_max:
            break
        yield each
        count, size = count + 1, size + len(each)
    yield encode_piece(snapshot_export.models(router))
    yield encode_piece(StateEnd(count + 1))


async def _capture_replica(
    router: Router,
    events: EventStateSource | None,
    member: ReplicaState,
    clock: Callable[[], float],
    pace: CooperativeBudget,
) -> AsyncIterator[StatePiece]:
    yield snapshot_export.replica_of(member)
    state = await events.state(member.id) if events is not None else None
    if state is not None:
        yield state.stream
        for page in state.pages:
            yield page
            await pace.step()
    for touches in snapshot_export.export_estimate(router, member.id, clock()):
        await pace.step()
        if touches is not None:
            yield touches
    for fits in snapshot_export.fits(router, member.id):
        yield fits
