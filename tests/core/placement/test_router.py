from __future__ import annotations

import pytest

from router.core.dialects import OPENAI
from router.core.fleet.models import NoReplicaReady, UnknownModel
from router.core.placement.disaggregator import Disaggregator
from router.core.prompts import block_keys
from router.core.types.disagg_types import KvConnector
from router.core.types.placements import Confidence, EndReason, PlacementReason
from router.core.types.replicas import Load, Replica, ServedModel
from router.core.types.requests import RequestSpec
from tests.core.placement.placing import MODEL, World, chat, words
from tests.support.records import replace

LONG = words(1, 8_000)


def test_a_cold_prompt_says_so() -> None:
    """Nobody holds anything: reason cold, nothing predicted, every candidate on the receipt."""
    receipt = World().place(chat(LONG)).receipt
    assert (receipt.reason, receipt.predicted_cached_tokens, receipt.grade) == (
        PlacementReason.COLD,
        0,
        Confidence.ESTIMATED,
    )
    assert [c.id for c in receipt.candidates] == list("abcd")
    assert receipt.prompt_tokens == pytest.approx(8_000, rel=0.01)


def test_the_next_turn_goes_to_whoever_holds_the_last() -> None:
    """Six turns of a conversation stay on one replica, whatever the ring says, and what is held grows."""
    world, turns = World(), [LONG]
    home = world.serve(chat(*turns)).replica
    predicted = []
    for turn in range(1, 6):
        turns += [words(100 + turn, 300), words(200 + turn, 300)]
        lease = world.serve(chat(*turns), session=str(turn))
        assert (lease.replica, lease.receipt.reason) == (home, PlacementReason.WARM)
        predicted.append(lease.cached_tokens)
        assert lease.prompt_tokens - lease.cached_tokens < 1_000
    assert predicted == sorted(predicted)


@pytest.mark.parametrize("ids", ["ab", "abcd"])
def test_a_long_queue_spills(ids: str) -> None:
    """When waiting at the holder costs more than computing again, another replica computes it again."""
    world = World(ids)
    home = world.serve(chat(LONG)).replica
    for n in range(8):
        world.place(chat(words(50 + n, 8_000)), only=home)
    lease = world.place(chat(LONG, "yes", "and?"))
    assert lease.receipt.reason is PlacementReason.SPILL
    assert lease.replica != home


def test_a_short_prompt_may_go_anywhere() -> None:
    """A few hundred tokens held are no reason against the ring: newcomers spread, and the receipt says tie."""
    world, system = World(), words(9, 300)
    home = world.serve(chat("x", system=system)).replica
    leases = [world.place(chat(words(n, 400), system=system), session=str(n)) for n in range(10, 30)]
    reasons = {lease.receipt.reason for lease in leases if lease.replica != home}
    assert PlacementReason.TIE in reasons
    assert len({lease.replica for lease in leases}) == 4


def test_short_conversations_stay_where_they_are() -> None:
    """Each of twelve short conversations keeps its replica for six turns, whatever session it claims to be."""
    world, places = World(), dict[int, set[str]]()
    for turn in range(6):
        for n in range(12):
            said = [words(n * 100 + t, 30) for t in range(2 * turn + 1)]
            places.setdefault(n, set()).add(world.serve(chat(*said), session=f"{turn} {n}").replica)
    assert all(len(ids) == 1 for ids in places.values())
    assert len(set.union(*places.values())) > 2


def test_one_candidate_is_the_only_one() -> None:
    """Reason only: no choice was made."""
    assert World("a").place(chat(LONG)).receipt.reason is PlacementReason.ONLY


def test_a_request_that_belongs_to_a_replica_goes_there() -> None:
    """`only` is kept whatever it costs; if that replica is not fit there is none."""
    world = World()
    for _ in range(20):
        assert world.place(chat(LONG), only="c").replica == "c"
    world.router.fleet.observe_health("c", ok=False, proof=True)
    with pytest.raises(NoReplicaReady):
        world.place(chat(LONG), only="c")


def test_a_retry_goes_elsewhere() -> None:
    """Replicas tried before are excluded; with none left there is no replica."""
    world = World()
    home = world.serve(chat(LONG)).replica
    retry = world.place(chat(LONG), exclude=frozenset({home}))
    assert retry.replica != home
    assert retry.receipt.reason is PlacementReason.RETRY
    with pytest.raises(NoReplicaReady):
        world.place(chat(LONG), exclude=frozenset("abcd"))


