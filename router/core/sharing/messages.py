"""What routers say to each other: bytes that anybody may have written, and what they mean.

    version   1 byte        an unknown one is of another release: not for us, and no error
    name      1 + n bytes   its length, and the router's name in UTF-8
    boot      8 bytes       big-endian; a later process of that name has a higher one
    body      msgpack       a SharedMessage

Name and boot stand before the body, so that a router's own messages, which a channel gives back to it, are known
without being decoded. Keys of blocks travel as packed bytes, eight each. A row is bytes within the message, which are
decoded only where they differ from the last ones: most of what is repeated for those that missed it has not changed.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from sys import byteorder
from typing import Annotated

import msgspec
from msgspec import Meta

from router.core.facts.peers import Count, Moment, PeerSums, Whole
from router.core.learned.reuse import BUCKETS

VERSION = 2
NAME_BYTES_MAX = 255
KEY_BYTES = 8
ROWS_MAX = 4_096  # replicas in a message
ROW_BYTES_MAX = 160
NUMBER_MAX = (1 << 64) - 1  # highest number of a replica
KINDS_MAX, KIND_MAX = 16, 16  # kinds of replicas whose speeds are told, and base models of a kind
MEANS = (
    *("mean_work_ms", "mean_prompt_tokens", "mean_open_ms", "mean_decode_ms", "mean_answer_tokens"),
    *("answer_ms_max", "token_ms_max", "longest_tokens"),
)  # means and longest times of Speeds that are told
GAPS_MAX = 64  # gaps in what others said that a message asks for, or fills
FITS_MAX = 64  # replicas whose own speeds are in a message
LAGS_MAX = 256  # routers whose lags are in a message
NEWS_MAX = 256  # placements, first tokens, or ends, in a message; by SharingLimits routers say 200 at most
MESSAGE_BYTES_MAX = 4 << 20  # nobody's message is longer
_HEAD_BYTES = 2  # version and length of the name
_BOOT_BYTES = 8


Number = Annotated[int, Meta(ge=0)]


Gap = tuple[Number, Number, Number]
"""(number of a router, first and last of its messages that were missed)"""


RowBytes = Annotated[bytes, Meta(max_length=ROW_BYTES_MAX)]
"""A SharedRow as msgpack."""


class BadMessage(ValueError):
    """A message cannot be read; the text says why in one line."""


class SharedRow(msgspec.Struct, array_like=True, gc=False):
    """What the router has open at one replica. In a message it is bytes (`row_bytes`, `row_of`)."""

    replica: Number  # number of the replica (`number_of`)
    instance: Number  # number of the engine that is there; 0: not known
    cache_at_ms: Moment  # time at which the replica's cache began, as far as the router has seen
    began: bool  # whether it saw the cache begin: otherwise it may be older
    sums: PeerSums


class SharedClaim(msgspec.Struct, array_like=True, gc=False):
    """Blocks of the engine's own size that are being computed for a prompt, which has `depth` others before them."""

    block_tokens: Count
    depth: Count
    keys: bytes


class SharedCredit(msgspec.Struct, array_like=True, gc=False):
    """A past answer that a prompt quotes: its blocks have the keys that the answer has as part of the prompt."""

    replica: Number
    blocks: Count  # leading blocks of the prompt, up to the answer's end
    answer_keys: bytes  # keys under which the answer's blocks were counted so far


class SharedKin(msgspec.Struct, array_like=True, gc=False):
    """The conversation of a placement, by what its client says of it."""

    name: Number  # the name in core/placement/conversations.py, never 0
    own_at: Count  # leading blocks of the prompt that others had asked for before the conversation began
    final: bool  # nothing of it will be asked for again


class SharedPlacement(msgspec.Struct, array_like=True, gc=False):
    """A request was sent to a replica."""

    lease: Count  # numbers ascend
    replica: Number
    own_tokens: Whole  # prompt tokens behind what may be shared in the KV pool; estimates may make it negative
    left_ms: Count  # modelled time until its prefill is done
    keys: bytes  # of all blocks of its prompt
    claim: SharedClaim | None = None
    credit: SharedCredit | None = None
    kin: SharedKin | None = None
    cached_tokens: Count = 0  # prompt tokens that the router believed to be held there already


class SharedFirstToken(msgspec.Struct, array_like=True, gc=False):
    """The prefill of a prompt is over, of which so many tokens were computed."""

    replica: Number
    at_ms: Moment
    computed_tokens: Count


class SharedEnd(msgspec.Struct, array_like=True, gc=False):
    """The end of a lease. Where the answer ended well, the replica is the home of the conversation."""

    lease: Count
    replica: Number
    computed: bool  # whether the prompt was computed
    end_key: Number = 0  # key of the prompt; 0: it has none, or did not end well
    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    answer_blocks: Count = 0  # blocks that the answer takes behind the prompt


class SharedAgain(msgspec.Struct, array_like=True):
    """News that one router missed, told once more. They are for that one alone: to all others they are old."""

    router: Number
    placements: Annotated[list[SharedPlacement], Meta(max_length=NEWS_MAX)]
    ends: Annotated[list[SharedEnd], Meta(max_length=NEWS_MAX)]


class SharedFit(msgspec.Struct, array_like=True, gc=False):
    """Sums that a model is fitted to (core/learned/least_squares.py)."""

    xx: Annotated[list[float], Meta(min_length=9, max_length=9)]
    xy: Annotated[list[float], Meta(min_length=3, max_length=3)]
    observations: Count


