"""Lines of request logs, put through the memory of texts, which compares prompts with earlier ones, as the router's
observatory does."""

from __future__ import annotations

from contextlib import suppress

import msgspec

from router.cli.audit.counts import Audit
from router.cli.audit.log_requests import NotRequest, parse_request
from router.core.dialects import InvalidBody
from tests.attack.target import Target
from tests.attack.targets.bodies import WORDS

LINES_MAX = 20


def logs(data: bytes) -> None:
    """A log, line by line: requests that are counted, or why a line is none."""
    audit = Audit(memory_bytes_max=1 << 20, excerpts=True)
    counted = 0
    for line in data.splitlines()[:LINES_MAX]:
        with suppress(NotRequest, InvalidBody):
            request = parse_request(line)
            assert request.prompt_tokens >= 0
            audit.add(request)
            counted += 1
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
)

TARGETS = (Target(logs, (*LOGGED, *WORDS), steps=(100_000, 2_000), held_bytes=(16 << 20, 4_000)),)
