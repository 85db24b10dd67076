"""Requests of `python -m loadtest overhead`: precomputed, except for a number that makes each one unique.

short: 0.5 KB, each with its own text. mid and long: 16 KB and 200 KB of conversations. Each request repeats one of them
and ends in a unique question, like requests of agents. Texts are seeded and have line breaks and quotes, but only
ASCII. Non-ASCII letters double the cost of long prompts in the LLM routers measured so far, which would favour us.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from loadtest.proxy_cost.answers import MODEL

PATH = b"/v1/chat/completions"
CONVERSATIONS = {"mid": (64, 8), "long": (16, 40)}  # conversations, and messages of each
SHORT_BYTES = 512
SIZES = {"short": SHORT_BYTES, "mid": 16 << 10, "long": 200 << 10}
NUMBER = b"%012d"
MARK = "#" * 12  # placeholder for the number of the request
_WORDS = (
    *("cache", "prefix", "block", "token", "router", "replica", "batch", "stream", "prompt", "answer", "memory"),
    *("tensor", "kernel", "scheduler", "value", "the", "of", "and", "to", "is"),
)
_SPECIAL = ('a "quoted" word', "line\n", "path\\name")
SPECIAL_SHARE = 0.02


@dataclass(frozen=True, slots=True)
class Template:
    """A request with a gap for a number; the rest is fixed."""

    before: bytes
    after: bytes

    def request(self, number: int) -> bytes:
        """Return the bytes of a whole request."""
        return self.before + NUMBER % number + self.after


def text(seed: str, size: int) -> str:
    """Return words of about `size` bytes, the same for the same seed."""
    rng = random.Random(seed)
    said = [rng.choice(_SPECIAL if rng.random() < SPECIAL_SHARE else _WORDS) for _ in range(size // 5)]
    return " ".join(said)[:size]


def template(messages: list[dict[str, str]], **settings: object) -> Template:
    """Return a chat request; one of the messages contains MARK."""
    fields = {"model": MODEL, **settings, "messages": messages}
    body = json.dumps(fields, ensure_ascii=False).encode()
    before, after = body.split(MARK.encode())
    head = b"POST %b HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n"
    return Template(head % (PATH, len(body)) + before, after)


def single(size: int, **settings: object) -> Template:
    """Return a request with one message that begins with the number."""
    frame = len(template([{"role": "user", "content": MARK}]).after) + 100
    content = f"{MARK} {text(f'single {size}', max(0, size - frame))}"
    return template([{"role": "user", "content": content}], **settings)


def conversation(name: int, size: int, messages: int, **settings: object) -> Template:
    """Return a request with messages that are the same each time, and a unique question at the end."""
    roles = ["system", *(["user", "assistant"] * messages)]
    each = size // messages
    said = [{"role": roles[i], "content": text(f"{name} {i}", each)} for i in range(messages - 1)]
    return template([*said, {"role": "user", "content": f"{MARK} {text(f'{name} end', each)}"}], **settings)


def templates(case: str) -> list[Template]:
    """Return the requests of a case without streams, for use in rotation."""
    if case not in CONVERSATIONS:
        return [single(SIZES[case])]
    number, messages = CONVERSATIONS[case]
    return [conversation(name, SIZES[case], messages) for name in range(number)]


def requests(case: str, first: int = 0) -> Iterator[bytes]:
    """Return endless requests, all different."""
    made = templates(case)
    return (made[number % len(made)].request(number) for number in count(first))


def stream(tokens: int) -> Template:
    """Return a short prompt that requests a stream of `tokens` tokens."""
    return single(SHORT_BYTES, **_make_stream_fields(tokens))


def streamed_conversations(tokens: int, first: int) -> Iterator[bytes]:
    """Return endless requests of `mid`, each for a stream of `tokens` tokens."""
    number, messages = CONVERSATIONS["mid"]
    made = [conversation(name, SIZES["mid"], messages, **_make_stream_fields(tokens)) for name in range(number)]
    return (made[number % len(made)].request(number) for number in count(first))


def _make_stream_fields(tokens: int) -> dict[str, object]:
    return {"stream": True, "max_tokens": tokens, "stream_options": {"include_usage": True}}
