"""Native code for what every request passes through: `python -m deploy.compiled OUT [--sources]`.

Theory: mypyc makes C of typed Python, of the same sources that run without it (https://mypyc.readthedocs.io), with
records and constants put as suits it (compiled_sources.py). Attributes become fields of a struct and calls between
compiled modules calls of C, so what is left of the interpreter is what they ask of libraries. A library beside a module
is imported instead of it; without one the module runs as it is. So a native wheel is the pure one with libraries in it
(native_wheel.py), the image has the same beside its modules, and whoever has none misses only speed.

How long it takes counts, since `pip install` does it: the C of all modules is put into a few files of one size, which
the compiler takes side by side, and `-O1` makes code that is as fast here as that of `-O2`, in 0.6 of its time. Each
module has a library of a few lines besides, which calls its part of the one that has all: those lines do without
Python.h (DECLARED), which is nearly all that the compiler would read for them.

What is compiled is what a request passes, and can be: mypyc drops keywords of classes (`Struct, frozen=True`), no class
that is not compiled can inherit from one that is, exceptions lose the attributes of their class, what inherits weak
references from a class of Python's is freed without telling them, and a variable has one type in a function: of two
`except` clauses with the same `as error` the second is a TypeError when it comes true. And a coroutine that awaits
within an `except` clause leaves its exception behind as that of whatever runs meanwhile, and for good where two of them
cross: none may. `make test-compiled` runs the tests on it.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path

from deploy.compiled_sources import for_mypyc

REPO = Path(__file__).resolve().parents[1]
ROOMS = {
    "admin/history": "intervals",
    "core/admission": "calm deadlines queue rates shares windows",
    "core/cache": "estimate knowledge masks recency reported selfcheck tiered tiers unproven",
    "core/facts": "legs placements replicas requests",
    "core/fleet": (
        "breaker expected fitness fleet health kv_room lease legs loads member models observations others"
        " prefill_queue pulls roster unlearned"
    ),
    "core/learned": (
        "answer_tokens answers first_tokens least_squares loads means prefill reuse speed_factor speeds steps"
        " token_ratio"
    ),
    "core/observatory": "explain generations places",
    "core/observatory/ledger": "ledger sums",
    "core/observatory/memory": "anchors glance watcher",
    "core/placement": (
        "candidates conversations credit deadlines eligible evictions learner match opening places receipts ring room"
        " router spill splitting two_legs wanted"
    ),
    "core/placement/policies": "warm",
    "core/prompts": "agents beginnings blocks bodies canonical canonical_openai unread",
    "core/sharing": "delays engines hearing mirror news sharing telling",
    "edge": "attempts proxy relay retry_budget routes",
    "gateway": "answer endpoints following head hints incoming messages parts stream wire words",
    "http": (
        "body_budget chunks client_connection cors engine_connection exchange intake outbox pace pool receiver request"
        " upstream"
    ),
    "reading": (
        "answering body callers charge codings continuing deadlines forwarding kinship observer paths placing question"
        " reader turns usage used"
    ),
    "hub": "admitter local_placer owners",
    "telemetry": "epp gen_ai logs record series tallies",
}
"""Modules that are compiled, a line a room."""
MODULES = (
    "router/placer.py",
    *(f"router/{room}/{name}.py" for room, names in ROOMS.items() for name in names.split()),
)
OPTIONS = ("--config-file=", "--ignore-missing-imports", "--follow-imports=silent", "--no-incremental")


FLAGS = ("-O1", "-g0", "-w", "-fvisibility=hidden")
"""Flags of the C compiler, after Python's own. Warnings are off since no two compilers have the same ones."""
PARTS = 8
"""How many C files the modules make: each has the same 450 kB of declarations to read, and more share fewer cores."""
DECLARED = {
    "PyObject": "typedef struct _object PyObject;",
    "PyMODINIT_FUNC": '#define PyMODINIT_FUNC __attribute__((visibility("default"))) PyObject *',
    "Py_BuildValue": "PyObject *Py_BuildValue(const char *, ...);",
    "Py_DECREF": "#define Py_DECREF Py_DecRef\nvoid Py_DecRef(PyObject *);",
    "PyCapsule_GetPointer": "void *PyCapsule_GetPointer(PyObject *, const char *);",
    "PyErr_Clear": "void PyErr_Clear(void);",
    "PyImport_ImportModuleLevel": (
        "PyObject *PyImport_ImportModuleLevel(const char *, PyObject *, PyObject *, PyObject *, int);"
    ),
    "PyObject_GetAttrString": "PyObject *PyObject_GetAttrString(PyObject *, const char *);",
}
"""What a module's own library names of Python, the type first, with its declaration. All of it is of the stable ABI:
https://docs.python.org/3/c-api/stable.html"""
JOBS_MAX = 8  # a compiler that has a part needs some 300 MB


