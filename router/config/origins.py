"""Origins of web pages, as browsers send them in `Origin` (RFC 6454 section 7): scheme, host, and the port if it is not
the scheme's own."""

from __future__ import annotations

import re
from collections.abc import Iterable

EVERY, OPAQUE = "*", "null"  # every page; pages of no origin, such as files and sandboxed frames
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([a-z0-9._-]+|\[[0-9a-f:.]+\])(?::([0-9]{1,5}))?")
_OWN_PORTS = {("http", "80"), ("https", "443")}


def origin_of(given: str) -> str | None:
    """Return the origin as browsers send it; None for any other text."""
    if given in (EVERY, OPAQUE):
        return given
    found = _ORIGIN.fullmatch(given.lower())
    if found is None or not 0 < int(found[3] or 1) < 1 << 16:
        return None
    scheme, host, port = found.groups()
    return f"{scheme}://{host}" if port is None or (scheme, port) in _OWN_PORTS else f"{scheme}://{host}:{int(port)}"


def origin_problems(given: Iterable[str]) -> list[str]:
    """Return the problems of the setting `listen.cors_origins`."""
    what, origins, problems = "'listen.cors_origins'", [origin_of(each) for each in given], list[str]()
    for each, origin in zip(given, origins, strict=True):
        if origin is None:
            like = "such as https://chat.example.com or http://localhost:3000"
            problems.append(
                f"{what}: '{each}' is not an origin {like}: it must have a scheme and a host, "
                "without a path or a trailing slash"
            )
    if EVERY in origins and len(origins) > 1:
        problems.append(f"{what}: '*' allows every origin, so it must be the only entry")
    elif len(set(origins) - {None}) + origins.count(None) < len(origins):
        problems.append(f"{what}: an origin is duplicated")
    return problems
