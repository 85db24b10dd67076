"""Repairs: what they change is the order of tools and of their schemas' keys, and nothing else."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.dialects import PATHS
from router.core.dialects.tenant_isolation import CHAT, MESSAGES, RESPONSES
from router.core.dialects.tool_normalization import CANONICAL_TOOLS, REPAIRS, SORT_TOOLS, ToolNormalizer, in_order
from router.core.dialects.tool_normalization import PATHS as REPAIRED

NUMBERS = st.one_of(
    st.integers(-(10**30), 10**30), st.floats(allow_nan=False, allow_infinity=False), st.sampled_from([1.0, -0.0, 1e22])
)
JSON = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text('aé中😀"\\\n/', max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abcdé"), inner, max_size=4),
    max_leaves=8,
)
SCHEMA = st.fixed_dictionaries(
    {"type": st.just("object")},
    optional={"properties": st.dictionaries(st.sampled_from("xyz"), JSON), "required": st.permutations(["x", "y"])},
)
NAME = st.text("abAB_é", min_size=1, max_size=3)
TOOL: dict[str, st.SearchStrategy[dict[str, Any]]] = {
    CHAT: st.builds(
        lambda name, schema, more: {"type": "function", "function": {"name": name, "parameters": schema} | more},
        NAME, SCHEMA, st.fixed_dictionaries({}, optional={"strict": st.booleans(), "description": NAME}),
    ),
    MESSAGES: st.builds(lambda name, schema: {"name": name, "input_schema": schema}, NAME, SCHEMA),
    RESPONSES: st.one_of(
        st.builds(lambda name, schema: {"type": "function", "name": name, "parameters": schema}, NAME, SCHEMA),
        st.builds(lambda kind, other: {"type": kind, "filters": other}, NAME, JSON),
    ),
}  # fmt: skip
WANTED = st.sampled_from([(SORT_TOOLS,), (CANONICAL_TOOLS,), REPAIRS])
ASKED: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": 'say "tools": [1]'}]},
    MESSAGES: {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1},
    RESPONSES: {"input": "x"},
}


def name_of(tool: dict[str, Any]) -> str:
    """As the dialect has it."""
    return str(tool.get("function", tool).get("name", ""))


def repaired(body: bytes, wanted: tuple[str, ...]) -> tuple[bytes, tuple[str, ...]]:
    """By a memory that is empty."""
    return ToolNormalizer(bytes_max=1 << 20).normalize(body, wanted)


def ordered(value: Any) -> bool:
    """Whether the keys of every object are in order."""
    if isinstance(value, dict):
        return list(value) == sorted(value) and all(map(ordered, value.values()))
    return all(map(ordered, value)) if isinstance(value, list) else True


@st.composite
def bodies(draw: st.DrawFn) -> tuple[str, dict[str, Any], bytes, bytes, bytes]:
    """Path, body, and its bytes before, of and behind the tools."""
    path = draw(st.sampled_from(sorted(TOOL)))
    tools = draw(st.lists(TOOL[path], max_size=5))
    fields = st.sampled_from(["user", "metadata", "toolsx", "Tools", "tool"])
    more = draw(st.dictionaries(fields, JSON | st.just({"tools": [{"name": "b"}, {"name": "a"}]})))
    indent, ascii_ = draw(st.sampled_from([None, 0, 2])), draw(st.booleans())
    made = {name: json.dumps(value, indent=indent, ensure_ascii=ascii_) for name, value in (ASKED[path] | more).items()}
    made["tools"] = json.dumps(tools, indent=indent, ensure_ascii=ascii_)
    space = draw(st.sampled_from(["", " ", "\n\t"]))
    start, members = space + "{" + space, list(draw(st.permutations(sorted(made.items()))))
    at = [name for name, _ in members].index("tools")
    texts = [f'"{name}"{space}:{space}{value}{space}' for name, value in members]
    before = start + "".join(text + "," + space for text in texts[:at]) + f'"tools"{space}:{space}'
    behind = space + "".join("," + text for text in texts[at + 1 :]) + "}" + space
    parts = (before.encode(), made["tools"].encode(), behind.encode())
    return path, {"tools": tools}, *parts


@given(bodies(), WANTED)
def test_only_the_tools_change_and_only_in_order(
    case: tuple[str, dict[str, Any], bytes, bytes, bytes], wanted: tuple[str, ...]
) -> None:
    """All bytes but those of the tools stay as they were; the tools are the same as parsed, in their order; arrays keep
    theirs; a second repair finds nothing to do; and a body that needs none is the very same object."""
    _, given_, before, tools, behind = case
    body = before + tools + behind
    made, needed = repaired(body, wanted)
    assert made.startswith(before)
    assert made.endswith(behind)
    said, had = json.loads(made)["tools"], given_["tools"]
    schemas = [tool.get("parameters", tool.get("input_schema")) for tool in (t.get("function", t) for t in said)]
    if CANONICAL_TOOLS in wanted:
        assert all(map(ordered, schemas))
    if SORT_TOOLS in wanted:
        assert [name_of(tool) for tool in said] == sorted(map(name_of, had))
        for name in {name_of(tool) for tool in had if "name" in tool.get("function", tool)}:
            assert [t for t in said if name_of(t) == name] == [t for t in had if name_of(t) == name]
        assert sorted(map(json.dumps, map(plain, said))) == sorted(map(json.dumps, map(plain, had)))
    else:
        assert said == had
    assert set(needed) <= set(wanted)
    assert repaired(made, wanted) == (made, ())
    if not needed:
        assert made is body
    if wanted == (SORT_TOOLS,):
        assert sorted(map(json.dumps, said)) == sorted(map(json.dumps, had)), "keys keep their order"


def plain(value: Any) -> Any:
    """The same with the keys of every object in order."""
    return json.loads(json.dumps(value, sort_keys=True))


@given(bodies(), st.randoms())
def test_equal_tools_make_equal_prompts(case: tuple[str, dict[str, Any], bytes, bytes, bytes], random: Any) -> None:
    """However a client shuffles tools with different names, and the keys of their schemas, the router hashes and the
    engine sees one prompt; where no order was wanted it is the one that was sent."""
    path, given_, before, _, behind = case
    tools = list({name_of(tool): tool for tool in given_["tools"]}.values())
    prompts = set()
    for _ in range(3):
        random.shuffle(tools)
        body, _ = repaired(before + json.dumps([shuffled(tool, random) for tool in tools]).encode() + behind, REPAIRS)
        ask = PATHS[path].parse(path, body)
        prompts.add(ask.prompt.text if ask.prompt is not None else None)
        assert ask.prompt is not None
    assert len(prompts) == 1


def shuffled(tool: dict[str, Any], random: Any) -> dict[str, Any]:
    """The same tool, the keys of its schema in another order at every depth."""
    inner = tool.get("function", tool)
    schemas = {name: mixed(inner[name], random) for name in ("parameters", "input_schema") if name in inner}
    return {**tool, "function": {**inner, **schemas}} if "function" in tool else {**tool, **schemas}


def mixed(value: Any, random: Any) -> Any:
    """The keys of every object in another order."""
    if isinstance(value, dict):
        names = list(value)
        random.shuffle(names)
        return {name: mixed(value[name], random) for name in names}
    return [mixed(each, random) for each in value] if isinstance(value, list) else value


TWO = b'[{"name":"b"},{"name":"a"}]'
ODD = {
    "tools twice": b'{"tools":%b,"tools":%b}' % (TWO, TWO),
    "tools twice, the first longer": b'{"tools":[{"name":"c"},{"name":"b"},{"name":"a"}],"tools":%b}' % TWO,
    "tools twice, the first shorter": b'{"tools":[1],"tools":%b}' % TWO,
    "tools twice, once escaped": b'{"tools":%b,"tool\\u0073":%b}' % (TWO, TWO),
    "tools escaped": b'{"\\u0074ools":%b}' % TWO,
    "another name twice": b'{"a":1,"tools":%b,"a":12}' % TWO,
    "a name with escapes": b'{"\\u0061":1,"tools":%b}' % TWO,
    "not at the top": b'{"a":{"tools":%b}}' % TWO,
    "within a string": b'{"a":"\\"tools\\":%b"}' % TWO.replace(b'"', b'\\"'),
    "no object": b'["tools",%b]' % TWO,
    "cut off": b'{"tools":%b' % TWO,
    "something behind it": b'{"tools":%b}}' % TWO,
    "no list": b'{"tools":{"b":1,"a":2}}',
    "null": b'{"tools":null}',
    "a tool that is none": b'{"tools":[{"name":"b"},{"name":"a"},3]}',
    "a name that is none": b'{"tools":[{"name":"b"},{"name":1}]}',
    "a function that is none": b'{"tools":[{"function":"f"},{"name":"a"}]}',
    "half a character": b'{"tools":[{"name":"b"},{"name":"a\\ud800"}]}',
    "no UTF-8": b'{"tools":[{"name":"b"},{"name":"a\xff"}]}',
    "a number beyond all": b'{"tools":[{"name":"b","parameters":{"b":1,"a":1e999}},{"name":"a"}]}',
    "too deep": b'{"tools":[{"name":"b","parameters":%b},{"name":"a"}]}' % (b"[" * 100_000 + b"]" * 100_000),
    "empty": b"",
}


@pytest.mark.parametrize("case", ODD)
def test_what_is_odd_is_left_alone(case: str) -> None:
    """A body of which it cannot be said what engines make of it keeps every byte."""
    assert repaired(ODD[case], REPAIRS) == (ODD[case], ())


@given(st.binary(max_size=40).map(lambda junk: b'{"tools":' + junk))
def test_junk_raises_nothing(body: bytes) -> None:
    """Whatever the body is."""
    repaired(body, REPAIRS)


def test_a_number_is_never_another() -> None:
    """Numbers of a schema that is written anew are the same to any parser."""
    numbers = b"[1.0,1e5,1E-7,-0.0,0.1,123456789012345678901234567890,1e22,5e-324,1.7976931348623157e308]"
    body = b'{"tools":[{"name":"a","parameters":{"b":%b,"a":1}}]}' % numbers
    made, needed = repaired(body, REPAIRS)
    assert needed == (CANONICAL_TOOLS,)
    said = json.loads(made)["tools"][0]["parameters"]["b"]
    assert [(type(each), repr(each)) for each in said] == [(type(e), repr(e)) for e in json.loads(numbers)]


def test_a_memory_changes_nothing_and_is_bounded() -> None:
    """What is remembered is what would be made again, for each wish and each owner; ten times as many tools as fit in
    take no more than was said."""
    memory, made = ToolNormalizer(bytes_max=100_000), b'{"tools":[{"name":"a"},{"name":"b"}]}'
    body = b'{"tools":%b}' % TWO
    for whose in ("", "acme", "", "acme"):
        assert memory.normalize(body, (SORT_TOOLS,), whose) == (made, (SORT_TOOLS,))
        assert memory.normalize(body, (CANONICAL_TOOLS,), whose) == (body, ())
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    for number in range(2_000):
        memory.normalize(b'{"tools":[{"name":"b%d"},{"name":"a","description":"%b"}]}' % (number, b"x" * 400), REPAIRS)
        if not number % 50:
            assert tracemalloc.get_traced_memory()[0] - before <= 130_000
    tracemalloc.stop()


def test_repairs_are_named_in_one_order() -> None:
    """So that keys which say the same do not contradict each other; only paths with tools are looked at."""
    assert in_order(["canonical_tools", "sort_tools", "sort_tools"]) == REPAIRS
    assert in_order([]) == ()
    assert set(PATHS) > REPAIRED
