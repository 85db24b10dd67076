"""Fleets of the engines of the zoo (loadtest/fake_engine/zoo). They differ in their metrics pages, and in the part of
their cached tokens that they compute again."""

from __future__ import annotations

import random
from dataclasses import replace

from loadtest.fake_engine.zoo.member import DENSE, Member
from loadtest.simulate.engine.cluster_spec import ClusterSpec
from loadtest.simulate.engine.machine import Machine
from loadtest.simulate.scenarios import generated
from loadtest.simulate.scenarios.generated import Pieces
from loadtest.simulate.scenarios.odd import groups_of
from loadtest.simulate.scenarios.scenario import Scenario

REPLICAS, KV_TOKENS = 4, 100_000
GROUPS = 40


def alike(
    member: Member, load: str, seed: int, requests: int, *, right_page: bool = False, events: bool = False
) -> Scenario:
    """Four replicas of one kind, which hold 100,000 tokens each; 40 groups have prefixes of 4,000 to 20,000 tokens,
    more than all caches hold together. With `right_page` their metrics are those of the dense engine. With `events`
    routers follow KV events."""
    machine = Machine(member=member, page=DENSE if right_page else None)
    setting = ClusterSpec(
        seed=seed,
        replicas=REPLICAS,
        kv_tokens=KV_TOKENS,
        machines=(machine,) * REPLICAS,
        grade="exact" if events else "estimated",
    )
    return generated.scenario("zoo", load, setting, groups_of("zoo", seed, GROUPS), requests=requests)


def one_among(member: Member, load: str, seed: int, requests: int) -> Scenario:
    """One replica of a kind beside three dense ones. No two prompts, of 400 to 2,400 tokens, have a common part, so
    that only load matters."""

    def part(rng: random.Random, number: int) -> Pieces:
        return Pieces(number, 0, number, rng.randint(1, 6), rng.randint(50, 350))

    setting = ClusterSpec(seed=seed, replicas=REPLICAS, machines=(Machine(member=member),))
    made = generated.scenario("zoo_among", load, setting, part, requests=requests)
    return replace(made, workload=replace(made.workload, name="zoo_among"))
