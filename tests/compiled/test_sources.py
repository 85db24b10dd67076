"""deploy/compiled_sources.py: what mypyc is given does what the source does, line by line."""

from __future__ import annotations

import ast
import re
import types
from collections.abc import Iterator

import pytest
from msgspec import Struct

from deploy.compiled import MODULES, REPO
from deploy.compiled_sources import for_mypyc, is_record
from router.core.types import cache_misses

HEAD = '''"""A module."""

from __future__ import annotations

from msgspec import Struct

'''


def made(source: str) -> types.ModuleType:
    """The module as mypyc would have it, in Python."""
    module = types.ModuleType("made")
    exec(for_mypyc(HEAD + source), module.__dict__)
    return module


def sources() -> Iterator[tuple[str, str]]:
    """Modules that are compiled."""
    for module in MODULES:
        yield module, (REPO / module).read_text(encoding="utf-8")


def shape(source: str) -> list[tuple[str, int]]:
    """Functions and classes, with their lines; without those that records are given."""
    return [
        (node.name, node.lineno)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        and node.name not in ("__init__", "__eq__")
    ]


def test_every_line_stays_where_it_was() -> None:
    """A traceback of native code names the lines of the source."""
    for name, source in sources():
        given = for_mypyc(source)
        assert len(given.splitlines()) == len(source.splitlines()), name
        assert shape(given) == shape(source), name


def test_records_are_made_as_before() -> None:
    """By place and by name, with the defaults, fields in their order, and compared by all of them."""
    source = '''
class Size(Struct, gc=False):
    """How large."""

    width: int  # in units
    height: int = 2
    name: str = ""

    @property
    def area(self) -> int:
        return self.width * self.height
'''
    size = made(source).Size
    assert not issubclass(size, Struct)
    assert (size(3).width, size(3).height, size(3).name) == (3, 2, "")
    assert size(1, name="x").area == 2
    assert size(1) == size(1, 2) != size(2)
    assert size(1) != 1
    assert size(1).__struct_fields__ == ("width", "height", "name")
    with pytest.raises(TypeError):
        size()


def test_what_is_the_same_only_as_itself_stays_so() -> None:
    """`eq=False`, or an `__eq__` of its own."""
    source = '''
class One(Struct, eq=False):
    """A record."""

    a: int


class Two(Struct, eq=False):
    """Another."""

    a: int

    def __eq__(self, other: object) -> bool:
        return True

    __hash__ = None
'''
    module = made(source)
    assert module.One(1) != module.One(1)
    assert module.Two(1) == module.Two(2)
    with pytest.raises(TypeError):
        hash(module.Two(1))


@pytest.mark.parametrize(
    "source",
    [
        'class A(Struct, frozen=True):\n    """A."""\n\n    a: int\n',
        'class A(Struct):\n    """A."""\n\n    a: list[int] = []\n',  # all would share it
        "class A(Struct): a: int\n",
    ],
)
def test_what_would_be_another_thing_is_refused(source: str) -> None:
    """The build fails, and names the class."""
    with pytest.raises(ValueError, match=r"A: line 7"):
        for_mypyc(HEAD + source)


def test_what_msgspec_reads_or_writes_stays_a_struct() -> None:
    """It says `msgspec.Struct`."""
    source = HEAD + 'import msgspec\n\nclass A(msgspec.Struct):\n    """A."""\n\n    a: int\n'
    assert "class A(msgspec.Struct):" in for_mypyc(source)


def test_constants_are_final_and_nothing_else_is() -> None:
    """What is assigned again, or is the name of a type, is none."""
    constants = "A = 1 << 4\nB, C = 'b', (1, 2)\nD = 0\nE = list[int]\nF = int | None\nG = TypeVar('G')\n"
    more = "H = frozenset('h')\nI = A\ndef f() -> None:\n    global D\n    D = 1\n"
    given = for_mypyc(HEAD + constants + more).splitlines()[6:14]
    assert given == [
        "A: Final = 1 << 4",
        "B: Final = 'b'; C: Final = (1, 2)",
        "D = 0",
        "E = list[int]",
        "F = int | None",
        "G = TypeVar('G')",
        "H: Final = frozenset('h')",
        "I = A",
    ]


def test_nothing_of_msgspec_is_asked_of_records() -> None:
    """A record is no Struct where it is compiled: none is in a Struct that is encoded."""
    records = {node.name for _, source in sources() for node in ast.parse(source).body if _record(node)}
    assert {"Candidate", "Lease", "Prompt"} <= records
    for name, struct in vars(cache_misses).items():
        if isinstance(struct, type) and issubclass(struct, Struct):
            named = re.findall(r"\w+", " ".join(map(str, struct.__annotations__.values())))
            assert records.isdisjoint(named), name


def _record(node: ast.stmt) -> bool:
    return isinstance(node, ast.ClassDef) and is_record(node)
