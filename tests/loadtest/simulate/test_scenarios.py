"""Promises of the simulation's workloads: what they ask, of whom, how much at a time."""

from __future__ import annotations

import json
import random
from itertools import pairwise
from pathlib import Path

import pytest

from loadtest.common.runs import merged_runs
from loadtest.common.traces import Request, shipped_trace
from loadtest.simulate.engine.capacity import CACHE_SHARE, capacity_rps, fleet_kv_tokens, pooled_hits
from loadtest.simulate.engine.cluster_spec import ClusterSpec, SettingError
from loadtest.simulate.engine.workload import MODEL, SimRequest, Workload, prepare
from loadtest.simulate.engine.world import Simulation
from loadtest.simulate.scenarios import contention, generated, recorded
from loadtest.simulate.scenarios.registry import SCENARIOS, loads_of
from loadtest.simulate.scenarios.scenario import CLAIM_SEEDS, COMMON_LOADS, LOADS, TUNE_SEEDS
from router.core.placement.policies import POLICIES
from router.core.prompts import block_keys
from router.core.types.requests import Prompt, RequestSpec

BLOCK_TOKENS = 64


def _turns(workload: Workload) -> list[SimRequest]:
    return [turn for session in workload.sessions for turn in session]


@pytest.mark.parametrize("engine_block", [16, 64])
def test_keys_are_the_routers_and_the_engines(engine_block: int) -> None:
    """Keys made on from the turn before are those that router and engine make of the whole prompt."""
    rng = random.Random(1)
    requests = []
    for _ in range(60):
        size, common = rng.randint(1, 3_000), rng.randint(0, 40)
        runs = merged_runs(
            [(0, common), (100 * rng.randint(1, 3), 1 + size // 64)] if common else [(7, 1 + size // 64)]
        )
        tokens = min(size, 64 * sum(count for _, count in runs))
        cuts = (rng.randint(1, tokens),) if rng.random() < 0.7 else ()
        requests.append(Request(0.0, 0.0, tokens, 1, "n", 64, runs, "tail", cuts))

    for turn in prepare((("s", each) for each in requests), engine_block, output_tokens_max=1):
        text = turn.request.text().encode()
        known = block_keys.chain_of(RequestSpec(model=MODEL, prompt=Prompt(text, turn.first_user_bytes)), MODEL)
        assert known is not None
        assert (turn.chain.tolist(), turn.chain_root) == (known.keys, known.root)
        assert (turn.end_key, turn.first_user_key) == (known.end_key, known.first_user_key)
        root = block_keys.token_root("", b"", engine_block)
        assert turn.engine_keys.tolist() == block_keys.token_chain(text, engine_block, root)


@pytest.mark.long
@pytest.mark.parametrize("name", ["mooncake", "claude_code"])
def test_halves_are_disjoint(name: str) -> None:
    """No session or conversation that is tuned on is in a claim."""

    def sessions(seed: int) -> set[str]:
        return {turn.session.partition("#")[0] for turn in _turns(SCENARIOS[name]("at", seed).workload)}

    tuned, claimed = sessions(TUNE_SEEDS[0]), sessions(CLAIM_SEEDS[0])

    assert tuned
    assert claimed
    assert not tuned & claimed


def test_all_data_is_in_a_half() -> None:
    """Each conversation and each session is in one half, and the halves are about as large."""
    trace = shipped_trace("claude_code_sessions")
    names = [session.name for session in trace.sessions]
    names += list(recorded.conversations(shipped_trace("mooncake_conversation_whole")))

    tuned = sum(recorded.in_half(name, TUNE_SEEDS[0]) for name in names)
    claimed = sum(recorded.in_half(name, CLAIM_SEEDS[0]) for name in names)

    assert tuned + claimed == len(names)
    assert tuned / len(names) == pytest.approx(0.5, abs=0.05)


def test_open_arrivals_are_the_load() -> None:
    """Requests come as often as the scenario says, and loads are as far apart as their shares."""
    loads = {}
    for load in COMMON_LOADS:
        scenario = generated.working_set_3x(load, 3)
        turns = _turns(scenario.workload)
        assert len(turns) / turns[-1].at_s == pytest.approx(scenario.load, rel=0.1)
        loads[load] = scenario.load / LOADS[load]

    assert loads["below"] == pytest.approx(loads["at"])
    assert loads["above"] == pytest.approx(loads["at"])


def test_working_set_is_three_times_the_caches() -> None:
    """The prefixes asked for hold three times what the caches do: one cache for all would find about a third."""
    scenario = generated.working_set_3x("at", 3)
    turns = _turns(scenario.workload)
    found = pooled_hits(turns, fleet_kv_tokens(scenario.setting), BLOCK_TOKENS)
    groups = {turn.request.namespace for turn in turns}

    assert len(groups) * 12_000 > 2 * fleet_kv_tokens(scenario.setting)
    assert sum(found) / sum(turn.prompt_tokens for turn in turns) < 0.4


@pytest.mark.long
def test_capacity_is_where_queues_begin() -> None:
    """With nothing to find, a fleet keeps up at 0.6 of its capacity, and at 1.4 the queue grows until the end."""
    last: dict[str, float] = {}
    for load in ("below", "above"):
        scenario = generated.all_unique(load, 2)
        sent = Simulation(scenario.workload, scenario.setting, POLICIES["least_loaded"]).run().sent
        tail = sorted(each.ttft_s or 300.0 for each in sent[-200:])
        last[load] = tail[100]

    assert last["below"] < 1.0
    assert last["above"] > 5.0


def test_capacity_grows_with_the_fleet() -> None:
    """Twice the replicas do twice the work where nothing is shared, and more where caches are what is short."""
    unique = _turns(generated.all_unique("at", 2).workload)
    shared = _turns(generated.working_set_3x("at", 2).workload)
    four, eight = ClusterSpec(replicas=4), ClusterSpec(replicas=8)

    assert capacity_rps(unique, eight, BLOCK_TOKENS) == pytest.approx(2 * capacity_rps(unique, four, BLOCK_TOKENS))
    assert capacity_rps(shared, eight, BLOCK_TOKENS) > 2.05 * capacity_rps(shared, four, BLOCK_TOKENS)


def test_pooled_cache_forgets_the_oldest() -> None:
    """One cache finds what was asked lately, and nothing of what its size has pushed out."""
    prompts = [Request(0.0, 0.0, 6_400, 1, f"n{i}", 64, ((0, 100),)) for i in (0, 1, 0, 2, 1)]
    turns = prepare((("s", each) for each in prompts), BLOCK_TOKENS, output_tokens_max=1)

    found = pooled_hits(turns, 13_000, BLOCK_TOKENS)

    assert [tokens > 5_000 for tokens in found] == [False, False, True, False, False]
    assert 0 < CACHE_SHARE < 1


def test_mooncake_keeps_its_waits() -> None:
    """Conversations are moved, not squeezed: the wait between two turns is as recorded, over a minute in the median."""
    waits, last, ratios = [], dict[str, SimRequest](), []
    for turn in _turns(recorded.mooncake("above", 1).workload):
        if (before := last.get(turn.session)) is not None:
            waits.append(turn.at_s - before.at_s)
            ratios.append(waits[-1] - (turn.request.at_s - before.request.at_s))
        last[turn.session] = turn

    assert sorted(waits)[len(waits) // 2] > 60
    assert ratios == pytest.approx([0.0] * len(ratios))


def test_sessions_last_until_the_end() -> None:
    """There are more turns than are sent, so that no client is idle because sessions ran out; later laps have text of
    their own."""
    scenario = recorded.claude_code("above", 6)
    workload = scenario.workload
    longest = sorted(map(len, workload.sessions))[-workload.active :]

    assert workload.active == scenario.load
    assert sum(map(len, workload.sessions)) - sum(longest) >= workload.requests_max
    assert len({session[0].request.namespace for session in workload.sessions}) == len(workload.sessions)
    assert all(turn.prompt_tokens + turn.output_tokens <= 131_072 for turn in _turns(workload))


@pytest.mark.parametrize("name", ["all_unique", "cold_burst", "mooncake"])
def test_same_seed_same_workload(name: str) -> None:
    """A seed names one workload; another seed another."""

    def asked(seed: int) -> list[object]:
        return [(t.at_s, t.end_key, t.output_tokens) for t in _turns(SCENARIOS[name]("below", seed).workload)]

    assert asked(6) == asked(6)
    assert asked(6)[:50] != asked(7)[:50]


def test_bursts_are_cold() -> None:
    """Sixteen requests come at one moment with a long prefix in common that nobody had before them."""
    turns = _turns(generated.cold_burst("at", 1).workload)
    burst = turns[generated.BETWEEN_BURSTS : generated.BETWEEN_BURSTS + generated.BURST]
    shared = {key for turn in burst for key in turn.engine_keys[: 20_000 // BLOCK_TOKENS]}

    assert len({turn.at_s for turn in burst}) == 1
    assert len(shared) == 20_000 // BLOCK_TOKENS
    assert not any(shared & set(turn.engine_keys) for turn in turns if turn not in burst)


@pytest.mark.parametrize(
    ("name", "replicas", "prefix_tokens", "answers"),
    [
        ("hot_prefix_long", 8, 20_000, (400, 800)),
        ("hot_prefix_short", 8, 6_000, (200, 200)),
        ("hot_prefix_4", 4, 20_000, (400, 800)),
        ("hot_prefix_32", 32, 10_000, (100, 300)),
    ],
)
def test_hot_prefixes_are_everybodys(name: str, replicas: int, prefix_tokens: int, answers: tuple[int, int]) -> None:
    """All prompts begin alike and end in 400 tokens of their own."""
    scenario = SCENARIOS[name]("light", 3)
    turns = _turns(scenario.workload)
    shared = prefix_tokens // BLOCK_TOKENS

    assert scenario.setting.replicas == replicas
    assert {turn.prompt_tokens for turn in turns} == {prefix_tokens + 400}
    assert len({tuple(turn.engine_keys[:shared]) for turn in turns}) == 1
    assert len({turn.end_key for turn in turns}) == len(turns)
    assert answers[0] <= min(turn.output_tokens for turn in turns) <= max(turn.output_tokens for turn in turns)
    assert max(turn.output_tokens for turn in turns) <= answers[1]


def test_hot_prefix_mix_is_skewed() -> None:
    """Prefixes of 4,000 to 40,000 tokens; the first is asked for ten times as often as the last."""
    turns = _turns(SCENARIOS["hot_prefix_mix"]("at", 3).workload)
    groups = [turn.request.namespace for turn in turns]
    counts = sorted((groups.count(group) for group in set(groups)), reverse=True)

    assert len(counts) == contention.MIX_GROUPS
    assert counts[0] > 5 * counts[-1]
    assert 4_000 < min(turn.prompt_tokens for turn in turns) < 8_000
    assert 30_000 < max(turn.prompt_tokens for turn in turns) <= 41_200
    assert {turn.output_tokens // 400 for turn in turns} == {0, 1, 2}


def test_samples_of_a_prompt_come_at_once() -> None:
    """8 to 16 of each, equal to the byte, at one moment; their answers are not equally long."""
    groups: dict[int, list[SimRequest]] = {}
    for turn in _turns(SCENARIOS["sample_groups"]("at", 3).workload):
        groups.setdefault(turn.end_key, []).append(turn)

    assert all(8 <= len(group) <= 16 for group in groups.values())
    assert all(len({turn.at_s for turn in group}) == 1 for group in groups.values())
    assert all(len({turn.output_tokens for turn in group}) > 4 for group in groups.values())


@pytest.mark.parametrize("load", ["light", "at"])
def test_overfull_chats_are_half_as_large_again_as_the_caches(load: str) -> None:
    """In the middle of the run the contexts of all chats are 1.5 x what the caches hold, and each chat goes on where it
    was; how long people think is what the load changes."""
    scenario = contention.overfull_chats(load, 3)
    workload, held = scenario.workload, fleet_kv_tokens(scenario.setting)
    middle = [chat[2].prompt_tokens for chat in workload.sessions]
    waits = [turn.think_s for chat in workload.sessions for turn in chat[1:]]

    assert sum(middle) == pytest.approx(1.5 * held, rel=0.05)
    assert workload.active == len(workload.sessions) == workload.warm_up
    assert sum(waits) / len(waits) == pytest.approx(workload.active / scenario.load, rel=0.1)
    for before, after in pairwise(workload.sessions[0]):
        shared = before.prompt_tokens // BLOCK_TOKENS
        assert before.engine_keys[:shared] == after.engine_keys[:shared]
        assert after.prompt_tokens == before.prompt_tokens + 800


def test_huge_prompts_are_cold_and_fit() -> None:
    """One of forty has 100,000 to 400,000 tokens that nobody else has, none in the second half, and no replica refuses
    it."""
    scenario = SCENARIOS["huge_cold"]("light", 3)
    turns = _turns(scenario.workload)
    huge = [turn for turn in turns if turn.prompt_tokens > 50_000]
    begins = [turn.engine_keys[0] for turn in turns]

    assert len(huge) == contention.HUGE_UNTIL // contention.HUGE_EACH
    assert max(turn.number for turn in huge) < 0.55 * len(turns)
    assert min(turn.prompt_tokens for turn in huge) >= 100_000
    assert 350_000 < max(turn.prompt_tokens for turn in huge) <= 400_000
    assert all(begins.count(turn.engine_keys[0]) == 1 for turn in huge)
    longest = max(turn.prompt_tokens + turn.output_tokens for turn in huge)
    assert longest < scenario.setting.calibration.context_tokens_max < scenario.setting.calibration.kv_tokens


def test_impatient_clients_ask_what_others_ask() -> None:
    """The same sessions, of clients that wait a minute and try three times."""
    made = SCENARIOS["impatient_sessions"]("twice", 6)

    assert made.workload.sessions == SCENARIOS["claude_code"]("twice", 6).workload.sessions
    assert (made.setting.patience_s, made.setting.retries) == (60.0, 2)
    assert loads_of("impatient_sessions") == ("above", "twice")


def test_every_load_of_a_scenario_is_known() -> None:
    """Loads by name only, and the ladder says which stages it has."""
    assert all(set(loads_of(name)) <= set(LOADS) for name in SCENARIOS)
    assert {loads_of(name) for name in ("mooncake", "four_routers")} == {COMMON_LOADS}
    with pytest.raises(SettingError, match="no stage 'light'"):
        generated.ladder_honest("light", 1)


@pytest.mark.long
def test_faults_are_within_the_run() -> None:
    """Even at the highest load, where the run is shortest, all faults are over before the last request is sent."""
    made = SCENARIOS["restart"]("above", 6)
    faults = [*made.setting.faults]
    for name in ("slow_replica", "cold_join"):
        faults += SCENARIOS[name]("above", 6).setting.faults

    sent = Simulation(made.workload, made.setting, POLICIES["warm"]).run().sent

    assert {fault.kind for fault in faults} == {"restart", "slow", "join"}
    assert max(fault.at_s + (fault.lasts_s if fault.kind != "join" else 0) for fault in faults) < sent[-1].due_s


def test_clusters_differ_as_named() -> None:
    """Two and four routers, and replicas that differ in speed and in capacity."""
    assert SCENARIOS["two_routers"]("below", 1).setting.routers == 2
    assert SCENARIOS["four_routers"]("below", 1).setting.routers == 4
    others = SCENARIOS["heterogeneous"]("below", 1).setting.others
    assert len({each.kv_tokens for each in others}) == 2


def test_any_open_trace_becomes_a_scenario(tmp_path: Path) -> None:
    """A file's arrivals keep their pattern and come at the load's share of capacity."""
    path = tmp_path / "mine.jsonl"
    for number, at_ms in enumerate((5_000, 6_000, 9_000, 13_000)):
        row = {"timestamp": at_ms, "input_length": 5_000, "output_length": 50}
        with path.open("a") as file:
            file.write(json.dumps(row | {"hash_ids": list(range(10 * number, 10 * number + 10))}) + "\n")

    scenario = recorded.trace_scenario(path, "at", ClusterSpec(replicas=2), requests_max=100)
    times = [turn.at_s for turn in _turns(scenario.workload)]

    assert (scenario.workload.name, scenario.workload.open) == ("mine", True)
    assert [at / times[-1] for at in times] == pytest.approx([0, 1 / 8, 1 / 2, 1])
    assert len(times) / times[-1] == pytest.approx(scenario.load)


@pytest.mark.long
def test_any_sessions_become_a_scenario() -> None:
    """A file of sessions is replayed closed loop, with as many active as the caches hold."""
    path = Path(recorded.__file__).parents[2] / "data" / "claude_code_sessions.jsonl.gz"

    scenario = recorded.trace_scenario(path, "below", ClusterSpec(replicas=2), requests_max=60)

    assert not scenario.workload.open
    assert scenario.workload.request_count == 60
    assert scenario.load_unit == "sessions"
    assert scenario.load == scenario.workload.active
