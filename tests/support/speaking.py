"""An engine that speaks token by token as vLLM 0.32 does, over a vocabulary whose tokens cut characters.

Its next token is a function of all ids before it, so that an answer that is continued from its ids is the same answer.
Text comes as vLLM's detokenizer makes it: nothing while the last character is not whole, and a stream that begins
behind half a character says all of its prompt (`tokenizers.decoders.DecodeStream`); the longest stop string less one
is held back; a stop string is looked for in what this request has said, and is not part of it.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from aiohttp import web
from xxhash import xxh3_64_intdigest

from loadtest.common.answers import DONE, data_event, named_event
from tests.support.fakes import FakeEngine, Reply

END = 0
_WHOLE = [b" the", b" cat", b"s", b"at", b" on", b"\n", b'"', b"\\", b" {", b"}", b"STOP", b"ST", b"OP", "ü".encode()]
_PIECES = sorted({bytes([byte]) for text in ("é", "漢", "🙂", "🚀") for byte in text.encode()})
_JOINED = [b" a\xc3", b"\xa9b", b"\xf0\x9f", b"\x99\x82!"]
VOCABULARY = [b"", *_WHOLE, *_PIECES, *_JOINED]


@dataclass(frozen=True)
class Asked:
    """What a request asks of the speaker."""

    prompt: tuple[int, ...]
    tokens_max: int = 40
    tokens_min: int = 0
    stop: tuple[str, ...] = ()
    include_stop: bool = False
    ids: bool = False
    usage: bool = False


@dataclass
class Piece:
    """What one event says."""

    ids: list[int]
    text: str
    finish: str | None = None
    stop_reason: str | None = None


def text_of(ids: list[int] | tuple[int, ...]) -> str:
    """The text of ids, with U+FFFD for bytes that are no character."""
    return b"".join(VOCABULARY[each] for each in ids).decode("utf-8", "replace")


def ids_of(text: str) -> tuple[int, ...]:
    """A prompt of a text."""
    return tuple(1 + byte % len(_WHOLE) for byte in text.encode())


def encoded(text: str) -> list[int]:
    """The ids of a text as a tokenizer makes them, the longest token each time: they may be others than were said."""
    data, ids = text.encode(), list[int]()
    longest = sorted(range(1, len(VOCABULARY)), key=lambda each: -len(VOCABULARY[each]))
    while data:
        found = next((each for each in longest if data.startswith(VOCABULARY[each])), None)
        ids.append(found or 1)  # a part of a token, as before text that is held back, is another one
        data = data[len(VOCABULARY[found]) if found else 1 :]
    return ids


def _fits(left: bytes) -> Callable[[bytes], bool]:
    """Whether a token may follow these bytes of a character that is not whole yet."""

    def fits(token: bytes) -> bool:
        try:
            (left + token).decode("utf-8")
        except UnicodeDecodeError as error:
            return error.reason == "unexpected end of data" and bool(token)
        return bool(token) or not left

    return fits


def next_id(ids: list[int]) -> int:
    """The token that follows."""
    said = b"".join(VOCABULARY[each] for each in ids[-8:])
    left = b""
    for size in (1, 2, 3):
        tail = said[-size:]
        if tail and tail[0] >= 0xC0:
            try:
                tail.decode()
            except UnicodeDecodeError:
                left = tail
    fitting = [number for number, token in enumerate(VOCABULARY) if _fits(left)(token)]
    at = xxh3_64_intdigest(json.dumps(ids).encode())
    if not left and at % 61 == 0:
        return END
    fitting = [number for number in fitting if number != END]
    return fitting[at % len(fitting)]


class _Detokenizer:
    def __init__(self, prompt: tuple[int, ...]) -> None:
        self._ids = list(prompt)
        text = text_of(prompt)
        self._prefix = "" if text.endswith("\ufffd") else text

    def step(self, id_: int) -> str:
        self._ids.append(id_)
        text = text_of(self._ids)
        if len(text) <= len(self._prefix) or text.endswith("\ufffd"):
            return ""
        new, self._prefix = text[len(self._prefix) :], text
        return new


def spoken(asked: Asked) -> Iterator[Piece]:
    """All pieces of an answer, a token each."""
    ids, text, sent = list(asked.prompt), "", 0
    detokenizer = _Detokenizer(asked.prompt)
    held = max((len(each) for each in asked.stop), default=1) - 1 if not asked.include_stop else 0
    for number in range(1, asked.tokens_max + 1):
        id_ = next_id(ids)
        ids.append(id_)
        before, finish, reason = len(text), None, None
        text += detokenizer.step(id_) if id_ != END else ""
        if id_ == END and number > asked.tokens_min:
            finish = "stop"
        elif number > asked.tokens_min:
            for stop in asked.stop:
                at = text.find(stop, max(0, before - len(stop) + 1))
                if at >= 0:
                    text, finish, reason = text[: at + (len(stop) if asked.include_stop else 0)], "stop", stop
                    break
        if finish is None and number == asked.tokens_max:
            finish = "length"
        until = len(text) if finish else max(sent, len(text) - held)
        yield Piece([id_], text[sent:until], finish, reason)
        sent = until
        if finish:
            return


def joined(pieces: list[Piece], rng: random.Random, together_max: int) -> list[Piece]:
    """The same with up to so many pieces in one, as vLLM joins what a slow reader has not taken."""
    made: list[Piece] = []
    at = 0
    while at < len(pieces):
        some = pieces[at : at + rng.randint(1, together_max)]
        at += len(some)
        last = some[-1]
        text = "".join(each.text for each in some)
        made.append(Piece([id_ for each in some for id_ in each.ids], text, last.finish, last.stop_reason))
    return made


def events_of(asked: Asked, pieces: list[Piece], *, chat: bool, name: str) -> list[bytes]:
    """The events of an answer, as vLLM 0.32 writes them."""
    head = {"id": name, "object": "chat.completion.chunk" if chat else "text_completion", "created": 7, "model": "m"}
    made: list[dict[str, Any]] = []
    prompt = list(asked.prompt) if asked.ids else None
    if chat:
        role = {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
        made.append(head | {"choices": [role], "prompt_token_ids": prompt})
    for number, piece in enumerate(pieces):
        said: dict[str, Any] = {"delta": {"content": piece.text}} if chat else {"text": piece.text}
        choice = {"index": 0, **said, "logprobs": None, "finish_reason": piece.finish}
        if piece.finish or not chat:
            choice["stop_reason"] = piece.stop_reason
        if not chat:
            choice["prompt_token_ids"] = prompt if not number else None
        choice["token_ids"] = piece.ids if asked.ids else None
        made.append(head | {"choices": [choice]})
    if asked.usage:
        count = sum(len(piece.ids) for piece in pieces)
        size = len(asked.prompt)
        usage = {
            "prompt_tokens": size,
            "total_tokens": size + count,
            "completion_tokens": count,
            "prompt_tokens_details": {"cached_tokens": size // 2},
        }
        made.append(head | {"choices": [], "usage": usage})
    return [*map(data_event, made), DONE]


def message_events_of(asked: Asked, pieces: list[Piece]) -> list[bytes]:
    """The events of a Messages stream, as vLLM 0.32 makes them of a chat's."""
    usage = {"input_tokens": len(asked.prompt), "output_tokens": 0}
    message: dict[str, Any] = {"id": "chatcmpl-1", "type": "message", "role": "assistant", "content": [], "model": "m"}
    message |= {"stop_reason": None, "stop_sequence": None, "usage": usage}
    made = [named_event("message_start", message=message)]
    texts = [piece.text for piece in pieces if piece.text]
    if texts:
        made.append(named_event("content_block_start", index=0, content_block={"type": "text", "text": ""}))
    for text in texts:
        made.append(named_event("content_block_delta", index=0, delta={"type": "text_delta", "text": text}))
    if texts:
        made.append(named_event("content_block_stop", index=0))
    reason = "end_turn" if pieces[-1].finish == "stop" else "max_tokens"
    count = sum(len(piece.ids) for piece in pieces)
    delta = {"stop_reason": reason, "stop_sequence": None}
    made.append(named_event("message_delta", delta=delta, usage=usage | {"output_tokens": count}))
    return [*made, named_event("message_stop")]


