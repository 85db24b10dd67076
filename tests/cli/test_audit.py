"""Promises of `warmroute audit`: a log in, what is wrong with its prompts out."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from router.cli.audit import reader, report
from router.cli.audit.log_formats import FORMATS
from router.cli.audit.log_requests import LoggedRequest, NotRequest, parse_request
from router.cli.main import main
from router.core.dialects import PATHS
from tests.core.insights.planted import Planted, planted, shipped

REQUESTS = 60
ASKED = {"role": "user", "content": "Which tides are there today?"}
SYSTEM = "You are a harbour master who knows all tides. " * 60
CHAT = {"model": "m", "messages": [{"role": "system", "content": SYSTEM}, ASKED]}
MESSAGES = {"model": "m", "max_tokens": 5, "system": SYSTEM, "messages": [ASKED]}
RESPONSES = {"model": "m", "instructions": SYSTEM, "input": [ASKED]}
COMPLETION = {"model": "m", "prompt": SYSTEM}
EMBEDDING = {"model": "m", "input": [SYSTEM], "encoding_format": "float"}

Audited = dict[str, list[dict[str, Any]]]
Auditing = Callable[..., Audited]


@pytest.fixture
def audited(tmp_path: Path) -> Auditing:
    """Writes a log, has it audited, and returns the JSON's rows by table."""

    def run(log: Sequence[bytes | dict[str, Any]], *flags: str) -> Audited:
        path, out = tmp_path / "log.jsonl", tmp_path / "out.json"
        path.write_bytes(b"".join(joined(line) for line in log))
        assert main(["audit", str(path), "--json", str(out), *flags]) == 0
        return tables(out)

    return run


def joined(line: bytes | dict[str, Any]) -> bytes:
    """As a line of a log."""
    return (line if isinstance(line, bytes) else json.dumps(line).encode()) + b"\n"


def tables(path: Path) -> Audited:
    """Rows of the JSON file by table."""
    document = json.loads(path.read_text())
    assert set(document) == {"command", "commit", "machine", "date", "rows"}
    found: Audited = {"log": [], "advice": [], "template": [], "group": [], "place": []}
    for row in document["rows"]:
        found[row["case"]].append(row)
    return found


@pytest.fixture(scope="module")
def log() -> Planted:
    """The first recorded sessions, with a time planted at the top of each system prompt."""
    return planted(shipped(REQUESTS))


# -- what it finds ---------------------------------------------------------------------------------------------------


def test_planted_time_is_named_first(audited: Auditing, log: Planted) -> None:
    """A time at the top of system prompts is what is named first, where it stands, with what it loses to 5 %; and the
    hit rates without and with mending are the true ones."""
    found = audited(log.lines)

    first, (figures,) = found["advice"][0], found["log"]
    assert (first["rank"], first["change"], first["message"], first["role"]) == (1, "timestamp", 0, "system")
    assert first["path"] == "messages[0].content"
    assert len("Current time: ") <= first["at_bytes"] < len("Current time: 2026-11-20T22:00:00+00:00")
    assert first["lost_tokens"] == pytest.approx(log.lost_tokens, rel=0.05)
    assert first["gpu_s"] == pytest.approx(first["lost_tokens"] / 8_000, abs=0.1)
    assert figures["requests"] == log.requests
    assert figures["hit_rate"] == pytest.approx(log.reused_tokens / log.prompt_tokens, abs=0.01)
    assert figures["mended_hit_rate"] == pytest.approx(log.reachable, abs=0.01)


def test_without_it_nothing_is_lost(audited: Auditing, log: Planted, capsys: pytest.CaptureFixture[str]) -> None:
    """The same sessions without the time reach what mending was said to reach, and nothing has to be mended."""
    found = audited(planted(shipped(REQUESTS), stamped=False).lines)

    (figures,) = found["log"]
    assert figures["hit_rate"] == pytest.approx(log.reachable, abs=0.01)
    assert figures["misses"]["diverged"] == 0
    assert not found["advice"]
    assert "Nothing above 0.1 % of prompt tokens can be saved by changes of prompts" in capsys.readouterr().out


def test_tokens_add_up(audited: Auditing, log: Planted) -> None:
    """Every prompt token is a hit or has one reason."""
    (figures,) = audited(log.lines)["log"]

    assert figures["hit_tokens"] + sum(figures["misses"].values()) == figures["prompt_tokens"]


def test_replays_are_told_apart(audited: Auditing) -> None:
    """Identical prompts are replays: what they hit is not genuine reuse."""
    other = {"model": "m", "messages": [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "And now?"}]}
    (figures,) = audited([CHAT, CHAT, CHAT, other])["log"]

    assert figures["replays"] == 2
    assert figures["diversity"] == 0.5
    assert figures["replay_hit_rate"] == pytest.approx(2 * figures["genuine_hit_rate"], rel=0.05)


