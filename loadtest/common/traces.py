"""Request traces: requests recorded at real servers, read back for a replay.

Public traces carry no text, only block ids: two prompts share an id if they shared that block of text. So a prompt's
text is generated from its ids, deterministically, with four printable bytes per token, which the simulated tokenizer
reads back as one token. Prompts share exactly the prefixes that they shared when recorded.

Two formats are supported; the first line decides which one it is:

- open: Mooncake's `{"timestamp" ms, "input_length", "output_length", "hash_ids"}`: 512-token blocks, ids common to the
  trace; times are arrivals (github.com/kvcache-ai/Mooncake, FAST25-release/traces).
- sessions: compact Claude Code sessions `{"s", "t" s, "in", "out", "h": [[first, count], ...], "think" s, "api" s,
  "a"}`: 64-token full blocks, ids local to the session (github.com/callanjfox/kv-cache-tester, traces). Sessions have
  no common clock, so they are replayed closed loop.
"""

from __future__ import annotations

import gzip
import importlib
import io
import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from hashlib import shake_128
from importlib import resources
from pathlib import Path
from typing import Annotated, Literal, TextIO, TypeVar, cast

import msgspec

from loadtest.common.runs import Runs, block_at, block_count, merged_runs, shared_blocks

BYTES_PER_TOKEN = 4
LINE_BYTES_MAX = 4_000_000
"""Limit of a line, which is one request; the longest real one (126k tokens in 512-token blocks) is under 2 KB."""
REQUESTS_MAX = 1_000_000
TURNS_BACK_MAX = 64
"""Each request of a session is compared with at most this many before it; one is nearly always enough."""


class TraceError(ValueError):
    """The file is not a supported trace; the message names the file and the line."""


@dataclass(frozen=True, slots=True)
class Request:
    """One recorded request. Times in simulated seconds, lengths in tokens."""

    at_s: float
    """Arrival, from the start of the trace or of the session."""
    think_s: float
    """Wait after the session's previous answer (closed loop)."""
    input_tokens: int
    output_tokens: int
    namespace: str
    """Scope of the block ids: equal ids of one namespace are equal text."""
    block_tokens: int
    runs: Runs
    tail: int | str = ""
    """Id of the block after the full ones, of which the prompt has only the start."""
    cuts: tuple[int, ...] = ()
    """Token offsets at which an earlier request of the session ended, if this request extends it."""
    agent: str | None = None
    """The sub-agent that sent the request, "" for the session itself; None if the trace has no agents."""
    answer_s: float = 0.0
    """Recorded duration of the answer, to its last token; 0 if it is unknown."""

    def text(self, from_block: int = 0) -> str:
        """Return the prompt, `input_tokens` x 4 printable ASCII bytes, or its part after `from_block` full blocks."""
        size = self.block_tokens
        blocks = itertools.chain.from_iterable(range(first, first + count) for first, count in self.runs)
        parts = [block_text(self.namespace, block, size) for block in itertools.islice(blocks, from_block, None)]
        if block_count(self.runs) * size < self.input_tokens:
            parts.append(block_text(self.namespace, self.tail, size))
        return "".join(parts)[: (self.input_tokens - from_block * size) * BYTES_PER_TOKEN]

    def messages(self) -> list[str]:
        """Return the prompt, cut at the ends of earlier requests of the session.

        So the first message stays the same while the conversation grows. A turn's messages begin with those of the turn
        that it extends, as a chat client would send them. The trace has no roles and no answers, so all messages are
        the user's: an invented answer would be text that no engine ever cached.
        """
        text = self.text()
        edges = [0, *(cut * BYTES_PER_TOKEN for cut in self.cuts), len(text)]
        return [text[start:end] for start, end in itertools.pairwise(edges)]

    def prompt_key(self) -> tuple[str, int, Runs, int | str]:
        """Return a key that is equal for requests with the same prompt, and only for them."""
        return (self.namespace, self.input_tokens, self.runs, self.tail)


@dataclass(frozen=True, slots=True)
class Session:
    """Requests in sequence, each sent after the answer to the one before it."""

    name: str
    requests: tuple[Request, ...]


@dataclass(frozen=True, slots=True)
class Trace:
    """A whole trace. In an open one every session is a single request."""

    name: str
    kind: Literal["open", "sessions"]
    sessions: tuple[Session, ...] = field(repr=False)
    skipped: int
    """Requests left out because their prompt was over the limit; in sessions also the requests after them."""

    @property
    def request_count(self) -> int:
        """Number of requests of all sessions."""
        return sum(len(session.requests) for session in self.sessions)


