"""`warmroute audit`: findings about the cache from request logs, before a router is deployed.

Logs are read line by line, so that their size does not matter; the memory of texts is bounded by `--memory-mb`.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from router.cli.audit.counts import Audit, Tokenizer
from router.cli.audit.findings import findings_of
from router.cli.audit.log_formats import FORMATS, LogReader
from router.cli.audit.log_requests import LoggedRequest, NotRequest
from router.cli.audit.reader import DAMAGED, LINE_BYTES_MAX, STDIN, LogOpenError, open_log, records_of
from router.cli.audit.tables import print_findings
from router.core.dialects import PATHS, InvalidBody
from router.core.types.requests import RequestSpec
from router.telemetry.report_header import document
from router.tokenization.optional_tokenizers import MissingExtra
from router.tokenization.sandbox import CannotRender

REASONS_MAX = 8
TOKENIZER_CACHE_BYTES_MAX = 256 << 20
# Maximum of lines, and of their bytes, without a request among them; after that the rest of the file is left out. 500
# MB of line ends are 0.5 MB in a `.gz`, and reading them takes minutes.
USELESS_LINES_MAX, USELESS_BYTES_MAX = 1_000_000, 4 << 30
TELL_S = 2.0  # seconds between two lines of progress on a terminal


@dataclass(slots=True)
class SkippedLines:
    """Lines that could not be used, by the reason. The first line of each reason is named."""

    reasons: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)  # problems of whole files

    def add(self, name: str, number: int, why: str) -> None:
        """Count a line that could not be used."""
        self.reasons[why] += 1
        self.first.setdefault(why, f"{name}:{number}")

    def render_lines(self) -> list[str]:
        """Return the lines to print for people."""
        lines = [
            f"  {self.first[why]}: {why}" + (f" (and {count - 1:,} more lines)" if count > 1 else "")
            for why, count in self.reasons.most_common(REASONS_MAX)
        ]
        return [*self.notes, *([f"Skipped lines: {self.reasons.total():,}", *lines] if lines else [])]


def run(options: argparse.Namespace, command: str) -> int:
    """Read the logs and print the findings. Returns the exit status."""
    try:
        tokenizer = _tokenizer(options.tokenizer) if options.tokenizer else None
    except (MissingExtra, CannotRender, OSError, ValueError) as error:
        return _complain(f"{options.tokenizer}: {error}")
    audit = Audit(memory_bytes_max=options.memory_mb << 20, excerpts=options.excerpts, tokenizer=tokenizer)
    unread = SkippedLines()
    try:
        _read(options.files, audit, unread, options.requests_max)
    except LogOpenError as error:
        return _complain(str(error))
    except KeyboardInterrupt:
        unread.notes.append("Interrupted: the report covers the lines read so far.")
    if not audit.requests and not audit.served.requests:
        formats = ["These formats are read (docs/guide/audit.md):", *(f"  {each.name}" for each in FORMATS)]
        return _complain("\n".join(["no requests found", *unread.render_lines(), *formats]))
    findings = findings_of(audit, prefill_tokens_per_s=options.prefill_tokens_per_s)
    findings.figures["unread_lines"] = unread.reasons.total()
    if options.json is not None:
        made = document(command, findings.rows(), Path(__file__).resolve().parent)
        try:
            options.json.write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            return _complain(f"{options.json}: {error.strerror or error}")
    try:
        print_findings(findings, unread.render_lines(), excerpts=options.excerpts)
        sys.stdout.flush()
    except BrokenPipeError:  # the reader of standard output has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def _read(names: Sequence[str], audit: Audit, unread: SkippedLines, requests_max: int) -> None:
    """Read all files, up to `requests_max` requests. Raises LogOpenError."""
    progress = _Progress()
    for name in names:
        shown = "standard input" if name == STDIN else name
        log = LogReader()
        with open_log(name) as file:
            number = lines = size = 0  # lines and their bytes since the last request
            try:
                for number, line in enumerate(records_of(file), 1):
                    if audit.requests + audit.served.requests >= requests_max:
                        unread.notes.append(f"Read up to {shown}:{number - 1} only: --requests-max {requests_max}.")
                        return
                    lines, size = lines + 1, size + (LINE_BYTES_MAX if line is None else len(line))
                    if _take(shown, number, line, log, audit, unread):
                        lines = size = 0
                    if lines >= USELESS_LINES_MAX or size >= USELESS_BYTES_MAX:
                        unread.notes.append(
                            f"{shown} was read up to line {number:,} only: no request in {lines:,} lines."
                        )
                        break
                    progress.tell(audit)
            except DAMAGED as error:
                unread.notes.append(f"{shown} could only be read up to line {number:,}: {error}")


def _take(name: str, number: int, line: bytes | None, log: LogReader, audit: Audit, unread: SkippedLines) -> bool:
    """Count the content of a line. Returns True if it has a format that is read."""
    if line is None:
        unread.add(name, number, f"longer than {LINE_BYTES_MAX:,} bytes")
        return False
    if number == 1:
        line = line.removeprefix(b"\xef\xbb\xbf")
    if line.isspace() or not line:
        return False
    try:
        requests = () if audit.served.add(line) else log.read(line)
    except NotRequest as error:
        unread.add(name, number, str(error))
        return False
    is_read = not requests
    for request in requests:
        try:
            audit.add(request)
            is_read = True
        except InvalidBody as error:
            unread.add(name, number, error.code)
    return is_read


class _Progress:
    """Line of progress on standard error, if that is a terminal."""

    def __init__(self) -> None:
        self._wanted = sys.stderr.isatty()
        self._next_s = time.monotonic() + TELL_S

    def tell(self, audit: Audit) -> None:
        """Count a request."""
        if self._wanted and time.monotonic() >= self._next_s:
            self._next_s = time.monotonic() + TELL_S
            requests = audit.requests + audit.served.requests
            print(f"\r{requests:,} requests, {audit.body_bytes / 1e6:,.0f} MB", end="\r", file=sys.stderr)


def _tokenizer(source: str) -> Tokenizer:
    """Return a function that counts tokens with a model's own files. Raises the errors of loading them."""
    from router.tokenization.encoder import Model

    model = Model(source, TOKENIZER_CACHE_BYTES_MAX)

    def count(request: LoggedRequest, ask: RequestSpec) -> int:
        given = PATHS[request.path].template_input(request.path, request.body, ask.decoded)
        if given is None:
            return 0
        try:
            return len(given.ids if given.ids is not None else model.ids(given, "vllm", {})) // 4
        except (CannotRender, ValueError):  # the template refuses the prompt, or its text is invalid
            return 0

    return count


def _complain(problem: str) -> int:
    for line in problem.splitlines():
        print(f"warmroute: {line}", file=sys.stderr)
    return 2
