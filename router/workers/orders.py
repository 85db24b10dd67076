"""What the supervisor tells a child on its standard input: first of all a Spec, later Orders. Its end means: drain."""

from __future__ import annotations

import msgspec

from router.settings.schema import Settings

SPEC_BYTES_MAX = 16 << 20
READY = b"ready\n"  # what a child says on its standard output, once


class Spec(msgspec.Struct, kw_only=True):
    """What a child is, and what it inherits."""

    settings: Settings
    path: str  # of the hub's socket
    worker: int | None = None  # its number, from 0; None is the hub
    hub_fd: int = -1  # the hub's: the bound unix socket
    admin_fd: int = -1  # likewise: the admin listener's socket
    main_fd: int = -1  # a worker's: the main listener's socket


class Reload(msgspec.Struct, tag=True):
    """These settings hold from now on: read again, and found good."""

    settings: Settings


class ReloadRefused(msgspec.Struct, tag=True):
    """Settings were read again, and are not taken: counted by the hub."""


class LameDuck(msgspec.Struct, tag=True):
    """We end soon: no more should come, and yet who comes is served."""


Order = Reload | ReloadRefused | LameDuck

_orders: msgspec.msgpack.Decoder[Order] = msgspec.msgpack.Decoder(Order)


def framed(said: Spec | Order) -> bytes:
    """As it goes over standard input: behind its length, four bytes, little-endian."""
    body = msgspec.msgpack.encode(said)
    return len(body).to_bytes(4, "little") + body


def order_of(body: bytes) -> Order:
    """What was said, without its length."""
    return _orders.decode(body)
