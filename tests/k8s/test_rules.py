"""Recording rules and alerts, by Prometheus' own tools."""

from __future__ import annotations

from pathlib import Path

import yaml

from deploy.observability.rules import ALERTS, recorded
from tests.house.documents import code_blocks, page
from tests.k8s.tools import REPO, run

RULES = REPO / "helm" / "warmroute" / "files" / "rules.yaml"
UNIT_TESTS = REPO / "deploy" / "prometheus" / "tests" / "alerts.yaml"


def test_rules_are_clean() -> None:
    """`promtool check rules` has nothing to say, and sees every rule."""
    done = run(["promtool", "check", "rules", "--lint-fatal", RULES])
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(ALERTS) + len(recorded())} rules found" in done.stdout


def test_rules_for_names_of_other_systems_are_clean(tmp_path: Path) -> None:
    """So are the recording rules that the documents show for endpoint pickers' names."""
    (text,) = [each for each in code_blocks(page("docs/reference/names.md"), "yml") if each.startswith("groups:")]
    file = tmp_path / "names.yaml"
    file.write_text(text, encoding="utf-8")
    done = run(["promtool", "check", "rules", "--lint-fatal", file])
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_alert_fires_when_it_should_and_only_then() -> None:
    """The unit tests of alerts pass."""
    done = run(["promtool", "test", "rules", UNIT_TESTS])
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_unit_tests_can_fail(tmp_path: Path) -> None:
    """An alert whose threshold is out of reach is found out by the unit tests of that alert."""
    unit_tests = yaml.safe_load(UNIT_TESTS.read_text(encoding="utf-8"))
    unit_tests["rule_files"] = ["rules.yaml"]
    unit_tests["tests"] = [each for each in unit_tests["tests"] if each["name"].startswith("WarmrouteBreakerOpen")]
    wrong = RULES.read_text(encoding="utf-8").replace('{state="open"}[3m]) == 1', '{state="open"}[3m]) == 2')
    (tmp_path / "rules.yaml").write_text(wrong, encoding="utf-8")
    (tmp_path / UNIT_TESTS.name).write_text(yaml.safe_dump(unit_tests), encoding="utf-8")
    done = run(["promtool", "test", "rules", tmp_path / UNIT_TESTS.name])
    assert done.returncode == 1
    assert "WarmrouteBreakerOpen" in done.stdout + done.stderr
