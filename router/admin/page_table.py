"""Parts that pages are made of: a call, the answer to it, the route that leads to a page, and the table of all routes.

A page is an async function from call to answer. It does not depend on the connection: the server (router/http) handles
heads, bodies, limits and deadlines, and the guard handles access.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from http import HTTPStatus
from typing import Any
from urllib.parse import parse_qsl

import msgspec

from router.http.request import Refusal, Request

BODY_BYTES_MAX = 4 << 10  # maximum of bytes of a body, unless the page has its own limit
PARAMETERS_MAX = 64  # parameters in an address
READS = ("GET", "HEAD")
JSON = "application/json"
TEXT = "text/plain; charset=utf-8"


@dataclass(frozen=True, slots=True)
class AdminResponse:
    """Whole answer. `headers` are those that the page adds."""

    status: int
    body: bytes = b""
    content_type: str = ""  # "" for an answer without a body
    headers: Mapping[str, str] = field(default_factory=dict)


class AdminRequest:
    """One request for a page, complete and accepted by the guard."""

    def __init__(self, request: Request, paths: frozenset[str]) -> None:
        """`paths` are those of all pages of this listener."""
        self._request = request
        self.paths = paths

    @property
    def method(self) -> str:
        """Method, in capitals."""
        return self._request.method

    @property
    def path(self) -> str:
        """Decoded path, without the query."""
        return self._request.path

    @property
    def body(self) -> bytes:
        """Whole body, of at most the bytes that the page's route allows."""
        return self._request.body

    def header(self, name: str) -> str:
        """Return the first header of this name, in any case, or ""."""
        return self._request.header(name.lower().encode())

    @cached_property
    def pairs(self) -> list[tuple[str, str]]:
        """Names and values of the address, decoded, in its order; empty values count. Raises Refusal for too many."""
        query = self._request.target.partition("#")[0].partition("?")[2]
        try:
            return parse_qsl(query, keep_blank_values=True, max_num_fields=PARAMETERS_MAX)
        except ValueError as error:
            raise admin_refusal(400, "bad_parameter", f"There are more than {PARAMETERS_MAX} parameters.") from error

    @cached_property
    def query(self) -> Mapping[str, str]:
        """First value of each parameter. Raises Refusal for too many."""
        return dict(reversed(self.pairs))


PageHandler = Callable[[AdminRequest], Awaitable[AdminResponse]]


@dataclass(frozen=True, slots=True, kw_only=True)
class AdminRoute:
    """Method and path, with the page that they lead to. A page for GET also serves HEAD."""

    method: str
    path: str
    page: PageHandler
    takes: tuple[str, ...] = ()  # names of the parameters that the page accepts
    body_bytes_max: int = BODY_BYTES_MAX


def get_route(path: str, page: PageHandler, *takes: str) -> AdminRoute:
    """Return a route of GET, to a page that accepts these parameters."""
    return AdminRoute(method="GET", path=path, page=page, takes=takes)


class RouteTable:
    """All routes of a listener, by path and method."""

    def __init__(self, routes: Iterable[AdminRoute]) -> None:
        self.routes = tuple(routes)
        self._found: dict[str, dict[str, AdminRoute]] = {}
        for route in self.routes:
            methods = self._found.setdefault(route.path, {})
            for method in READS if route.method == "GET" else (route.method,):
                methods[method] = route
        self.paths = frozenset(self._found)

    def find(self, request: Request) -> AdminRoute | None:
        """Return the route of a request, or None; `missing` then has the answer. A path with an encoded slash has no
        route, because a proxy that filters paths before this listener would not see the slash."""
        if "%2f" in request.target.partition("?")[0].lower():
            return None
        return self._found.get(request.path, {}).get(request.method)

    def make_not_found_response(self, request: Request) -> AdminResponse:
        """Return 405 if another method would find a page, else 404."""
        methods = self._found.get(request.path)
        status, headers = HTTPStatus.NOT_FOUND, dict[str, str]()
        if methods is not None and request.method not in methods:
            status, headers["Allow"] = HTTPStatus.METHOD_NOT_ALLOWED, ",".join(sorted(methods))
        return AdminResponse(status, f"{status.value}: {status.phrase}".encode(), TEXT, headers)


def admin_refusal(status: int, code: str, message: str) -> Refusal:
    """Return a refusal to raise, in a page or before it; the listener answers it as `make_error_response` does."""
    return Refusal(status, code, message)


def json_answer(value: Any, status: int = 200) -> AdminResponse:  # noqa: ANN401 - anything JSON
    """Return an answer with this value as JSON."""
    return AdminResponse(status, msgspec.json.encode(value), JSON)


def make_error_response(status: int, code: str, message: str) -> AdminResponse:
    """Return an error answer of the admin listener."""
    return json_answer({"error": {"code": code, "message": message}}, status)
