"""Interfaces of the components that the link serves: the core, the other shared data, and a router's state."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from router.sharing.frames import Frame
from router.sharing.session import Written


class CoreSharing(Protocol):
    """The core's side (router/core/sharing)."""

    def say(self, now_s: float) -> bytes | None:
        """Return the core's next message; None if none is due yet."""

    def hear(self, message: bytes, now_s: float) -> None:
        """Process a message of another router's core. Raises ValueError."""

    def tick(self, now_s: float) -> None:
        """Forget routers that are silent."""

    def alone(self, now_s: float) -> None:
        """Forget all other routers now."""


class StoreSide(Protocol):
    """The side of all other shared data."""

    def add_to(self, frame: Frame, *, everything: bool) -> None:
        """Add data for other routers to a frame. With `everything`, add all that fits."""

    def replicas(self) -> frozenset[int]:
        """Return the numbers of this router's replicas, by which its fleet is known (peers.py)."""

    def hear(self, origin: int, frame: Frame, *, leaving: bool) -> None:
        """Process a message of another router."""

    def own(self, owners: Sequence[Written]) -> None:
        """Process owners of stored responses that were read from the store."""

    def known(self) -> list[str]:
        """Return the ids of all stored responses with known owners."""

    def owner(self, response_id: str) -> Written | None:
        """Return the entry of a response; None if it is no longer known."""

    def silent(self, origin: int, *, left: bool) -> None:
        """Forget a router that is silent. With `left`, it announced that it leaves, or another process has its name."""

    def alone(self) -> None:
        """Handle a link that is no longer whole."""

    def together(self) -> None:
        """Handle a link that is whole again."""

    def tick(self) -> None:
        """Run the work of each second."""


class StateSide(Protocol):
    """State of a router, for one that starts."""

    @property
    def wants(self) -> bool:
        """True if this router has just started, and still needs the state of another one."""

    def expect(self, *, more: bool) -> None:
        """Record that this state may still arrive; with `more` False, that it will not."""

    def pieces(self) -> AsyncGenerator[bytes, None]:
        """Encode all knowledge of this router."""

    async def handed(self, pieces: list[bytes], router: str) -> bool:
        """Process the state of another router. Returns True if it can be read."""
