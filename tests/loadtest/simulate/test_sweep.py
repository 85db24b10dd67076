"""The table of constants: another value has to reach whoever uses it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

import router.core
from loadtest.simulate.results import race, sweep
from router.core.fleet import engine_counters

CORE = Path(router.core.__file__).parent


def tree_of(module: str) -> ast.Module:
    """What stands in a module of the core."""
    path = CORE.joinpath(*module.split(".")[2:])
    return ast.parse((path / "__init__.py" if path.is_dir() else path.with_suffix(".py")).read_text())


def modules() -> list[str]:
    """Of the core."""
    paths = [path.relative_to(CORE).with_suffix("") for path in CORE.rglob("*.py") if path.stem != "__init__"]
    return [".".join(("router.core", *path.parts)) for path in paths]


def reads(node: ast.AST, name: str) -> set[ast.Name]:
    """Where a name is read in there."""
    names = [each for each in ast.walk(node) if isinstance(each, ast.Name) and each.id == name]
    return {each for each in names if isinstance(each.ctx, ast.Load)}


def late_reads(tree: ast.AST, name: str) -> set[ast.Name]:
    """Where while the module works, which is in bodies of functions and not in their defaults."""
    bodies: list[ast.AST] = []
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef):
            bodies += node.body
        elif isinstance(node, ast.Lambda):
            bodies.append(node.body)
    return set().union(*(reads(body, name) for body in bodies))


@pytest.mark.long
@pytest.mark.parametrize("constant", sweep.CONSTANTS, ids=lambda constant: constant.name)
def test_a_swept_constant_is_read_where_it_is_set(constant: sweep.Constant) -> None:
    """Each module that has it is set, and reads it while it works: at its import it is too early to set it."""
    users = {
        module
        for module in modules()
        for node in ast.walk(tree_of(module))
        if isinstance(node, ast.ImportFrom) and node.module == constant.module
        if constant.name in {alias.name for alias in node.names}
    }
    assert users == set(constant.also)
    for module in (constant.module, *constant.also):
        tree = tree_of(module)
        read = reads(tree, constant.name)
        assert read
        assert read == late_reads(tree, constant.name)


@pytest.mark.parametrize("constant", sweep.CONSTANTS, ids=lambda constant: constant.name)
def test_a_constant_is_tried_below_and_above(constant: sweep.Constant) -> None:
    """What is flat on one side only may be steep on the other."""
    low, high = constant.list_alternatives()
    assert low < constant.get_value() < high


def test_a_value_is_set_wherever_it_was_imported() -> None:
    """A constant of two modules is one entrant a value, with both set."""
    constant = sweep.Constant("SHARE_ALL", "router.core.fleet.engine_counters", (0.5,), ("router.core.fleet.registry",))
    _, changed = sweep.entrants([constant])
    assert changed.constants == (
        ("router.core.fleet.engine_counters", "SHARE_ALL", 0.5),
        ("router.core.fleet.registry", "SHARE_ALL", 0.5),
    )


def test_a_value_that_would_reach_nobody_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Native code has its constants within: a sweep over it would call everything flat."""
    own = engine_counters.SHARE_ALL
    with race.override_constants([("router.core.fleet.engine_counters", "SHARE_ALL", 0.5)]):
        assert engine_counters.SHARE_ALL == 0.5
    assert own == engine_counters.SHARE_ALL
    monkeypatch.setattr(engine_counters, "__file__", "engine_counters.cpython-311-x86_64-linux-gnu.so")
    refused = pytest.raises(ValueError, match=r"router\.core\.fleet\.engine_counters are compiled")
    with refused, race.override_constants([("router.core.fleet.engine_counters", "SHARE_ALL", 0.5)]):
        pass
    assert own == engine_counters.SHARE_ALL
