"""Parts of `python -m loadtest evidence`: each part's commands, and the location of their figures.

Words may contain {json}, the file of the part's rows, {folder}, its folder, and {python}. Durations are for an
otherwise idle machine with two cores.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

PYTHON = "{python}"
LOADTEST = (PYTHON, "-m", "loadtest")
RIVALS = "from loadtest.common import rivals; rivals.install(rivals.ENVIRONMENT)"
PYTEST = (PYTHON, "-m", "pytest", "-s")
NGINX = (
    "command -v nginx || [ -x /usr/sbin/nginx ] || (export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1; "
    "apt-get update -q && apt-get install -q -y --no-install-recommends nginx-light)"
)
"""Installs the yardstick of `overhead` if it is missing and available; RUNLEVEL=1 keeps Debian from starting it."""


@dataclass(frozen=True, slots=True)
class Command:
    """A command of a part."""

    words: tuple[str, ...]
    judges: bool = False
    """True if exit status 1 means a missed goal, not a failed measurement."""
    optional: bool = False
    """True if the part continues without it."""
    environment: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Part:
    """One measurement."""

    name: str
    minutes: int
    about: str
    steps: tuple[Command, ...]
    lines: bool = False
    """True if {json} has lines that tests write (tests/support/figures.py), not a benchmark's document."""


def tests(*words: str, **environment: str) -> Command:
    """Return a command that runs tests; a failed test is a missed goal."""
    return Command((*PYTEST, *words), judges=True, environment=environment)


def _loadtest(*words: str) -> Command:
    return Command((*LOADTEST, *words, "--json", "{json}"), judges=True)


def _make_figures_command(*words: str) -> Command:
    return tests("-m", "figures", *words, FIGURES_FILE="{json}")


FULL = {
    "WARMROUTE_FAULTS": "1000",
    "WARMROUTE_KILLS": "200",
    "WARMROUTE_DISCONNECTS": "10000",
    "WARMROUTE_SILENCE_RUNS": "1000",
    "WARMROUTE_HALF_OPEN": "1000",
    "WARMROUTE_PROBES": "2000",
    "WARMROUTE_RANDOM_REQUESTS": "10000",
    "WARMROUTE_CONNECTS": "10000",
    "WARMROUTE_KILL_REQUESTS": "4500",
    "WARMROUTE_CORPUS_SEEDS": "26",
    "WARMROUTE_API_EXAMPLES": "100",
    "WARMROUTE_CUTS": "100000",
    "WARMROUTE_PULL_RUNS": "10000",
    "WARMROUTE_SPLIT_RUNS": "10000",
}
"""The sizes that these tests are meant for; the suite has fewer (CONTRIBUTING.md)."""
FULL_ENGINES = {
    "WARMROUTE_BENCH_RUNS": "3",
    "WARMROUTE_CONTINUING_PROMPTS": "2",
    "WARMROUTE_EXACT_REQUESTS": "1500",
    "WARMROUTE_RESTARTS": "5",
    "WARMROUTE_STEPS_REPEATS": "3",
}
"""The same for tests with real engines."""
REPEATED = (
    *(
        "tests/admin/api/test_answers.py",
        "tests/attack/test_cuts.py",
        "tests/proxy/test_attempts.py",
        "tests/proxy/test_endings.py",
        "tests/proxy/test_leaving.py",
        "tests/core/fleet/test_stall_detector.py",
        "tests/core/placement/test_pulls.py",
        "tests/core/placement/test_split_model.py",
    ),
    *("tests/http/test_client_timeouts.py", "tests/proxy/test_isolation.py", "tests/proxy/test_leakage.py"),
    *("tests/cli/test_rollout.py", "tests/core/insights/test_corpus.py"),
)

DEMOS = tuple(f"{{folder}}/demo-{number}.json" for number in (1, 2, 3))
COMPILED = Command(("make", "compiled"), optional=True)
NATIVE = {"PYTHONSAFEPATH": "1", "PYTHONPATH": ".compiled:."}
"""Environment of a command that uses the native code of COMPILED, if it could be built."""
GROWTH = ("cost", "--replicas", "8,64,256,1000", "--runs", "9", "--check")

