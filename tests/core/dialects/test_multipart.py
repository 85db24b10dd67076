"""Forms: the model that one names is known, or nobody is told any."""

from __future__ import annotations

from email import policy
from email.parser import BytesParser

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from router.core.dialects import InvalidBody
from router.core.dialects.multipart import any_form_model, form_model, form_streams, url_form

TYPE = b"multipart/form-data; boundary=b"
FILE = b'Content-Disposition: form-data; name="file"; filename="a b.wav"\r\nContent-Type: audio/wav\r\n\r\nRI\nFF'
MODEL = b'Content-Disposition: form-data; name="model"\r\n\r\n'
PLAIN = MODEL + b"m"


def form(*parts: bytes) -> bytes:
    """With the boundary `b`."""
    return b"".join(b"--b\r\n%b\r\n" % part for part in parts) + b"--b--\r\n"


def test_the_model_of_a_plain_form() -> None:
    """It is read wherever the field stands, as the usual clients write it; a form without one names none."""
    assert form_model(TYPE, form(FILE, PLAIN)) == form_model(TYPE, form(PLAIN, FILE)) == "m"
    assert form_model(b'Multipart/Form-Data;boundary="b"', form(b"Content-Type: text/plain\r\n" + PLAIN)) == "m"
    assert form_model(TYPE, form(FILE)) is None
    assert form_model(TYPE, form(FILE.replace(b'"a b.wav"', b"\"a.wav\"; filename*=utf-8''%C3%A4.wav"), PLAIN)) == "m"


INNER = b'Content-Disposition: form-data; name="x"\r\n\r\n' + PLAIN  # a field whose value looks like another
ODD = {
    "twice": form(PLAIN, MODEL + b"n"),
    "escaped": form(PLAIN.replace(b"model", b"mod\\el")),
    "in pieces": form(PLAIN.replace(b'name="model"', b'name*0="mo"; name*1="del"')),
    "two names": form(PLAIN.replace(b'"model"', b'"x"; name="model"')),
    "two dispositions": form(b'Content-Disposition: form-data; name="x"\r\n' + PLAIN),
    "folded": form(PLAIN.replace(b"; name", b";\r\n name")),
    "encoded": form(b"Content-Transfer-Encoding: base64\r\n" + PLAIN),
    "no disposition": form(b"A: b\r\n\r\nx"),
    "bare line feeds": form(PLAIN).replace(b"\r\n", b"\n"),
    "boundary behind a bare line feed": form(PLAIN + b"\n--b\r\n" + MODEL + b"n"),
    "blank behind a boundary": form(PLAIN).replace(b"--b\r\n", b"--b \r\n"),
    "something before": b"x\r\n" + form(PLAIN),
    "something behind": form(PLAIN) + form(MODEL + b"n"),
    "no end": form(PLAIN).replace(b"--b--\r\n", b""),
    "not UTF-8": form(MODEL + b"\xff"),
    "no head": form(b"\r\n\r\nx", PLAIN),
    "a long head": form(b"A: b\r\n" * 2_000 + PLAIN),
    "many parts": form(*[FILE] * 300, PLAIN),
    "empty": b"",
    "JSON": b'{"model":"m"}',
}


@pytest.mark.parametrize("body", ODD.values(), ids=ODD)
def test_what_may_be_read_otherwise(body: bytes) -> None:
    """It is refused."""
    with pytest.raises(InvalidBody):
        form_model(TYPE, body)


@pytest.mark.parametrize(
    "type_", [b"multipart/mixed; boundary=b", TYPE + b"; boundary=c", TYPE + b"; charset=utf-16", b""]
)
def test_types_that_may_be_read_otherwise(type_: bytes) -> None:
    """Another boundary, or an encoding of all fields."""
    with pytest.raises(InvalidBody):
        form_model(type_, form(PLAIN))


PIECES = (
    PLAIN,
    MODEL,
    FILE,
    INNER,
    b"--b",
    b"--",
    b"\r\n",
    b"\n",
    b"\r",
    b" ",
    b'"',
    b"m",
    b"n",
    b"; ",
    b"name=",
    b"model",
)


@given(st.lists(st.sampled_from(PIECES), max_size=8).map(b"".join))
@example(b"--b\r\n" + INNER + b"\r\n--b--")
def test_another_reader_finds_the_same(body: bytes) -> None:
    """Whatever is not refused, Python's own parser reads in the same way: no other model than the one that is told."""
    try:
        model = form_model(TYPE, body)
    except InvalidBody:
        return
    read = BytesParser(policy=policy.HTTP).parsebytes(b"Content-Type: " + TYPE + b"\r\n\r\n" + body)
    found = [part for part in read.iter_parts() if part.get_param("name", header="content-disposition") == "model"]
    said = [part.get_payload(decode=True) for part in found]
    assert said == [model.encode()] if model is not None else said in ([], [b""])
    assert any_form_model(TYPE, body) == model


def of(head: bytes, value: bytes = b"m") -> bytes:
    """A part with this head."""
    return head + b"\r\n\r\n" + value


