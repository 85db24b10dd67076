"""Renames modules, names and members of the tree by a map (names.json), and proves that nothing else changed.

This package lives in the repo only as long as the renaming takes: delete `deploy/renaming/` when it is done.

    python -m deploy.renaming --root DIR            # what would change, and what stands against it
    python -m deploy.renaming --root DIR --write    # changes it: files move by `git mv`, text by position
    python -m deploy.renaming.proof OLD NEW         # the two trees differ in names only; strings that differ

Members (attributes and methods) are found by the types of their receivers, which mypy knows (types_of.py, members.py);
all else of a module by Python's scopes (scopes.py, naming.py); text by what can mean nothing else (texts.py, lists.py).
Afterwards: `ruff check --select I --fix .`, `ruff format .`, `python -m loadtest pages --tables`.
"""
