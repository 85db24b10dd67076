"""HTTP/1.1 server of both listeners, at a third of the cost of a general server.

aiohttp's server takes 40 us of a short request and 110 us more to read a body of 200 KB (both in trials before it was
replaced). A router with a target of about 100 us in total cannot afford that. This file implements the functions that
all connections share: admission, timeouts and shutdown. client_connection.py handles a single connection, and
receiver.py parses its requests.
"""

from __future__ import annotations

import asyncio
import os
import select
import socket
import ssl
from collections import Counter

from router.config.fd_limits import shortage
from router.http import client_timeouts
from router.http.acceptor import Acceptor, ConnectionSlots, bound
from router.http.body_budget import BodyBudget
from router.http.client_connection import NO_LINGER, ClientConnection, Handler, Refuse
from router.http.client_timeouts import ClientLimits
from router.http.cors import Cors
from router.http.outbox import Outbox
from router.http.read_fairness import ReadFairness
from router.http.read_flow import Admit

# Connections examined, and closed, in one turn of the loop. A close with an error answer takes about 50 us.
LOOKED_AT_ONCE_MAX, CLOSED_AT_ONCE_MAX = 256, 16
ACCEPT_S = 1.0  # limit for accepting the last connections of the kernel's queue
# `drain` closes a connection without a request after LATE_S, since a request may be on its way. If none has arrived
# yet, it waits for NEW_S, since a new connection is usually followed by a request.
LATE_S, NEW_S = 0.1, 1.0
LOOK_S = 0.02  # polling interval of `drain`
BACKLOG = 1_024  # connections that the kernel queues before they are accepted


