"""Parameters of the admin pages' addresses. Each route lists the parameters of its page, and any other one is an error.

An unknown parameter is not ignored: otherwise `?sesion=x` would show all decisions, as without a filter.
"""

from __future__ import annotations

import difflib

from router.admin.page_table import AdminRequest, AdminRoute, admin_refusal
from router.http.request import Refusal

CODE = "bad_parameter"
VALUE_CHARS_MAX = 512  # longest value of a parameter
PAGES = "/admin/"  # the dashboard's files and the pages for other programs accept any parameters


class BadParameter(ValueError):
    """Raised for an invalid value of a parameter; the message lists the valid ones."""


def check_names(call: AdminRequest, route: AdminRoute) -> None:
    """Raise Refusal for a parameter that the page does not have, or for one that is duplicated."""
    if not route.path.startswith(PAGES):
        return
    seen = set[str]()
    for name, value in call.pairs:
        if name not in route.takes:
            near = difflib.get_close_matches(name, route.takes, n=1)
            hint = f"; the nearest is '{near[0]}'" if near else ""
            raise admin_refusal(400, CODE, f"Unknown parameter '{name[:64]}'{hint}. {_describe_parameters(route)}")
        if name in seen:
            raise admin_refusal(400, CODE, f"The parameter '{name}' is duplicated.")
        if len(value) > VALUE_CHARS_MAX:
            raise admin_refusal(400, CODE, f"The parameter '{name}' is longer than {VALUE_CHARS_MAX} characters.")
        seen.add(name)


def refusal_of(error: BadParameter, route: AdminRoute) -> Refusal:
    """Return the answer to an invalid value."""
    return admin_refusal(400, CODE, f"{error} {_describe_parameters(route)}")


def seconds(name: str, text: str | None) -> float | None:
    """Return a Unix time; None if it is not given. Raises BadParameter."""
    if not text:
        return None
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e11:
        raise BadParameter(f"'{name}' must be a Unix time in seconds such as 1795620000, not '{text[:64]}'.")
    return value


def parse_int(name: str, text: str | None, least: int, most: int) -> int | None:
    """Return a whole number within limits; None if it is not given. Raises BadParameter."""
    if not text:
        return None
    value = int(text) if text.isascii() and text.isdigit() and len(text) < 20 else -1
    if not least <= value <= most:
        raise BadParameter(f"'{name}' must be an integer from {least} to {most}, not '{text[:64]}'.")
    return value


def _describe_parameters(route: AdminRoute) -> str:
    path, taken = route.path, route.takes
    return f"{path} takes {', '.join(taken)}." if taken else f"{path} has no parameters."
