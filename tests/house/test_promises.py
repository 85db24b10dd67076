"""Promises and their tests: neither is without the other, and SECURITY.md has the short answers."""

from __future__ import annotations

import ast
import re
from difflib import SequenceMatcher
from itertools import combinations
from pathlib import Path

import pytest

from loadtest.docgen.markdown import PageError
from loadtest.docgen.promises import findings, findings_block, marks, promises, promises_block
from loadtest.docgen.promises import tests_of_findings as by_finding
from tests.house.documents import ROOT, page, section, table

TESTS = ROOT / "tests"
PROMISES, SECURITY = "docs/reference/promises.md", "SECURITY.md"
SENTENCE_CHARS_MAX = 100
SAME_RATIO = 0.9  # sentences that are as alike are one promise in two spellings
# Pronouns and verbs that make persons of programs (CONTRIBUTING, "Language").
PERSONS = re.compile(r"\b(who|whose|whom|whoever|nobody|somebody|told|tells|says|said|hears|heard)\b")


def written(folder: Path, text: str) -> Path:
    """A folder of tests with one file; the folder."""
    tests = folder / "tests"
    tests.mkdir(exist_ok=True)
    (tests / "test_one.py").write_text(f"import pytest\n\n{text}", encoding="utf-8")
    return tests


def test_every_promise_is_a_plain_sentence() -> None:
    """A promise is one short sentence of the field, and no two promises are one in two spellings."""
    sentences = [promise.sentence for promise in promises(TESTS)]
    assert len(sentences) >= 120
    for sentence in sentences:
        assert re.fullmatch(r"[A-Z`l].*\.", sentence), sentence
        assert len(sentence) <= SENTENCE_CHARS_MAX, sentence
        assert not PERSONS.search(sentence), sentence
    matchers = [SequenceMatcher(None, one, other) for one, other in combinations(sentences, 2)]
    alike = [(m.a, m.b) for m in matchers if m.real_quick_ratio() > SAME_RATIO and m.ratio() > SAME_RATIO]
    assert alike == []


def test_every_test_that_keeps_a_promise_is_there() -> None:
    """Tests on the page are those that pytest collects: functions and classes of their files, by these names."""
    for mark in marks(TESTS, ["promise", "finding"]):
        path, _, name = mark.test.partition("::")
        assert (ROOT / path).is_file(), mark
        if name:
            source = (ROOT / path).read_text(encoding="utf-8")
            pattern = rf"^ *((async )?def|class) {name.split('::')[-1]}\b|^{name} = "
            assert re.search(pattern, source, re.MULTILINE), mark


def test_every_place_of_a_marker_is_read(tmp_path: Path) -> None:
    """Functions, classes, their methods, assigned classes and whole files bear markers."""
    keep = '@pytest.mark.promise("{}", "clients")\n'
    folder = written(
        tmp_path,
        'pytestmark = [pytest.mark.skip, pytest.mark.promise("File.", "clients")]\n'
        + keep.format("Function.")
        + "async def test_it() -> None: ...\n"
        + keep.format("Class.")
        + "class TestThem:\n    "
        + keep.format("Method.")
        + "    def test_one(self) -> None: ...\n"
        + 'TestModel = pytest.mark.promise("Assigned.", "clients")(object)\n',
    )
    found = {promise.sentence: promise.tests for promise in promises(folder)}
    assert found == {
        "File.": ["tests/test_one.py"],
        "Function.": ["tests/test_one.py::test_it"],
        "Class.": ["tests/test_one.py::TestThem"],
        "Method.": ["tests/test_one.py::TestThem::test_one"],
        "Assigned.": ["tests/test_one.py::TestModel"],
    }
    assert promises_block(folder).count("tests/test_one.py)") == len(found)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ('@pytest.mark.promise("A.", "clients")\ndef helper() -> None: ...\n', "no test of this file bears"),
        ('@pytest.mark.promise("A.", "nowhere")\ndef test_it() -> None: ...\n', "a section is one of clients"),
        ('@pytest.mark.promise("A.")\ndef test_it() -> None: ...\n', "a section is one of clients"),
        ('@pytest.mark.promise(SENTENCE, "clients")\ndef test_it() -> None: ...\n', "literal strings only"),
        (
            (
                '@pytest.mark.promise("A.", "clients")\ndef test_it() -> None: ...\n'
                '@pytest.mark.promise("A.", "tenants")\ndef test_other() -> None: ...\n'
            ),
            "'A.' is of clients at",
        ),
    ],
)
def test_a_marker_without_a_test_or_a_section_is_an_error(tmp_path: Path, text: str, why: str) -> None:
    """A promise that no test keeps, or that belongs nowhere, fails the page and names its line."""
    with pytest.raises(PageError, match=re.escape(why)):
        promises_block(written(tmp_path, text))


def test_a_finding_has_its_row_with_or_without_a_test(tmp_path: Path) -> None:
    """Findings without a test are on the page too, and a marker with an unknown number is an error."""
    folder = written(tmp_path, '@pytest.mark.finding("2026-01-01/1")\ndef test_it() -> None: ...\n')
    (folder / "findings.toml").write_text('["2026-01-01"]\n1 = "One."\n2 = "Two."\n', encoding="utf-8")
    assert [row[2] for row in table(findings_block(folder))] == [
        "[`test_it`](../../tests/test_one.py)",
        "no test yet",
    ]
    (folder / "findings.toml").write_text('["2026-01-01"]\n2 = "Two."\n', encoding="utf-8")
    with pytest.raises(PageError, match="has no 2026-01-01/1"):
        findings_block(folder)


def test_every_finding_has_its_test() -> None:
    """All findings of reviews are kept mended by tests."""
    tests = by_finding(TESTS, findings(TESTS))
    assert [number for number, names in tests.items() if not names] == []


def test_every_leak_that_is_closed_has_its_test() -> None:
    """Each row of the tenants' table is closed or accepted for a reason, for isolated tenants and for others; closed
    ones link tests, which exist."""
    rows = table(section(page("docs/reference/threat-model.md"), "Tenant isolation"))
    assert len(rows) >= 15
    for information, _, shared, isolated, kept_by in rows:
        named = re.findall(r"\[`(\w+)`\]\(../../(tests/[\w/]+\.py)\)", kept_by)
        for cell in (shared, isolated):
            assert re.match(r"closed\b|accepted: ", cell), information
        assert named or "closed" not in (shared[:6], isolated[:6]), information
        for name, module in named:
            names = {getattr(node, "name", "") for node in ast.parse((ROOT / module).read_text(encoding="utf-8")).body}
            assert name in names, f"{module}::{name}"


def test_security_is_one_page_of_answers() -> None:
    """Each section of SECURITY.md after the first has a bold answer of one sentence and ends with links; the page is
    short."""
    text = page(SECURITY)
    assert len(text.split()) <= 1_000
    reporting, *titles = re.findall(r"^## (.*)$", text, re.MULTILINE)
    assert reporting == "Reporting a vulnerability"
    assert len(titles) >= 10
    for title in titles:
        answer = section(text, title).strip()
        assert re.match(r"\*\*[A-Z][^*]+\.\*\*", answer), title
        assert re.match(r"\[.*\]\(docs/", answer.splitlines()[-1]), title
