"""Serving stacks with pods that are recognized by their labels, without `discovery.selector`. Without I/O.

Each stack has a set of labels that its charts or controllers set on engines' pods only, and the port that its own
router or gateway uses. The source of labels and port is named with each stack.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from router.core.types.disagg_types import Role

ROLE = "llm-d.ai/role"  # label of llm-d's and KServe's pods
OWN_ROLE = "warmroute.io/role"  # has priority over ROLE
# label of a rollout: its prefill and decode pods form pairs only with each other
REVISION = "disaggregatedset.x-k8s.io/revision"
ROLES = {
    "prefill": Role.PREFILL,
    "decode": Role.DECODE,
    "encode-prefill": Role.PREFILL,
    "prefill-decode": Role.BOTH,
    "encode-prefill-decode": Role.BOTH,
    "both": Role.BOTH,
}
"""Values of these labels (llm-d-router, pkg/epp/framework/plugins/scheduling/filter/bylabel/roles.go). A pod with
another value has no role, so it takes both stages."""
WORKER_INDEX = "leaderworkerset.sigs.k8s.io/worker-index"


@dataclass(frozen=True, slots=True)
class Stack:
    """A serving stack: labels that all of its engines' pods have, and the engines' port by number or name."""

    name: str
    labels: Mapping[str, str]  # a value of "" stands for any value
    port: str = ""  # "": the rule for pods that a selector finds


STACKS = (
    # helm/templates/_helpers.tpl (chart.engineCommonLabels) and deployment-vllm-multi.yaml, a6c01db of 2026-08-05:
    # three ports, of which one is the engine's.
    Stack("production-stack", {"app.kubernetes.io/component": "serving-engine", "model": ""}, "container-port"),
    # config/llmisvcconfig (selector and targetPorts of the InferencePool), aaac4e2 of 2026-08-21. With separate prefill
    # pods, a sidecar has port 8000 and the engine 8001.
    Stack(
        "kserve",
        {"app.kubernetes.io/part-of": "llminferenceservice", "kserve.io/component": "workload"},
        "8000",
    ),
    # modelServers.matchLabels and targetPorts of llm-d's InferencePool, by the current and the older label.
    Stack("llm-d", {"llm-d.ai/inference-serving": "true"}, "8000"),
    Stack("llm-d", {"llm-d.ai/inferenceServing": "true"}, "8000"),
    # Labels of api/leaderworkerset/v1, 060ab4d of 2026-08-21. Only leaders serve, on the one port that they declare.
    Stack("leaderworkerset", {"leaderworkerset.sigs.k8s.io/name": "", WORKER_INDEX: "0"}),
)


def role_of(labels: Mapping[str, str]) -> Role:
    """Return the role of a pod with these labels: the prefill stage, the decode stage or both."""
    return ROLES.get(labels.get(OWN_ROLE) or labels.get(ROLE, ""), Role.BOTH)


def stack_of(labels: Mapping[str, str], *, split: bool = False) -> Stack | None:
    """Return the first stack that has all of its labels among these; None for an unknown stack. Pods that only prefill
    for other engines have no stack unless requests are `split`."""
    if not split and ROLES.get(labels.get(ROLE, "")) is Role.PREFILL:
        return None
    return next((stack for stack in STACKS if _has(labels, stack.labels)), None)


def is_worker_only(labels: Mapping[str, str]) -> bool:
    """True if the pod is a worker of a group with a leader that serves for it. A missing port is then no mistake."""
    return labels.get(WORKER_INDEX, "0") != "0"


def _has(labels: Mapping[str, str], wanted: Mapping[str, str]) -> bool:
    return all(key in labels and value in ("", labels[key]) for key, value in wanted.items())
