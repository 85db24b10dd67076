"""What is for engines: paths that the router reads, and those that it passes on unread."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from router.http.request import Request
from router.reading.question import STORED

RESPONSE_METHODS = ("GET", "DELETE")
RESPONSE_ACTIONS = ("cancel", "input_items")
METHODS = ("GET", "POST", "DELETE")  # methods on stored responses; no path takes any but these


def is_for_engines(request: Request, inference: AbstractSet[str]) -> bool:
    """Whether a request goes to an engine; `inference` are paths of prompts, and those that are passed on."""
    return (request.method == "POST" and request.path in inference) or about_response(request)


def about_response(request: Request) -> bool:
    """Whether a stored response is to be fetched, deleted or cancelled, or its input listed."""
    if not request.path.startswith(STORED):
        return False
    id_, slash, action = request.path.removeprefix(STORED).partition("/")
    if not id_.strip(".") or request.method not in METHODS:
        return False  # an engine that resolves dots in paths would serve another path
    if not slash:  # a trailing slash is no action: engines answer it with a redirect, which shows their address
        return request.method in RESPONSE_METHODS
    return action in RESPONSE_ACTIONS
