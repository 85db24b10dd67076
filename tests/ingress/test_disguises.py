"""What goes on to an engine is what was read, whatever a request's type says of its content."""

from __future__ import annotations

import asyncio
import json
from email import policy
from email.parser import BytesParser
from typing import Any, cast
from urllib.parse import parse_qsl

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.config.api_keys import ANONYMOUS, Caller, Tenant
from router.config.schema import DisaggSettings, LimitSettings
from router.http.request import Connection, Refusal, Request
from router.ingress.parser import RequestParser
from router.placement_api import PlacementService
from tests.ingress.test_parser import Following

HOST = "169.254.169.254"
TAKEN_OUT = (
    "kv_transfer_params", "ec_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room",
    "bootstrap_pair_key", "decode_tp_size", "disagg_prefill_dp_rank", "session_params", "routed_dp_rank",
    "data_parallel_rank",
)  # fmt: skip
PATHS = ("/tokenize", "/pooling", "/score", "/v1/audio/transcriptions", "/v1/chat/completions", "/v1/completions")
TYPES = (
    b"application/json", b"application/json; charset=utf-16", b"text/plain", b"multipart/form-data; boundary=b",
    b"Multipart/Mixed;boundary=b", b"multipart/form-data", b'multipart/form-data; boundary="b"',
    b"application/x-www-form-urlencoded", b"application/octet-stream", b"*/*", b"",
)  # fmt: skip


def read_by_engines(content_type: bytes, body: bytes) -> list[dict[str, Any]]:
    """What engines may take for the fields of a body: as JSON whatever its type, and as a form by its type."""
    found: list[dict[str, Any]] = []
    try:
        read = json.loads(body)
    except (ValueError, RecursionError):
        pass
    else:
        found += [each for each in (read if isinstance(read, list) else [read]) if isinstance(each, dict)]
    if content_type.lower().startswith(b"multipart/"):
        message = BytesParser(policy=policy.HTTP).parsebytes(b"Content-Type: " + content_type + b"\r\n\r\n" + body)
        parts = message.iter_parts() if message.is_multipart() else iter(())
        found.append(
            {
                str(part.get_param("name", header="content-disposition")): part.get_payload(decode=True)
                for part in parts
                if "content-disposition" in part
            }
        )
    elif b"urlencoded" in content_type:
        found.append(dict(parse_qsl(body.decode("latin-1"), keep_blank_values=True)))
    return found


def leaks(content_type: bytes, body: bytes) -> list[str]:
    """Fields for engines alone that one of them may find in this body."""
    names = []
    for fields in read_by_engines(content_type, body):
        arguments = fields.get("vllm_xargs") or {}
        if not isinstance(arguments, dict):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                arguments = {}
        names += [name for name in TAKEN_OUT if fields.get(name) is not None]
        names += [name for name in TAKEN_OUT if isinstance(arguments, dict) and arguments.get(name) is not None]
    return names


def sent(path: str, content_type: bytes, body: bytes, tenant: Tenant | None) -> bytes | None:
    """The body that goes to an engine, or None for a request that is refused."""
    limits, disagg = LimitSettings(offload_bytes_min=1 << 20), DisaggSettings("nixl" if tenant is None else "")
    reader = RequestParser(cast("PlacementService", Following()), None, limits, disagg=disagg)
    request = Request(cast("Connection", None))
    request.method, request.target, request.path = "POST", path, path
    if content_type:
        request.fields[b"content-type"] = content_type
        request.lines.append((b"content-type", b"Content-Type", content_type))
    request.replace_body([body], len(body))
    caller = Caller(tenant=tenant) if tenant is not None else ANONYMOUS
    try:
        return asyncio.run(reader.parse(request, "id", caller)).body
    except Refusal:
        return None
    finally:
        reader.close()


def escaped(name: str) -> str:
    """A name in JSON as escapes alone."""
    return "".join(f"\\u{ord(letter):04x}" for letter in name)


