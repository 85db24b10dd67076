"""Of a page of metrics the lines that matter are kept, piece by piece, and nothing is lost by that."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.fleet.engine_metrics import engines, parse_load
from router.core.fleet.metrics_lines import (
    COMMON_BYTES_MAX,
    KEPT_BYTES_MAX,
    LINE_BYTES_MAX,
    SLICE_BYTES,
    MetricsLines,
    PageTooLong,
    pages_of_ranks,
)

pytestmark = pytest.mark.promise(
    "A page of metrics is read in slices, and only lines of known names are kept.", "engines"
)

PAGES = sorted((Path(__file__).parents[2] / "data" / "metrics").iterdir())
NOISE = 'vllm:request_success_total{engine="0",finished_reason="stop"} 1.0\n'


def kept(page: str, size: int = SLICE_BYTES) -> str:
    """What is kept of a page that comes in pieces of so many bytes."""
    lines, data = MetricsLines(), page.encode()
    for at in range(0, len(data), size):
        lines.feed(data[at : at + size])
    return lines.close()


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.name)
def test_a_page_says_the_same_without_the_other_lines(file: Path) -> None:
    """Pages of real engines, which have a hundred times as many lines."""
    page = file.read_text(encoding="utf-8")
    assert parse_load(kept(page)) == parse_load(page)
    assert engines(kept(page)) == engines(page)


@given(st.integers(1, 200), st.sampled_from(PAGES))
def test_cuts_change_nothing(size: int, file: Path) -> None:
    """Wherever a page is cut into pieces, the same lines are kept."""
    page = file.read_text(encoding="utf-8")[:4_000]
    assert kept(page, size) == kept(page)


@pytest.mark.parametrize("file", PAGES, ids=lambda file: file.name)
def test_ranks_get_their_own_lines(file: Path) -> None:
    """The page of a rank, taken of all in one look, says what the whole page says of that rank."""
    page = file.read_text(encoding="utf-8")
    for count in (1, 2, 5):
        for rank, part in enumerate(pages_of_ranks(kept(page), count)):
            assert parse_load(part) == parse_load(page, rank)


def test_lines_for_all_ranks_are_bounded() -> None:
    """What each of a thousand ranks is given of a page stays small, and what any rank needs of it is still there."""
    started = "process_start_time_seconds 17.0\n"
    page = "".join(f'sglang:page_size{{dp_rank="{n}"}} 16.0\n' for n in range(10_000)) + started
    parts = pages_of_ranks(page, 1_000)
    assert max(map(len, parts)) <= 2 * COMMON_BYTES_MAX
    assert all(parse_load(part, rank).block_tokens == 16 for rank, part in enumerate(parts[:3]))
    assert all(part.endswith(started) for part in parts)


def test_ranks_of_several_engines() -> None:
    """Engines are counted over all servers of a deployment, ranks within one."""
    page = "".join(
        f'vllm:num_requests_running{{engine="{n}"}} {n}\nvllm:prompt_tokens_created{{engine="{n}"}} {n}\n'
        for n in (8, 9, 10)
    )
    assert [parse_load(part).running for part in pages_of_ranks(page, 4)] == [8, 9, 10, None]
    assert [parse_load(page, rank).running for rank in range(4)] == [8, 9, 10, None]


def test_noise_is_not_kept() -> None:
    """Of megabytes of other lines, and of a line that has no end, nothing is held."""
    lines = MetricsLines()
    for _ in range(200):
        lines.feed((NOISE * 250).encode()[:SLICE_BYTES])
    lines.feed(b"\nvllm:num_requests_running{" + b"a" * 100)
    for _ in range(200):
        lines.feed(b"a" * SLICE_BYTES)
        assert len(lines._partial) <= LINE_BYTES_MAX
    lines.feed(b'"} 7\nvllm:num_requests_running 3\n')
    assert lines.close() == "vllm:num_requests_running 3\n"


def test_more_lines_of_interest_than_any_engine_has() -> None:
    """Such a page is refused when the limit is reached, and not read to its end."""
    lines, piece = MetricsLines(), b'vllm:num_requests_running{engine="1"} 1\n' * 100
    for _ in range(KEPT_BYTES_MAX // len(piece)):
        lines.feed(piece)
    with pytest.raises(PageTooLong):
        lines.feed(piece)
