"""Every command that a page shows in a block, and that can run here, runs: one page is one shell, from top to bottom.

What stands for a machine of the reader's is replaced: addresses of replicas by simulated ones, ports by free ones, the
model by theirs. A command that cannot run here is one of ELSEWHERE, with the reason.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import shlex
import shutil
import signal
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import trustme

from loadtest.common.processes import free_ports
from tests.house.documents import NAMES, ROOT, code_blocks, page

ELSEWHERE = {
    r"python3 (measure|kernels/transfers)\.py": "needs a GPU",
    r"python -m loadtest (kernels|transfers)": "reads a file of the clone; tests/loadtest/kernels has it",
    r"docker|helm|kubectl|cosign|gh": "needs Docker, a cluster or a registry; tests/k8s and tests/supply have them",
    r"psql": "needs the database of another gateway",
    r"vllm|python -m sglang": "needs an engine; tests/real has both",
    r"pip|python3 -m venv|python -m tests\.envoy\.install": "installs from the network",
    r"make": "takes minutes; what a target is called is checked with all commands",
    r"python -m loadtest (agree|cost|faces|faults|forecasts|overhead|replay|routers)": "takes minutes: tests/loadtest",
    r"python -m loadtest pages": "writes into the documents; tests/house compares them",
    r"python -m loadtest steps": "needs an engine that does nothing else; tests/loadtest and tests/real have it",
    r"python -m loadtest simulate(?! --list)": "races for minutes to hours; tests/loadtest runs it small",
    r"warmroute serve --mode": "gateways ask on fixed ports; tests/extproc and tests/envoy have it",
    r"warmroute top(?! --once)": "goes on until it is stopped",
}
BODIES = [{"model": "sim", "messages": [{"role": "user", "content": f"hello {n}"}]} for n in range(3)]
RUN_S = 240.0  # a machine that does much else takes minutes for what takes seconds
pytestmark = pytest.mark.skipif(not all(map(shutil.which, ("bash", "curl", "openssl"))), reason="pages use these tools")


def lines(name: str) -> list[str]:
    """The commands of a page's shell blocks, a line each."""
    blocks = "\n".join(code_blocks(page(name), "sh"))
    return [line.removeprefix(".venv/bin/") for line in blocks.splitlines() if line.strip()]


def here(line: str) -> bool:
    """Whether a command is to run in this test."""
    return not any(re.match(rf"({words})\b", line) for words in ELSEWHERE)


WITH_COMMANDS = [name for name in NAMES if any(map(here, lines(name)))]
SHOWN = re.findall(r"`((?:curl|printf) [^`]+)`", page("docs/operate/runbook.md"))
"""What the runbook says to run: its commands stand in tables."""


