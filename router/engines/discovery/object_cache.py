"""Objects of one kind in one namespace, as reported by an API server. Without I/O."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Generic, Protocol, TypeVar

import msgspec

SEEN_MAX = 8_192  # maximum number of object versions that a view remembers


class ParsedObject(Protocol):
    """One version of an object."""

    @property
    def name(self) -> str:
        """Name in its namespace."""

    @property
    def version(self) -> str:
        """Resource version, "" if unknown. Versions are compared only for equality, which is their only guarantee."""

    @property
    def why(self) -> str:
        """Readable problem for the log; "" without a problem."""


S = TypeVar("S", bound=ParsedObject)


class ObjectCache(ABC, Generic[S]):
    """Current objects, according to the events received so far."""

    def __init__(self) -> None:
        self.version = ""  # version from which a watch continues; "": objects must be listed first
        self.objects: dict[str, S] = {}
        self._seen: dict[str, None] = {}  # processed versions: one that is received again is ignored

    @abstractmethod
    def parse(self, raw: msgspec.Raw) -> S | None:
        """Decode an object; None if even its identity is unreadable."""

    def read(self, items: Iterable[msgspec.Raw]) -> list[S]:
        """Decode the items of one page of a list."""
        return [sighting for item in items if (sighting := self.parse(item)) is not None]

    def replace(self, sightings: Iterable[S], version: str) -> None:
        """Replace all objects. Known versions are dropped, because an etcd restored from a backup repeats them."""
        self.objects = {sighting.name: sighting for sighting in sightings}
        self.version = version
        self._seen = dict.fromkeys(sighting.version for sighting in self.objects.values())

    def apply_event(self, raw: msgspec.Raw, *, deleted: bool) -> S | None:
        """Apply an event of a watch; None if it is not new."""
        sighting = self.parse(raw)
        if sighting is None:
            return None
        if sighting.version:
            told = f"-{sighting.version}" if deleted else sighting.version  # DELETED may carry the last version
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
