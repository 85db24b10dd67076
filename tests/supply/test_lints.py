"""Security linters find nothing that has no reason beside it: our Python, our workflows, secrets."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.supply.install import REPO
from tests.supply.tool import tool

WORKFLOWS = sorted((REPO / ".github" / "workflows").glob("*.yml"))


def tracked() -> list[str]:
    """Files that are, or are about to be, in the repository."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    done = subprocess.run(listed, cwd=REPO, capture_output=True, text=True, timeout=60, check=True)
    return [name for name in done.stdout.splitlines() if (REPO / name).is_file()]


@pytest.mark.promise(
    "No secret is in the repository, and each exception of a security linter has its reason.", "supply"
)
def test_bandit_finds_nothing_without_a_reason() -> None:
    """What bandit finds in the router, its instruments and deploy/ is what ruff, whose rules have the same numbers, was
    told a reason for in the very line."""
    done = tool("bandit", "-q", "-c", "pyproject.toml", "-f", "json", "-r", "router", "loadtest", "deploy")
    report: dict[str, Any] = json.loads(done.stdout)
    assert report["errors"] == []
    assert report["metrics"]["_totals"]["loc"] > 10_000
    unreasoned = []
    for found in report["results"]:
        line = (REPO / found["filename"]).read_text(encoding="utf-8").splitlines()[found["line_number"] - 1]
        if f"noqa: S{found['test_id'][1:]}" not in line:
            unreasoned.append(f"{found['filename']}:{found['line_number']}: {found['test_id']} {found['issue_text']}")
    assert unreasoned == []


@pytest.mark.promise(
    "No secret is in the repository, and each exception of a security linter has its reason.", "supply"
)
def test_no_secret_is_in_the_repository(tmp_path: Path) -> None:
    """gitleaks finds no secret in any file of the repository, and does find one that is put beside them."""
    for name in tracked():
        target = tmp_path / "clean" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(REPO / name, target)
    done = tool("gitleaks", "dir", "--no-banner", "--redact", tmp_path / "clean")
    assert done.returncode == 0, done.stderr
    key = "ghp_" + "x7Kq2Lw9Zr4Tn8Vb3Mc6Yp1Hd5Js0Fg2AeXu"
    (tmp_path / "clean" / "settings.env").write_text(f"GITHUB_TOKEN={key}\n", encoding="utf-8")
    assert tool("gitleaks", "dir", "--no-banner", "--redact", tmp_path / "clean").returncode == 1


@pytest.mark.promise("Workflows pin actions by commit, and each job has only the rights that it needs.", "supply")
def test_zizmor_finds_nothing() -> None:
    """No finding in the workflows, by the strictest of its personas."""
    done = tool("zizmor", "--offline", "--persona", "pedantic", ".github")
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize(
    ("schema", "paths"), [("workflows", WORKFLOWS), ("dependabot", [REPO / ".github/dependabot.yml"])]
)
def test_workflows_follow_their_schema(schema: str, paths: list[Path]) -> None:
    """Every key of the workflows is one that GitHub knows."""
    name = {"workflows": "vendor.github-workflows", "dependabot": "vendor.dependabot"}[schema]
    done = tool("check-jsonschema", "--builtin-schema", name, *paths)
    assert done.returncode == 0, done.stdout


@pytest.mark.promise("Workflows pin actions by commit, and each job has only the rights that it needs.", "supply")
@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_actions_are_pinned_by_commit(path: Path) -> None:
    """Each action is named by the commit that was looked at, with its version beside it, the same in all places."""
    uses = re.findall(r"uses: (\S+)(.*)", path.read_text(encoding="utf-8"))
    assert uses
    for action, comment in uses:
        assert re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40}", action), action
        assert re.fullmatch(r" # v\d+\.\d+\.\d+", comment), action
    assert len({action.partition("@")[0] for action, _ in uses}) == len(set(uses))


@pytest.mark.promise("Workflows pin actions by commit, and each job has only the rights that it needs.", "supply")
@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.name)
def test_jobs_may_only_what_they_need(path: Path) -> None:
    """No right for a whole workflow, and no job that runs for ever."""
    workflow = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert workflow["permissions"] == {}
    for name, job in workflow["jobs"].items():
        assert 0 < job["timeout-minutes"] <= 60, name
        writes = {right for right, level in job.get("permissions", {}).items() if level == "write"}
        assert path.name == "release.yml" or not writes, name


def test_workflows_run_what_is_there() -> None:
    """Stages and targets that workflows call exist, as do the files they read."""
    stages = set(re.findall(r"^    (\w+)\)", (REPO / ".ci" / "run").read_text(encoding="utf-8"), re.MULTILINE))
    targets = set(re.findall(r"^(\w[\w-]*):", (REPO / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    text = "\n".join(path.read_text(encoding="utf-8") for path in WORKFLOWS)
    called = {word for line in re.findall(r"\.ci/run ([a-z0-9 ]+)$", text, re.MULTILINE) for word in line.split()}
    called |= set(
        yaml.safe_load(WORKFLOWS[0].read_text(encoding="utf-8"))["jobs"]["delivery"]["strategy"]["matrix"]["stage"]
    )
    assert called
    assert called <= stages
    made = {
        word for line in re.findall(r"run: make ([a-z ]+?)(?: ARGS=\S+)?$", text, re.MULTILINE) for word in line.split()
    }
    assert made == {"dist", "sbom", "wheels"}
    assert made <= targets
    assert "deploy/Dockerfile" in text
