"""File in which a router saves its state: pieces, each with its length and a checksum.

It is written under a temporary name and then renamed, so a reader finds an old file or a new one, always complete. Any
other content raises UnreadableState: a file that was cut off, damaged, or made by another program or another release.
"""

from __future__ import annotations

import os
import stat
import struct
import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from xxhash import xxh3_64_intdigest

from router.core.kv_events.event_state_codec import UnreadableState
from router.core.peer_sync.snapshot_format import PIECE_BYTES_MAX

MAGIC = b"warmroute state 1\n"
NAME = MAGIC[:16]  # the same in all releases
MODE = 0o600
_WRITING = threading.Lock()  # a cancelled write may still be running in its thread
_HEAD = struct.Struct("!IQ")  # length of a piece, its xxh3-64


def write_chunks(path: Path, pieces: Sequence[bytes]) -> int:
    """Replace the file atomically and return its size in bytes. On OSError the old file is kept."""
    with _WRITING:
        return _write_and_sync(path, path.with_name(f"{path.name}.new"), pieces)


def _write_and_sync(path: Path, temporary: Path, pieces: Sequence[bytes]) -> int:
    temporary.unlink(missing_ok=True)  # a process may have ended in the middle of a write
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, MODE)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(MAGIC)
            for piece in pieces:
                file.write(_HEAD.pack(len(piece), xxh3_64_intdigest(piece)))
                file.write(piece)
            size = file.tell()
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise
    with suppress(OSError):  # some file systems cannot sync a folder, and the file exists anyway
        _sync(path.parent)
    return size


def read_chunks(path: Path, bytes_max: int) -> list[bytes]:
    """Read the pieces of the file. Raises FileNotFoundError, other OSErrors, and UnreadableState."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe of that name may have no writer
    with os.fdopen(descriptor, "rb") as file:
        about = os.fstat(file.fileno())
        if not stat.S_ISREG(about.st_mode):
            raise UnreadableState("it is not a regular file")
        # The checksums have no key, so any user that can write the file controls its content. Write access for its
        # group is accepted: Kubernetes grants it to the `fsGroup` of the pod each time the volume is mounted.
        if about.st_uid not in (os.geteuid(), 0):
            raise UnreadableState(f"its owner is user {about.st_uid} instead of the router's user {os.geteuid()}")
        if about.st_mode & stat.S_IWOTH:
            raise UnreadableState("it is writable for all users")
        if about.st_size > bytes_max:
            raise UnreadableState(f"{about.st_size} bytes are more than {bytes_max} (snapshot.bytes_max)")
        begin = file.read(len(MAGIC))
        if begin != MAGIC:
            raise UnreadableState(
                "it has the format of another release"
                if begin[: len(NAME)] == NAME
                else "it is not a state file of a router"
            )
        pieces = list[bytes]()
        while head := file.read(_HEAD.size):
            if len(head) < _HEAD.size:
                raise UnreadableState("it is truncated")
            length, digest = _HEAD.unpack(head)
            if length > PIECE_BYTES_MAX:
                raise UnreadableState(f"a chunk of {length} bytes")
            piece = file.read(length)
            if len(piece) < length:
                raise UnreadableState("it is truncated")
            if xxh3_64_intdigest(piece) != digest:
                raise UnreadableState("it is damaged")
            pieces.append(piece)
        return pieces


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
