"""OpenTelemetry exports with GenAI attributes: OTLP JSON of the collector's file exporter, and the console exporter.

Prompts are read from attributes of spans, of their events, or of log records, in these forms:
- `gen_ai.input.messages`, `gen_ai.system_instructions` and `gen_ai.tool.definitions` (conventions 1.37 and later)
- events `gen_ai.user.message` and the like, one for each message (conventions 1.29 to 1.36)
- `gen_ai.prompt` with all messages as JSON (1.28 and before), or `gen_ai.prompt.0.content` and so on (OpenLLMetry)
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from router.cli.audit.engine_logs import json_of
from router.cli.audit.log_requests import LoggedRequest, LogRecord, NotRequest, make_request
from router.core.prompts.json_fields import UNREADABLE

Attributes = dict[str, Any]

# Operations of agents: their spans repeat the prompts of the model's spans within them.
_OTHER_OPERATIONS = frozenset(("invoke_agent", "create_agent", "execute_tool", "invoke_workflow"))
_MESSAGE_EVENT = re.compile(r"gen_ai\.(system|user|assistant|tool)\.message")
_FLAT = re.compile(r"(\d{1,6})\.(?:(\w+)\.(\d{1,6})\.)?(\w+)")
_NO_CONTENT = "its span has no prompt: set OTEL_INSTRUMENTATION_GENAI_CAPTURE_MESSAGE_CONTENT at the client"


def read_otel(record: LogRecord) -> Sequence[LoggedRequest] | None:
    """Read a batch of spans or log records, or one of them."""
    names = record.fields.keys()
    if not names & {"resourceSpans", "resourceLogs"} and not {"attributes", "name"} <= names:
        return None
    document = msgspec.json.decode(record.text)
    requests, has_calls = [], False
    for attributes, messages, time in _calls(document):
        if str(attributes.get("gen_ai.operation.name")) in _OTHER_OPERATIONS:
            continue
        body = _body(attributes, messages)
        has_calls = has_calls or "gen_ai.request.model" in attributes
        if body:
            requests.append(make_request({"body": body, "time": time, **_facts(attributes)}))
    if has_calls and not requests:
        raise NotRequest(_NO_CONTENT)
    return requests


def _facts(attributes: Attributes) -> dict[str, Any]:
    tokens = attributes.get("gen_ai.usage.input_tokens", attributes.get("gen_ai.usage.prompt_tokens"))
    usage = {"prompt_tokens": tokens, "cached_tokens": attributes.get("gen_ai.usage.cache_read.input_tokens")}
    return {"usage": usage, "session": attributes.get("gen_ai.conversation.id")}


# -- spans and log records ---------------------------------------------------------------------------------------------


def _calls(document: Attributes) -> Iterator[tuple[Attributes, list[Any], Any]]:
    """Yield (attributes, messages from events, time) of each span, and of the log records of each span."""
    if "attributes" in document:
        yield _of_span(document)
    for resource in _objects(document, "resourceSpans"):
        for scope in _objects(resource, "scopeSpans"):
            yield from map(_of_span, _objects(scope, "spans"))
    for resource in _objects(document, "resourceLogs"):
        by_span: dict[str, tuple[Attributes, list[Any], Any]] = {}
        for scope in _objects(resource, "scopeLogs"):
            for number, event in enumerate(_objects(scope, "logRecords")):
                time = event.get("timeUnixNano") or event.get("observedTimeUnixNano")
                call = by_span.setdefault(str(event.get("spanId") or number), ({}, [], time))
                _add_event(event, call[0], call[1])
        yield from by_span.values()


def _of_span(span: Attributes) -> tuple[Attributes, list[Any], Any]:
    attributes: Attributes = {}
    messages: list[Any] = []
    for event in _objects(span, "events"):
        _add_event(event, attributes, messages)
    attributes |= _attributes(span.get("attributes"))
    return attributes, messages, span.get("startTimeUnixNano", span.get("start_time"))


def _add_event(event: Attributes, attributes: Attributes, messages: list[Any]) -> None:
    own, body = _attributes(event.get("attributes")), _value(event.get("body"))
    name = event.get("eventName") or event.get("name") or own.get("event.name") or own.get("event_name")
    found = _MESSAGE_EVENT.fullmatch(str(name))
    if found is None:
        attributes |= own | (body if isinstance(body, dict) else {})
        return
    message = {"role": found[1], **own, **(body if isinstance(body, dict) else {"content": body} if body else {})}
    messages.append({name: value for name, value in message.items() if not name.startswith(("gen_ai.", "event"))})


def _objects(parent: Attributes, name: str) -> list[Attributes]:
    listed = parent.get(name)
    return [each for each in listed if isinstance(each, dict)] if isinstance(listed, list) else []


def _attributes(given: object) -> Attributes:
    if isinstance(given, dict):
        return given
    pairs = _objects({"pairs": given}, "pairs")
    return {str(pair.get("key")): _value(pair.get("value")) for pair in pairs}


def _value(given: object) -> object:
    """Return OTLP's AnyValue as a plain value; any other value as it is."""
    if not isinstance(given, dict) or len(given) != 1:
        return given
    (kind, value), *_ = given.items()
    if kind == "kvlistValue" and isinstance(value, dict):
        return _attributes(value.get("values"))
    if kind == "arrayValue" and isinstance(value, dict):
        values = value.get("values")
        return [_value(each) for each in values] if isinstance(values, list) else []
    if kind == "intValue" and isinstance(value, str):
        return int(value) if value.isdecimal() and len(value) < 19 else None
    return value if kind in ("stringValue", "intValue", "doubleValue", "boolValue") else given


