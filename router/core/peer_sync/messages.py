"""Wire format of messages between routers, as msgpack. The bytes are untrusted: any client of the store may have
written them.

Keys of blocks are packed bytes, eight for each key. A row is bytes within the message, which are decoded only if they
differ from the last ones: a router's complete state repeats most of its rows.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from sys import byteorder
from typing import Annotated

import msgspec
from msgspec import Meta

from router.core.estimators.reuse import BUCKETS
from router.core.types.peer_load import Count, Moment, PeerLoad, Whole

KEY_BYTES = 8
ROWS_MAX = 4_096  # replicas in a message
ROW_BYTES_MAX = 160
KINDS_MAX, KIND_MAX = 16, 16  # kinds of replicas with shared speeds, and base models of a kind
MEANS = (
    *("mean_work_ms", "mean_prompt_tokens", "mean_open_ms", "mean_decode_ms", "mean_answer_tokens"),
    *("answer_ms_max", "token_ms_max", "longest_tokens"),
)  # means and maxima of ModelSpeeds that are shared
FITS_MAX = 64  # replicas with their own speeds in a message
NEWS_MAX = 256  # placements, first tokens, or ends, in a message; SharingLimits allow 200 at most
MESSAGE_BYTES_MAX = 4 << 20  # no router sends a longer message


Number = Annotated[int, Meta(ge=0)]
RowBytes = Annotated[bytes, Meta(max_length=ROW_BYTES_MAX)]
"""A ReplicaLoadRow as msgpack."""


class BadMessage(ValueError):
    """A message is unreadable; the text is a one-line reason."""


class ReplicaLoadRow(msgspec.Struct, array_like=True, gc=False):
    """The router's open work at one replica. In a message it is bytes (`row_bytes`, `row_of`)."""

    replica: Number  # number of the replica (`number_of`)
    instance: Number  # number of its current engine; 0: unknown
    cache_at_ms: Moment  # start time of the replica's cache, as the router observed it
    began: bool  # the router observed the start; otherwise the cache may be older
    sums: PeerLoad


class ExpectedBlocks(msgspec.Struct, array_like=True, gc=False):
    """Blocks of the engine's own size in computation for a prompt, after `depth` other blocks."""

    block_tokens: Count
    depth: Count
    keys: bytes


class AnswerRef(msgspec.Struct, array_like=True, gc=False):
    """A past answer that a prompt quotes. Its blocks have the keys that the answer has as part of the prompt."""

    replica: Number
    blocks: Count  # leading blocks of the prompt, up to the answer's end
    answer_keys: bytes  # keys under which the answer's blocks were counted so far


class ConversationMark(msgspec.Struct, array_like=True, gc=False):
    """The conversation of a placement, as its client identifies it."""

    name: Number  # the name in core/placement/conversation_affinity.py, never 0
    own_at: Count  # leading blocks of the prompt that were requested before the conversation began
    final: bool  # no further request of it is expected


class SharedPlacement(msgspec.Struct, array_like=True, gc=False):
    """A request was placed on a replica."""

    lease: Count  # numbers ascend
    replica: Number
    own_tokens: Whole  # prompt tokens after the part that may be shared in the KV pool; estimates may make it negative
    left_ms: Count  # modelled time until its prefill is complete
    keys: bytes  # of all blocks of its prompt
    claim: ExpectedBlocks | None = None
    credit: AnswerRef | None = None
    kin: ConversationMark | None = None
    cached_tokens: Count = 0  # prompt tokens that the router estimated as cached there at placement


class SharedFirstToken(msgspec.Struct, array_like=True, gc=False):
    """The prefill of a prompt is complete; `computed_tokens` of it were computed."""

    replica: Number
    at_ms: Moment
    computed_tokens: Count


class SharedEnd(msgspec.Struct, array_like=True, gc=False):
    """The end of a lease. If the answer ended well, the replica has the affinity of the conversation."""

    lease: Count
    replica: Number
    computed: bool  # the prompt was computed
    end_key: Number = 0  # key of the prompt; 0: it has none, or did not end well
    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    answer_blocks: Count = 0  # blocks of the answer after the prompt


