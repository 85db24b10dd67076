"""Two routers in front of the same replicas: what dashboards show of both together, by Prometheus' own tool."""

from __future__ import annotations

from pathlib import Path

import yaml

from deploy.observability.dashboards import BOARDS
from deploy.observability.scene import filled
from tests.k8s.tools import run

A, B = "10.0.0.8:8000", "10.0.0.9:8000"
ONE, TWO = "http://10.0.0.1:8000", "http://10.0.0.2:8000"
MINUTES = 10


def series(name: str, router: str, replica: str, values: str, **labels: str) -> dict[str, str]:
    """What one router says of one replica."""
    said = {"job": "warmroute", "namespace": "llm", "instance": router, "replica": replica} | labels
    written = ",".join(f'{label}="{value}"' for label, value in said.items())
    return {"series": f"{name}{{{written}}}", "values": values}


def states(name: str, label: str, known: dict[tuple[str, str], str], *values: str) -> list[dict[str, str]]:
    """One series a state, 1 at the one that a router sees a replica in."""
    return [
        series(name, router, replica, f"{int(now == value)}x{MINUTES}", **{label: value})
        for (router, replica), now in known.items()
        for value in values
    ]


def gauges(name: str, known: dict[tuple[str, str], float]) -> list[dict[str, str]]:
    """A figure of each router about each replica."""
    return [series(name, router, replica, f"{value}x{MINUTES}") for (router, replica), value in known.items()]


def growing(name: str, known: dict[tuple[str, str], float]) -> list[dict[str, str]]:
    """A counter that grows by so much a second."""
    return [series(name, router, replica, f"0+{60 * by}x{MINUTES}") for (router, replica), by in known.items()]


SCENE = [
    *states(
        "warmroute_replica_grade",
        "grade",
        {(A, ONE): "exact", (B, ONE): "catching-up", (A, TWO): "exact", (B, TWO): "exact"},
        *("exact", "catching-up", "estimated"),
    ),
    *states(
        "warmroute_replica_breaker",
        "state",
        {(A, ONE): "open", (B, ONE): "half-open", (A, TWO): "closed", (B, TWO): "resting"},
        *("open", "half-open", "resting", "closed"),
    ),
    *gauges("warmroute_replica_ready", {(A, ONE): 1, (B, ONE): 0, (A, TWO): 1, (B, TWO): 1}),
    *gauges("warmroute_replica_in_flight", {(A, ONE): 3, (B, ONE): 4, (A, TWO): 0, (B, TWO): 1}),
    *gauges("warmroute_replica_running", {(A, ONE): 7, (B, ONE): 7, (A, TWO): 1, (B, TWO): 1}),
    *gauges("warmroute_replica_share_ratio", {(A, ONE): 0.5, (B, ONE): 0.25, (A, TWO): 1, (B, TWO): 1}),
    *growing("warmroute_replica_event_batches_total", {(A, ONE): 5, (B, ONE): 5, (A, TWO): 2, (B, TWO): 0}),
    *growing("warmroute_replica_computed_tokens_total", {(A, ONE): 100, (B, ONE): 200, (A, TWO): 100, (B, TWO): 0}),
]
# By dashboard, panel and number of the query: labels and the figure.
SHOWN: dict[tuple[str, str, int], dict[str, float]] = {
    ("overview", "Replicas ready", 0): {"{}": 2},
    ("overview", "Knowledge of caches", 0): {
        '{grade="exact"}': 1.5,
        '{grade="catching-up"}': 0.5,
        '{grade="estimated"}': 0,
    },
    ("replicas", "Grade", 0): {f'{{replica="{ONE}"}}': 1, f'{{replica="{TWO}"}}': 2},
    ("replicas", "Breaker", 0): {f'{{replica="{ONE}"}}': 3, f'{{replica="{TWO}"}}': 1},
    ("replicas", "Ready", 0): {f'{{replica="{ONE}"}}': 1, f'{{replica="{TWO}"}}': 1},
    ("replicas", "Open requests", 0): {f'{{replica="{ONE}"}}': 7, f'{{replica="{TWO}"}}': 1},
    ("replicas", "Running and waiting, by the engine", 0): {f'{{replica="{ONE}"}}': 7, f'{{replica="{TWO}"}}': 1},
    ("replicas", "Our share", 0): {f'{{replica="{ONE}"}}': 0.75, f'{{replica="{TWO}"}}': 1},
    ("replicas", "Events", 0): {f'{{replica="{ONE}"}}': 5, f'{{replica="{TWO}"}}': 2},
    ("replicas", "Tokens computed", 0): {f'{{replica="{ONE}"}}': 300, f'{{replica="{TWO}"}}': 100},
    ("replicas", "Imbalance", 0): {"{}": 1.5},
}


def expression(board: str, title: str, number: int) -> str:
    """Of a panel, with windows that fit the scene's minutes."""
    (panel,) = (panel for row in BOARDS[board].rows for panel in row.panels if panel.title == title)
    return filled(panel.queries[number][0].replace("$__rate_interval", "5m"), 60)


def test_what_two_routers_say_is_one_figure(tmp_path: Path) -> None:
    """What each does is added up, what each knows is not counted twice, and two states never make a third."""
    checks = [
        {
            "expr": expression(*where),
            "eval_time": f"{MINUTES}m",
            "exp_samples": [{"labels": labels, "value": value} for labels, value in figures.items()],
        }
        for where, figures in SHOWN.items()
    ]
    scene = {"interval": "1m", "input_series": SCENE, "promql_expr_test": checks}
    file = tmp_path / "two-routers.yaml"
    file.write_text(yaml.safe_dump({"evaluation_interval": "1m", "tests": [scene]}), encoding="utf-8")
    done = run(["promtool", "test", "rules", file])
    assert done.returncode == 0, done.stdout + done.stderr


def test_states_have_a_name_each() -> None:
    """Whatever number an expression of states makes has a text and a colour on the dashboard."""
    for title, numbers in (("Grade", "012"), ("Breaker", "0123")):
        (panel,) = (panel for row in BOARDS["replicas"].rows for panel in row.panels if panel.title == title)
        assert {value for value, _, _ in panel.states} == {*numbers}
