"""Workloads in which prefill is not the scarce resource: decode contention, KV headroom, impatient clients.

They are made from the generator's parts (generated.py), except for those that put other clients before a recorded
workload.
"""

from __future__ import annotations

import random
from dataclasses import replace

from loadtest.common.traces import Request
from loadtest.fake_engine.calibration import CALIBRATIONS
from loadtest.simulate.engine.capacity import capacity_rps, fleet_kv_tokens
from loadtest.simulate.engine.cluster_spec import ClusterSpec
from loadtest.simulate.engine.workload import Workload, prepare
from loadtest.simulate.scenarios import generated, recorded
from loadtest.simulate.scenarios.generated import BLOCK_TOKENS, OWN_PIECES, PIECE_TOKENS, Pieces
from loadtest.simulate.scenarios.scenario import LOADS, Scenario

HOT_REQUESTS = 1_200


# One prefix for all requests: prefill costs next to nothing on every replica that holds it, and many streams decode
# there.


def _hot_prefix(
    name: str,
    load: str,
    setting: ClusterSpec,
    pieces: int,
    output_tokens: tuple[int, int],
    requests: int = HOT_REQUESTS,
) -> Scenario:
    def part(rng: random.Random, number: int) -> Pieces:
        return Pieces(0, pieces, number, 1, rng.randint(*output_tokens))

    return generated.scenario(name, load, setting, part, requests=requests)


def hot_prefix_long(load: str, seed: int) -> Scenario:
    """One prefix of 20,000 tokens, tails of 400, answers of 400 to 800. Every stream reads the whole prefix at every
    step, so that a replica decodes at a third of the speed with 100 streams that it has with ten."""
    return _hot_prefix("hot_prefix_long", load, ClusterSpec(seed=seed), 50, (400, 800))


def hot_prefix_short(load: str, seed: int) -> Scenario:
    """One prefix of 6,000 tokens, tails of 400, answers of 200."""
    return _hot_prefix("hot_prefix_short", load, ClusterSpec(seed=seed), 15, (200, 200))


def hot_prefix_4(load: str, seed: int) -> Scenario:
    """`hot_prefix_long` on four replicas: the same run is twice as long beside an answer, so that above saturation
    streams wait for KV space."""
    return _hot_prefix("hot_prefix_4", load, ClusterSpec(replicas=4, seed=seed), 50, (400, 800))


def hot_prefix_32(load: str, seed: int) -> Scenario:
    """One prefix of 10,000 tokens on 32 replicas, answers of 100 to 300. It shows when a copy pays, and how many copies
    do."""
    return _hot_prefix("hot_prefix_32", load, ClusterSpec(replicas=32, seed=seed), 25, (100, 300), 1_500)


MIX_GROUPS = 16


def hot_prefix_mix(load: str, seed: int) -> Scenario:
    """Sixteen prefixes of 4,000 to 40,000 tokens, the n-th requested 1/n as often as the first; answers of 200 to
    1,000. Each replica's cache can hold nearly all of them."""
    rng = random.Random(f"hot_prefix_mix:{seed}:lengths")
    lengths = [rng.randint(10, 100) for _ in range(MIX_GROUPS)]
    weights = [1 / (1 + rank) for rank in range(MIX_GROUPS)]

    def part(rng: random.Random, number: int) -> Pieces:
        (group,) = rng.choices(range(MIX_GROUPS), weights)
        return Pieces(group, lengths[group], number, rng.randint(1, 3), rng.randint(200, 1_000))

    return generated.scenario("hot_prefix_mix", load, ClusterSpec(seed=seed), part, requests=HOT_REQUESTS)


SAMPLES = (8, 16)


def sample_groups(load: str, seed: int) -> Scenario:
    """Rollouts of reinforcement learning: 8 to 16 samples of one new prompt of 800 to 8,000 tokens are requested at one
    moment. Their answers end at very different times (log-normal, 50 to 3,000 tokens). Four replicas, so that the run
    is long beside an answer."""
    name = f"sample_groups:{seed}"
    rng = random.Random(name)
    parts: list[Pieces] = []
    times: list[float] = []
    now_s = 0.0
    while len(parts) < generated.REQUESTS:
        samples, pieces, group = rng.randint(*SAMPLES), rng.randint(2, 20), len(parts)
        now_s += rng.expovariate(1 / samples)
        for _ in range(samples):
            tokens = int(rng.lognormvariate(5.8, 0.8))
            parts.append(Pieces(group, pieces, group, 0, max(50, min(3_000, tokens))))
            times.append(now_s)
    turns = generated.turns_of(name, parts, times)
    return generated.scale_to_load("sample_groups", load, turns, ClusterSpec(replicas=4, seed=seed), 2.0)


# KV headroom


OVERFULL = 1.5
CHAT_TURNS, CHAT_REQUESTS = 10, 1_000
BEGUN_PIECES, GROWN_PIECES = (10, 50), 2
MEAN_PIECES = 34
"""Pieces of a context in the middle of the run: a chat has about four turns."""