def test_a_retry_leaves_the_server() -> None:
    """Where one rank failed another server is asked; another rank of the same one only where no other server is."""
    world = World(["http://a#dp0", "http://a#dp1", "http://a#dp2", "http://b"])
    for failed in ("http://a#dp0", "http://a#dp1", "http://a#dp2"):
        for text in ("x" * 2_000, "y" * 2_000, "z" * 2_000):
            assert world.place(chat(text), exclude=frozenset({failed})).replica == "http://b"
    assert world.place(chat(LONG), exclude=frozenset({"http://a#dp0", "http://b"})).replica in (
        "http://a#dp1",
        "http://a#dp2",
    )


def test_a_policy_blind_to_caches_says_so() -> None:
    """Matching still runs, so that hit rates compare: predicted tokens are there, the reason is policy."""
    world = World("ab", "round_robin")
    leases = [world.serve(chat(LONG)) for _ in range(4)]
    assert [lease.replica for lease in leases] == list("abab")
    assert {lease.receipt.reason for lease in leases} == {PlacementReason.POLICY}
    assert leases[3].receipt.predicted_cached_tokens > 7_000


def test_only_replicas_that_serve_the_model_are_asked() -> None:
    """Also for an adapter loaded on one of them; a request for any model may go anywhere."""
    world = World()
    world.router.observations.observe_models("b", [ServedModel(MODEL), ServedModel("lora", parent=MODEL)])
    assert world.place(chat(LONG), model="lora").replica == "b"
    assert {world.place(RequestSpec(None), model=None, body_tokens=5_000).replica for _ in range(12)} == set("abcd")
    world.router.observations.observe_models("b", [])
    with pytest.raises(NoReplicaReady):
        world.place(chat(LONG), model="lora")


def test_model_names_are_resolved() -> None:
    """A known name stands for itself; none at all for the one base model; unknown ones name the known."""
    world = World("ab")
    resolve = world.router.models.resolve
    world.router.observations.observe_models("a", [ServedModel(MODEL), ServedModel("lora", parent=MODEL)])
    assert (resolve("lora"), resolve(MODEL), resolve(None)) == ("lora", MODEL, MODEL)
    with pytest.raises(UnknownModel) as caught:
        resolve("gpt")
    assert caught.value.known == ["lora", MODEL]
    world.router.observations.observe_models("b", [ServedModel("other")])
    with pytest.raises(UnknownModel):
        resolve(None)
    for id_ in "ab":
        world.router.fleet.observe_health(id_, ok=False, proof=True)
    with pytest.raises(NoReplicaReady):
        resolve(MODEL)


def test_a_prefix_under_way_counts_as_held() -> None:
    """A second request of the same prompt follows the first before that has its first token."""
    world = World()
    first = world.place(chat(LONG))
    world.now_s += 0.5
    second = world.place(chat(LONG, "ok", "more"), session="another")
    assert second.replica == first.replica
    assert second.cached_tokens > 7_000


@pytest.mark.parametrize("tokens", [8_000, 20_000])
def test_a_hot_prefix_replicates(tokens: int) -> None:
    """Many requests at once behind one long prefix: every replica gets some, and no queue is longer than another by
    more than it would have taken to compute the prefix there, twice over."""
    world, prefix = World(), words(3, tokens)
    leases = [world.place(chat(words(1_000 + n, 500), system=prefix), session=str(n)) for n in range(120)]
    counts = [sum(lease.replica == id_ for lease in leases) for id_ in "abcd"]
    assert min(counts) > 8
    pending_ms = [pending for _, _, pending in world.in_use()]
    prefix_ms = world.router.fleet.means.common.prefill.model.ms(tokens, 0)
    assert max(pending_ms) - min(pending_ms) < 2 * prefix_ms


def test_a_failed_burst_is_not_believed() -> None:
    """Five requests of one prompt that all fail before their first token leave nothing behind."""
    world = World()
    leases = [world.place(chat(LONG), only="a") for _ in range(5)]
    assert world.depth(chat(LONG), "a") == 62
    for lease in leases:
        world.finish(lease, EndReason.FAILED)
    assert world.depth(chat(LONG), "a") == 0


