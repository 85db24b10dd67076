"""Parameters of the admin pages' addresses: each page says which ones it takes, and any other one is an error.

A parameter that is not understood is not passed over: `?sesion=x` would show everything as if nothing had been asked.
"""

from __future__ import annotations

import difflib
from collections.abc import Awaitable, Callable
from typing import TypeVar

from aiohttp import web

from router.admin.guard import Handler, refused

CODE = "bad_parameter"
VALUE_CHARS_MAX = 512  # longest value of a parameter
PAGES = "/admin/"  # the dashboard's files and the pages that other programs ask for take anything

_Page = TypeVar("_Page", bound=Callable[..., Awaitable[web.StreamResponse]])
_TAKEN = "takes"  # the attribute of a handler that has the names of its parameters


class BadParameter(ValueError):
    """A parameter has a value that makes no sense; the message says which ones do."""


def takes(*names: str) -> Callable[[_Page], _Page]:
    """Mark a handler as one that takes these parameters; handlers without a mark take none."""

    def marked(handler: _Page) -> _Page:
        handler.__dict__[_TAKEN] = names
        return handler

    return marked


@web.middleware
async def checked_names(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Middleware that answers 400 where a page is asked with a parameter that it does not take, or with one twice. A
    handler may raise BadParameter for a value."""
    if not request.path.startswith(PAGES) or request.match_info.http_exception is not None:
        return await handler(request)
    taken: tuple[str, ...] = getattr(request.match_info.handler, _TAKEN, ())
    for name in request.query:
        if name not in taken:
            near = difflib.get_close_matches(name, taken, n=1)
            hint = f"; the nearest is '{near[0]}'" if near else ""
            return refused(400, CODE, f"There is no parameter '{name[:64]}'{hint}. {_listed(request.path, taken)}")
        if len(request.query.getall(name)) > 1:
            return refused(400, CODE, f"The parameter '{name}' is given twice.")
        if len(request.query[name]) > VALUE_CHARS_MAX:
            return refused(400, CODE, f"The parameter '{name}' is longer than {VALUE_CHARS_MAX} characters.")
    try:
        return await handler(request)
    except BadParameter as error:
        return refused(400, CODE, f"{error} {_listed(request.path, taken)}")


def seconds(name: str, text: str | None) -> float | None:
    """A Unix time; None where it is not given. Raises BadParameter."""
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e11:
        raise BadParameter(f"'{name}' is a Unix time in seconds such as 1795620000, not '{text[:64]}'.")
    return value


def whole(name: str, text: str | None, least: int, most: int) -> int | None:
    """A whole number within limits; None where it is not given. Raises BadParameter."""
    if not text:
        return None
    value = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1
    if not least <= value <= most:
        raise BadParameter(f"'{name}' is a whole number from {least} to {most}, not '{text[:64]}'.")
    return value


def _listed(path: str, taken: tuple[str, ...]) -> str:
    return f"{path} takes {', '.join(taken)}." if taken else f"{path} takes no parameters."
