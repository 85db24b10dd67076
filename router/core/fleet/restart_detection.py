"""Detection of the process behind a replica's metrics page: the same as before, a restarted one, or several.

A new start time, or a counter that decreased, shows another process. Usually the engine has restarted, and its cache is
empty. Behind some URLs several processes answer alternately (a Service, an engine with several API servers that do not
share their metrics). Each page then looks like a restart, and must not be taken for one.

Several processes are assumed if a start time is older than an earlier one, or after the third change within a minute.
From then on changes are counted and ignored, and so are the counters, until no change occurred for CALM_S. A replica
that refused connections in between counts as restarted in any case.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from enum import Enum

from router.core.types.replicas import Load

CHANGES_MAX = 3  # this number of changes within CHANGES_S shows several processes
CHANGES_S = 60.0
CALM_S = 600.0  # seconds without a change after which the page counts as that of one process again


class PageChange(Enum):
    """Result of comparing a page with the previous one."""

    NONE = 0
    RESTART = 1
    SEVERAL = 2  # first detection of several processes
    IGNORED = 3


@dataclass(slots=True)
class PageSource:
    """State of one replica's page."""

    several: bool = False
    restarts: int = 0  # changes that counted as a restart
    ignored: int = 0  # changes that did not count
    _started_s: float | None = None  # latest start time seen
    _last: Load = field(default_factory=Load)
    _changes_s: deque[float] = field(default_factory=lambda: deque(maxlen=CHANGES_MAX))
    _changed_s: float = 0.0

    def compare(self, load: Load, now_s: float) -> PageChange:
        """Compare a page with the previous one."""
        last, self._last, before_s = self._last, load, self._started_s
        if load.started_s is not None and (before_s is None or load.started_s > before_s):
            self._started_s = load.started_s
        if not _is_another(last, load):
            if self.several and now_s - self._changed_s > CALM_S:
                self.several, self._started_s = False, load.started_s
                self._changes_s.clear()
            return PageChange.NONE
        self._changed_s = now_s
        self._changes_s.append(now_s)
        if not self.several:
            is_older = load.started_s is not None and before_s is not None and load.started_s < before_s
            is_frequent = len(self._changes_s) == CHANGES_MAX and now_s - self._changes_s[0] <= CHANGES_S
            if not is_older and not is_frequent:
                self.restarts += 1
                return PageChange.RESTART
            self.several = True
            self.ignored += 1
            return PageChange.SEVERAL
        self.ignored += 1
        return PageChange.IGNORED

    def on_engine_restarted(self) -> None:
        """Record a restart that a refused connection proved. The next page is expected from another process."""
        self._last, self._started_s = Load(), None
        self._changes_s.clear()


def strip_counters(load: Load) -> Load:
    """Return the load of one of several processes without its counters, which are not comparable with those of another
    page."""
    return replace(
        load,
        prompt_tokens_total=None,
        generation_tokens_total=None,
        cache_query_tokens_total=None,
        cache_hit_tokens_total=None,
        started_s=None,
    )


def _is_another(before: Load, after: Load) -> bool:
    if before.started_s is not None and after.started_s is not None and before.started_s != after.started_s:
        return True
    old, new = before.prompt_tokens_total, after.prompt_tokens_total
    return old is not None and new is not None and new < old