NAMES = st.sampled_from(TAKEN_OUT)
KEYS = NAMES | NAMES.map(escaped)
FIELDS = KEYS.map(lambda name: f'"{name}":"{HOST}"') | KEYS.map(lambda name: f'"vllm_xargs":{{"{name}":"{HOST}"}}')
PLAIN = '"model":"m","prompt":"hi","messages":[{"role":"user","content":"hi"}]'
OBJECTS = st.lists(FIELDS | st.sampled_from((PLAIN, '"a":null', '"b":"}"')), min_size=1, max_size=4).map(
    lambda fields: ("{" + ",".join(fields) + "}").encode()
)
PARTS = st.builds(
    lambda head, name, end, value: (
        b"--b\r\nContent-Disposition: form-data; %b%b%b\r\n\r\n%b\r\n" % (head, name.encode(), end, value)
    ),
    st.sampled_from((b'name="', b"name=", b'filename="x"; name="')),
    NAMES | st.sampled_from(("model", "vllm_xargs", "file")),
    st.sampled_from((b'"', b'"; filename="a.wav"', b"", b'"\r\nContent-Transfer-Encoding: base64')),
    st.sampled_from((b"m", b"1", HOST.encode())) | OBJECTS,
)
FORMS = st.lists(PARTS, min_size=1, max_size=3).map(lambda parts: b"".join(parts) + b"--b--\r\n")
URLS = st.lists(st.tuples(NAMES, st.just(HOST)), max_size=2).map(
    lambda pairs: "&".join(["model=m", *(f"{name}={value}" for name, value in pairs)]).encode()
)
BEFORE = st.sampled_from(
    (b"", b" ", b"\r\n", b"\t\n ", b"\xef\xbb\xbf", b"\xef\xbb\xbf ", b"\xef\xbb\xbf" * 2, b"--b\r\n", b"x")
)
AFTER = st.sampled_from((b"", b" \r\n", b"\0", b"}", b"--b--"))
BODIES = st.builds(lambda before, body, after: before + body + after, BEFORE, OBJECTS | FORMS | URLS, AFTER)
OTHER_ENCODINGS = OBJECTS.flatmap(
    lambda body: st.sampled_from(("utf-16", "utf-16-le", "utf-16-be", "utf-32")).map(body.decode().encode)
)
TENANTS = (Tenant("acme"), Tenant("few", models=frozenset("m")), None)


@pytest.mark.finding("2026-11-28/19")
@pytest.mark.promise("A body goes on to an engine as it was read, whatever its Content-Type.", "tenants")
@given(st.sampled_from(PATHS), st.sampled_from(TYPES), BODIES | OTHER_ENCODINGS, st.sampled_from(TENANTS))
@example("/tokenize", b"multipart/form-data; boundary=b", b'{"kv_transfer_params":{"remote_host":"x"}}', TENANTS[0])
@example("/pooling", b"multipart/form-data; boundary=b", b'\n[{"bootstrap_host":"x"}]', TENANTS[1])
@example(
    "/v1/audio/transcriptions",
    b"multipart/form-data; boundary=b",
    b'--b\r\nContent-Disposition: form-data; name="vllm_xargs"\r\n\r\n{"kv_transfer_params":{"a":1}}\r\n--b--\r\n',
    TENANTS[0],
)
def test_no_disguise_brings_a_field_to_an_engine(
    path: str, content_type: bytes, body: bytes, tenant: Tenant | None
) -> None:
    """Fields for engines alone, in JSON under any type and in forms, are taken out, or their request is refused: of
    tenants, and of anybody where the router splits requests."""
    got = sent(path, content_type, body, tenant)
    if got is not None:
        found = leaks(content_type, got)
        assert not (
            set(found) - {"routed_dp_rank", "data_parallel_rank", "session_params"} if tenant is None else found
        )


FORM = b"multipart/form-data; boundary=b"
PART = b'--b\r\nContent-Disposition: form-data; name="%b"\r\n\r\n%b\r\n'


@pytest.mark.parametrize("tenant", TENANTS)
def test_forms_pass_as_they_are(tenant: Tenant | None) -> None:
    """A form with a file, and arguments of vLLM's that name no transfer."""
    body = b"".join(PART % field for field in ((b"model", b"m"), (b"file", b"\0\xff"), (b"vllm_xargs", b'{"a":1}')))
    for path in PATHS[:4]:
        assert sent(path, FORM, body + b"--b--\r\n", tenant) == body + b"--b--\r\n"
        assert sent(path, b"application/x-www-form-urlencoded", b"model=m&a=b", tenant) == b"model=m&a=b"


@pytest.mark.parametrize("content_type", TYPES)
def test_json_is_json_under_any_type(content_type: bytes) -> None:
    """As clients send it that say nothing of it, or curl's form."""
    body = b' {"model":"m","prompt":"hi"}'
    assert sent("/tokenize", content_type, body, TENANTS[0]) == body
    assert sent("/tokenize", content_type, body[:-1], TENANTS[0]) is None
