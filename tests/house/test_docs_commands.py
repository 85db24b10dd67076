"""Commands, links and figures in the documents are real."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from loadtest import __main__
from loadtest.faults import command as faults
from loadtest.replay import command as replay
from loadtest.replay import demo
from loadtest.sim_vs_http import command as agree
from loadtest.simulate import options as simulate_options
from loadtest.suite import command as evidence
from router.cli import main as command
from router.config.schema import field_keys
from tests.house.documents import ROOT, commands


def test_commands_parse(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Every `warmroute` and `python -m loadtest` command in the documents is one that the program accepts."""
    monkeypatch.chdir(tmp_path)
    targets = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    seen = 0
    for _, words in commands():
        if words[:1] == ["warmroute"] and words[1:2] == ["demo"]:
            demo._parser().parse_args(words[2:])
        elif words[:1] == ["warmroute"] and words[1:2] == ["serve"]:
            options = command._parser().parse_args(words[1:])
            assert {key.partition("=")[0] for key in options.set} <= field_keys().keys()
        elif words[:1] == ["warmroute"]:
            command._parser().parse_args(words[1:])
        elif words[:3] == ["python", "-m", "loadtest"]:
            assert words[3] in __main__.INSTRUMENTS
            if words[3] == "replay":
                replay._parser().parse_args(words[4:])
            elif words[3] == "simulate":
                simulate_options.parser().parse_args(words[4:])
            elif words[3] == "agree":
                agree._parser().parse_args(words[4:])
            elif words[3] == "faults":
                faults.parser().parse_args(words[4:])
            elif words[3] == "evidence":
                evidence.parser().parse_args(words[4:])
        elif words[:1] == ["make"]:
            assert {word for word in words[1:] if "=" not in word} <= targets, words
        else:
            continue
        seen += 1
    assert seen >= 10


def test_ci_asks_nothing_of_the_clock() -> None:
    """No stage judges a time, and a stage that is not there is refused with the names of those that are."""
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    commands_ = [line for line in script.splitlines() if re.search(r"\brun \w+ ", line)]
    assert not [line for line in commands_ if re.search(r"--check|--slack|evidence|figures", line)]
    assert all("--counts" in line for line in commands_ if "loadtest faults" in line)
    done = subprocess.run([ROOT / ".ci" / "run", "nothing"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    stages = done.stderr.partition(": ")[2].strip().split(", ")
    assert {"check", "test", "coverage", "faults", "engines"} <= set(stages)
    assert all(re.search(rf"^    {name}\)", script, re.MULTILINE) for name in stages)
