"""Parts of rules: an alert, sums per second, ratios, and the labels by which series are grouped."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# The page that each router serves, through the port-forward of its first lines; the chart uses another address.
RUNBOOK = "http://127.0.0.1:8001/runbook"
BY = "job, namespace"
BY_MODEL = f"{BY}, model"
PAGE, TICKET = "critical", "warning"


@dataclass(frozen=True)
class Alert:
    """One alert. Times as Prometheus writes them."""

    name: str
    expr: str
    after: str  # minimum time for which it holds
    severity: str
    summary: str
    description: str

    @property
    def rule(self) -> dict[str, Any]:
        """The alert as a rule file has it."""
        return {
            "alert": self.name,
            "expr": self.expr,
            "for": self.after,
            "labels": {"severity": self.severity},
            "annotations": {
                "summary": self.summary,
                "description": self.description,
                "runbook_url": f"{RUNBOOK}#{self.name.lower()}",
            },
        }


def rate(metric: str, window: str, labels: str = "", by: str = BY) -> str:
    """Return the metric's sum per second."""
    return f"sum by ({by}) (rate({metric}{labels}[{window}]))"


def ratio(part: str, whole: str) -> str:
    """Return a ratio without a value if the whole is zero."""
    return f"{part} / ({whole} > 0)"
