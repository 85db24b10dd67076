"""The process behind a replica's metrics page: the same one as before, another one after a restart, or several.

A new start time, or a counter that went back, shows that another process answers. As a rule the engine has restarted
and its cache is empty. Behind some URLs several processes answer in turn (a Service, an engine with several API
servers that do not share their metrics): then each page looks like a restart, and nothing follows from it.

Several it is if a start time is older than one seen before, or after the third change within a minute. Thereafter
changes are counted and ignored, and so are the counters, until there has been no change for CALM_S. A replica that
refused connections in between is a restart in any case.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from enum import Enum

from router.core.facts.replicas import Load

CHANGES_MAX = 3  # the last of so many changes within CHANGES_S shows several processes
CHANGES_S = 60.0
CALM_S = 600.0  # seconds without a change after which the page is of one process again


class PageChange(Enum):
    """A page compared with the one before it."""

    NONE = 0
    RESTART = 1
    SEVERAL = 2  # first found to be of one of several processes
    IGNORED = 3


@dataclass(slots=True)
class PageSource:
    """State of one replica's page."""

    several: bool = False
    restarts: int = 0  # changes that counted as a restart
    ignored: int = 0  # changes that did not
    _started_s: float | None = None  # latest start time seen
    _last: Load = field(default_factory=Load)
    _changes_s: deque[float] = field(default_factory=lambda: deque(maxlen=CHANGES_MAX))
    _changed_s: float = 0.0

    def compare(self, load: Load, now_s: float) -> PageChange:
        """Take a page."""
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

    def restarted(self) -> None:
        """The engine restarted, as a refused connection proved: a page of another process is to be expected."""
        self._last, self._started_s = Load(), None
        self._changes_s.clear()


def without_counters(load: Load) -> Load:
    """The load of one of several processes: its counters say nothing beside those of another page."""
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
