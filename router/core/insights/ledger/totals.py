"""Sums over all requests of a router, by time, template, group and difference.

The ledger runs at the end of every request, so that path is short: a look-up of its group and one of its template, and
some additions to each. All other figures are computed at the end of a time step, or when a page is requested. Each
group's requests are counted once. The steps, the totals and the metrics of misses and hits are sums over groups.

No text of a prompt is kept, except the excerpts that the settings allow.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable
from operator import add
from typing import Any, Protocol

from router.core.insights.ledger.advice import HOURLY_S_MIN, AdviceContext, advise, span
from router.core.insights.ledger.advice_hysteresis import AdviceHysteresis
from router.core.insights.ledger.decaying_sums import (
    AT,
    HIT,
    PREDICTED,
    PROMPT,
    REPLAY,
    REPLAYS,
    REQUESTS,
    SAVED_MS,
    TOOL_CALLS,
    TTFT_S,
    UNTOLD,
    VERIFIED,
    VERIFIED_HIT,
    VERIFIED_PREDICTED,
    DecayingSum,
    FadingRatio,
    misses_of,
    verified_of,
    zeros,
)
from router.core.insights.ledger.groups import GROUP_PROMPT_TOKENS, GROUP_TTFT_S, Group, Groups
from router.core.insights.ledger.lost_tokens import Cases, Losses, note_case
from router.core.insights.ledger.recent_traffic import RecentTraffic
from router.core.insights.ledger.template_tree import Branch, TemplateTree
from router.core.insights.ledger.timeline import Timeline
from router.core.types.cache_misses import (
    Difference,
    DifferenceKind,
    MissReason,
    PromptAnalysis,
    Template,
    TokenBreakdown,
)
from router.core.types.ended_requests import CacheUse, ClientInfo, RequestTimes
from router.core.types.placements import Usage

WINDOW_S = 3_600.0
DIVERSITY_WINDOW_S = 300.0
KINDS_MAX = 4_096  # kinds of requests with a remembered group

Kind = tuple[str, str, bool, str, str]  # route, tenant, tools, step and agent as received
_DIVERGED, _EVICTED, _UNSUPPORTED = MissReason.DIVERGED, MissReason.EVICTED, MissReason.UNSUPPORTED


class Placement(Protocol):
    """Required fields of a receipt."""

    replica: str
    predicted_cached_tokens: int
    replay: bool


class Ended(Protocol):
    """Required fields of a request's record."""

    route: str
    at_s: float
    model: str
    client: ClientInfo
    times: RequestTimes
    cache: CacheUse
    usage: Usage | None

    @property
    def receipt(self) -> Placement | None:
        """None if it was not placed."""


