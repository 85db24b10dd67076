"""Two real vLLM replicas for a whole run, a new router for each file, and the figures at the report's end."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.real.router_process import Router, routing
from tests.real.talk import word_tokens
from tests.real.vllm_server import Replica, vllm_servers

HERE = Path(__file__).resolve().parent
LAST = "test_replica_loss.py"
CLIENT_TIMEOUT_S = 420.0  # a hang takes this long; a busy machine decodes 64 answers of 800 tokens in some minutes
CONNECTIONS_MAX = 100
# With the servers' starts, which pytest counts to the first test that needs them.
TEST_TIMEOUT_S = 900.0
FIGURES = pytest.StashKey[list[str]]()


def pytest_configure(config: pytest.Config) -> None:
    """Make the marker known, and a place for the figures."""
    config.addinivalue_line("markers", "engines: needs real vLLM in .venv-engines; run by make test-engines")
    config.stash[FIGURES] = []


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark this folder's tests, and skip them unless they were asked for: they take minutes. Last comes the file that
    leaves a replica dead, so that none is started again for the others."""
    named = [config.invocation_params.dir / word.split("::")[0] for word in config.args]
    asked = "engines" in str(config.getoption("markexpr")) or any(path.is_relative_to(HERE) for path in named)
    items.sort(key=lambda item: item.path == HERE / LAST)
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.engines)
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(TEST_TIMEOUT_S))
            if not asked:
                item.add_marker(pytest.mark.skip(reason="real engines: make test-engines"))


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    """Print what was measured, passed or failed."""
    lines: list[str] = config.stash[FIGURES]
    if lines:
        terminalreporter.section("figures from real engines")
        terminalreporter.write_line("\n".join(lines))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Show the ends of the servers' logs beside a failure."""
    report = yield
    if report.failed:
        funcargs: dict[str, Any] = getattr(item, "funcargs", {})
        servers = [replica.server for replica in funcargs.get("replicas", ()) if replica.server]
        servers += [funcargs["router"].server] if "router" in funcargs else []
        report.sections += [(f"log of {server.name}", server.log_tail()) for server in servers]
    return report


@pytest.fixture(scope="session")
def figures(pytestconfig: pytest.Config) -> Callable[[str], None]:
    """Call it with a line to have it in the report."""
    return pytestconfig.stash[FIGURES].append


@pytest.fixture(scope="session")
def folder(request: pytest.FixtureRequest, figures: Callable[[str], None]) -> Iterator[Path]:
    """For logs and ipc sockets; short, because a socket's path may have 107 bytes only (unix(7)). Kept on a failure."""
    name = Path(tempfile.mkdtemp(prefix="warmroute-"))
    yield name
    if request.session.testsfailed:
        figures(f"logs are kept in {name}")
    else:
        shutil.rmtree(name, ignore_errors=True)


@pytest.fixture(scope="session")
def shared_replicas(folder: Path, figures: Callable[[str], None]) -> Iterator[list[Replica]]:
    """Two vLLM servers, started together, killed whole at the end."""
    yield from vllm_servers(("left", "right"), folder, figures)


@pytest.fixture(scope="session")
def started_replicas(shared_replicas: list[Replica]) -> list[Replica]:
    """What a file's tests ask, unless the file has servers of its own."""
    return shared_replicas


@pytest.fixture
def replicas(started_replicas: list[Replica], figures: Callable[[str], None]) -> list[Replica]:
    """Both replicas, serving: one that an earlier test killed is started again on its port."""
    for replica in started_replicas:
        if not replica.serving():
            figures(f"restart: {replica.name} ready after {replica.restart():.0f} s")
    return started_replicas


@pytest.fixture(scope="module")
def module_router(started_replicas: list[Replica], folder: Path, request: pytest.FixtureRequest) -> Iterator[Router]:
    """One router for a file of tests."""
    yield from routing(Router([replica.url for replica in started_replicas], folder, f"router-{request.path.stem}"))


@pytest.fixture
def router(replicas: list[Replica], module_router: Router) -> Router:
    """The file's router, knowing both replicas as ready."""
    module_router.wait_replicas(len(replicas))
    return module_router


@pytest.fixture
async def client(router: Router) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of the router, without retries of its own."""
    limits = httpx.Limits(max_connections=CONNECTIONS_MAX)
    async with httpx.AsyncClient(base_url=router.url, timeout=CLIENT_TIMEOUT_S, limits=limits, trust_env=False) as made:
        yield made


@pytest.fixture
async def allowed(replicas: list[Replica]) -> list[int]:
    """The token ids that answers are made of."""
    async with httpx.AsyncClient(base_url=replicas[0].url, timeout=CLIENT_TIMEOUT_S, trust_env=False) as direct:
        return await word_tokens(direct)
