"""A mixed workload that makes small caches evict all the time, and what each of its answers said about caching.

Theory: a script is a conversation, or what else a client does in a row: a generator that yields calls and is sent
their answers. `drive` keeps more scripts open than the replicas' pools can hold together and advances a random one
each time, so that prefixes are shared, evicted half, evicted whole and made again, on both replicas. Everything is
drawn from names and one seed. Four APIs, streamed and whole; the router is asked nothing but its receipt, and the
truth is what the engine itself says it found cached.
"""

from __future__ import annotations

import json
import random
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Any

from tests.real.talk import WORDS, Answer, chat, prose
from tests.real.vllm_server import MODEL

CHAT, COMPLETIONS, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"
SHARED = tuple(prose(f"exact shared {number}", words) for number, words in enumerate((150, 330, 520)))
FIRST_WORD_ID, LAST_ID = 300, 4_000
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": prose(name, 25),
            "parameters": {
                "type": "object",
                "properties": {"path": {"type": "string", "description": "where"}, "lines": {"type": "integer"}},
                "required": ["path"],
            },
        },
    }
    for name in ("read_file", "list_folder", "run_tests")
]


@dataclass(frozen=True)
class Call:
    """One request to make."""

    kind: str
    path: str
    body: dict[str, Any]


Script = Generator[Call, Answer, None]


def turns_of_chat(name: str, rng: random.Random, allowed: list[int], salt: str = "", system: str = "") -> Script:
    """A conversation through chat; the same texts under another salt are another conversation to the engine."""
    messages = [{"role": "system", "content": system}] if system else []
    kind = "salted" if salt else "shared system" if system else "chat"
    for turn in range(rng.randint(2, 6)):
        messages.append({"role": "user", "content": prose(f"{name} {turn}", rng.randint(30, 200))})
        body = chat(messages, rng.randint(8, 48), rng.random() < 0.5, allowed)
        answer = yield Call(kind, CHAT, body | ({"cache_salt": salt} if salt else {}))
        messages.append({"role": "assistant", "content": answer.text})


def turns_with_tools(name: str, rng: random.Random, allowed: list[int]) -> Script:
    """An agent: what it called and what came back is in the history, as its framework writes it."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": SHARED[0]}, {"role": "user", "content": name}]
    for turn in range(rng.randint(2, 5)):
        body = chat(messages, 12, rng.random() < 0.5, allowed) | {"tools": TOOLS, "tool_choice": "auto"}
        yield Call("tools", CHAT, body)
        arguments = json.dumps({"path": f"{rng.choice(WORDS)}/{turn}.py", "lines": rng.randint(1, 99)})
        called = {"name": rng.choice(TOOLS)["function"]["name"], "arguments": arguments}
        said = rng.choice([None, prose(f"{name} says {turn}", 10)])
        calls = [{"id": f"call_{turn}", "type": "function", "function": called}]
        messages.append({"role": "assistant", "content": said, "tool_calls": calls})
        result = prose(f"{name} result {turn}", rng.randint(40, 160))
        messages.append({"role": "tool", "tool_call_id": f"call_{turn}", "content": result})


def completions(body: dict[str, Any], rng: random.Random, allowed: list[int]) -> dict[str, Any]:
    """A body for completions, streamed or not."""
    body = {"model": MODEL, "max_tokens": rng.randint(8, 40), "temperature": 0.0, "ignore_eos": True} | body
    body |= {"allowed_token_ids": allowed}
    return body | ({"stream": True, "stream_options": {"include_usage": True}} if rng.random() < 0.5 else {})


def completed_text(name: str, rng: random.Random, allowed: list[int]) -> Script:
    """Text continued again and again, sometimes under a salt."""
    text = prose(f"{name} text", rng.randint(100, 500))
    salt = rng.choice([{}, {}, {"cache_salt": "tenant-3"}])
    for turn in range(rng.randint(1, 4)):
        answer = yield Call(
            "salted" if salt else "text", COMPLETIONS, completions({"prompt": text} | salt, rng, allowed)
        )
        text += answer.text + prose(f"{name} more {turn}", rng.randint(20, 120))


def completed_ids(rng: random.Random, allowed: list[int]) -> Script:
    """Token ids, lengthened, and now and then asked for twice."""
    ids = [rng.randint(FIRST_WORD_ID, LAST_ID) for _ in range(rng.randint(100, 600))]
    for _ in range(rng.randint(1, 4)):
        yield Call("ids", COMPLETIONS, completions({"prompt": ids}, rng, allowed))
        if rng.random() < 0.7:
            ids = ids + [rng.randint(FIRST_WORD_ID, LAST_ID) for _ in range(rng.randint(1, 150))]


def turns_of_messages(name: str, rng: random.Random) -> Script:
    """Anthropic's API, with a system prompt shared with chat, cache marks, and tools now and then."""
    system = [{"type": "text", "text": rng.choice(SHARED), "cache_control": {"type": "ephemeral"}}]
    said: list[dict[str, Any]] = []
    given = [{"name": t["function"]["name"], "input_schema": t["function"]["parameters"]} for t in TOOLS]
    tools = {"tools": given} if rng.random() < 0.4 else {}
    body = {"model": MODEL, "max_tokens": rng.randint(4, 24), "system": system, "temperature": 0.0, **tools}
    content: Any = prose(f"{name} first", rng.randint(20, 150))
    for turn in range(rng.randint(1, 4)):
        said = [*said, {"role": "user", "content": content}]
        stream = {"stream": True} if rng.random() < 0.5 else {}
        answer = yield Call("messages tools" if tools else "messages", MESSAGES, body | {"messages": said} | stream)
        content = prose(f"{name} {turn}", rng.randint(20, 150))
        if tools:
            use = {
                "type": "tool_use",
                "id": f"toolu_{turn}",
                "name": "read_file",
                "input": {"path": name, "lines": turn},
            }
            said = [*said, {"role": "assistant", "content": [{"type": "text", "text": "I look."}, use]}]
            content = [{"type": "tool_result", "tool_use_id": f"toolu_{turn}", "content": content}]
        else:
            said = [*said, {"role": "assistant", "content": answer.text or "and"}]


