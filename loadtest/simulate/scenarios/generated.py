"""Generated workloads, from published parameters if there are any.

Requests come at random (Poisson) times. A prompt is made of runs of 400-token pieces. Pieces are named by number within
a namespace that contains the seed, so that no two seeds share text.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from loadtest.common.traces import Request
from loadtest.simulate.engine.capacity import CACHE_SHARE, capacity_rps, fleet_kv_tokens
from loadtest.simulate.engine.cluster_spec import ClusterSpec, SettingError
from loadtest.simulate.engine.workload import MODEL, SimRequest, open_workload, prepare
from loadtest.simulate.scenarios.scenario import LOADS, Scenario

PIECE_TOKENS = 400
OWN_PIECES = 1_000_000
"""First number of the pieces that only one prompt has; those that a group shares are numbered from 0."""
BLOCK_TOKENS = 64
"""llm-d's ladder runs vLLM with blocks of 64 tokens."""
REQUESTS = 1_000


@dataclass(frozen=True, slots=True)
class Pieces:
    """A prompt in pieces: the group's shared ones first, then its own. Two with the same `own` name are the same."""

    group: int
    shared: int
    own: int
    fresh: int
    output_tokens: int


def request(namespace: str, part: Pieces, at_s: float) -> Request:
    """Return the request of a part."""
    first = OWN_PIECES + 1_000 * part.own
    return Request(
        at_s=at_s,
        think_s=0.0,
        input_tokens=PIECE_TOKENS * (part.shared + part.fresh),
        output_tokens=part.output_tokens,
        namespace=f"{namespace}:{part.group}",
        block_tokens=PIECE_TOKENS,
        runs=tuple(run for run in ((0, part.shared), (first, part.fresh)) if run[1]),
    )


def turns_of(
    namespace: str,
    parts: Iterable[Pieces],
    times_s: Iterable[float],
    model_of: Callable[[Request], str] = lambda _: MODEL,
) -> list[SimRequest]:
    """Return the requests as turns, each in a session of its own."""
    pairs = [
        (str(number), request(namespace, part, at_s))
        for number, (part, at_s) in enumerate(zip(parts, times_s, strict=True))
    ]
    return prepare(pairs, BLOCK_TOKENS, output_tokens_max=1_000_000, model_of=model_of)


def poisson(rng: random.Random, count: int, rate: float, start_s: float = 0.0) -> list[float]:
    """Return the times of `count` Poisson arrivals in order, at a mean rate a second."""
    times = []
    for _ in range(count):
        start_s += rng.expovariate(rate)
        times.append(start_s)
    return times


def scale_to_load(
    name: str,
    load: str,
    turns: list[SimRequest],
    setting: ClusterSpec,
    ttft_limit_s: float,
    *,
    cache_share: float = CACHE_SHARE,
) -> Scenario:
    """Return a scenario of turns that were made for one a second, at a share of the cluster's capacity."""
    rate = LOADS[load] * capacity_rps(turns, setting, BLOCK_TOKENS, cache_share)
    for turn in turns:
        turn.at_s /= rate
    return Scenario(open_workload(name, turns, BLOCK_TOKENS), setting, rate, "requests/s", ttft_limit_s)


def scenario(
    name: str,
    load: str,
    setting: ClusterSpec,
    part: Callable[[random.Random, int], Pieces],
    *,
    requests: int = REQUESTS,
    ttft_limit_s: float = 2.0,
) -> Scenario:
    """Return a scenario of requests made by `part` from their numbers."""
    name_of_seed = f"{name}:{setting.seed}"
    rng = random.Random(name_of_seed)
    parts = [part(rng, number) for number in range(requests)]
    turns = turns_of(name_of_seed, parts, poisson(rng, requests, 1.0))
    return scale_to_load(name, load, turns, setting, ttft_limit_s)


# llm-d's "73-capacity" ladder (guide_optimized-baseline_1) has 150 groups of 5 prompts, with 6,000 tokens of system
# prompt, 1,200 of question and 1,000 of answer. It warms up with 15 requests a second for 50 s, and then the stages
# follow. Each begins 30 s after the end of all requests of the one before, at the latest by the client's timeout of
# 300 s. Back to back they would need 22 answers a second, while the best published rate is 16, and no first token could
# have come within 1 s.