# -- prompts -----------------------------------------------------------------------------------------------------------


def structured(value: object) -> object:
    """Return the object or list that is given as JSON text, or as a Python literal. Any other value as it is."""
    if not isinstance(value, str) or not value.lstrip().startswith(("{", "[")):
        return value
    for text in (str, json_of):
        try:
            return msgspec.json.decode(text(value))
        except (*UNREADABLE, ValueError, SyntaxError):
            continue
    return value


def body_of(given: object) -> dict[str, Any]:
    """Return the fields of a body with this prompt: a text, a list of messages, or an object with either."""
    if isinstance(given, str):
        return {"prompt": given} if given else {}
    if isinstance(given, dict):
        if isinstance(given.get("messages"), list):
            return {**given, **body_of(given["messages"])}
        return given if "prompt" in given or "input" in given else {}
    if not isinstance(given, list) or not given or not all(isinstance(each, dict) for each in given):
        return {}
    return {"messages": [message for each in given for message in _chat_messages(each)]}


def _body(attributes: Attributes, messages: list[Any]) -> dict[str, Any]:
    prompt = structured(attributes.get("gen_ai.input.messages") or attributes.get("gen_ai.prompt"))
    body = body_of(prompt or messages or _unflatten(attributes, "gen_ai.prompt."))
    if not body:
        return {}
    system = structured(attributes.get("gen_ai.system_instructions"))
    if system and isinstance(body.get("messages"), list):
        parts = system if isinstance(system, list) else [{"type": "text", "content": system}]
        body["messages"] = [*_chat_messages({"role": "system", "parts": parts}), *body["messages"]]
    tools = structured(attributes.get("gen_ai.tool.definitions")) or _unflatten(attributes, "llm.request.functions.")
    if isinstance(tools, list) and tools:
        body["tools"] = [_function(each) for each in tools if isinstance(each, dict)]
    return {"model": attributes.get("gen_ai.request.model"), **body}


def _chat_messages(message: Attributes) -> list[Attributes]:
    """Return a message with parts in the form of OpenAI's API: each result of a tool is a message."""
    parts = message.get("parts")
    if not isinstance(parts, list):
        called = _objects(message, "tool_calls")
        return [message | {"tool_calls": list(map(_function, called))} if called else message]
    texts, calls, results = list[str](), list[Attributes](), list[Attributes]()
    for part in (each if isinstance(each, dict) else {"content": each} for each in parts):
        if part.get("type") == "tool_call":
            calls.append(_function(part))
        elif part.get("type") == "tool_call_response":
            result = _text(part.get("response", part.get("result")))
            results.append({"role": "tool", "tool_call_id": part.get("id"), "content": result})
        else:  # parts without a text, such as images, differ if their JSON differs
            texts.append(_text(part.get("content", part.get("text", part))))
    made: Attributes = {"role": message.get("role"), "content": None if not texts else texts[0]}
    if len(texts) > 1:
        made["content"] = [{"type": "text", "text": text} for text in texts]
    if calls:
        made["tool_calls"] = calls
    return [*([made] if texts or calls else []), *results]


def _function(given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a tool or a call of a tool in the form of OpenAI's API."""
    if "name" not in given:
        return dict(given)
    function = {name: given[name] for name in ("name", "description") if name in given}
    if "parameters" in given:
        function["parameters"] = structured(given["parameters"])
    if "arguments" in given:
        function["arguments"] = _text(given["arguments"])
    return {**({"id": given["id"]} if "id" in given else {}), "type": "function", "function": function}


def _text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def _unflatten(attributes: Attributes, prefix: str) -> list[Attributes]:
    """Return objects from attributes such as PREFIX0.role and PREFIX0.tool_calls.0.name."""
    found: dict[int, Attributes] = {}
    for name, value in attributes.items():
        parts = _FLAT.fullmatch(name, len(prefix)) if name.startswith(prefix) else None
        if parts is None:
            continue
        row = found.setdefault(int(parts[1]), {})
        if parts[2]:
            inner = row.setdefault(parts[2], {})
            if isinstance(inner, dict):
                inner.setdefault(int(parts[3]), {})[parts[4]] = value
        else:
            row[parts[4]] = value
    for row in found.values():
        for name, value in row.items():
            if isinstance(value, dict) and all(isinstance(key, int) for key in value):
                row[name] = [value[key] for key in sorted(value)]
    return [found[key] for key in sorted(found)]