def asked_of(path: str, body: dict[str, Any]) -> Asked:
    """What a body asks of the speaker."""
    chat = path in ("/v1/chat/completions", "/v1/messages")
    if chat and body.get("continue_final_message"):
        *before, last = body["messages"]
        prompt: Any = [*ids_of(json.dumps(before)), *encoded(last["content"])]
    else:
        prompt = json.dumps(body["messages"]) if chat else body["prompt"]
    stop = body.get("stop") or ()
    most = body.get("max_completion_tokens") or body.get("max_tokens") or (1_000 if chat else 16)
    return Asked(
        ids_of(prompt) if isinstance(prompt, str) else tuple(prompt),
        most,
        body.get("min_tokens") or 0,
        (stop,) if isinstance(stop, str) else tuple(stop),
        bool(body.get("include_stop_str_in_output")),
        bool(body.get("return_token_ids")),
        bool((body.get("stream_options") or {}).get("include_usage")),
    )


@dataclass
class Speaking:
    """Replies of a FakeEngine that speaks: `after` events the connection breaks; None: it speaks to the end."""

    after: int | None = None
    together_max: int = 1
    seed: int = 0
    how: str = "close"  # "end": the body ends well; "error": an error event, and [DONE]; "hang": silence
    said: list[bytes] = field(default_factory=list)

    def reply(self) -> Reply:
        """A reply for a FakeEngine's script."""

        async def speak(engine: FakeEngine, request: web.Request) -> web.StreamResponse:
            asked = asked_of(request.path, engine.seen[-1].json)
            pieces = joined(list(spoken(asked)), random.Random(self.seed), self.together_max)
            chat = request.path == "/v1/chat/completions"
            if request.path == "/v1/messages":
                return await self._send(engine, request, message_events_of(asked, pieces))
            events = events_of(asked, pieces, chat=chat, name=f"{'chatcmpl' if chat else 'cmpl'}-{engine.port}")
            return await self._send(engine, request, events)

        return speak

    async def _send(self, engine: FakeEngine, request: web.Request, events: list[bytes]) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        for event in events[: self.after]:
            self.said.append(event)
            await response.write(event)
        if self.after is None or self.after >= len(events):
            await response.write_eof()
        elif self.how == "close":
            assert request.transport is not None
            request.transport.close()
        elif self.how == "error":
            await response.write(b'data: {"error": {"message": "dead", "code": 500}}\n\n')
            await response.write(DONE)
        elif self.how == "hang":
            engine.at_work.set()
            await engine.go_on.wait()
            for event in events[self.after :]:
                await response.write(event)
            await response.write_eof()
        return response


