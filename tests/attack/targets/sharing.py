"""Messages of other routers, as the store hands them out, and URLs of stores."""

from __future__ import annotations

from contextlib import suppress

from router.core.admission.rate_limits import TenantRateLimits
from router.core.kv_events.event_state_codec import UnreadableState
from router.core.peer_sync.snapshot_import import import_replica, same_engine, take_models
from router.core.types.replicas import Load
from router.peering.frames import BadFrame, frame_of, head_of, pack_frame
from router.peering.snapshot_transfer import decode_parcel
from router.peering.store_url import BadAddress, parse_address
from router.peering.tenant_rates import DistributedRateLimiter
from tests.attack.target import Target
from tests.core.peer_sync.stated import parts_of
from tests.core.ready import router_of


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
        again = pack_frame(frame, head.origin, head.seq, head.at_s)
        assert frame_of(again) == frame
        quotas = TenantRateLimits()
        quotas.configure({"acme": _Rates()})
        together = DistributedRateLimiter(quotas, routers_assumed=2, clock=lambda: 0.0)
        together.on_disconnected()
        together.on_connected()
        together.hear(head.origin, frame.spent)
        together.hear(head.origin, frame.spent)
        left = quotas.get_remaining("acme", 0.0)
        assert left[0] is not None
        assert -60.0 * (1 + len(frame.spent) * 2) <= left[0] <= 60.0


def sharing_urls(data: bytes) -> None:
    """A URL of a store: an address, or a reason without the password."""
    with suppress(BadAddress, UnicodeDecodeError):
        address = parse_address(data.decode())
        assert address.hosts
        assert all(0 <= port < 1 << 16 for _, port in address.hosts)


def state_pieces(data: bytes) -> None:
    """All that another router knows, in a parcel: taken over within all limits, or refused."""
    pieces = decode_parcel(data)
    if pieces is None:
        return
    router = router_of(["http://a", "http://b"])
    router.observations.observe_load("http://a", Load(prompt_tokens_total=5.0, started_s=5.0))
    with suppress(UnreadableState):
        parts = parts_of(pieces)
        for id_, part in parts.parts.items():
            state, member = part.events(), router.fleet.member(id_)
            if member is None:
                continue
            same_engine(part.replica, member, 1.0)
            if parts.models is not None:
                take_models(router, parts.models)
            for _ in import_replica(router, member, part, 1.0, 100.0):
                assert router.index.blocks(id_) <= router.index.capacity(id_)
            if state is not None:
                router.knowledge.reset_to(id_, state.stream.shape)
                for page in state.pages:
                    router.knowledge.import_page(id_, page)
    for member in router.members:
        assert member.prefill_model.ms(1_000, 0) >= 0
    assert router.models.tokens("m").bytes_per_token > 0


WORDS = (b"acme", b"\x03", b"\x96", b"\x97", b"\xcb\x7f\xf8\0\0\0\0\0\0", b"\xc0", b"\xc2", b"\xc3", b"\x95", b"\x93")
URL_WORDS = (
    b"redis", b"rediss", b"valkey", b"+sentinel", b"+cluster", b"://", b"@", b"%40", b"[::1]", b"?", b"&", b",",
)  # fmt: skip

STATE_WORDS = (b"origin", b"replica", b"stream", b"blocks", b"copies", b"touches", b"fits", b"homes", b"models", b"end")

TARGETS = (
    Target(sharing_messages, WORDS, steps=(60_000, 600)),
    Target(sharing_urls, URL_WORDS),
    Target(state_pieces, STATE_WORDS, steps=(60_000, 600), held_bytes=(4 << 20, 400)),
)
