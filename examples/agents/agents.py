"""Agents with the official OpenAI client: nothing but the base URL says that there is a router.

    .venv/bin/python examples/agents/agents.py --base-url http://127.0.0.1:8000/v1

All agents share a system prompt, and each has a task of its own that grows by a turn at a time. The router keeps an
agent on the replica that holds its history, and spreads the agents over all replicas. A line for each turn says where
the turn went, why, and how much of its prompt was cached, as the answer's headers tell.
"""

from __future__ import annotations

import argparse
import asyncio
from collections import Counter
from collections.abc import Sequence

from openai import AsyncOpenAI
from openai.types.chat import ChatCompletionMessageParam

RULES = " ".join(f"Rule {n}: look a thing up before you change it, and say what you found." for n in range(200))
STEPS = ("Read the file.", "Find the cause.", "Write the fix.", "Run the tests.", "Sum up what you did.")


async def agent(client: AsyncOpenAI, model: str, number: int, turns: int) -> list[str]:
    """One agent: as many turns as asked for, each of which repeats all before it. Returns the replica of each turn."""
    messages: list[ChatCompletionMessageParam] = [
        {"role": "system", "content": RULES},
        {"role": "user", "content": f"You are agent {number}. Repair module {number}."},
    ]
    replicas = []
    for turn in range(turns):
        raw = await client.chat.completions.with_raw_response.create(model=model, messages=messages, max_tokens=32)
        answer = raw.parse()
        replica = raw.headers.get("x-warmroute-replica", "unknown")
        reason = raw.headers.get("x-warmroute-reason", "unknown")
        cached = raw.headers.get("x-warmroute-predicted-cached-tokens", "unknown")
        prompt = answer.usage.prompt_tokens if answer.usage else "unknown"
        print(f"agent {number}, turn {turn + 1}: {replica} ({reason}), {cached} of {prompt} prompt tokens cached")
        replicas.append(replica)
        messages.append({"role": "assistant", "content": answer.choices[0].message.content or ""})
        messages.append({"role": "user", "content": STEPS[turn % len(STEPS)]})
    return replicas


async def run(base_url: str, api_key: str, model: str, agents: int, turns: int) -> None:
    """All agents at once, and how their turns were spread."""
    async with AsyncOpenAI(base_url=base_url, api_key=api_key) as client:
        found = await asyncio.gather(*(agent(client, model, number, turns) for number in range(agents)))
    for replica, count in sorted(Counter(replica for replicas in found for replica in replicas).items()):
        print(f"{replica}: {count} turns")
    stayed = sum(len(set(replicas)) == 1 for replicas in found)
    print(f"{stayed} of {agents} agents stayed on one replica")


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command."""
    parser = argparse.ArgumentParser(description="Agents that talk to a router with the OpenAI client.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="unused", help="where the router asks for keys")
    parser.add_argument("--model", default="sim", help="a model that the replicas serve (sim)")
    parser.add_argument("--agents", type=int, default=6)
    parser.add_argument("--turns", type=int, default=4)
    options = parser.parse_args(argv)
    asyncio.run(run(options.base_url, options.api_key, options.model, options.agents, options.turns))


if __name__ == "__main__":
    main()
