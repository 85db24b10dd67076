"""What one router knows, made into pieces and taken over by another."""

from __future__ import annotations

from router.core.peer_sync import snapshot_export
from router.core.peer_sync.snapshot_format import VERSION, StateEnd, StateOrigin, StatePiece, decode_piece, encode_piece
from router.core.peer_sync.snapshot_import import StateParts, import_replica, same_engine, take_models
from router.core.placement.router import Router


def told(router: Router, now_s: float, at_s: float = 1e9) -> list[bytes]:
    """All that a router knows but by events, as bytes."""
    pieces, lives = list[StatePiece](), dict[str, tuple[int, int]]()
    pieces.append(StateOrigin(VERSION, "r", at_s))
    for place, member in enumerate(router.members):
        pieces.append(snapshot_export.replica_of(member))
        pieces += filter(None, snapshot_export.export_estimate(router, member.id, now_s))
        pieces += snapshot_export.fits(router, member.id)
        lives[member.id] = place, member.cache_epoch
    pieces += snapshot_export.homes(router, lives)
    pieces.append(snapshot_export.models(router))
    pieces.append(StateEnd(len(pieces)))
    return [encode_piece(piece) for piece in pieces]


def parts_of(pieces: list[bytes]) -> StateParts:
    """The pieces, put where they belong."""
    parts = StateParts()
    for piece in pieces:
        parts.take(decode_piece(piece))
    return parts


def restored(router: Router, pieces: list[bytes], now_s: float, age_s: float = 0.0) -> dict[str, str]:
    """Take over what may be, at once; returns why not, by replica."""
    parts, refused = parts_of(pieces), dict[str, str]()
    for id_, part in parts.parts.items():
        member = router.fleet.member(id_)
        if member is None:
            continue
        same, why = same_engine(part.replica, member, age_s)
        if not same:
            refused[id_] = why
            continue
        if parts.models is not None:
            take_models(router, parts.models)
        for _ in import_replica(router, member, part, age_s, now_s):
            pass
    return refused
