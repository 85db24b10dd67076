"""Flow control of one client connection: parsing of reads, and admission of bodies to the memory budget.

A read is parsed at once if at most one request can end within it, as in nearly all cases. Any other read is parsed in
pieces, so that the number of parsed requests stays within the limit of waiting ones. The rest of the read is kept
unparsed.

A connection is not read while too many pipelined requests wait, or while the arriving body exceeds the memory budget
(body_budget.py). After TURN_BYTES, or after chunks that take as much time to parse, it is not read before its next turn
of the loop (read_fairness.py).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Protocol

from router.http.body_budget import BodyBudget, no_room
from router.http.client_timeouts import ClientLimits
from router.http.read_fairness import CHUNK_BYTES, TURN_BYTES, ReadFairness
from router.http.receiver import BODY, Receiver
from router.http.request import BodyReservation, Connection, Refusal, Request

PIECE_BYTES_MAX = 16 << 10  # a piece ends with the next head, or after PIECE_BYTES_MAX
GROWS_BYTES = 256 << 10  # step in which a body of unknown length is accounted
_HEAD_END = b"\r\n\r\n"

Admit = Callable[[Request], bool]


class ReadGate(Protocol):
    """The part of the server that admits bodies before they are stored."""

    admit: Admit
    bodies: BodyBudget
    limits: ClientLimits
    loop: asyncio.AbstractEventLoop
    pace: ReadFairness


class ConnectionCallbacks(Protocol):
    """The connection that is read."""

    def may_read_body(self) -> None:
        """Send the client permission to send its body."""

    def refuse(self, error: Refusal) -> None:
        """Refuse the request that is being read."""


class ReadFlow:
    """Flow control of the reads of one connection."""

    __slots__ = (
        "_ahead", "_expects", "_gate", "_reads", "_rest", "_rest_at", "_rest_held", "_room_bytes", "_room_since_s",
        "_roomless", "_transport", "_turn_bytes", "_yields", "holder", "receiver",
    )  # fmt: skip

    def __init__(self, client: Connection, reads: ConnectionCallbacks, gate: ReadGate) -> None:
        """`client` and `reads` are the same connection: the first for its requests, the second for its reader."""
        self.receiver = Receiver(client, gate.limits.body_bytes_max)
        self._gate = gate
        self._reads: ConnectionCallbacks | None = reads
        self._transport: asyncio.Transport | None = None
        self.holder = ""  # name under which bodies without their own holder are accounted
        self._ahead = False  # too many pipelined requests wait
        self._yields = False  # the connection waits for its turn of the loop
        self._turn_bytes = 0  # bytes since its last turn
        self._roomless: Request | None = None  # the request with a body that exceeds the budget
        self._room_bytes = 0  # total bytes that this body needs
        self._room_since_s = 0.0
        self._expects = False  # its client waits for permission to send it
        self._rest = b""  # bytes that were read and are not parsed yet, from `_rest_at` on
        self._rest_at = 0
        self._rest_held = BodyReservation("")

    def open(self, transport: asyncio.Transport, address: str) -> None:
        """Read from this transport."""
        self._transport, self.holder = transport, address

    def close(self) -> None:
        """Stop reading. The connection and this object refer to each other, so the references are cut."""
        self.drop()
        self.receiver.close()
        self._transport = self._reads = None

    def drop(self) -> None:
        """Drop buffered input: the current body and pipelined requests."""
        if self._roomless is not None:
            self._gate.bodies.on_budget_freed(self._roomless)
        self.receiver.let_go()
        self._drop_rest()
        self._roomless, self._ahead = None, False

    def discard(self) -> None:
        """`drop`, but continue to read from the client: unread bytes would reset the connection at its end."""
        self.drop()
        if self._transport is not None:
            self._transport.resume_reading()

    # -- bytes ---------------------------------------------------------------------------------------------------

    def feed(self, data: bytes) -> None:
        """Parse bytes that were read. Raises Refusal."""
        receiver = self.receiver
        if self._rest:  # a transport may still deliver buffered bytes after a pause
            self._rest, self._rest_at = self._rest[self._rest_at :] + data, 0
        elif receiver.left_bytes >= len(data) or (receiver.stage != BODY and _one_request(data)):
            receiver.feed(data)
        else:
            self._feed(data, 0)
        self._turn_bytes += len(data)
        if self._turn_bytes >= TURN_BYTES and not self._yields and self._transport is not None:
            self._yield()

    def _feed(self, data: bytes, at: int) -> None:
        """Parse in pieces, from `at` on; at most one request ends within a piece. Raises Refusal."""
        receiver = self.receiver
        while at < len(data) and self._reads is not None:
            left_bytes, chunks = receiver.left_bytes, receiver.chunks
            if self._yields or self.waits:
                self._keep_rest(data, at)
                return
            end = at + left_bytes
            if left_bytes <= 0:
                found = data.find(_HEAD_END, at, at + PIECE_BYTES_MAX)
                end = found + len(_HEAD_END) if found >= 0 else at + PIECE_BYTES_MAX
            receiver.feed(data[at:end])
            at = end
            self._turn_bytes += CHUNK_BYTES * max(0, receiver.chunks - chunks)
            if self._turn_bytes >= TURN_BYTES and not self._yields:
                self._yield()

    def _keep_rest(self, data: bytes, at: int) -> None:
        """Keep the rest of a read, and stop reading. Raises Refusal if the rest exceeds the memory budget."""
        self._rest, self._rest_at = data, at
        self._pause()
        if not self._rest_held.held_bytes:
            self._rest_held.budget_owner = self.holder
            self._gate.bodies.overdraw(self._rest_held, len(data))
            if self._gate.bodies.overdrawn:
                raise no_room()

    def _drop_rest(self) -> None:
        self._rest = b""
        if self._rest_held.held_bytes:
            self._gate.bodies.give_back(self._rest_held)

    # -- flow control --------------------------------------------------------------------------------------------

    @property
    def waits(self) -> bool:
        """True if the connection is not read for longer than a turn of the loop."""
        return self._ahead or self._roomless is not None

    def wait(self) -> None:
        """Stop reading until `go_on`, because too many pipelined requests wait."""
        self._ahead = True
        self._pause()

    def go_on(self) -> None:
        """Continue after pipelined requests were answered."""
        if self._ahead:
            self._ahead = False
            self._read_on()

    def _pause(self) -> None:
        if self._transport is not None:
            self._transport.pause_reading()

    def _yield(self) -> None:
        """Stop reading until this connection's next turn."""
        self._yields = True
        self._pause()
        self._gate.pace.turns.enqueue(self._next_turn)

    def _next_turn(self) -> None:
        self._yields, self._turn_bytes = False, 0
        self._read_on()

    def _read_on(self) -> None:
        """Read again if no condition forbids it, beginning with the rest of the last read."""
        if self._yields or self.waits or self._transport is None or self._reads is None:
            return
        if self._rest:
            data, self._rest = self._rest, b""
            try:
                self._feed(data, self._rest_at)
            except Refusal as error:
                self._reads.refuse(error)
                return
            if self._rest:
                return
            self._drop_rest()
        if not self._yields and not self.waits and self._transport is not None:
            self._transport.resume_reading()

    # -- memory budget for bodies --------------------------------------------------------------------------------

    def on_head(self, request: Request, length: int, *, expects: bool) -> bool:
        """Admit the client, and reserve memory for the body before more of it is read; `Connection.on_head`. A client
        that waits for permission receives it then, and has sent nothing before."""
        if not self._gate.admit(request):
            if expects and self._reads is not None:
                self._reads.may_read_body()
            return False
        request.budget_owner = request.budget_owner or self.holder
        self._expects = expects
        self._make_room(request, length if length >= 0 else self.receiver.reading_bytes + GROWS_BYTES)
        return True

    def on_body_growth(self, request: Request, body_bytes: int) -> None:
        """Reserve more memory for a body of unknown length; `Connection.grows`."""
        if body_bytes > request.held_bytes:
            self._make_room(request, body_bytes + GROWS_BYTES)

    def _make_room(self, request: Request, body_bytes: int) -> None:
        """Reserve memory, or pause until it is available. Raises Refusal if the bytes that were read already exceed the
        budget."""
        bodies = self._gate.bodies
        if bodies.take(request, body_bytes):
            self._roomy()
            return
        bodies.overdraw(request, self.receiver.reading_bytes)
        if bodies.overdrawn:
            raise no_room()
        self._roomless, self._room_bytes, self._room_since_s = request, body_bytes, self._gate.loop.time()
        bodies.wait(request, self._ask_again)
        self._pause()

    def _ask_again(self) -> None:
        """Retry the reservation."""
        request, bodies = self._roomless, self._gate.bodies
        if request is not None and bodies.take(request, max(self._room_bytes, request.held_bytes)):
            bodies.on_budget_freed(request)
            self._roomless = None
            self._roomy()
            self._read_on()

    def _roomy(self) -> None:
        if self._expects and self._reads is not None:
            self._expects = False
            self._reads.may_read_body()

    def is_stalled(self, request: Request) -> None:
        """Admit the client of a request that waits for its turn, and account for its body. Raises Refusal."""
        if not self._gate.admit(request):
            request.replace_body([], 0)
        elif request.body_bytes:
            request.budget_owner = request.budget_owner or self.holder
            self._gate.bodies.overdraw(request, request.body_bytes)
            if self._gate.bodies.overdrawn:
                raise no_room()

    def hold(self, request: Request) -> bool:
        """Account for the body of a complete request; `Connection.hold`."""
        if self._transport is None:
            return True  # the client is gone, and so is the request
        request.budget_owner = request.budget_owner or self.holder
        return self._gate.bodies.take(request, request.body_bytes)

    def let_go(self, request: Request) -> None:
        """Stop accounting for a request's body; `Connection.release_body`."""
        self._gate.bodies.give_back(request)

    def blocked_for_s(self, now_s: float) -> float:
        """Return the seconds for which a body has waited for memory; negative if no body waits."""
        return now_s - self._room_since_s if self._roomless is not None else -1.0


def _one_request(data: bytes) -> bool:
    """True if at most one request can end within these bytes: after the end of a head no other line ends. For JSON this
    is one search through its body."""
    end = data.find(_HEAD_END)
    return end < 0 or data.find(b"\r", end + len(_HEAD_END)) < 0
