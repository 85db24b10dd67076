"""Renames the tree at --root by the map; without --write it says what it would do."""

from __future__ import annotations

import argparse
import subprocess
import sys
from collections import Counter
from pathlib import Path

from deploy.renaming.edits import apply_edits
from deploy.renaming.lists import plan_lists, plan_parsers
from deploy.renaming.members import MemberPlan
from deploy.renaming.naming import plan_names
from deploy.renaming.table import MAP, Table, Tree, read_table, read_tree
from deploy.renaming.texts import TextPlan
from deploy.renaming.types_of import load_types


def _move(tree: Tree, table: Table) -> int:
    """Move what has a new place, each file by `git mv`. Returns how many."""
    moved = 0
    for path in tree.files:
        new = table.new_path(path)
        if new != path:
            (tree.root / new).parent.mkdir(parents=True, exist_ok=True)
            (tree.root / path).rename(tree.root / new)
            moved += 1
    subprocess.run(["git", "-C", str(tree.root), "add", "-A", "."], check=True)  # noqa: S607
    return moved


def _fix(tree: Tree, table: Table, changed: dict[str, bytes]) -> None:
    for path, old, new in table.fixes:
        text = changed.get(path) or (tree.root / path).read_bytes()
        if old.encode() not in text:
            tree.to_see.append(f"{path}: a fix finds nothing: {old!r}")
        changed[path] = text.replace(old.encode(), new.encode())
        tree.counts["fixes"] += 1


def _say(tree: Tree) -> None:
    for row, reasons in sorted(tree.refused.items()):
        print(f"refused {row}: {len(reasons)}: {'; '.join(reasons[:3])}")
    for line in tree.to_see:
        print(f"see {line}")
    for what, count in sorted(tree.counts.items()):
        print(f"{count:6} {what}")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(prog="python -m deploy.renaming", description=__doc__)
    parser.add_argument("--root", type=Path, required=True, help="a work tree of git without changes")
    parser.add_argument("--map", type=Path, default=MAP, help="the map of names")
    parser.add_argument("--types", type=Path, help="where types are kept between two runs on the same tree")
    parser.add_argument("--write", action="store_true", help="change the tree")
    parser.add_argument("--stages", default="names,members,texts", help="which of names, members, texts")
    options = parser.parse_args()
    git = ["git", "-C", str(options.root), "status", "--porcelain", "--untracked-files=no"]
    if options.write and subprocess.run(git, capture_output=True, check=True).stdout:
        parser.error("the tree has changes that are not committed")
    stages = options.stages.split(",")
    table, tree = read_table(options.map), read_tree(options.root.resolve())
    if "names" in stages:
        plan_names(tree, table)
    members = None
    if "members" in stages:
        members = MemberPlan(tree, table, load_types(tree.root, options.types))
        members.plan()
        plan_parsers(tree, table, members)
    if "texts" in stages:
        plan_lists(tree, table)
        TextPlan(tree, table, members).plan()
    changed = {path: apply_edits((tree.root / path).read_bytes(), edits) for path, edits in tree.edits.items()}
    _fix(tree, table, changed)
    tree.counts["files changed"] = len(changed)
    tree.counts["files that move"] = sum(table.new_path(path) != path for path in tree.files)
    places = Counter(table.new_path(path) for path in tree.files)
    if doubles := [path for path, count in places.items() if count > 1]:
        sys.exit(f"two files would be one: {', '.join(doubles)}")
    if options.write:
        for path, text in changed.items():
            (tree.root / path).write_bytes(text)
        _move(tree, table)
    _say(tree)
    sys.exit(0)


if __name__ == "__main__":
    main()
