"""warmroute as its users start it: a process of its own on free ports, found by the line it prints."""

from __future__ import annotations

import json
import os
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.real.install import REPO
from tests.real.processes import Server, wait_until
from tests.real.vllm_server import get, sample

READY_TIMEOUT_S = 120.0
NOTICE_TIMEOUT_S = 60.0
GRACE_S = 20.0
PLACE = re.compile(r"^warmroute_token_fate_total\{.*fate=\"(\w+)\".*\} (\S+)$", re.MULTILINE)
LISTENING = re.compile(r"listening (http://\S+) admin (http://\S+)")


class Router:
    """A running `python -m router serve`."""

    def __init__(self, replicas: list[str], folder: Path, name: str = "router", more: Sequence[str] = ()) -> None:
        """`more` are further words of the command line."""
        urls = [word for url in replicas for word in ("--replica", url)]
        ports = ["--host", "127.0.0.1", "--port", "0", "--admin-port", "0", "--set", "listen.lame_duck_s=0"]
        command = [sys.executable, "-m", "router", "serve", *urls, *ports, "--policy", "warm", *more]
        # A size of the tests would be taken for a setting.
        environment = {key: value for key, value in os.environ.items() if not key.startswith("WARMROUTE_")}
        self.server = Server(name, command, folder / f"{name}.log", environment, REPO)
        self.url = self.admin_url = ""

    def wait_ready(self) -> float:
        """Wait until /readyz says 200, return the seconds it took; NotServing with the end of its log."""
        return self.server.wait_ready(self._ready, READY_TIMEOUT_S)

    def _ready(self) -> bool:
        found = LISTENING.search(self.server.log_text())
        if found is None:
            return False
        self.url, self.admin_url = found.groups()
        return get(f"{self.url}/readyz")[0] == 200

    def replica_rows(self) -> list[dict[str, Any]]:
        """What its admin page says of each replica; none where it does not answer."""
        status, page = get(f"{self.admin_url}/admin/replicas")
        rows: list[dict[str, Any]] = json.loads(page)["replicas"] if status == 200 else []
        return rows

    def ready_replicas(self) -> int:
        """How many replicas it would send requests to."""
        return sum(row["ready"] for row in self.replica_rows())

    def retries(self) -> float:
        """How many requests it has tried elsewhere; 0 where it does not answer."""
        return sample(self.url, "warmroute_retries_total")

    def places(self) -> Counter[str]:
        """Prompt tokens by the place where they ended; none where it does not answer."""
        found = Counter[str]()
        for place, tokens in PLACE.findall(get(f"{self.admin_url}/metrics")[1]):
            found[place] += int(float(tokens))
        return found

    def wait_replicas(self, count: int) -> float:
        """Wait until it holds `count` replicas ready, return the seconds it took; TimeoutError otherwise."""
        return wait_until(f"{count} replicas ready", lambda: self.ready_replicas() == count, NOTICE_TIMEOUT_S)

    def stop(self) -> int | None:
        """SIGTERM as a supervisor would; its exit code, None when it had to be killed."""
        return self.server.stop(GRACE_S)


def routing(router: Router) -> Iterator[Router]:
    """The router once it is ready; it must end well when nobody needs it any more, and is killed in any case."""
    try:
        router.wait_ready()
        yield router
        assert router.stop() == 0, f"the router did not end well\n{router.server.log_tail()}"
    finally:
        router.server.kill()
