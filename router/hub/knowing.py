"""Snapshot of this router's knowledge for another process, in pieces. The pieces of one replica describe it at one
moment, and leave out data that is uncertain then."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from typing import Protocol

from router.core.fleet.member import Member
from router.core.kv_events.states import EngineState
from router.core.placement.router import Router
from router.core.sharing import capturing
from router.core.sharing.state import VERSION, StateEnd, StateOrigin, StatePiece, encoded
from router.loop import LongWork


class EventStates(Protocol):
    """Source of the cached blocks that events have reported (engines/kv_events/subscriber.py)."""

    async def state(self, replica: str) -> EngineState | None:
        """Return the complete state of one replica; None if it is uncertain at the moment."""


async def pieces(
    router: Router,
    events: EventStates | None,
    name: str,
    *,
    bytes_max: int,
    clock: Callable[[], float],
    wall: Callable[[], float],
    pace: LongWork | None = None,
) -> AsyncGenerator[bytes, None]:
    """Yield the pieces of a state, in their order. Replicas that would make it longer than `bytes_max` are left out."""
    pace, told = pace or LongWork(), dict[str, tuple[int, int]]()
    first = encoded(StateOrigin(VERSION, name, wall()))
    yield first
    count, size = 1, len(first)
    for member in router.members:
        life = member.life
        part = [encoded(piece) async for piece in _of_replica(router, events, member, clock, pace)]
        length = sum(map(len, part))
        if router.member(member.id) is not member or member.life != life or size + length > bytes_max:
            continue
        told[member.id] = len(told), life
        for each in part:
            yield each
        count, size = count + len(part), size + length
    for homes in capturing.homes(router, told):
        each = encoded(homes)
        await pace.step()
        if size + len(each) > bytes_max:
            break
        yield each
        count, size = count + 1, size + len(each)
    yield encoded(capturing.models(router))
    yield encoded(StateEnd(count + 1))


async def _of_replica(
    router: Router, events: EventStates | None, member: Member, clock: Callable[[], float], pace: LongWork
) -> AsyncIterator[StatePiece]:
    yield capturing.replica_of(member)
    state = await events.state(member.id) if events is not None else None
    if state is not None:
        yield state.stream
        for page in state.pages:
            yield page
            await pace.step()
    for touches in capturing.estimated(router, member.id, clock()):
        await pace.step()
        if touches is not None:
            yield touches
    for fits in capturing.fits(router, member.id):
        yield fits
