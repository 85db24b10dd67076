"""Workloads for P2P KV transfer from CPU memory between replicas: a pool of prefixes, and sessions.

llm-d's published results for such transfers have two sides. If prefixes are requested uniformly, affinity is better
than placement by load with transfers. If sessions own long documents, the reverse is true. A router should need no
setting for this. Caches are small (153,600 tokens), so that a run is long beside the time to fill them.
"""

from __future__ import annotations

import random
from collections.abc import Callable

from loadtest.common.traces import Request
from loadtest.simulate.engine.capacity import capacity_rps
from loadtest.simulate.engine.cluster_spec import ClusterSpec
from loadtest.simulate.engine.workload import Workload, open_workload, prepare
from loadtest.simulate.scenarios.generated import (
    BLOCK_TOKENS,
    OWN_PIECES,
    PIECE_TOKENS,
    Pieces,
    poisson,
    turns_of,
)
from loadtest.simulate.scenarios.scenario import LOADS, Scenario

KV_TOKENS = 153_600
POOL_SHARE, POOL_PIECES = 0.8, 40
"""The pool's size as a multiple of all GPU caches, and the pieces of a prefix, which has 16,000 tokens."""
SESSION_SHARE, SESSION_TURNS, DOCUMENT_PIECES = 1.8, 8, (30, 90)
"""The size of all sessions' documents as a multiple of all GPU caches, the turns of a session, and the pieces of a
document, 12,000 to 36,000 tokens."""
GROWN_PIECES = 2
"""Pieces that a turn adds to the context: an answer and the next question."""


def pool(load: str, setting: ClusterSpec, *, requests: int) -> Scenario:
    """Prefixes of 16,000 tokens requested uniformly, with a question of 400 tokens each. Each is requested twice, on
    average, before requests count."""
    groups = max(1, round(POOL_SHARE * setting.replicas * KV_TOKENS / (POOL_PIECES * PIECE_TOKENS)))
    name, warm_up = f"pull_pool:{setting.seed}", 2 * groups
    rng = random.Random(name)
    count = warm_up + requests
    parts = [Pieces(rng.randrange(groups), POOL_PIECES, n, 1, rng.randint(100, 400)) for n in range(count)]
    turns = turns_of(name, parts, poisson(rng, count, 1.0))
    rate = LOADS[load] * capacity_rps(turns, setting, BLOCK_TOKENS)
    for turn in turns:
        turn.at_s /= rate
    workload = open_workload("pull_pool", turns, BLOCK_TOKENS, warm_up=warm_up)
    return Scenario(workload, setting, rate, "requests/s")


def sessions(load: str, setting: ClusterSpec, *, requests: int) -> Scenario:
    """Parallel sessions, each with a document of its own and questions about it, of 400 tokens after an answer of the
    same length; answers of 100 to 500 tokens. People read for a while between two turns, so that the load determines
    how busy GPUs are. The first turn of each session counts for no figure. A session that is over is followed by
    another."""
    name = f"pull_sessions:{setting.seed}"
    rng = random.Random(name)
    mean_pieces = sum(DOCUMENT_PIECES) / 2 + GROWN_PIECES * SESSION_TURNS / 2
    side_by_side = max(1, round(SESSION_SHARE * setting.replicas * KV_TOKENS / PIECE_TOKENS / mean_pieces))
    count = side_by_side + -(-requests // SESSION_TURNS)
    pairs = [(str(n), each) for n in range(count) for each in _session(rng, f"{name}:{n}")]
    turns = prepare(pairs, BLOCK_TOKENS, output_tokens_max=1_000_000)
    rate = LOADS[load] * capacity_rps(turns, setting, BLOCK_TOKENS)
    for turn in turns:
        turn.think_s *= side_by_side / rate
    workload = Workload(
        "pull_sessions",
        tuple(tuple(turns[n * SESSION_TURNS : (n + 1) * SESSION_TURNS]) for n in range(count)),
        False,
        BLOCK_TOKENS,
        active=side_by_side,
        ramp_s=side_by_side / rate,
        think_max_s=20 * side_by_side / rate,
        requests_max=side_by_side + requests,
        warm_up=side_by_side,
    )
    return Scenario(workload, setting, rate, "requests/s", 5.0)


def _session(rng: random.Random, namespace: str) -> list[Request]:
    begun = rng.randint(*DOCUMENT_PIECES)
    return [
        Request(
            at_s=0.0,
            think_s=rng.expovariate(1.0) if turn else 0.0,
            input_tokens=PIECE_TOKENS * (begun + 1 + GROWN_PIECES * turn),
            output_tokens=rng.randint(100, 500),
            namespace=namespace,
            block_tokens=PIECE_TOKENS,
            runs=((OWN_PIECES, begun + 1 + GROWN_PIECES * turn),),
        )
        for turn in range(SESSION_TURNS)
    ]


WORKLOADS: dict[str, Callable[..., Scenario]] = {"pool": pool, "sessions": sessions}