@lru_cache(maxsize=32_768)  # at most 67 MB of 512-token blocks; making one again costs a few microseconds
def block_text(namespace: str, block: int | str, tokens: int) -> str:
    """Return the text of one block: hex digits, the same in every process."""
    return shake_128(f"{namespace}:{block}".encode()).hexdigest(tokens * BYTES_PER_TOKEN // 2)


def read_trace(path: Path, *, requests_max: int = REQUESTS_MAX, input_tokens_max: int | None = None) -> Trace:
    """Read a trace from a plain, `.gz` or `.zst` file, stopping after `requests_max` requests.

    A prompt over `input_tokens_max` is left out of an open trace. In a session it ends the session, because later
    requests build on it. Raises TraceError if the file is not a trace, OSError if it cannot be read.
    """
    with _open_text(path) as file:
        lines = _lines(path, file)
        first = next(lines, None)
        if first is None:
            raise TraceError(f"{path}: empty")
        kind = _kind(path, *first)
        reader = _read_open if kind == "open" else _read_sessions
        sessions, skipped = reader(path, first, lines, requests_max, input_tokens_max)
    if not sessions:
        raise TraceError(f"{path}: no request has fewer than {input_tokens_max} input tokens")
    return Trace(path.name.split(".")[0], kind, tuple(sessions), skipped)


@lru_cache(maxsize=2)
def shipped_trace(name: str, requests_max: int = REQUESTS_MAX) -> Trace:
    """Return a trace of loadtest/data."""
    with resources.as_file(resources.files("loadtest") / "data" / f"{name}.jsonl.gz") as path:
        return read_trace(path, requests_max=requests_max)


# Lines

Tokens = Annotated[int, msgspec.Meta(ge=1, le=10_000_000)]
Seconds = Annotated[float, msgspec.Meta(ge=0)]
Line = tuple[int, bytes]
T = TypeVar("T")


class OpenLine(msgspec.Struct):
    """A line of Mooncake's format."""

    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    input_length: Tokens
    output_length: Annotated[int, msgspec.Meta(ge=0)]
    hash_ids: list[int]


class SessionLine(msgspec.Struct):
    """A line of the compact session format."""

    s: str
    t: Seconds
    input_tokens: Tokens = msgspec.field(name="in")
    out: Annotated[int, msgspec.Meta(ge=0)]
    h: list[tuple[int, Annotated[int, msgspec.Meta(ge=1)]]]
    think: Seconds = 0.0
    api: Seconds = 0.0
    a: str | None = None


@contextmanager
def _open_text(path: Path) -> Iterator[TextIO]:
    if path.suffix == ".gz":
        with gzip.open(path, "rt", encoding="utf-8") as text:
            yield cast("TextIO", text)
    elif path.suffix == ".zst":
        try:
            zstandard = importlib.import_module("zstandard")
        except ImportError as error:
            raise TraceError(f"{path}: reading .zst needs the zstandard package") from error
        with path.open("rb") as raw, zstandard.ZstdDecompressor().stream_reader(raw) as stream:
            yield io.TextIOWrapper(stream, encoding="utf-8")
    else:
        with path.open(encoding="utf-8") as text:
            yield text


def _lines(path: Path, file: TextIO) -> Iterator[Line]:
    number = 0
    try:
        while line := file.readline(LINE_BYTES_MAX):
            number += 1
            if len(line) >= LINE_BYTES_MAX:
                raise TraceError(f"{path}:{number}: line longer than {LINE_BYTES_MAX} bytes")
            if line.strip():
                yield number, line.encode()
    except (UnicodeDecodeError, EOFError, gzip.BadGzipFile) as error:
        raise TraceError(f"{path}:{number + 1}: {error}") from error


def _kind(path: Path, number: int, line: bytes) -> Literal["open", "sessions"]:
    try:
        keys = msgspec.json.decode(line, type=dict[str, msgspec.Raw]).keys()
    except msgspec.DecodeError as error:
        raise TraceError(f"{path}:{number}: not a JSON object: {error}") from error
    if "hash_ids" in keys:
        return "open"
    if {"s", "h"} <= keys:
        return "sessions"
    raise TraceError(
        f"{path}:{number}: unknown trace form with keys {sorted(keys)};"
        " known: timestamp/input_length/output_length/hash_ids, and s/t/in/out/h"
    )


def _decode_line(path: Path, line: Line, form: type[T]) -> T:
    try:
        return msgspec.json.decode(line[1], type=form)
    except msgspec.DecodeError as error:
        raise TraceError(f"{path}:{line[0]}: {error}") from error


# The open format

OPEN_BLOCK_TOKENS = 512


def _read_open(
    path: Path, first: Line, rest: Iterator[Line], requests_max: int, input_tokens_max: int | None
) -> tuple[list[Session], int]:
    requests: list[Request] = []
    skipped = 0
    for line in itertools.chain([first], rest):
        if len(requests) >= requests_max:
            break
        row = _decode_line(path, line, OpenLine)
        if len(row.hash_ids) * OPEN_BLOCK_TOKENS < row.input_length:
            raise TraceError(
                f"{path}:{line[0]}: {len(row.hash_ids)} hash_ids of {OPEN_BLOCK_TOKENS} tokens"
                f" do not cover input_length {row.input_length}"
            )
        if input_tokens_max is not None and row.input_length > input_tokens_max:
            skipped += 1
            continue
        requests.append(_open_request(row))
    requests.sort(key=lambda request: request.at_s)
    return [Session(str(i), (request,)) for i, request in enumerate(requests)], skipped


def _open_request(row: OpenLine) -> Request:
    return Request(
        at_s=row.timestamp / 1000,
        think_s=0.0,
        input_tokens=row.input_length,
        output_tokens=row.output_length,
        namespace="open",
        block_tokens=OPEN_BLOCK_TOKENS,
        runs=merged_runs([(block, 1) for block in row.hash_ids]),
    )


# The session format

SESSION_BLOCK_TOKENS = 64


def _read_sessions(
    path: Path, first: Line, rest: Iterator[Line], requests_max: int, input_tokens_max: int | None
) -> tuple[list[Session], int]:
    rows: dict[str, list[SessionLine]] = {}
    ended: set[str] = set()
    taken = skipped = 0
    for line in itertools.chain([first], rest):
        if taken >= requests_max:
            break
        row = _decode_line(path, line, SessionLine)
        blocks = sum(count for _, count in row.h)
        if blocks != row.input_tokens // SESSION_BLOCK_TOKENS:
            raise TraceError(
                f"{path}:{line[0]}: {blocks} full blocks of {SESSION_BLOCK_TOKENS} tokens"
                f" do not fit {row.input_tokens} input tokens"
            )
        if input_tokens_max is not None and row.input_tokens > input_tokens_max:
            ended.add(row.s)
        if row.s in ended:
            skipped += 1
            continue
        rows.setdefault(row.s, []).append(row)
        taken += 1
    return [Session(name, tuple(_session_requests(name, lines))) for name, lines in rows.items()], skipped


def _session_requests(name: str, lines: Sequence[SessionLine]) -> list[Request]:
    """Return a session's requests in the order in which they were sent.

    Requests of sub-agents are among those of their parent and are sent in the same single sequence: a session has at
    most one request in flight. The wait before a request is its think time if it follows a request of the same agent.
    Otherwise it is the time since the previous request was answered.
    """
    lines = sorted(lines, key=lambda line: line.t)
    runs = [merged_runs(line.h) for line in lines]
    tails = _tails(lines, runs)
    requests: list[Request] = []
    for i, line in enumerate(lines):
        think_s = 0.0
        if i > 0:
            before = lines[i - 1]
            think_s = line.think if before.a == line.a else max(0.0, line.t - before.t - before.api)
        request = Request(
            at_s=line.t,
            think_s=think_s,
            input_tokens=line.input_tokens,
            output_tokens=line.out,
            namespace=name,
            block_tokens=SESSION_BLOCK_TOKENS,
            runs=runs[i],
            tail=tails[i],
            agent=line.a or "",
            answer_s=line.api,
        )
        requests.append(_with_cuts(request, requests))
    return requests


def _tails(lines: Sequence[SessionLine], runs: Sequence[Runs]) -> list[int | str]:
    """Return for each request the id of the block that its last few tokens begin.

    Only full blocks have ids. The block of the next turn at that position extends those tokens, so its id names them. A
    request that no later request extends gets a block of its own.
    """
    tails: list[int | str] = [f"tail{i}" for i in range(len(lines))]
    for i in reversed(range(len(lines))):
        size = block_count(runs[i])
        for k in range(i + 1, min(len(lines), i + 1 + TURNS_BACK_MAX)):
            if shared_blocks(runs[i], runs[k]) == size and lines[k].input_tokens >= lines[i].input_tokens:
                tails[i] = block_at(runs[k], tails[k], size)
                break
    return tails


def _with_cuts(request: Request, earlier: Sequence[Request]) -> Request:
    """Return the request with the cuts of the longest earlier request that it extends, and a cut at that one's end."""
    parents = [other for other in earlier[-TURNS_BACK_MAX:] if _extends(request, other)]
    if not parents:
        return request
    parent = max(parents, key=lambda other: other.input_tokens)
    same = parent.input_tokens == request.input_tokens
    cuts = parent.cuts if same else (*parent.cuts, parent.input_tokens)
    return replace(request, cuts=cuts)


def _extends(request: Request, other: Request) -> bool:
    size = block_count(other.runs)
    if other.input_tokens > request.input_tokens or shared_blocks(other.runs, request.runs) != size:
        return False
    whole = other.input_tokens == size * other.block_tokens
    return whole or block_at(request.runs, request.tail, size) == other.tail
