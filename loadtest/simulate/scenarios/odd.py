"""Fleets of unequal replicas, and engines with an unusual setup.

Most have one workload in common, groups with a prefix each that are requested at random, so that the fleets differ and
not the requests. Loads are shares of the fleet's capacity with its oddity (capacity.py).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

from loadtest.common.traces import Request
from loadtest.fake_engine.calibration import CALIBRATIONS
from loadtest.simulate.engine.cluster_spec import ClusterSpec, Fault
from loadtest.simulate.engine.machine import Machine
from loadtest.simulate.engine.workload import MODEL
from loadtest.simulate.scenarios import generated
from loadtest.simulate.scenarios.generated import Pieces
from loadtest.simulate.scenarios.scenario import Scenario

REQUESTS = 800
Part = Callable[[random.Random, int], Pieces]
"""Function that makes the request of a number, as `generated.scenario` takes it."""


def groups_of(
    name: str,
    seed: int,
    groups: int,
    pieces: tuple[int, int] = (10, 50),
    fresh: tuple[int, int] = (1, 4),
    answers: tuple[int, int] = (50, 350),
) -> Part:
    """Return a function that makes requests of groups, all with the same frequency.

    - `pieces`: the range of a prefix's length
    - `fresh`: the range of the length of a tail, which no other prompt has
    - `answers`: the range of an answer's tokens
    """
    lengths = random.Random(f"{name}:{seed}:lengths").choices(range(pieces[0], pieces[1] + 1), k=groups)

    def part(rng: random.Random, number: int) -> Pieces:
        group = rng.randrange(groups)
        return Pieces(group, lengths[group], number, rng.randint(*fresh), rng.randint(*answers))

    return part


def fleet_of(
    name: str,
    load: str,
    seed: int,
    part: Part,
    machines: tuple[Machine, ...] = (),
    *,
    replicas: int = 8,
    kv_tokens: int | None = None,
) -> Scenario:
    """Return the workload `part` on a fleet that has these machines first."""
    setting = ClusterSpec(seed=seed, replicas=replicas, machines=machines, kv_tokens=kv_tokens)
    return generated.scenario(name, load, setting, part, requests=REQUESTS)


def add_faults(made: Scenario, faults: Callable[[float], tuple[Fault, ...]]) -> Scenario:
    """Return the scenario with faults, at times that are computed from the arrival of its last request."""
    last_s = max(turn.at_s for session in made.workload.sessions for turn in session)
    return replace(made, setting=replace(made.setting, faults=faults(last_s)))


# Replicas that differ for the whole run

SMALL_KV_TOKENS = 100_000


def odd_big_kv(load: str, seed: int) -> Scenario:
    """One of eight replicas has four times the KV cache of the others, 400,000 tokens; 100 groups have prefixes of
    4,000 to 20,000 tokens, a little more than all caches hold together."""
    part = groups_of("odd_big_kv", seed, 100)
    return fleet_of("odd_big_kv", load, seed, part, (Machine(kv_factor=4.0),), kv_tokens=SMALL_KV_TOKENS)


def odd_one_fast(load: str, seed: int) -> Scenario:
    """One of eight replicas is twice as fast as the others; 100 groups."""
    return fleet_of("odd_one_fast", load, seed, groups_of("odd_one_fast", seed, 100), (Machine(slowness=0.5),))


def odd_one_slow(load: str, seed: int) -> Scenario:
    """One of eight replicas is half as fast as the others, from the first request to the last; 100 groups."""
    return fleet_of("odd_one_slow", load, seed, groups_of("odd_one_slow", seed, 100), (Machine(slowness=2.0),))


UNEQUAL = (1.3, 1.6, 2.0, 3.0)


def odd_unequal_slow(load: str, seed: int) -> Scenario:
    """Steps of four of eight replicas take 1.3, 1.6, 2 and 3 times as long as those of the others; 100 groups."""
    machines = tuple(Machine(slowness=slowness) for slowness in UNEQUAL)
    return fleet_of("odd_unequal_slow", load, seed, groups_of("odd_unequal_slow", seed, 100), machines)


def odd_few_slots(load: str, seed: int) -> Scenario:
    """Engines run at most 16 sequences at a time, which need a fourth of their KV cache: requests wait in the engine
    while a probe reports free memory. 60 groups with prefixes of 1,600 to 4,800 tokens, answers of 100 to 600."""
    part = groups_of("odd_few_slots", seed, 60, (4, 12), (1, 3), (100, 600))
    return fleet_of("odd_few_slots", load, seed, part, (Machine(sequences_max=16),) * 4, replicas=4)


DOCUMENTS, DOCUMENT_PIECES = 0.15, (25, 75)


def odd_unchunked(load: str, seed: int) -> Scenario:
    """Engines without chunked prefill: whole prompts are computed in separate steps, in which no stream decodes. One
    request of seven is a document of 10,000 to 30,000 tokens that no other request shares. The others are of 60 groups
    with prefixes of 1,600 to 8,000. Four replicas."""
    common = groups_of("odd_unchunked", seed, 60, (4, 20), (1, 3), (100, 400))

    def part(rng: random.Random, number: int) -> Pieces:
        if rng.random() < DOCUMENTS:
            return Pieces(1_000 + number, 0, number, rng.randint(*DOCUMENT_PIECES), rng.randint(100, 400))
        return common(rng, number)

    return fleet_of("odd_unchunked", load, seed, part, (Machine(chunked=False),) * 4, replicas=4)


def odd_no_cache_on_two(load: str, seed: int) -> Scenario:
    """Prefix caching is off on two of eight replicas, as their metrics report; 100 groups."""
    machines = (Machine(prefix_caching=False),) * 2
    return fleet_of("odd_no_cache_on_two", load, seed, groups_of("odd_no_cache_on_two", seed, 100), machines)


def odd_far(load: str, seed: int) -> Scenario:
    """Two of eight replicas are 50 ms away from the router, each way. 100 groups have prefixes of 400 to 4,000 tokens,
    tails of 400 to 2,000 and answers of 20 to 100, so that the network delay matters beside a prefill."""
    part = groups_of("odd_far", seed, 100, (1, 10), (1, 5), (20, 100))
    return fleet_of("odd_far", load, seed, part, (Machine(far_s=0.05),) * 2)


SECOND_MODEL, SECOND_SHARE, SECOND_GROUPS = "sim-8b", 0.3, 1_000


def odd_two_models(load: str, seed: int) -> Scenario:
    """Two models behind one router. Five replicas serve the model of seven requests in ten. Three serve the other one
    (Llama-3.1-8B's on an A100) with longer answers, 200 to 600 tokens; 60 groups and 30."""
    name, other = f"odd_two_models:{seed}", CALIBRATIONS["llama-3.1-8b-a100"]
    machines = (Machine(model=SECOND_MODEL),) * 3
    setting = ClusterSpec(seed=seed, machines=machines, others=(other,) * len(machines))
    first = groups_of("odd_two_models", seed, 60)
    second = groups_of("odd_two_models:second", seed, 30, (4, 20), (1, 3), (200, 600))
    rng, parts = random.Random(name), list[Pieces]()
    for number in range(REQUESTS):
        if rng.random() < SECOND_SHARE:
            part = second(rng, number)
            parts.append(replace(part, group=SECOND_GROUPS + part.group))
        else:
            parts.append(first(rng, number))
    times = generated.poisson(rng, REQUESTS, 1.0)
    turns = generated.turns_of(name, parts, times, _model_of)
    return generated.scale_to_load("odd_two_models", load, turns, setting, 2.0)


def _model_of(request: Request) -> str:
    group = int(request.namespace.rpartition(":")[2])
    return SECOND_MODEL if group >= SECOND_GROUPS else MODEL


# Changes during the run

JOINS_AT = 0.4


def odd_cold_join(load: str, seed: int) -> Scenario:
    """All requests share one prefix of 24,000 tokens, with tails of 1,200 to 4,000. A sixth replica, which does not
    have the prefix, joins five when two fifths of the requests have come. The load is a share of the capacity of all
    six."""

    def part(rng: random.Random, number: int) -> Pieces:
        return Pieces(0, 60, number, rng.randint(3, 10), rng.randint(30, 150))

    made = fleet_of("odd_cold_join", load, seed, part, replicas=6)
    return add_faults(made, lambda last_s: (Fault("join", JOINS_AT * last_s, 5),))


STEPS = ((0.15, 1.3), (0.25, 1.6), (0.35, 2.0), (0.65, 1.5), (0.75, 1.0))
"""(part of the run from which the step applies, factor of the time of engine steps)"""
FASTER = (0.3, 0.85, 0.6)
"""Parts of the run at which one replica becomes faster and returns to normal, and its factor."""
DRIFTING = 3


def odd_drift(load: str, seed: int) -> Scenario:
    """In mid-run three of eight replicas become twice as slow, step by step, and recover; another one is faster for
    half of the run. Answers are 50 to 150 tokens long at first and 250 to 750 in the end; 100 groups."""
    common = groups_of("odd_drift", seed, 100)

    def part(rng: random.Random, number: int) -> Pieces:
        longer = 1 + 4 * number / REQUESTS
        return replace(common(rng, number), output_tokens=int(longer * rng.randint(50, 150)))

    def faults(last_s: float) -> tuple[Fault, ...]:
        ends = [at for at, _ in STEPS[1:]]
        steps = [
            Fault("slow", last_s * at, number, last_s * (end - at), factor)
            for (at, factor), end in zip(STEPS, ends, strict=False)
            for number in range(DRIFTING)
        ]
        begins, ends_at, factor = FASTER
        return (*steps, Fault("slow", last_s * begins, DRIFTING, last_s * (ends_at - begins), factor))

    return add_faults(fleet_of("odd_drift", load, seed, part), faults)