class SharedFactor(msgspec.Struct, array_like=True, gc=False):
    """Evidence for the speed of a replica (core/learned/speed_factor.py)."""

    log_sum: float
    weight: float
    observations: Count


class SharedFits(msgspec.Struct, array_like=True, gc=False):
    """Speeds of one replica, as factors of its fleet's."""

    replica: Number
    prefill: SharedFactor
    steps: SharedFactor


class SharedSpeeds(msgspec.Struct, array_like=True, gc=False):
    """What the answers of one kind of replicas taught; fields are those of Speeds."""

    kind: Annotated[list[str], Meta(max_length=KIND_MAX)]  # base models that they serve
    prefill: SharedFit
    steps: SharedFit
    answer_counts: tuple[float, float]
    answers: Count
    decodes: Count
    means: Annotated[list[float], Meta(min_length=len(MEANS), max_length=len(MEANS))]  # of the fields MEANS


class SharedModels(msgspec.Struct, array_like=True, gc=False):
    """What the router has learned: for a router that has learned nothing yet."""

    speeds: Annotated[list[SharedSpeeds], Meta(max_length=KINDS_MAX)]
    reused: Annotated[list[float], Meta(max_length=BUCKETS)]
    ended: Annotated[list[float], Meta(max_length=BUCKETS)]


class SharedMessage(msgspec.Struct, array_like=True):
    """One message. Times are milliseconds of the sender's clock. Rows are of replicas at which anything changed, whose
    last row they replace. A few times a second a message has an `arc`, the first and the last of the numbers of
    replicas that it is whole for: among those, the router has nothing open at a replica without a row. A circle of
    arcs, from 0 to NUMBER_MAX, comes to all replicas."""

    seq: Count  # messages of this process before this one
    sent_ms: Moment
    lags: Annotated[list[tuple[Number, int]], Meta(max_length=LAGS_MAX)]  # (number of a router, Delays.lag_ms of it)
    arc: tuple[Number, Number] | None
    rows: Annotated[list[RowBytes], Meta(max_length=ROWS_MAX)]
    first: Count = 0  # leases before this one have ended
    placements: Annotated[list[SharedPlacement], Meta(max_length=NEWS_MAX)] = []
    first_tokens: Annotated[list[SharedFirstToken], Meta(max_length=NEWS_MAX)] = []
    ends: Annotated[list[SharedEnd], Meta(max_length=NEWS_MAX)] = []
    models: SharedModels | None = None
    fits: Annotated[list[SharedFits], Meta(max_length=FITS_MAX)] = []
    missed: Annotated[list[Gap], Meta(max_length=GAPS_MAX)] = []
    again: Annotated[list[SharedAgain], Meta(max_length=GAPS_MAX)] = []


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(SharedMessage)
_row_decoder = msgspec.msgpack.Decoder(SharedRow)


def head(name: str, boot: int) -> bytes:
    """What all messages of this process begin with. Raises ValueError for a name that is too long or empty."""
    encoded = name.encode()
    if not 0 < len(encoded) <= NAME_BYTES_MAX:
        raise ValueError(f"a router's name has 1 to {NAME_BYTES_MAX} bytes, not {len(encoded)}: {name[:40]!r}")
    return bytes((VERSION, len(encoded))) + encoded + boot.to_bytes(_BOOT_BYTES, "big")


def encoded(head_: bytes, body: SharedMessage) -> bytes:
    """The message as bytes."""
    return head_ + _encoder.encode(body)


def sender_of(message: bytes) -> tuple[str, int, int] | None:
    """(name, boot, where the body begins); None where the version is not ours. Raises BadMessage."""
    if len(message) < _HEAD_BYTES:
        raise BadMessage(f"{len(message)} bytes are no message")
    if message[0] != VERSION:
        return None
    end = _HEAD_BYTES + message[1]
    if not message[1] or len(message) < end + _BOOT_BYTES:
        raise BadMessage("it ends within its head")
    try:
        name = message[_HEAD_BYTES:end].decode()
    except UnicodeDecodeError as error:
        raise BadMessage("the name of its router is not UTF-8") from error
    return name, int.from_bytes(message[end : end + _BOOT_BYTES], "big"), end + _BOOT_BYTES


def body_of(message: bytes, begin: int) -> SharedMessage:
    """The body, as far as its shape goes. Raises BadMessage."""
    if len(message) > MESSAGE_BYTES_MAX:
        raise BadMessage(f"{len(message)} bytes are more than {MESSAGE_BYTES_MAX}")
    try:
        return _decoder.decode(memoryview(message)[begin:])
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadMessage(f"its body: {error}") from error


def row_bytes(row: SharedRow) -> bytes:
    """The row as it stands in messages."""
    return _encoder.encode(row)


def row_of(bytes_: bytes) -> SharedRow:
    """The reverse of `row_bytes`. Raises BadMessage."""
    try:
        return _row_decoder.decode(bytes_)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise BadMessage(f"a row: {error}") from error


def packed(keys: Sequence[int]) -> bytes:
    """Keys of blocks as bytes, little-endian."""
    numbers = array("Q", keys)
    if byteorder == "big":
        numbers.byteswap()
    return numbers.tobytes()


def unpacked(keys: bytes) -> list[int]:
    """The reverse of `packed`. Raises BadMessage."""
    if len(keys) % KEY_BYTES:
        raise BadMessage(f"{len(keys)} bytes of keys are not {KEY_BYTES} each")
    numbers = array("Q", keys)
    if byteorder == "big":
        numbers.byteswap()
    return numbers.tolist()
