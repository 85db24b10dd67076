"""The model that a request means by its names: `model`, and the LoRA adapter that SGLang takes besides.

Engines take names that no list has. SGLang 0.5.23 takes `base:adapter` (srt/entrypoints/openai/serving_base.py): the
longest served name in front of a colon is the base, and an adapter behind it counts more than one of `lora_path`. It
ignores both where it serves no adapters. vLLM loads an adapter the first time that it is asked for (a resolver), and
lists it only then; that such a name goes on is a setting (`api.unknown_models`).

An adapter is part of the identity of a prompt, since its blocks are no other's.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from router.core.facts.requests import Ask
from router.core.fleet.models import UnknownModel
from router.placer import Placer
from router.settings.keys import Tenant

UNLISTED_S, UNLISTED_MAX = 10.0, 1_024  # seconds for which a name that no list has is not looked for again; such names
SGLANG = "sglang"
_APART = "\x1f"  # between a base model and an adapter in an identity; in no model's name


class Meant(Struct, frozen=True, gc=False):
    """What the names of a request mean."""

    model: str  # a served name: replicas that serve it may take the request
    identity: str  # the name that chains of the prompt begin with
    adapter: str = ""  # the adapter where it is named besides its base; "" for a name of its own
    listed: bool = True  # False: no list of models has the adapter


class Unlisted:
    """Names that go on to engines though no list has them, so that not every request has to wait for a look."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until_s: dict[str, float] = {}

    def is_due(self, name: str) -> bool:
        """Whether the name is to be looked for now; from then on it is not for UNLISTED_S."""
        now_s = self._clock()
        if self._until_s.get(name, now_s) > now_s:
            return False
        if len(self._until_s) >= UNLISTED_MAX:
            del self._until_s[next(iter(self._until_s))]
        self._until_s[name] = now_s + UNLISTED_S
        return True


def meant_by(placer: Placer, ask: Ask, unknown_models: str = "") -> Meant:
    """What a request means. Raises UnknownModel, or NoReplica when nothing is ready."""
    named, adapter = ask.model, ask.adapter
    if named is None and adapter:  # `/generate` names no base
        named = placer.parent(adapter) or None
    try:
        model = placer.resolve(named)
    except UnknownModel as unknown:
        if named is None:
            raise
        base = _base_of(named, unknown.known, placer)
        if base:
            return _adapted(placer, base, named[len(base) + 1 :].strip() or adapter)
        if unknown_models != "pass":
            raise
        return Meant(_only(placer, unknown), named, named, listed=False)
    if adapter and SGLANG in placer.engines(model):
        return _adapted(placer, model, adapter)
    return Meant(model, placer.known_as(model))


def may_name(tenant: Tenant, ask: Ask) -> bool:
    """Whether a tenant may use what a request names, as far as its names say: `base:adapter` is for those that may
    use the adapter."""
    named = ask.model
    if ask.adapter and not tenant.allows(ask.adapter):
        return False
    if named is None or tenant.allows(named):
        return True
    return any(tenant.allows(named[at + 1 :].strip()) for at, char in enumerate(named) if char == ":")


def may_use(tenant: Tenant, ask: Ask, found: Meant) -> bool:
    """Whether a tenant may use what its request was found to mean."""
    named = ask.model
    if named is None or named == found.model:
        return tenant.allows(found.model)
    if not tenant.allows(named) and not (named.endswith(":" + found.adapter) and tenant.allows(found.adapter)):
        return False
    return found.adapter != ask.adapter or not ask.adapter or tenant.allows(found.adapter)


def _base_of(named: str, served: list[str], placer: Placer) -> str:
    """The longest served name in front of a colon whose engines take an adapter behind it; "" where there is none."""
    bases = [base for base in served if named.startswith(base + ":") and SGLANG in placer.engines(base)]
    return max(bases, key=len, default="")


def _adapted(placer: Placer, base: str, adapter: str) -> Meant:
    """A base model with an adapter, which has replicas of its own where any list has it. Raises NoReplica."""
    known_as = placer.known_as(base)
    if not adapter:
        return Meant(base, known_as)
    parent = placer.parent(adapter)
    listed = bool(parent) and placer.known_as(parent) == known_as
    model = placer.resolve(adapter) if listed else base
    return Meant(model, f"{known_as}{_APART}{adapter}", adapter, listed)


def _only(placer: Placer, unknown: UnknownModel) -> str:
    """The one base model that is served. Raises `unknown` where there are several."""
    try:
        return placer.resolve(None)
    except UnknownModel:
        raise unknown from None
