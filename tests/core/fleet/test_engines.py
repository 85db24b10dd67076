"""Which kinds of engines serve a model."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from router.core.placement.policies import POLICIES
from router.core.placement.router import Router
from router.core.types.replicas import Replica, ServedModel

KINDS = ("vllm", "sglang", "other")
IDS = [f"http://10.0.0.{n}:8000" for n in range(4)]
MODELS = ("m", "n")
changes = st.one_of(
    st.sets(st.sampled_from(IDS)),
    st.tuples(st.sampled_from(IDS), st.dictionaries(st.sampled_from(MODELS), st.sampled_from(KINDS))),
)


@given(st.lists(changes, max_size=12))
def test_kinds_are_those_of_now(seen: list[set[str] | tuple[str, dict[str, str]]]) -> None:
    """Whatever replicas come, go, or serve something else: the kinds of engines of a model are those of the replicas
    that serve it now, though they are remembered in between."""
    it = Router(POLICIES["warm"](), index_bytes_max=1 << 20, remembered_prompts_max=16, default_cache_blocks=16)
    there: dict[str, dict[str, str]] = {}
    for change in seen:
        if isinstance(change, set):
            it.replace([Replica(id_) for id_ in sorted(change)])
            there = {id_: there.get(id_, {}) for id_ in change}
        else:
            id_, serves = change
            it.observations.observe_models(id_, [ServedModel(name, owned_by=kind) for name, kind in serves.items()])
            if id_ in there:
                there[id_] = serves
        for model in MODELS:
            kinds = {serves[model] for serves in there.values() if model in serves}
            assert it.models.engines(model) == it.models.engines(model) == kinds
