"""Dashboards, rules and the runbook, as far as files go; tests/k8s tries them on a router and a real Prometheus."""

from __future__ import annotations

import json
import re
from itertools import combinations
from typing import Any

import pytest
import yaml

from deploy.observability.__main__ import DASHBOARDS, REPO, differing, main
from deploy.observability.dashboards import BOARDS
from deploy.observability.rules import ALERTS, recorded
from router.config.schema import field_keys

RUNBOOK = (REPO / "docs" / "operate" / "runbook.md").read_text(encoding="utf-8")
UNIT_TESTS = REPO / "deploy" / "prometheus" / "tests" / "alerts.yaml"


def board(name: str) -> dict[str, Any]:
    """A dashboard as it is in the repository."""
    made: dict[str, Any] = json.loads((REPO / DASHBOARDS / f"{name}.json").read_text(encoding="utf-8"))
    return made


def panels(name: str) -> list[dict[str, Any]]:
    """Its panels, without the titles of sections."""
    return [panel for panel in board(name)["panels"] if panel["type"] != "row"]


def test_files_are_what_the_command_makes(capsys: pytest.CaptureFixture[str]) -> None:
    """Dashboards and rules are those of `python -m deploy.observability`."""
    assert not differing(), "run: python -m deploy.observability"
    assert main(["--check"]) == 0
    assert not capsys.readouterr().out
    assert {file.stem for file in (REPO / DASHBOARDS).glob("*.json")} == BOARDS.keys()


@pytest.mark.parametrize("name", BOARDS)
def test_every_panel_says_what_it_means(name: str) -> None:
    """A title, a description that is a sentence or more, a unit, the chosen data source, and queries."""
    for panel in panels(name):
        assert panel["title"]
        assert len(panel["description"].split()) >= 3, panel["title"]
        assert panel["description"].endswith("."), panel["title"]
        assert panel["fieldConfig"]["defaults"]["unit"]
        assert panel["datasource"]["uid"] == "${datasource}"
        assert panel["targets"]
        assert all(target["datasource"]["uid"] == "${datasource}" for target in panel["targets"])


@pytest.mark.parametrize("name", BOARDS)
def test_panels_stand_side_by_side(name: str) -> None:
    """Ids are unique, nothing overlaps, and nothing is wider than the page."""
    all_panels = board(name)["panels"]
    assert len({panel["id"] for panel in all_panels}) == len(all_panels)
    places = [panel["gridPos"] for panel in all_panels]
    assert all(place["x"] + place["w"] <= 24 for place in places)
    for one, other in combinations(places, 2):
        apart = [one[at] + one[size] <= other[at] or other[at] + other[size] <= one[at] for at, size in ("xw", "yh")]
        assert any(apart), (one, other)


@pytest.mark.parametrize("name", BOARDS)
def test_variables_and_links(name: str) -> None:
    """Every variable that an expression asks for is there, and the other dashboards and the router's own page are a
    click away."""
    made = board(name)
    known = {variable["name"] for variable in made["templating"]["list"]}
    asked = set(re.findall(r"\$(\w+)", json.dumps(made["panels"]))) - {"__rate_interval", "__range"}
    assert asked - {"1"} <= known  # $1 is a group of a label_replace
    assert {"datasource", "job", "namespace"} <= known
    uids = {each.uid for each in BOARDS.values()}
    links = {link["url"].removeprefix("/d/") for link in made["links"]}
    assert links == {"${router_url}/dashboard"} | uids - {made["uid"]}


def test_the_overview_begins_with_the_hit_rate() -> None:
    """Whether routing pays is the first figure, with how much of it is verified beside it, and the first curve, beside
    what was predicted and what engines told."""
    first, *others = panels("overview")
    assert "hit rate" in first["title"].lower()
    curves = next(panel for panel in others if panel["type"] == "timeseries")
    assert others[0]["title"] == "Verified"
    legends = [target["legendFormat"] for target in curves["targets"]]
    assert legends == ["hit rate", "predicted", "actual", "counted"]


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_every_alert_has_its_section(alert: Any) -> None:
    """Its runbook link leads to a section of its name, which says what it means, what to look at, and what to do."""
    headings = re.findall(r"^## (\w+)$", RUNBOOK, re.MULTILINE)
    assert headings.count(alert.name) == 1
    assert alert.rule["annotations"]["runbook_url"].endswith(f":8001/runbook#{alert.name.lower()}")
    section = RUNBOOK.split(f"## {alert.name}\n")[1].split("\n## ")[0]
    for part in ("**Means:**", "**Look at:**", "**Do:**"):
        assert section.count(part) == 1, part


def test_settings_that_the_runbook_names() -> None:
    """Whoever follows the runbook finds the settings that it speaks of."""
    sections = {key.split(".")[0] for key in field_keys()}
    named = {name for name in re.findall(r"`(\w+\.\w+)", RUNBOOK) if name.split(".")[0] in sections}
    assert named
    assert named <= field_keys().keys()


def test_no_section_is_left_over() -> None:
    """The runbook explains no alert that is none."""
    headings = re.findall(r"^## (Warmroute\w+)$", RUNBOOK, re.MULTILINE)
    assert headings == [alert.name for alert in ALERTS]


@pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert.name)
def test_every_alert_has_its_unit_tests(alert: Any) -> None:
    """One in which it fires, and one in which it does not."""
    fires = silent = 0
    for case in yaml.safe_load(UNIT_TESTS.read_text(encoding="utf-8"))["tests"]:
        for check in case["promql_expr_test"]:
            if f'"{alert.name}"' in check["expr"]:
                fires += bool(check["exp_samples"])
                silent += not check["exp_samples"]
    assert fires
    assert silent


def test_recording_rules_are_used_or_documented() -> None:
    """Every recorded name is one that an alert asks for, or that the runbook explains."""
    text = RUNBOOK + "".join(alert.expr for alert in ALERTS)
    for name in recorded():
        assert name in text, name
