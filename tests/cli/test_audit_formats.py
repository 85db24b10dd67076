"""Formats of logs that `warmroute audit` reads. The examples in its documentation are data of these tests."""

from __future__ import annotations

import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.cli.audit import reader, report
from router.cli.audit.counts import Audit
from router.cli.audit.log_formats import FORMATS, LogReader, records_in
from router.cli.audit.log_requests import LoggedRequest, NotRequest
from router.cli.main import main
from router.core.dialects import PATHS, InvalidBody
from tests.cli.test_audit import Audited, tables

PAGE = Path(__file__).resolve().parents[2] / "docs/guide/audit.md"
DATA = Path(__file__).resolve().parents[1] / "data/audit"
ASKED = b"high"  # in every prompt of an example


def examples() -> list[tuple[str, str]]:
    """(Section, example) of the page."""
    found = []
    for section in PAGE.read_text().split("\n### ")[1:]:
        name = section.partition("\n")[0]
        found += [(name, block) for block in re.findall(r"```(?:json|text)\n(.*?)\n```", section, re.DOTALL)]
    return found


def read(text: str) -> list[LoggedRequest]:
    """Requests of one record."""
    return list(LogReader().read(text.encode()))


def audited(tmp_path: Path, name: str, data: str) -> Audited:
    """The rows of the report on a file."""
    (tmp_path / name).write_text(data)
    assert main(["audit", str(tmp_path / name), "--json", str(tmp_path / "out.json")]) == 0
    return tables(tmp_path / "out.json")


def comparable(found: Audited) -> Audited:
    """The findings without random names, and without the bytes, which white space in JSON adds to."""
    advice = [{name: row[name] for name in ("change", "path", "requests", "lost_tokens")} for row in found["advice"]]
    log = [{name: value for name, value in row.items() if name != "body_bytes"} for row in found["log"]]
    return found | {"log": log, "advice": advice, "template": []}


@pytest.mark.parametrize(("section", "example"), examples())
def test_examples_of_the_documentation_are_read(section: str, example: str) -> None:
    """Each example is one request with a prompt in which the question stands, and its time is known if it has one."""
    (request,) = read(example)
    ask = PATHS[request.path].parse(request.path, request.body)

    assert ask.prompt is not None
    assert ASKED in request.body
    assert request.at_s is not None or section == "Request bodies"


def test_every_format_has_an_example() -> None:
    """The documentation has an example of each format, and a section for each row of its table."""
    first = [
        next(each.name for each in FORMATS if each.read(record) is not None)
        for _, example in examples()
        for record in records_in(example.encode())
    ]
    assert set(first) == {each.name for each in FORMATS}
    assert set(re.findall(r"^\| \[.*\]\(#([a-z-]+)\)", PAGE.read_text(), re.MULTILINE)) == {
        section.lower().replace(" ", "-") for section, _ in examples()
    }


# -- logs of the software itself ---------------------------------------------------------------------------------------

# Three requests with one long system prompt and its three tools in another order each time, as logged by the software.
LOGS = ("litellm-1.108.jsonl", "vllm-0.32.log", "sglang-0.5.23.log", "sglang-0.5.23-json.log", "otel-console.json")


@pytest.mark.parametrize("name", LOGS)
def test_logs_of_the_software_have_the_same_findings(tmp_path: Path, name: str) -> None:
    """Logs that vLLM, SGLang, LiteLLM and OpenTelemetry wrote of the same requests name the order of
    the tools as what is lost. No request is counted twice, and no line is skipped."""
    found = audited(tmp_path, name, (DATA / name).read_text())

    (figures,) = found["log"]
    assert (figures["requests"], figures["unread_lines"], figures["hit_rate"]) == (3, 0, 0.0)
    assert figures["mended_hit_rate"] == pytest.approx(0.644, abs=0.001)
    assert found["advice"][0]["change"] == "tool_order"
    assert {group["tools"] for group in found["group"]} == {True}


