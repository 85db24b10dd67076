"""Native code for the modules on every request's path: `python -m deploy.compiled OUT [--sources]`.

Theory: mypyc makes C of typed Python, of the same sources that run without it (https://mypyc.readthedocs.io), with
records and constants rewritten for it (compiled_sources.py). Attributes become fields of a struct, and calls between
compiled modules become calls of C. The interpreter is left only for calls into libraries. A library beside a module is
imported instead of it; without one the module runs as it is. So a native wheel is the pure one with libraries added
(native_wheel.py), and the image has the same libraries beside its modules. Without them the router is only slower.

Compile time matters, because `pip install` compiles. So the C of all modules is put into a few files of one size, which
the compiler processes in parallel. `-O1` makes code that is as fast here as that of `-O2`, in 0.6 of its time. Each
module also has a library of a few lines, which calls its part of the one that has all. Those lines work without
Python.h (DECLARED), which would be nearly all that the compiler reads for them.

Compiled are the modules on a request's path that mypyc can compile. It has these limits:

- It drops keywords of classes (`Struct, frozen=True`).
- No class that is not compiled can inherit from one that is.
- Exceptions lose the attributes of their class.
- Weak references to an object are not cleared when it is freed, if its class inherits them from a Python class.
- A variable has one type in a function: of two `except` clauses with the same `as error`, the second is a TypeError
  when it is reached.
- A coroutine that awaits within an `except` clause leaks its exception into code that runs in the meantime, and
  permanently if two of them cross. So no coroutine may do that.

`make test-compiled` runs the tests on the native code.
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
PACKAGES = {
    "admin/history": "intervals",
    "core/admission": "concurrency_windows deadline_budget queue rate_limits shares without_deadline",
    "core/cache_state": (
        "calibration event_index event_state holder_bitmap lru prefix_index speculative tier_blocks tier_index"
    ),
    "core/types": "disagg_types ended_requests placements replicas requests",
    "core/disagg": "leases member_stages pair_disaggregator pairs planner prefill_members",
    "core/fleet": (
        "breaker cold_estimates eligibility engine_counters evidence expected_models health"
        " kv_reservations lease lease_learning member models observations open_work own_speed peer_leases"
        " prefill_batches prefill_queue pulls ready_index registry restrictions tier_loads"
    ),
    "core/estimators": (
        "decode_step fleet_means least_squares model_speeds output_length prefill response_memory reuse speed_factor"
        " tier_load token_ratio ttft_quantiles"
    ),
    "core/insights": "breakdown token_funnel two_generation_cache",
    "core/insights/ledger": "decaying_sums totals",
    "core/insights/prompt_memory": "fast_path fingerprints prompt_tracker",
    "core/placement": (
        "answer_feedback answer_reuse conversation_affinity disaggregator eviction_cost filters kv_pressure"
        " lease_factory placement_request prefix_match priced_request receipt_factory receipts ring ring_order router"
        " scoring spill ttft_feasibility"
    ),
    "core/placement/policies/warm": "constants cost stages tie_break warm_policy",
    "core/prompts": "agent_headers block_keys canonical canonical_openai incremental_parse json_fields lenient_json",
    "core/peer_sync": "applier cache_epochs event_log remote_leases row_publisher sync",
    "proxy": "attempts http_proxy relay retry_budget routes",
    "extproc": (
        "endpoints metadata picker_context processing_responses request_body request_headers"
        " response_observer response_tracker stream_handler stream_messages"
    ),
    "http": (
        "body_budget chunk_passthrough client_connection cors engine_connection exchange outbox pool read_fairness"
        " read_flow receiver request upstream"
    ),
    "ingress": (
        "auth body codings failover_policy local_responses parse_queue parser paths placement_call prompt_observer"
        " proxied_request rate_reservation session_identity token_estimate ttft_deadline upstream_headers usage"
    ),
    "control": "admission_controller local_placement response_owners",
    "telemetry": "counters logs request_record series",
}
"""Modules that are compiled, a line per package."""
MODULES = (
    "router/placement_api.py",
    *(f"router/{package}/{name}.py" for package, names in PACKAGES.items() for name in names.split()),
)
OPTIONS = ("--config-file=", "--ignore-missing-imports", "--follow-imports=silent", "--no-incremental")


FLAGS = ("-O1", "-g0", "-w", "-fvisibility=hidden")
"""Flags of the C compiler, after Python's own. Warnings are off because no two compilers have the same ones."""
PARTS = 8
"""Number of C files of the modules.

Each file has the same 450 kB of declarations to read, and with more files each core would compile more of them.
"""
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
"""Names of Python in a module's own library with their declarations, the type first.

All of them are in the stable ABI: https://docs.python.org/3/c-api/stable.html
"""
JOBS_MAX = 8  # a compiler of one part needs about 300 MB


def jobs() -> int:
    """Return the number of compilers that run in parallel."""
    return min(JOBS_MAX, os.cpu_count() or 1)


def build(sources: Path, python: str) -> list[Path]:
    """Compile MODULES in this folder, which has a `router`.

    `python` is an interpreter with the types of the router's dependencies. Returns the libraries, each beside its
    module.
    """
    from mypyc.build import mypycify  # needed only for compiling, as is setuptools
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
    """Replace Python.h in this C file of a module's own library by declarations of its names of Python.

    A file with names that are not in DECLARED, from another version of mypyc, is left unchanged.
    """
    text = re.sub(r"//.*", "", source.read_text(encoding="utf-8")).replace("#include <Python.h>", "")
    wanted = {name for name in re.findall(r"\b_?Py\w+", text) if not name.startswith("PyInit_")}
    if wanted <= DECLARED.keys():
        lines = [declaration for name, declaration in DECLARED.items() if name in wanted]
        source.write_text("\n".join(["#define NULL ((void *)0)", *lines, text]), encoding="utf-8")


def parts(sources: Sequence[Path], folder: Path) -> list[str]:
    """Write up to PARTS C files in `folder` that include these sources, neighbours together, with equal sizes."""
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
    """Return the compiler's method that compiles sources into objects, with jobs() of them in parallel."""

    def compile_all(sources: Sequence[str], **options: object) -> list[str]:
        with ThreadPoolExecutor(jobs()) as pool:
            return [*chain.from_iterable(pool.map(lambda source: compile_some([source], **options), sources))]

    return compile_all


def compile_into(out: Path, python: str, *, sources_too: bool) -> int:
    """Put the libraries beside their modules under `out`, with `sources_too` together with the sources.

    Returns the number of libraries.
    """
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
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m deploy.compiled", description="native code beside the modules")
    parser.add_argument("out", type=Path, help="folder that has `router`, such as site-packages")
    parser.add_argument("--sources", action="store_true", help="also write the sources there")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has the router's dependencies")
    options = parser.parse_args()
    made = compile_into(options.out, options.python, sources_too=options.sources)
    print(f"{made} libraries in {options.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
