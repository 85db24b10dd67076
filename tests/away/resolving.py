"""A name server of tests, and the router with a resolver that asks it: `python -m tests.away.resolving serve ...`.

The machine's own resolver takes no port, and asks whom the machine's settings say; what stands in for it here asks one
server at a port of 127.0.0.1 in the same protocol (RFC 1035), with its times and errors.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
import sys
from typing import Any

from router.cli.main import main

NAME, PORT = "engines.test", "NAME_SERVER_PORT"
ADDRESS, CLASS = 1, 1  # type A, class IN
TRIES, TRY_S = 2, 5.0  # The defaults of resolv.conf(5).
_HEAD = struct.Struct("!6H")


class NameServer(asyncio.DatagramProtocol):
    """Answers with addresses of its own, whatever the name is."""

    def __init__(self) -> None:
        self.transport: asyncio.DatagramTransport | None = None
        self.addresses: list[str] = []
        self.mute = False
        self.delay_s = 0.0
        self.asked = self.answered = 0

    def datagram_received(self, data: bytes, addr: Any) -> None:
        """Answer a question."""
        self.asked += 1
        if not self.mute:
            asyncio.get_running_loop().call_later(self.delay_s, self._answer, data, addr)

    def _answer(self, data: bytes, addr: Any) -> None:
        self.answered += 1
        id_, question = data[:2], data[_HEAD.size :]
        kind = int.from_bytes(question[-4:-2])
        records = [socket.inet_aton(each) for each in self.addresses if kind == ADDRESS]
        head = _HEAD.pack(int.from_bytes(id_), 0x8180, 1, len(records), 0, 0)
        said = [struct.pack("!HHHIH", 0xC00C, ADDRESS, CLASS, 1, 4) + record for record in records]
        if self.transport is not None and not self.transport.is_closing():
            self.transport.sendto(head + question + b"".join(said), addr)


def ask(name: str, port: int) -> list[str]:
    """The addresses of a name. Raises gaierror, as the machine's resolver does."""
    labels = b"".join(bytes([len(label)]) + label.encode() for label in name.split("."))
    id_ = os.urandom(2)
    question = labels + b"\0" + struct.pack("!HH", ADDRESS, CLASS)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
        asking.connect(("127.0.0.1", port))
        asking.settimeout(TRY_S)
        for _ in range(TRIES):
            try:
                asking.send(_HEAD.pack(int.from_bytes(id_), 0x0100, 1, 0, 0, 0) + question)
                answer = asking.recv(4_096)
            except OSError:  # refused, or too late
                continue
            count = _HEAD.unpack(answer[: _HEAD.size])[3]
            records = answer[_HEAD.size + len(question) :]
            found = [socket.inet_ntoa(records[n * 16 + 12 : n * 16 + 16]) for n in range(count)]
            if not found:
                raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
            return found
    raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")


def _instead(host: Any, port: Any, family: int = 0, *more: Any, **named: Any) -> Any:
    if host != NAME:
        return _getaddrinfo(host, port, family, *more, **named)
    if family == socket.AF_INET6:
        raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
    return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (each, 0)) for each in ask(NAME, int(os.environ[PORT]))]


_getaddrinfo = socket.getaddrinfo

if __name__ == "__main__":
    socket.getaddrinfo = _instead
    sys.exit(main())
