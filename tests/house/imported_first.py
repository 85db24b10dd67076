"""Whether every module of the router can be imported before all others: `python -m tests.house.imported_first`.

One interpreter for all of them: before each import everything of ours is forgotten, so that a module that works only
because another was imported first is found. Part of `make check`, as the floors are.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from pathlib import Path

import router

PACKAGE = Path(router.__file__).parent
MODULES = sorted(
    ".".join(["router", *path.relative_to(PACKAGE).with_suffix("").parts]).removesuffix(".__init__")
    for path in PACKAGE.rglob("*.py")
)


def failures(modules: list[str]) -> list[str]:
    """Those that cannot, each with why."""
    failed = []
    for name in modules:
        for known in [known for known in sys.modules if known == "router" or known.startswith("router.")]:
            del sys.modules[known]
        try:
            importlib.import_module(name)
        except Exception as error:  # whatever an import does
            failed.append(f"{name}: {error!r}")
    return failed


if __name__ == "__main__":
    warnings.simplefilter("error")
    failed = failures(MODULES)
    print("\n".join(failed) or f"each of {len(MODULES)} modules can be imported first")
    sys.exit(bool(failed))
