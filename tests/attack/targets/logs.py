"""Lines of request logs, put through the memory of texts, which compares prompts with earlier ones, as the router's
observatory does."""

from __future__ import annotations

import io
from contextlib import suppress
from itertools import islice

import msgspec

from router.cli.audit.counts import Audit
from router.cli.audit.log_formats import LogReader
from router.cli.audit.log_requests import NotRequest
from router.cli.audit.reader import records_of
from router.core.dialects import InvalidBody
from tests.attack.target import Target
from tests.attack.targets.bodies import WORDS

LINES_MAX = 20


def logs(data: bytes) -> None:
    """A log, line by line: requests that are counted, or why a line is none."""
    audit = Audit(memory_bytes_max=1 << 20, excerpts=True)
    counted = 0
    log = LogReader()
    records = records_of(io.BufferedReader(io.BytesIO(data)))
    for record in islice(records, LINES_MAX):
        with suppress(NotRequest, InvalidBody):
            for request in log.read(record or b""):
                assert request.prompt_tokens >= 0
                audit.add(request)
                counted += bool(request.body)
    audit.settle()
    assert audit.requests == counted
    told = [audit.ledger.totals_row(), *audit.ledger.advice(5, ms_per_token=lambda _: 0.1, kv_tokens=1_000)]
    msgspec.json.encode(told)


LOGGED = (
    b'{"path":"/v1/chat/completions","body":{',
    b'"session":"s"',
    b'"usage":{"prompt_tokens":9}',
    b'"time":',
    b"\n",
    b'{"traceId":"t","input":',
    b'{"model_parameters":{"tools":[]},"messages":',
    b'{"resourceSpans":[{"scopeSpans":[{"spans":[{"attributes":[{"key":"gen_ai.input.messages","value":{',
    b"Receive: obj=GenerateReqInput(text='a'",
    b"Request 1 details: prompt: 'a', prompt_token_ids: [1",
    b"{\\x22prompt\\x22",
)

TARGETS = (Target(logs, (*LOGGED, *WORDS), steps=(100_000, 2_000), held_bytes=(16 << 20, 4_000)),)
