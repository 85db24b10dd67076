"""Numbers and flags of requests, read as engines read them: pydantic decides there, in its lax mode."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest
from msgspec import Raw

from router.core.dialects import PATHS
from router.core.prompts.json_fields import flag, number, parse_integer, wants_usage

# JSON, and the integer that pydantic 2.14 reads of it; None where it refuses.
NUMBERS = [
    ("9", 9), ("-9", -9), ("true", 1), ("false", 0), ("null", None), ("9.0", 9), ("9.5", None), ("1e3", 1_000),
    ("1e20", None), ("-0.0", 0), ('"9"', 9), ('" 9 "', 9), ('"+9"', 9), ('"-9"', -9), ('"--9"', None),
    ('"+-9"', None), ('"9.0"', 9), ('"9.50"', None), ('"9."', None), ('".0"', None), ('"9.00"', 9),
    ('"1_000"', 1_000), ('"_1"', None), ('"1_"', None), ('"1__0"', None), ('"1e3"', None), ('"0x9"', None),
    ('"00009"', 9), ('"\\t9\\n"', 9), ('""', None), ('" "', None), ('"abc"', None), ('"\\u0669"', None),
    ('"9_0.0"', 90), ('"+ 9"', None), ('"true"', None), ("[]", None), ("{}", None),
    ("9223372036854775808", 9_223_372_036_854_775_808), ('"9223372036854775808"', 9_223_372_036_854_775_808),
    ('"-0"', 0), ('"0_0"', 0), ('" -1_0 "', -10), ("1e18", 10**18), ("1e19", None), ('"\\u00a09"', 9),
    ('"9\\u2003"', 9), ('"+1_0"', 10), ('"-"', None), ('"+"', None), ('"00.0"', 0), ('"0000_1"', 1),
    ('"\\u001f9"', None), ('"9\\u001c"', None),
]  # fmt: skip
# JSON, and the flag that it reads.
FLAGS = [
    ("true", True), ("false", False), ("null", None), ("1", True), ("0", False), ("2", None), ("1.0", True),
    ("-0.0", False), ("0.5", None), ('"true"', True), ('"TRUE"', True), ('"Off"', False), ('"0"', False),
    ('"1"', True), ('"N"', False), ('"f"', False), ('"no"', False), ('" true "', None), ('"1.0"', None),
    ('"enable"', None), ('""', None), ("[]", None),
]  # fmt: skip


@pytest.mark.parametrize(("given", "meant"), NUMBERS)
def test_numbers(given: str, meant: int | None) -> None:
    """Decoded, and as JSON."""
    assert parse_integer(msgspec.json.decode(given)) == meant
    assert number(Raw(given.encode())) == meant


def test_a_number_has_few_digits() -> None:
    """A string of many digits is no limit."""
    assert parse_integer("9" * 100) is number(Raw(b"9" * 1_000)) is number(Raw(b"")) is None


@pytest.mark.parametrize(("given", "meant"), FLAGS)
def test_flags(given: str, meant: bool | None) -> None:
    """As JSON, and in a stream's options."""
    assert flag(Raw(given.encode())) is meant
    for name in ("include_usage", "continuous_usage_stats"):
        assert wants_usage({name: msgspec.json.decode(given)}) is (meant is True)


LIMITS = [
    ("/v1/chat/completions", "max_tokens"),
    ("/v1/chat/completions", "max_completion_tokens"),
    ("/v1/messages", "max_tokens"),
    ("/v1/responses", "max_output_tokens"),
]


@pytest.mark.parametrize(("path", "name"), LIMITS)
@pytest.mark.parametrize(("given", "meant"), [("9", 9), ('"9"', 9), ("9.0", 9), ('" +9_0 "', 90), ('"many"', None)])
def test_limits_of_answers(path: str, name: str, given: str, meant: int | None) -> None:
    """Whichever field limits the answer of whichever dialect."""
    body = f'{{"model":"m","messages":[],"input":"x","{name}":{given}}}'.encode()
    assert PATHS[path].parse(path, body, keep=False).output_tokens_max == meant


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize(("given", "meant"), [(False, False), ("false", False), ("no", False), (1, True), (None, None)])
def test_stored_answers(path: str, given: Any, meant: bool | None) -> None:
    """An answer that is not to be stored is not."""
    body = json.dumps({"model": "m", "messages": [], "input": "x", "store": given}).encode()
    assert PATHS[path].parse(path, body, keep=False).stored is meant
