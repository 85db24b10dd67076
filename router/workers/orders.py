"""What the supervisor tells a child on its standard input: one Spec, then Orders. The end of input means: drain."""

from __future__ import annotations

import msgspec

from router.settings.schema import Settings

SPEC_BYTES_MAX = 128 << 20  # a keys file has 64 MiB at most
READY = b"ready\n"  # a child's one line on its standard output, once it serves


class Spec(msgspec.Struct, kw_only=True):
    """What a child is, and what it inherits."""

    settings: Settings
    files: dict[str, bytes] = {}  # contents of files that settings name, by path, as they were accepted
    path: str  # path of the hub's socket
    worker: int | None = None  # number of the worker, from 0; None for the hub
    hub_fd: int = -1  # the bound unix socket; -1 for a worker
    admin_fd: int = -1  # the admin listener's socket; -1 for a worker
    main_fd: int = -1  # the main listener's socket; -1 for the hub


class Reload(msgspec.Struct, tag=True):
    """Settings that were read again and are valid, with the contents of their files: they are in force from now on."""

    settings: Settings
    files: dict[str, bytes] = {}


class ReloadRefused(msgspec.Struct, tag=True):
    """Settings that were read again are not valid; the hub counts that."""


class LameDuck(msgspec.Struct, tag=True):
    """The router ends soon: no new requests should come, but those that do are served."""


Order = Reload | ReloadRefused | LameDuck

_orders: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)


def framed(said: Spec | Order) -> bytes:
    """The bytes for standard input: the length as four bytes, little-endian, and the message."""
    body = msgspec.msgpack.encode(said)
    return len(body).to_bytes(4, "little") + body


def order_of(body: bytes) -> Order:
    """Decode a message, given without its length."""
    return _orders.decode(body)
