"""HTTP as httptools alone reads it, in one piece and without shortcuts: the judge of what the router reads."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

import httptools

# Limits of a head in bytes and lines, as SECURITY.md and the reference of settings have them.
HEAD_BYTES_MAX, VALUE_BYTES_MAX, LINES_MAX = 64 << 10, 16 << 10, 256
_HOST = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[\w.~%!$&'()*+;=-]*)(:[0-9]*)?")


@dataclass
class Message:
    """One message, as far as it came."""

    method: str = ""
    target: bytes = b""
    version: str = ""
    status: int = 0
    lines: list[tuple[bytes, bytes]] = field(default_factory=list)
    body: bytes = b""
    headed: bool = False
    whole: bool = False
    closes: bool = False  # the last of its connection
    trailer_bytes: int = 0

    def values(self, name: bytes) -> list[bytes]:
        """The values of a header."""
        return [value for each, value in self.lines if each.lower() == name]


class _Reading:
    """What httptools calls back."""

    def __init__(self, kind: type) -> None:
        self.messages: list[Message] = []
        self.parser = kind(self)

    def on_message_begin(self) -> None:
        self.messages.append(Message())

    def on_url(self, url: bytes) -> None:
        self.messages[-1].target += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self.messages[-1].headed:
            self.messages[-1].trailer_bytes += len(name) + len(value)
        else:
            self.messages[-1].lines.append((name, value))

    def on_headers_complete(self) -> None:
        message, parser = self.messages[-1], self.parser
        message.headed, message.version = True, parser.get_http_version()
        message.closes = not parser.should_keep_alive()
        if isinstance(parser, httptools.HttpRequestParser):
            message.method = parser.get_method().decode()
        else:
            message.status = parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self.messages[-1].body += data

    def on_message_complete(self) -> None:
        self.messages[-1].whole = True


def read(data: bytes, kind: type) -> tuple[list[Message], str, int | None]:
    """Messages as far as they came, why reading stopped ("" at the end of the bytes), and the offset where another
    protocol would begin."""
    reading = _Reading(kind)
    try:
        reading.parser.feed_data(data)
    except httptools.HttpParserUpgrade as upgrade:
        return reading.messages, "upgrade", upgrade.args[0]
    except httptools.HttpParserError as error:
        return reading.messages, str(error) or "error", None
    return reading.messages, "", None


def requests(data: bytes, body_bytes_max: int) -> tuple[list[Message], bool]:
    """The requests that a server of ours must take, all whole, and whether it must refuse what comes behind them."""
    taken: list[Message] = []
    meant: Message | None = None  # for which the first of the next messages stands
    while True:
        messages, stopped, offset = read(data, httptools.HttpRequestParser)
        upgraded = messages.pop() if offset is not None else None
        for message in messages:
            if refused(message, body_bytes_max):
                return taken, True
            if not message.whole:
                return taken, bool(stopped)
            if meant is not None:
                meant.body = message.body
            taken.append(meant or message)
            meant = None
            if message.closes or message.version == "1.0":
                return taken, False
        if upgraded is None or offset is None:
            return taken, bool(stopped)
        websocket = upgraded.method == "GET" and b"websocket" in b",".join(upgraded.values(b"upgrade")).lower()
        if upgraded.method == "CONNECT" or websocket or refused(upgraded, body_bytes_max):
            return taken, True
        data, meant = _without_upgrade(upgraded) + data[offset:], upgraded


def _without_upgrade(message: Message) -> bytes:
    """A short head with the same framing and the same end of the connection."""
    lines = [b"%b: %b" % line for line in message.lines if line[0].lower() in (b"content-length", b"transfer-encoding")]
    closes = [b"Connection: close"] if message.closes else [b"Connection: keep-alive"]
    return b"\r\n".join((b"POST / HTTP/%b" % message.version.encode(), b"Host: x", *closes, *lines, b"", b""))


def refused(message: Message, body_bytes_max: int) -> bool:
    """Whether rules of ours refuse a request whose head, or more, has come."""
    if len(message.body) > body_bytes_max or _too_large(message):
        return True
    if not message.headed:
        return len(message.values(b"host")) > 1 or len(set(message.values(b"content-type"))) > 1
    hosts, codings = message.values(b"host"), message.values(b"transfer-encoding")
    lengths = message.values(b"content-length")
    return (
        message.version not in ("1.0", "1.1")
        or not _plain_target(message.target)
        or len(hosts) > 1
        or len(set(message.values(b"content-type"))) > 1
        or (message.version == "1.1" and not hosts)
        or any(not _HOST.fullmatch(host) for host in hosts)
        or (bool(codings) and (message.version == "1.0" or codings[0].lower() != b"chunked"))
        or any(int(length) > body_bytes_max for length in lengths[:1])
    )


def _plain_target(target: bytes) -> bool:
    """Whether a target is a path, the asterisk of OPTIONS, or a URL of http or https without user and fragment."""
    if target.startswith(b"/") or target == b"*":
        return True
    try:
        url = httptools.parse_url(target)
    except httptools.HttpParserInvalidURLError:
        return False
    schema = (url.schema or b"").lower()
    return schema in (b"http", b"https") and bool(url.host) and url.userinfo is None and url.fragment is None


def _too_large(message: Message) -> bool:
    sizes = [len(name) + len(value) for name, value in message.lines]
    return (
        len(message.target) > VALUE_BYTES_MAX
        or any(len(value) > VALUE_BYTES_MAX for _, value in message.lines)
        or max(sum(sizes) + len(message.target), message.trailer_bytes) > HEAD_BYTES_MAX
        or len(sizes) > LINES_MAX
    )