GROUPS, PROMPTS_PER_GROUP = 150, 5
SYSTEM_PIECES, QUESTION_PIECES, LADDER_OUTPUT_TOKENS = 15, 3, 1_000
WARM_UP_RPS, WARM_UP_S, STAGE_GAP_S = 15, 50, 330
STAGES = (
    (3, 20), (10, 20), (15, 20), (20, 38), (22, 34), (25, 30), (30, 25), (35, 21), (40, 38), (43, 36), (46, 33),
    (49, 30), (52, 29), (55, 27), (57, 26), (60, 25),
)  # fmt: skip
"""(requests a second, seconds)"""
RACED = {"below": (20, 38), "at": (40, 25), "above": (60, 20)}
"""Stages of the race: (requests a second, seconds).

They are bursts: the fleet decodes about 13 such answers a second, and takes the rest within the limit of its KV cache.
If each request has a fresh question, a replica can hold about 145 requests and its share of the system prompts
(145 x 1,350 + 19 x 6,000, about 307,328 tokens). At 60 requests a second the cache is full after 20 s, and at 40 a
second a stage of 25 s leaves some space. The published stages are longer (25 s and 38 s), and then the rest waits for
answers to end under every policy.
"""


def _ladder_parts(count: int, *, honest: bool) -> list[Pieces]:
    """Return the prompts in the order of inference-perf. Prompt `n % 750` was sent before if `n` is after the warm-up.
    If `honest`, each prompt has a new question instead."""
    prompts = GROUPS * PROMPTS_PER_GROUP
    return [
        Pieces(n % GROUPS, SYSTEM_PIECES, n if honest else n % prompts, QUESTION_PIECES, LADDER_OUTPUT_TOKENS)
        for n in range(count)
    ]


Deal = Callable[[list[Pieces]], list[Pieces]]


def ladder_of(
    name: str, seed: int, stages: Sequence[tuple[int, int]], *, honest: bool, deal: Deal | None = None
) -> Scenario:
    """Return the warm-up and these stages, (requests a second, seconds) each; `honest` is as for `_ladder_parts`.
    `deal` gives the prompts another order."""
    rng = random.Random(f"{name}:{seed}")
    warm_up = WARM_UP_RPS * WARM_UP_S
    times, end_s = poisson(rng, warm_up, WARM_UP_RPS), float(WARM_UP_S)
    for rate, lasts_s in stages:
        start_s = max(end_s, times[-1]) + STAGE_GAP_S
        times += poisson(rng, rate * lasts_s, rate, start_s)
        end_s = start_s + lasts_s
    parts = _ladder_parts(len(times), honest=honest)
    turns = turns_of(f"{name}:{seed}", deal(parts) if deal is not None else parts, times)
    workload = open_workload(name, turns, BLOCK_TOKENS, warm_up=warm_up)
    return Scenario(workload, ClusterSpec(seed=seed), max(rate for rate, _ in stages), "requests/s")


def _stage(load: str) -> tuple[int, int]:
    if load not in RACED:
        raise SettingError(f"llm-d's ladder has no stage {load!r}: there are {', '.join(RACED)}")
    return RACED[load]


def ladder_honest(load: str, seed: int) -> Scenario:
    """One stage after the warm-up, each request with a question of its own."""
    return ladder_of("ladder_honest", seed, [_stage(load)], honest=True)


def ladder_published(load: str, seed: int) -> Scenario:
    """One stage after the warm-up, every request a replay of one in the warm-up, as published."""
    return ladder_of("ladder_published", seed, [_stage(load)], honest=False)


def ladder_reordered(load: str, seed: int) -> Scenario:
    """`ladder_honest`, but groups come for the first time in another order than in all rounds after that. A policy that
    deals groups out to replicas by turns then no longer puts together groups that never come at the same time."""

    def deal(parts: list[Pieces]) -> list[Pieces]:
        first = parts[:GROUPS]
        random.Random(f"ladder_reordered:{seed}:order").shuffle(first)
        return first + parts[GROUPS:]

    return ladder_of("ladder_honest", seed, [_stage(load)], honest=True, deal=deal)


def ladder_random(load: str, seed: int) -> Scenario:
    """`ladder_honest`, but each prompt of the stage is of a group drawn at random."""

    def deal(parts: list[Pieces]) -> list[Pieces]:
        rng, warm_up = random.Random(f"ladder_random:{seed}:groups"), WARM_UP_RPS * WARM_UP_S
        return parts[:warm_up] + [replace(part, group=rng.randrange(GROUPS)) for part in parts[warm_up:]]

    return ladder_of("ladder_honest", seed, [_stage(load)], honest=True, deal=deal)


