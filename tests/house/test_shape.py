"""Sizes, names and cycles of modules and classes of `router/` and `loadtest/`. Numbers may only fall: a change that
lowers one lowers it here, too."""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import grimp
import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
LINES_MAX, FUNCTION_LINES_MAX = 400, 60
FILES_OVER = {"router": 12, "loadtest": 3}
FUNCTIONS_OVER = {"router": 3, "loadtest": 1}
FIELDS_MAX, METHODS_MAX = 20, 25
FIELDS_OVER = {  # classes of router/ with more fields, of which attributes that the initializer sets are a part
    "ChatBody": 40,
    "DiffCandidate": 23,
    "DisaggFields": 24,
    "EngineBlocks": 21,
    "EventStreamReader": 25,
    "HistoryWriter": 21,
    "ListenSettings": 21,
    "ModelSpeeds": 21,
    "ParseContext": 24,
    "PeerChannel": 29,
    "PeerPublisher": 24,
    "Receiver": 21,
    "ReplicaEventState": 22,
    "ResponsesBody": 22,
    "RestFields": 24,
    "Settings": 25,
    "SnapshotManager": 26,
    "UpstreamConnection": 27,
    "UpstreamResponse": 28,
    "_FieldLevel": 33,
    "_RequestLine": 32,
}
METHODS_OVER = {
    "AdmissionController": 36,
    "ClientConnection": 34,
    "ControlPlane": 35,
    "DisaggCaller": 27,
    "DisaggPairs": 27,
    "EngineBlocks": 50,
    "EventIndex": 40,
    "Fleet": 29,
    "KvStream": 44,
    "LocalPlacementService": 34,
    "PeerRegistry": 29,
    "PlacementService": 28,
    "PrefixIndex": 27,
    "RequestMetrics": 31,
    "UpstreamConnection": 27,
}
ROUTER_ARGUMENTS = 13  # functions outside the core that take the whole Router
REPEATED_NAMES = {"router": 2, "loadtest": 28}  # base names of modules and packages that stand twice or more


def modules(package: str) -> Iterator[Path]:
    """The Python files of a package."""
    return (ROOT / package).rglob("*.py")


@pytest.mark.parametrize("package", FILES_OVER)
def test_files_and_functions_are_short(package: str) -> None:
    """A file has at most 400 lines and a function 60, but for those that are left."""
    files, functions = list[str](), list[str]()
    for path in modules(package):
        text = path.read_text(encoding="utf-8")
        if text.count("\n") > LINES_MAX:
            files.append(str(path.relative_to(ROOT)))
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                if node.end_lineno - node.lineno >= FUNCTION_LINES_MAX:
                    functions.append(f"{path.relative_to(ROOT)}:{node.name}")
    assert len(files) == FILES_OVER[package], files
    assert len(functions) == FUNCTIONS_OVER[package], functions


def test_classes_are_small() -> None:
    """A class of the router has at most 20 fields and 25 methods, but for those that are left."""
    fields, methods = dict[str, int](), dict[str, int]()
    for path in modules("router"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                functions = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
                if (count := len(_fields(node))) > FIELDS_MAX:
                    fields[node.name] = count
                if len(functions) > METHODS_MAX:
                    methods[node.name] = len(functions)
    assert fields == FIELDS_OVER
    assert methods == METHODS_OVER


def _fields(of: ast.ClassDef) -> set[str]:
    """The fields of a record, and the attributes that an initializer sets."""
    found = {ast.unparse(node.target) for node in of.body if isinstance(node, ast.AnnAssign)}
    for function in of.body:
        if isinstance(function, ast.FunctionDef) and function.name in ("__init__", "__post_init__"):
            targets = [node for node in ast.walk(function) if isinstance(node, ast.Attribute)]
            stored = [node for node in targets if isinstance(node.ctx, ast.Store)]
            found.update(node.attr for node in stored if ast.unparse(node.value) == "self")
    return found


@pytest.mark.parametrize("package", REPEATED_NAMES)
def test_base_names_say_which_module(package: str) -> None:
    """No base name stands twice in one tree, but for those that are left."""
    names = Counter(path.stem if path.stem != "__init__" else path.parent.name for path in modules(package))
    repeated = sorted(name for name, count in names.items() if count > 1 and not name.startswith("__"))
    assert len(repeated) == REPEATED_NAMES[package], repeated


def test_few_functions_take_the_whole_router() -> None:
    """Outside the core a function takes the parts of the Router that it uses, but for those that are left."""
    found = list[str]()
    for path in modules("router"):
        if (ROOT / "router" / "core") in path.parents:
            continue
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)
                if any(each.annotation is not None and ast.unparse(each.annotation) == "Router" for each in arguments):
                    found.append(f"{path.relative_to(ROOT)}:{node.name}")
    assert len(found) == ROUTER_ARGUMENTS, found


@pytest.mark.parametrize("package", ["router", "loadtest"])
def test_imports_have_no_cycle(package: str) -> None:
    """No module imports itself through others, not even for types alone."""
    sys.path.insert(0, str(ROOT))
    try:
        graph = grimp.build_graph(package, cache_dir=None)
    finally:
        sys.path.remove(str(ROOT))
    imports = {module: graph.find_modules_directly_imported_by(module) for module in graph.modules}
    assert len(imports) > 100
    try:
        TopologicalSorter(imports).prepare()
    except CycleError as error:
        pytest.fail(f"{error.args[1]}")
