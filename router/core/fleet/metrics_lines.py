"""Filter for the relevant lines of an engine's `/metrics` page, applied while the page arrives.

A page has about a hundred lines for each relevant one, and 4 MB for an engine with 64 ranks. So the page is filtered in
slices, each in well below a millisecond, and only the relevant lines are kept. A page with more relevant lines than any
engine has is refused, because adding up the numbers of thousands of engines costs as much as sending them.
"""

from __future__ import annotations

import re

from router.core.fleet.engine_metrics import NAMES, engines

SLICE_BYTES = 16 << 10  # processed in one step
LINE_BYTES_MAX = 16 << 10  # longer lines are dropped; vLLM's longest, its configuration, has about 2 KB
KEPT_BYTES_MAX = 512 << 10  # for all kept lines: 40 lines for each of 128 ranks

_WANTED = re.compile(b"^(?:%b)[{ ][^\\n]*" % b"|".join(re.escape(name.encode()) for name in NAMES), re.MULTILINE)
_ENGINE, _RANK = re.compile(r'[{,]engine="(\d{1,6})"'), re.compile(r'[{,]dp_rank="(\d{1,6})"')
COMMON_BYTES_MAX = 8 << 10  # limit for each name below, copied to each rank; each rank of SGLang states its page size
OF_ALL_RANKS = ("sglang:page_size", "process_start_time_seconds ")  # metrics of the server that hold for all ranks


class PageTooLong(Exception):
    """A page has more relevant lines than any engine's page."""


class MetricsLines:
    """Relevant lines of one page."""

    def __init__(self) -> None:
        self._partial = b""  # the incomplete last line
        self._skips = False  # the incomplete last line is too long
        self._kept: list[bytes] = []
        self._kept_bytes = 0

    def feed(self, data: bytes) -> None:
        """Process at most SLICE_BYTES of the page. Raises PageTooLong."""
        end = data.rfind(b"\n") + 1
        if not end:
            self._hold(data)
            return
        whole = data[:end]
        if self._skips:
            whole = whole[whole.find(b"\n") + 1 :]
        self._keep(self._partial + whole)
        self._partial, self._skips = b"", False
        self._hold(data[end:])

    def close(self) -> str:
        """Return all kept lines as one page."""
        self._keep(self._partial)
        self._partial = b""
        return b"".join(line + b"\n" for line in self._kept).decode(errors="replace")

    def _hold(self, data: bytes) -> None:
        """Buffer the beginning of a line."""
        if self._skips:
            return
        self._partial += data
        if len(self._partial) > LINE_BYTES_MAX:
            self._partial, self._skips = b"", True

    def _keep(self, lines: bytes) -> None:
        for line in _WANTED.findall(lines):
            if len(line) > LINE_BYTES_MAX:
                continue
            self._kept.append(line)
            self._kept_bytes += len(line) + 1
            if self._kept_bytes > KEPT_BYTES_MAX:
                raise PageTooLong


def pages_of_ranks(page: str, count: int) -> list[str]:
    """Split the page into one page for each of `count` ranks, in one pass. Each has the rank's own lines, by vLLM's
    label `engine` or SGLang's `dp_rank`, and the lines that hold for all ranks."""
    known = engines(page)
    label = _ENGINE if known else _RANK
    own, common = dict[str, list[str]](), list[str]()
    room = dict.fromkeys(OF_ALL_RANKS, COMMON_BYTES_MAX)
    for line in page.splitlines(keepends=True):
        name = next((name for name in OF_ALL_RANKS if line.startswith(name)), "")
        if name:
            room[name] -= len(line)
            if room[name] >= 0:
                common.append(line)
        elif (found := label.search(line)) is not None:
            own.setdefault(found[1], []).append(line)
    names = [str(engine) for engine in known[:count]] if known else [str(rank) for rank in range(count)]
    pages = ["".join([*own.get(name, ()), *common]) for name in names]
    return pages + ["".join(common)] * (count - len(pages))
