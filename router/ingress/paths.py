"""Paths for engines: those that the router reads, and those that it forwards unread."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

from router.http.request import Request
from router.ingress.proxied_request import STORED

RESPONSE_METHODS = ("GET", "DELETE")
RESPONSE_ACTIONS = ("cancel", "input_items")
METHODS = ("GET", "POST", "DELETE")  # methods on stored responses; no path takes any other


def strip_trailing_slash(request: Request) -> None:
    """Remove one slash from the end of a path: engines would answer it with a redirect, which shows their address."""
    path, mark, query = request.target.partition("?")
    if path.endswith("/") and len(path) > 1:
        request.target, request.path = path[:-1] + mark + query, request.path[:-1]


def is_for_engines(request: Request, inference: AbstractSet[str]) -> bool:
    """True if a request goes to an engine. `inference` are paths of prompts, and those that are forwarded."""
    return (request.method == "POST" and request.path in inference) or about_response(request)


def about_response(request: Request) -> bool:
    """True if a stored response must be fetched, deleted or cancelled, or its input listed."""
    if not request.path.startswith(STORED):
        return False
    id_, slash, action = request.path.removeprefix(STORED).partition("/")
    if not id_.strip(".") or request.method not in METHODS:
        return False  # an engine that resolves dots in paths would serve another path
    if not slash:
        return request.method in RESPONSE_METHODS
    return action in RESPONSE_ACTIONS
