"""Interfaces of the components that the link serves: the core, the other shared data, and a router's snapshot."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Protocol

from router.peering.frames import PeerFrame
from router.peering.session import ResponseOwnerEntry


class CoreSync(Protocol):
    """The core's side (router/core/peer_sync)."""

    def say(self, now_s: float) -> bytes | None:
        """Return the core's next message; None if none is due yet."""

    def state(self, now_s: float) -> bytes:
        """Return the core's complete state."""

    def begin(self, name: str) -> None:
        """Add a router of which the first message arrives."""

    def hear(self, name: str, message: bytes, clock_s: float, now_s: float) -> None:
        """Process a message of another router's core. `clock_s` is the time at which that router's clock was 0. Raises
        ValueError."""

    def restore(self, name: str, state: bytes, clock_s: float, now_s: float) -> Iterator[None]:
        """Process the state of another router's core, in short steps. Raises ValueError."""

    def forget(self, name: str, now_s: float) -> None:
        """Forget a router that is silent or has left."""

    def tick(self, now_s: float) -> None:
        """Continue with long work."""

    def on_disconnected(self, now_s: float) -> None:
        """Forget all other routers now."""


class SharedStateSync(Protocol):
    """The side of all other shared data."""

    def fill_frame(self, frame: PeerFrame, *, everything: bool) -> None:
        """Add data for other routers to a frame. With `everything`, add all that fits."""

    def replicas(self) -> frozenset[int]:
        """Return the numbers of this router's replicas, by which its fleet is known (peers.py)."""

    def hear(self, origin: int, frame: PeerFrame) -> None:
        """Process a message or the state of another router."""

    def load_owners(self, owners: Sequence[ResponseOwnerEntry]) -> None:
        """Process owners of stored responses that were read from the store."""

    def list_response_ids(self) -> list[str]:
        """Return the ids of all stored responses with known owners."""

    def owner(self, response_id: str) -> ResponseOwnerEntry | None:
        """Return the entry of a response; None if it is no longer known."""

    def on_peer_lost(self, origin: int, *, left: bool) -> None:
        """Forget a router that is silent. With `left`, it announced that it leaves, or another process has its name."""

    def on_disconnected(self) -> None:
        """Handle a link that is no longer whole."""

    def on_connected(self) -> None:
        """Handle a link that is whole again."""

    def tick(self) -> None:
        """Run the work of each second."""


class SnapshotSource(Protocol):
    """Snapshot of a router's knowledge, for one that starts."""

    @property
    def needs_snapshot(self) -> bool:
        """True if this router has just started, and still needs the snapshot of another one."""

    def set_expected(self, *, more: bool) -> None:
        """Record that a snapshot may still arrive; with `more` False, that it will not."""

    def pieces(self) -> AsyncGenerator[bytes, None]:
        """Encode all knowledge of this router."""

    async def import_chunks(self, pieces: list[bytes], router: str) -> bool:
        """Process the snapshot of another router. Returns True if it can be read."""
