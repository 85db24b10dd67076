"""The mixed workload for SGLang's APIs, and its driver: as exact_workload.py, with `/generate` and without vLLM's own.

SGLang has no `allowed_token_ids`; a bias on the ids of whole words has the same effect. Messages and responses are not
here: SGLang turns them into chats of its own making, so their prompts are placed by estimate. Nor is `extra_key`: its
events cannot be told from those of plain prompts.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import httpx

from tests.real.exact_drive import Drive, send
from tests.real.exact_workload import CHAT, COMPLETIONS, FIRST_WORD_ID, LAST_ID, SHARED, TOOLS, Call, Script
from tests.real.talk import WORDS, Answer, events, note_headers, prose
from tests.real.vllm_server import MODEL

GENERATE = "/generate"
BIAS = 100.0
STREAM = {"stream": True, "stream_options": {"include_usage": True}}
Bias = dict[str, float]


def bias_for(allowed: list[int]) -> Bias:
    """What keeps an answer to these token ids."""
    return {str(id_): BIAS for id_ in allowed}


def chat_call(kind: str, said: list[dict[str, Any]], rng: random.Random, bias: Bias, more: dict[str, Any]) -> Call:
    """A chat request, streamed or not."""
    body = {"model": MODEL, "messages": said, "max_tokens": rng.randint(4, 40), "ignore_eos": True, "temperature": 0.0}
    body |= {"logit_bias": bias} | more
    return Call(kind, CHAT, body | (STREAM if rng.random() < 0.5 else {}))


def prompt_call(kind: str, prompt: str | list[int], rng: random.Random, bias: Bias, salt: dict[str, str]) -> Call:
    """One prompt of text or ids, through either API that takes it, streamed or not."""
    tokens, stream = rng.randint(4, 40), rng.random() < 0.5
    if rng.random() < 0.5:
        sampling = {"max_new_tokens": tokens, "ignore_eos": True, "temperature": 0.0, "logit_bias": bias}
        given = {"text": prompt} if isinstance(prompt, str) else {"input_ids": prompt}
        return Call(f"generate {kind}", GENERATE, {**given, "sampling_params": sampling, "stream": stream, **salt})
    body = {"model": MODEL, "prompt": prompt, "max_tokens": tokens, "ignore_eos": True, "temperature": 0.0}
    return Call(kind, COMPLETIONS, {**body, "logit_bias": bias, **salt, **(STREAM if stream else {})})


def turns_of_chat(name: str, rng: random.Random, bias: Bias, salt: str = "", system: str = "") -> Script:
    """A conversation; the same texts under another salt are another conversation to the engine."""
    said = [{"role": "system", "content": system}] if system else []
    kind = "salted" if salt else "shared system" if system else "chat"
    for turn in range(rng.randint(2, 6)):
        said = [*said, {"role": "user", "content": prose(f"{name} {turn}", rng.randint(20, 150))}]
        answer = yield chat_call(kind, said, rng, bias, {"cache_salt": salt} if salt else {})
        said = [*said, {"role": "assistant", "content": answer.text}]


def turns_with_tools(name: str, rng: random.Random, bias: Bias) -> Script:
    """An agent: what it called and what came back is in the history."""
    said: list[dict[str, Any]] = [{"role": "system", "content": SHARED[0]}, {"role": "user", "content": name}]
    for turn in range(rng.randint(2, 4)):
        yield chat_call("tools", said, rng, bias, {"tools": TOOLS, "tool_choice": "auto"})
        arguments = json.dumps({"path": f"{rng.choice(WORDS)}/{turn}.py", "lines": rng.randint(1, 99)})
        called = {"name": rng.choice(TOOLS)["function"]["name"], "arguments": arguments}
        calls = [{"id": f"call_{turn}", "type": "function", "function": called}]
        text = rng.choice([None, prose(f"{name} says {turn}", 10)])
        said = [*said, {"role": "assistant", "content": text, "tool_calls": calls}]
        said = [*said, {"role": "tool", "tool_call_id": f"call_{turn}", "content": prose(f"{name} {turn} result", 80)}]


def turns_of_text(name: str, rng: random.Random, bias: Bias) -> Script:
    """Text continued through either API, sometimes under a salt."""
    text = prose(f"{name} text", rng.randint(100, 500))
    salt = rng.choice([{}, {}, {"cache_salt": "tenant-3"}])
    for turn in range(rng.randint(1, 4)):
        answer = yield prompt_call("salted text" if salt else "text", text, rng, bias, salt)
        text += answer.text + prose(f"{name} more {turn}", rng.randint(20, 120))


def turns_of_ids(rng: random.Random, bias: Bias) -> Script:
    """Token ids, lengthened, and now and then asked for twice; all in the vocabulary, since others end SGLang."""
    ids = [rng.randint(FIRST_WORD_ID, LAST_ID) for _ in range(rng.randint(100, 600))]
    for _ in range(rng.randint(1, 4)):
        yield prompt_call("ids", ids, rng, bias, {})
        if rng.random() < 0.7:
            ids = ids + [rng.randint(FIRST_WORD_ID, LAST_ID) for _ in range(rng.randint(1, 150))]


def alone(name: str, rng: random.Random, bias: Bias, words: int, times: int) -> Script:
    """One prompt, sent once, or several times in a row: the engine computes its last page each time."""
    for _ in range(times):
        said = [{"role": "user", "content": prose(name, words)}]
        yield chat_call("again" if times > 1 else "unique", said, rng, bias, {})


def scripts(seed: str, bias: Bias) -> Iterator[Script]:
    """Scripts without end, of all kinds."""
    number = 0
    while True:
        rng, name = random.Random(f"{seed} {number}"), f"{seed} {number}"
        kinds = [
            turns_of_chat(name, rng, bias),
            turns_of_chat(name, rng, bias, system=rng.choice(SHARED)),
            turns_of_chat(name + " b", rng, bias, system=rng.choice(SHARED)),
            # Two salts for one text: whatever may not be shared would be here.
            turns_of_chat(f"{seed} tenants {number // 20}", rng, bias, f"tenant-{number % 2}", rng.choice(SHARED)),
            turns_with_tools(name, rng, bias),
            turns_of_text(name, rng, bias),
            turns_of_ids(rng, bias),
            alone(name + " only", rng, bias, rng.randint(150, 1_300), 1),
            alone(name + " again", rng, bias, rng.randint(60, 500), 3),
        ]
        rng.shuffle(kinds)
        yield from kinds
        number += 1


async def generate(client: httpx.AsyncClient, call: Call) -> Answer:
    """Make one call of `/generate`; never raises: what broke is in `failure`."""
    answer = Answer(streamed=bool(call.body["stream"]))
    try:
        async with client.stream("POST", call.path, json=call.body) as response:
            note_headers(answer, response)
            if response.status_code != 200:
                answer.failure = f"{response.status_code} {(await response.aread()).decode()[:300]}"
            elif answer.streamed:
                # Every event has the text from its beginning, and the counts.
                async for data in events(response):
                    note_generated(answer, data)
            else:
                note_generated(answer, (await response.aread()).decode())
    except httpx.HTTPError as broken:
        answer.failure = f"{type(broken).__name__}: {broken}"
    answer.failure = answer.failure or ("" if answer.prompt_tokens else "no usage")
    return answer


def note_generated(answer: Answer, data: str) -> None:
    """Keep text and counts of an answer, or of an event that is one so far."""
    said: dict[str, Any] = {} if data == "[DONE]" else json.loads(data)
    if "error" in said:
        answer.failure = f"error event {data[:200]}"
    elif said:
        meta = said["meta_info"]
        answer.text, answer.prompt_tokens, answer.cached_tokens = (
            said["text"],
            meta["prompt_tokens"],
            meta["cached_tokens"],
        )
        answer.completion_tokens = meta["completion_tokens"]


class SGLangDrive(Drive):
    """A driver that knows `/generate` too."""

    async def _send(self, call: Call) -> Answer:
        return await (generate if call.path == GENERATE else send)(self.client, call)
