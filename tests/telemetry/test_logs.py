from __future__ import annotations

import errno
import fcntl
import json
import logging
import os
import select
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

import router
from router.core.facts.misses import Breakdown, Miss
from router.core.facts.placements import Ending, Grade, Reason, Receipt, Usage
from router.telemetry import logs
from router.telemetry.log_writer import BUFFER_BYTES_MAX, PIECE_BYTES_MAX, Writer, sink
from router.telemetry.metrics import RequestRecord
from tests.support.fakes import running

AT_S = 1763746280.0429  # 2025-11-21T17:31:20.042
PLACED = Receipt("http://r:1", "warm", Reason.SPILL, Grade.CATCHING_UP, 100, 64)
PIPE_BYTES = 4096  # of the smallest pipe


def record(**fields: Any) -> RequestRecord:
    """A request that was answered, but for these fields."""
    plain = {"id": 'a"b', "route": "/v1/completions", "model": "naïve", "status": 200, "ending": Ending.OK}
    return RequestRecord(**{**plain, "duration_s": 1.23456, **fields})


FULL = record(
    ttft_s=0.0999,
    receipt=PLACED,
    usage=Usage(100, 20, None),
    retries=(("connect", "http://r:2"), ("lost", "http://r:3")),
    error="engine_failed",
    detail="It failed.",
    miss=Breakdown(100, 64, {Miss.SPILLED: 30, Miss.TAIL: 6}),
)


@pytest.fixture(autouse=True)
def logging_as_before() -> Iterator[None]:
    """Whatever a test sets up is closed and taken back."""
    root, level, handlers = logging.getLogger(), logging.getLogger().level, logging.getLogger().handlers[:]
    root.handlers.clear()  # not to be closed by `setup`: they are pytest's
    yield
    for handler in root.handlers:
        handler.close()
    root.handlers[:] = handlers
    root.setLevel(level)
    logs.requests_log.setLevel(logging.NOTSET)
    logs._out = None


class Pipe:
    """A small pipe to be standard error, which nobody reads before `end`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        reading, writing = os.pipe()
        fcntl.fcntl(writing, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        self.readable, self.writable = os.fdopen(reading), os.fdopen(writing, "w")
        self._monkeypatch = monkeypatch

    def setup(self, level: str = "info", format_: str = "json", *, requests: bool = True) -> None:
        """As the command does, with this pipe in the place of standard error."""
        self._monkeypatch.setattr(sys, "stderr", self.writable)
        logs.setup(level, format_, requests=requests)
        self._monkeypatch.undo()

    def end(self) -> str:
        """Everything that was written until the logging module ended, as it does with the process."""
        read: list[str] = []
        reader = threading.Thread(target=lambda: read.append(self.readable.read()))
        reader.start()
        close_logging()
        self.writable.close()
        reader.join()
        return read[0]

    def lines(self) -> list[dict[str, Any]]:
        """The same as JSON lines."""
        return [json.loads(line) for line in self.end().splitlines()]


@pytest.fixture
def pipe(monkeypatch: pytest.MonkeyPatch) -> Iterator[Pipe]:
    """A pipe, closed at the end."""
    it = Pipe(monkeypatch)
    with it.readable, it.writable:
        yield it


def close_logging() -> None:
    """What the logging module does when the process ends."""
    for handler in logging.getLogger().handlers:
        handler.close()


class Gate:
    """A sink that takes pieces only while it is open, as a reader does that sometimes reads."""

    def __init__(self) -> None:
        self.pieces: list[bytes] = []
        self.open = threading.Event()
        self.reached = threading.Event()

    def __call__(self, data: bytes) -> None:
        """Take it, when the gate is open."""
        self.reached.set()
        self.open.wait()
        self.pieces.append(data)


def notice(lines: int) -> bytes:
    """What a writer says of dropped lines."""
    return b"dropped %d" % lines


# How lines look


def test_a_request_as_json() -> None:
    """A request's line has its fields in a fixed order, what is unknown left out, and the time in UTC."""
    start = '{"time":"2025-11-21T17:31:20.042+00:00","level":"info","logger":"router.requests","message":"request",'
    start += '"request_id":"a\\"b","route":"/v1/completions","model":"naïve","status":200,"ending":"ok",'
    rest = '"ttft_ms":99.9,"replica":"http://r:1","reason":"spill","grade":"catching-up","prompt_tokens":100,'
    rest += '"predicted_cached_tokens":64,"cached_tokens":null,"completion_tokens":20,'
    rest += '"hit_tokens":64,"miss":{"spilled":30,"tail":6},'
    rest += '"retries":["connect at http://r:2","lost at http://r:3"],"error":"engine_failed","detail":"It failed."}'

    style = logs._Json()
    assert style.request(AT_S, record()).decode() == start + '"duration_ms":1234.6}'
    assert style.request(AT_S, FULL).decode() == start + '"duration_ms":1234.6,' + rest


