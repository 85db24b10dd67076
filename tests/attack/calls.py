"""Single calls of the router that foreign bytes reach, judged one by one by a clock.

A target compares several ways to read one input. Here each way stands alone, with the most bytes that its caller hands
over at once. A target without calls here has its whole attack for a call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

from router.core.dialects import OPENAI, PATHS, SGLANG, prefill_only, tenant_isolation
from router.core.dialects.dialect import Dialect
from router.core.dialects.multipart import form_model
from router.core.dialects.sse import EventSplitter
from router.core.dialects.tool_normalization import REPAIRS, ToolNormalizer
from router.core.fleet.engine_metrics import engines, parse_load
from router.core.fleet.metrics_lines import KEPT_BYTES_MAX, SLICE_BYTES, MetricsLines, pages_of_ranks
from router.core.kv_events.batch_decoder import BATCH_BYTES_MAX, decode
from router.core.prompts.json_fields import check_limits
from router.engines.probe import PARSE_BYTES_MAX
from router.http.receiver import Receiver
from router.proxy.relay import PARTIAL_BYTES_MAX
from tests.attack.grown import BYTES_MAX
from tests.attack.received import Received
from tests.attack.relayed import Way, relayed
from tests.attack.target import Target
from tests.attack.targets.bodies import agents

MS_PER_MB = 20.0  # CPU time of a call, for each megabyte that it gets and at least for one
STREAMED_MS_PER_MB = 320.0  # of what comes read by read, other work in between: 20 ms for a read of 64 KB
THREAD_MS_PER_MB = 60.0  # of what is done off the event loop, which gets the interpreter in between
OPERATORS_MS_PER_MB = 2_000.0  # of operators' own files, read at a start or by a command
HELD_MB_PER_MB = 64.0  # memory at once
OPERATORS_HELD_MB_PER_MB = 128.0  # likewise of operators' own files: YAML is an object for every few bytes
HEAD_BYTES_MAX = 64 << 10  # of a request
READ_BYTES = 64 << 10  # bytes of one read of a socket
RANKS = 128  # of one server, as many as its page may have lines for
SHAPE_MAX = (256, 65_536, 1 << 20)  # defaults of limits.json_depth_max, json_parts_max and json_values_max
# Files of operators, whose readers need not be quick: they end, within bounds.
OPERATORS = frozenset(
    ("settings_file", "environment", "keys_file", "prefix_file", "model_files", "logs", "sharing_urls")
)
# Calls of the router that an attack makes with the same bytes, where it has no calls of its own below.
ONCE = {"model_files": 5, "models": 4, "pods": 5, "watch": 3, "template_inputs": 40, "sharing_messages": 4}


@dataclass(frozen=True)
class Call:
    """One call with foreign bytes. What it raises is judged by the target and not here."""

    name: str
    run: Callable[[bytes], object]
    bytes_max: int = BYTES_MAX
    """Bytes that its caller hands over at most."""
    ms_per_mb: float = MS_PER_MB
    held_mb_per_mb: float = HELD_MB_PER_MB
    once: int = 1
    """Calls of the router that `run` makes with the same bytes, one after the other."""


def calls_of(target: Target) -> Sequence[Call]:
    """The calls of a target."""
    whole = Call("attack", target.attack, once=ONCE.get(target.name, 1))
    if target.name in OPERATORS:
        whole = replace(whole, ms_per_mb=OPERATORS_MS_PER_MB, held_mb_per_mb=OPERATORS_HELD_MB_PER_MB)
    return CALLS.get(target.name) or (whole,)


def reads(data: bytes) -> Iterator[bytes]:
    """The bytes as a socket hands them over."""
    return (data[at : at + READ_BYTES] for at in range(0, len(data), READ_BYTES))


def _receive(data: bytes) -> None:
    receiver = Receiver(_Ungreedy(), BYTES_MAX)
    for piece in reads(data):
        receiver.feed(piece)
    receiver.close()


class _Ungreedy(Received):
    """A connection that keeps nothing of what it was sent."""

    def on_request(self, request: object) -> None:
        """A whole request."""

    def on_head(self, request: object, length: int, *, expects: bool) -> bool:
        """Any body is wanted."""
        return True

    def grows(self, request: object, body_bytes: int) -> None:
        """A body may be of any length."""


def _relay(way: Way, data: bytes) -> None:
    relayed(list(reads(data)), way)


def _streamed(name: str, way: Way) -> Call:
    return Call(name, partial(_relay, way), ms_per_mb=STREAMED_MS_PER_MB)


def _parse(path: str, dialect: Dialect, data: bytes) -> None:
    if not check_limits(data, *SHAPE_MAX):
        dialect.parse(path, data)


def _readable(work: Callable[[bytes], object], data: bytes) -> None:
    """Bodies that are too deep or of too many parts are refused before all else."""
    if not check_limits(data, *SHAPE_MAX):
        work(data)


def _without_shared(data: bytes) -> None:
    tenant_isolation.strip_shared_fields(data, tenant_isolation.read_isolation_fields(data), "resp_x")


def _repaired(data: bytes) -> None:
    ToolNormalizer(bytes_max=1 << 20).normalize(data, REPAIRS)


def _warmed(data: bytes) -> None:
    prefill_only.prefill_only("/v1/chat/completions", prefill_only.fields_of(data))


def _form(data: bytes) -> None:
    content_type, _, body = data.partition(b"\n")
    form_model(content_type, body)


def _events(data: bytes) -> None:
    splitter = EventSplitter()
    for piece in reads(data):
        splitter.feed(piece)
    splitter.close()


def _lines(data: bytes) -> str:
    lines = MetricsLines()
    for at in range(0, len(data), SLICE_BYTES):
        lines.feed(data[at : at + SLICE_BYTES])
    return lines.close()


def _pages(data: bytes) -> None:
    """Pages are taken apart by ranks once only the lines of known names are left."""
    pages_of_ranks(_lines(data), RANKS)


def _load(work: Callable[[str], object], data: bytes) -> None:
    """Pages are decoded before they are read."""
    work(data.decode(errors="replace"))


def _bodies() -> tuple[Call, ...]:
    return (
        Call("excess", lambda data: check_limits(data, *SHAPE_MAX)),
        *(Call(f"parse {path}", partial(_parse, path, dialect)) for path, dialect in PATHS.items()),
        Call("without_shared", partial(_readable, _without_shared)),
        Call(
            "with_salt", partial(_readable, partial(tenant_isolation.with_salt, "/v1/chat/completions", salt=b"5" * 64))
        ),
        Call("with_usage", partial(_readable, OPENAI.with_usage)),
        Call("repairs", partial(_readable, _repaired)),
        Call("warming", partial(_readable, _warmed)),
    )


def _of_dialects() -> Iterator[Call]:
    """Readers of answers: of whole ones, and of the end of a stream, which the relay keeps."""
    for name, dialect in {type(each).__name__: each for each in PATHS.values()}.items():
        yield Call(f"{name}.usage", dialect.usage, 1 << 20)
        for reader in ("stream_usage", "event_error", "find_abort", "has_output", "is_usage_event", "find_ending"):
            yield Call(f"{name}.{reader}", getattr(dialect, reader), 2 * PARTIAL_BYTES_MAX)


CALLS: dict[str, tuple[Call, ...]] = {
    "requests": (Call("receive", _receive, ms_per_mb=STREAMED_MS_PER_MB),),
    "answers": (
        _streamed("relay", Way(chunked=False)),
        _streamed("relay, judged", Way(chunked=False, judged=True)),
        _streamed("relay, judged by SGLang", Way(SGLANG, chunked=False, judged=True)),
        _streamed("relay, stripped", Way(chunked=False, judged=True, stripped=True)),
        _streamed("whole answer", Way(until_whole=True)),
    ),
    "agents": (Call("agents", agents, HEAD_BYTES_MAX),),
    "bodies": _bodies(),
    "forms": (Call("form_model", _form),),
    "events": (Call("split", _events, ms_per_mb=STREAMED_MS_PER_MB),),
    "usage": tuple(_of_dialects()),
    "metrics": (
        Call("lines", _lines, ms_per_mb=STREAMED_MS_PER_MB),
        Call("parse_load", partial(_load, parse_load), PARSE_BYTES_MAX),
        Call("parse_load in a thread", partial(_load, parse_load), KEPT_BYTES_MAX, THREAD_MS_PER_MB),
        Call("pages_of_ranks", _pages, KEPT_BYTES_MAX, THREAD_MS_PER_MB),
        Call("engines", partial(_load, engines), KEPT_BYTES_MAX),
    ),
    "kv_events": (Call("decode", decode, BATCH_BYTES_MAX),),
}


def quietly(call: Call, data: bytes) -> None:
    """Run a call, whatever it raises."""
    with suppress(Exception):
        call.run(data)
