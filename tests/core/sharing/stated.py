"""What one router knows, made into pieces and taken over by another."""

from __future__ import annotations

from router.core.placement.router import Router
from router.core.sharing import capturing
from router.core.sharing.restoring import StateParts, sameness, take_models, take_over
from router.core.sharing.state import VERSION, StateEnd, StateOrigin, StatePiece, decoded, encoded


def told(router: Router, now_s: float, at_s: float = 1e9) -> list[bytes]:
    """All that a router knows but by events, as bytes."""
    pieces, lives = list[StatePiece](), dict[str, tuple[int, int]]()
    pieces.append(StateOrigin(VERSION, "r", at_s))
    for place, member in enumerate(router.members):
        pieces.append(capturing.replica_of(member))
        pieces += filter(None, capturing.estimated(router, member.id, now_s))
        pieces += capturing.fits(router, member.id)
        lives[member.id] = place, member.life
    pieces += capturing.homes(router, lives)
    pieces.append(capturing.models(router))
    pieces.append(StateEnd(len(pieces)))
    return [encoded(piece) for piece in pieces]


def parts_of(pieces: list[bytes]) -> StateParts:
    """The pieces, put where they belong."""
    parts = StateParts()
    for piece in pieces:
        parts.take(decoded(piece))
    return parts


def restored(router: Router, pieces: list[bytes], now_s: float, age_s: float = 0.0) -> dict[str, str]:
    """Take over what may be, at once; returns why not, by replica."""
    parts, refused = parts_of(pieces), dict[str, str]()
    for id_, part in parts.parts.items():
        member = router.member(id_)
        if member is None:
            continue
        same, why = sameness(part.replica, member, age_s)
        if not same:
            refused[id_] = why
            continue
        if parts.models is not None:
            take_models(router, parts.models)
        for _ in take_over(router, member, part, age_s, now_s):
            pass
    return refused
