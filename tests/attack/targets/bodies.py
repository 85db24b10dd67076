"""Bodies of requests: the prompt readers of all dialects, what is spliced into bodies, forms and files of prefixes."""

from __future__ import annotations

import json
import tempfile
from contextlib import suppress
from pathlib import Path

from router.core.dialects import PATHS, Dialect, InvalidBody, prefill_only, tenant_isolation
from router.core.dialects.multipart import any_form_model, form_model, form_streams, url_form
from router.core.dialects.tool_normalization import REPAIRS, ToolNormalizer
from router.core.prompts.agent_headers import BODIES, HEADERS, ids_of, label_of
from router.core.prompts.json_fields import step_of
from router.core.types.requests import RequestSpec
from router.prewarm import prefixes
from tests.attack.target import Target
from tests.core.prompts.test_incremental_parse import memory, told
from tests.core.prompts.test_incremental_parse import read as reading
from tests.core.prompts.test_nesting import depth, nests_deeper

DEPTH_MAX = 64
SALT = b"5" * 64


def bodies(data: bytes) -> None:
    """A body on every path: read in the three ways there are, which must agree, and edited in all ways."""
    deep = nests_deeper(data, DEPTH_MAX)
    with suppress(ValueError, RecursionError):
        assert deep == (depth(json.loads(data)) > DEPTH_MAX)
    if deep:
        return
    for path, dialect in PATHS.items():
        seen = memory()
        whole = reading(path, data, None, keep=True)
        for again in range(3):  # at the second time its messages are remembered, and found at the third
            assert reading(path, data, None) == whole, f"{path}: read quickly"
            assert reading(path, data, seen) == whole, f"{path}: with what was seen before, {again}"
        with suppress(InvalidBody):
            _edited(path, dialect, data)


def _edited(path: str, dialect: Dialect, data: bytes) -> None:
    ask = dialect.parse(path, data)
    dialect.template_input(path, data, ask.decoded)
    step_of(ask.metadata, "step")
    ids = ids_of({}, ask.names)
    assert ids is None or (ids.conversation and ids.session and ids.parent != ids.conversation)
    found = tenant_isolation.read_isolation_fields(data)
    assert all(isinstance(name, str) for name in tenant_isolation.adapters(found))
    before = told(ask)
    if ask.stream and not ask.wants_usage:
        asking = dialect.with_usage(data, ask.stream_options)
        after = dialect.parse(path, asking)
        assert after.wants_usage or asking == data
        assert _but_usage(after) == _but_usage(ask), f"{path}: asking for usage changed the request"
    apart = tenant_isolation.strip_shared_fields(data, found, "resp_x")
    assert tenant_isolation.has_value(found.session_params) or told(dialect.parse(path, apart)) == before
    left = tenant_isolation.read_isolation_fields(apart)
    assert all(bytes(raw) == b'"resp_x"' for raw in (left.request_id, left.rid) if tenant_isolation.has_value(raw))
    shared = set(tenant_isolation.Named.__struct_fields__) - {
        "lora_path",
        "request_id",
        "rid",
        "sampling_params",
        "vllm_xargs",
    }
    assert not any(tenant_isolation.has_value(getattr(left, name)) for name in shared), f"{path}: a transfer stayed"
    salted = dialect.parse(path, tenant_isolation.with_salt(path, data, SALT))
    assert path not in tenant_isolation.SALTED["vllm"] | tenant_isolation.SALTED["sglang"] or SALT in salted.salt
    assert (salted.model, salted.prompt) == (ask.model, ask.prompt), f"{path}: a salt changed the request"
    repaired, needed = ToolNormalizer(bytes_max=1 << 16).normalize(data, REPAIRS)
    assert bool(needed) == (repaired != data)
    assert (dialect.parse(path, repaired).prompt is None) == (ask.prompt is None), f"{path}: a repair lost the prompt"
    assert not tenant_isolation.has_value(
        tenant_isolation.read_isolation_fields(tenant_isolation.strip_transfers(data)).kv_transfer_params
    )
    with suppress(prefill_only.NotWarmable):
        fields = prefill_only.fields_of(data)
        for each in (fields, *prefill_only.shorter(path, fields, 1)[:4]):
            assert not _is_json(data) or _is_json(prefill_only.prefill_only(path, each))


