"""Models that are meant to be served and may have no replica now."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.fleet.expected_models import GONE_MAX, GONE_S, ExpectedModels
from router.core.fleet.models import NoReplicaReady, UnknownModel
from router.core.placement.policies import POLICIES
from router.core.placement.router import Router
from router.core.types.replicas import Replica, ServedModel

NAMES = "abc"


def router_with(expected: ExpectedModels | None = None) -> Router:
    """Without a replica."""
    return Router(
        POLICIES["warm"](),
        index_bytes_max=1 << 20,
        remembered_prompts_max=100,
        default_cache_blocks=100,
        expected=expected,
    )


def found(router: Router, model: str | None) -> str:
    """How a name is resolved: a model's name, `none ready` or `unknown`."""
    try:
        return router.models.resolve(model)
    except NoReplicaReady:
        return "none ready"
    except UnknownModel:
        return "unknown"


def fleet_of(router: Router, served: dict[str, list[ServedModel]]) -> None:
    """Have these replicas, all well."""
    router.replace(Replica(id_) for id_ in served)
    for id_, models in served.items():
        router.observations.observe_models(id_, models)
        router.fleet.observe_health(id_, ok=True)


STEPS = st.lists(st.dictionaries(st.sampled_from("xyz"), st.sets(st.sampled_from(NAMES)), max_size=3), max_size=8)


@given(steps=STEPS, keeps=st.booleans(), declared=st.sets(st.sampled_from(NAMES)))
def test_a_name_is_refused_for_now_if_it_was_served_until_its_last_replica_left(
    steps: list[dict[str, set[str]]], keeps: bool, declared: set[str]
) -> None:
    """Or if settings declare it. Any other name that is not served is unknown beside those that are."""
    router, gone, before = router_with(ExpectedModels(declared, keeps=keeps)), set[str](), dict[str, set[str]]()
    for now in [*steps, {"x": {"other"}}]:
        fleet_of(router, {id_: [ServedModel(name) for name in names] for id_, names in now.items()})
        stayed = {name for id_, names in before.items() if id_ in now for name in names}
        left = {name for id_, names in before.items() if id_ not in now for name in names}
        listed = {name for names in now.values() for name in names}
        gone, before = ((gone | (left - stayed)) - listed), now
    for name in (*NAMES, "other", "none of them"):
        expected = "none ready" if name in gone | declared else "unknown"
        assert found(router, name) == (name if name == "other" else expected)
    router.observations.check(0.0)
    router.observations.check(GONE_S)
    for name in NAMES:
        assert found(router, name) == ("none ready" if name in declared or (keeps and name in gone) else "unknown")


def test_adapters_stand_for_their_base_model() -> None:
    """Those with a name of their own, and SGLang's `base:adapter`; a request without a name for the only one."""
    router = router_with()
    fleet_of(
        router,
        {
            "x": [ServedModel("m", owned_by="vllm"), ServedModel("lora", parent="m", owned_by="vllm")],
            "y": [ServedModel("s", owned_by="sglang")],
        },
    )
    assert router.models.find_expected_base("m") == ""
    fleet_of(router, {"y": [ServedModel("s", owned_by="sglang")]})
    awaited = router.models.find_expected_base
    assert [awaited(name) for name in ("m", "lora", "m:lora", "s:any", None)] == ["m", "m", "", "", "m"]
    fleet_of(router, {})
    assert [awaited(name) for name in ("s:any", "sx:any", None)] == ["s", "", ""]
    assert ExpectedModels().find_base(None) == ""


@pytest.mark.parametrize("keeps", [True, False])
def test_names_without_a_replica_have_a_limit(keeps: bool) -> None:
    """A fleet whose models change for ever leaves no more than so many."""
    expected = ExpectedModels(keeps=keeps)
    for number in range(2 * GONE_MAX):
        expected.on_replica_removed([ServedModel(str(number))], ())
    assert list(expected.bases()) == [str(number) for number in range(GONE_MAX, 2 * GONE_MAX)]
