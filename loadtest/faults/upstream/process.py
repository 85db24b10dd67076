"""Replica with faults on demand, for `python -m loadtest faults`.

One process is one replica, so that kill -9 is real. It serves chat, completions, responses and messages, streaming and
not, with the pages that routers probe.

Faults are set in one of two ways:

- The control port sets them for every request or for the next few. It accepts a JSON object per line and responds with
  one.
- The request sets them: its prompt may contain a marker such as `[[id=12 fault=mid_rst at=r0 after=3]]`. Then replica
  r0 resets that stream after three tokens, and all other requests are healthy. So no circuit breaker hides the tested
  behaviour. Markers survive routers that rewrite a body.

Every request is recorded with the times of its arrival, its end, and the loss of its connection. The clock is
CLOCK_MONOTONIC, which processes of one machine share.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from loadtest.common.processes import run_until_interrupt
from loadtest.faults.upstream.answers import MODEL
from loadtest.faults.upstream.connection import FaultyConnection, State

BACKLOG = 1_024
READY = "ready {name} {port} control {control}"


class FaultyReplica:
    """The listener, which can be closed and reopened, and its control port."""

    def __init__(self, name: str, host: str, port: int, model: str = MODEL) -> None:
        self.state = State(name, model)
        self._host, self.port = host, port
        self._server: asyncio.AbstractServer | None = None

    async def open(self) -> None:
        """Listen, on the same port as before."""
        if self._server is None:
            loop = asyncio.get_running_loop()
            server = await loop.create_server(
                lambda: FaultyConnection(self.state), self._host, self.port, backlog=BACKLOG
            )
            self.port, self._server = server.sockets[0].getsockname()[1], server

    def refuse(self) -> None:
        """Close the listener and idle connections; running requests continue."""
        if self._server is not None:
            self._server.close()
            self._server = None
        for connection in tuple(self.state.connections):
            if not connection.busy:
                connection.abort()

    async def control(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Execute one command per line, and send one line in response."""
        while line := await reader.readline():
            said = json.loads(line)
            writer.write(json.dumps(await self._do(said.pop("do"), said)).encode() + b"\n")
        writer.close()

    async def _do(self, what: str, fields: dict[str, Any]) -> Any:  # noqa: ANN401 - JSON of any kind
        state = self.state
        match what:
            case "behave":
                state.behave(fields)
                return asdict(state.behaviour)
            case "seen":
                return state.seen[fields.get("since", 0) :]
            case "figures":
                names = ("opened", "running", "waiting", "flooded_bytes", "healthy_s")
                return {"requests": len(state.seen), **{name: getattr(state, name) for name in names}}
            case "clear":
                state.seen.clear()
                state.flooded_bytes = 0
            case "refuse":
                self.refuse()
            case "open":
                state.healthy_s = None
                await self.open()
            case _:
                return {"error": f"there is no command {what!r}"}
        return {}


async def serve(name: str, host: str, port: int, model: str = MODEL) -> None:
    """Serve one replica and its control port until cancelled; print both ports in one line."""
    replica = FaultyReplica(name, host, port, model)
    await replica.open()
    control = await asyncio.start_server(replica.control, host, 0, limit=1 << 20)
    print(READY.format(name=name, port=replica.port, control=control.sockets[0].getsockname()[1]), flush=True)
    await asyncio.get_running_loop().create_future()


def main(argv: Sequence[str] | None = None) -> int:
    """Serve until stopped."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.faults.upstream.process", description=serve.__doc__)
    parser.add_argument("--name", default="r0", help="as markers have it (r0)")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0, help="0: a free one")
    parser.add_argument("--model", default=MODEL, help=f"the name of its model ({MODEL})")
    options = parser.parse_args(argv)
    return run_until_interrupt(serve(options.name, options.host, options.port, options.model))


if __name__ == "__main__":
    raise SystemExit(main())
