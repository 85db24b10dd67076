"""Checks the subject of a commit message: `python -m tests.house.commit_subject FILE`, as a hook runs it.

A subject begins with a verb in the imperative ("Keep", "Read") and has at most 72 characters and no full stop. An empty
line separates it from the body. Merges, reverts and fixups are made by git and pass.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

SUBJECT_CHARS_MAX = 72
BY_GIT = ("Merge ", "Revert ", "fixup! ", "squash! ", "amend! ")


def faults(message: str) -> list[str]:
    """Reasons to refuse the message; empty if it is fine. Lines that begin with # are comments of git."""
    lines = [line.rstrip() for line in message.splitlines() if not line.startswith("#")]
    subject = lines[0] if lines else ""
    if subject.startswith(BY_GIT):
        return []
    found: list[str] = []
    verb = subject.partition(" ")[0]
    if not verb[:1].isupper() or not verb.isalpha() or verb == subject:
        found.append("a subject begins with a capitalized verb, and says what is done to which part")
    elif verb.endswith(("ed", "ing", "s")) and not verb.endswith(("eed", "ess", "ass")):
        found.append(f'{verb!r} is no imperative: write "Keep", not "Kept", "Keeps" or "Keeping"')
    if len(subject) > SUBJECT_CHARS_MAX:
        found.append(f"the subject has {len(subject)} characters, {SUBJECT_CHARS_MAX} at most")
    if subject.endswith("."):
        found.append("a subject has no full stop")
    if len(lines) > 1 and lines[1]:
        found.append("an empty line separates the subject from the body")
    return found


def main(argv: Sequence[str]) -> int:
    """Print the faults of the message in a file, one a line; 1 if there are any."""
    found = faults(Path(argv[0]).read_text(encoding="utf-8"))
    for fault in found:
        print(f"commit message: {fault}", file=sys.stderr)
    return bool(found)


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
