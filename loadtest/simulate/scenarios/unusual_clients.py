"""Unusual clients and probes: arrivals in bursts, answers of thinking models, chats among agents."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import islice
from math import exp, log

from loadtest.common.traces import Request, Session, shipped_trace
from loadtest.simulate.engine.cluster_spec import ClusterSpec
from loadtest.simulate.engine.workload import Workload, prepare
from loadtest.simulate.scenarios import generated
from loadtest.simulate.scenarios.generated import BLOCK_TOKENS, PIECE_TOKENS, Pieces
from loadtest.simulate.scenarios.odd import REQUESTS, Part, groups_of
from loadtest.simulate.scenarios.recorded import OUTPUT_TOKENS_MAX, THINK_MAX_S, sessions_sustained
from loadtest.simulate.scenarios.scenario import LOADS, Scenario, in_half

# Arrivals

BURST, BURST_GROUPS = (16, 48), (1, 3)


def odd_bursts(load: str, seed: int) -> Scenario:
    """Requests come 16 to 48 at one moment, with pauses between. Those of a burst are of one to three of 24 groups with
    prefixes of 4,000 to 20,000 tokens. A limit of 5 s: a burst is some seconds of work."""
    name = f"odd_bursts:{seed}"
    rng, common = random.Random(name), groups_of("odd_bursts", seed, 24)
    lengths = [rng.randint(10, 50) for _ in range(24)]
    parts, times, now_s = list[Pieces](), list[float](), 0.0
    while len(parts) < REQUESTS:
        size = rng.randint(*BURST)
        now_s += size * rng.uniform(0.5, 1.5)
        asked = rng.sample(range(24), rng.randint(*BURST_GROUPS))
        for _ in range(size):
            group = rng.choice(asked)
            parts.append(replace(common(rng, len(parts)), group=group, shared=lengths[group]))
            times.append(now_s)
    turns = generated.turns_of(name, parts[:REQUESTS], times[:REQUESTS])
    return generated.scale_to_load("odd_bursts", load, turns, ClusterSpec(seed=seed), 5.0)


# Long answers

THOUGHTS = (10_000, 30_000)
THINKING_TIMEOUT_S = 7_200.0
THINKING_REQUESTS, THINKING_REPLICAS = 400, 4
HARDLY_CACHED = 0.1
"""Part of the caches that capacity reserves for reuse, if there is hardly any reuse."""


def _thoughts(rng: random.Random) -> int:
    low, high = map(log, THOUGHTS)
    return int(exp(rng.uniform(low, high)))


def odd_thinking(load: str, seed: int) -> Scenario:
    """Thinking models: answers of 10,000 to 30,000 tokens (log-uniform) to prompts of 1,200 to 4,000, of which 800 are
    common. An answer takes minutes, and grows to ten times its prompt. Four replicas; clients wait for two hours."""

    def part(rng: random.Random, number: int) -> Pieces:
        return Pieces(0, 2, number, rng.randint(1, 8), _thoughts(rng))

    return _make_thinking("odd_thinking", load, seed, part, THINKING_REQUESTS)


THINKING_SHARE = 0.15


def odd_thinking_chats(load: str, seed: int) -> Scenario:
    """One request of seven is answered with 10,000 to 30,000 tokens, the others with 50 to 350: chats in 40 groups with
    prefixes of 1,600 to 8,000 tokens. The request itself does not show which it is. Four replicas."""
    chats = groups_of("odd_thinking_chats", seed, 40, (4, 20), (1, 4))

    def part(rng: random.Random, number: int) -> Pieces:
        chat = chats(rng, number)
        return replace(chat, output_tokens=_thoughts(rng)) if rng.random() < THINKING_SHARE else chat

    return _make_thinking("odd_thinking_chats", load, seed, part, REQUESTS)


def _make_thinking(name: str, load: str, seed: int, part: Part, requests: int) -> Scenario:
    rng = random.Random(f"{name}:{seed}")
    parts = [part(rng, number) for number in range(requests)]
    turns = generated.turns_of(f"{name}:{seed}", parts, generated.poisson(rng, requests, 1.0))
    setting = ClusterSpec(replicas=THINKING_REPLICAS, timeout_s=THINKING_TIMEOUT_S, seed=seed)
    return generated.scale_to_load(name, load, turns, setting, 2.0, cache_share=HARDLY_CACHED)


# Chats among agents

AGENTS, CHATTERS_EACH = 0.75, 2
"""Agents as a part of those that the caches hold, and people who chat for each of them."""
AGENT_REPLICAS, CHAT_TURNS, USER_CHATS = 4, 4, 30
CHAT_PIECES, CHAT_TOKENS = (1, 5), (50, 300)
CHAT_THINK_S = 15.0


def odd_chats_among_agents(load: str, seed: int) -> Scenario:
    """People who chat, two for each session of Claude Code on the same fleet: chats of four turns that begin with 400
    to 2,000 tokens, beside contexts of 74,000 on average. Both wait for their answers. Four replicas with caches that
    would hold a third more sessions at `at`."""
    name = f"odd_chats_among_agents:{seed}"
    setting, rng = ClusterSpec(replicas=AGENT_REPLICAS, seed=seed), random.Random(name)
    half = [session for session in shipped_trace("claude_code_sessions").sessions if in_half(session.name, seed)]
    agents = max(1, round(AGENTS * LOADS[load] * sessions_sustained(half, setting)))
    active = (1 + CHATTERS_EACH) * agents
    order = iter(rng.sample(half, len(half)))
    begun: list[Session] = []
    for number in range(active + agents):  # twice the agents that are active at a time, to replace those that end
        chats = number < active and number % (1 + CHATTERS_EACH)
        begun.append(_chatter(rng, f"{name}:{number}") if chats else next(order))
    pairs = ((session.name, request) for session in begun for request in session.requests)
    turns = iter(prepare(pairs, BLOCK_TOKENS, output_tokens_max=OUTPUT_TOKENS_MAX))
    workload = Workload(
        "odd_chats_among_agents",
        tuple(tuple(islice(turns, len(session.requests))) for session in begun),
        False,
        BLOCK_TOKENS,
        active=active,
        ramp_s=THINK_MAX_S,
        think_max_s=THINK_MAX_S,
        requests_max=REQUESTS,
    )
    return Scenario(workload, setting, active, "sessions")


def _chatter(rng: random.Random, name: str) -> Session:
    """Return a session of one chat after another, enough for the whole run."""
    requests = list[Request]()
    for chat in range(USER_CHATS):
        pieces = rng.randint(*CHAT_PIECES)
        for turn in range(CHAT_TURNS):
            requests.append(
                Request(
                    at_s=0.0,
                    think_s=rng.expovariate(1 / CHAT_THINK_S),
                    input_tokens=PIECE_TOKENS * (pieces + turn),
                    output_tokens=rng.randint(*CHAT_TOKENS),
                    namespace=f"{name}:{chat}",
                    block_tokens=PIECE_TOKENS,
                    runs=((0, pieces + turn),),
                )
            )
    return Session(name, tuple(requests))


# Routers with stale metrics, and fleets with little choice


def odd_stale_metrics(load: str, seed: int) -> Scenario:
    """Routers read the engines' metrics only every 10 s; 100 groups with prefixes of 4,000 to 20,000 tokens, and
    answers of 100 to 700. Four replicas."""
    part = groups_of("odd_stale_metrics", seed, 100, answers=(100, 700))
    setting = ClusterSpec(replicas=4, probe_interval_s=10.0, seed=seed)
    return generated.scenario("odd_stale_metrics", load, setting, part, requests=REQUESTS)


def odd_two_replicas(load: str, seed: int) -> Scenario:
    """Two replicas, and 60 groups with prefixes of 4,000 to 20,000 tokens, together a little more than both caches
    hold."""
    part = groups_of("odd_two_replicas", seed, 60)
    return generated.scenario("odd_two_replicas", load, ClusterSpec(replicas=2, seed=seed), part, requests=REQUESTS)
