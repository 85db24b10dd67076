"""Prefill apart from decode in virtual time: who places, what the table and its page say, and what must not change."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from loadtest.common.report import Row
from loadtest.docgen.linked_replicas import split_block
from loadtest.docgen.markdown import PageError
from loadtest.fake_engine.host_tier import TierLimits
from loadtest.simulate.command import main
from loadtest.simulate.engine.cluster_spec import ClusterSpec, Fault, SettingError
from loadtest.simulate.engine.split import DisaggSimulation
from loadtest.simulate.policies.llmd_decider import NON_CACHED_TOKENS, LlmdDecider
from loadtest.simulate.results import split
from loadtest.simulate.results.pulls import LINKS
from loadtest.simulate.scenarios.split import prefill_heavy
from router.core.placement.policies.warm import Warm
from router.core.types.disagg_types import KvConnector, Role
from router.core.types.placements import Candidate, PlacementContext

APART = ClusterSpec(replicas=4, seed=1, legs=LINKS["rdma"], roles=split.roles_of(4))


def _world(setting: ClusterSpec = APART, requests: int = 40, make: Callable[[], Warm] = Warm) -> DisaggSimulation:
    return DisaggSimulation(prefill_heavy("at", setting, requests=requests).workload, setting, make)


def _row(policy: str, seed: int, tpot_ms: float) -> Row:
    row = Row(workload="prefill_heavy", policy=policy, case="rdma", replicas=8, load_name="at", seed=seed, requests=800)
    row.tpot_p50_ms = row.tpot_p90_ms = tpot_ms
    row.got = 25.0
    return row


def test_roles_are_a_quarter_to_prefill() -> None:
    """Of eight replicas two prefill, and of few at least one."""
    assert [role.value for role in split.roles_of(8)] == ["prefill"] * 2 + ["decode"] * 6
    assert split.roles_of(2) == (Role.PREFILL, Role.DECODE)


def test_llmds_decider_counts_uncached_tokens() -> None:
    """It splits from its threshold on, whatever the queue before the prefill, and leaves the decode leg where it is."""

    class Pairs:
        def transfer_ms(self, prefill: Candidate, decode: Candidate) -> float | None:
            return 10.0 if prefill.id != decode.id else None

    def candidate(id_: str, uncached: int) -> Candidate:
        return Candidate(id_, 20_000 - uncached, uncached, 0.0, uncached / 10, 0.0, 0.0, 0)

    world = _world()
    world.run()
    rule, market = LlmdDecider(), PlacementContext("key", 5.0, 1_600.0, 0.0)
    names = list(world.replicas)
    rule.sight = type("Sight", (), {"router": world.placers[0].router, "turn": next(iter(world._sent)).turn})()
    prefill, decode = [candidate(names[0], 20_000)], [candidate(name, 20_000) for name in names[1:]]
    chosen = candidate(names[1], NON_CACHED_TOKENS)
    made = rule.split(market, chosen, prefill, [chosen, *decode[1:]], Pairs())
    assert made is not None
    assert (made.prefill.id, made.decode.id) == (names[0], names[1])
    assert rule.split(market, candidate(names[1], NON_CACHED_TOKENS - 1), prefill, decode, Pairs()) is None


@pytest.mark.parametrize("handshake", [KvConnector.NIXL, KvConnector.MOONCAKE])
def test_every_request_ends_in_one_leg_or_two(handshake: KvConnector) -> None:
    """All answers come, some in two legs, whose prompts one replica computes and the other fetches; afterwards nothing
    is held for anybody, and the router's sums are nought."""
    world = _world(replace(APART, handshake=handshake))
    result = world.run()
    assert not any(each.failure for each in result.sent)
    assert world.splits > 5
    assert world.sent_tokens > 0
    assert world.lacked == 0
    prompts = sum(each.turn.prompt_tokens for each in result.sent)
    # The last token is computed on either side, and what is no whole block.
    assert 0 <= sum(result.computed_tokens.values()) - prompts <= 64 * world.splits
    for replica in world.replicas.values():
        assert replica.model.arriving is not None
        assert not replica.model.arriving.held
        assert replica.legs is not None
        assert len(replica.legs) == 0
    router = world.placers[0].router
    assert not router.disaggregator.pairs.open
    assert not any(m.leases or m.queue.count_waiting() or m.work.decoding or m.clock.streams for m in router.members)
    assert any(
        m.speeds.loads.model("leg", fit) for m in router.members for fit in router.disaggregator.pairs._fits.values()
    )


