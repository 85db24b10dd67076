"""Classes of requests on one fleet: people who wait for a first token, and batches without a waiting user."""

from __future__ import annotations

import random

from loadtest.simulate.engine.cluster_spec import ClusterSpec
from loadtest.simulate.scenarios import generated
from loadtest.simulate.scenarios.generated import Pieces
from loadtest.simulate.scenarios.scenario import LOADS, Scenario

LOAD = "1.2"  # share of the cluster's capacity
REQUESTS, REPLICAS, GROUPS = 1_200, 4, 40
MIXES = {"half": (0.5, (1.0,)), "most": (0.75, (1.0,)), "classes": (0.6, (0.5, 2.0))}
"""Part of the requests that are interactive, and the deadlines of their first tokens in seconds, by turns."""


def mixed_classes(mix: str, seed: int, requests: int = REQUESTS, load: str = LOAD) -> tuple[Scenario, dict[int, float]]:
    """Return the scenario, and the deadlines in seconds of the requests that have one, by the turn's number.

    Interactive requests are questions of 400 to 1,600 tokens after one of 40 prefixes of 4,000, and answers of 50 to
    250. The others are documents of 4,000 to 16,000 tokens without a common prefix, and answers of 100 to 400. There
    are four replicas, at `load` times their capacity.
    """
    name, (share, deadlines_s) = f"mixed_classes:{mix}:{seed}", MIXES[mix]
    rng = random.Random(name)
    parts, within_s = list[Pieces](), dict[int, float]()
    for number in range(requests):
        if rng.random() < share:
            within_s[number] = deadlines_s[len(within_s) % len(deadlines_s)]
            parts.append(Pieces(rng.randrange(GROUPS), 10, number, rng.randint(1, 4), rng.randint(50, 250)))
        else:
            parts.append(Pieces(1_000 + number, 0, number, rng.randint(10, 40), rng.randint(100, 400)))
    turns = generated.turns_of(name, parts, generated.poisson(rng, requests, 1.0))
    LOADS.setdefault(load, float(load))
    setting = ClusterSpec(replicas=REPLICAS, seed=seed)
    return generated.scale_to_load("mixed_classes", load, turns, setting, max(deadlines_s)), within_s
