"""Messages of the supervisor on a child's standard input: one Spec, then Orders. The end of input means: drain."""

from __future__ import annotations

import msgspec

from router.config.schema import Settings

SPEC_BYTES_MAX = 128 << 20  # a keys file has 64 MiB at most
READY = b"ready\n"  # a child's one line on its standard output, once it serves


class ProcessSpec(msgspec.Struct, kw_only=True):
    """Role of a child, and its inherited resources."""

    settings: Settings
    files: dict[str, bytes] = {}  # contents of files that settings name, by path, as they were accepted
    path: str  # path of the hub's socket
    worker: int | None = None  # number of the worker, from 0; None for the hub
    hub_fd: int = -1  # the bound unix socket; -1 for a worker
    admin_fd: int = -1  # the admin listener's socket; -1 for a worker
    main_fd: int = -1  # the main listener's socket; -1 for the hub


class Reload(msgspec.Struct, tag=True):
    """Valid settings that were read again, with the contents of their files. They are in force at once."""

    settings: Settings
    files: dict[str, bytes] = {}


class ReloadRefused(msgspec.Struct, tag=True):
    """Notice that settings were read again and are invalid; the hub counts that."""


class LameDuck(msgspec.Struct, tag=True):
    """The router ends soon: no new requests should come, but those that do are served."""


Order = Reload | ReloadRefused | LameDuck

_orders: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)


def encode_frame(said: ProcessSpec | Order) -> bytes:
    """Encode a message for standard input: its length as four bytes, little-endian, and the message."""
    body = msgspec.msgpack.encode(said)
    return len(body).to_bytes(4, "little") + body


def order_of(body: bytes) -> Order:
    """Decode a message, given without its length."""
    return _orders.decode(body)