@pytest.mark.parametrize(
    ("ending", "stream", "first_token", "held"),
    [
        (EndReason.OK, True, True, True),
        (EndReason.OK, False, False, True),
        (EndReason.FAILED, True, False, False),
        (EndReason.FAILED, True, True, True),
        (EndReason.REFUSED_BY_ENGINE, True, False, False),
        (EndReason.CLIENT_LEFT, True, False, False),
        (EndReason.CLIENT_LEFT, True, True, True),
        (EndReason.CLIENT_LEFT, False, False, True),
    ],
)
def test_what_was_computed_is_believed(ending: EndReason, stream: bool, first_token: bool, held: bool) -> None:
    """Blocks count as held once a first token proved them, or where it may have come unseen."""
    world = World("a")
    lease = world.place(replace(chat(LONG), stream=stream))
    if first_token:
        world.first_token(lease, after_s=0.1)
    world.finish(lease, ending)
    assert (world.depth(chat(LONG), "a") > 0) is held


def test_a_failure_leaves_what_was_held_before() -> None:
    """Only what the failed request alone added goes."""
    world = World("a")
    world.serve(chat(LONG))
    world.finish(world.place(chat(LONG, words(2, 2_000), "go on")), EndReason.FAILED)
    assert world.depth(chat(LONG), "a") == 62
    assert world.depth(chat(LONG, words(2, 2_000), "go on"), "a") == 62


def test_a_restarted_engine_holds_nothing() -> None:
    """Counters that go back, or a replica told to be forgotten: its blocks are gone, those of others stay."""
    world = World("ab")
    for id_ in "ab":
        world.serve(chat(LONG), only=id_)
        world.router.observations.observe_load(id_, Load(prompt_tokens_total=9_000))
    world.router.observations.observe_load("a", Load(prompt_tokens_total=10))
    assert (world.depth(chat(LONG), "a"), world.depth(chat(LONG), "b")) == (0, 62)
    world.router.observations.forget("b")
    assert world.depth(chat(LONG), "b") == 0


def test_news_of_unknown_replicas_is_ignored() -> None:
    """A probe that ends after its replica left changes nothing."""
    world = World("a")
    assert not world.router.fleet.observe_health("gone", ok=True)
    world.router.observations.observe_models("gone", [ServedModel("x")])
    world.router.observations.observe_load("gone", Load(kv_tokens_max=5))
    world.router.observations.forget("gone")
    assert world.router.fleet.model_names() == {MODEL}


def test_who_leaves_takes_its_blocks_along() -> None:
    """A replica that left and came back holds nothing, and old leases on it may still be finished."""
    world = World("ab")
    world.serve(chat(LONG), only="b")
    open_ = world.place(chat(LONG), only="b")
    world.router.replace([Replica("a")])
    world.first_token(open_)
    world.finish(open_)
    assert world.router.replace([Replica("a"), Replica("b")]) == (["b"], [])
    world.finish(open_)
    assert world.depth(chat(LONG), "b") == 0
    assert world.in_use() == [(0, 0, 0.0)] * 2


def test_a_prompt_of_token_ids_is_sized_exactly() -> None:
    """Ids need no learned ratio, and share nothing with text."""
    ask = OPENAI.parse("/v1/completions", b'{"model":"m","prompt":' + str(list(range(1_000))).encode() + b"}")
    world = World("a")
    first = world.serve(ask)
    again = world.place(ask)
    assert (first.prompt_tokens, first.cached_tokens, again.cached_tokens) == (
        1_000,
        0,
        7 * block_keys.BLOCK_BYTES // 4,
    )
    assert again.prompt.text_bytes == 0


def test_an_unknown_prompt_is_sized_by_its_body() -> None:
    """Nothing is matched and nothing remembered; the work still counts."""
    world = World("ab")
    lease = world.place(RequestSpec(MODEL, output_tokens_max=7), body_tokens=2_000)
    assert (lease.prompt_tokens, lease.prompt.keys, lease.prompt.end_key, lease.prompt.unshared_tokens) == (
        2_000,
        [],
        None,
        2_000,
    )
    world.finish(lease, events=5)
    assert world.router.index.keys == len(world.router.answers) == 0
    assert world.in_use()[0][1] + world.in_use()[1][1] == 0


def test_one_replica_serves_each_request_without_a_disaggregator() -> None:
    """Connectors and pairs are then unknown, whatever is reported, and nothing is kept for them."""
    router = World("ab").router
    router.disaggregator.set_connector("a", KvConnector.SGLANG, "a:8998")
    assert type(router.disaggregator) is Disaggregator
    assert router.disaggregator.connector_of("a") is None
    assert router.takes_whole(router.members[0])
    assert (
        router.disaggregator.pairs_to_warm(0.0),
        router.disaggregator.pair_counts(0.0),
        router.disaggregator.list_pairs(9, 0.0),
    ) == ([], {}, ([], 0))
    assert (router.fleet.observers, router.fleet.stage_only, router.fleet.waits_for_peer) == ([], set(), None)
