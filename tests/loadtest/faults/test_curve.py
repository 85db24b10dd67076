"""Memory over many requests: what is asked, and how growth is judged."""

from __future__ import annotations

import json
from collections import Counter
from itertools import islice
from pathlib import Path

import pytest

from loadtest.common import rivals
from loadtest.common.report import Row, write_json
from loadtest.docgen.curve import curve_block
from loadtest.docgen.markdown import PageError
from loadtest.faults.bench import Bench, Scale
from loadtest.faults.curve import CONTINUED, SAMPLES, Talk, _judge_growth, _samples, curve, growth


def test_growth_is_that_of_the_second_half() -> None:
    """Caches that fill in the first half are no growth; a leak that goes on is."""
    filled = [(n, min(100.0, 60.0 + n)) for n in range(0, 200, 10)]
    assert growth(filled) == 0.0
    leaks = [(n, 60.0 + n) for n in range(0, 200, 10)]
    assert growth(leaks) == pytest.approx(250 / 160 - 1, abs=0.1)
    assert growth([]) is None
    assert growth([(0, 1.0), (10, 1.0)]) is None


def test_growth_that_is_not_known_is_a_row_that_is_missed() -> None:
    """A run without samples, and one with errors, keeps nothing."""
    assert [row.ok for row in _judge_growth(10, None, Counter(), 10)] == [False, True]
    assert [row.ok for row in _judge_growth(9, 0.04, Counter({"closed": 1}), 10)] == [True, False]
    assert [row.ok for row in _judge_growth(10, 0.06, Counter(), 10)] == [False, True]


def test_no_two_requests_are_alike() -> None:
    """Each request has words of its own wherever the router keeps something, and some continue earlier ones."""
    asked = list(islice(Talk(1), 400))
    heads, bodies = zip(*(one.split(b"\r\n\r\n", 1) for one in asked), strict=True)
    read = [json.loads(body) for body in bodies]
    assert all(f"Content-Length: {len(body)}" in head.decode() for head, body in zip(heads, bodies, strict=True))
    for name in ("User-Agent", "x-session-id", "x-warmroute-tenant", "x-request-id", "traceparent"):
        values = [line for head in heads for line in head.decode().split("\r\n") if line.startswith(f"{name}: ")]
        assert len(set(values)) == len(asked)
    for name in ("user", "prompt_cache_key", "cache_salt", "tools"):
        values = [json.dumps(body[name]) for body in read if name in body]
        assert len(set(values)) == len(values) > 10
    longer = sum(len(body["messages"]) > 2 for body in read)
    assert longer == pytest.approx(CONTINUED * len(asked), rel=0.3)
    assert asked == list(islice(Talk(1), 400))


def test_the_curve_is_rendered(tmp_path: Path) -> None:
    """The page has the curve of a run's JSON, and other documents are refused."""
    file = tmp_path / "curve.json"
    rows = [
        *_samples([(n * 50, 100.0 + min(n, 10)) for n in range(21)]),
        *_judge_growth(1_000, 0.0123, Counter(), 1_000),
    ]
    write_json(file, "faults --requests 1000 --json x.json", rows, {rivals.OURS: "1.0"})
    block = curve_block(json.loads(file.read_text()))
    assert "with `python -m loadtest faults --requests 1000 --json curve.json`" in block
    assert block.count("\n| ") == 2 + 11  # a head, a rule and the samples
    assert "| 1,000 | 110 |" in block
    assert "memory grew by 1.2%, of 5% that are promised; 0 requests" in block
    write_json(file, "faults", [Row(case="x", got=1.0, ok=True)])
    with pytest.raises(PageError, match="faults --requests"):
        curve_block(json.loads(file.read_text()))


@pytest.mark.long
async def test_a_curve_is_measured(tmp_path: Path) -> None:
    """A router answers all of some hundred requests, and memory is looked at all along."""
    rows = await curve(Bench(rivals.ours(), Scale(), tmp_path), 300, 1)
    *samples, grown, errors = rows
    assert len(samples) == SAMPLES + 1
    assert all(row.ok is None and row.rss_mb and row.rss_mb > 10 for row in samples)
    assert [row.requests for row in samples] == sorted(row.requests or 0 for row in samples)
    assert samples[-1].requests == 300
    assert grown.got is not None
    assert errors.ok