class Shell:
    """A folder with the files that pages speak of, and what was started in it."""

    def __init__(self, folder: Path, running: ExitStack) -> None:
        self._folder, self._running = folder, running
        self._base = free_ports(20)[0]
        self._router: subprocess.Popen[str] | None = None
        for block in code_blocks(page("docs/guide/quickstart.md"), "yaml"):
            (folder / "warmroute.yaml").write_text(self._mine(block))
        authority = trustme.CA()
        certificate = authority.issue_cert("127.0.0.1")
        certificate.private_key_and_cert_chain_pem.write_to_path(str(folder / "chain.pem"))
        certificate.private_key_pem.write_to_path(str(folder / "key.pem"))
        with gzip.open(folder / "requests.jsonl.gz", "wt", encoding="utf-8") as log:
            log.writelines(json.dumps(body) + "\n" for body in BODIES)
        self._started(f"python -m loadtest engine --replicas 3 --port {self._base + 10} --time-scale 50")

    def run(self, line: str) -> None:
        """Run one command; a router or an engine goes on until the page has ended, or another router is started."""
        line = self._mine(line)
        if line.startswith("warmroute serve"):
            self._serve(line)
        elif line.startswith("python -m loadtest engine"):
            self._started(line)
        else:
            if line.startswith(("curl", "warmroute top")) and self._router is None:
                self._serve("warmroute serve" + "".join(f" --replica {self._replica(n)}" for n in (1, 2, 3)))
            done = subprocess.run(
                ["bash", "-o", "pipefail", "-c", self._shell(line)],
                cwd=self._folder,
                env=self._environment(),
                capture_output=True,
                text=True,
                timeout=RUN_S,
                check=False,
            )
            assert done.returncode == 0, (line, done.stdout, done.stderr)

    def _replica(self, number: int) -> str:
        return f"http://127.0.0.1:{self._base + 9 + number}"

    def _mine(self, text: str) -> str:
        """The text with our addresses, ports and model in place of the reader's."""
        text = re.sub(r"http://10\.0\.0\.([123]):8000", lambda found: self._replica(int(found[1])), text)
        for known, ours in {"8000": 0, "8001": 1, "9100": 2, "9101": 3}.items():
            text = re.sub(rf"(127\.0\.0\.1:|--port ){known}\b", rf"\g<1>{self._base + ours}", text)
        for known, ours in {"5557": 6, "5558": 7, "6557": 8, "6558": 9}.items():
            text = re.sub(rf"(-port ){known}\b", rf"\g<1>{self._base + ours}", text)
        return text.replace('"my-model"', '"sim"')

    def _serve(self, line: str) -> None:
        if self._router is not None:
            stop(self._router)
        self._router = self._started(f"{line} --port {self._base} --admin-port {self._base + 1}")
        wait_for(f"{'https' if 'tls' in line else 'http'}://127.0.0.1:{self._base}/readyz", self._router)

    def _started(self, line: str) -> subprocess.Popen[str]:
        words = shlex.split(self._shell(line))
        process = self._running.enter_context(started(words, self._folder, self._environment()))
        if "loadtest" in words:
            wait_for(f"http://127.0.0.1:{words[words.index('--port') + 1]}/health", process)
        return process

    def _shell(self, line: str) -> str:
        line = re.sub(r"^warmroute ", f"{sys.executable} -m router ", line)
        line = re.sub(r"^python ", f"{sys.executable} ", line)
        line = re.sub(r"^curl ", "curl --fail ", line)
        return re.sub(r"top --once", rf"top --url http://127.0.0.1:{self._base + 1} --once", line)

    def _environment(self) -> dict[str, str]:
        return os.environ | {"PYTHONPATH": str(ROOT)}


@contextmanager
def started(words: list[str], folder: Path, environment: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """A process that is told to stop at the end. Its output is in the folder."""
    with (folder / "output").open("a") as output:
        process = subprocess.Popen(words, cwd=folder, env=environment, stdout=output, stderr=output, text=True)
    try:
        yield process
    finally:
        stop(process)


def stop(process: subprocess.Popen[str]) -> None:
    """End a process, and see that it ends well."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
        process.wait(RUN_S)


def wait_for(url: str, process: subprocess.Popen[str]) -> None:
    """Until the URL is answered with 200, for RUN_S at most."""
    trusting = ssl._create_unverified_context()
    end_s = time.monotonic() + RUN_S
    while time.monotonic() < end_s and process.poll() is None:
        try:
            with urllib.request.urlopen(url, context=trusting, timeout=5.0):
                return
        except urllib.error.HTTPError as error:
            error.close()
        except OSError:
            pass
        time.sleep(0.05)
    raise AssertionError(f"{shlex.join(map(str, process.args))} gives no 200 at {url}")  # type: ignore[arg-type]


@pytest.fixture
def shell(tmp_path: Path) -> Iterator[Shell]:
    """A shell with three simulated replicas."""
    with ExitStack() as running:
        yield Shell(tmp_path, running)


@pytest.mark.long
@pytest.mark.parametrize("name", WITH_COMMANDS)
def test_commands_run(name: str, shell: Shell) -> None:
    """What a page tells its reader to type does what the page says: nothing ends in an error."""
    for line in filter(here, lines(name)):
        shell.run(line)


def test_commands_of_the_runbook_run(shell: Shell) -> None:
    """What is typed at three in the morning is right the first time."""
    shell.run(f"curl -s http://127.0.0.1:8000/v1/chat/completions -d {shlex.quote(json.dumps(BODIES[0]))}")
    for line in SHOWN:
        if "://" in line or "printf" in line:
            shell.run(line.replace("\\|", "|"))
    assert len(SHOWN) >= 10