def test_other_model_is_another_identity(audited: Auditing) -> None:
    """The same prompt for another model is held for the first one only, and that is what is advised."""
    found = audited([CHAT, CHAT | {"model": "m2"}])

    assert found["log"][0]["misses"]["identity"] > 600
    assert found["advice"][0]["change"] == "identity"
    assert found["advice"][0]["cost"].endswith(" tokens in this log")


def test_usage_says_tokens_and_what_was_reached(audited: Auditing, capsys: pytest.CaptureFixture[str]) -> None:
    """Where usage is logged its tokens count, teach bytes per token for the rest, and give the hit rate reached."""
    usage = {"prompt_tokens": 1_000, "prompt_tokens_details": {"cached_tokens": 400}}
    (figures,) = audited([CHAT | {"usage": usage}] * 30 + [CHAT])["log"]

    assert figures["counted_by"] == {"usage": 30, "bytes": 1}
    assert figures["logged_hit_rate"] == 0.4
    assert 30_850 < figures["prompt_tokens"] < 31_000
    assert "Actual hit rate, by the usage in the log: 40.0%" in capsys.readouterr().out


def test_tokenizer_counts(audited: Auditing, tmp_path: Path) -> None:
    """With a tokenizer a prompt without usage has as many tokens as that makes of it."""
    tokenizers = pytest.importorskip("tokenizers")
    made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"[UNK]": 0}, unk_token="[UNK]"))
    made.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    made.save(str(tmp_path / "tokenizer.json"))
    (figures,) = audited([COMPLETION], "--tokenizer", str(tmp_path / "tokenizer.json"))["log"]

    assert figures["counted_by"] == {"tokenizer": 1}
    assert figures["prompt_tokens"] == len(SYSTEM.split())


def test_advice_is_by_the_hour_where_times_are_logged(audited: Auditing, log: Planted) -> None:
    """Losses are rates too if the log says when requests came, and only then."""
    timed = [{"timestamp": 1_790_000_000 + 120 * n, "body": json.loads(line)} for n, line in enumerate(log.lines)]
    first = audited(timed)["advice"][0]

    assert first["lost_tokens_per_h"] == pytest.approx(first["lost_tokens"] * 3_600 / (120 * (REQUESTS - 1)), rel=0.001)
    assert "lost_tokens_per_h" not in audited(log.lines)["advice"][0]


