"""Failures of a call to an engine, and the retries that they allow.

    failure                                   kind         was sent      retried elsewhere       replica's fault

    refused, no connection in time            connect      nothing       yes, and not counted    yes
    any other end of connecting, such as TLS  connect      nothing       yes                     yes
    its replica left during the connect       left         nothing       yes, not as a retry     no
    used connection closed, no byte received  stale        maybe         yes, and not counted    no
    reset or end before the first event       broke_early  all of it     yes                     yes
    no event stream, though announced         garbage      all of it     yes                     yes
    silent, and now refuses connections       lost         all of it     yes                     yes
    silent, and its replica is stalled        stuck        all of it     yes                     yes
    silent P2P KV transfer (p2p.timeout_s)    pull         all of it     yes, without transfer   no
    500 of a decode stage, or as its first    blocks       all of it     yes, on one replica     no: either one's
      event that results from GPU work
    silent after its prefill (p2p.timeout_s)  blocks_stalled: as above                           no: either one's
    silent after its prefill, to its timeout  blocks_timeout: no, as any timeout                 no: either one's
    any of these, of the prefill stage        prefill_...  as above      as above, both stages   the prefill one's
    502, 503, 500 of a shutdown, or an error  engine       all of it     yes                     yes
      of 500 and above as first event
    an answer that its engine aborted         engine       all of it     yes                     see engine_errors.py
    429, or 503 with Retry-After; full queue  shed         all of it     one other replica       no
    it does not serve a model that it lists   model        nothing       one other replica       no
    no first byte in time                     timeout      all of it     only by setting         yes
    no file descriptor left to connect with   descriptors  nothing       no: router's fault      no

An answer cannot be retried after its beginning. If it breaks off (broke_midway) or ends incomplete (unfinished), its
replica is at fault. If it falls silent (stalled), no replica is known to be at fault, since an engine may hide its
output. With stream failover it is continued on another replica (proxy/stream_failover.py). A stream may also be ended
only to be continued elsewhere (drain), or the other replica may not repeat the text so far (differs). Neither is a
replica's fault.

A request that stores its response (Responses) is retried only if nothing was sent, or if the engine shed it. Any other
status is the engine's answer and is forwarded: 4xx is an error of the request, and of no replica.

After a stale connection a request is sent on a new one. A request that stores its response always is.

Engines send status and headers before they prefill, so an answer only counts as begun with the first event of its body.
`Upstream.call` returns then, and another replica may replace the engine after any earlier failure. Generation has no
side effects. A retry costs GPU time, which is why timeouts are not retried by default.

This file is not compiled (deploy/compiled.py): instances of a compiled exception lose the attributes of their class.
"""

from __future__ import annotations

import errno
import os
import re
import socket
import ssl

from router.core.types.placements import EndReason


class UpstreamError(Exception):
    """An attempt that failed before its answer began.

    - `kind`: a metric label.
    - `retry`: True if another replica may be tried.
    - `ending`: the outcome of the lease, which attributes the failure.
    """

    kind = "failed"
    retry = True
    ending = EndReason.FAILED


class ClosedBeforeResponse(UpstreamError):
    """The connection broke, or the body ended, before the answer had begun. If the call was for a whole answer: before
    it was whole."""

    kind = "broke_early"


class StreamInterrupted(Exception):
    """The answer broke off after its beginning, so it cannot be retried. `kind` is a metric label."""

    kind = "broke_midway"


class StreamTruncated(StreamInterrupted):
    """The stream ended correctly as HTTP, but without a finish reason or last event."""

    kind = "unfinished"


class UnattributedInterruption(StreamInterrupted):
    """The stream broke, and its replica is not at fault."""


class StreamMigrated(UnattributedInterruption):
    """The router ended the stream to continue it on another replica, because its own is about to leave."""

    kind = "drain"


class StreamDiverged(UnattributedInterruption):
    """The replica that was chosen to continue a stream generated a different text."""

    kind = "differs"


