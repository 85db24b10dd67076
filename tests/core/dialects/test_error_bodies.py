"""Errors of our own in the shape of each API."""

from __future__ import annotations

import json

import pytest

from router.core.dialects.anthropic import Anthropic
from router.core.dialects.dialect import Dialect
from router.core.dialects.openai import OpenAI

KINDS = {  # type of an error by status: OpenAI's, Anthropic's
    400: ("invalid_request_error", "invalid_request_error"),
    401: ("authentication_error", "authentication_error"),
    403: ("permission_error", "permission_error"),
    404: ("not_found_error", "not_found_error"),
    413: ("invalid_request_error", "request_too_large"),
    415: ("invalid_request_error", "invalid_request_error"),
    429: ("rate_limit_error", "rate_limit_error"),
    500: ("server_error", "api_error"),
    502: ("server_error", "api_error"),
    503: ("server_error", "overloaded_error"),
    504: ("server_error", "api_error"),
}


@pytest.mark.parametrize("status", KINDS)
@pytest.mark.parametrize("api", ["openai", "anthropic"])
def test_errors_have_the_shape_of_their_api(api: str, status: int) -> None:
    """Clients find type, message and param where their API puts them, and our code beside them."""
    openais, anthropics = KINDS[status]
    error = {"message": 'say "why"', "code": "some_code"}
    shapes: dict[str, tuple[Dialect, dict[str, object]]] = {
        "openai": (OpenAI(), {"error": {**error, "type": openais, "param": "model"}}),
        "anthropic": (Anthropic(), {"type": "error", "error": {**error, "type": anthropics}}),
    }
    dialect, shape = shapes[api]
    assert json.loads(dialect.error(status, "some_code", 'say "why"', "model")) == shape
