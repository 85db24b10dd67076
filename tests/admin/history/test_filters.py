from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.admin.decision_rows import decision_row
from router.admin.history.file import HistoryFile
from router.admin.history.query_filters import REASONS, DecisionFilter, filter_of
from router.admin.query_params import BadParameter
from tests.admin.history.records import BYTES_MAX, HISTORY, REPLICAS, record

COUNT = 120
QUERIES = st.fixed_dictionaries(
    {},
    optional={
        "id": st.sampled_from(["id-3", "chatcmpl-id-3", "id-99", "nobody", "chatcmpl-"]),
        "session": st.sampled_from(["session 1", "session 9", "0000000000000008"]),
        "model": st.sampled_from(["m0", "m1", "m2"]),
        "reason": st.sampled_from(REASONS),
        "tenant": st.sampled_from(["acme", "other", "nobody"]),
        "replica": st.sampled_from([*REPLICAS, "x"]),
        "status": st.sampled_from(["200", "2xx", "503", "5XX"]),
        "from_s": st.sampled_from(["1000", "1050.5", "0"]),
        "to_s": st.sampled_from(["1100", "1060", "99999"]),
    },
)


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A file that has COUNT decisions, every seventh of them a failure that was placed nowhere."""
    made = HistoryFile(str(tmp_path_factory.mktemp("kept") / HISTORY), bytes_max=BYTES_MAX, run=1)
    made.write([decision_row(each, each.number) for each in records()], [])
    yield made
    made.close()


def records() -> list[Any]:
    """COUNT records with their numbers, oldest first."""
    made = [record(n, number=n + 1) for n in range(COUNT)]
    for each in made[::7]:
        each.receipt, each.cache.miss, each.status = None, None, 503
    return made


@settings(max_examples=300, deadline=None)
@given(query=QUERIES, before=st.integers(1, COUNT + 5), limit=st.integers(1, 40))
def test_memory_and_file_find_the_same(file: HistoryFile, query: dict[str, str], before: int, limit: int) -> None:
    """Whatever is asked, the file finds the very rows that a look at every record in memory finds, newest first, and
    says rightly whether there are more."""
    wanted = filter_of(query)
    expected = [each for each in reversed(records()) if each.number < before and wanted.fits(each)]
    found, more = file.find(wanted, before=before, limit=limit, bytes_max=1 << 30)
    assert [number for number, _ in found] == [each.number for each in expected[:limit]]
    assert more == (len(expected) > limit)
    for (_, row), each in zip(found, expected, strict=False):
        assert row == msgspec.json.encode(decision_row(each, each.number))


def test_an_answer_is_bounded_in_bytes(file: HistoryFile) -> None:
    """Rows end before so many bytes, and it is told that there are more; but one row comes in any case."""
    all_, more = file.find(DecisionFilter(), before=1 << 60, limit=COUNT, bytes_max=1 << 30)
    assert (len(all_), more) == (COUNT, False)
    size = sum(len(row) for _, row in all_[:10])
    assert file.find(DecisionFilter(), before=1 << 60, limit=COUNT, bytes_max=size) == (all_[:10], True)
    assert file.find(DecisionFilter(), before=1 << 60, limit=COUNT, bytes_max=0) == (all_[:1], True)


@pytest.mark.parametrize(
    ("name", "value", "right"),
    [
        ("reason", "warn", "warm"), ("status", "20", "503"), ("status", "6xx", "5xx"), ("status", "abc", "5xx"),
        ("from_s", "yesterday", "1795620000"), ("to_s", "-1", "1795620000"), ("to_s", "nan", "1795620000"),
        ("from_s", "1e300", "1795620000"),
    ],
)  # fmt: skip
def test_a_value_that_makes_no_sense_is_told(name: str, value: str, right: str) -> None:
    """The message names the parameter, the value, and what a right one looks like."""
    with pytest.raises(BadParameter) as told:
        filter_of({name: value})
    assert {name, right} <= set(str(told.value).replace("'", " ").replace(",", " ").replace(".", " ").split())
    assert value in str(told.value)


def test_a_file_is_readable_for_its_owner_only(tmp_path: Path) -> None:
    """Whose requests came when is not for everybody on the machine."""
    HistoryFile(str(tmp_path / HISTORY), bytes_max=BYTES_MAX, run=1).close()
    assert (tmp_path / HISTORY).stat().st_mode & 0o077 == 0
