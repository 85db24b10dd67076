from __future__ import annotations

import json
import logging
import shlex
import sys
from types import SimpleNamespace

import pytest

from router.core.types.cache_misses import MissReason, TokenBreakdown, TokenFate
from router.core.types.placements import Confidence, EndReason, PlacementReason, Receipt, Usage
from router.telemetry import logs
from tests.telemetry.log_lines import Pipe, record

AT_S = 1763746280.0429  # 2025-11-21T17:31:20.042


PLACED = Receipt("http://r:1", "warm", PlacementReason.SPILL, Confidence.CATCHING_UP, 100, 64)


FULL = record(
    ttft_s=0.0999,
    receipt=PLACED,
    usage=Usage(100, 20, None),
    retries=(("connect", "http://r:2"), ("lost", "http://r:3")),
    error="engine_failed",
    detail="It failed.",
    miss=TokenBreakdown(100, 64, {MissReason.SPILLED: 30, MissReason.TAIL: 6}, held=("http://r:4", "queue")),
    places={TokenFate.CACHED_ON_OTHER_REPLICA: 30, TokenFate.TAIL: 6, TokenFate.GPU_HIT: 64},
)


@pytest.mark.parametrize(
    ("style", "known", "more", "end"),
    [
        (
            logs._Json(),
            (
                '{"time":"2025-11-21T17:31:20.042+00:00","level":"info","logger":"router.requests","message":"request",'
                '"event":"request",'
                '"request_id":"a\\"b","route":"/v1/completions","model":"naïve","status":200,"ending":"ok",'
                '"duration_ms":1234.6'
            ),
            (
                ',"ttft_ms":99.9,"replica":"http://r:1","reason":"spill","grade":"catching-up","prompt_tokens":100,'
                '"predicted_cached_tokens":64,"cached_tokens":null,"completion_tokens":20,'
                '"hit_tokens":64,"miss":{"spilled":30,"tail":6},'
                '"places":{"cached_on_other_replica":30,"tail":6,"gpu_hit":64},"held":"queue at http://r:4",'
                '"retries":["connect at http://r:2","lost at http://r:3"],"error":"engine_failed","detail":"It failed."'
            ),
            "}",
        ),
        (
            logs._Text(),
            (
                '17:31:20.042 info    request request_id="a\\"b" route=/v1/completions model=naïve status=200 ending=ok'
                " duration_ms=1234.6"
            ),
            (
                " ttft_ms=99.9 replica=http://r:1 reason=spill grade=catching-up prompt_tokens=100"
                ' predicted_cached_tokens=64 completion_tokens=20 hit_tokens=64 miss="spilled=30, tail=6"'
                ' places="cached_on_other_replica=30, tail=6, gpu_hit=64" held="queue at http://r:4"'
                ' retries="connect at http://r:2, lost at http://r:3" error=engine_failed detail="It failed."'
            ),
            "",
        ),
    ],
    ids=["json", "text"],
)
def test_a_request(style: logs._Json | logs._Text, known: str, more: str, end: str) -> None:
    """A request's line has its fields in a fixed order, what is unknown left out: as JSON with the time in UTC, as text
    the same for people."""
    assert style.request(AT_S, record()).decode() == known + end
    assert style.request(AT_S, FULL).decode() == known + more + end


@pytest.mark.parametrize(
    ("status", "ending", "error", "level"),
    [
        (200, EndReason.OK, None, "info"),
        (404, "refused", "model_not_found", "info"),
        (429, "refused", "overloaded", "info"),
        (499, EndReason.CLIENT_LEFT, None, "info"),
        (200, EndReason.CLIENT_LEFT, None, "info"),
        (200, EndReason.FAILED, "unfinished", "warning"),
        (200, "drained", "drained", "warning"),
        (500, EndReason.FAILED, None, "warning"),
        (502, "refused", "engine_failed", "warning"),
        (503, "refused", "no_replica_ready", "warning"),
        (500, "refused", "internal_error", "error"),
    ],
)
def test_what_failed_is_a_warning(status: int, ending: str, error: str | None, level: str) -> None:
    """A filter by level finds what failed, answers that broke off included, and none of what clients did wrong."""
    line = record(status=status, ending=ending, error=error)
    assert json.loads(logs._Json().request(AT_S, line))["level"] == level
    assert logs._Text().request(AT_S, line).split()[1].decode() == level


def test_an_event_stands_beside_its_sentence(pipe: Pipe) -> None:
    """As JSON a line has the key of what happened, which filters go by and no rewording changes."""
    pipe.setup()
    logging.getLogger("router.x").info("replica ready", extra={"event": "replica_up", "fields": {"replica": "r"}})
    (line,) = pipe.lines()
    assert list(line) == ["time", "level", "logger", "message", "event", "replica"]
    assert line["event"] == "replica_up"


@pytest.mark.promise("Names from clients forge no log lines and no fields of a line.", "records")
@pytest.mark.parametrize("said", ["abc status=200 tenant=root", 'x" tenant="root', "a\\", "a b", "\x85tenant=root"])
def test_no_value_makes_a_field(said: str) -> None:
    """What clients write stands within its own field of a line of text: one that reads fields by spaces and quotes
    finds the router's own and no other."""
    line = logs._Text().request(AT_S, record(id=said)).decode()
    fields = dict(each.partition("=")[::2] for each in shlex.split(line.partition("request ")[2]))
    assert list(fields) == ["request_id", "route", "model", "status", "ending", "duration_ms"]
    assert fields["request_id"] == (said if said.isprintable() else "\\x85tenant=root")