class Ledger:
    """Sums of all requests. Times are Unix time. Bounded in templates, groups and names of steps."""

    def __init__(
        self,
        *,
        templates_max: int,
        groups_max: int,
        steps_max: int,
        excerpts: bool,
        tenant: Callable[[str], str],
        now_s: float,
    ) -> None:
        """`tenant` maps a tenant to a label that may be shown."""
        self.totals = zeros()
        self.timeline = Timeline(now_s)
        self.branches = TemplateTree(templates_max)
        self.groups, self._tenant = Groups(groups_max, steps_max, tenant), tenant
        self.losses = Losses(excerpts=excerpts)
        self.fading = DecayingSum(WINDOW_S, now_s)
        self.shown = AdviceHysteresis()
        self.traffic = RecentTraffic(now_s)
        self.differences = dict.fromkeys(DifferenceKind, 0)  # requests by kind of difference
        # share of prompts that are no replays, of those for which this is known
        self.diversity = FadingRatio(DIVERSITY_WINDOW_S)
        self._cases: dict[int, Cases] = {at: {} for at in (*AT.values(), REPLAYS)}  # index in a sum -> last cases
        self._hour = zeros()  # weighted sums of the last hour
        self._kinds: dict[Kind, Group] = {}
        self._branches, self._weight = self.branches.all, self.fading.weight
        self._end_s, self._ttft = self.timeline.end_s, self.timeline.now.ttft

    def observe(self, record: Ended) -> None:
        """Count a request that ended. A request that was not placed carries no information about caches."""
        receipt = record.receipt
        if receipt is None:
            return
        ttft_s = record.times.ttft_s
        end_s = record.at_s + record.times.duration_s
        if end_s >= self._end_s:
            self.settle(end_s)
        sighting, miss, usage = record.cache.analysis, record.cache.miss, record.usage
        tools = sighting is not None and sighting.tools
        step, agent = (sighting.step, sighting.agent) if sighting is not None else ("", "")
        kind = (record.route, record.client.tenant, tools, step, agent)
        group = self._kinds.get(kind) or self._kind(kind)
        now = group.now
        now[REQUESTS] += 1
        self.traffic.add(receipt.replica, ttft_s)
        if ttft_s is not None:
            self._first_token(group, ttft_s)
        if miss is None:
            now[UNTOLD] += 1
        else:
            tokens, misses = miss.prompt_tokens, miss.misses
            now[PROMPT] += tokens
            now[PREDICTED] += receipt.predicted_cached_tokens
            now[HIT] += miss.hit
            for reason, of_reason in misses.items():
                now[AT[reason]] += of_reason
            group.prompts.append(tokens)
            lengths = group.lengths
            lengths[bisect_left(GROUP_PROMPT_TOKENS, tokens)] += 1
            lengths[-1] += tokens
            if receipt.replay:
                now[REPLAY] += miss.hit
                now[REPLAYS] += 1
            elif not tokens or _UNSUPPORTED in misses:
                now[UNTOLD] += 1
            if miss.saved_ms:
                now[SAVED_MS] += miss.saved_ms
            if usage is not None and usage.verified:
                now[VERIFIED] += tokens
                now[VERIFIED_HIT] += miss.hit
                now[VERIFIED_PREDICTED] += receipt.predicted_cached_tokens
        if sighting is not None:
            if sighting.tool_calls:
                now[TOOL_CALLS] += sighting.tool_calls
            template = sighting.template
            if sighting.difference is not None:
                self._differs(sighting, sighting.difference, miss, end_s, record.client.tenant)
            if template:
                branch = self._branches.get(template) or self.branches.get_or_create(template)
                self._count_for_template(branch, miss, record.model)
                if miss is not None and _EVICTED in miss.misses:
                    self._count_evicted(template, branch, miss.misses[_EVICTED])

    def _first_token(self, group: Group, ttft_s: float) -> None:
        self._ttft[bisect_left(TTFT_S, ttft_s)] += 1
        group.ttfts_s.append(ttft_s)
        ttft = group.ttft
        ttft[bisect_left(GROUP_TTFT_S, ttft_s)] += 1
        ttft[-1] += ttft_s

    def _count_for_template(self, branch: Branch, miss: TokenBreakdown | None, model: str) -> None:
        sums, weight = branch.sums, self._weight
        branch.model = model
        sums[REQUESTS] += weight
        if miss is not None:
            sums[PROMPT] += miss.prompt_tokens * weight
            sums[HIT] += miss.hit * weight
            for reason, of_reason in miss.misses.items():
                sums[AT[reason]] += of_reason * weight

    def _count_evicted(self, template: int, branch: Branch, tokens: int) -> None:
        """Count tokens that were evicted while their template had a loss."""
        if not self.losses.templates.isdisjoint(self.branches.upwards(template)):
            branch.crowded_out += tokens * self._weight

    def _differs(
        self,
        sighting: PromptAnalysis,
        difference: Difference,
        miss: TokenBreakdown | None,
        end_s: float,
        tenant: str,
    ) -> None:
        lost, own = miss.misses.get(_DIVERGED, 0) if miss is not None else 0, not sighting.appended
        label = self._tenant(tenant)
        self.losses.add(sighting.template, difference, lost, self._weight, end_s, own=own, tenant=label)
        if miss is not None and miss.prompt_tokens:
            self.differences[difference.change] += 1

    def _kind(self, kind: Kind) -> Group:
        """Return the group of a kind, found by its labels once and remembered for a while: any client can choose names
        of steps."""
        if len(self._kinds) >= KINDS_MAX:
            self._kinds.clear()
        group = self._kinds[kind] = self.groups.get_or_create(*kind)
        return group

    def settle(self, now_s: float) -> None:
        """Add the current step to all sums, and move on to `now_s`."""
        weight = self._weight
        groups = list[list[float]]()
        for label, group in self.groups.all.items():
            if group.now[REQUESTS]:
                groups.append(sums := group.settle(weight))
                self.traffic.add_tenant(label.tenant, sums[REQUESTS], sums[PROMPT] - sums[HIT])
                for at, cases in self._cases.items():
                    if sums[at]:
                        note_case(cases, label.tenant, now_s)
        if groups:
            now: list[float] = list(map(sum, zip(*groups, strict=True)))
            step = self.timeline.now
            step.sums = list(map(add, step.sums, now))
            self.totals = list(map(add, self.totals, now))
            self._hour = [hour + value * weight for hour, value in zip(self._hour, now, strict=True)]
            told = now[REQUESTS] - now[UNTOLD]
            self.diversity.add(told - now[REPLAYS], told, now_s)
        self.timeline.move(now_s)
        self.traffic.move(now_s)
        self._end_s, self._ttft = self.timeline.end_s, self.timeline.now.ttft
        factor = self.fading.move(now_s)
        self._weight = self.fading.weight
        if factor < 1:
            self._hour = [value * factor for value in self._hour]
            for faded in (self.branches, self.groups, self.losses):
                faded.fade(factor)

    def know(self, templates: Iterable[Template]) -> None:
        """Store the definitions of templates."""
        self.branches.know(templates)

    # -- pages ---------------------------------------------------------------------------------------------------

    def totals_row(self) -> dict[str, Any]:
        """Return totals since the router began. Times and diversity are of the last ten minutes. Call `settle`
        first."""
        totals = self.totals
        p50_s, p90_s, p99_s = self.timeline.ttft_s(0.5, 0.9, 0.99)
        return {
            "requests": round(totals[REQUESTS]),
            "prompt_tokens": round(totals[PROMPT]),
            "predicted_tokens": round(totals[PREDICTED]),
            "hit_tokens": round(totals[HIT]),
            "genuine_tokens": round(totals[HIT] - totals[REPLAY]),
            "replay_tokens": round(totals[REPLAY]),
            **verified_of(totals),
            "diversity": self.timeline.diversity(),
            "misses": misses_of(totals),
            "ttft_p50_s": p50_s,
            "ttft_p90_s": p90_s,
            "ttft_p99_s": p99_s,
        }

    def advice(self, rows_max: int, *, ms_per_token: Callable[[float], float], kv_tokens: int) -> list[dict[str, Any]]:
        """Return advice, most costly first. Call `settle` first.

        - `ms_per_token(context)`: the fleet's price of prefill after a context of this number of tokens.
        - `kv_tokens`: its KV capacity.
        """
        weight = self.fading.weight
        hour = [value / weight for value in self._hour]
        middle = hour[PROMPT] / hour[REQUESTS] / 2 if hour[REQUESTS] > 0 else 0.0
        branches, fading = self.branches, self.fading
        situation = AdviceContext(
            sums=hour,
            weight=weight,
            per_hour=fading.per_hour if fading.age_s >= HOURLY_S_MIN else None,
            span=f"in the last {span(fading.age_s)}",
            ms_per_token=ms_per_token(middle),
            kv_tokens=kv_tokens,
            branches=branches,
            cases=self._cases,
        )
        return advise(self.losses.all.values(), situation, rows_max, self.shown, fading.now_s)
