"""Messages of other routers, as the store hands them out, and URLs of stores."""

from __future__ import annotations

from contextlib import suppress

from router.core.admission.rates import Quotas
from router.sharing.addresses import BadAddress, parsed
from router.sharing.frames import BadFrame, frame_of, head_of, packed
from router.sharing.tenants import TenantsTogether
from tests.attack.target import Target


class _Rates:
    requests_per_min = 60.0
    tokens_per_min = 600.0


def sharing_messages(data: bytes) -> None:
    """A message: read, or refused; what was read is packed to what reads the same, and its rates shut nobody out."""
    with suppress(BadFrame):
        head = head_of(data)
        if head is None:
            return
        frame = frame_of(data)
        again = packed(frame, head.origin, head.at_s)
        assert frame_of(again) == frame
        quotas = Quotas()
        quotas.configure({"acme": _Rates()})
        together = TenantsTogether(quotas, routers_assumed=2, clock=lambda: 0.0)
        together.alone()
        together.together()
        together.hear(head.origin, frame.spent)
        together.hear(head.origin, frame.spent)
        left = quotas.left("acme", 0.0)
        assert left[0] is not None
        assert -60.0 * (1 + len(frame.spent) * 2) <= left[0] <= 60.0


def sharing_urls(data: bytes) -> None:
    """A URL of a store: an address, or a reason without the password."""
    with suppress(BadAddress, UnicodeDecodeError):
        address = parsed(data.decode())
        assert address.hosts
        assert all(0 <= port < 1 << 16 for _, port in address.hosts)


WORDS = (b"acme", b"\x01", b"\x96", b"\x97", b"\xcb\x7f\xf8\0\0\0\0\0\0", b"\xc0", b"\xc2", b"\xc3", b"\x95", b"\x93")
URL_WORDS = (
    b"redis",
    b"rediss",
    b"valkey",
    b"+sentinel",
    b"+cluster",
    b"://",
    b"@",
    b"%40",
    b"[::1]",
    b"?",
    b"&",
    b",",
)

TARGETS = (Target(sharing_messages, WORDS, steps=(60_000, 600)), Target(sharing_urls, URL_WORDS))
