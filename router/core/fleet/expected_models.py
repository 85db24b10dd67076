"""Models that should be served although no replica may serve them at present.

An autoscaler starts the first replica of such a model because of its refused requests. They are counted by model, and
the client receives a retryable error.

Expected models are those named in the settings, and those of a replica that left as the last one to serve them. A model
that a running replica no longer lists was unloaded, and is not expected. If engines scale from zero, a model stays
expected while the router runs. Otherwise it stays for GONE_S, the time in which a rollout starts another replica, and
counts as removed after that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from router.core.types.replicas import ServedModel

GONE_S = 600.0
GONE_MAX = 256  # names of models without a replica; a new one replaces the oldest
ADAPTS = "sglang"  # `owned_by` of engines that accept the name `base:adapter`


@dataclass(slots=True)
class _Gone:
    """A model name without a replica."""

    base: str  # the base model of an adapter; any other model's own name
    adapts: bool  # the replica also accepted `name:adapter`
    since_s: float | None = None  # time of the first call of `age` after the replica left


class ExpectedModels:
    """Names of expected models and adapters, each with its base model."""

    def __init__(self, declared: Iterable[str] = (), *, keeps: bool = False) -> None:
        """Start with the names of the settings (`declared`). With `keeps`, engines scale from zero."""
        self.declared = tuple(declared)
        self._keeps = keeps
        self._gone: dict[str, _Gone] = {}

    def on_replica_removed(self, models: Iterable[ServedModel], listed: Collection[str]) -> None:
        """Record that a replica with these models left. `listed` are the models that other replicas list, ready or
        not."""
        for model in models:
            if model.name in listed:
                continue
            self._gone.pop(model.name, None)
            if len(self._gone) >= GONE_MAX:
                del self._gone[next(iter(self._gone))]
            self._gone[model.name] = _Gone(model.parent or model.name, model.owned_by == ADAPTS)

    def came(self, names: Iterable[str]) -> None:
        """Record that a replica lists these models."""
        if self._gone:
            for name in names:
                self._gone.pop(name, None)

    def age(self, now_s: float) -> None:
        """Drop models that have been gone for GONE_S; must be called every few seconds."""
        if self._keeps or not self._gone:
            return
        for name, gone in list(self._gone.items()):
            if gone.since_s is None:
                gone.since_s = now_s
            elif now_s - gone.since_s >= GONE_S:
                del self._gone[name]

    def bases(self) -> dict[str, str]:
        """Return every expected name with its base model, the declared ones first."""
        return {name: name for name in self.declared} | {name: gone.base for name, gone in self._gone.items()}

    def find_base(self, name: str | None) -> str:
        """Return the base model of a name, or "" if the name is not expected. For None, return the only expected base
        model."""
        bases = self.bases()
        if name is None:
            only = set(bases.values())
            return next(iter(only)) if len(only) == 1 else ""
        if name in bases:
            return bases[name]
        adapting = (each for each, gone in self._gone.items() if gone.adapts)  # names that also accept `name:adapter`
        longest = max((each for each in adapting if name.startswith(each + ":")), key=len, default="")
        return bases.get(longest, "")
