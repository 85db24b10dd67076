"""What requests themselves say of a replica: failing fast, and being slow where nothing streams."""

from router.core.fleet.breaker import BACKOFF_MAX_S, BACKOFF_MIN_S, BREAKER_FAILURES, Breaker
from router.core.fleet.lease import Lease
from router.core.placement.placement_request import PlacementRequest
from router.core.placement.router import Router
from router.core.prompts.block_keys import chain_of
from router.core.types.placements import EndReason, Outcome, Usage
from router.core.types.replicas import ServedModel
from router.core.types.requests import Prompt, RequestSpec
from tests.core.ready import router_of

IDS = ["http://a", "http://b", "http://c", "http://d"]


def test_rest_after_failures_in_a_row() -> None:
    """Three failures in a row open the breaker, one success between them does not."""
    breaker = Breaker()
    for _ in range(BREAKER_FAILURES - 1):
        assert not breaker.count_failure(0.0)
    breaker.close()
    for _ in range(BREAKER_FAILURES - 1):
        assert not breaker.count_failure(0.0)
    assert breaker.allows(0.0)
    assert breaker.count_failure(0.0)
    assert not breaker.allows(BACKOFF_MIN_S / 2)


def test_one_trial_at_a_time() -> None:
    """After its rest a replica gets one request at a time until one succeeds; failures double the rest, to a limit."""
    breaker, now_s, rests = Breaker(), 0.0, []
    for _ in range(BREAKER_FAILURES):
        breaker.count_failure(now_s)
    for lease in range(10):
        rests.append(breaker.backoff_s)
        now_s += breaker.backoff_s
        assert breaker.allows(now_s)
        breaker.trial = lease
        assert not breaker.allows(now_s)
        breaker.trial = None
        breaker.count_failure(now_s)
    assert rests[:4] == [BACKOFF_MIN_S, 2 * BACKOFF_MIN_S, 4 * BACKOFF_MIN_S, 8 * BACKOFF_MIN_S]
    assert max(rests) == BACKOFF_MAX_S
    assert breaker.close()
    assert breaker.allows(now_s)


def test_many_failures_at_once_are_one_rest() -> None:
    """Requests that were under way when a replica broke do not double its rest."""
    breaker = Breaker()
    for _ in range(50):
        breaker.count_failure(1.0)
    assert breaker.backoff_s == BACKOFF_MIN_S


def place(router: Router, now_s: float, key: str = "k") -> Lease:
    """Place a request without a known prompt that does not stream."""
    return router.route(PlacementRequest(RequestSpec("m"), "m", None, key, body_tokens=1_000), now_s)


def fail(router: Router, id_: str, times: int, now_s: float) -> None:
    """So many requests fail there."""
    for _ in range(times):
        lease = router.route(PlacementRequest(RequestSpec("m"), "m", None, "k"), now_s, only=id_)
        router.finish(lease, Outcome(EndReason.FAILED), now_s)


def test_who_does_not_rest_gets_everything() -> None:
    """With three of four failing the fourth gets all but trials; when all fail, all are tried, and nobody is told that
    none is there."""
    router = router_of(IDS)
    for id_ in IDS[:3]:
        fail(router, id_, BREAKER_FAILURES, 0.0)
    assert {place(router, 0.1, str(n)).replica for n in range(40)} == {IDS[3]}
    assert router.fitness.panics == 0
    assert {place(router, 1.1, str(n)).replica for n in range(40)} == set(IDS)
    assert [len(router.fleet.members[id_].leases) for id_ in IDS[:3]] == [1, 1, 1]
    fail(router, IDS[3], BREAKER_FAILURES, 1.2)
    for id_ in IDS[:3]:
        fail(router, id_, 1, 1.2)
    assert {place(router, 1.3, str(n)).replica for n in range(40)} == set(IDS[:3])  # the last has a queue
    assert router.fitness.panics >= 40
    lonely = router_of(IDS[:1])
    fail(lonely, IDS[0], BREAKER_FAILURES, 0.0)
    assert place(lonely, 0.1).replica == IDS[0]


def test_slow_replica_without_streams() -> None:
    """Where nothing streams, a replica that leaves its requests unanswered gets fewer and fewer."""
    router, now_s, sent = router_of(IDS), 0.0, dict.fromkeys(IDS, 0)
    open_leases: list[tuple[float, Lease]] = []
    for n in range(400):
        now_s += 0.1
        for end_s, lease in [entry for entry in open_leases if entry[0] <= now_s]:
            open_leases.remove((end_s, lease))
            router.finish(lease, Outcome(EndReason.OK), now_s)
        lease = place(router, now_s, str(n))
        sent[lease.replica] += 1
        open_leases.append((now_s + (30.0 if lease.replica == IDS[0] else 1.0), lease))
    assert sent[IDS[0]] < 0.5 * min(sent[id_] for id_ in IDS[1:])


def test_several_names_of_one_model_are_no_choice() -> None:
    """A request that names no model is served where all names mean one model, as engines have it."""
    router = router_of(IDS[:1])
    router.observations.observe_models(IDS[0], [ServedModel("m", root="/x"), ServedModel("alias", root="/x")])
    assert router.models.resolve(None) == "alias"


def test_a_lying_count_does_not_shrink_a_conversation() -> None:
    """A past answer that claims one token for kilobytes of prompt does not make the next turn look like nothing."""
    router = router_of(IDS[:1])
    text = b"x" * 8_000
    for turns, spans in ((1, ()), (2, ((8_000, 8_010),))):
        ask = RequestSpec("m", Prompt(text + b"y" * 10 * (turns - 1), 8_000, spans))
        lease = router.route(PlacementRequest(ask, "m", chain_of(ask, "m"), "k"), float(turns))
        router.finish(lease, Outcome(EndReason.OK, Usage(1, 1)), turns + 0.5)
    assert lease.prompt_tokens > 1_000