class Server:
    """A listener and its connections."""

    def __init__(
        self,
        handler: Handler,
        refuse: Refuse,
        limits: ClientLimits,
        *,
        admit: Admit = lambda _: True,
        tls: ssl.SSLContext | None = None,
        outbox: Outbox | None = None,
        pace: ReadFairness | None = None,
        cors: Cors | None = None,
        bodies: BodyBudget | None = None,
    ) -> None:
        """The arguments:

        - `handler`: answers a request.
        - `refuse`: answers a request that cannot be read. Its method and path are empty if they are unknown.
        - `admit`: called with a request if its body is incomplete or if it must wait for its turn. It raises Refusal
          for a client without access, names the holder of the body, and returns True if the body is wanted.
        - `tls`: may be replaced, for later connections.
        - `cors`: may be replaced, for later answers. If None, answers have no CORS headers.
        - `outbox`, `pace`, `bodies` (the memory budget for bodies): created if None.
        """
        self.handler = handler
        self.refuse = refuse
        self.admit = admit
        self.limits = limits
        self.tls = tls
        self.cors = cors
        self.loop = asyncio.get_running_loop()
        self.outbox = outbox or Outbox(self.loop)
        self.bodies = bodies or BodyBudget(self.loop, limits.bodies_bytes_max)
        self.pace = pace or ReadFairness(self.loop)
        self.clients: set[ClientConnection] = set()
        self.closing = False  # each connection ends with its next answer
        self._draining = False  # idle connections are closed, too
        self.closed = Counter(
            dict.fromkeys(client_timeouts.REASONS, 0)
        )  # connections that the server closed, by reason
        self._slots = ConnectionSlots(limits)
        self._listener: asyncio.Server | Acceptor | None = None
        self._shaking: set[asyncio.Task[None]] = set()
        self._sweeper: asyncio.Handle | None = None

    async def listen(self, host: str, port: int, *, reuse_port: bool = False) -> tuple[str, int]:
        """Bind and listen. With `reuse_port`, other processes with this option may listen on the same port. Return
        address and port. Raises OSError."""
        if self.tls is not None:
            listening = await bound(self.loop, host, port, BACKLOG, reuse_port=reuse_port)
            return self._begin(Acceptor(self.loop, listening, self._on_tls_connection))
        return self._begin(
            await self.loop.create_server(
                lambda: ClientConnection(self), host, port, backlog=BACKLOG, reuse_port=reuse_port or None
            )
        )

    def configure(self, limits: ClientLimits) -> None:
        """Apply these limits from now on."""
        self.limits = limits
        self._slots.limits = limits
        self.bodies.bytes_max = limits.bodies_bytes_max

    def _begin(self, listener: asyncio.Server | Acceptor) -> tuple[str, int]:
        self._listener = listener
        self._sweeper = self.loop.call_later(self.limits.sweep_s, self._sweep)
        address = listener.sockets[0].getsockname()
        return address[0], address[1]

    # -- admission -----------------------------------------------------------------------------------------------

    @property
    def connections(self) -> int:
        """Number of connections that are open or in the TLS handshake."""
        return self._slots.taken

    def try_admit(self, address: str) -> bool:
        """True if one more connection from this address is allowed. It is then counted until `left`."""
        why = self._slots.refuses(address)
        if why:
            self.closed[why] += 1
        return not why

    def on_connection_closed(self, address: str) -> None:
        """Note that a connection from this address has closed."""
        self._slots.leave(address)

    def _on_tls_connection(self, sock: socket.socket, address: str) -> None:
        """Handle a new TLS connection. If it is not admitted, it gets no handshake."""
        if not self.try_admit(address):
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, NO_LINGER)
            sock.close()
            return
        task = self.loop.create_task(self._shake_hands(sock, address))
        self._shaking.add(task)
        task.add_done_callback(self._shaking.discard)

    async def _shake_hands(self, sock: socket.socket, address: str) -> None:
        """Run the handshake, within the time limit of a head. The TLS shutdown, which sends the last bytes, has the
        time limit of a send."""
        client = ClientConnection(self, address)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            await self.loop.connect_accepted_socket(
                lambda: client,
                sock,
                ssl=self.tls,
                ssl_handshake_timeout=self.limits.head_timeout_s,
                ssl_shutdown_timeout=self.limits.send_timeout_s,
            )
        except OSError:
            self.closed[client_timeouts.NO_HANDSHAKE] += 1
        finally:
            if client.address is not None and client not in self.clients:
                client.address = None
                self.on_connection_closed(address)

    # -- time limits ---------------------------------------------------------------------------------------------

    def _sweep(self) -> None:
        """Examine all connections. One coarse timer serves all of them."""
        shortage.look()
        self._look(list(self.clients))

    def _look(self, clients: list[ClientConnection]) -> None:
        """Examine these connections, a limited number in each turn of the loop."""
        now_s, looked, closed = self.loop.time(), 0, 0
        while clients and looked < LOOKED_AT_ONCE_MAX and closed < CLOSED_AT_ONCE_MAX:
            client = clients.pop()
            looked += 1
            if why := client.overdue(now_s):
                self.closed[why] += 1
                closed += 1
                client.expire(why)
            elif self._draining and client.idle and not client.busy and not client.new:
                client.close()
        if clients:
            self._sweeper = self.loop.call_soon(self._look, clients)
        else:
            self._sweeper = self.loop.call_later(self.limits.sweep_s, self._sweep)

    def lame_duck(self) -> None:
        """Continue to serve, and end each connection with its next answer. Clients with persistent connections move
        elsewhere after one more request."""
        self.closing = True

    async def drain(self) -> None:
        """Stop accepting, and return when every received request was answered and its answer delivered. Answers carry
        `Connection: close`. Accepted connections, and those in the kernel's queue, may already carry a request. Both
        are therefore examined before any connection is closed."""
        self.closing = self._draining = True
        if self._listener is not None:
            await self._accept_last(self._listener)
        self._stop()
        if self.clients or self._shaking:
            await asyncio.sleep(LATE_S)
        for client in list(self.clients):
            if client.idle and not client.busy and not client.new:
                client.close()
        until_s = self.loop.time() + NEW_S - LATE_S
        while any(  # noqa: ASYNC110 - at the end of a process, and short
            client.busy or (client.new and self.loop.time() < until_s) for client in self.clients
        ):
            await asyncio.sleep(LOOK_S)

    async def _accept_last(self, listener: asyncio.Server | Acceptor) -> None:
        """Return when the kernel's queue is empty; libuv accepts one connection in a turn of the loop."""
        waiting, until_s = select.poll(), self.loop.time() + ACCEPT_S
        for listening in listener.sockets:
            waiting.register(listening.fileno(), select.POLLIN)
            close_queue(listening)
        while waiting.poll(0) and self.loop.time() < until_s:  # noqa: ASYNC110 - nothing tells when it is empty
            await asyncio.sleep(0)

    async def cancel_all(self) -> None:
        """Cancel every request in flight, and return when their handlers have ended."""
        running = [client.task for client in self.clients if client.task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)

    def _stop(self) -> None:
        self.closing = self._draining = True
        if self._listener is not None:
            self._listener.close()

    async def close(self) -> None:
        """Close all connections and the listener."""
        self._stop()
        self.outbox.flush()
        if self._sweeper is not None:
            self._sweeper.cancel()
        shaking = list(self._shaking)
        for task in shaking:
            task.cancel()
        await asyncio.gather(*shaking, return_exceptions=True)
        for client in list(self.clients):
            client.abort()
        await asyncio.sleep(0)  # transports close in the next turn of the loop


def close_queue(listening: socket.socket) -> None:
    """Let no further connections into the kernel's queue of a listening socket, which stays open for those in the
    queue. A client that connects now is refused when the socket closes. In the queue it would count itself as
    connected, send a request, and be reset with it."""
    with socket.socket(fileno=os.dup(listening.fileno())) as same:
        same.listen(0)
