"""Answers as engines send them, byte by byte, in every framing that HTTP/1.1 allows."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

SSE = "content-type: text/event-stream; charset=utf-8"
COUNTS = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 8}}
USED = (9, 8, 2)  # prompt, cached and completion tokens of all that say so


@dataclass(frozen=True)
class Recorded:
    """What an engine sends, and what must become of it."""

    raw: bytes
    body: bytes
    path: str = "/v1/chat/completions"
    used: tuple[int, int, int] | None = None
    events: int = 0  # counted by the router; 0 where nothing is a stream
    request: bytes = b'{"model":"m","stream":true,"messages":[]}'
    closes: bool = False  # the engine's connection, which then ends the body


def event(data: object, end: str = "\n", name: str = "") -> bytes:
    """One event; `data` is JSON, or as it is where it is a string."""
    text = data if isinstance(data, str) else json.dumps(data, ensure_ascii=False, separators=(",", ":"))
    return (f"event: {name}{end}" if name else "").encode() + f"data: {text}{end}{end}".encode()


def words(*texts: str, end: str = "\n") -> list[bytes]:
    """A chat stream that says these, with usage and [DONE]."""
    said: list[Any] = [{"choices": [{"index": 0, "delta": {"content": text}}]} for text in texts]
    last = {"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}], "usage": COUNTS}
    return [event(each, end) for each in (*said, last, "[DONE]")]


def head(*lines: str, version: str = "1.1") -> bytes:
    """Of an answer."""
    return "\r\n".join((f"HTTP/{version} 200 OK", *lines, "", "")).encode()


def size(data: bytes) -> bytes:
    """A chunk's size line as every engine writes it, but for its end."""
    return b"%x" % len(data)


def chunked(
    pieces: Sequence[bytes], line: Callable[[bytes], bytes] = size, trailers: bytes = b"", kind: str = SSE
) -> bytes:
    """An answer in chunks, one for each piece."""
    framed = (b"%b\r\n%b\r\n" % (line(piece), piece) for piece in pieces)
    return head(kind, "transfer-encoding: chunked") + b"".join(framed) + b"0\r\n" + trailers + b"\r\n"


def _messages() -> Recorded:
    usage = {"input_tokens": 1, "cache_read_input_tokens": 8, "output_tokens": 2}
    said: list[tuple[str, dict[str, Any]]] = [
        ("message_start", {"message": {"usage": {"input_tokens": 9, "output_tokens": 0}}}),
        ("content_block_delta", {"index": 0, "delta": {"type": "text_delta", "text": "w"}}),
        ("message_delta", {"delta": {"stop_reason": "end_turn"}, "usage": usage}),
        ("message_stop", {}),
    ]
    pieces = [event({"type": kind, **more}, name=kind) for kind, more in said]
    return Recorded(chunked(pieces), b"".join(pieces), "/v1/messages", USED, 4)


def _responses(padding: int = 0) -> Recorded:
    usage = {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 8}, "output_tokens": 2}
    whole = {"id": "x", "status": "completed", "output": ["w" * padding], "usage": usage}
    said: list[tuple[str, dict[str, Any]]] = [
        ("response.created", {"response": {"id": "x"}}),
        ("response.output_text.delta", {"delta": "w"}),
        ("response.completed", {"response": whole}),
    ]
    pieces = [event({"type": kind, "sequence_number": n, **more}, name=kind) for n, (kind, more) in enumerate(said)]
    return Recorded(
        chunked(pieces),
        b"".join(pieces),
        "/v1/responses",
        USED,
        3,
        b'{"model":"m","stream":true,"input":"x","store":false}',
    )


def _chat(raw: bytes, pieces: Sequence[bytes], events: int | None = None, *, closes: bool = False) -> Recorded:
    body = b"".join(pieces)
    return Recorded(raw, body, used=USED, events=len(pieces) if events is None else events, closes=closes)


def _all() -> dict[str, Recorded]:
    chat = words("a", "b")
    crlf, ping, open_end = words("a", end="\r\n"), [b": ping\n\n", *words("a")], words("a")
    open_end[-1] = open_end[-1][:-2]
    text = words("h\u00e9\U0001f600", "\u2028 \r \\n\\n 0\r\n")
    body = b"".join(chat)
    answer = json.dumps({"choices": [], "usage": COUNTS}).encode()
    plain, asked = "content-type: application/json", b'{"model":"m","messages":[]}'
    long = b"[" + b"\n\n,".join([b"1"] * 20) + b"]"
    return {
        "chat": _chat(chunked(chat), chat),
        "messages": _messages(),
        "responses": _responses(),
        "CRLF": _chat(chunked(crlf), crlf),
        "text": _chat(chunked(text), text),
        "comments": _chat(chunked(ping), ping),
        "no last blank line": _chat(chunked(open_end), open_end, 2),
        "odd sizes": _chat(chunked(chat, lambda piece: b"%06X" % len(piece)), chat),
        "extensions and trailers": _chat(
            chunked(chat, lambda piece: b'%x;a="b\\""' % len(piece), b"x-sum: 0\r\nx-empty:\r\n"), chat
        ),
        "length": _chat(head(SSE, f"content-length: {len(body)}") + body, chat),
        "until close": _chat(head(SSE) + body, chat, closes=True),
        "HTTP/1.0": _chat(head(SSE, version="1.0") + body, chat, closes=True),
        "held JSON": Recorded(head(plain, f"content-length: {len(answer)}") + answer, answer, used=USED, request=asked),
        "JSON in chunks": Recorded(chunked([answer[:9], answer[9:]], kind=plain), answer, used=USED, request=asked),
        "long JSON": Recorded(chunked([long[:9], long[9:]], kind=plain), long, request=asked),
    }


RECORDED = _all()
LONG = {
    "long event": _chat(chunked(words("a", "x" * 90_000, "b")), words("a", "x" * 90_000, "b")),
    "long last event": _responses(20_000),
}
