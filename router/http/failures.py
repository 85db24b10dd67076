"""What may go wrong with a call to an engine, and what a retry may do about it.

    failure                                   kind         was sent      tried elsewhere         replica's fault
    refused, no connection in time            connect      nothing       yes, and not counted    yes
    any other end of connecting, such as TLS  connect      nothing       yes                     yes
    its replica left while we connected       left         nothing       yes, which is no retry  no
    used connection closed, no byte came      stale        maybe         yes, and not counted    no
    reset or end before the first event       broke_early  all of it     yes                     yes
    no stream of events, though promised      garbage      all of it     yes                     yes
    silent, and now refuses connections       lost         all of it     yes                     yes
    silent, and its replica counts as stuck   stuck        all of it     yes                     yes
    silent, and it was to pull (pulls.stall_s) pull        all of it     yes, without a pull     no
    500 of a decode leg, or as its first event blocks      all of it     yes, in one leg         no: either leg's
      that comes of work
    silent behind its prefill (pulls.stall_s)  blocks_stalled: as above                          no: either leg's
    silent behind its prefill, to its timeout  blocks_timeout: no, as any timeout                no: either leg's
    any of these, of the prefill leg           prefill_... as above      as above, both legs     the prefilling one's
    502, 503, 500 of a shutdown, or an error  engine       all of it     yes                     yes
      of 500 and above as first event
    an answer that its engine gave up          engine       all of it     yes                     see engine_failed.py
    429, or 503 with Retry-After; a full queue shed         all of it     one other replica       no
    it does not serve the model that it lists model        nothing       one other replica       no
    no first byte in time                     timeout      all of it     only by setting         yes
    no file descriptor left to connect with   descriptors  nothing       no: it is ours          no

An answer that breaks off after its beginning (broke_midway) or ends without saying that it is whole (unfinished) cannot
be tried again, and is the replica's fault. Nor can one that falls silent (stalled), which alone is nobody's fault: an
engine may hide what it makes. Where its client wants that, the stream is
continued on another replica (edge/continuing.py); it is also ended for that alone (drain), which is nobody's fault, nor
is it when the other replica does not say again what was said (differs).

What stores an answer (Responses) is only tried again where nothing was sent, or where the engine refused to begin. Any
other status is the engine's answer, and passed on: 4xx is the request's fault and blames nobody.

Behind a stale connection a request goes out on a new one, and what stores an answer always does.

Engines send status and headers before they prefill, so an answer only counts as begun with the first event of its
body: `Upstream.call` returns then, and everything before is a failure that another replica may make good. Generation
has no side effects; what a retry costs is GPU time, which is why timeouts are not retried by default.

This file is not compiled (deploy/compiled.py): instances of a compiled exception lose the attributes of their class.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import ssl

from router.core.facts.placements import Ending


class Failure(Exception):
    """An attempt that failed before its answer began. `kind` is a metric label; `retry`: another replica may be tried;
    `ending` says whose fault it was."""

    kind = "failed"
    retry = True
    ending = Ending.FAILED


class BrokeEarly(Failure):
    """The connection broke, or the body ended, before the answer had begun; before it was whole, where the call was for
    a whole answer."""

    kind = "broke_early"


class BrokeMidway(Exception):
    """The answer broke off after its beginning, so nothing can be retried. `kind` is a metric label."""

    kind = "broke_midway"


class Unfinished(BrokeMidway):
    """The stream ended correctly as HTTP, and did not say that it was whole."""

    kind = "unfinished"


class NobodysBreak(BrokeMidway):
    """The stream broke through no fault of its replica's."""


class HandedOver(NobodysBreak):
    """The stream was ended by us, to be continued on another replica: its own is about to leave."""

    kind = "drain"


class Diverged(NobodysBreak):
    """The replica that was to continue a stream said something else than was said."""

    kind = "differs"