def turns_of_responses(name: str, rng: random.Random) -> Script:
    """OpenAI's newer API, its history sent along, with function calls in it now and then."""
    said: list[dict[str, Any]] = []
    tools = rng.random() < 0.4
    body = {"model": MODEL, "instructions": rng.choice(SHARED), "store": False, "temperature": 0.0}
    body |= {"max_output_tokens": rng.randint(4, 24)}
    if tools:
        body |= {"tools": [{"type": "function", **t["function"]} for t in TOOLS]}
    for turn in range(rng.randint(1, 4)):
        said = [*said, {"role": "user", "content": prose(f"{name} {turn}", rng.randint(20, 150))}]
        stream = {"stream": True} if rng.random() < 0.5 else {}
        answer = yield Call("responses tools" if tools else "responses", RESPONSES, body | {"input": said} | stream)
        if tools:
            arguments = json.dumps({"path": name, "lines": turn})
            call = {"type": "function_call", "call_id": f"call_{turn}", "name": "run_tests", "arguments": arguments}
            output = prose(f"{name} out {turn}", 40)
            said = [*said, call, {"type": "function_call_output", "call_id": f"call_{turn}", "output": output}]
        else:
            said = [*said, {"role": "assistant", "content": answer.text or "and"}]


def crossing(name: str, rng: random.Random, allowed: list[int]) -> Script:
    """One conversation that goes on through another API."""
    messages = [{"role": "user", "content": prose(name, rng.randint(100, 300))}]
    answer = yield Call("crossing", CHAT, chat(messages, 20, stream=False, allowed=allowed))
    messages += [{"role": "assistant", "content": answer.text}, {"role": "user", "content": prose(name + " on", 80)}]
    yield Call("crossing", MESSAGES, {"model": MODEL, "max_tokens": 8, "temperature": 0.0, "messages": messages})
    body = {"model": MODEL, "max_output_tokens": 8, "temperature": 0.0, "store": False, "input": messages}
    yield Call("crossing", RESPONSES, body)


def unique(name: str, rng: random.Random, allowed: list[int]) -> Script:
    """A prompt that nobody sends again."""
    text = prose(f"{name} only", rng.randint(150, 1_300))
    yield Call("unique", CHAT, chat([{"role": "user", "content": text}], 8, rng.random() < 0.5, allowed))


def again(name: str, rng: random.Random, allowed: list[int]) -> Script:
    """The same prompt three times: the engine computes its last block each time."""
    messages = [{"role": "user", "content": prose(f"{name} again", rng.randint(60, 500))}]
    for _ in range(3):
        yield Call("again", CHAT, chat(messages, rng.randint(1, 20), rng.random() < 0.5, allowed))


def scripts(seed: str, allowed: list[int]) -> Iterator[Script]:
    """Scripts without end, of all kinds."""
    number = 0
    while True:
        rng = random.Random(f"{seed} {number}")
        name = f"{seed} {number}"
        # Two salts and no salt for one text: whatever may not be shared would be here.
        text, salt = f"{seed} tenants {number // 20}", f"tenant-{number % 2}"
        yield from rng.sample(
            [
                turns_of_chat(name, rng, allowed),
                turns_of_chat(name, rng, allowed, system=rng.choice(SHARED)),
                turns_of_chat(name + " b", rng, allowed, system=rng.choice(SHARED)),
                turns_of_chat(text, rng, allowed, salt=salt, system=rng.choice(["", SHARED[1]])),
                turns_with_tools(name, rng, allowed),
                completed_text(name, rng, allowed),
                completed_ids(rng, allowed),
                turns_of_messages(name, rng),
                turns_of_responses(name, rng),
                crossing(name, rng, allowed),
                unique(name, rng, allowed),
                again(name, rng, allowed),
            ],
            k=12,
        )
        number += 1