class FitSums(msgspec.Struct, array_like=True, gc=False):
    """Sums of a least-squares fit (core/estimators/least_squares.py)."""

    xx: Annotated[list[float], Meta(min_length=9, max_length=9)]
    xy: Annotated[list[float], Meta(min_length=3, max_length=3)]
    observations: Count


class SharedFactor(msgspec.Struct, array_like=True, gc=False):
    """Evidence for the speed of a replica (core/estimators/speed_factor.py)."""

    log_sum: float
    weight: float
    observations: Count


class SharedFits(msgspec.Struct, array_like=True, gc=False):
    """Speeds of one replica, as factors of its fleet's."""

    replica: Number
    prefill: SharedFactor
    steps: SharedFactor


class SharedSpeeds(msgspec.Struct, array_like=True, gc=False):
    """Values learned from the answers of one kind of replicas; fields are those of ModelSpeeds."""

    kind: Annotated[list[str], Meta(max_length=KIND_MAX)]  # base models that they serve
    prefill: FitSums
    steps: FitSums
    answer_counts: tuple[float, float]
    answers: Count
    decodes: Count
    means: Annotated[list[float], Meta(min_length=len(MEANS), max_length=len(MEANS))]  # of the fields MEANS


class SharedModels(msgspec.Struct, array_like=True, gc=False):
    """Learned values of the router, used by routers without any of their own."""

    speeds: Annotated[list[SharedSpeeds], Meta(max_length=KINDS_MAX)]
    reused: Annotated[list[float], Meta(max_length=BUCKETS)]
    ended: Annotated[list[float], Meta(max_length=BUCKETS)]


class SharedMessage(msgspec.Struct, array_like=True):
    """One message, or the complete state of a router. Times are milliseconds of the sender's clock.

    The rows of a message are of replicas with a change, and replace their previous rows. A state has the rows of all
    replicas with any count of this process, and no events.
    """

    rows: Annotated[list[RowBytes], Meta(max_length=ROWS_MAX)]
    first: Count = 0  # leases before this one have ended
    placements: Annotated[list[SharedPlacement], Meta(max_length=NEWS_MAX)] = []
    first_tokens: Annotated[list[SharedFirstToken], Meta(max_length=NEWS_MAX)] = []
    ends: Annotated[list[SharedEnd], Meta(max_length=NEWS_MAX)] = []
    models: SharedModels | None = None
    fits: Annotated[list[SharedFits], Meta(max_length=FITS_MAX)] = []


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(SharedMessage)
_row_decoder = msgspec.msgpack.Decoder(ReplicaLoadRow)


def encode_message(body: SharedMessage) -> bytes:
    """Return the message as bytes."""
    return _encoder.encode(body)


def decode_message(message: bytes) -> SharedMessage:
    """Decode a message and check its schema. Raises BadMessage."""
    if len(message) > MESSAGE_BYTES_MAX:
        raise BadMessage(f"{len(message)} bytes are more than {MESSAGE_BYTES_MAX}")
    try:
        return _decoder.decode(message)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadMessage(f"not a message of a router: {error}") from error


def row_bytes(row: ReplicaLoadRow) -> bytes:
    """Encode the row as it is in messages."""
    return _encoder.encode(row)


def row_of(bytes_: bytes) -> ReplicaLoadRow:
    """Decode a row; the reverse of `row_bytes`. Raises BadMessage."""
    try:
        return _row_decoder.decode(bytes_)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadMessage(f"a row: {error}") from error


def pack_keys(keys: Sequence[int]) -> bytes:
    """Return keys of blocks as bytes, little-endian."""
    numbers = array("Q", keys)
    if byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def unpack_keys(keys: bytes) -> list[int]:
    """Return the keys of packed bytes; the reverse of `pack_keys`. Raises BadMessage."""
    if len(keys) % KEY_BYTES:
        raise BadMessage(f"{len(keys)} bytes of keys are not {KEY_BYTES} each")
    numbers = array("Q", keys)
    if byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()
