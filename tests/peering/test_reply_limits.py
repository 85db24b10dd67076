"""Replies of a store are looked at before they are read: what hiredis would make of them, and nothing beyond limits."""

from __future__ import annotations

import tracemalloc
from contextlib import suppress
from typing import Any

import hiredis
import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.peering import reply_limits
from router.peering.reply_limits import DEPTH_MAX, DROPPED_BYTES_MAX, LINE_BYTES_MAX, BoundedReader

Reply = Any
lines = st.binary(max_size=20).map(lambda line: line.replace(b"\r", b"").replace(b"\n", b""))
replies: st.SearchStrategy[bytes] = st.recursive(
    st.one_of(
        st.integers(-9, 10**12).map(lambda number: b":%d\r\n" % number),
        lines.map(lambda line: b"+" + line + b"\r\n"),
        lines.map(lambda line: b"-ERR" + line + b"\r\n"),
        st.binary(max_size=30).map(lambda text: b"$%d\r\n%s\r\n" % (len(text), text)),
        st.sampled_from([b"$-1\r\n", b"*-1\r\n", b"*0\r\n", b"$0\r\n\r\n"]),
        st.binary(max_size=30).map(lambda t: b"*3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$%d\r\n%s\r\n" % (len(t), t)),
    ),
    lambda inner: st.lists(inner, max_size=4).map(lambda each: b"*%d\r\n" % len(each) + b"".join(each)),
    max_leaves=12,
)


class Odd(Exception):
    """Bytes that are no reply, or beyond a limit."""


def reader(bytes_max: int = 10_000, elements_max: int = 1_000) -> BoundedReader:
    """One with small limits."""
    return BoundedReader(Odd, hiredis.ReplyError, bytes_max=bytes_max, elements_max=elements_max)


def read(of: Any, data: bytes, cuts: list[int]) -> list[Any]:
    """All replies in these bytes, which come in pieces; errors of the other side as texts."""
    found, ends = [], sorted({*(cut % (len(data) + 1) for cut in cuts), len(data)})
    for begin, end in zip([0, *ends], ends, strict=False):
        of.feed(data[begin:end])
        while (reply := of.gets()) is not False:
            found.append(reply)
    return [_plain(each) for each in found]


def fed(one: BoundedReader, pieces: list[bytes]) -> list[Any]:
    """What came of it after each piece."""
    found = []
    for piece in pieces:
        one.feed(piece)
        found.append(one.gets())
    return found


def _plain(reply: Any) -> Any:
    if isinstance(reply, list):
        return [_plain(each) for each in reply]
    return str(reply) if isinstance(reply, Exception) else reply


@given(st.lists(replies, max_size=5), st.lists(st.integers(0, 1 << 20), max_size=8))
def test_replies_are_those_of_hiredis(sent: list[bytes], cuts: list[int]) -> None:
    """Whatever is in them, and however the bytes are cut."""
    data, one = b"".join(sent), reader()
    assert read(one, data, cuts) == read(hiredis.Reader(protocolError=Odd), data, [])
    assert not one.has_data()


@given(st.one_of(st.binary(max_size=60), st.text("*$+-:\r\n0123456789a", max_size=60).map(str.encode)), st.data())
def test_bytes_that_are_no_replies_end_in_one_way(data: bytes, draws: st.DataObject) -> None:
    """Either hiredis takes the same replies, or they are refused, here perhaps with the end of their line; nothing else
    is raised."""
    cuts = draws.draw(st.lists(st.integers(0, 100), max_size=3))
    with suppress(Odd):
        found = read(reader(), data, cuts)
        assert found == read(hiredis.Reader(protocolError=Odd), data, [])


@pytest.mark.parametrize(
    "data",
    [
        b"*1000000000\r\n",
        b"*1001\r\n",
        b"*500\r\n*501\r\n",
        b"*1\r\n" * (DEPTH_MAX + 1),
        b"$%d\r\n" % (DROPPED_BYTES_MAX + 1),
        b"$4000000000\r\n",
        b"$-2\r\n",
        b"$1_0\r\n",
        b"$+1\r\n",
        b"*\r\n",
        b"%1000000000\r\n",
        b">1000000000\r\n",
        b"~3\r\n",
        b"+" + b"x" * LINE_BYTES_MAX,
        b"*4\r\n" + (b"+" + b"x" * 4_000 + b"\r\n") * 3,
    ],
)
def test_nothing_beyond_a_limit_is_read(data: bytes) -> None:
    """A list of 10^9 replies is one line: it is refused before anything is made of it, whole or in pieces."""
    for pieces in ([data], [data[n : n + 1] for n in range(len(data))]):
        one, found = reader(), list[Any]()
        with pytest.raises(Odd):
            found += fed(one, pieces)
        assert not found


def test_a_string_that_is_too_long_is_dropped_as_it_comes() -> None:
    """It is empty in its message, takes no memory, and what comes behind it is read."""
    one, piece = reader(bytes_max=100_000), b"x" * 65_536
    tracemalloc.start()
    try:
        one.feed(b"*3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$%d\r\n" % (400 * len(piece)))
        assert one.gets() is False
        before = tracemalloc.get_traced_memory()[0]
        tracemalloc.reset_peak()
        for _ in range(400):
            one.feed(piece)
            assert one.gets() is False
        assert tracemalloc.get_traced_memory()[1] - before < 10 * len(piece)
    finally:
        tracemalloc.stop()
    one.feed(b"\r\n:7\r\n")
    assert [one.gets(), one.gets(), one.gets()] == [[b"message", b"c", b""], 7, False]


def test_all_strings_of_a_reply_share_its_bytes() -> None:
    """Of many strings those are dropped for which no bytes are left."""
    one = reader(bytes_max=250)
    one.feed(b"*4\r\n" + b"$100\r\n%s\r\n" % (b"x" * 100) * 4 + b"$3\r\nyes\r\n")
    assert [len(each) for each in one.gets()] == [100, 100, 0, 0]
    assert one.gets() == b"yes"


def test_the_quick_look_is_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """A message whose lengths lie is the same, read at once or header by header."""
    lies = [
        b"*3\r\n$7\r\nmessage\r\n$2\r\nc\r\n$1\r\nx\r\n",
        b"*3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$3\r\nx\r\n+a\r\n",
        b"*3\r\n$7\r\nmessage\r\n$01\r\nc\r\n$1\r\nx\r\n",
        b"*3\r\n$7\r\nmessage\r\n$1\r\nc\r\n$1\r\nx\r\n",
    ]

    def outcomes() -> list[Any]:
        found = []
        for lie in lies:
            try:
                found.append(read(reader(), lie, []))
            except Odd as error:
                found.append(str(error)[:20])
        return found

    quick = outcomes()
    monkeypatch.setattr(reply_limits.BoundedReader, "_message", lambda _: None)
    assert outcomes() == quick
    assert quick[3] == [[b"message", b"c", b"x"]]
