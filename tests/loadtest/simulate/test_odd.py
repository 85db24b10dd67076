"""Promises of odd fleets: what is odd is seen in the engines, and nothing fails for it."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean, median

import pytest

from loadtest.simulate.engine.capacity import capacity_rps, fleet_kv_tokens
from loadtest.simulate.engine.cluster_spec import ClusterSpec
from loadtest.simulate.engine.machine import Machine
from loadtest.simulate.engine.workload import MODEL, SimRequest
from loadtest.simulate.engine.world import Result, Simulation
from loadtest.simulate.policies import ROWS
from loadtest.simulate.results.race import shorten_workload
from loadtest.simulate.scenarios import odd, unusual_clients
from loadtest.simulate.scenarios.registry import GROUPS, NAMED, ODD, SCENARIOS, loads_of
from loadtest.simulate.scenarios.scenario import Scenario

BLOCK = 64


def run(made: Scenario, row: str = "least_loaded", requests: int = 60) -> tuple[Simulation, Result]:
    """The first requests of a scenario, and the world that they leave."""
    world = Simulation(shorten_workload(made.workload, requests), made.setting, ROWS[row].make)
    return world, world.run()


def turns_of(made: Scenario) -> list[SimRequest]:
    """In the order of their sessions."""
    return [turn for session in made.workload.sessions for turn in session]


def plain(made: Scenario) -> Scenario:
    """The same requests at the same times, on replicas that are alike."""
    return replace(made, setting=replace(made.setting, machines=()))


def test_they_are_part_of_the_claims() -> None:
    """Below saturation and at it; and the groups are all scenarios."""
    assert set(SCENARIOS) == set(NAMED) | set(ODD) == {*GROUPS["named"], *GROUPS["odd"]}
    assert {loads_of(name) for name in ODD} == {("below", "at")}
    assert all(name.startswith("odd_") for name in ODD)


@pytest.mark.parametrize("name", ODD)
def test_each_is_answered(name: str) -> None:
    """For a seed of either half; the same each time, and no two seeds share a prompt."""
    seen = []
    for seed in (1, 6):
        made = ODD[name]("at", seed)
        _, result = run(made)
        assert [sent.failure for sent in result.sent] == [""] * 60
        assert 400 <= made.workload.request_count <= 800
        assert (made.workload.name, made.setting.seed) == (name, seed)
        seen.append({turn.end_key for turn in turns_of(made)})
    assert not seen[0] & seen[1]
    again = ODD[name]("at", 6)
    assert {turn.end_key for turn in turns_of(again)} == seen[1]
    assert [turn.at_s for turn in turns_of(again)] == [turn.at_s for turn in turns_of(made)]


def test_one_cache_is_larger() -> None:
    """Four times as large as each other."""
    world, _ = run(odd.odd_big_kv("below", 1))
    sizes = [replica.kv_tokens for replica in world.replicas.values()]

    assert sizes == [400_000, *[100_000] * 7]
    assert fleet_kv_tokens(world.setting) == sum(sizes)


@pytest.mark.parametrize(
    ("name", "slowness"),
    [("odd_one_fast", (0.5, 1.0)), ("odd_one_slow", (2.0, 1.0)), ("odd_unequal_slow", (1.3, 1.6, 2.0, 3.0, 1.0))],
)
def test_speeds_differ(name: str, slowness: tuple[float, ...]) -> None:
    """The same step takes so many times as long, and the fleet sustains that much more or less."""
    made = ODD[name]("below", 1)
    world, _ = run(made)
    steps_s = [replica.times.mixed_s(100, 0.0, 1, 1) for replica in world.replicas.values()]

    assert [round(step_s / steps_s[-1], 6) for step_s in steps_s[: len(slowness)]] == list(slowness)
    assert len(steps_s) == 8
    turns = turns_of(made)
    all_of = [*slowness, *[1.0] * (8 - len(slowness))]
    alike = capacity_rps(turns, plain(made).setting, BLOCK)
    assert capacity_rps(turns, made.setting, BLOCK) == pytest.approx(alike * sum(1 / each for each in all_of) / 8)


def test_few_slots_have_room() -> None:
    """Requests wait in an engine whose KV cache is mostly free, and with more slots they do not."""

    def first_p90_s(made: Scenario) -> float:
        sent = run(made, requests=400)[1].sent
        return sorted(one.ttft_s for one in sent if one.ttft_s is not None)[9 * len(sent) // 10]

    made = odd.odd_few_slots("at", 1)
    world = Simulation(made.workload, made.setting, ROWS["least_loaded"].make)
    seen: list[tuple[int, int, float]] = []

    def look(_: None) -> None:
        loads = [replica.load() for replica in world.replicas.values()]
        seen.extend((load.running or 0, load.waiting or 0, load.kv_usage or 0.0) for load in loads)
        world.call_at(world.now_s + 1.0, look)

    world.call_at(20.0, look)
    world.run()

    assert max(running for running, _, _ in seen) == 16
    assert sum(running == 16 for running, waiting, _ in seen if waiting) > 100
    assert max(usage for _, waiting, usage in seen if waiting) < 0.5
    assert first_p90_s(plain(made)) < 0.5 < first_p90_s(made)


def test_prompts_have_steps_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """No step of these engines has both a prompt and a decode, and documents are not cut."""
    made = odd.odd_unchunked("at", 1)
    world = Simulation(shorten_workload(made.workload, 100), made.setting, ROWS["least_loaded"].make)
    kinds, longest = set[tuple[bool, bool]](), 0
    for replica in world.replicas.values():
        complete = replica.model.complete

        def looked(step, complete=complete):  # type: ignore[no-untyped-def]  # noqa: ANN001, ANN202
            nonlocal longest
            counts = [count for _, count in step.work or ()]
            kinds.add((bool(counts), step.decodes > 0))
            longest = max([longest, *counts])
            return complete(step)

        monkeypatch.setattr(replica.model, "complete", looked)
    world.run()

    assert kinds == {(True, False), (False, True)}
    assert longest > 10_000


def test_two_replicas_cache_nothing() -> None:
    """They say so, find nothing, and the others do."""
    world, result = run(odd.odd_no_cache_on_two("below", 1), "round_robin", 400)
    loads = [replica.load() for replica in world.replicas.values()]
    found = [load.cache_hit_tokens_total for load in loads]

    assert [load.prefix_caching for load in loads] == [False] * 2 + [True] * 6
    assert found[:2] == [0, 0]
    assert all(found[2:])
    without = {world.setting.name(number) for number in range(2)}
    assert {sent.cached_tokens for sent in result.sent if sent.lease and sent.lease.replica in without} == {0}


def test_far_replicas_answer_later() -> None:
    """A tenth of a second at the least, there and back; tokens and ends come as late as each other."""
    made = odd.odd_far("below", 1)
    far = {made.setting.name(number) for number in range(2)}
    (_, result), (_, near) = run(made, "round_robin", 16), run(plain(made), "round_robin", 16)

    for sent, other in zip(result.sent, near.sent, strict=True):
        assert sent.lease is not None
        assert other.lease is not None
        assert sent.lease.replica == other.lease.replica
    first = [sent for sent in result.sent if sent.lease and sent.lease.replica in far]
    floor_s = made.setting.calibration.times.mixed_s(0, 0.0, 1, 1)
    assert first
    assert all(sent.ttft_s is not None and sent.ttft_s > 0.1 + floor_s for sent in first)
    alone, alone_near = first[0], near.sent[result.sent.index(first[0])]
    assert alone.ttft_s == pytest.approx((alone_near.ttft_s or 0.0) + 0.1)


def test_what_is_on_its_way_from_afar_may_be_unwanted() -> None:
    """Clients that give up while an answer is on its way have given up, and what comes is for nobody."""
    made = odd.odd_far("at", 1)
    setting = replace(made.setting, machines=(Machine(far_s=0.4),) * 8, timeout_s=1.2, patience_s=1.0, retries=1)

    result = Simulation(shorten_workload(made.workload, 200), setting, ROWS["round_robin"].make).run()

    assert {sent.failure for sent in result.sent} == {"timeout"}
    assert any(sent.tries == 2 for sent in result.sent)
    assert any(sent.ttft_s is not None for sent in result.sent)


@pytest.mark.parametrize("row", ["warm", "round_robin", "smg_cache_aware", "aibrix_prefix", "shared_cache"])
def test_models_are_asked_of_those_that_serve_them(row: str) -> None:
    """Three replicas of the smaller kind serve the second model alone, which is asked for three times of ten."""
    made = odd.odd_two_models("below", 1)
    world, result = run(made, row, 200)
    served = {MODEL: set[str](), odd.SECOND_MODEL: set[str]()}
    for sent in result.sent:
        assert not sent.failure
        assert sent.lease is not None
        served[sent.turn.model].add(sent.lease.replica)
    names = [made.setting.name(number) for number in range(8)]

    assert served[odd.SECOND_MODEL] <= set(names[:3])
    assert served[MODEL] <= set(names[3:])
    assert len(served[MODEL]) > 3
    assert {world.replicas[name].kv_tokens for name in names[:3]} == {137_216}
    second = [turn for turn in turns_of(made) if turn.model == odd.SECOND_MODEL]
    assert len(second) / 800 == pytest.approx(0.3, abs=0.05)
    assert fmean(turn.output_tokens for turn in second) > 1.5 * fmean(turn.output_tokens for turn in turns_of(made))
    assert len({turn.chain_root for turn in turns_of(made)}) == 2


def test_a_model_that_is_sustained_less_limits_both() -> None:
    """Capacity is that of the one whose replicas are full first, at its share of the requests."""
    made = odd.odd_two_models("below", 1)
    turns = turns_of(made)
    alone = [
        capacity_rps(each, setting, BLOCK) * len(turns) / len(each)
        for model, setting in (
            (MODEL, ClusterSpec(replicas=5)),
            (odd.SECOND_MODEL, replace(made.setting, replicas=3)),
        )
        for each in [[turn for turn in turns if turn.model == model]]
    ]

    assert capacity_rps(turns, made.setting, BLOCK) == pytest.approx(min(alone))


def test_a_cold_replica_joins_a_hot_prefix() -> None:
    """In mid-run: it computes the prefix that all others have, and takes its part of the rest."""
    made = odd.odd_cold_join("below", 1)
    (fault,) = made.setting.faults
    _, result = run(made, requests=800)
    there = [sent for sent in result.sent if sent.lease and sent.lease.replica == made.setting.name(5)]

    assert len({tuple(turn.engine_keys[: 24_000 // BLOCK]) for turn in turns_of(made)}) == 1
    assert fault.kind == "join"
    assert 0.3 * turns_of(made)[-1].at_s < fault.at_s < 0.5 * turns_of(made)[-1].at_s
    assert min(sent.due_s for sent in there) >= fault.at_s
    assert len(there) > 40
    assert there[0].cached_tokens == 0 < there[-1].cached_tokens


def test_speeds_and_answers_drift() -> None:
    """Three replicas become twice as slow by steps and are what they were in the end; a fourth is faster for a time.
    The last answers are five times as long as the first."""
    made = odd.odd_drift("below", 1)
    last_s = turns_of(made)[-1].at_s
    world = Simulation(made.workload, made.setting, ROWS["round_robin"].make)
    seen: dict[float, list[float]] = {}

    def look(share: float) -> None:
        times = [replica.times.factor for replica in world.replicas.values()]
        seen[share] = times[:5]

    for share in (0.1, 0.22, 0.32, 0.5, 0.7, 0.99):
        world.call_at(share * last_s, look, share)
    world.run()

    assert seen[0.1] == [1.0] * 5
    assert seen[0.22] == [1.3, 1.3, 1.3, 1.0, 1.0]
    assert seen[0.32] == [1.6, 1.6, 1.6, 0.6, 1.0]
    assert seen[0.5] == [2.0, 2.0, 2.0, 0.6, 1.0]
    assert seen[0.7] == [1.5, 1.5, 1.5, 0.6, 1.0]
    assert seen[0.99] == [1.0] * 5
    tokens = [turn.output_tokens for turn in turns_of(made)]
    assert fmean(tokens[-80:]) > 3.5 * fmean(tokens[:80])


def test_bursts_come_at_one_moment() -> None:
    """16 to 48 requests of at most three groups, and nothing between two of them."""
    bursts: dict[float, list[SimRequest]] = {}
    for turn in turns_of(unusual_clients.odd_bursts("at", 1)):
        bursts.setdefault(turn.at_s, []).append(turn)
    whole = list(bursts.values())[:-1]

    assert all(16 <= len(burst) <= 48 for burst in whole)
    assert all(len({turn.request.namespace for turn in burst}) <= 3 for burst in whole)


def test_thoughts_are_long() -> None:
    """10,000 to 30,000 tokens, as many between 10,000 and 17,321 as over; clients wait for them."""
    made = unusual_clients.odd_thinking("at", 1)
    tokens = [turn.output_tokens for turn in turns_of(made)]
    mixed = unusual_clients.odd_thinking_chats("at", 1)
    long = [turn for turn in turns_of(mixed) if turn.output_tokens > 350]

    assert 10_000 <= min(tokens) <= max(tokens) <= 30_000
    assert median(tokens) == pytest.approx(17_321, rel=0.1)
    assert {turn.prompt_tokens for turn in turns_of(made)} == {400 * pieces for pieces in range(3, 11)}
    assert len(long) / 800 == pytest.approx(0.15, abs=0.04)
    assert min(turn.output_tokens for turn in long) >= 10_000
    assert made.setting.timeout_s == mixed.setting.timeout_s > 1_000


def test_chats_are_two_thirds_of_those_at_work() -> None:
    """Of the first sessions one of three is an agent's, of the half that the seed uses; chats are short, and last."""
    made = unusual_clients.odd_chats_among_agents("at", 6)
    sessions, active = made.workload.sessions, made.workload.active
    agents = [session for session in sessions[:active] if session[0].kin is not None]
    chats = [session for session in sessions[:active] if session[0].kin is None]

    assert len(chats) == 2 * len(agents) == 2 * active / 3
    assert all(session[0].kin is not None for session in sessions[active:])
    assert max(turn.prompt_tokens for session in chats for turn in session) <= 3_200
    assert fmean(turn.prompt_tokens for session in agents for turn in session) > 20_000
    _, result = run(made, "round_robin", 800)
    asked = [sent.turn.kin is None for sent in result.sent]
    assert 0.4 < fmean(asked) < 0.95
    tuned = unusual_clients.odd_chats_among_agents("at", 1)
    names = [{turn.session for turn in turns_of(each) if turn.kin is not None} for each in (made, tuned)]
    assert not names[0] & names[1]


def test_what_routers_have_is_old_or_little() -> None:
    """Probes every 10 s; two replicas."""
    assert unusual_clients.odd_stale_metrics("at", 1).setting.probe_interval_s == 10.0
    assert unusual_clients.odd_two_replicas("at", 1).setting.replicas == 2
