"""Flags of other routers: each is answered with what serves its purpose here."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from router.cli.config_loader import field_keys
from router.config.other_routers import FLAGS

ADOPT = Path("docs/guide/adopt.md")


def test_every_flag_of_the_page_has_a_hint() -> None:
    """Whoever copies a command line may not have read it."""
    table = ADOPT.read_text(encoding="utf-8").split("## SMG and sglang-router")[1].split("\n## ")[0]
    left = [row.split("|")[1] for row in table.splitlines() if row.startswith("| `--")]
    flags = {flag for cell in left for flag in re.findall(r"--[a-z][a-z-]*[a-z]", cell)} - {"--policy"}
    assert len(flags) >= 8
    assert flags <= FLAGS.keys() | {"--balance"}


@pytest.mark.parametrize("flag", FLAGS)
def test_hints_name_settings_that_exist(flag: str) -> None:
    """A hint that leads to another error is worse than none."""
    named = re.findall(r"\b[a-z0-9]+\.[a-z_]+\b", FLAGS[flag])
    assert set(named) <= set(field_keys())
    assert named or "--" in FLAGS[flag] or FLAGS[flag].startswith("not needed: ")
