"""Engines' own pages: metrics, models, ranks, and what their /tokenize answers."""

from __future__ import annotations

import asyncio
from collections import Counter
from contextlib import suppress
from dataclasses import fields
from typing import Any, Self, cast

import msgspec

from router.core.fleet.engine_capacity import NUMBER_MAX
from router.core.fleet.engine_metrics import engines, parse_load
from router.core.fleet.metrics_lines import MetricsLines, pages_of_ranks
from router.engines.metrics_page import MetricsPages
from router.engines.probe import ProbeFailed, Prober
from router.engines.ranks import RANKS_MAX, VERSION_CHARS_MAX, RankExpander
from router.tokenization.encoder import _tokens
from tests.attack.target import Target

PAGE_BYTES_MAX = 1 << 20
MODELS_MAX = 64


def metrics(data: bytes) -> None:
    """A page of metrics: loads that can be, of the whole server and of its ranks, and no more of what is kept of it."""
    lines = MetricsLines()
    for at in range(0, len(data), 16):
        lines.feed(data[at : at + 16])
    page = lines.close()
    assert len(page) <= len(data) * 3 + 1  # bytes that are no UTF-8 are replaced
    for part in pages_of_ranks(page, 3):
        parse_load(part)
    page = data.decode(errors="replace")
    ranks = engines(page)
    assert ranks == sorted(set(ranks))
    for rank in (None, 0, 1, 7):
        load = parse_load(page, rank)
        for value in msgspec.to_builtins(load).values() if isinstance(load, msgspec.Struct) else vars_of(load):
            assert value is None or isinstance(value, bool | str) or 0 <= value <= NUMBER_MAX**2


def vars_of(load: object) -> list[Any]:
    """The values of a record's fields."""
    return [getattr(load, field.name) for field in fields(load)]  # type: ignore[arg-type]


class _Page:
    """A session whose every answer is this page; it is its own response, content and context."""

    status = 200

    def __init__(self, page: bytes) -> None:
        self._page = page
        self.content = self

    def get(self, _: str, **__: object) -> Self:
        self._left = self._page
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        """Nothing is open."""

    def at_eof(self) -> bool:
        return not self._left

    async def read(self, size: int) -> bytes:
        piece, self._left = self._left[:size], self._left[size:]
        return piece


def models(data: bytes) -> None:
    """A page of models, and each page that ranks are counted by."""
    asyncio.run(_asked(data))


async def _asked(data: bytes) -> None:
    prober = cast("Any", Prober.__new__(Prober))
    prober._session, prober._page_bytes_max = _Page(data), PAGE_BYTES_MAX
    prober._models_max, prober._row_bytes = MODELS_MAX, Counter()
    with suppress(ProbeFailed):
        served = await prober._models("http://x")
        assert 0 < len(served.models) <= MODELS_MAX
        assert all(isinstance(model.name, str) and isinstance(model.created, int) for model in served.models)
        assert all(isinstance(msgspec.json.decode(model.row), dict) for model in served.models if model.row)
    ranks = cast("Any", RankExpander.__new__(RankExpander))
    ranks._session, ranks._page_bytes_max = _Page(data), PAGE_BYTES_MAX
    ranks._counts, ranks._asked_s, ranks._versions = {}, {}, {}
    pages = ranks._pages = cast("Any", MetricsPages.__new__(MetricsPages))
    pages._session, pages._page_bytes_max, pages._servers = _Page(data), PAGE_BYTES_MAX, {}
    pages._enabled, pages._interval_s, pages._fresh_s, pages._timeout_s = True, 0.0, 0.0, 5.0
    assert 1 <= await ranks.count("http://x") <= RANKS_MAX
    assert len(ranks.version("http://x")) <= VERSION_CHARS_MAX


def tokenized(data: bytes) -> None:
    """An answer of /tokenize: token ids, or none."""
    with suppress(msgspec.DecodeError, UnicodeError, RecursionError):
        answer = msgspec.json.decode(data)
        if isinstance(answer, dict):
            ids = _tokens(answer)
            assert ids is None or len(ids) % 4 == 0


SAMPLES = (
    b"vllm:num_requests_running", b"vllm:num_requests_waiting", b"vllm:kv_cache_usage_perc",
    b"vllm:cache_config_info", b"vllm:prompt_tokens_total", b"sglang:num_running_reqs", b"sglang:token_usage",
    b"sglang:page_size", b"sglang:num_pages", b"sglang:max_total_num_tokens", b'{engine="0"}', b'{dp_rank="1"}',
    b'block_size="16"', b'num_gpu_blocks="9"', b"NaN", b'enable_prefix_caching="True"', b"+Inf", b"1e308", b"1_0",
    b"0x10", b"\n", b" ", b'"', b"9007199254740993",
)  # fmt: skip
PAGES = (b'"data":[', b'"id":"m"', b'"root":', b'"created":', b'"max_model_len":', b'"owned_by":"vllm"', b'"dp_size":')

TARGETS = (
    Target(metrics, SAMPLES, steps=(20_000, 200)),
    Target(models, PAGES, steps=(40_000, 100)),
    Target(tokenized, (b'"tokens":[', b"4294967296", b"-1", b"1.0", b"true", b"null")),
)
