"""Proof that a message, a state, an entry or a parcel in the store is from a router that knows the fleet's secret.

The secret is `auth.secret`. Without it, the secret is derived from the digests of all API keys: every router of a fleet
has them, and a tenant knows those of its own keys only. A fleet without keys and without a secret trusts its store.

    version   1 byte        2: an older release takes it for a message of another release
    count     1 byte        number of marks
    marks     16 bytes each HMAC-SHA256, cut off, of all that follows, one with each secret in force
    wall      8 bytes       the sender's wall clock, seconds since 1970
    message   a frame (frames.py)

The key of each HMAC is derived from a secret, the name of the fleet, and the purpose. So a mark of one fleet or one
purpose is invalid in another. While a secret is exchanged, router by router, there are two. Each message then has a
mark by both, and one known mark is enough.

A replayed message has a lower number than the last one of its process. A router that has just started does not know
that process. For an unknown process the wall clock decides: FRESH_S is longer than clocks of one fleet should differ.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Callable, Iterable, Sequence
from hmac import compare_digest, digest

FRESH_S = 60.0  # greatest difference of wall clocks at which an unknown process is trusted
GRACE_S = 3_600.0  # time for which earlier secrets are also valid: keys files are reloaded router by router
SECRETS_MAX = 4  # secrets in force at once
MARK_BYTES = 16
VERSION = 2
_VERSION = bytes((VERSION,))
MESSAGE, STATE, OWNER, PARCEL = PURPOSES = "message", "state", "owner", "parcel"
_HASH = "sha256"
_WALL = struct.Struct("!d")


class NotSealed(ValueError):
    """The data is not of this fleet; the text gives the reason."""


class Seals:
    """The secrets of one fleet. False if there is no secret: then all data is trusted."""

    def __init__(self, fleet: str, secrets: Iterable[bytes], clock: Callable[[], float]) -> None:
        """The first of `secrets` is in force. The others are also valid while they are given here."""
        self._fleet, self._clock = fleet, clock
        self._given: list[bytes] = []
        self._before: list[tuple[bytes, float]] = []  # secrets that were in force until this time
        self._keys: dict[str, list[bytes]] = {purpose: [] for purpose in PURPOSES}
        self._due_s = math.inf  # time at which the first of `_before` expires
        self.renew(secrets)

    def __bool__(self) -> bool:
        return bool(self._keys[MESSAGE])

    def renew(self, secrets: Iterable[bytes]) -> bool:
        """Replace the secrets. Earlier ones are valid for GRACE_S, unless no secret is left. Returns True if any
        changed."""
        given, now_s = list(dict.fromkeys(secrets)), self._clock()
        if given == self._given:
            return False
        self._before += [(secret, now_s) for secret in self._given if secret not in given]
        self._given = given
        if not given:
            self._before.clear()
        self._make(now_s)
        return True

    def _make(self, now_s: float) -> None:
        self._before = [each for each in self._before if now_s - each[1] < GRACE_S and each[0] not in self._given]
        self._due_s = min((until_s for _, until_s in self._before), default=math.inf) + GRACE_S
        secrets = [*self._given, *(secret for secret, _ in reversed(self._before))][:SECRETS_MAX]
        for purpose in PURPOSES:
            about = f"warmroute sharing\0{purpose}\0{self._fleet}".encode()
            self._keys[purpose] = [digest(secret, about, _HASH) for secret in secrets]

    def mark(self, purpose: str, data: bytes) -> bytes:
        """Return the marks of these bytes, one with each secret; empty without a secret."""
        if self._clock() >= self._due_s:
            self._make(self._clock())
        return b"".join([digest(key, data, _HASH)[:MARK_BYTES] for key in self._keys[purpose]])

    def holds(self, purpose: str, data: bytes, marks: bytes) -> bool:
        """True if one of these marks is valid for these bytes, or if there is no secret. No input makes it raise."""
        keys = self._keys[purpose]
        if not keys:
            return True
        if len(marks) == MARK_BYTES and compare_digest(digest(keys[0], data, _HASH)[:MARK_BYTES], marks):
            return True  # nearly always
        count = len(marks) // MARK_BYTES
        if len(marks) % MARK_BYTES or not 0 < count <= SECRETS_MAX:
            return False
        for key in keys:
            own = digest(key, data, _HASH)[:MARK_BYTES]
            for n in range(count):
                if compare_digest(own, marks[n * MARK_BYTES : (n + 1) * MARK_BYTES]):
                    return True
        return False

    # -- messages ----------------------------------------------------------------------------------------------------

    def seal(self, purpose: str, message: bytes, wall_s: float) -> bytes:
        """Return the message in its envelope; unchanged without a secret."""
        if not self._keys[purpose]:
            return message
        inner = _WALL.pack(wall_s) + message
        marks = self.mark(purpose, inner)
        return b"%c%c%b%b" % (VERSION, len(marks) // MARK_BYTES, marks, inner)

    def unseal(self, purpose: str, message: bytes) -> tuple[bytes, float | None]:
        """Return (the message, its sender's wall clock) of an envelope. The clock is None without a secret. Raises
        NotSealed."""
        in_envelope = message[:1] == _VERSION
        if not self._keys[purpose]:
            if in_envelope:
                raise NotSealed("it is signed, but this router has no secret or API keys")
            return message, None
        if not in_envelope:
            raise NotSealed("it has no signature")
        begin = 2 + MARK_BYTES * message[1] if len(message) > 1 else len(message)
        if len(message) < begin + _WALL.size:
            raise NotSealed("its signature is truncated")
        inner = message[begin:]
        if not self.holds(purpose, inner, message[2:begin]):
            raise NotSealed("its signature is from another secret")
        return inner[_WALL.size :], _WALL.unpack_from(inner)[0]


def secret_of_keys(digests: Sequence[str]) -> bytes:
    """Derive a secret that all routers with these API keys have."""
    return hashlib.sha256("\n".join(("warmroute keys", *sorted(digests))).encode()).digest()


def owner_bytes(response_id: str, replica: str, tenant: str) -> bytes:
    """Encode an owner of a stored response as unique bytes."""
    return b"".join(struct.pack("!I", len(word)) + word for word in map(_encode_word, (response_id, replica, tenant)))


def _encode_word(word: str) -> bytes:
    return word.encode("utf-8", "surrogatepass")
