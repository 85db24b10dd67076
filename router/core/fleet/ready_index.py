"""Lists of members by use: ready members, members that serve a model, and silent members used if no other serves it.

Every request reads these lists, and each change of a health check alters them: a thousand times within seconds if the
router's own network fails. So a change costs as many steps as the member has models, and a list is built at its next
use, once for all changes since the last. Lists are in the order in which their members joined. A list that was returned
is never changed.
"""

from __future__ import annotations

from router.core.fleet.member import ReplicaState

_OUT, _READY, _SILENT = 0, 1, 2


class OrderedMembers:
    """Members by the number with which they joined."""

    def __init__(self) -> None:
        self.by_number: dict[int, ReplicaState] = {}
        self._list: list[ReplicaState] | None = []

    def add(self, number: int, member: ReplicaState) -> None:
        """Add a member."""
        self.by_number[number] = member
        self._list = None

    def drop(self, number: int) -> None:
        """Remove a member, if present."""
        if self.by_number.pop(number, None) is not None:
            self._list = None

    def list_members(self) -> list[ReplicaState]:
        """Return all of them, in the order in which they joined. The list must not be changed."""
        listed = self._list
        if listed is None:
            listed = self._list = [self.by_number[number] for number in sorted(self.by_number)]
        return listed


class _Served:
    """Members that serve one model."""

    def __init__(self) -> None:
        self.ready = OrderedMembers()
        self.silent = OrderedMembers()


class _IndexEntry:
    """State under which a member is listed."""

    def __init__(self, number: int, member: ReplicaState) -> None:
        self.number = number
        self.member = member
        self.state = _OUT
        self.models: object = None  # the dict of which `names` are the keys
        self.names: frozenset[str] = frozenset()
        self.unserved = 0  # number of its models that no ready member serves; counted while it is silent


class ReadyIndex:
    """Members by their possible use. Each change must be reported by `file`."""

    def __init__(self) -> None:
        self._filed: dict[str, _IndexEntry] = {}
        self._joined = 0
        self._ready, self._doubted = OrderedMembers(), OrderedMembers()
        self._usable: list[ReplicaState] | None = None
        self._served: dict[str, _Served] = {}
        self._kinds: dict[frozenset[str], OrderedMembers] = {}

    # -- queries -------------------------------------------------------------------------------------------------

    def ready(self) -> list[ReplicaState]:
        """Return the members that may be sent requests. The list must not be changed."""
        return self._ready.list_members()

    def usable(self) -> list[ReplicaState]:
        """Return the ready members, and after them the silent ones with a model that no ready member serves. The list
        must not be changed."""
        if not self._doubted.by_number:
            return self._ready.list_members()
        if self._usable is None:
            self._usable = self._ready.list_members() + self._doubted.list_members()
        return self._usable

    def list_serving(self, model: str) -> list[ReplicaState]:
        """Return the ready members that serve a model, or the silent ones if no ready one does. The list must not be
        changed."""
        served = self._served.get(model)
        if served is None:
            return []
        return served.ready.list_members() if served.ready.by_number else served.silent.list_members()

    def ready_count(self, model: str) -> int:
        """Return the number of ready members that serve a model."""
        served = self._served.get(model)
        return len(served.ready.by_number) if served is not None else 0

    def models(self) -> set[str]:
        """Return the names of all models with at least one member."""
        return set(self._served)

    @property
    def panics(self) -> bool:
        """True if a model is served only by members that are not ready."""
        return bool(self._doubted.by_number)

    def kinds(self) -> list[tuple[frozenset[str], list[ReplicaState]]]:
        """Return the usable members by the set of models that they serve. Usually these are few sets, even in a large
        fleet."""
        return [(names, listed.list_members()) for names, listed in self._kinds.items()]

    def kind(self, member: ReplicaState) -> frozenset[str]:
        """Return the models that a member serves."""
        filed = self._filed.get(member.id)
        return filed.names if filed is not None else frozenset(member.models)

    def number(self, id_: str) -> int:
        """Return a member's number, in the order of joining."""
        return self._filed[id_].number

    # -- updates -------------------------------------------------------------------------------------------------

    def leave(self, member: ReplicaState) -> None:
        """Remove a member that left."""
        filed = self._filed.pop(member.id, None)
        if filed is not None:
            self._take_out(filed)

    def file(self, member: ReplicaState) -> None:
        """Update the lists of a member after a change of its health, its models, its discovery state or its warm-up."""
        filed = self._filed.get(member.id)
        if filed is None:
            self._joined += 1
            filed = self._filed[member.id] = _IndexEntry(self._joined, member)
        state = _state(member)
        if filed.state == state and filed.models is member.models:
            return
        self._take_out(filed)
        filed.state = state
        if filed.models is not member.models:
            filed.models, filed.names = member.models, frozenset(member.models)
        self._usable = None
        if state == _READY:
            self._ready.add(filed.number, member)
            self._use(filed)
            for name in filed.names:
                served = self._served_of(name)
                served.ready.add(filed.number, member)
                if len(served.ready.by_number) == 1:
                    self._begins(served)
        elif state == _SILENT:
            filed.unserved = 0
            for name in filed.names:
                served = self._served_of(name)
                served.silent.add(filed.number, member)
                filed.unserved += not served.ready.by_number
            if filed.unserved:
                self._doubt(filed)

    # -- internals -----------------------------------------------------------------------------------------------

    def _served_of(self, name: str) -> _Served:
        served = self._served.get(name)
        if served is None:
            served = self._served[name] = _Served()
        return served

    def _take_out(self, filed: _IndexEntry) -> None:
        state, number = filed.state, filed.number
        filed.state = _OUT
        if state == _OUT:
            return
        self._usable = None
        self._ready.drop(number)
        self._doubted.drop(number)
        self._remove_usable(filed)
        for name in filed.names:
            served = self._served[name]
            if state == _SILENT:
                served.silent.drop(number)
            else:
                served.ready.drop(number)
                if not served.ready.by_number:
                    self._ends(served)
            if not (served.ready.by_number or served.silent.by_number):
                del self._served[name]

    def _begins(self, served: _Served) -> None:
        """Handle the first ready member that serves a model. Its silent members are no longer needed for that model."""
        for member in served.silent.by_number.values():
            filed = self._filed[member.id]
            filed.unserved -= 1
            if not filed.unserved:
                self._doubted.drop(filed.number)
                self._remove_usable(filed)

    def _ends(self, served: _Served) -> None:
        """Handle the loss of the last ready member that serves a model. Its silent members serve it from now on."""
        for member in served.silent.by_number.values():
            filed = self._filed[member.id]
            filed.unserved += 1
            if filed.unserved == 1:
                self._doubt(filed)

    def _doubt(self, filed: _IndexEntry) -> None:
        self._doubted.add(filed.number, filed.member)
        self._use(filed)

    def _use(self, filed: _IndexEntry) -> None:
        kind = self._kinds.get(filed.names)
        if kind is None:
            kind = self._kinds[filed.names] = OrderedMembers()
        kind.add(filed.number, filed.member)

    def _remove_usable(self, filed: _IndexEntry) -> None:
        kind = self._kinds.get(filed.names)
        if kind is not None:
            kind.drop(filed.number)
            if not kind.by_number:
                del self._kinds[filed.names]


def _state(member: ReplicaState) -> int:
    if member.ready:
        return _READY
    health = member.health
    return _SILENT if member.replica.ready and not health.fit and health.served and health.silent else _OUT
