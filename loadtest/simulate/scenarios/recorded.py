"""Workloads from recorded traces: the two that are shipped, and any file that `loadtest.common.traces` reads.

Mooncake's conversations come when they are due (open loop). Claude Code sessions wait for their answers and think
(closed loop). Replayed at recorded times, they would reverse the order of policies, because then a slow answer delays
no later request.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from loadtest.common.runs import block_count
from loadtest.common.traces import Request, Session, Trace, read_trace, shipped_trace
from loadtest.simulate.engine.capacity import capacity_rps, fleet_kv_tokens
from loadtest.simulate.engine.cluster_spec import ClusterSpec
from loadtest.simulate.engine.workload import SimRequest, Workload, open_workload, prepare
from loadtest.simulate.scenarios.scenario import CLAIM_SEEDS, LOADS, TUNE_SEEDS, Scenario, in_half

BLOCK_TOKENS = 64
THINK_MAX_S = 60.0
"""Longest wait between two turns. After a longer one the person has left, and the session's cache is gone anyway."""
OUTPUT_TOKENS_MAX = 3_000
"""The longest answer: with the longest prompt (128,000 tokens) it still fits the context."""
TTFT_LIMIT_S = 5.0
"""The TTFT limit of workloads in which the longest prompts alone take longer than 2 s."""


# Mooncake's conversations

MOONCAKE_REQUESTS = 1_200
MOONCAKE_REPLICAS = 4
"""Few enough that these requests span 500 s at capacity, four times the median wait between two turns."""


def conversation(request: Request) -> str:
    """Return the conversation's id, which is that of its second block: the first block is common to all prompts."""
    runs = request.runs
    if block_count(runs) < 2:
        return f"first:{runs[0][0]}"
    return str(runs[0][0] + 1 if runs[0][1] > 1 else runs[1][0])


@lru_cache(maxsize=2)
def conversations(trace: Trace) -> dict[str, list[Request]]:
    """Return requests of an open trace by conversation, in their order."""
    found: dict[str, list[Request]] = {}
    for session in trace.sessions:
        found.setdefault(conversation(session.requests[0]), []).append(session.requests[0])
    return found


def mooncake(load: str, seed: int) -> Scenario:
    """Conversations of one half, with the recorded waits between their turns. The load determines how many run at a
    time."""
    rate = LOADS[load] * _mooncake_rps(in_tuning=seed in TUNE_SEEDS)
    span_s = MOONCAKE_REQUESTS / rate
    turns = _sample_window(_conversations(seed), span_s, random.Random(f"mooncake:{seed}"))
    workload = open_workload("mooncake", turns, BLOCK_TOKENS)
    return Scenario(workload, ClusterSpec(replicas=MOONCAKE_REPLICAS, seed=seed), rate, "requests/s", TTFT_LIMIT_S)


def _conversations(seed: int) -> list[list[Request]]:
    trace = shipped_trace("mooncake_conversation_whole")
    return [requests for name, requests in conversations(trace).items() if in_half(name, seed)]


@lru_cache(maxsize=2)
def _mooncake_rps(*, in_tuning: bool) -> float:
    """Return the rate of a half that the cluster can sustain. Cache reuse depends on the density of the conversations,
    and that depends on this rate: two iterations are enough."""
    seed = TUNE_SEEDS[0] if in_tuning else CLAIM_SEEDS[0]
    rate = 1.0 * MOONCAKE_REPLICAS
    for _ in range(2):
        turns = _sample_window(_conversations(seed), MOONCAKE_REQUESTS / rate, random.Random(seed))
        rate = capacity_rps(turns, ClusterSpec(replicas=MOONCAKE_REPLICAS), BLOCK_TOKENS)
    return rate


def _sample_window(half: Sequence[Sequence[Request]], span_s: float, rng: random.Random) -> list[SimRequest]:
    """Return requests within a span, from conversations in random order. Each conversation is shifted to a random
    start, such that any moment of it may be in the span. Requests outside of the span are left out."""
    picked: list[tuple[str, Request]] = []
    for each in _shuffle_weighted(half, span_s, rng):
        lasts_s = each[-1].at_s - each[0].at_s
        moved_s = rng.uniform(-lasts_s, span_s) - each[0].at_s
        due = ((request, request.at_s + moved_s) for request in each)
        name = conversation(each[0])
        picked += [(name, replace(request, at_s=at_s)) for request, at_s in due if 0 <= at_s <= span_s]
        if len(picked) >= MOONCAKE_REQUESTS:
            break
    picked.sort(key=lambda pair: pair[1].at_s)
    return prepare(picked, BLOCK_TOKENS, output_tokens_max=OUTPUT_TOKENS_MAX)