# As clients write them: a part's head, and the form's type.
CLIENTS = {
    "curl": (of(b'Content-Disposition: form-data; name="model"'), TYPE),
    ".NET": (
        of(b"Content-Type: text/plain; charset=utf-8\r\nContent-Disposition: form-data; name=model"),
        b'multipart/form-data; boundary="b"',
    ),
    "OkHttp": (
        of(
            b'Content-Disposition: form-data; name="model"\r\nContent-Type: text/plain;charset=UTF-8\r\n'
            b"Content-Length: 1"
        ),
        TYPE,
    ),
    "Apache": (
        of(
            b'Content-Disposition: form-data; name="model"\r\nContent-Type: text/plain; charset=ISO-8859-1\r\n'
            b"Content-Transfer-Encoding: 8bit"
        ),
        TYPE,
    ),
    "hyper": (of(b'content-disposition: form-data; name="model"'), TYPE),
}
NET_FILE = b"Content-Disposition: form-data; name=file; filename=a.wav; filename*=utf-8''a.wav\r\n\r\nRIFF"


@pytest.mark.parametrize(("part", "type_"), CLIENTS.values(), ids=CLIENTS)
def test_forms_as_clients_write_them(part: bytes, type_: bytes) -> None:
    """The model is read, also where it must not be mistaken, in front of a file and behind one."""
    for read in (form_model, any_form_model):
        for file in (FILE, NET_FILE):
            assert read(type_, form(part, file)) == read(type_, form(file, part)) == "m"
        assert read(type_, form(INNER.replace(PLAIN, b'name="model"'), part)) == "m"
        assert read(type_, form(part[:-1])) is None


LENIENT = {
    "bare line feeds": (TYPE, form(FILE, PLAIN).replace(b"\r\n", b"\n")),
    "folded": (TYPE, form(PLAIN.replace(b"; name", b";\r\n name"))),
    "another type": (b"multipart/form-data; charset=utf-8; Boundary=b", form(PLAIN)),
    "something before": (TYPE, b"preamble\r\n" + form(PLAIN)),
    "no end": (TYPE, form(PLAIN).replace(b"--b--\r\n", b"")),
    "twice": (TYPE, form(MODEL + b"n", PLAIN)),
    "an escaped boundary": (b'multipart/form-data; boundary="\\b"', form(PLAIN)),
}


@pytest.mark.parametrize(("type_", "body"), LENIENT.values(), ids=LENIENT)
def test_forms_of_any_kind(type_: bytes, body: bytes) -> None:
    """Where nothing hangs on it a form is read however it is written; of several fields the last one counts."""
    assert any_form_model(type_, body) == "m"


@given(st.lists(st.sampled_from((*PIECES, b"Content-Disposition:", b"--b\r\n", b"--b--", b"=", b";")), max_size=40))
def test_no_form_is_too_odd(pieces: list[bytes]) -> None:
    """Nothing is raised; a name is text."""
    assert any_form_model(TYPE, b"".join(pieces)) != ""


STREAM = b'Content-Disposition: form-data; name="stream"\r\n\r\n'


@pytest.mark.parametrize("value", [b"true", b"True", b"1", b"yes", b"on", b"T"])
def test_a_form_asks_for_a_stream(value: bytes) -> None:
    """However its client writes the part, and wherever it stands."""
    for part in (
        STREAM + value,
        STREAM.replace(b'"', b"") + value,
        STREAM.replace(b"\r\n\r\n", b"\r\nContent-Type: text/plain; charset=UTF-8\r\nContent-Length: 4\r\n\r\n")
        + value,
        b"Content-Type: text/plain\r\n" + STREAM + value,
    ):
        assert form_streams(TYPE, form(FILE, part))
        assert form_streams(TYPE, form(part, PLAIN))
    assert url_form(b"model=m&stream=" + value, sure=True) == ("m", True)


@pytest.mark.parametrize(
    "part", [STREAM + b"false", STREAM + b"maybe", STREAM + b"true" * 9, STREAM.replace(b"stream", b"x") + b"true",
             FILE.replace(b"file", b"x").replace(b"a b.wav", b"stream").replace(b"RI\nFF", b"true"), MODEL + b"true"]
)  # fmt: skip
def test_a_form_asks_for_none(part: bytes) -> None:
    """What no engine takes for true, and what stands in another field."""
    assert not form_streams(TYPE, form(part, PLAIN))


def test_forms_that_would_take_long_to_read() -> None:
    """A search that goes on behind each beginning of a field would never end."""
    assert not form_streams(TYPE, b"--b\r\n" + b'name="stream"\r\nA: b\r\n' * 200_000)
    with pytest.raises(InvalidBody):
        url_form(b"a=b&" * 300, sure=False)


def test_a_form_like_a_query() -> None:
    """Of a field given twice engines take the last; where the model must be sure, that is refused."""
    assert url_form(b"model=a&model=b%20c&stream=1&stream=0", sure=False) == ("b c", False)
    assert url_form(b"x=1", sure=True) == (None, False)
    with pytest.raises(InvalidBody):
        url_form(b"model=a&model=a", sure=True)
    with pytest.raises(InvalidBody):
        url_form(b"model=\xff", sure=False)
