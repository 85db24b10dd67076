"""Whose words the link carries: the core's, and those of what is shared besides."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Protocol

from router.sharing.frames import Frame
from router.sharing.session import Written


class CoreSharing(Protocol):
    """The core's side (router/core/sharing)."""

    def say(self, now_s: float) -> bytes | None:
        """The core's next message; None where it has nothing to say yet."""

    def hear(self, message: bytes, now_s: float) -> None:
        """Take in a message of another router's core. Raises ValueError."""

    def tick(self, now_s: float) -> None:
        """Forget routers that are silent."""

    def alone(self, now_s: float) -> None:
        """Forget all other routers now."""


class StoreSide(Protocol):
    """What else is shared."""

    def add_to(self, frame: Frame, *, everything: bool) -> None:
        """Put into a frame what others are to be told; `everything` as far as it fits."""

    def replicas(self) -> frozenset[int]:
        """Numbers of this router's replicas, by which its fleet is known (peers.py)."""

    def hear(self, origin: int, frame: Frame, *, leaving: bool) -> None:
        """Another router has said this."""

    def own(self, owners: Sequence[Written]) -> None:
        """Owners of stored responses were read from the store."""

    def known(self) -> list[str]:
        """Ids of all stored responses whose owners are known."""

    def owner(self, response_id: str) -> Written | None:
        """The entry of one; None if it is not known any more."""

    def silent(self, origin: int, *, left: bool) -> None:
        """A router is not heard any more; `left`: it said that it leaves, or another process has its name."""

    def alone(self) -> None:
        """Nobody is heard."""

    def together(self) -> None:
        """The others are heard again."""

    def tick(self) -> None:
        """A second has passed."""


class StateSide(Protocol):
    """All that a router knows, for one that starts."""

    @property
    def wants(self) -> bool:
        """Whether this router has just started, and would be told by another one."""

    def expect(self, *, more: bool) -> None:
        """Whether that is still to come."""

    def pieces(self) -> AsyncGenerator[bytes, None]:
        """All that this router knows."""

    async def handed(self, pieces: list[bytes], router: str) -> bool:
        """All that another one knows; returns whether it can be read."""
