"""Lines of text in engines' logs and access logs.

Engines print prompts as Python literals. vLLM up to 0.11.1 prints the rendered prompt at the level INFO; later releases
print it at the level DEBUG (`vllm/entrypoints/logger.py`), and vLLM 0.32 also prints the request's body
(`serve/utils/request_logger.py`). SGLang prints the rendered prompt (`srt/utils/request_logger.py`), as text or as JSON
behind a time. SGLang 0.5.23 also prints the request's body.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

import msgspec
from msgspec import Raw

from router.cli.audit.log_requests import LoggedRequest, LogRecord, NotRequest, make_request, make_usage
from router.core.prompts.json_fields import decode_as, has_value

_VLLM = re.compile(
    r"Re(?:quest \S+ (?:JSON body|details: prompt)|ceived request \S+: (?:prompt|params)): |Generated response "
)
_VLLM_IDS = "prompt_token_ids: "
_SGLANG = re.compile(r"Receive(?: OpenAI)?: obj=|Finish: obj=|\{\"timestamp\": \"[^\"]*\", \"event\": \"request\.")
_SGLANG_PROMPT = re.compile(r"[(,]\s?(text|input_ids)=(?!None)")
_SGLANG_COUNT = re.compile(r"'(prompt_tokens|cached_tokens)': (\d+)")
# `--log-requests-level 2` shortens JSON strings and lists to 2,048 characters and elements.
_SHORTENED = re.compile(r'"\.\.\."|"(?:[^"\\]|\\.){1024}\.\.\.(?:[^"\\]|\\.){1024}"')
_SHORTENED_WHY = "its prompt was shortened: SGLang needs --log-requests-level 3"
# A string without an end extends to the end of the text, so that each quote matches and a search takes linear time.
_STRING = r"'[^'\\]*+(?:\\.[^'\\]*+)*+(?:'|\\?\Z)|\"[^\"\\]*+(?:\\.[^\"\\]*+)*+(?:\"|\\?\Z)"
_LITERAL = re.compile(_STRING, re.DOTALL)
_NUMBERS = re.compile(r"\[[\d, ]*+\]")
_NOT_JSON = re.compile(rf"{_STRING}|\b(?:None|True|False)\b", re.DOTALL)
_CONSTANTS = {"None": "null", "True": "true", "False": "false"}
_TIME = re.compile(
    r"(?P<iso>\d{4}-\d\d-\d\d[ T]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?)"
    r"|(?P<vllm>\d\d-\d\d \d\d:\d\d:\d\d)|\[(?P<nginx>\d\d/\w{3}/\d{4}:\d\d:\d\d:\d\d [+-]\d{4})\]"
)
_ESCAPED_BODY = b"{\\x22"  # the beginning of a body
_ESCAPE = re.compile(rb"\\x([0-9A-Fa-f]{2})")
_REQUEST_LINE = re.compile(rb'"(?:POST|PUT) (\S+) HTTP/')


def read_vllm(record: LogRecord) -> Sequence[LoggedRequest] | None:
    """Read a line of vLLM's log."""
    if record.fields or not (b"equest " in record.text or b"Generated response " in record.text):
        return None
    text = record.text.decode(errors="replace")
    found = _VLLM.search(text)
    if found is None:
        return None
    if found[0].endswith(("params: ", "response ")):  # a line without a prompt, which follows the line that has it
        return []
    time, at = _time(text[: found.start()]), found.end()
    if found[0].endswith("body: "):
        if not text.endswith("}"):
            raise NotRequest("its body was cut: vLLM needs no --max-log-len")
        return [make_request({"body": Raw(text[at:].encode()), "time": time})]
    prompt, rest = _literal(text[at:])
    ids = _literal(rest.partition(_VLLM_IDS)[2])[0] if _VLLM_IDS in rest else None
    count = len(ids) if isinstance(ids, list) else 0
    prompt = ids if prompt is None else prompt
    return [make_request({"body": {"prompt": prompt}, "usage": {"prompt_tokens": count}, "time": time}, rendered=True)]


