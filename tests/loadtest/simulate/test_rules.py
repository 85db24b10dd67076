"""The rules that threshold, hash or keep their own tree, each against what its source states."""

from __future__ import annotations

from array import array
from itertools import count

import pytest

from loadtest.common.traces import Request
from loadtest.simulate.engine.cluster_spec import ClusterSpec
from loadtest.simulate.engine.placer import PolicyUnderTest, SimView
from loadtest.simulate.engine.workload import SimRequest, open_workload, prepare
from loadtest.simulate.engine.world import Simulation
from loadtest.simulate.policies import ROWS, aibrix, cache_aware
from loadtest.simulate.policies.hash_unbounded import HashUnbounded
from loadtest.simulate.policies.kubeai import PrefixHash
from loadtest.simulate.policies.preble import ExploitExplore
from loadtest.simulate.policies.prompt_tree import PromptTree
from loadtest.simulate.policies.ray_serve import PrefixAffinity
from router.core.placement.policies import Policy
from router.core.placement.router import Router
from router.core.types.placements import Candidate, Confidence, PlacementContext

NAMES = [f"http://replica-{number}" for number in range(4)]
BLOCK_TOKENS = 128  # 512 characters: one key of the router
OTHERS = [name for name in ROWS if ROWS[name].source != "warmroute's own"]


def turns(*blocks: list[int]) -> list[SimRequest]:
    """Prompts of these blocks, all by themselves."""
    requests = [
        Request(i / 20, 0.0, len(each) * BLOCK_TOKENS, 8, "t", BLOCK_TOKENS, tuple((block, 1) for block in each))
        for i, each in enumerate(blocks)
    ]
    return prepare(((str(i), request) for i, request in enumerate(requests)), 16, output_tokens_max=8)


def candidates(loads: list[int], cached: list[int] | None = None) -> list[Candidate]:
    """Replicas so busy, and with so much of a prompt of 1,024 tokens."""
    held = cached or [0] * len(loads)
    return [
        Candidate(name, tokens, 1024 - tokens, 0.0, 1024.0 - tokens, 0.0, 0.0, load, 0, Confidence.ESTIMATED, tokens)
        for name, load, tokens in zip(NAMES, loads, held, strict=False)
    ]


