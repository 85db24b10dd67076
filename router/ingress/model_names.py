"""Resolution of the model that a request names: `model`, and the separate LoRA adapter of SGLang.

Engines accept names that no model list has. SGLang 0.5.23 accepts `base:adapter`
(srt/entrypoints/openai/serving_base.py). The longest served name in front of a colon is the base, and an adapter after
the colon overrides one of `lora_path`. It ignores both if it serves no adapters. vLLM loads an adapter on its first
request (a resolver), and lists it only then. The setting `api.unknown_models` decides if such a name is forwarded.

An adapter is part of the identity of a prompt, because its blocks are not shared with the base model or other adapters.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec import Struct

from router.config.api_keys import Tenant
from router.core.fleet.models import UnknownModel
from router.core.types.requests import RequestSpec
from router.placement_api import PlacementService

UNLISTED_S, UNLISTED_MAX = 10.0, 1_024  # seconds before an unlisted name is looked up again; most such names
SGLANG = "sglang"
_APART = "\x1f"  # between a base model and an adapter in an identity; in no model's name


class Meant(Struct, frozen=True, gc=False):
    """Result of the resolution of a request's names."""

    model: str  # a served name: replicas that serve it may take the request
    identity: str  # name with which chains of the prompt begin
    adapter: str = ""  # the adapter if it is named separately from its base; "" if a served name alone identifies it
    listed: bool = True  # False: no list of models has the adapter


class Unlisted:
    """Names that are forwarded to engines although no list has them. It avoids a lookup for every request."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._until_s: dict[str, float] = {}

    def is_due(self, name: str) -> bool:
        """True if the name must be looked up now. Further calls return False for UNLISTED_S."""
        now_s = self._clock()
        if self._until_s.get(name, now_s) > now_s:
            return False
        if len(self._until_s) >= UNLISTED_MAX:
            del self._until_s[next(iter(self._until_s))]
        self._until_s[name] = now_s + UNLISTED_S
        return True


def meant_by(placer: PlacementService, ask: RequestSpec, unknown_models: str = "") -> Meant:
    """Resolve the names of a request. Raises UnknownModel, or NoReplicaReady if no replica is ready."""
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
            return _resolve_adapter(placer, base, named[len(base) + 1 :].strip() or adapter)
        if unknown_models != "pass":
            raise
        return Meant(_only(placer, unknown), named, named, listed=False)
    if adapter and SGLANG in placer.engines(model):
        return _resolve_adapter(placer, model, adapter)
    return Meant(model, placer.cache_identity(model))


def may_name(tenant: Tenant, ask: RequestSpec) -> bool:
    """True if a tenant may use the names in a request, before they are resolved: `base:adapter` is allowed to tenants
    that may use the adapter."""
    named = ask.model
    if ask.adapter and not tenant.allows(ask.adapter):
        return False
    if named is None or tenant.allows(named):
        return True
    return any(tenant.allows(named[at + 1 :].strip()) for at, char in enumerate(named) if char == ":")


def may_use(tenant: Tenant, ask: RequestSpec, found: Meant) -> bool:
    """True if a tenant may use the resolved model and adapter of its request."""
    named = ask.model
    if named is None or named == found.model:
        return tenant.allows(found.model)
    if not tenant.allows(named) and not (named.endswith(":" + found.adapter) and tenant.allows(found.adapter)):
        return False
    return found.adapter != ask.adapter or not ask.adapter or tenant.allows(found.adapter)


def _base_of(named: str, served: list[str], placer: PlacementService) -> str:
    """Return the longest served name in front of a colon with engines that accept an adapter after it; "" if no name
    fits."""
    bases = [base for base in served if named.startswith(base + ":") and SGLANG in placer.engines(base)]
    return max(bases, key=len, default="")


def _resolve_adapter(placer: PlacementService, base: str, adapter: str) -> Meant:
    """Return a base model with an adapter. If any list has the adapter, only replicas that serve it may take the
    request. Raises NoReplicaReady."""
    known_as = placer.cache_identity(base)
    if not adapter:
        return Meant(base, known_as)
    parent = placer.parent(adapter)
    listed = bool(parent) and placer.cache_identity(parent) == known_as
    model = placer.resolve(adapter) if listed else base
    return Meant(model, f"{known_as}{_APART}{adapter}", adapter, listed)


def _only(placer: PlacementService, unknown: UnknownModel) -> str:
    """Return the one base model that is served. Raises `unknown` if there are several."""
    try:
        return placer.resolve(None)
    except UnknownModel:
        raise unknown from None
