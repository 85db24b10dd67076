"""What the supervisor tells a child on its standard input, first of all."""

from __future__ import annotations

import msgspec

from router.settings import Settings

SPEC_BYTES_MAX = 16 << 20
READY = b"ready\n"  # what a child says on its standard output, once


class Spec(msgspec.Struct, kw_only=True):
    """What a child is, and what it inherits."""

    settings: Settings
    path: str  # of the hub's socket
    supervisor: int  # its process id
    worker: int | None = None  # its number, from 0; None is the hub
    hub_fd: int = -1  # the hub's: the bound unix socket
    admin_fd: int = -1  # likewise: the admin listener's socket
    main_fd: int = -1  # a worker's: the main listener's socket
