"""Format of a router's exported state: pieces that another process can start with, from its own file or from a peer
router.

    origin                     router and time of the export
    replica                    one engine, and values that distinguish it from another one at the same address
      stream, blocks, copies     state of its events, and the last applied batch
      touches                    our own estimate of its cache: keys of blocks, the latest use first
      fits                       its own speed
    homes                      replica of each answered prompt
    models                     values learned for kinds of replicas, and for models
    end                        number of pieces

Blocks and prompts are named by hashes alone, with seeds that are the same in every process. A piece contains neither
text nor keys of clients. Each piece is small enough to be read, or made, in one step. The pieces after a replica's
belong to that replica.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from router.core.kv_events.event_state_codec import BlockPage, CopyPage, StreamState, UnreadableState
from router.core.peer_sync.messages import SharedFactor, SharedModels
from router.core.types.peer_load import Count

VERSION = 2
PIECE_KEYS = 4_096  # keys of a piece, unless one prompt has more
PIECE_BYTES_MAX = 2 << 20  # the keys of a prompt of 128 MB
REPLICAS_MAX = 16_384
NAME_CHARS_MAX = 4_096
MODELS_MAX = 1_024  # models with exported token statistics

Number = Annotated[int, Meta(ge=0)]


class StateOrigin(msgspec.Struct, array_like=True, tag="origin"):
    """The first piece."""

    version: int
    router: Annotated[str, Meta(max_length=NAME_CHARS_MAX)]
    at_s: float  # Unix time of the export


class StateReplica(msgspec.Struct, array_like=True, tag="replica"):
    """One replica, with all values that may show later if it is still the same engine."""

    id: Annotated[str, Meta(max_length=NAME_CHARS_MAX)]
    instance: Annotated[str, Meta(max_length=NAME_CHARS_MAX)] = ""  # engine as discovery names it; "": unknown
    started_s: float | None = None  # Load.started_s
    prompt_tokens: float | None = None  # Load.prompt_tokens_total


class StateTouches(msgspec.Struct, array_like=True, tag="touches"):
    """Uses of prefixes, the latest first."""

    idle_s: list[float]  # seconds since each use
    lengths: list[Number]  # number of keys of each use
    keys: bytes  # all keys, root to leaf within a use


class StateFits(msgspec.Struct, array_like=True, tag="fits"):
    """Speeds of the replica, as factors of its fleet's."""

    prefill: SharedFactor
    steps: SharedFactor


class StateHomes(msgspec.Struct, array_like=True, tag="homes"):
    """Answers, the latest first."""

    end_keys: bytes  # keys of the prompts that they answered
    replicas: list[Number]  # places of the replicas among the exported ones
    prompt_tokens: list[Count]
    completion_tokens: list[Count]


class StateModels(msgspec.Struct, array_like=True, tag="models"):
    """Values learned for kinds of replicas, and for each model's tokens (ModelTokens.counts)."""

    models: SharedModels | None
    tokens: Annotated[list[tuple[str, list[float]]], Meta(max_length=MODELS_MAX)]


class StateEnd(msgspec.Struct, array_like=True, tag="end"):
    """The last piece."""

    pieces: int  # number of pieces before this one


OfReplica = StreamState | BlockPage | CopyPage | StateTouches | StateFits
StatePiece = StateOrigin | StateReplica | OfReplica | StateHomes | StateModels | StateEnd

_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[StatePiece] = msgspec.msgpack.Decoder(StatePiece)


def encode_piece(piece: StatePiece) -> bytes:
    """Return the piece as bytes."""
    return _encode(piece)


def decode_piece(piece: bytes) -> StatePiece:
    """Decode a piece and check its schema; the reverse of `encode_piece`. Raises UnreadableState."""
    if len(piece) > PIECE_BYTES_MAX:
        raise UnreadableState(f"a chunk of {len(piece)} bytes")
    try:
        return _decoder.decode(piece)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UnreadableState(f"a chunk of an unknown format: {error}") from error