def whole(path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The chunks of the unbroken answer, without ids."""
    asked = replace(asked_of(path, body), ids=False)
    chat = path == "/v1/chat/completions"
    return chunks_of(b"".join(events_of(asked, list(spoken(asked)), chat=chat, name="x")))


def chunks_of(stream: bytes) -> list[dict[str, Any]]:
    """The data of a stream's events; comments and [DONE] left out."""
    datas = [event.removeprefix(b"data: ") for event in stream.split(b"\n\n") if event.startswith(b"data: {")]
    return [json.loads(data) for data in datas]


def said_in(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """What a client makes of a stream: text, role, how it ended, usage without what was cached, and its names."""
    choices = [choice for chunk in chunks for choice in chunk.get("choices", ())]
    deltas = [choice.get("delta") or {"content": choice.get("text")} for choice in choices]
    usage = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    return {
        "text": "".join(delta.get("content") or "" for delta in deltas),
        "roles": [delta["role"] for delta in deltas if "role" in delta],
        "finish": [(c["finish_reason"], c.get("stop_reason")) for c in choices if c.get("finish_reason")],
        "usage": [(u["prompt_tokens"], u["completion_tokens"], u["total_tokens"]) for u in usage],
        "indices": {choice["index"] for choice in choices},
        "names": len({(chunk.get("id"), chunk.get("object"), chunk.get("created")) for chunk in chunks}),
        "ids": [choice["token_ids"] for choice in choices if choice.get("token_ids")],
    }