def test_a_request_as_text() -> None:
    """As text a request's line is for people: the same fields, without what is unknown."""
    start = '17:31:20.042 info    request request_id=a"b route=/v1/completions model=naïve status=200 ending=ok'
    rest = " ttft_ms=99.9 replica=http://r:1 reason=spill grade=catching-up prompt_tokens=100"
    rest += " predicted_cached_tokens=64 completion_tokens=20"
    rest += " hit_tokens=64 miss=spilled=30, tail=6"
    rest += " retries=connect at http://r:2, lost at http://r:3 error=engine_failed detail=It failed."

    style = logs._Text()
    assert style.request(AT_S, record()).decode() == start + " duration_ms=1234.6"
    assert style.request(AT_S, FULL).decode() == start + " duration_ms=1234.6" + rest


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
        assert list(line) == ["time", "level", "logger", "message", "replica", "why", "exception"]
        assert line["message"] == "failed 2 times"
        assert line["exception"].startswith("Traceback")
    else:
        assert text.splitlines()[0].endswith("error   failed 2 times replica=r")
        assert text.splitlines()[1].startswith("Traceback")


# Which lines there are


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


def test_a_line_that_cannot_be_written_harms_no_request(pipe: Pipe) -> None:
    """A record that is no JSON is said to be a bug, and the caller goes on."""
    pipe.setup()
    logs.log_requests([record(model="\ud800")])
    assert [line["level"] for line in pipe.lines()] == ["error"]


# A reader that does not read


async def test_nobody_reads_and_requests_are_answered(pipe: Pipe) -> None:
    """With standard error full and nobody reading it every request is answered, and no line is lost."""
    pipe.setup()
    sent = 4 * PIPE_BYTES // 200  # a refusal's line has more than 200 bytes
    async with running() as app, aiohttp.ClientSession() as client:
        for _ in range(sent):
            async with client.post(app.url + "/v1/completions", json={"model": "m", "prompt": "x"}) as response:
                assert response.status == 503

    assert sum(line["message"] == "request" for line in pipe.lines()) == sent
    assert logs.dropped() == 0


def test_what_exceeds_the_buffer_is_dropped_and_said_once() -> None:
    """A full buffer drops lines instead of waiting, and says how many, in their place, when it can write again."""
    gate = Gate()
    writer = Writer(gate, notice, bytes_max=100)
    writer.write(b"taken", urgent=True)
    gate.reached.wait()  # the thread waits for its reader
    for n in range(30):
        writer.write(b"line %02d" % n)
    assert writer.dropped == 30 - (100 - len(b"taken\n")) // len(b"line 00\n")
    gate.open.set()
    writer.close()

    kept = [b"line %02d" % n for n in range(30 - writer.dropped)]
    assert b"".join(gate.pieces).splitlines() == [b"taken", *kept, b"dropped %d" % writer.dropped]


def test_writing_goes_on_after_lines_were_dropped() -> None:
    """Room comes back when the reader does; drops are said even if nothing is logged after them."""
    gate, said = Gate(), threading.Event()

    def saying(lines: int) -> bytes:
        said.set()
        return notice(lines)

    writer = Writer(gate, saying, bytes_max=20)
    writer.write(b"x" * 19, urgent=True)
    gate.reached.wait()
    writer.write(b"no room")
    gate.open.set()
    said.wait()
    writer.write(b"room")
    writer.close()
    assert b"".join(gate.pieces).splitlines() == [b"x" * 19, b"dropped 1", b"room"]
    assert writer.dropped == 1


def test_a_reader_that_is_gone_costs_lines_and_nothing_else() -> None:
    """Lines that cannot be written are counted and, once one can be, said; a notice that failed is made again."""
    failures = [OSError(errno.EPIPE, "gone"), OSError(errno.EPIPE, "gone"), OSError(errno.ENOSPC, "full")]
    gate, tried = Gate(), threading.Event()
    gate.open.set()

    def failing(data: bytes) -> None:
        tried.set()
        if failures:
            raise failures.pop(0)
        gate(data)

    writer = Writer(failing, notice)
    for line in (b"one", b"two", b"three"):
        tried.clear()
        writer.write(line, urgent=True)
        tried.wait()
    writer.close()
    assert gate.pieces == [b"three\n", b"dropped 2\n"]
    assert writer.dropped == 2


