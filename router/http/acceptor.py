"""Connection slots, and the accept loop for TLS connections.

The event loop's own listener completes the TLS handshake before it reports a connection. Clients that never finish a
handshake would not be counted then, and a new certificate would not take effect. Sockets are therefore accepted here,
before any resources are spent on them.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable

from router.config.fd_limits import is_emfile, shortage
from router.http.client_timeouts import TOO_MANY, TOO_MANY_OF_CLIENT, ClientLimits

AT_ONCE_MAX = 64  # connections accepted in one turn of the loop
PAUSE_S = 1.0  # pause after an error such as too many open files; the same as asyncio's


class ConnectionSlots:
    """Counts connections against two limits: the total, and the number per address."""

    def __init__(self, limits: ClientLimits) -> None:
        self.limits = limits
        self._of_address: dict[str, int] = {}
        self.taken = 0

    def refuses(self, address: str) -> str:
        """Take a slot for a connection from this address. Return "" on success, or the reason of deadlines.REASONS if
        no slot is free."""
        of_address = self._of_address.get(address, 0)
        if self.taken >= self.limits.connections_max:
            return TOO_MANY
        if of_address >= self.limits.connections_per_client_max:
            return TOO_MANY_OF_CLIENT
        self._of_address[address] = of_address + 1
        self.taken += 1
        return ""

    def leave(self, address: str) -> None:
        """Release the slot of a connection from this address."""
        self.taken -= 1
        self._of_address[address] -= 1
        if not self._of_address[address]:
            del self._of_address[address]


class Acceptor:
    """Accepts the connections of one listening socket, and owns that socket."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, listening: socket.socket, arrived: Callable[[socket.socket, str], None]
    ) -> None:
        """`arrived(socket, address)` is called for each connection, and owns its socket."""
        self._loop = loop
        self._arrived = arrived
        self._resume: asyncio.TimerHandle | None = None
        self.sockets = (listening,)
        listening.setblocking(False)
        loop.add_reader(listening.fileno(), self._accept)

    def _accept(self) -> None:
        for _ in range(AT_ONCE_MAX):
            try:
                sock, peer = self.sockets[0].accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if is_emfile(error):
                    shortage.report_shortage("a client connection")
                else:
                    told = {"message": "a connection cannot be accepted", "exception": error}
                    self._loop.call_exception_handler(told)
                self._loop.remove_reader(self.sockets[0].fileno())
                self._resume = self._loop.call_later(PAUSE_S, self._resume_accepting)
                return
            self._arrived(sock, peer[0])

    def _resume_accepting(self) -> None:
        self._loop.add_reader(self.sockets[0].fileno(), self._accept)

    def close(self) -> None:
        """Stop accepting, and close the listening socket."""
        if self.sockets[0].fileno() < 0:
            return
        if self._resume is not None:
            self._resume.cancel()
        self._loop.remove_reader(self.sockets[0].fileno())
        self.sockets[0].close()


async def bound(
    loop: asyncio.AbstractEventLoop, host: str, port: int, backlog: int, *, reuse_port: bool = False
) -> socket.socket:
    """Return a listening socket. With `reuse_port`, other processes with this option may listen on the same port.
    Raises OSError."""
    found = (await loop.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE))[0]
    address = (str(found[4][0]), int(found[4][1]))
    return socket.create_server(address, family=found[0], backlog=backlog, reuse_port=reuse_port)


def url_of(host: str, port: int, *, tls: bool = False) -> str:
    """Return the URL of a bound address."""
    scheme = "https" if tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def cannot_listen(error: OSError, host: str, port: int, *, admin: bool = False) -> OSError:
    """Return the same error with the address, and with the listener's flag or setting that fixes it."""
    prefix = "admin_" if admin else ""
    if error.errno == errno.EADDRINUSE:
        flag = "--admin-port" if admin else "--port"
        why = f"the address is in use; set another port with {flag} N (listen.{prefix}port)"
    elif error.errno == errno.EACCES:
        why = f"permission denied: ports below 1024 are reserved (listen.{prefix}port)"
    else:
        why = f"{error.strerror} (listen.{prefix}host)"
    return OSError(error.errno, f"cannot listen on {host}:{port}: {why}")
