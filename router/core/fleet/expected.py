"""Models that are meant to be served and may have no replica now: an autoscaler starts the first one by the requests
that are refused meanwhile, which are counted by model, and answered as ones that may come again.

Expected are the models that settings name, and those whose last replica has left. A model that a living replica no
longer lists is not expected: it was unloaded. Whatever has left is kept for as long as the router runs if engines scale
from zero, otherwise for GONE_S, in which a rollout brings another replica: after that the model counts as removed.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

from router.core.facts.replicas import ServedModel

GONE_S = 600.0
GONE_MAX = 256  # names of models without a replica; the oldest is dropped for another one
ADAPTS = "sglang"  # engines that take `base:adapter` as a name, by their `owned_by`


@dataclass(slots=True)
class _Gone:
    """A model name without a replica."""

    base: str  # the base model of an adapter, the name itself of any other
    adapts: bool  # whether the replica took `name:adapter` too
    since_s: float | None = None  # time of the first `age` since


class ExpectedModels:
    """Names of models and adapters, each with its base model."""

    def __init__(self, declared: Iterable[str] = (), *, keeps: bool = False) -> None:
        """`declared` are named in the settings. With `keeps` engines scale from zero."""
        self.declared = tuple(declared)
        self._keeps = keeps
        self._gone: dict[str, _Gone] = {}

    def left(self, models: Iterable[ServedModel], listed: Collection[str]) -> None:
        """A replica with these models has left; `listed` are those that others list, ready or not."""
        for model in models:
            if model.name in listed:
                continue
            self._gone.pop(model.name, None)
            if len(self._gone) >= GONE_MAX:
                del self._gone[next(iter(self._gone))]
            self._gone[model.name] = _Gone(model.parent or model.name, model.owned_by == ADAPTS)

    def came(self, names: Iterable[str]) -> None:
        """A replica lists these."""
        if self._gone:
            for name in names:
                self._gone.pop(name, None)

    def age(self, now_s: float) -> None:
        """Drop whatever has been gone for GONE_S; to be called every few seconds."""
        if self._keeps or not self._gone:
            return
        for name, gone in list(self._gone.items()):
            if gone.since_s is None:
                gone.since_s = now_s
            elif now_s - gone.since_s >= GONE_S:
                del self._gone[name]

    def bases(self) -> dict[str, str]:
        """Every expected name with its base model, the declared ones first."""
        return {name: name for name in self.declared} | {name: gone.base for name, gone in self._gone.items()}

    def adapting(self) -> list[str]:
        """Those of the names that take `name:adapter`."""
        return [name for name, gone in self._gone.items() if gone.adapts]


def expected_base(name: str | None, bases: dict[str, str], adapting: Iterable[str]) -> str:
    """The base model that a name stands for, None for the only one that is expected; "" if it is not expected."""
    if name is None:
        only = set(bases.values())
        return next(iter(only)) if len(only) == 1 else ""
    if name in bases:
        return bases[name]
    longest = max((each for each in adapting if name.startswith(each + ":")), key=len, default="")
    return bases.get(longest, "")