def ladder_full_honest(_load: str, seed: int) -> Scenario:
    """All stages."""
    return ladder_of("ladder_full_honest", seed, STAGES, honest=True)


def ladder_full_published(_load: str, seed: int) -> Scenario:
    """All stages."""
    return ladder_of("ladder_full_published", seed, STAGES, honest=False)


# Adversaries


def one_group(load: str, seed: int) -> Scenario:
    """One prefix of 8,000 tokens for all and a short question each: a policy that follows the prefix makes a hot spot.
    Four replicas and short answers, so that the run is long beside an answer."""
    setting = ClusterSpec(replicas=4, seed=seed)
    return scenario(
        "one_group", load, setting, lambda rng, n: Pieces(0, 20, n, rng.randint(1, 3), rng.randint(20, 100))
    )


def all_unique(load: str, seed: int) -> Scenario:
    """No prompts share a prefix: only balance counts. Lengths vary as chats' do, over an order of magnitude."""

    def part(rng: random.Random, number: int) -> Pieces:
        return Pieces(0, 0, number, min(60, 1 + int(rng.lognormvariate(2.3, 0.9))), rng.randint(50, 500))

    return scenario("all_unique", load, ClusterSpec(seed=seed), part)


def working_set_3x(load: str, seed: int) -> Scenario:
    """Groups requested uniformly, with prefixes that are together three times as large as the fleet's caches."""
    setting, prefix_pieces = ClusterSpec(seed=seed), 30
    groups = 3 * fleet_kv_tokens(setting) // (prefix_pieces * PIECE_TOKENS)

    def part(rng: random.Random, number: int) -> Pieces:
        return Pieces(rng.randrange(groups), prefix_pieces, number, 1, rng.randint(50, 350))

    return scenario("working_set_3x", load, setting, part)


def decode_heavy(load: str, seed: int) -> Scenario:
    """Short prompts with long answers: a request is cheap to begin and expensive to run. Four replicas, so that the run
    is long beside an answer."""

    def part(rng: random.Random, number: int) -> Pieces:
        return Pieces(rng.randrange(40), 2, number, rng.randint(3, 12), rng.randint(400, 1_200))

    return scenario("decode_heavy", load, ClusterSpec(replicas=4, seed=seed), part)


def long_prompts(load: str, seed: int) -> Scenario:
    """Documents of 10,000 to 60,000 tokens, each used about four times on average. The longest alone takes 6 s of
    prefill, hence a limit of 5 s, which short or cached prompts can meet."""
    requests = 400
    lengths = random.Random(f"long_prompts:{seed}:lengths").choices(range(25, 151), k=requests // 4)

    def part(rng: random.Random, number: int) -> Pieces:
        document = rng.randrange(len(lengths))
        return Pieces(document, lengths[document], number, 1, rng.randint(50, 350))

    return scenario("long_prompts", load, ClusterSpec(seed=seed), part, requests=requests, ttft_limit_s=5.0)


BURST, BETWEEN_BURSTS = 16, 84


def cold_burst(load: str, seed: int) -> Scenario:
    """Bursts over a background: sixteen requests of each hundred come at one moment and share a new prefix of 20,000 to
    60,000 tokens. The background is 100 of the ladder's groups with shorter answers. A limit of 5 s: the prefix alone
    takes up to 6 s, once."""
    rng = random.Random(f"cold_burst:{seed}")
    parts: list[Pieces] = []
    times: list[float] = []
    now_s = 0.0
    while len(parts) < REQUESTS:
        number = len(parts)
        now_s += rng.expovariate(1.0)
        if number % (BETWEEN_BURSTS + BURST) == BETWEEN_BURSTS:
            pieces = rng.randint(50, 150)
            parts += [Pieces(1_000 + number, pieces, number + i, 1, rng.randint(50, 350)) for i in range(BURST)]
            times += [now_s] * BURST
            now_s += BURST  # keeps the mean rate of the background
        else:
            parts.append(Pieces(rng.randrange(100), SYSTEM_PIECES, number, QUESTION_PIECES, rng.randint(50, 350)))
            times.append(now_s)
    turns = turns_of(f"cold_burst:{seed}", parts, times)
    return scale_to_load("cold_burst", load, turns, ClusterSpec(seed=seed), 5.0)