def jobs() -> int:
    """How many compilers run at once."""
    return min(JOBS_MAX, os.cpu_count() or 1)


def build(sources: Path, python: str) -> list[Path]:
    """Compile MODULES in this folder, which has a `router`. `python` knows the types of its dependencies. Returns the
    libraries, each beside its module."""
    from mypyc.build import mypycify  # only where it is compiled, as is setuptools
    from setuptools import Distribution  # type: ignore[import-untyped]  # ships no types

    os.chdir(sources)
    extensions = mypycify(
        [*OPTIONS, f"--python-executable={python}", *MODULES],
        multi_file=True,
        group_name="warmroute",
        target_dir=str(sources / "c"),
    )
    for extension in extensions[1:]:
        [source] = extension.sources
        without_header(Path(source))
    extensions[0].sources = parts([Path(source) for source in extensions[0].sources], sources / "c")
    for extension in extensions:
        extension.extra_compile_args = list(FLAGS)
    distribution = Distribution({"name": "warmroute", "ext_modules": extensions})
    command = distribution.get_command_obj("build_ext")
    command.build_lib, command.build_temp, command.parallel = str(sources), str(sources / "o"), jobs()
    command.ensure_finalized()
    build_extensions = command.build_extensions

    def build_all() -> None:  # `parallel` is for several libraries, and nearly all of the work is in one
        command.compiler.compile = side_by_side(command.compiler.compile)
        build_extensions()

    command.build_extensions = build_all
    command.run()
    return sorted(sources.glob("router/**/*.so")) + sorted(sources.glob("*.so"))


def without_header(source: Path) -> None:
    """Have this C file of a module's own library declare what it names of Python, in place of Python.h. One that names
    what is not in DECLARED, as another mypyc may make it, stays as it is."""
    text = re.sub(r"//.*", "", source.read_text(encoding="utf-8")).replace("#include <Python.h>", "")
    wanted = {name for name in re.findall(r"\b_?Py\w+", text) if not name.startswith("PyInit_")}
    if wanted <= DECLARED.keys():
        lines = [declaration for name, declaration in DECLARED.items() if name in wanted]
        source.write_text("\n".join(["#define NULL ((void *)0)", *lines, text]), encoding="utf-8")


def parts(sources: Sequence[Path], folder: Path) -> list[str]:
    """Up to PARTS C files in `folder` that include these between them: neighbours together, about as much in each."""
    total_bytes = sum(source.stat().st_size for source in sources)
    included: list[list[Path]] = [[] for _ in range(PARTS)]
    before_bytes = 0
    for source in sources:
        included[before_bytes * PARTS // total_bytes].append(source)
        before_bytes += source.stat().st_size
    made = []
    for number, some in enumerate(filter(None, included)):
        part = folder / f"part_{number}.c"
        part.write_text("".join(f'#include "{source.resolve()}"\n' for source in some), encoding="utf-8")
        made.append(str(part))
    return made


def side_by_side(compile_some: Callable[..., list[str]]) -> Callable[..., list[str]]:
    """The compiler's method that compiles sources into objects, for as many at once as there are jobs()."""

    def compile_all(sources: Sequence[str], **options: object) -> list[str]:
        with ThreadPoolExecutor(jobs()) as pool:
            return [*chain.from_iterable(pool.map(lambda source: compile_some([source], **options), sources))]

    return compile_all


def compile_into(out: Path, python: str, *, sources_too: bool) -> int:
    """Put the libraries where their modules are under `out`, with `sources_too` beside sources. Returns how many."""
    out.mkdir(parents=True, exist_ok=True)
    out = out.resolve()
    with tempfile.TemporaryDirectory(prefix="warmroute-compiled-") as folder:
        copy, before = Path(folder), Path.cwd()
        shutil.copytree(REPO / "router", copy / "router", ignore=shutil.ignore_patterns("__pycache__", "*.so"))
        if sources_too:
            shutil.copytree(copy / "router", out / "router", dirs_exist_ok=True)
        for module in MODULES:
            source = (copy / module).read_text(encoding="utf-8")
            (copy / module).write_text(for_mypyc(source), encoding="utf-8")
        try:
            libraries = build(copy, python)
        finally:
            os.chdir(before)
        for library in libraries:
            place = out / library.relative_to(copy)
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(library, place)
    return len(libraries)


def main() -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m deploy.compiled", description="native code beside the modules")
    parser.add_argument("out", type=Path, help="folder that has `router`, such as site-packages")
    parser.add_argument("--sources", action="store_true", help="put the sources there, too")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has the router's dependencies")
    options = parser.parse_args()
    made = compile_into(options.out, options.python, sources_too=options.sources)
    print(f"{made} libraries in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
