"""A fleet of agents, and a release of one of them: through the memory of texts into the ledger as in a router, and into
the audit, which must say the same."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from router.cli.audit.counts import Audit
from router.cli.audit.findings import findings_of
from router.cli.audit.log_requests import LoggedRequest
from router.core.dialects import PATHS
from router.core.insights.difference.compare import compare
from router.core.insights.prompt_memory.diff_candidate import DiffCandidate
from router.core.insights.prompt_memory.prompt_tracker import PromptTracker
from router.core.prompts.block_keys import chain_of
from router.core.types.cache_misses import MissReason, PromptAnalysis
from tests.core.insights.conversations import CHAT
from tests.core.insights.ledger.records import BEGAN_S, ledger, page, record
from tests.core.insights.prose import Prose, system_prompt, tool_names, tool_schema

BYTES_PER_TOKEN = 4
START = datetime(2026, 11, 25, 14, 3, 7, tzinfo=UTC)
REQUESTS_PER_S = 10


@dataclass(slots=True)
class Agent:
    """What an agent's prompts begin with."""

    system: str
    tools: list[dict[str, Any]]


def agents(count: int, *, tools: int, alike: bool) -> list[Agent]:
    """Agents that say their number; `alike`: all else is the same for all of them."""
    made = []
    for number in range(count):
        prose = Prose("agents" if alike else f"agent {number}")
        schemas = [
            {
                "type": "function",
                "function": {"name": name, "description": prose.prose(150), "parameters": tool_schema(prose)},
            }
            for name in tool_names(prose, tools)
        ]
        made.append(Agent(f"You are agent {number}. {system_prompt(prose, 5_000)}", schemas))
    return made


@dataclass(slots=True)
class Request:
    """One request of an agent."""

    at_s: float
    agent: int
    released: bool  # whether the agent's prompt is the released one
    body: bytes


def traffic(
    of: list[Agent], release: Callable[[Agent, datetime], Agent], *, before_s: float, requests: int, tasks: int = 0
) -> Iterator[Request]:
    """Conversations of all agents at once; after `before_s` agent 0 is released, and `requests` more are its own. With
    `tasks` all conversations begin with one of so many tasks, else each with its own."""
    rng, prose = random.Random(len(of)), Prose("traffic")
    given = [prose.question(300) for _ in range(tasks)]

    def begun(agent: int) -> list[Any]:
        task = rng.choice(given) if given else prose.question(rng.randint(60, 500))
        return [agent, [{"role": "user", "content": task}], rng.randint(1, 6)]

    slots = [begun(number % len(of)) for number in range(2 * len(of))]
    number = left = 0
    while left < requests:
        at_s = number / REQUESTS_PER_S
        number += 1
        slot = rng.choice(slots)
        who, messages, turns = slot
        released = who == 0 and at_s >= before_s
        agent = release(of[who], START + timedelta(seconds=at_s)) if released else of[who]
        left += released
        body: dict[str, Any] = {"model": "m", "messages": [{"role": "system", "content": agent.system}, *messages]}
        if agent.tools:
            body["tools"] = agent.tools
        yield Request(at_s, who, released, json.dumps(body).encode())
        if turns:
            said = [
                {"role": "assistant", "content": prose.prose(300)},
                {"role": "user", "content": prose.question(200)},
            ]
            slot[1:] = [messages + said, turns - 1]
        else:
            slot[:] = begun(who)


@dataclass(slots=True)
class Fleet:
    """A router's observatory, and an audit of the same requests."""

    sure: bool = True
    excerpts: bool = False
    now_s: float = 0.0
    evicted: int = 0  # tokens of each request that a replica held and dropped
    watcher: PromptTracker = field(init=False)
    ledger: Any = field(init=False)
    audit: Audit = field(init=False)

    def __post_init__(self) -> None:
        self.watcher = PromptTracker(64 << 20, 4 << 20, 1_024, excerpts=self.excerpts, seed=5)
        self.ledger = ledger(templates_max=1_024, excerpts=self.excerpts)
        self.audit = Audit(memory_bytes_max=64 << 20, excerpts=self.excerpts)

    def see(self, request: Request) -> PromptAnalysis:
        """One request that ends at once."""
        self.now_s = request.at_s
        ask = PATHS[CHAT].parse(CHAT, request.body)
        chain = chain_of(ask, "m")
        assert chain is not None
        assert ask.prompt is not None
        look = self.watcher.classify(ask, chain, session="", path=CHAT, body=request.body, sure=self.sure)
        if isinstance(look, DiffCandidate):
            if look.comparable:
                look.read()
                found = compare(look.before, look.after, from_bytes=look.from_bytes, body=request.body, path=CHAT)
                self.watcher.record_diff(look, found)
            look = look.sighting
        tokens, hit = (size // BYTES_PER_TOKEN for size in (ask.prompt.size, look.known_bytes))
        diverged = min(tokens - hit, look.repeated_bytes // BYTES_PER_TOKEN)
        misses = {MissReason.DIVERGED: diverged, MissReason.NEW: tokens - hit - diverged}
        if self.evicted and hit >= self.evicted:
            hit, misses[MissReason.EVICTED] = hit - self.evicted, self.evicted
        self.ledger.observe(
            record(self.now_s, hit, {miss: size for miss, size in misses.items() if size}, analysis=look)
        )
        self.ledger.know(self.watcher.templates())
        self.audit.add(LoggedRequest(CHAT, request.body, "m", "", "", None, 0, None))
        return look

    def advice(self) -> list[dict[str, Any]]:
        """What the page says now."""
        self.ledger.settle(BEGAN_S + self.now_s)
        return page(self.ledger)

    def audited(self) -> list[dict[str, Any]]:
        """What the audit says of all requests up to now."""
        return findings_of(self.audit, prefill_tokens_per_s=8_000).advice
