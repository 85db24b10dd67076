"""Bodies that Python's parser reads and msgspec does not."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.dialects.rank_field import for_rank
from router.core.dialects.tenant_isolation import GENERATE
from router.core.prompts.json_fields import InvalidBody
from router.core.prompts.lenient_json import PARSED_BYTES_MAX, ask_of, in_other_encoding, is_object, to_utf8
from router.core.types.requests import RequestSpec

ENCODINGS = ("utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be")
VALUES = st.recursive(
    st.none() | st.booleans() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)
BODIES = st.dictionaries(st.text(max_size=8), VALUES, max_size=4)


@given(BODIES, st.sampled_from(ENCODINGS), st.booleans())
def test_every_encoding_is_read_as_python_reads_it(fields: dict[str, object], encoding: str, escaped: bool) -> None:
    """What decides where a body goes is the same in each, and nothing is spliced into what is not UTF-8."""
    fields |= {"model": "m", "stream": True, "previous_response_id": "resp_1", "store": False}
    body = json.dumps(fields, ensure_ascii=escaped).encode(encoding, "surrogatepass")
    json.loads(body)
    assert in_other_encoding(body)
    assert not is_object(body)
    text = to_utf8(body)
    assert text is not None
    assert not in_other_encoding(text)
    assert is_object(text)
    assert ask_of(text) == RequestSpec("m", stream=True, response_id="resp_1", stored=False)


@given(st.binary(max_size=64))
def test_what_python_cannot_read_is_no_request(body: bytes) -> None:
    """Any bytes: either Python's parser finds an object in them, or there is nothing to ask."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    text = to_utf8(body)
    assert (text is not None and ask_of(text) is not None) is isinstance(found, dict)


@pytest.mark.parametrize("model", [b"1", b"[]", b'"\\ud800"'])
def test_a_model_that_is_no_name_is_refused(model: bytes) -> None:
    """As it is where msgspec reads the body."""
    with pytest.raises(InvalidBody):
        ask_of(b'{"t":NaN,"model":' + model + b"}")


def test_of_a_long_body_nothing_is_read() -> None:
    """Python's parser would hold the interpreter."""
    assert ask_of(b'{"model":"m","x":"' + b"x" * PARSED_BYTES_MAX) == RequestSpec(None)


@pytest.mark.parametrize("body", [b"\x28\xb5\x2f\xfd}", '{"text":"x"}'.encode("utf-16-be"), b""])
def test_no_rank_is_put_into_what_is_no_object(body: bytes) -> None:
    """The server chooses one itself."""
    assert for_rank(1, GENERATE, [], body)[1] == body
    assert for_rank(1, GENERATE, [], b'\xef\xbb\xbf {"text":"x"}')[1].endswith(b',"routed_dp_rank":1}')
