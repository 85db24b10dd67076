"""Groups of requests by route, tenant, presence of tools, step and kind of agent, both as the client reports them.

Clients choose the names of steps, so these are bounded, and so are groups. Any later one is `other`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from math import ceil
from operator import add
from typing import Any, NamedTuple

from router.core.insights.ledger.decaying_sums import HIT, PROMPT, REPLAY, REQUESTS, TOOL_CALLS, VERIFIED, ratio, zeros

OTHER = "other"
GROUP_TTFT_S = (0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 15.0)  # bounds of buckets: few, because the number of groups is large
GROUP_PROMPT_TOKENS = (500.0, 2_000.0, 8_000.0, 32_000.0, 128_000.0)  # the same for prompt lengths
RECENT = 128  # requests from which medians are computed
STEP_CHARS_MAX = 64


class Label(NamedTuple):
    """Common properties of a group's requests."""

    route: str
    tenant: str
    tools: bool
    step: str
    agent: str = ""  # one of the few in the table of clients (core/prompts/agent_headers.py)


REST = Label(OTHER, OTHER, False, OTHER, OTHER)


class Group:
    """Counters since the router began, and samples of its last requests. Callers add to the fields directly: a call
    would cost more."""

    __slots__ = ("faded", "lengths", "now", "prompts", "sums", "ttft", "ttfts_s")

    def __init__(self) -> None:
        self.now = zeros()  # sums of the current time step
        self.sums = zeros()  # sums of all steps before
        self.faded = [0.0, 0.0, 0.0]  # weighted tokens of prompts, of hits and of replays: see sums.Fading
        self.ttft = [0.0] * (len(GROUP_TTFT_S) + 2)  # requests by bucket; the last entry is the sum in s
        self.lengths = [0.0] * (len(GROUP_PROMPT_TOKENS) + 2)  # prompts by bucket; the last entry is the sum in tokens
        self.ttfts_s: deque[float] = deque(maxlen=RECENT)
        self.prompts: deque[float] = deque(maxlen=RECENT)

    def settle(self, weight: float) -> list[float]:
        """Close the current step, and return its sums."""
        now, faded = self.now, self.faded
        self.sums = list(map(add, self.sums, now))
        faded[0] += now[PROMPT] * weight
        faded[1] += now[HIT] * weight
        faded[2] += now[REPLAY] * weight
        self.now = zeros()
        return now

    @property
    def prompt_tokens_p50(self) -> float | None:
        """Median of its last requests."""
        return _compute_percentile(self.prompts, 0.5)


class Groups:
    """All groups, at most `groups_max`. `tenant` maps a tenant to a label that may be shown."""

    def __init__(self, groups_max: int, steps_max: int, tenant: Callable[[str], str]) -> None:
        self._groups_max, self._steps_max = groups_max, steps_max
        self._tenant = tenant
        self._steps: set[str] = {""}
        self.all: dict[Label, Group] = {}

    def get_or_create(self, route: str, tenant: str, tools: bool, step: str, agent: str = "") -> Group:
        """Return the group of such requests. The last group takes all others once the limit is reached."""
        if step not in self._steps:
            step = step[:STEP_CHARS_MAX]
            if len(self._steps) <= self._steps_max:
                self._steps.add(step)
            elif step not in self._steps:
                step = OTHER
        label = Label(route, self._tenant(tenant), tools, step, agent)
        if label not in self.all and len(self.all) >= self._groups_max - 1:
            label = REST
        group = self.all.get(label)
        if group is None:
            group = self.all[label] = Group()
        return group

    def fade(self, factor: float) -> None:
        """Multiply all sums when weights begin anew (sums.Fading)."""
        for group in self.all.values():
            group.faded = [value * factor for value in group.faded]

    def rows(self, groups_max: int) -> list[dict[str, Any]]:
        """Return rows of the page, groups with the most prompt tokens in the fading window first. Requests and tokens
        are counted since the router began. Rates are of the last hour, times and lengths of the last requests."""
        most = sorted(self.all.items(), key=lambda each: -each[1].faded[0])[:groups_max]
        return [_row(label, group) for label, group in most]


def _row(label: Label, group: Group) -> dict[str, Any]:
    sums, (prompt, hit, replay) = group.sums, group.faded
    return {
        "route": label.route,
        "tenant": label.tenant,
        "tools": label.tools,
        "step": label.step,
        "agent": label.agent,
        "requests": round(sums[REQUESTS]),
        "prompt_tokens": round(sums[PROMPT]),
        "verified_tokens": round(sums[VERIFIED]),
        "hit_rate": ratio(hit, prompt),
        "genuine_hit_rate": ratio(hit - replay, prompt),
        "ttft_p50_s": _compute_percentile(group.ttfts_s, 0.5),
        "ttft_p90_s": _compute_percentile(group.ttfts_s, 0.9),
        "prompt_tokens_p50": group.prompt_tokens_p50,
        "tool_calls_mean": ratio(sums[TOOL_CALLS], sums[REQUESTS]),
    }


def _compute_percentile(values: deque[float], part: float) -> float | None:
    """Return the percentile by nearest rank. None if no value exists."""
    if not values:
        return None
    return round(sorted(values)[max(0, ceil(part * len(values)) - 1)], 4)
