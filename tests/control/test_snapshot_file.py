"""The file in which a router leaves what it knows (router/control/snapshot_file.py)."""

from __future__ import annotations

import os
import resource
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.control.snapshot_file import MAGIC, read_chunks, write_chunks
from router.core.kv_events.event_state_codec import UnreadableState

pytestmark = pytest.mark.promise(
    "A state file that is damaged, another user's or writable by every user is not loaded.", "records"
)

PIECES = [b"one", b"", b"x" * 70_000]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Where the file is."""
    return tmp_path / "state"


def test_what_was_written_is_read(path: Path) -> None:
    """The same pieces, in a file that nobody else can read, with nothing left beside it."""
    size = write_chunks(path, [b"older"])
    size = write_chunks(path, PIECES)
    assert read_chunks(path, size) == PIECES
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert [each.name for each in path.parent.iterdir()] == ["state"]


def test_a_process_that_died_while_it_wrote_leaves_the_old_one(path: Path) -> None:
    """A half-written file is never in its place, and is in nobody's way."""
    write_chunks(path, PIECES)
    path.with_name("state.new").write_bytes(MAGIC + b"half")
    assert read_chunks(path, 1 << 20) == PIECES
    write_chunks(path, [b"next"])
    assert read_chunks(path, 1 << 20) == [b"next"]


@pytest.mark.finding("2026-11-28/16")
def test_a_file_that_others_can_write_is_not_taken(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checksums have no key. A file of this user or of root counts, with write access of its group at most."""
    write_chunks(path, PIECES)
    path.chmod(0o660)  # what Kubernetes makes of it for a pod with an `fsGroup`
    assert read_chunks(path, 1 << 20) == PIECES
    path.chmod(0o602)
    with pytest.raises(UnreadableState, match="it is writable for all users"):
        read_chunks(path, 1 << 20)
    path.chmod(0o600)
    monkeypatch.setattr(os, "fstat", owned_by(4_242, os.fstat))
    with pytest.raises(UnreadableState, match="its owner is user 4242"):
        read_chunks(path, 1 << 20)
    monkeypatch.setattr(os, "geteuid", lambda: 4_242)
    assert read_chunks(path, 1 << 20) == PIECES


def owned_by(user: int, fstat: Callable[[int], os.stat_result]) -> Callable[[int], os.stat_result]:
    """`os.fstat` of files that belong to this user."""

    def about(descriptor: int) -> os.stat_result:
        found = list(fstat(descriptor))
        found[stat.ST_UID] = user
        return os.stat_result(found)

    return about


@pytest.fixture
def full_disk() -> Iterator[None]:
    """No file may become longer than 20,000 bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.usefixtures("full_disk")
def test_a_full_disk_leaves_the_old_one(path: Path) -> None:
    """OSError, and what was there is there still, without half a file beside it."""
    write_chunks(path, [b"older"])
    with pytest.raises(OSError, match="too large"):
        write_chunks(path, PIECES)
    assert read_chunks(path, 1 << 20) == [b"older"]
    assert [each.name for each in path.parent.iterdir()] == ["state"]


def cut(data: bytes) -> bytes:
    """All but the last byte."""
    return data[:-1]


@pytest.mark.parametrize(
    ("damaged", "why"),
    [
        (cut, "truncated"),
        (lambda data: data[: len(MAGIC) + 5], "truncated"),
        (lambda data: data[:-1] + b"?", "damaged"),
        (lambda _: b"", "it is not a state file of a router"),
        (lambda _: b"\x7fELF" + bytes(100), "it is not a state file of a router"),
        (lambda data: MAGIC.replace(b"1", b"2") + data[len(MAGIC) :], "of another release"),
        (lambda data: data[: len(MAGIC)] + b"\xff" * 12, "a chunk of 4294967295 bytes"),
        (lambda data: data + bytes(200_000), "more than 100000"),
    ],
)
def test_what_is_not_whole_is_not_read(path: Path, damaged: Callable[[bytes], bytes], why: str) -> None:
    """Cut off, damaged, foreign, of another release, too large: each says which."""
    write_chunks(path, PIECES)
    path.write_bytes(damaged(path.read_bytes()))
    with pytest.raises(UnreadableState, match=why):
        read_chunks(path, 100_000)


def test_what_is_no_file_is_not_read(path: Path) -> None:
    """A pipe would be waited for; a folder is an error of the system's."""
    os.mkfifo(path)
    with pytest.raises(UnreadableState, match="not a regular file"):
        read_chunks(path, 100_000)
    path.unlink()
    with pytest.raises(FileNotFoundError):
        read_chunks(path, 100_000)


@given(st.lists(st.binary(max_size=300), max_size=5), st.data())
def test_no_change_of_a_byte_is_missed(
    tmp_path_factory: pytest.TempPathFactory, some: list[bytes], data: st.DataObject
) -> None:
    """Whatever byte is another one, the pieces are not taken."""
    path = tmp_path_factory.mktemp("state") / "state"
    write_chunks(path, some)
    whole = bytearray(path.read_bytes())
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    path.write_bytes(bytes(whole))
    with pytest.raises(UnreadableState):
        read_chunks(path, 1 << 20)