def test_usage_of_finished_requests(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """SGLang's usage is in lines of their own: both of its formats give the same actual hit rate. More hits than the
    logged prompts allow are a warning."""
    for name in LOGS[2:4]:
        (figures,) = audited(tmp_path, name, (DATA / name).read_text())["log"]
        assert (figures["logged_prompt_tokens"], figures["logged_hit_rate"]) == (720, 0.2667)
        assert len(figures["warnings"]) == 1
        assert (
            "Warning: The actual hit rate (26.7%) exceeds the best possible hit rate (0.0%)" in capsys.readouterr().out
        )


def test_arrays_and_indented_objects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log is the same as lines, as an array, indented, as several arrays, and as pages; however it is cut into
    chunks."""
    lines = (DATA / LOGS[0]).read_text().splitlines()
    payloads = [json.loads(line) for line in lines]
    shapes = [
        "\n".join(lines),
        json.dumps(payloads),
        json.dumps(payloads, indent=2),
        "\n\n  [\n" + ",\n".join(lines) + "\n]\n",
        "\n".join(json.dumps(payload, indent=4) for payload in payloads),
        "\n".join(f"[{line}]" for line in lines),
        json.dumps({"data": payloads, "meta": {"page": 1}}),
        json.dumps({"data": payloads, "meta": {"page": 1}}, indent=1),
    ]
    rows = []
    for chunk in (1 << 20, 61):
        monkeypatch.setattr(reader, "BUFFER_BYTES", chunk)
        rows += [comparable(audited(tmp_path, "log.json", shape)) for shape in shapes]

    assert rows[0]["log"][0]["requests"] == 3
    assert all(row == rows[0] for row in rows)


def test_an_array_is_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An object of an array that is too long is skipped, and one that was cut off. A hostile one ends the file."""
    monkeypatch.setattr(reader, "LINE_BYTES_MAX", 20_000)
    monkeypatch.setattr(report, "LINE_BYTES_MAX", 20_000)
    line = (DATA / LOGS[0]).read_text().splitlines()[0]
    text = f'[{line},{{"x": "{"y" * 30_000}"}},{line},{line[:-20]}'
    (figures,) = audited(tmp_path, "log.json", text)["log"]
    out = capsys.readouterr().out
    assert (figures["requests"], figures["unread_lines"]) == (2, 2)
    assert "log.json:2: longer than 20,000 bytes" in out
    assert "log.json:4: damaged JSON" in out

    (figures,) = audited(tmp_path, "log.json", f"[{line},{'{' * 2_000}")["log"]
    assert figures["requests"] == 1
    assert "log.json could only be read up to line 1: a record consists of too many objects" in capsys.readouterr().out


def test_tools_of_litellm(tmp_path: Path) -> None:
    """The tools in LiteLLM's parameters count as those in a body: both logs have the same findings."""
    system = {"role": "system", "content": "You know all tides of the harbour. " * 20}
    tools = [{"type": "function", "function": {"name": f"tool_{n}", "description": "x" * 400}} for n in range(4)]
    bodies = [
        {
            "model": "m",
            "tools": tools[n % 3 :] + tools[: n % 3],
            "messages": [system, {"role": "user", "content": str(n)}],
        }
        for n in range(40)
    ]
    payloads = [
        {
            "call_type": "acompletion",
            "model": "m",
            "messages": body["messages"],
            "model_parameters": {"tools": body["tools"]},
        }
        for body in bodies
    ]
    found = [audited(tmp_path, "x", "\n".join(map(json.dumps, log))) for log in (bodies, payloads)]

    assert found[0]["log"][0]["misses"]["diverged"] > 1_000
    assert comparable(found[0] | {"log": []}) == comparable(found[1] | {"log": []})
    assert found[0]["log"][0]["misses"] == found[1]["log"][0]["misses"]


# -- single records ----------------------------------------------------------------------------------------------------


def test_otel_messages_become_a_body() -> None:
    """Parts of messages are text, calls of tools, results of tools and media, in this order in the body."""
    parts = [{"type": "text", "content": "a"}, {"type": "tool_call", "id": "c", "name": "f", "arguments": {"x": 1}}]
    results = [{"type": "tool_call_response", "id": "c", "response": "r"}, {"type": "uri", "uri": "u"}]
    messages = [{"role": "assistant", "parts": parts}, {"role": "tool", "parts": results}]
    attributes = {"gen_ai.input.messages": messages, "gen_ai.system_instructions": "s", "gen_ai.conversation.id": "k"}
    usage = {"gen_ai.usage.input_tokens": 10, "gen_ai.usage.cache_read.input_tokens": 4}
    (request,) = read(json.dumps({"name": "chat", "attributes": attributes | usage}))

    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    assert json.loads(request.body)["messages"] == [
        {"role": "system", "content": "s"},
        {"role": "assistant", "content": "a", "tool_calls": [call]},
        {"role": "tool", "content": '{"type": "uri", "uri": "u"}'},
        {"role": "tool", "tool_call_id": "c", "content": "r"},
    ]
    assert (request.session, request.prompt_tokens, request.cached_tokens) == ("k", 10, 4)


def test_one_damaged_request_of_a_batch_is_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A record may have hundreds of requests: the others are counted."""
    spans = [
        {"attributes": {"gen_ai.request.model": model, "gen_ai.input.messages": [{"role": "user", "content": "x"}]}}
        for model in ("m", 5, "m")
    ]
    (figures,) = audited(tmp_path, "x", json.dumps({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]}))["log"]
    assert (figures["requests"], figures["unread_lines"]) == (2, 1)
    assert "x:1: invalid_model" in capsys.readouterr().out


def test_langfuse_counts_cached_tokens_apart() -> None:
    """Langfuse's input tokens do not include cached ones."""
    (cached, plain) = (read(text)[0] for section, text in examples() if section == "Langfuse")

    assert (cached.prompt_tokens, cached.cached_tokens) == (10, 4)
    assert (plain.prompt_tokens, plain.cached_tokens, plain.session) == (10, None, "s1")
    assert json.loads(cached.body)["tools"]


@pytest.mark.parametrize(
    ("record", "why"),
    [
        ('INFO 08-14 10:21:07 [logger.py:41] Request x JSON body: {"messages":[{"role"', "--max-log-len"),
        ("INFO 08-14 10:21:07 [logger.py:41] Received request x: prompt: '<|im_st, params", "cut or shortened"),
        (
            "[2026-11-30 08:41:22] Receive: obj=GenerateReqInput(text='a' ... 'b', stream=False)",
            "--log-requests-level 3",
        ),
        ("[2026-11-30 08:41:22] Receive: obj=GenerateReqInput(input_ids=[1] ... [2], stream=False)", "level 3"),
        ("[2026-11-30 08:41:22] Receive: obj=GenerateReqInput(rid='a', stream=False)", "--log-requests-level 3"),
        (
            '{"timestamp": "t", "event": "request.received", "obj": {"text": "'
            + "x" * 1024
            + "..."
            + "x" * 1024
            + '"}}',
            "--log-requests-level 3",
        ),
        ('{"model_parameters": {}, "messages": [{"role": "user", "content": "redacted-by-litellm"}]}', "redacted"),
        ('{"name": "chat m", "attributes": {"gen_ai.request.model": "m"}}', "CAPTURE_MESSAGE_CONTENT"),
        ('{"traceId": "t", "type": "GENERATION", "input": null}', "no prompt"),
        ("127.0.0.1 - GET /health", "no request in any of the formats"),
    ],
)
def test_records_without_a_prompt_say_why(record: str, why: str) -> None:
    """A record without its whole prompt is refused with the setting that writes it. Half a prompt would be a wrong
    answer."""
    with pytest.raises(NotRequest, match=re.escape(why)):
        read(record)


@pytest.mark.parametrize(
    "record",
    [
        "INFO 08-14 10:21:07 [logger.py:41] Received request x: params: SamplingParams(n=1), lora_request: None.",
        '{"traceId": "t", "type": "SPAN", "input": "question"}',
        '{"name": "GET /", "attributes": {"http.route": "/"}}',
        '{"name": "agent", "attributes": {"gen_ai.operation.name": "invoke_agent", "gen_ai.prompt": "x"}}',
    ],
)
def test_records_of_other_events_are_ignored(record: str) -> None:
    """They are neither requests nor skipped lines."""
    assert read(record) == []


def test_text_within_json_is_read() -> None:
    """Docker's json-file and loggers that write JSON have the engine's line in a field."""
    line = next(example for section, example in examples() if section == "vLLM")
    (plain,) = read(line)

    for field in ("log", "message"):
        assert read(json.dumps({field: line + "\n", "stream": "stderr"})) == [plain]


def test_most_tokens_unsupported_is_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A log with prompts that cannot be read gives a hit rate, and says that it is too low."""
    image = {"model": "m", "messages": [{"role": "user", "content": "x" * 400}], "unknown_field": 1}
    rows = [image] * 2 + [{"model": "m", "input": 5, "instructions": "x" * 4_000}] * 4
    audited(tmp_path, "log", "\n".join(map(json.dumps, rows)))
    assert "of the prompt tokens are `unsupported`" in capsys.readouterr().out


# -- damage ------------------------------------------------------------------------------------------------------------

VALUES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), st.just([]), st.just({}))


def leaves(value: Any) -> list[tuple[Any, Any]]:
    """Places of all values within a JSON value."""
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    found = [(value, key) for key, _ in pairs]
    return found + [place for parent, key in list(found) for place in leaves(parent[key])]


@given(st.sampled_from(examples()), st.data())
def test_damaged_records_are_refused(example: tuple[str, str], data: st.DataObject) -> None:
    """A record that is cut, has other bytes or values of other types is a request or is refused, and nothing worse."""
    text = example[1]
    if text.startswith("{") and data.draw(st.booleans()):
        record = json.loads(text)
        parent, key = data.draw(st.sampled_from(leaves(record)))
        parent[key] = data.draw(VALUES)
        damaged = json.dumps(record).encode()
    else:
        begin, end = sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 2)))
        damaged = text[:begin].encode() + data.draw(st.binary(max_size=3)) + text[end:].encode()
    audit = Audit(memory_bytes_max=1 << 20, excerpts=True)
    with suppress(NotRequest, InvalidBody):
        for request in LogReader().read(damaged):
            audit.add(request)
    audit.settle()