class ConnectFailed(Failure):
    """No connection, so nothing was sent. `refused`: nobody listens there, which proves that the engine is gone;
    `timed_out`: nothing was heard, which may be the network's fault or this machine's."""

    kind = "connect"

    def __init__(self, message: str, *, refused: bool = False, timed_out: bool = False) -> None:
        super().__init__(message)
        self.refused, self.timed_out = refused, timed_out
        if timed_out:
            self.ending = Ending.UNREACHED


class ReplicaLeft(ConnectFailed):
    """Nothing was sent: discovery says that the replica is gone, or is another engine by now."""

    kind = "left"
    ending = Ending.CLIENT_LEFT


class NoDescriptor(Failure):
    """The router has no file descriptor left for a connection: its own trouble, and nothing was sent."""

    kind = "descriptors"
    retry = False
    ending = Ending.CLIENT_LEFT


class Stale(Failure):
    """A connection that had been used before was closed at once, without a byte: the engine closed it as idle while the
    request was on its way (RFC 9112 section 9.3.1), which is nobody's fault."""

    kind = "stale"
    ending = Ending.CLIENT_LEFT


class ReplicaLost(Failure):
    """The request was silent, and its replica now refuses connections."""

    kind = "lost"


class ReplicaStuck(Failure):
    """The request was silent, as is everything else on a replica that accepts and does not answer."""

    kind = "stuck"


class PullStalled(Failure):
    """The request was silent for longer than its pull may take: its replica may wait for a source without end."""

    kind = "pull"
    ending = Ending.REFUSED_BY_ENGINE


class BlocksStalled(Failure):
    """The prefill leg of a request ended, and the decode leg was silent for longer than the blocks may take: its
    replica may wait without end for another one that is gone."""

    kind = "blocks_stalled"
    ending = Ending.REFUSED_BY_ENGINE


class ForeignHostNamed(Failure):
    """The answer of a prefill leg names a host that is not its replica's own."""

    kind = "foreign_host"


class PrefillFailed(Failure):
    """The prefill leg of a request failed, for this cause: its replica is at fault, not the one that is to decode."""

    kind = "engine"  # replaced by the kind of the cause, behind "prefill_"
    ending = Ending.CLIENT_LEFT

    def __init__(self, replica: str, cause: Failure) -> None:
        super().__init__(str(cause))
        self.kind, self.retry = f"prefill_{cause.kind}", cause.retry
        self.replica, self.cause = replica, cause


class TimedOut(Failure):
    """No byte of the body in time."""

    kind = "timeout"
    retry = False


class BlocksTimedOut(TimedOut):
    """No byte of the body in time, where one of two engines may have waited for the other one: whose fault that is
    cannot be told."""

    kind = "blocks_timeout"
    ending = Ending.REFUSED_BY_ENGINE


class NotStream(Failure):
    """An answer that says it is a stream of events does not begin as one."""

    kind = "garbage"


class EngineShed(Failure):
    """The engine is well and takes no more requests for `retry_after_s` seconds. `full`: it did not say for how long;
    its queue was full."""

    kind = "shed"
    ending = Ending.REFUSED_BY_ENGINE

    def __init__(self, status: int, retry_after_s: float, *, full: bool = False) -> None:
        super().__init__("its queue is full" if full else f"status {status}, for {retry_after_s:.0f} s")
        self.status, self.retry_after_s, self.full = status, retry_after_s, full


class Stalled(BrokeMidway):
    """The answer had begun, and no more of it came in time."""

    kind = "stalled"


def say(error: BaseException) -> str:
    """One line about an error, without addresses: those are the operator's business and not the client's."""
    cause = getattr(error, "os_error", None) or error
    if isinstance(cause, socket.gaierror):
        return "name does not resolve"
    if isinstance(cause, ssl.SSLCertVerificationError):
        return f"certificate is not trusted: {cause.verify_message}"
    if isinstance(cause, TimeoutError):
        return "no answer in time"
    number = getattr(cause, "errno", None)
    if isinstance(number, int) and number in errno.errorcode:
        return os.strerror(number).lower()
    said = getattr(cause, "strerror", None)
    return said or re.sub(r"(?<=[a-z])(?=[A-Z])", " ", type(cause).__name__).lower()