def _shuffle_weighted(half: Sequence[Sequence[Request]], span_s: float, rng: random.Random) -> list[Sequence[Request]]:
    """Return the conversations in a random order, in which a conversation is likelier to be early if more starts put it
    into the span. So a long one occurs more often than a short one (weighted sampling without replacement, Efraimidis
    and Spirakis)."""
    keyed = [(rng.expovariate(span_s + each[-1].at_s - each[0].at_s), number) for number, each in enumerate(half)]
    return [half[number] for _, number in sorted(keyed)]


# Claude Code sessions

CLAUDE_REQUESTS = 1_200


def claude_code(load: str, seed: int, setting: ClusterSpec | None = None) -> Scenario:
    """Sessions of one half in random order, from their beginning. Prompts are 74,000 tokens long on average, nearly all
    of them already in the turn before: the limit of 2 s is for turns that are found cached.

    With a setting of its own it is the same workload on another cluster.
    """
    made = _claude_code(load, seed)
    return replace(made, setting=setting) if setting else made


@lru_cache(maxsize=1)  # about 60 MB; all scenarios with faults use the same sessions
def _claude_code(load: str, seed: int) -> Scenario:
    half = [session for session in shipped_trace("claude_code_sessions").sessions if in_half(session.name, seed)]
    return closed_scenario("claude_code", half, load, ClusterSpec(seed=seed), CLAUDE_REQUESTS)


def closed_scenario(
    name: str,
    sessions: Sequence[Session],
    load: str,
    setting: ClusterSpec,
    requests_max: int,
    *,
    ttft_limit_s: float = 2.0,
) -> Scenario:
    """Return sessions in closed loop. The load determines how many run at a time, the seed their order, and
    `requests_max` the number of requests."""
    order = random.Random(f"{name}:{setting.seed}").sample(sessions, len(sessions))
    active = max(1, round(LOADS[load] * sessions_sustained(sessions, setting)))
    picked: list[Session] = []
    for session in _endless(order):
        # Enough that no client is idle for lack of sessions, even if those that last until the end are the longest.
        if sum(sorted(len(each.requests) for each in picked)[:-active]) >= requests_max:
            break
        picked.append(session)
    pairs = ((session.name, each) for session in picked for each in session.requests)
    turns = iter(prepare(pairs, BLOCK_TOKENS, output_tokens_max=OUTPUT_TOKENS_MAX))
    workload = Workload(
        name,
        tuple(tuple(itertools.islice(turns, len(session.requests))) for session in picked),
        False,
        BLOCK_TOKENS,
        active=active,
        ramp_s=THINK_MAX_S,
        think_max_s=THINK_MAX_S,
        requests_max=requests_max,
    )
    return Scenario(workload, setting, active, "sessions", ttft_limit_s)


def sessions_sustained(sessions: Sequence[Session], setting: ClusterSpec) -> float:
    """Return the number of sessions with contexts that fit the fleet's caches together. With more sessions, one that
    thinks loses its cache to one that sends a request, and no router can keep all of them warm."""
    contexts = [request.input_tokens for session in sessions for request in session.requests]
    return fleet_kv_tokens(setting) * len(contexts) / sum(contexts)


def _endless(sessions: Sequence[Session]) -> Iterator[Session]:
    """Repeat the sessions without end; from the second lap on they have text of their own."""
    for lap in itertools.count():
        for session in sessions:
            if lap == 0:
                yield session
                continue
            name = f"{session.name}#{lap}"
            yield Session(name, tuple(replace(each, namespace=f"{each.namespace}#{lap}") for each in session.requests))


# Any trace


def trace_scenario(
    path: Path, load: str, setting: ClusterSpec, *, requests_max: int, input_tokens_max: int | None = None
) -> Scenario:
    """Return the first requests of a file, or all its sessions, of both halves of the data. An open trace's arrivals
    are stretched or compressed to the load's share of the cluster's capacity. Sessions are replayed in closed loop.
    Raises TraceError, OSError."""
    trace = read_trace(path, input_tokens_max=input_tokens_max)
    if trace.kind == "sessions":
        return closed_scenario(trace.name, trace.sessions, load, setting, requests_max, ttft_limit_s=TTFT_LIMIT_S)
    picked = [(conversation(each.requests[0]), each.requests[0]) for each in trace.sessions[:requests_max]]
    turns = prepare(picked, BLOCK_TOKENS, output_tokens_max=OUTPUT_TOKENS_MAX)
    rate = LOADS[load] * capacity_rps(turns, setting, BLOCK_TOKENS)
    first_s, span_s = turns[0].at_s, turns[-1].at_s - turns[0].at_s
    if span_s:
        for turn in turns:
            turn.at_s = (turn.at_s - first_s) * len(turns) / rate / span_s
    return Scenario(open_workload(trace.name, turns, BLOCK_TOKENS), setting, rate, "requests/s", TTFT_LIMIT_S)