def read_sglang(record: LogRecord) -> Sequence[LoggedRequest] | None:
    """Read a line of SGLang's log, in either of its formats."""
    if record.fields:
        return _read_sglang_json(record) if {"event", "obj"} <= record.fields.keys() else None
    if b"obj" not in record.text:
        return None
    text = record.text.decode(errors="replace")
    found = _SGLANG.search(text)
    if found is None:
        return None
    if found[0].startswith("{"):
        json_text = text[found.start() :].encode()
        return _read_sglang_json(LogRecord(json_text, msgspec.json.decode(json_text, type=dict[str, Raw])))
    time, at = _time(text[: found.start()]), found.end()
    if found[0].startswith("Finish"):
        counts = {name: int(count) for name, count in _SGLANG_COUNT.findall(text, text.rfind("'meta_info': {"))}
        return [make_usage({"usage": counts, "time": time})]
    if "OpenAI" in found[0]:
        return [make_request({"body": _literal(text[at:])[0], "time": time})]
    prompt = _SGLANG_PROMPT.search(text, at)
    if prompt is None:
        raise NotRequest("it has no prompt: SGLang needs --log-requests-level 3")
    value, rest = _literal(text[prompt.end() :])
    if rest.startswith(" ... "):
        raise NotRequest(_SHORTENED_WHY)
    return [make_request({"body": {"prompt": value}, "time": time}, rendered=True)]


def _read_sglang_json(record: LogRecord) -> Sequence[LoggedRequest] | None:
    line = record.fields
    event, body, time = decode_as(str, line["event"]), line.get("obj", Raw()), line.get("timestamp", Raw(b"null"))
    if event is None or not event.startswith("request."):
        return None
    if event == "request.finished":
        usage = (decode_as(dict[str, Raw], line.get("out", Raw())) or {}).get("meta_info", Raw(b"null"))
        return [make_usage({"usage": usage, "time": time})]
    if b"..." in record.text and _SHORTENED.search(record.text.decode(errors="replace")):
        raise NotRequest(_SHORTENED_WHY)
    if event == "request.received.openai":
        return [make_request({"body": body, "time": time})]
    fields = decode_as(dict[str, Raw], body) or {}
    prompt = next((fields[name] for name in ("text", "input_ids") if has_value(fields.get(name, Raw()))), None)
    if prompt is None:
        raise NotRequest("it has no prompt: SGLang needs --log-requests-level 3")
    return [make_request({"body": {"prompt": prompt}, "time": time}, rendered=True)]


def read_escaped_body(record: LogRecord) -> Sequence[LoggedRequest] | None:
    """Read a line of text with a JSON body in which quotes are escaped as hexadecimal bytes, as nginx does."""
    if record.fields:
        return None
    start, end = record.text.find(_ESCAPED_BODY), record.text.rfind(b"}") + 1
    if start < 0 or end < start:
        return None
    body = _ESCAPE.sub(lambda escape: bytes([int(escape[1], 16)]), record.text[start:end])
    fields: dict[str, Any] = {"body": Raw(body), "time": _time(record.text[:start].decode(errors="replace"))}
    asked = _REQUEST_LINE.search(record.text)
    return [make_request(fields | ({"path": asked[1].decode(errors="replace")} if asked is not None else {}))]


def _time(before: str) -> float | str | None:
    """Return the time in the text before a request. vLLM logs no year: the latest possible year is assumed."""
    found = _TIME.search(before)
    if found is None:
        return None
    if found["iso"]:
        return found["iso"].replace(",", ".")
    try:
        if found["nginx"]:
            return datetime.strptime(found["nginx"], "%d/%b/%Y:%H:%M:%S %z").timestamp()
        now = datetime.now(UTC)
        at = datetime.strptime(f"{now.year}-{found['vllm']}", "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
        return (at if at < now + timedelta(days=1) else at.replace(year=now.year - 1)).timestamp()
    except ValueError:
        return None


def _literal(text: str) -> tuple[Any, str]:
    """Return the value of the Python literal at the beginning, and the rest of the text. Raises NotRequest."""
    try:
        found = _LITERAL.match(text)
        if found is not None:
            return ast.literal_eval(found[0]), text[found.end() :]
        numbers = _NUMBERS.match(text)
        if numbers is not None:
            return json.loads(numbers[0]), text[numbers.end() :]
        text = json_of(text)
        value, end = json.JSONDecoder().raw_decode(text)
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise NotRequest("its prompt was cut or shortened by the engine") from error
    return value, text[end:]


def json_of(text: str) -> str:
    """Return a Python literal as JSON. Raises ValueError or SyntaxError."""
    return _NOT_JSON.sub(lambda found: _CONSTANTS.get(found[0]) or json.dumps(ast.literal_eval(found[0])), text)