def overfull_chats(load: str, seed: int) -> Scenario:
    """Parallel chats with contexts that are together one and a half times as large as all caches, while the load
    determines how busy GPUs are. People read and think for minutes, so that at 0.15 and 0.6 GPUs are idle most of the
    time. A turn adds 400 tokens of question, and 400 of the answer before it, to a context that began with 4,000 to
    20,000 tokens; answers of 100 to 500. The first turn of each chat counts for no figure."""
    setting, name = ClusterSpec(seed=seed), f"overfull_chats:{seed}"
    rng = random.Random(name)
    chats = round(OVERFULL * fleet_kv_tokens(setting) / PIECE_TOKENS / MEAN_PIECES)
    begun = [rng.randint(*BEGUN_PIECES) for _ in range(chats)]
    waits = [[0.0, *(rng.expovariate(1.0) for _ in range(CHAT_TURNS - 1))] for _ in range(chats)]
    pairs = [
        (
            str(chat),
            Request(
                at_s=0.0,
                think_s=waits[chat][turn],
                input_tokens=PIECE_TOKENS * (begun[chat] + GROWN_PIECES * turn),
                output_tokens=rng.randint(100, 500),
                namespace=f"{name}:{chat}",
                block_tokens=PIECE_TOKENS,
                runs=((OWN_PIECES, begun[chat] + GROWN_PIECES * turn),),
            ),
        )
        for turn in range(CHAT_TURNS)
        for chat in range(chats)
    ]
    turns = prepare(pairs, BLOCK_TOKENS, output_tokens_max=1_000_000)
    rate = LOADS[load] * capacity_rps(turns, setting, BLOCK_TOKENS)
    for each in turns:
        each.think_s *= chats / rate
    workload = Workload(
        "overfull_chats",
        tuple(tuple(turns[chat::chats]) for chat in range(chats)),
        False,
        BLOCK_TOKENS,
        active=chats,
        ramp_s=chats / rate,
        think_max_s=20 * chats / rate,
        requests_max=chats + CHAT_REQUESTS,
        warm_up=chats,
    )
    return Scenario(workload, setting, rate, "requests/s")


HUGE_EACH, HUGE_UNTIL, HUGE_PIECES = 40, 520, (250, 1_000)
"""One prompt in HUGE_EACH is huge among the first HUGE_UNTIL; HUGE_PIECES is the range of its length."""


def huge_cold(load: str, seed: int) -> Scenario:
    """Questions about a hundred warm contexts of 8,000 to 16,000 tokens. One prompt of each forty has 100,000 to
    400,000 new tokens and an answer of 20: up to 100 s of prefill, during which each step of its replica takes seconds.
    The second half of the run has no such prompt, because otherwise such a prompt would determine when the run ends.
    The machine is Llama-3.1-70B's on four H100, the one with the largest cache (461,376 tokens). The limit of this
    model's context, 131,072, is ignored."""
    machine = replace(CALIBRATIONS["llama-3.1-70b-4xh100"], context_tokens_max=450_000)
    lengths = random.Random(f"huge_cold:{seed}:lengths").choices(range(20, 41), k=100)

    def part(rng: random.Random, number: int) -> Pieces:
        if number < HUGE_UNTIL and number % HUGE_EACH == HUGE_EACH - 1:
            return Pieces(1_000 + number, 0, number, rng.randint(*HUGE_PIECES), 20)
        group = rng.randrange(len(lengths))
        return Pieces(group, lengths[group], number, 1, rng.randint(50, 350))

    setting = ClusterSpec(calibration=machine, seed=seed)
    return generated.scenario("huge_cold", load, setting, part, ttft_limit_s=5.0)


# Patience


PATIENCE_S, RETRIES = 60.0, 2


def impatient_sessions(load: str, seed: int) -> Scenario:
    """Claude Code's sessions. Their clients close a request that has brought no token for 60 s and send it again, at
    most twice. A request fails if its last try fails."""
    setting = ClusterSpec(seed=seed, patience_s=PATIENCE_S, retries=RETRIES)
    made = recorded.claude_code(load, seed, setting)
    return replace(made, workload=replace(made.workload, name="impatient_sessions"))


def impatient_unique(load: str, seed: int) -> Scenario:
    """Long prompts without a common prefix, 4,000 to 40,000 tokens, of the same clients: work for a request that its
    client gives up is wasted."""

    def part(rng: random.Random, number: int) -> Pieces:
        return Pieces(0, 0, number, rng.randint(10, 100), rng.randint(50, 350))

    setting = ClusterSpec(replicas=4, seed=seed, patience_s=PATIENCE_S, retries=RETRIES)
    return generated.scenario("impatient_unique", load, setting, part, requests=600, ttft_limit_s=5.0)