class ConnectFailed(UpstreamError):
    """No connection, so nothing was sent. `refused`: no process listens there, which proves that the engine is gone.
    `timed_out`: nothing was received, which may be caused by the network or by this machine."""

    kind = "connect"

    def __init__(self, message: str, *, refused: bool = False, timed_out: bool = False) -> None:
        super().__init__(message)
        self.refused, self.timed_out = refused, timed_out
        if timed_out:
            self.ending = EndReason.UNREACHED


class ReplicaRemoved(ConnectFailed):
    """Nothing was sent: according to discovery the replica is gone, or is another engine by now."""

    kind = "left"
    ending = EndReason.CLIENT_LEFT


class NoDescriptor(UpstreamError):
    """The router has no file descriptor left for a connection. This is its own fault, and nothing was sent."""

    kind = "descriptors"
    retry = False
    ending = EndReason.CLIENT_LEFT


class StaleConnection(UpstreamError):
    """A connection that had been used before was closed at once, without a byte. The engine closed it as idle while the
    request was on its way (RFC 9112 section 9.3.1), so no replica is at fault."""

    kind = "stale"
    ending = EndReason.CLIENT_LEFT


class ReplicaUnreachable(UpstreamError):
    """The request was silent, and its replica now refuses connections."""

    kind = "lost"


class ReplicaStalled(UpstreamError):
    """The request was silent, like all other requests on a replica that accepts connections and does not answer."""

    kind = "stuck"


class PullTimeout(UpstreamError):
    """The request was silent for longer than its P2P KV transfer may take: its replica may wait for a source without
    end."""

    kind = "pull"
    ending = EndReason.REFUSED_BY_ENGINE


class TransferTimeout(UpstreamError):
    """The prefill stage of a request ended, and the decode stage was silent for longer than the transfer of the blocks
    may take. Its replica may wait without end for another one that is gone."""

    kind = "blocks_stalled"
    ending = EndReason.REFUSED_BY_ENGINE


class ForeignHostNamed(UpstreamError):
    """The answer of a prefill stage names a host that is not its replica's own."""

    kind = "foreign_host"


class PrefillFailed(UpstreamError):
    """The prefill stage of a request failed, for this cause. The prefill replica is at fault, and not the decode
    replica."""

    kind = "engine"  # replaced by "prefill_" and the kind of the cause
    ending = EndReason.CLIENT_LEFT

    def __init__(self, replica: str, cause: UpstreamError) -> None:
        super().__init__(str(cause))
        self.kind, self.retry = f"prefill_{cause.kind}", cause.retry
        self.replica, self.cause = replica, cause


class TimedOut(UpstreamError):
    """No byte of the body arrived in time."""

    kind = "timeout"
    retry = False


class TransferFirstByteTimeout(TimedOut):
    """No byte of the body arrived in time, and one of two engines may have waited for the other one. The engine at
    fault is unknown."""

    kind = "blocks_timeout"
    ending = EndReason.REFUSED_BY_ENGINE


class InvalidStream(UpstreamError):
    """An answer with the content type of an event stream does not begin as one."""

    kind = "garbage"


class UpstreamOverloaded(UpstreamError):
    """The engine is well and takes no requests for `retry_after_s` seconds. `full`: its queue was full, and it stated
    no time."""

    kind = "shed"
    ending = EndReason.REFUSED_BY_ENGINE

    def __init__(self, status: int, retry_after_s: float, *, full: bool = False) -> None:
        super().__init__("the engine's queue is full" if full else f"status {status}, for {retry_after_s:.0f} s")
        self.status, self.retry_after_s, self.full = status, retry_after_s, full


class Stalled(StreamInterrupted):
    """The answer had begun, and the rest did not arrive in time."""

    kind = "stalled"


def describe(error: BaseException) -> str:
    """Describe an error in one line, without addresses: these are for the operator and not for the client."""
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