PARTS = (
    Part("cost", 5, "CPU of decisions and of following KV events", (_loadtest("cost", "--check"),)),
    Part("memory", 2, "memory by purpose, and the start", (_loadtest("cost", "--memory", "--check"),)),
    Part(
        "growth",
        3,
        "CPU of decisions by fleet size",
        (COMPILED, replace(_loadtest(*GROWTH), environment=NATIVE)),
    ),
    Part(
        "overhead",
        20,
        "cost of routers, compared with others",
        (Command(("sh", "-c", NGINX), optional=True), COMPILED, _loadtest("overhead", "--install-rivals", "--check")),
    ),
    Part("faults", 20, "faults, overload and abuse, with every promised second", (COMPILED, _loadtest("faults"))),
    Part(
        "soak",
        12,
        "random faults for ten minutes: remaining effects, and memory",
        (COMPILED, _loadtest("faults", "--soak", "600")),
    ),
    Part(
        "histories",
        30,
        "three histories of ten minutes: four routers with a shared store, checked against a model",
        tuple(_loadtest("faults", "--histories", "600", "--seed", str(seed)) for seed in (1, 2, 3)),
    ),
    Part(
        "curve",
        30,
        "memory over a million different requests",
        (COMPILED, _loadtest("faults", "--requests", "1000000")),
    ),
    Part(
        "on-call",
        50,
        "first signs of nine troubles on the page, in top and in alerts",
        (_loadtest("faults", "--on-call", "--check"),),
    ),
    Part(
        "demo",
        5,
        "promises of the demo, medians of three runs",
        (
            # Round robin meets a cache by chance, and its rate differs from run to run.
            *(
                Command((PYTHON, "-m", "router", "demo", "--exit", "--json", file, "--chart", file + ".svg"))
                for file in DEMOS
            ),
            Command((PYTHON, "-m", "loadtest", "pages", "--check", *DEMOS), judges=True),
        ),
    ),
    Part(
        "faces",
        15,
        "hit rates and first tokens through the picker, compared with the HTTP proxy",
        (COMPILED, Command((PYTHON, "-m", "tests.envoy.install")), _loadtest("faces", "--check")),
    ),
    Part(
        "routers",
        30,
        "several routers with a store, compared with one router, and during store failures",
        (_loadtest("routers", "--check"),),
    ),
    Part(
        "figures",
        5,
        "times reported by tests",
        (
            _make_figures_command(),
            Command((PYTHON, "-m", "tests.k8s.install")),
            Command((PYTHON, "-m", "tests.envoy.install")),
            _make_figures_command("tests/k8s", "--timeout=600"),
            _make_figures_command("tests/envoy", "--timeout=600"),
        ),
        lines=True,
    ),
    Part(
        "engines",
        35,
        "real vLLM and SGLang: recovery of a restarted router, and vllm bench serve compared with another router",
        (
            Command((PYTHON, "-m", "tests.real.install")),
            Command((PYTHON, "-m", "tests.real.install_sglang")),
            Command((PYTHON, "-c", RIVALS), optional=True),
            tests("tests/real", "--timeout=900", FIGURES_FILE="{json}", **FULL_ENGINES),
        ),
        lines=True,
    ),
    Part("sizing", 20, "CPU and memory by number of replicas and streams", (_loadtest("sizing"),)),
    Part(
        "agree",
        60,
        "comparison of HTTP runs and simulation",
        (_loadtest("agree", "--install-rivals", "--check"),),
    ),
    Part(
        "peers",
        60,
        "comparison of real routers over HTTP",
        (_loadtest("agree", "--peers", "--install-rivals", "--check"),),
    ),
    Part(
        "race",
        300,
        "every claim of the placement race, in simulated time",
        (_loadtest("simulate", "--race", "--seeds", "claim", "--check"),),
    ),
    Part(
        "zoo",
        5,
        "effect of unusual engine pages: predicted hits, and shares of requests",
        (_loadtest("simulate", "--zoo", "--check"),),
    ),
    Part(
        "events",
        4,
        "10,000 runs of a model engine and a lossy network against the event stream",
        (tests("tests/core/kv_events/test_machine.py", "--timeout=1800", WARMROUTE_KV_RUNS="10000"),),
    ),
    Part(
        "discovery",
        4,
        "10,000 histories of pods and faults against discovery",
        (
            tests(
                *("tests/engines/discovery/test_histories.py", "-n", "auto", "--timeout=1800"),
                WARMROUTE_DISCOVERY_RUNS="10000",
            ),
        ),
    ),
    Part(
        "repeats",
        40,
        "tests with repetitions, in full",
        (tests(*REPEATED, "-n", "auto", "--timeout=3600", **FULL),),
    ),
)
