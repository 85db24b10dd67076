"""Several names of one model are one; other models, and adapters, stay apart."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.placement.placement_request import PlacementRequest
from router.core.prompts.block_keys import chain_of, ring_key
from router.core.prompts.cache_identity import CacheIdentities
from router.core.types.replicas import Replica, ServedModel
from tests.core.placement.placing import MODEL, World, chat, words
from tests.support.examples import examples

LORA = ServedModel("lora", root="/loras/x", parent="a")


def rows(*names: str, root: str | None = "/models/x") -> list[ServedModel]:
    """What a replica says that serves one model under these names."""
    return [ServedModel(name, root=root) for name in names]


def known(*served: list[ServedModel]) -> CacheIdentities:
    """Names of a fleet whose replicas serve this."""
    names = CacheIdentities()
    for n, each in enumerate(served):
        names.observe(f"r{n}", each)
    return names


def test_names_of_one_model_share_a_cache() -> None:
    """A conversation that goes on under the model's other name goes on where it is, at the same place on the ring, and
    what was learned of its tokens holds."""
    world = World("abc")
    for id_ in "abc":
        world.router.observations.observe_models(id_, [*rows("a", "b"), LORA])
    known_as = world.router.models.names.cache_identity
    asks = [chat(words(1, 2_000)), chat(words(1, 2_000), "yes", words(2, 200))]
    placed = []
    for ask, name in zip(asks, "ab", strict=True):
        chain = chain_of(ask, known_as(name))
        key = ring_key(ask, chain, None, b"")
        lease = world.router.route(PlacementRequest(ask, name, chain, key), world.now_s)
        world.first_token(lease, after_s=1.0)
        world.finish(lease)
        placed.append((lease.replica, key))
    assert placed[0] == placed[1]
    assert lease.cached_tokens > 1_800
    world.router.models.tokens("b").observe(90_000, 30_000)
    assert world.router.models.tokens("a").bytes_per_token == world.router.models.tokens("b").bytes_per_token != 4.0
    assert known_as("lora") == "lora"
    assert world.router.models.tokens("lora").bytes_per_token == 4.0


def test_a_path_here_and_a_hub_there_is_one_model() -> None:
    """What `root` says is compared within a replica: one started from a path and one from a hub's name agree that both
    names are one, and a name alone stays what it is whatever its roots are."""
    both = known(rows("a", "b"), rows("a", "b", root="org/x"))
    assert both.cache_identity("a") == both.cache_identity("b")
    alone = known(rows("a"), rows("a", root="org/x"), rows("c", root="org/x"))
    assert [alone.cache_identity(name) for name in "ac"] == ["a", "c"]


def test_whoever_tells_two_names_apart_is_believed() -> None:
    """A chain is made before its replica is known: what is two models on one replica is two on all."""
    parted = known(rows("a", "b"), [*rows("a"), *rows("b", root="/models/y")])
    assert [parted.cache_identity(name) for name in "ab"] == ["a", "b"]
    parted.forget("r1")
    assert parted.cache_identity("a") == parted.cache_identity("b")


def test_an_adapter_is_apart_from_its_base_and_from_others() -> None:
    """Whatever path it was loaded from; and a name that is an adapter anywhere is nobody's other name."""
    adapters = [ServedModel(name, root="/models/x", parent="a") for name in ("l1", "l2")]
    names = known([*rows("a", "b"), *adapters])
    assert [names.cache_identity(name) for name in ("l1", "l2")] == ["l1", "l2"]
    names.observe("r1", [ServedModel("b", root="/loras/b", parent="z"), *rows("z", root="/models/z")])
    assert [names.cache_identity(name) for name in "ab"] == ["a", "b"]


def test_a_new_name_does_not_make_a_fleet_cold() -> None:
    """A rollout that adds a name leaves the name that stands for the model, though a router that begins then would
    choose the smaller."""
    names = known(rows("m"), rows("m"))
    names.observe("r0", rows("alias", "m"))
    assert [names.cache_identity(name) for name in ("m", "alias")] == ["m", "m"]
    names.observe("r1", rows("alias", "m"))
    assert [names.cache_identity(name) for name in ("m", "alias")] == ["m", "m"]
    assert known(rows("alias", "m")).cache_identity("m") == "alias"


def test_engines_that_do_not_tell_a_root_serve_what_they_name() -> None:
    """Without `root` a name is its own; another row may name it as its root."""
    names = known([ServedModel("a"), ServedModel("b"), ServedModel("c", root="a")])
    assert [names.cache_identity(name) for name in "abc"] == ["a", "b", "a"]


REPLICAS = st.dictionaries(
    st.sampled_from("abcd"), st.tuples(st.sampled_from([None, "x", "y"]), st.sampled_from([None, None, "p"]))
)


@given(changes=st.lists(st.tuples(st.sampled_from(["r0", "r1", "r2"]), st.none() | REPLICAS), max_size=12))
@settings(deadline=None, max_examples=examples(300))
def test_names_that_are_one_are_one_everywhere(
    changes: list[tuple[str, dict[str, tuple[str | None, str | None]] | None]],
) -> None:
    """However replicas come, change and leave: two names with one stand-in are never two models on one replica, the
    stand-in is served, and what is remembered is what a fresh look at the fleet groups alike."""
    names, fleet = CacheIdentities(), {}
    for replica, served in changes:
        if served is None:
            fleet.pop(replica, None)
            names.forget(replica)
            continue
        fleet[replica] = [ServedModel(name, root=root, parent=parent) for name, (root, parent) in served.items()]
        names.observe(replica, fleet[replica])
    for table in fleet.values():
        means: dict[str, object] = {}
        for row in table:
            root = (row.root or row.name, row.name if row.parent else "")
            assert means.setdefault(names.cache_identity(row.name), root) == root
    fresh = CacheIdentities()
    for replica, table in fleet.items():
        fresh.observe(replica, table)
    all_names = {row.name for table in fleet.values() for row in table}
    for one in all_names:
        assert names.cache_identity(one) in all_names
        for other in all_names:
            same = names.cache_identity(one) == names.cache_identity(other)
            assert same == (fresh.cache_identity(one) == fresh.cache_identity(other))


def test_models_of_a_replica_that_left_are_forgotten() -> None:
    """And nothing of it is kept."""
    world = World("ab")
    world.router.observations.observe_models("a", rows(MODEL, "alias"))
    world.router.observations.observe_models("b", rows(MODEL, "alias"))
    assert world.router.models.names.others
    world.router.replace([Replica("b")])
    world.router.observations.observe_models("b", [ServedModel(MODEL)])
    assert not world.router.models.names.others
