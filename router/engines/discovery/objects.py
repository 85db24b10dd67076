"""Objects of one kind in one namespace, as an API server tells of them. Pure."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

import msgspec

SEEN_MAX = 8_192  # versions of objects that a view remembers


class ObjectSeen(Protocol):
    """One version of an object."""

    @property
    def name(self) -> str:
        """Its name in its namespace."""

    @property
    def version(self) -> str:
        """Its resource version, "" if unknown. Versions are only compared for equality, which is all they promise."""

    @property
    def why(self) -> str:
        """What the log is to say is wrong with it, for people; "" for nothing."""


S = TypeVar("S", bound=ObjectSeen)


class ObjectView(ABC, Generic[S]):
    """The objects as far as was heard."""

    def __init__(self) -> None:
        self.version = ""  # the version that a watch goes on from; "": objects must be listed first
        self.objects: dict[str, S] = {}
        self._seen: dict[str, None] = {}  # versions that were heard: one that comes again is no news

    @abstractmethod
    def sighting(self, raw: msgspec.Raw) -> S | None:
        """Read an object; None if it does not even say which it is."""

    def read(self, items: Iterable[msgspec.Raw]) -> list[S]:
        """Read the items of one page of a list."""
        return [sighting for item in items if (sighting := self.sighting(item)) is not None]

    def replace(self, sightings: Iterable[S], version: str) -> None:
        """Replace all objects by these. Versions are forgotten: an etcd restored from a backup counts them anew."""
        self.objects = {sighting.name: sighting for sighting in sightings}
        self.version = version
        self._seen = dict.fromkeys(sighting.version for sighting in self.objects.values())

    def hear(self, raw: msgspec.Raw, *, deleted: bool) -> S | None:
        """Take an event of a watch; None if it says nothing new."""
        sighting = self.sighting(raw)
        if sighting is None:
            return None
        if sighting.version:
            told = f"-{sighting.version}" if deleted else sighting.version  # DELETED may come with the last version
            if told in self._seen:
                return None
            self._seen[told] = None
            if len(self._seen) > SEEN_MAX:
                del self._seen[next(iter(self._seen))]
            self.version = sighting.version
        if deleted:
            self.objects.pop(sighting.name, None)
        else:
            self.objects[sighting.name] = sighting
        return sighting
