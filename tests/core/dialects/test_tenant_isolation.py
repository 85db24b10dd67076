"""Salts: nobody makes another tenant's, and nothing in a body undoes one."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.dialects import PATHS, tenant_isolation
from router.core.prompts.incremental_parse import BodyPrefixCache

pytestmark = pytest.mark.promise(
    "Isolated tenants share no cached prefix, and engines that ignore salts are refused to them.", "tenants"
)

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
    same = tenant_isolation.tenant_salt(SECRET, tenant, own) == tenant_isolation.tenant_salt(SECRET, other, others)
    assert same == ((tenant, own) == (other, others))
    assert tenant_isolation.tenant_salt(b"y" * 32, tenant, own) != tenant_isolation.tenant_salt(SECRET, tenant, own)


@given(st.sampled_from(sorted(PATHS)), st.dictionaries(st.sampled_from(FIELDS), json_values), st.booleans())
def test_the_salt_is_what_the_engine_reads(path: str, body: dict[str, Any], escaped: bool) -> None:
    """Whatever the caller gives under these names, escaped or twice, the last of each is ours, and nothing else of
    the body changes."""
    text = json.dumps(body)
    if escaped:
        text = text.replace('"cache_', '"cache\\u005f').replace('"extra_', '"extr\\u0061_')
    if body:
        text = text[:-1] + ", " + text[1:] + "\n "
    made = tenant_isolation.with_salt(path, text.encode(), b"5a")
    read = json.loads(made)
    assert read["cache_salt"] == "5a"
    ours = {"cache_salt", *tenant_isolation._NULLED.get(path, ())}
    assert all(read[name] is None for name in ours - {"cache_salt"})
    assert {k: v for k, v in read.items() if k not in ours} == {k: v for k, v in body.items() if k not in ours}
    assert made.startswith(text.rstrip()[:-1].encode())


SHARED = ("request_id", "rid", *tenant_isolation._TRANSFERRED)


@given(st.dictionaries(st.sampled_from((*SHARED, "prompt", "vllm_xargs")), json_values), st.booleans())
def test_what_tenants_share_is_not_named(body: dict[str, Any], escaped: bool) -> None:
    """A caller's own id of a request, session, or transfer never reaches an engine, however it is written; a body
    without any stays as it is, and so does every other field."""
    text = json.dumps(body)
    if escaped:
        text = text.replace('"r', '"\\u0072').replace("_p", "\\u005fp")
    made = tenant_isolation.strip_shared_fields(
        text.encode(), tenant_isolation.read_isolation_fields(text.encode()), "x-1"
    )
    read = json.loads(made)
    arguments = read.get("vllm_xargs")
    for name, value in body.items():
        if name in ("request_id", "rid"):
            assert read[name] == (None if value is None else "x-1")
        elif name in SHARED:
            assert read[name] is None
        elif name != "vllm_xargs":
            assert read[name] == value
    assert not (isinstance(arguments, dict) and set(arguments) & set(SHARED) - {"request_id", "rid"})
    if not set(body) & {*SHARED, "vllm_xargs"}:
        assert made == text.encode()


def test_transfers_are_no_further_arguments() -> None:
    """vLLM merges its further arguments with those of transfers: what is named there is taken out, and the rest is
    kept."""
    for said, left in (
        ({"a": 1, "kv_transfer_params": "x"}, {"a": 1}),
        ({"a": [1, "b"]}, {"a": [1, "b"]}),
        ("x", None),
    ):
        text = json.dumps({"vllm_xargs": said}).encode()
        assert (
            json.loads(tenant_isolation.strip_shared_fields(text, tenant_isolation.read_isolation_fields(text), "x"))[
                "vllm_xargs"
            ]
            == left
        )


@pytest.mark.promise("A key restricted to some models reaches no other model, by any name or adapter.", "tenants")
@given(json_values, st.booleans())
def test_every_adapter_is_seen(value: Any, escaped: bool) -> None:
    """Each adapter that a body names in SGLang's way is told; what is no name is told as one that nobody may use."""
    text = json.dumps({"lora_path": value})
    text = text.replace("lora_path", "lor\\u0061_path") if escaped else text
    named = value if isinstance(value, list) else [value]
    assert tenant_isolation.adapters(tenant_isolation.read_isolation_fields(text.encode())) == [
        n if isinstance(n, str) else "" for n in named if n is not None
    ]


@pytest.mark.parametrize(("engines", "paths"), [(["vllm"], 5), (["sglang"], 4), (["vllm", "sglang"], 3), (["x"], 0)])
def test_a_salt_is_relied_on_where_it_is_known_to_be_heeded(engines: list[str], paths: int) -> None:
    """One engine that may ignore the field is enough not to promise anything; so is not knowing any."""
    assert sum(tenant_isolation.can_isolate(path, engines) for path in PATHS) == paths
    assert not any(tenant_isolation.can_isolate(path, [*engines, "unknown"]) for path in PATHS)
    assert not any(tenant_isolation.can_isolate(path, []) for path in PATHS)


def test_what_was_read_for_one_is_not_found_for_another() -> None:
    """How fast a body is read does not tell that another tenant has sent its beginning; for the same one it is."""
    body = json.dumps({"messages": [{"role": "user", "content": f"{n} " * 300} for n in range(100)]}).encode()
    seen, found = BodyPrefixCache(bytes_max=1 << 24, seed=1), list[bool]()
    for whose in (b"a", b"a", b"a", b"b", b"", b"a"):
        seen.per_tenant(whose)
        place = seen.find(body, b"openai")
        found.append(place is not None)
    assert found == [False, True, True, False, False, True]
