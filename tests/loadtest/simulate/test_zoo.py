"""Engines of the zoo in virtual time: what their pages say otherwise changes neither predictions nor shares."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from loadtest.docgen.markdown import PageError, rows_of
from loadtest.docgen.zoo import figures_block
from loadtest.fake_engine.zoo.member import Label, Member
from loadtest.fake_engine.zoo.members import HYBRID, MEMBERS
from loadtest.simulate.command import main
from loadtest.simulate.results.zoo import HEADS, LOADS, PREDICTED, SHARE, ZooJob, lines, rows_of_member

REQUESTS = 150


def missed(member: Member) -> set[str]:
    """Cases of a member, at a small size, that are not as they must be."""
    found = rows_of_member(member, ZooJob(member.name, "below", (1,), REQUESTS))
    return {row.case or "" for row in found if not row.ok}


@pytest.mark.parametrize("name", ["vllm-hybrid", "vllm-dcp", "vllm-deferred", "sglang-pp"])
def test_what_a_page_says_otherwise_changes_nothing(name: str) -> None:
    """Hits foretold are those of a right page, and every replica gets its part."""
    assert not missed(MEMBERS[name])


def test_a_page_that_cannot_be_read_rightly_is_seen() -> None:
    """The same figures of pages without what tells: a hybrid's label alone, and deferred requests without a reason."""
    small = Label(HYBRID.block_tokens, HYBRID.blocks, HYBRID.tokens)
    assert PREDICTED in missed(Member("hybrid", "", label=small, earlier=True))
    assert SHARE in missed(replace(MEMBERS["vllm-deferred"], earlier=True))


def test_the_command_writes_judges_and_renders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A table in the terminal, rows as JSON, and their block for the documents once all members are there."""
    file = tmp_path / "zoo.json"
    flags = ["--zoo", "sglang", "--load", "below", "--seed", "1", "--requests", str(REQUESTS), "--jobs", "1"]
    assert main([*flags, "--check", "--json", str(file)]) == 0
    assert "sglang" in capsys.readouterr().out
    document = json.loads(file.read_text())
    assert all(row["ok"] for row in document["rows"])
    rows = rows_of(document)
    rows[0].ok = False
    (line,) = lines(rows)
    assert (len(line), line[-1]) == (len(HEADS), "missed")
    with pytest.raises(PageError, match="vllm-dense"):
        figures_block(document)
    document["rows"] = [
        row | {"workload": name, "load_name": load} for row in document["rows"] for name in MEMBERS for load in LOADS
    ]
    block = figures_block(document)
    assert all(f"`{name}`" in block for name in MEMBERS)
    with pytest.raises(PageError):
        figures_block({"rows": []})
    assert main(["--zoo", "--policy", "warm"]) == 2