def _is_json(data: bytes) -> bool:
    try:
        json.loads(data)
    except ValueError:
        return False
    return True


def _but_usage(ask: RequestSpec) -> object:
    ask.wants_usage, ask.stream_options = True, None
    return told(ask)


def agents(data: bytes) -> None:
    """Headers, a blank line and a body: the ids of the conversation, its agent and its client."""
    head, _, body = data.partition(b"\n\n")
    lines = (line.partition(b":") for line in head.split(b"\n"))
    headers = {name.strip().lower(): value.strip() for name, _, value in lines}
    names = None
    with suppress(InvalidBody):
        names = PATHS["/v1/chat/completions"].parse("/v1/chat/completions", body).names
    found = ids_of(headers, names)
    assert found is None or (found.conversation and found.parent != found.conversation)
    assert label_of(found) in ("", *(f"{row.client}{kind}" for row in (*HEADERS, *BODIES) for kind in ("", "/sub")))


def forms(data: bytes) -> None:
    """A form: the first line is its content type, and the rest its body."""
    content_type, _, body = data.partition(b"\n")
    with suppress(InvalidBody):
        model = form_model(content_type, body)
        assert model is None or model.encode() in body
        assert model is None or any_form_model(content_type, body) in (model.strip(), None)
    form_streams(content_type, body)
    for sure in (True, False):
        with suppress(InvalidBody):
            url_form(body, sure=sure)


def prefix_file(data: bytes) -> None:
    """A file of prefixes that replicas are warmed with."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(data)
        file.flush()
        with suppress(prefixes.PrefixesError):
            for prefix in prefixes.read(Path(file.name)):
                assert PATHS[prefix.path].parse(prefix.path, prefix.body)


FIELDS = [
    "model", "messages", "role", "content", "system", "user", "assistant", "tool", "tools", "tool_calls",
    "function", "name", "arguments", "parameters", "type", "text", "image_url", "input_text", "tool_use",
    "tool_result", "input", "prompt", "stream", "stream_options", "include_usage", "cache_salt", "extra_key",
    "lora_path", "metadata", "instructions", "previous_response_id", "store", "max_tokens", "input_ids",
    "sampling_params", "cache_control", "chat_template_kwargs", "reasoning_content", "thinking", "tool_choice",
    "namespace", "continue_final_message", "rid", "request_id",
]  # fmt: skip
JSON = (b'"', b"\\", b"\\u00e9", b"\\ud83d\\ude00", b"\\ud800", b"null", b"true", b"1e400", b"[]", b"{}", b",", b":")
WORDS = (*JSON, *(b'"%b":' % field.encode() for field in FIELDS), *(b'"%b"' % field.encode() for field in FIELDS))
BOUNDARIES = (b"--b", b"--b--\r\n", b"\r\n\r\n", b'Content-Disposition: form-data; name="model"', b'; filename="x"')

AGENTS = tuple(
    name.replace(b"x-codex-turn-metadata.", b"")
    for row in (*HEADERS, *BODIES)
    for name in (*row.conversation, *row.parent, *row.session, row.agent, row.user_agent)
    if name
)

TARGETS = (
    Target(agents, (*AGENTS, b": ", b"_session_", *WORDS), steps=(60_000, 1_500), held_bytes=(4 << 20, 2_000)),
    Target(bodies, WORDS, steps=(60_000, 1_500), held_bytes=(4 << 20, 2_000)),
    Target(forms, (*BOUNDARIES, b"model=", b"stream=true", b"&", b"%20"), steps=(20_000, 400)),
    Target(
        prefix_file,
        (*WORDS, b'{"path":"/v1/chat/completions","body":', b"\n"),
        steps=(30_000, 800),
        held_bytes=(20 << 20, 800),
    ),
)
