"""Disaggregated prefill has one seam: few files outside of its packages name it."""

from __future__ import annotations

import re
from pathlib import Path

ROUTER = Path(__file__).resolve().parents[2] / "router"
PACKAGES = ("core/disagg/", "proxy/disagg_calls/", "engines/disagg_probes/")
MENTION = re.compile(
    r"[Dd]isagg|KvConnector|kv_connector|PrefillStage|\.leg\b|\blegs?\b|[Pp]refiller|finish_prefill|may_split|unsplit"
    r"|stage_only|takes_whole|pairs_to_warm|pair_(warmed|broke|counts|failure)|prefill_replica|\bRole\."
)
"""Names of disaggregated prefill in code, comments and messages."""
FILES_MAX = 44
"""Files outside of PACKAGES with a mention. This number may only fall; the goal is 8."""


def test_few_files_mention_disaggregated_prefill() -> None:
    """Files outside of its packages are no more than before."""
    found = []
    for path in sorted(ROUTER.rglob("*.py")):
        name = path.relative_to(ROUTER).as_posix()
        if not name.startswith(PACKAGES) and MENTION.search(path.read_text(encoding="utf-8")):
            found.append(name)
    assert len(found) == FILES_MAX, f"{len(found)} files: {found}"
