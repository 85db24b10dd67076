"""Salts: nobody makes another tenant's, and nothing in a body undoes one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.dialects import PATHS, tenancy
from router.core.prompts.beginnings import Seen

SECRET = b"x" * 32
NAMES = st.text("abcAB.:", min_size=1, max_size=6)
OWN = st.binary(max_size=6)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers(0, 9) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
FIELDS = ("cache_salt", "extra_key", "session_params", "kv_transfer_params", "request_id", "prompt", "lora_path")


@given(NAMES, OWN, NAMES, OWN)
def test_salts_are_equal_only_for_the_same(tenant: str, own: bytes, other: str, others: bytes) -> None:
    """Two tenants never share a salt, whatever they give as their own; the same tenant's is the same, and what it
    gives of its own keeps its caches apart."""
    same = tenancy.tenant_salt(SECRET, tenant, own) == tenancy.tenant_salt(SECRET, other, others)
    assert same == ((tenant, own) == (other, others))
    assert tenancy.tenant_salt(b"y" * 32, tenant, own) != tenancy.tenant_salt(SECRET, tenant, own)


@given(st.sampled_from(sorted(PATHS)), st.dictionaries(st.sampled_from(FIELDS), json_values), st.booleans())
def test_the_salt_is_what_the_engine_reads(path: str, body: dict[str, Any], escaped: bool) -> None:
    """Whatever the caller gives under these names, escaped or twice, the last of each is ours, and nothing else of
    the body changes."""
    text = json.dumps(body)
    if escaped:
        text = text.replace('"cache_', '"cache\\u005f').replace('"extra_', '"extr\\u0061_')
    if body:
        text = text[:-1] + ", " + text[1:] + "\n "
    made = tenancy.with_salt(path, text.encode(), b"5a")
    read = json.loads(made)
    assert read["cache_salt"] == "5a"
    ours = {"cache_salt", *tenancy._NULLED.get(path, ())}
    assert all(read[name] is None for name in ours - {"cache_salt"})
    assert {k: v for k, v in read.items() if k not in ours} == {k: v for k, v in body.items() if k not in ours}
    assert made.startswith(text.rstrip()[:-1].encode())


@given(st.dictionaries(st.sampled_from(FIELDS), json_values))
def test_a_named_response_is_renamed(body: dict[str, Any]) -> None:
    """A caller's own `request_id` never reaches an engine; a body without one stays as it is."""
    text = json.dumps(body).encode()
    made = tenancy.with_request_id(text, "resp_1")
    assert made == text or json.loads(made) == body | {"request_id": "resp_1"}
    assert json.loads(made).get("request_id", "resp_1") == "resp_1"


@given(json_values, st.booleans())
def test_every_adapter_is_seen(value: Any, escaped: bool) -> None:
    """Each adapter that a body names in SGLang's way is told; what is no name is told as one that nobody may use."""
    text = json.dumps({"lora_path": value})
    text = text.replace("lora_path", "lor\\u0061_path") if escaped else text
    named = value if isinstance(value, list) else [value]
    assert tenancy.adapters(text.encode()) == [n if isinstance(n, str) else "" for n in named if n is not None]


@pytest.mark.parametrize(("engines", "paths"), [(["vllm"], 5), (["sglang"], 4), (["vllm", "sglang"], 3), (["x"], 0)])
def test_a_salt_is_relied_on_where_it_is_known_to_be_heeded(engines: list[str], paths: int) -> None:
    """One engine that may ignore the field is enough not to promise anything; so is not knowing any."""
    assert sum(tenancy.isolates(path, engines) for path in PATHS) == paths
    assert not any(tenancy.isolates(path, [*engines, "unknown"]) for path in PATHS)
    assert not any(tenancy.isolates(path, []) for path in PATHS)


def test_what_was_read_for_one_is_not_found_for_another() -> None:
    """How fast a body is read does not tell that another tenant has sent its beginning; for the same one it is."""
    body = json.dumps({"messages": [{"role": "user", "content": f"{n} " * 300} for n in range(100)]}).encode()
    seen, found = Seen(bytes_max=1 << 24, seed=1), list[bool]()
    for whose in (b"a", b"a", b"a", b"b", b"", b"a"):
        seen.apart(whose)
        place = seen.find(body, b"openai")
        found.append(place is not None)
    assert found == [False, True, True, False, False, True]
