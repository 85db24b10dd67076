"""LiteLLM's standard logging payloads and Langfuse's observations: a prompt, with a body's other fields beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
from msgspec import Raw

from router.cli.audit.log_requests import LoggedRequest, LogRecord, NotRequest, make_request
from router.cli.audit.trace_exports import body_of, structured
from router.core.prompts.json_fields import decode_as, has_value

_ABSENT = Raw(b"null")
_REDACTED, REDACTED_BYTES_MAX = b"redacted-by-litellm", 1_024
_LITELLM_INPUTS = {"embedding": ("input", "/v1/embeddings"), "responses": ("input", "/v1/responses")}
_GENERATIONS = frozenset((None, "GENERATION", "EMBEDDING"))


def read_litellm(record: LogRecord) -> Sequence[LoggedRequest] | None:
    """Read a StandardLoggingPayload. The tools are in `model_parameters`."""
    fields = record.fields
    if not {"messages", "model_parameters"} <= fields.keys():
        return None
    prompt = fields["messages"]
    if not has_value(prompt) or (len(prompt) < REDACTED_BYTES_MAX and _REDACTED in bytes(prompt)):
        raise NotRequest("its prompt was redacted by LiteLLM (turn_off_message_logging)")
    call = decode_as(str, fields.get("call_type", _ABSENT)) or ""
    name, path = next((row for word, row in _LITELLM_INPUTS.items() if word in call), ("messages", ""))
    if name == "messages" and bytes(prompt).startswith(b'"'):
        name = "prompt"
    metadata = _object(fields.get("metadata", _ABSENT))
    usage = _object(fields.get("response", _ABSENT)).get("usage", _ABSENT)
    if not has_value(usage):
        usage = metadata.get("usage_object", _ABSENT)
    parameters = _object(fields["model_parameters"])
    body = {**parameters, "model": fields.get("model", _ABSENT), name: prompt}
    return [
        make_request(
            {
                "body": body,
                "path": "/v1/messages" if "anthropic_messages" in call else path,
                "usage": usage if has_value(usage) else {"prompt_tokens": fields.get("prompt_tokens", _ABSENT)},
                "time": fields.get("startTime", _ABSENT),
                "session": fields.get("session_id", _ABSENT),
                "tenant": metadata.get("user_api_key_team_alias", _ABSENT),
            }
        )
    ]


def read_langfuse(record: LogRecord) -> Sequence[LoggedRequest] | None:
    """Read an observation: of the API, of an export, or of the blob storage, which has names in snake case."""
    fields = record.fields
    if "input" not in fields or not fields.keys() & {"traceId", "trace_id"}:
        return None
    if decode_as(str, fields.get("type", _ABSENT)) not in _GENERATIONS:
        return []
    given = structured(msgspec.json.decode(fields["input"]))
    parameters = structured(msgspec.json.decode(_first(fields, "modelParameters", "model_parameters")))
    body = body_of(given)
    if not body:
        raise NotRequest("its input is no prompt")
    model = _first(fields, "model", "provided_model_name", "providedModelName")
    usage = msgspec.json.decode(_first(fields, "usageDetails", "usage_details", "usage"))
    return [
        make_request(
            {
                "body": {**(parameters if isinstance(parameters, dict) else {}), "model": model, **body},
                "usage": _langfuse_usage(structured(usage)),
                "time": _first(fields, "startTime", "start_time"),
                "session": _first(fields, "sessionId", "session_id"),
            }
        )
    ]


def _langfuse_usage(usage: object) -> dict[str, int]:
    """Return the usage. Langfuse has cached tokens apart from `input`, under names of the model's provider."""
    if not isinstance(usage, dict):
        return {}
    counts = {name: value for name, value in usage.items() if isinstance(value, int) and value >= 0}
    counts = {name: value for name, value in counts.items() if name.startswith(("input", "cache"))}
    cached = [value for name, value in counts.items() if "cache" in name and "creation" not in name]
    found = {"prompt_tokens": sum(counts.values())}
    return found | ({"cached_tokens": sum(cached)} if cached else {})


def _object(raw: Raw) -> dict[str, Raw]:
    """Return the object, which may be given as JSON text; empty if it is none."""
    text = decode_as(str, raw)
    return decode_as(dict[str, Raw], Raw(text.encode(errors="replace")) if text else raw) or {}


def _first(fields: Mapping[str, Raw], *names: str) -> Raw:
    return next((fields[name] for name in names if has_value(fields.get(name, _ABSENT))), _ABSENT)