class Asked:
    """A policy and what it chooses, as a number of a replica."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self._router = Router(policy, index_bytes_max=1 << 20, remembered_prompts_max=100, default_cache_blocks=100)

    def __call__(
        self, turn: SimRequest, loads: list[int], *, now_s: float = 0.0, cached: list[int] | None = None
    ) -> int:
        """The next choice, shown as the placer would show it."""
        if isinstance(self.policy, PolicyUnderTest):
            self.policy.see(SimView(self._router, turn, now_s))
        market = PlacementContext(format(turn.first_user_key, "x"), 0.0, 1.0, 0.0)
        return NAMES.index(self.policy.choose(market, candidates(loads, cached)).id)


def sglang() -> Asked:
    """Its row, fresh."""
    return Asked(ROWS["sglang_cache_aware"].make())


# The tree


def test_a_prompt_matches_what_was_sent_before_to_whoever_began_it() -> None:
    """A match is as long as the text in common, and belongs to the first that was sent it."""
    tree = PromptTree()
    tree.insert(array("Q", [1, 2, 3, 4]), "a")
    tree.insert(array("Q", [1, 2, 9]), "b")
    for prompt, blocks, holder in (([1, 2, 3, 7], 3, "a"), ([1, 2, 9, 9], 3, "b"), ([1, 2], 2, "a")):
        matched, node = tree.match(array("Q", prompt))
        assert (matched, node.holder()) == (512 * blocks, holder)
    assert tree.chars == {"a": 4 * 512, "b": 3 * 512}


def test_a_node_sent_to_two_has_two_holders_and_keeps_its_maker() -> None:
    """Whoever is sent a prompt later holds it too, but is not who a match names."""
    tree = PromptTree()
    tree.insert(array("Q", [1, 2]), "a")
    tree.insert(array("Q", [1, 2]), "b")
    _, node = tree.match(array("Q", [1, 2]))
    assert set(node.holders) == {"a", "b"}
    assert node.holder() == "a"


def test_a_prompt_that_leaves_the_tree_strays_into_the_branch_that_begins_most_alike() -> None:
    """By leading hex digits, the first of several; where none is alike, it stays."""
    tree = PromptTree()
    near, nearer, far = 0xAB00 << 48, 0xABC0 << 48, 0x1000 << 48
    for key, holder in ((near, "a"), (nearer, "b"), (far, "c")):
        tree.insert(array("Q", [7, key]), holder)
    found = [tree.match(array("Q", [7, key << 48]))[1].holder() for key in (0xABCD, 0xAB99, 0xA999, 0x1FFF, 0xF000)]
    assert found == ["b", "a", "a", "c", "a"]
    tree.insert(array("Q", [7, 0xF999 << 48]), "d")
    assert tree.match(array("Q", [7, 0xF000 << 48]))[1].holder() == "d"


def test_eviction_forgets_the_leaf_that_was_longest_not_sent() -> None:
    """Only as much as is over, only of who is over, and text in common stays for those who hold it."""
    tree = PromptTree()
    tree.insert(array("Q", [1, 2, 3]), "a")
    tree.insert(array("Q", [1, 2, 4]), "a")
    tree.insert(array("Q", [1, 2, 3]), "b")
    tree.insert(array("Q", [1, 2, 3]), "a")
    tree.evict(3 * 512, together=False)
    assert tree.chars == {"a": 3 * 512, "b": 3 * 512}
    assert tree.match(array("Q", [1, 2, 4]))[0] == 2 * 512
    tree.evict(3 * 512, together=True)
    assert tree.chars == {"a": 3 * 512, "b": 0}
    tree.evict(0, together=True)
    assert tree.match(array("Q", [1, 2, 3]))[0] == 0


# sglang-router, vllm-router, SMG


def test_a_match_over_the_threshold_goes_to_its_holder_and_one_under_it_to_the_least_loaded() -> None:
    """share > 0.3 decides, however busy the holder is below the gate; of equally loaded ones it is the first."""
    ask = sglang()
    first, third, quarter = turns([1, 2, 3], [1, 4, 5], [1, 6, 7, 8])
    assert ask(first, [2, 1, 0, 0]) == 2
    assert ask(third, [0, 0, 64, 0]) == 2
    assert ask(quarter, [1, 0, 0, 0]) == 1


@pytest.mark.parametrize(("loads", "chosen"), [([64, 0, 9, 9], 0), ([65, 0, 9, 9], 1), ([195, 130, 131, 131], 0)])
def test_the_gate_needs_both_thresholds(loads: list[int], chosen: int) -> None:
    """max - min > 64 and max > 1.5 * min: the least loaded, and it holds the prompt from then on."""
    ask = sglang()
    (prompt,) = turns([1, 2, 3])
    assert ask(prompt, [0, 1, 1, 1]) == 0
    assert ask(prompt, loads) == chosen


def test_vllm_router_does_not_match_what_it_has_no_tokens_of() -> None:
    """The same prompt again goes to the least loaded."""
    ask = Asked(ROWS["vllm_cache_aware_no_tokens"].make())
    (prompt,) = turns([1, 2, 3])
    assert ask(prompt, [0, 0, 0, 0]) == 0
    assert ask(prompt, [1, 0, 0, 0]) == 1


def test_trees_are_cut_at_each_interval_only() -> None:
    """What is over the limit is still found until the interval is over."""
    flags = cache_aware.Flags(eviction_interval_s=60.0, tree_chars_max=2 * 512)
    ask = Asked(cache_aware.CacheAware("small", flags))
    long, again, last = turns([1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4])
    assert ask(long, [1, 1, 1, 0], now_s=0.0) == 3
    assert ask(again, [0, 1, 1, 1], now_s=59.0) == 3
    assert ask(last, [0, 1, 1, 1], now_s=60.0) == 0


def test_smg_weighs_all_holders_and_spills_one_that_is_ahead_of_the_mean() -> None:
    """The less loaded holder; past 1.5 * mean and the mean + 4 (or two deviations) the least loaded of all."""
    ask = Asked(ROWS["smg_cache_aware"].make())
    prompts = turns(*[[1, 2, 3]] * 6)
    assert ask(prompts[0], [0, 1, 1, 1]) == 0
    assert ask(prompts[1], [4, 1, 0, 1]) == 0  # 4 is over 1.5 * mean, but not over mean + 4
    assert ask(prompts[2], [8, 1, 0, 1]) == 2  # over both
    assert ask(prompts[3], [2, 0, 1, 0]) == 2  # a holder since then
    assert ask(prompts[4], [40, 30, 50, 30]) == 0  # two deviations of a mean of 37 are 12


# AIBrix


def test_aibrix_takes_the_longest_match_that_is_not_busier_than_usual() -> None:
    """Within mean + 1 sigma by share held; over an imbalance of 8 the least loaded."""
    ask = Asked(ROWS["aibrix_prefix"].make())
    long, short, *rest = turns([1, 2, 3, 4], [1, 2], *[[1, 2, 3, 4]] * 4)
    assert ask(long, [0, 1, 1, 1]) == 0
    assert ask(short, [9, 0, 1, 1]) == 1  # 9 - 0 > 8
    assert ask(rest[0], [3, 3, 3, 3]) == 0
    assert ask(rest[1], [8, 1, 0, 1]) == 1  # 8 is over the mean and a deviation; the next holds half
    assert ask(rest[2], [8, 8, 0, 0]) == 0  # both hold all by now, nobody is over: 4 + 4; drawn


def test_aibrix_remembers_as_much_text_as_its_blocks_hold_and_for_twenty_minutes() -> None:
    """200,000 blocks of 4 characters are 1,562 keys, the latest for the whole fleet."""
    ask = Asked(ROWS["aibrix_prefix"].make())
    first, other, again = turns([1, 2, 3, 4], list(range(10, 10 + 1560)), [1, 2, 3, 4])
    assert ask(first, [1, 1, 1, 0]) == 3
    assert ask(other, [0, 1, 1, 1]) == 0
    assert ask(again, [1, 0, 1, 1]) == 1
    late = Asked(aibrix.PrefixCache("aibrix", aibrix.README))
    assert late(first, [1, 1, 1, 0], now_s=0.0) == 3
    assert late(again, [0, 1, 1, 1], now_s=1200.0) == 3
    assert late(first, [0, 1, 1, 1], now_s=2401.0) == 0


# Hashes


def test_an_unbounded_hash_stays_however_busy_its_replica_is() -> None:
    """One key, one replica."""
    ask = Asked(HashUnbounded())
    (prompt,) = turns([1, 2])
    home = ask(prompt, [0, 0, 0, 0])
    assert ask(prompt, [1000 * (number == home) for number in range(4)]) == home


def test_kubeai_hashes_a_hundred_characters_and_walks_past_who_is_over_the_bound() -> None:
    """What follows the first block does not count; load + 1 <= 1.25 * (total + 1) / replicas does."""
    ask = Asked(PrefixHash())
    one, same = turns([1, 2], [1, 9, 8])
    home = ask(one, [0, 0, 0, 0])
    assert ask(same, [0, 0, 0, 0]) == home
    assert ask(one, [12 if number == home else 11 for number in range(4)]) == home  # 13 <= 1.25 * 46 / 4 = 14.4
    assert ask(one, [14 if number == home else 11 for number in range(4)]) == home  # 15 <= 1.25 * 48 / 4 = 15
    assert ask(one, [15 if number == home else 11 for number in range(4)]) != home  # 16 > 1.25 * 49 / 4 = 15.3


# Ray Serve, Preble


def test_ray_takes_the_shortest_queue_of_those_that_match_and_the_smallest_tree_otherwise() -> None:
    """From a tenth of the prompt on it is a match, whatever the queues."""
    ask = Asked(PrefixAffinity())
    blocks = count(100)
    first, tenth, less = turns(
        [1, 2, 3], [1, *(next(blocks) for _ in range(9))], [1, *(next(blocks) for _ in range(10))]
    )
    assert ask(first, [3, 0, 3, 3]) == 1
    assert ask(tenth, [0, 999, 0, 0]) == 1
    assert ask(less, [5, 0, 4, 5]) == 2


def test_preble_exploits_over_half_and_explores_by_the_work_of_the_last_minutes() -> None:
    """What was sent weighs for three minutes, whether or not it is done."""
    ask = Asked(ExploitExplore())
    prompts = turns(*[[number, number + 1, *range(50, 56)] for number in range(1, 9)])
    assert ask(prompts[0], [0, 0, 0, 0], cached=[0, 513, 0, 0]) == 1
    assert ask(prompts[1], [0, 0, 0, 0], cached=[0, 512, 0, 0]) == 1  # explores: 511 are waiting, 512 are saved
    assert ask(prompts[2], [0, 0, 0, 0], cached=[0, 512, 0, 0]) == 0
    assert ask(prompts[3], [0, 0, 0, 0], now_s=181.0, cached=[0, 100, 0, 0]) == 1


# All of them


@pytest.mark.long
@pytest.mark.parametrize("name", OTHERS)
def test_every_row_places_every_request_and_the_same_way_each_time(name: str) -> None:
    """A run ends, nobody is refused, and running it again changes nothing, draws included."""
    prompts = turns(*[[number % 5, *range(10 * number, 10 * number + number % 7)] for number in range(120)])
    workload = open_workload("small", prompts, 16)
    runs = [Simulation(workload, ClusterSpec(replicas=3, seed=7), ROWS[name].make).run() for _ in range(2)]
    placed = [[(sent.lease.replica if sent.lease else "", sent.ttft_s) for sent in run.sent] for run in runs]
    assert placed[0] == placed[1]
    assert all(sent.failure == "" for sent in runs[0].sent)
    assert len({replica for replica, _ in placed[0]}) > 1
