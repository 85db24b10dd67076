"""Groups of requests (core/insights/ledger/groups.py) as counters, a gauge and histograms, made at a scrape."""

from __future__ import annotations

from collections.abc import Mapping

from router.core.insights.ledger.decaying_sums import HIT, PROMPT, REQUESTS, TOOL_CALLS
from router.core.insights.ledger.groups import GROUP_PROMPT_TOKENS, GROUP_TTFT_S, Group, Label
from router.former_names import UNTIL
from router.telemetry.series import Counter, Gauge, Histogram

LABELS = ("route", "tenant", "tools", "step", "agent")


def make_group_families(groups: Mapping[Label, Group]) -> list[Counter | Histogram]:
    """Return all families of groups of requests. Each is present even without a group."""
    requests = Counter(
        "group_requests", "Requests placed, by group: route, tenant, tools, agent step and kind of agent.", *LABELS
    )
    prompt = Counter(
        "group_prompt_tokens", "Prompt tokens by group: by the engine's count, else as predicted.", *LABELS
    )
    hit = Counter(
        "group_hit_tokens", "Cached prompt tokens by group: by the engine's count, else as predicted.", *LABELS
    )
    calls = Counter("group_tool_calls", "Tool calls in the history of prompts, by group.", *LABELS)
    text = f"Median number of prompt tokens of the group's last requests; until {UNTIL}."
    p50 = Gauge("group_prompt_tokens_p50", text, *LABELS)
    lengths = Histogram(
        "group_prompt_length_tokens", "Prompt tokens per request, by group.", GROUP_PROMPT_TOKENS, *LABELS
    )
    ttft = Histogram("group_ttft_seconds", "Time to first token, by group.", GROUP_TTFT_S, *LABELS)
    for label, group in groups.items():
        labels = (label.route, label.tenant, "yes" if label.tools else "no", label.step, label.agent)
        for counter, at in ((requests, REQUESTS), (prompt, PROMPT), (hit, HIT), (calls, TOOL_CALLS)):
            counter.series[labels] = [group.sums[at]]
        median = group.prompt_tokens_p50
        if median is not None:
            p50.series[labels] = [median]
        lengths.series[labels] = group.lengths
        ttft.series[labels] = group.ttft
    return [requests, prompt, hit, calls, lengths, p50, ttft]
