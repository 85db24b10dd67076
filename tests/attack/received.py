"""The router's reading of a client's bytes, in any pieces, against a plain reading of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from router.http.receiver import Receiver
from router.http.request import Refusal, Request
from tests.attack import plain

BODY_BYTES_MAX = 2_000


@dataclass
class Received:
    """A client's connection: what was read on it, and how it ended."""

    requests: list[tuple[object, ...]] = field(default_factory=list)
    permitted: int = field(default=0, compare=False)  # permissions to send a body; none where it is here already
    refusal: tuple[int, str] | None = None
    refused_path: str = field(default="", compare=False)  # as far as it had come
    stage: int = 0
    reading_bytes: int = 0

    def on_request(self, request: Request) -> None:
        """A whole request."""
        assert len(request.body) == request.body_bytes
        lines = [(name, value) for _, name, value in request.lines]
        self.requests.append((request.method, request.target, request.version, lines, request.body))

    def on_head(self, request: Request, length: int, *, expects: bool) -> bool:
        """A head, and not all of its body. It is wanted."""
        assert request.path
        assert length <= BODY_BYTES_MAX
        self.permitted += expects
        return True

    def grows(self, request: Request, body_bytes: int) -> None:
        """More of a body whose length is not known."""
        assert body_bytes <= BODY_BYTES_MAX


def received(pieces: Iterable[bytes]) -> Received:
    """What a Receiver makes of these pieces. Raises what it raises besides Refusal."""
    heard = Received()
    receiver = Receiver(heard, BODY_BYTES_MAX)
    try:
        for piece in pieces:
            receiver.feed(piece)
    except Refusal as refusal:
        heard.refusal = refusal.status, refusal.code
        heard.refused_path = receiver.unfinished.path if receiver.unfinished is not None else ""
    else:
        heard.stage, heard.reading_bytes = receiver.stage, receiver.reading_bytes if receiver.stage == 2 else 0
    receiver.close()
    return heard


def judged(data: bytes, pieces: Sequence[bytes]) -> None:
    """Raise AssertionError where the pieces are read in another way than the whole, or that than plainly."""
    whole = received([data])
    in_pieces = received(pieces)
    refusals = [each.refusal[0] for each in (whole, in_pieces) if each.refusal is not None]
    if len(refusals) == 2 and not {414, 431}.isdisjoint(refusals):
        # The parser tells a target or a header when it sees what follows, or the end of a piece: what is wrong with
        # what follows may be seen before or behind their limits.
        in_pieces.refusal = whole.refusal
    assert in_pieces == whole, f"in pieces {in_pieces}, whole {whole}"
    taken, refuses = plain.requests(data, BODY_BYTES_MAX)
    got = [(method, lines, body) for method, _, _, lines, body in whole.requests]
    meant = [(each.method, each.lines, each.body) for each in taken]
    assert _unwished(got) == _unwished(meant), f"read {got}, plainly {meant}"
    assert (whole.refusal is not None) == refuses, f"refused {whole.refusal}, plainly {refuses}"


def _unwished(messages: Sequence[tuple[object, list[tuple[bytes, bytes]], object]]) -> list[tuple[object, ...]]:
    """Without the headers of a wish for another protocol, which are not read again."""
    gone = (b"upgrade", b"connection")
    return [(method, [line for line in lines if line[0].lower() not in gone], body) for method, lines, body in messages]