def test_a_traced_request() -> None:
    """The line of a request that is traced has the trace's id, in both forms."""
    line = record(trace_id="0af7651916cd43dd8448eb211c80319c")
    assert json.loads(logs._Json().request(AT_S, line))["trace_id"] == line.trace_id
    assert logs._Text().request(AT_S, line).endswith(b" trace_id=0af7651916cd43dd8448eb211c80319c")


def test_times_follow_the_clock() -> None:
    """Milliseconds are cut, not rounded up into the next second, and a clock may go back."""
    stamps = logs._Stamps("%H:%M:%S")
    shown = [stamps(at_s) for at_s in (59.9996, 60.0, 3600.5, 60.0)]
    assert shown == ["00:00:59.999", "00:01:00.000", "01:00:00.500", "00:01:00.000"]


@pytest.mark.parametrize("terminal", [True, False])
def test_lines_are_text_on_a_terminal(terminal: bool, monkeypatch: pytest.MonkeyPatch, pipe: Pipe) -> None:
    """Without a setting; a collector's pipe gets JSON."""
    monkeypatch.setattr(pipe.writable, "isatty", lambda: terminal)
    pipe.setup(format_="auto")
    logging.getLogger("router.x").info("ready", extra={"fields": {"replica": "r"}})
    assert pipe.end().startswith("{") is not terminal


@pytest.mark.parametrize("format_", ["json", "text"])
def test_an_ordinary_record(format_: str, pipe: Pipe) -> None:
    """Fields and exceptions of ordinary records are in their lines."""
    pipe.setup(format_=format_)
    try:
        int("nothing there")
    except ValueError:
        logging.getLogger("router.x").exception("failed %d times", 2, extra={"fields": {"replica": "r", "why": ""}})
    logging.getLogger("router.x").debug("not at this level")
    text = pipe.end()

    assert "nothing there" in text
    assert "not at this level" not in text
    if format_ == "json":
        line = json.loads(text)
        assert "event" not in line
        assert list(line) == ["time", "level", "logger", "message", "replica", "why", "exception"]
        assert line["message"] == "failed 2 times"
        assert line["exception"].startswith("Traceback")
    else:
        assert text.splitlines()[0].endswith("error   failed 2 times replica=r")
        assert text.splitlines()[1].startswith("Traceback")


def test_requests_and_ordinary_lines_keep_their_order(pipe: Pipe) -> None:
    """Lines stand in the order in which they were logged, whichever way they came."""
    pipe.setup()
    for n in range(10):
        logs.log_requests([record(id=str(2 * n))])
        logging.getLogger("router.x").info("%d", 2 * n + 1)
    assert [line.get("request_id", line["message"]) for line in pipe.lines()] == [str(n) for n in range(20)]


def test_requests_may_leave_no_line(pipe: Pipe) -> None:
    """`log.requests` off silences requests alone; `log.level` silences the rest alone."""
    pipe.setup(requests=False)
    logs.log_requests([record(id="silent")])
    logging.getLogger("router.x").info("said")
    pipe.setup("error")
    logging.getLogger("router.x").warning("silent")
    logs.log_requests([record(id="said too")])
    assert [line.get("request_id", line["message"]) for line in pipe.lines()] == ["said", "said too"]


def test_a_host_program_may_log_requests_itself(caplog: pytest.LogCaptureFixture) -> None:
    """Without `setup` a request is an ordinary record, for whoever configured logging."""
    caplog.set_level(logging.WARNING)  # another test may have left another level
    caplog.set_level(logging.NOTSET, logger="router.requests")
    logging.getLogger().addHandler(caplog.handler)
    logs.log_requests([record()])
    with caplog.at_level(logging.INFO):
        logs.log_requests([record(id="heard")])
    logging.getLogger().removeHandler(caplog.handler)
    assert [each.fields["request_id"] for each in caplog.records] == ["heard"]  # type: ignore[attr-defined]


def test_levels_change_while_it_runs(pipe: Pipe) -> None:
    """What is written, and whether requests are, can be changed without a line lost; not where logging is somebody
    else's."""
    level = logging.getLogger().level
    logs.configure("debug", requests=True)
    assert logging.getLogger().level == level
    pipe.setup()
    log = logging.getLogger("router.anything")
    for name, requests in (("error", False), ("debug", True)):
        logs.configure(name, requests=requests)
        log.debug("d %s", name)
        log.error("e %s", name)
        logs.log_requests([record(id=name)])
    said = [line["message"] for line in pipe.lines()]
    assert said == ["e error", "d debug", "e debug", "request"]


def test_where_it_listens_is_said_in_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """No line of the log, which another thread writes to the same file, can come between the line and its end."""
    written: list[str] = []
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(write=written.append, flush=lambda: None))
    logs.log_listening("http://a", "http://b")
    assert written == ["listening http://a admin http://b\n"]
