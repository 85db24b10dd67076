"""What contributors run is one thing said once: make's targets, the hooks before a commit, CI and the templates."""

from __future__ import annotations

import ast
import json
import re
import subprocess
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parent.parent.parent
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")


def recipe(target: str) -> list[str]:
    """The commands of a target, with the virtual environment's folder spelled out."""
    found = re.search(rf"^{target}:.*\n((?:\t.*\n)+)", MAKEFILE, re.MULTILINE)
    assert found is not None
    return [line.strip().replace("$(BIN)", ".venv/bin") for line in found[1].splitlines()]


def test_help_lists_every_target() -> None:
    """`make help` has a line for each target that is meant to be typed, with what stands behind it."""
    done = subprocess.run(
        ["make", "--no-print-directory", "help"], cwd=ROOT, capture_output=True, text=True, timeout=30, check=True
    )
    listed = [line.split()[0] for line in done.stdout.splitlines()]
    phony = re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE)
    assert phony is not None
    assert sorted(listed) == sorted(phony[1].split())
    assert all(len(line.split()) > 1 for line in done.stdout.splitlines())


def test_hooks_are_the_checks_of_make() -> None:
    """The hooks before a commit are the commands of `make check`, in their order; one more checks its subject."""
    config = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    (local,) = config["repos"]
    assert local["repo"] == "local"
    *checks, subject = local["hooks"]
    assert [hook["entry"] for hook in checks] == recipe("check")
    assert all(hook["language"] == "system" and hook["pass_filenames"] is False for hook in checks)
    assert subject["stages"] == ["commit-msg"]
    assert subject["entry"].endswith("-m tests.house.commit_subject")


def test_templates_are_forms_that_github_shows() -> None:
    """Each template of an issue has a name, a description, and fields with labels and ids of their own."""
    for file in sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml")):
        form = yaml.safe_load(file.read_text(encoding="utf-8"))
        if file.name == "config.yml":
            assert all(link.keys() == {"name", "url", "about"} for link in form["contact_links"])
            continue
        assert form["name"]
        assert form["description"]
        fields = [field for field in form["body"] if field["type"] != "markdown"]
        assert all(field["attributes"]["label"] for field in fields)
        ids = [field["id"] for field in fields]
        assert len(set(ids)) == len(ids)


def test_the_pull_request_template_names_targets_that_are_there() -> None:
    """Commands in the template of a pull request are targets of make."""
    text = (ROOT / ".github" / "pull_request_template.md").read_text(encoding="utf-8")
    for target in re.findall(r"`make ([a-z-]+)`", text):
        assert re.search(rf"^{target}:", MAKEFILE, re.MULTILINE), target


def test_the_devcontainer_is_made_by_make() -> None:
    """The development container has the oldest Python that is supported, is set up by a target of make, and forwards
    the router's ports."""
    config = json.loads((ROOT / ".devcontainer" / "devcontainer.json").read_text(encoding="utf-8"))
    needed = re.search(r'requires-python = ">=([\d.]+)"', (ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert needed is not None
    assert f":{needed[1]}-" in config["image"]
    assert config["postCreateCommand"] == "make setup"
    assert config["forwardPorts"] == [8000, 8001]


def test_no_file_of_tests_is_too_long() -> None:
    """No file of tests has more than 400 lines: a longer one has two subjects."""
    lines = {path: path.read_bytes().count(b"\n") for path in (ROOT / "tests").rglob("*.py")}
    assert len(lines) > 200
    assert not {str(path.relative_to(ROOT)): count for path, count in lines.items() if count > 400}


def test_what_runs_on_native_code_alone_runs_there() -> None:
    """No test is left out both where the core's lines are counted before a merge and on native code."""
    long = 0
    for path in sorted((ROOT / "tests" / "core").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                marks = {ast.unparse(each).rpartition(".")[2] for each in node.decorator_list}
                long += "long" in marks
                assert "long" not in marks or marks.isdisjoint({"inside", "interpreted"}), (path.name, node.name)
    assert long > 0


def test_no_test_skips_itself_on_native_code() -> None:
    """A test that cannot run on native code is marked, so that `.ci/run` has it among those that run in Python: one
    that skips itself there would run nowhere."""
    looked = 0
    for path in sorted((ROOT / "tests").rglob("*.py")):
        if "COMPILED" not in (text := path.read_text(encoding="utf-8")) or path.is_relative_to(ROOT / "tests" / "core"):
            continue
        looked += 1
        for node in ast.walk(ast.parse(text)):
            asks = isinstance(node, ast.If) and "COMPILED" in ast.unparse(node.test)
            marks = isinstance(node, ast.Call) and ast.unparse(node.func).endswith("skipif")
            assert not (asks and "pytest.skip" in ast.unparse(node)), path
            assert not (marks and "COMPILED" in ast.unparse(node)), path
    assert looked > 3
