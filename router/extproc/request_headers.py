"""Parses an HTTP request from Envoy's headers, and computes the difference to the headers for the engine."""

from __future__ import annotations

from collections.abc import Iterable
from urllib.parse import unquote

from router.extproc import extproc_pb2 as pb
from router.extproc.metadata import DESTINATION
from router.extproc.processing_responses import Header
from router.http.request import HOP_HEADERS, Connection, Request

HEADERS_MAX = 256  # headers of one request; Envoy's own default is 100
_ENVOYS = HOP_HEADERS | {DESTINATION.encode()}  # never removed: they are Envoy's, or set in any case


def request_of(headers: Iterable[pb.HeaderValue], client: Connection) -> Request:
    """Return the request with this head. Envoy has validated the names, and made them lower case."""
    request = Request(client)
    fields, lines = request.fields, request.lines
    for header in headers:
        name, value = header.key, header.raw_value or header.value.encode()
        if name.startswith(":"):
            if name == ":method":
                request.method = value.decode("latin-1")
            elif name == ":path":
                request.target = value.decode("latin-1")
            continue
        low = name.encode().lower()
        fields.setdefault(low, value)
        lines.append((low, low, value))
    path = request.target.partition("?")[0]
    request.path = unquote(path) if "%" in path else path
    return request


def header_mutations(request: Request, lines: Iterable[bytes]) -> tuple[list[Header], list[bytes]]:
    """Return headers to set and to remove, so that the engine receives these lines. Hop-by-hop headers are left to
    Envoy."""
    had = {b"%b: %b\r\n" % (name, value): low for low, name, value in request.lines}
    stay, set_ = set(_ENVOYS), list[Header]()
    for line in lines:
        low = had.get(line)
        if low is None:
            name, _, value = line.partition(b":")
            low = name.lower()
            set_.append((low, value.strip()))
        stay.add(low)
    lost = {low for low, _, _ in request.lines if low not in stay}
    return set_, sorted(lost) if lost else []
