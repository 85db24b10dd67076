"""What a router knows, as pieces that another process can begin with: a file of its own, or a sibling's word.

    origin                     whose it is, and when it was made
    replica                    one engine, and what tells it apart from another one at the same address
      stream, blocks, copies     what its events said, and up to which batch
      touches                    our own estimate of its cache: keys of blocks, what was used last first
      fits                       its own speed
    homes                      who answered which prompt
    models                     what was learned of kinds of replicas, and of models
    end                        how many pieces there are

Blocks and prompts are named by hashes alone, with seeds that are the same in every process; a piece has neither text
nor keys of clients. Each piece is small enough to be read, and made, without a break. What follows the pieces of a
replica belongs to it.
"""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import Meta

from router.core.facts.peers import Count
from router.core.kv_events.states import BlockPage, CopyPage, StreamState, UnreadableState
from router.core.sharing.messages import SharedFactor, SharedModels

VERSION = 2
PIECE_KEYS = 4_096  # keys of a piece, unless one prompt has more
PIECE_BYTES_MAX = 2 << 20  # the keys of a prompt of 128 MB
REPLICAS_MAX = 16_384
NAME_CHARS_MAX = 4_096
MODELS_MAX = 1_024  # models whose tokens are told

Number = Annotated[int, Meta(ge=0)]


class StateOrigin(msgspec.Struct, array_like=True, tag="origin"):
    """The first piece."""

    version: int
    router: Annotated[str, Meta(max_length=NAME_CHARS_MAX)]
    at_s: float  # Unix time at which it was made


class StateReplica(msgspec.Struct, array_like=True, tag="replica"):
    """One replica, with all that may show later whether it is still the same engine."""

    id: Annotated[str, Meta(max_length=NAME_CHARS_MAX)]
    instance: Annotated[str, Meta(max_length=NAME_CHARS_MAX)] = ""  # engine that discovery names; "": none
    started_s: float | None = None  # Load.started_s
    prompt_tokens: float | None = None  # Load.prompt_tokens_total


class StateTouches(msgspec.Struct, array_like=True, tag="touches"):
    """Uses of prefixes, what was used last first."""

    idle_s: list[float]  # seconds since each use
    lengths: list[Number]  # keys of each
    keys: bytes  # all keys, root to leaf within a use


class StateFits(msgspec.Struct, array_like=True, tag="fits"):
    """Speeds of the replica, as factors of its fleet's."""

    prefill: SharedFactor
    steps: SharedFactor


class StateHomes(msgspec.Struct, array_like=True, tag="homes"):
    """Answers, those given last first."""

    end_keys: bytes  # keys of the prompts that they answered
    replicas: list[Number]  # places of the replicas among those told
    prompt_tokens: list[Count]
    completion_tokens: list[Count]


class StateModels(msgspec.Struct, array_like=True, tag="models"):
    """What was learned of kinds of replicas, and of each model's tokens (ModelTokens.counts)."""

    models: SharedModels | None
    tokens: Annotated[list[tuple[str, list[float]]], Meta(max_length=MODELS_MAX)]


class StateEnd(msgspec.Struct, array_like=True, tag="end"):
    """The last piece."""

    pieces: int  # number of pieces before this one


OfReplica = StreamState | BlockPage | CopyPage | StateTouches | StateFits
StatePiece = StateOrigin | StateReplica | OfReplica | StateHomes | StateModels | StateEnd

_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[StatePiece] = msgspec.msgpack.Decoder(StatePiece)


def encoded(piece: StatePiece) -> bytes:
    """The piece as bytes."""
    return _encode(piece)


def decoded(piece: bytes) -> StatePiece:
    """The reverse of `encoded`, as far as its shape goes. Raises UnreadableState."""
    if len(piece) > PIECE_BYTES_MAX:
        raise UnreadableState(f"a piece of {len(piece)} bytes")
    try:
        return _decoder.decode(piece)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise UnreadableState(f"a piece that no router of this release has made: {error}") from error
