"""Log lines on their way out: pipes that are full or gone."""

from __future__ import annotations

import errno
import json
import logging
import os
import subprocess
import sys
import threading
from pathlib import Path

import aiohttp
import pytest

import router
from router.telemetry import logs
from router.telemetry.log_queue import BUFFER_BYTES_MAX, PIECE_BYTES_MAX, LogQueue, sink
from router.telemetry.request_record import RequestRecord
from tests.support.fakes import running
from tests.telemetry.log_lines import PIPE_BYTES, Pipe, close_logging, record


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


class Plain:
    """Records of the logging module as their messages, and what a writer says of dropped lines."""

    def request(self, at_s: float, record: RequestRecord) -> bytes:
        """Of no interest here."""
        raise NotImplementedError

    def ordinary(self, record: logging.LogRecord) -> bytes:
        """The number of lines where the record has one."""
        dropped: int = getattr(record, "fields", {}).get("lines", 0)
        return b"dropped %d" % dropped if dropped else record.getMessage().encode()


def test_a_line_that_cannot_be_written_harms_no_request(pipe: Pipe) -> None:
    """A record that is no JSON is said to be a bug, and the caller goes on."""
    pipe.setup()
    logs.log_requests([record(model="\ud800")])
    assert [line["level"] for line in pipe.lines()] == ["error"]


async def test_nobody_reads_and_requests_are_answered(pipe: Pipe) -> None:
    """With standard error full and nobody reading it every request is answered, and no line is lost."""
    pipe.setup()
    sent = 4 * PIPE_BYTES // 200  # a refusal's line has more than 200 bytes
    async with running() as app, aiohttp.ClientSession() as client:
        for _ in range(sent):
            async with client.post(app.url + "/v1/completions", json={"model": "m", "prompt": "x"}) as response:
                assert response.status == 503

    assert sum(line["message"] == "request" for line in pipe.lines()) == sent
    assert logs.count_dropped() == 0


def test_what_exceeds_the_buffer_is_dropped_and_said_once() -> None:
    """A full buffer drops lines instead of waiting, and says how many, in their place, when it can write again."""
    gate = Gate()
    writer = LogQueue(gate, Plain(), bytes_max=100)
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

    def taking(data: bytes) -> None:
        gate(data)
        if data.startswith(b"dropped"):
            said.set()

    writer = LogQueue(taking, Plain(), bytes_max=20)
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

    writer = LogQueue(failing, Plain())
    for line in (b"one", b"two", b"three"):
        tried.clear()
        writer.write(line, urgent=True)
        tried.wait()
    writer.close()
    assert gate.pieces == [b"three\n", b"dropped 2\n"]
    assert writer.dropped == 2


def test_pieces_are_whole_lines() -> None:
    """What is written at once is whole lines, at most PIECE_BYTES_MAX bytes."""
    lines = [b"x" * (n % 300) for n in range(2_000)]
    gate = Gate()
    gate.open.set()
    writer = LogQueue(gate, Plain())
    for line in lines:
        writer.write(line)
    writer.close()
    assert b"".join(gate.pieces).split(b"\n") == [*lines, b""]
    assert all(piece.endswith(b"\n") for piece in gate.pieces)
    assert max(map(len, gate.pieces)) <= PIECE_BYTES_MAX


def test_lines_of_all_threads_arrive() -> None:
    """Several threads may log at once: no line is lost, and each thread's lines keep their order."""
    gate = Gate()
    gate.open.set()
    writer = LogQueue(gate, Plain())

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


PROGRAM = """
import logging, sys
from router.telemetry import logs
from router.telemetry.request_record import begin_record
logs.setup("info", "json", requests=True)
for n in range(int(sys.argv[1])):
    logs.log_requests([begin_record(str(n), "/v1/completions", 0.0)])
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
    writer = LogQueue(gate, Plain())
    writer.write(b"x" * BUFFER_BYTES_MAX)
    writer.close()
    assert gate.pieces == [b"dropped 1\n"]