def test_text_is_told_only_if_wanted(
    audited: Auditing, log: Planted, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Nothing of a prompt is shown or written without `--excerpts`, and where it differs with it."""
    audited(log.lines)
    told = capsys.readouterr().out + (tmp_path / "out.json").read_text()
    assert "Current time" not in told
    assert "2026-11-20T" not in told

    audited(log.lines, "--excerpts")
    assert "Current time: 2026-11-2" in capsys.readouterr().out


def test_terminals_are_safe(audited: Auditing, capsys: pytest.CaptureFixture[str]) -> None:
    """What a log has in it does not reach the terminal as an order."""
    turns = [f"\x1b]0;mine\x07 It is 10:{minute}. [bold]{SYSTEM}" for minute in (11, 12, 13)]
    logs = [{"model": "m", "messages": [{"role": "system", "content": turn}, ASKED]} for turn in turns]
    audited([{"tenant": f"\x1b[2J{n}", "body": body} for n, body in enumerate(logs)], "--excerpts")

    out = capsys.readouterr().out
    assert "]0;mine" in out
    assert not any(each in out for each in "\x1b\x07")


def test_rich_shows_the_same(audited: Auditing, log: Planted, capsys: pytest.CaptureFixture[str]) -> None:
    """On a terminal, where rich is there, tables have the figures of the plain ones."""
    pytest.importorskip("rich")
    lost = audited(log.lines)["advice"][0]["lost_tokens"]
    plain = capsys.readouterr().out
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.stdout.isatty", lambda: True)
        patch.setenv("COLUMNS", "160")
        audited(log.lines)
    rich = capsys.readouterr().out

    assert rich != plain
    for each in (f"{lost:,}", "messages[0].content", f"{REQUESTS:,} requests"):
        assert each in plain
        assert each in rich


# -- what it reads ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("line", "path", "body"),
    [
        (CHAT, "/v1/chat/completions", CHAT),
        (MESSAGES, "/v1/messages", MESSAGES),
        (RESPONSES, "/v1/responses", RESPONSES),
        ({"model": "m", "input": "Tides?"}, "/v1/responses", {"model": "m", "input": "Tides?"}),
        (COMPLETION, "/v1/completions", COMPLETION),
        (EMBEDDING, "/v1/embeddings", EMBEDDING),
        ({"path": "/v1/messages", "body": MESSAGES}, "/v1/messages", MESSAGES),
        ({"path": "/v1/chat/completions?x=1", "body": json.dumps(CHAT)}, "/v1/chat/completions", CHAT),
        ({"request": CHAT}, "/v1/chat/completions", CHAT),
        ({"request": {"url": "https://h/api/v1/chat/completions", "body": CHAT}}, "/v1/chat/completions", CHAT),
        ({"custom_id": "1", "method": "POST", "url": "/v1/responses", "body": RESPONSES}, "/v1/responses", RESPONSES),
        ({"proxy_server_request": {"url": "http://h/chat/completions", "body": CHAT}}, "/v1/chat/completions", CHAT),
        ({"request": "req_1", **CHAT}, "/v1/chat/completions", CHAT),
        ({"url": "/model/anthropic.x/invoke", "body": MESSAGES}, "/v1/messages", MESSAGES),
    ],
)
def test_shapes(line: dict[str, Any], path: str, body: dict[str, Any]) -> None:
    """A request is found in each shape of line, and its prompt is that of its body."""
    found = parse_request(json.dumps(line).encode())
    parse = PATHS[path].parse

    assert found.path == path
    assert parse(path, found.body).prompt == parse(path, json.dumps(body).encode()).prompt


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        ({"session": "s"}, {"session": "s"}),
        ({"x-session-id": "s"}, {"session": "s"}),
        ({"headers": {"X-Session-Id": "s", "x-warmroute-tenant": ["t"]}}, {"session": "s", "tenant": "t"}),
        ({"headers": [["x-session-id", "s"]]}, {"session": "s"}),
        ({"tenant": "t"}, {"tenant": "t"}),
        ({"time": "2026-11-22T08:00:00Z"}, {"at_s": 1_795_334_400.0}),
        ({"timestamp": 1_795_334_400_000}, {"at_s": 1_795_334_400.0}),
        ({"created": "1795334400.5"}, {"at_s": 1_795_334_400.5}),
        ({"time": "yesterday"}, {"at_s": None}),
        ({"usage": {"prompt_tokens": 10}}, {"prompt_tokens": 10, "cached_tokens": None}),
        ({"usage": {"prompt_tokens": 10, "cached_tokens": 12}}, {"prompt_tokens": 10, "cached_tokens": 10}),
        (
            {"response": {"usage": {"input_tokens": 4, "input_tokens_details": {"cached_tokens": 3}}}},
            {"prompt_tokens": 4, "cached_tokens": 3},
        ),
        (
            {"response": {"body": {"usage": {"input_tokens": 4, "cache_read_input_tokens": 6}}}},
            {"prompt_tokens": 10, "cached_tokens": 6},
        ),
        ({"usage": {"prompt_tokens": "many"}}, {"prompt_tokens": 0, "cached_tokens": None}),
    ],
)
def test_what_else_is_known(more: dict[str, Any], expected: dict[str, Any]) -> None:
    """Sessions, tenants, times and usage are found as logs have them, beside a body and in a line that is one."""
    beside = parse_request(json.dumps({"body": CHAT, **more}).encode())
    within = parse_request(json.dumps({**CHAT, **more}).encode())

    assert {name: getattr(beside, name) for name in expected} == expected
    assert {name: getattr(within, name) for name in expected} == expected


@pytest.mark.parametrize(
    "line",
    [
        b"no JSON",
        b"[]",
        b"{}",
        b'"\xff"',
        b'{"body": {"x": 1}}',
        b'{"request": "{x"}',
        b'{"path": "/v1/images", "body": {"prompt": "x"}}',
        b'{"path": "/v1/messages/count_tokens", "body": {"messages": []}}',
    ],
)
def test_other_lines_are_no_requests(line: bytes) -> None:
    """A line without a prompt is refused, and nothing worse."""
    with pytest.raises(NotRequest):
        parse_request(line)


def test_unread_lines_are_counted(audited: Auditing, capsys: pytest.CaptureFixture[str]) -> None:
    """Lines that are no requests are counted by their reason, the first of each named by number, and the others are
    used."""
    more = [b"plain text"] * 1_000
    (figures,) = audited([CHAT, b"no JSON", b"", b"{}", b"[]", b'{"model": 5, "messages": []}', *more, CHAT])["log"]

    out = capsys.readouterr().out
    assert (figures["requests"], figures["unread_lines"]) == (2, 1_004)
    assert "Skipped lines: 1,004" in out
    assert "log.jsonl:2: no request in any of the formats (and 1,001 more lines)" in out
    assert "log.jsonl:4: damaged JSON\n" in out
    assert "log.jsonl:6: invalid_model\n" in out
    assert out.count("log.jsonl:") == 3


def test_limits(audited: Auditing, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """A line over the limit is left out, its end too; and no more requests are taken than was said."""
    monkeypatch.setattr(reader, "LINE_BYTES_MAX", 4_000)
    long = {"model": "m", "messages": [ASKED], "x": json.dumps([CHAT] * 2_000)}
    found = audited([CHAT, long, CHAT, CHAT, CHAT], "--requests-max", "3")["log"][0]

    assert (found["requests"], found["unread_lines"]) == (3, 1)
    assert "log.jsonl:2: longer than" in capsys.readouterr().out


def test_packed_files_and_standard_input(tmp_path: Path, log: Planted, monkeypatch: pytest.MonkeyPatch) -> None:
    """A log is the same whether packed or not, in several files, or from standard input."""
    zstandard = pytest.importorskip("zstandard")
    halves = [b"\n".join(log.lines[at : at + REQUESTS // 2]) for at in (0, REQUESTS // 2)]
    whole = b"\n".join(log.lines)
    (tmp_path / "a.jsonl").write_bytes(halves[0])
    (tmp_path / "b.jsonl.gz").write_bytes(gzip.compress(halves[1]))
    pack = zstandard.ZstdCompressor().compress
    (tmp_path / "c.jsonl.zst").write_bytes(pack(halves[0] + b"\n") + pack(halves[1]))
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(whole))))
    out, figures = tmp_path / "out.json", []
    for names in (["a.jsonl", "b.jsonl.gz"], ["c.jsonl.zst"], ["-"]):
        paths = [str(tmp_path / name) if name != "-" else name for name in names]
        assert main(["audit", *paths, "--json", str(out)]) == 0
        figures.append(tables(out)["log"][0])

    assert figures[0]["requests"] == REQUESTS
    assert figures[0] == figures[1] == figures[2]


@pytest.mark.parametrize("suffix", [".gz", ".zst"])
def test_damaged_file_is_read_as_far_as_it_goes(
    tmp_path: Path, suffix: str, log: Planted, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a file has before it breaks off is used, and that it does is said."""
    pack = gzip.compress if suffix == ".gz" else pytest.importorskip("zstandard").ZstdCompressor().compress
    path = tmp_path / f"log{suffix}"
    path.write_bytes(pack(b"\n".join(log.lines))[:-200_000] + b"\0" * 100)

    assert main(["audit", str(path)]) == 0
    out = capsys.readouterr().out
    assert "contains a date or time" in out
    assert f"log{suffix} could only be read up to line" in out


@pytest.mark.finding("2026-11-28/23")
def test_a_file_without_end_or_requests_is_left(
    tmp_path: Path, log: Planted, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half a megabyte of `.gz` may be 500 MB of line ends: what is there before them is used, and the rest is not
    read."""
    monkeypatch.setattr(report, "USELESS_LINES_MAX", 1_000)
    path = tmp_path / "log.gz"
    path.write_bytes(gzip.compress(b"\n".join([*log.lines, b"\n" * 10_000, *log.lines])))

    assert main(["audit", str(path)]) == 0
    assert f"log.gz was read up to line {len(log.lines) + 1_000:,} only" in capsys.readouterr().out


def test_too_small_a_memory_is_said(audited: Auditing, log: Planted, capsys: pytest.CaptureFixture[str]) -> None:
    """Where texts had to be forgotten, figures are not the whole truth, and the reader is told; else not."""
    assert audited(log.lines, "--memory-mb", "1")["log"][0]["forgot"]
    assert "--memory-mb" in capsys.readouterr().out

    assert not audited(log.lines)["log"][0]["forgot"]
    assert "--memory-mb" not in capsys.readouterr().out


def test_nothing_to_read_is_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A file without a request ends with status 2 and names the formats that are read. One that is not there, too."""
    (tmp_path / "none.jsonl").write_text("no JSON\n")
    assert main(["audit", str(tmp_path / "none.jsonl")]) == 2
    assert "no requests found" in (told := capsys.readouterr().err)
    assert "none.jsonl:1: no request in any of the formats" in told
    assert all(each.name in told for each in FORMATS)

    assert main(["audit", str(tmp_path / "absent.jsonl")]) == 2
    assert "absent.jsonl: No such file" in capsys.readouterr().err


def test_flags_are_positive(capsys: pytest.CaptureFixture[str]) -> None:
    """Limits of nought are refused before anything is read."""
    with pytest.raises(SystemExit):
        main(["audit", "-", "--memory-mb", "0"])
    assert "at least 1" in capsys.readouterr().err


def test_requests_compare() -> None:
    """A line's request says all that is known of it, whatever order its fields have."""
    one = b'{"tenant": "t", "body": {"model": "m", "prompt": "p"}, "session": "s"}'
    other = b'{"session": "s", "body": {"model": "m", "prompt": "p"}, "tenant": "t"}'
    body = b'{"model": "m", "prompt": "p"}'
    assert (
        parse_request(one)
        == parse_request(other)
        == LoggedRequest("/v1/completions", body, "", "s", "t", None, 0, None)
    )