def test_pieces_of_several_processes_do_not_mix() -> None:
    """Where standard error is shared, what is written at once is whole lines, at most PIPE_BUF bytes; alone, more."""
    lines = [b"x" * (n % 300) for n in range(2_000)]
    written: dict[bool, list[bytes]] = {}
    for shared in (True, False):
        gate = Gate()
        gate.open.set()
        writer = Writer(gate, notice, shared=shared)
        for line in lines:
            writer.write(line)
        writer.close()
        written[shared] = gate.pieces
        assert b"".join(gate.pieces).split(b"\n") == [*lines, b""]
        assert all(piece.endswith(b"\n") for piece in gate.pieces)

    assert max(map(len, written[True])) <= select.PIPE_BUF
    assert select.PIPE_BUF < max(map(len, written[False])) <= PIECE_BYTES_MAX


def test_lines_of_all_threads_arrive() -> None:
    """Several threads may log at once: no line is lost, and each thread's lines keep their order."""
    gate = Gate()
    gate.open.set()
    writer = Writer(gate, notice)

    def log(name: int) -> None:
        for n in range(1_000):
            writer.write(b"%d %d" % (name, n))

    threads = [threading.Thread(target=log, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    writer.close()
    got = [tuple(map(int, line.split())) for line in b"".join(gate.pieces).splitlines()]
    assert sorted(got) == [(name, n) for name in range(4) for n in range(1_000)]
    assert all([n for by, n in got if by == name] == list(range(1_000)) for name in range(4))


def test_a_stream_that_others_made_non_blocking(pipe: Pipe) -> None:
    """A full pipe that refuses instead of waiting is waited for, and everything arrives."""
    os.set_blocking(pipe.writable.fileno(), False)
    put = sink(pipe.writable)
    data = b"x" * (4 * PIPE_BYTES)
    thread = threading.Thread(target=put, args=(data,))
    thread.start()
    assert os.read(pipe.readable.fileno(), 1) == b"x"
    got = 1
    while got < len(data):
        got += len(os.read(pipe.readable.fileno(), len(data)))
    thread.join()


def test_a_stream_in_memory(capsys: pytest.CaptureFixture[str]) -> None:
    """Where standard error is no file, lines are written to it as text."""
    logs.setup("info", "text", requests=True)
    logs.log_requests([record()])
    close_logging()
    assert "model=naïve" in capsys.readouterr().err


# The end of the process

PROGRAM = """
import logging, sys
from router.telemetry import logs
from router.telemetry.metrics import RequestRecord
logs.setup("info", "json", requests=True)
for n in range(int(sys.argv[1])):
    logs.log_requests([RequestRecord(id=str(n), route="/v1/completions")])
logging.getLogger("router.x").error("the end")
print("ended", flush=True)
"""


def program(lines: int) -> subprocess.Popen[str]:
    """A process that logs so many requests, an error, and ends."""
    command = [sys.executable, "-c", PROGRAM, str(lines)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, text=True, cwd=Path(router.__file__).parent.parent, **pipes)  # type: ignore[call-overload,no-any-return]


def test_everything_is_written_when_the_process_ends() -> None:
    """A process that ends at once has written every line, the last one included."""
    with program(5_000) as process:
        _, errors = process.communicate()
    lines = [json.loads(line) for line in errors.splitlines()]
    assert [line.get("request_id") for line in lines] == [*map(str, range(5_000)), None]
    assert process.returncode == 0


def test_a_process_ends_although_nobody_reads() -> None:
    """What standard error does not take is given up: the process ends by itself."""
    with program(5_000) as process:
        assert process.stdout is not None
        assert process.stdout.read() == "ended\n"
        try:
            assert process.wait(30) == 0
        finally:
            process.kill()


def test_the_buffer_is_bounded() -> None:
    """A buffer holds at most BUFFER_BYTES_MAX, and no line that alone exceeds it."""
    gate = Gate()
    gate.open.set()
    writer = Writer(gate, notice)
    writer.write(b"x" * BUFFER_BYTES_MAX)
    writer.close()
    assert gate.pieces == [b"dropped 1\n"]
