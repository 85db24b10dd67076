"""Renames modules, names and members of the tree by a map (names.json), and proves that nothing else changed.

This package lives in the repo only as long as the renaming takes: delete it and tests/house/test_renaming.py then.

    python -m deploy.renaming --root DIR            # what would change, and what stands against it
    python -m deploy.renaming --root DIR --write    # changes the tree: files move, text is edited by position
    ruff check --select I,RUF022,RUF023 --fix . && ruff format .
    python -m deploy.renaming.wrap --root DIR && ruff format .
    python -m loadtest pages --tables               # pages that are rendered of the tree
    python -m deploy.renaming.proof OLD DIR         # the two trees differ in names only; --strings lists strings

Members (attributes and methods) are found by the types of their receivers, which mypy knows (types_of.py, members.py,
receivers.py); all else of a module by Python's scopes (scopes.py, naming.py); text by what can mean nothing else
(texts.py, lists.py). A row that cannot hold everywhere holds nowhere: lines that begin with `refused` say why. Those
that begin with `see` are places of which nothing is known; `fixes` in the map are texts that no rule finds.
"""