def test_whoever_gives_up_leaves_nothing() -> None:
    """Clients that leave between the legs, or in either, free the room of both."""
    world = _world(replace(APART, timeout_s=2.0), requests=60)
    result = world.run()
    assert any(each.failure == "timeout" for each in result.sent)
    for replica in world.replicas.values():
        assert replica.model.arriving is not None
        assert not replica.model.arriving.held
        assert replica.model.pool.free_n == replica.model.pool.blocks_n
    router = world.placers[0].router
    assert not router.disaggregator.pairs.open
    assert not any(m.leases or m.queue.count_waiting() or m.work.decoding for m in router.members)


def test_a_replica_that_dies_takes_no_request_with_it() -> None:
    """Requests whose prefill dies are placed again, and so are those whose decode leg does before its first token."""
    faults = (Fault("restart", 12.0, 0, 5.0), Fault("restart", 20.0, 1, 5.0))
    world = _world(replace(APART, faults=faults), requests=80)
    result = world.run()
    assert {each.failure for each in result.sent} <= {"", "broken"}
    assert any(len(each.tried) for each in result.sent)
    assert not world.placers[0].router.disaggregator.pairs.open


def test_nothing_changes_where_nothing_may_be_split() -> None:
    """Replicas that could hand prompts over, before a router that may not say so, are as replicas that cannot: every
    figure to the digit."""
    setting = ClusterSpec(replicas=3, seed=2, legs=LINKS["rdma"], split_told=False)
    able, unable = (_world(each, requests=40).run() for each in (setting, replace(setting, legs=None, split_told=True)))
    assert [(each.ttft_s, each.e2e_s) for each in able.sent] == [(each.ttft_s, each.e2e_s) for each in unable.sent]


def test_legs_and_tiers_are_not_simulated_together() -> None:
    """That is said, and not passed over."""
    with pytest.raises(SettingError, match="only one"):
        replace(APART, tier=TierLimits(1_000))


def test_the_command_runs_its_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """It prints the table and writes the rows; who may not split has none, and who may has some."""
    file = tmp_path / "split.json"
    arguments = ["--split", "rdma", "--scenario", "prefill_heavy", "--load", "at", "--replicas", "4"]
    more = ["--requests", "10", "--policy", "aggregated", "ours, 2 of 8", "--jobs", "1", "--json", str(file)]
    assert main([*arguments, *more]) == 0
    assert "time per output token p90, ms" in capsys.readouterr().out
    assert main(["--split", "--policy", "warm"]) == 2
    assert main(["--split", "--scenario", "mooncake"]) == 2
    whole, apart = split.run_split(
        split.SplitJob("prefill_heavy", "rdma", "at", 1, (split.AGGREGATED, split.OURS), 4, 10)
    )
    assert whole.got == 0.0 < (apart.got or 0.0)


def test_the_page_names_the_commands_of_its_rows() -> None:
    """A file of something else is an error."""
    machine = {"cpu": "a CPU", "cores": 2, "memory_gb": 8.0, "python": "3.11"}
    rows = [asdict(_row(policy, seed, 30.0)) for policy in (split.AGGREGATED, split.OURS) for seed in (1, 2)]
    document = {"date": "2026-11-26T00:00:00", "machine": machine, "rows": rows}
    command = "--split rdma --scenario prefill_heavy --load at --replicas 8 --requests 100 --seed 1-2"
    assert f"- `python -m loadtest simulate {command}`" in split_block(document).splitlines()
    with pytest.raises(PageError):
        split_block({**document, "rows": []})
