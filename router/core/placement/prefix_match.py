"""A request compared with the caches: its size in tokens, and the part of its prompt that each replica holds.

Two views of every replica's cache exist side by side. The estimate is a chain over canonical bytes, built from the
requests that we sent. The events are a chain over token ids, published by the engine. A prompt with known token ids is
matched against both. The replica's grade decides which of the two counts (scoring.py).
"""

from __future__ import annotations

from msgspec import Struct

from router.core.cache_state.event_index import EventIndex
from router.core.cache_state.event_state import StoredPrefix
from router.core.cache_state.prefix_index import PrefixIndex
from router.core.cache_state.tier_index import PullSource
from router.core.estimators.model_speeds import ModelSpeeds
from router.core.estimators.response_memory import PastAnswer, ResponseMemory, Span
from router.core.estimators.token_ratio import ModelTokens, plausible
from router.core.fleet.member import ANSWER_TOKENS_MAX
from router.core.fleet.models import Models
from router.core.fleet.pulls import Pulls
from router.core.placement.answer_reuse import AnswerCredit, AnswerReuse
from router.core.placement.placement_request import PlacementRequest
from router.core.prompts.block_keys import Chain
from router.core.prompts.token_keys import TokenPrompt
from router.core.types.requests import RequestSpec


class Size(Struct, gc=False):  # a Struct for speed: core/types/requests.py
    """A request in tokens. Bytes are canonical bytes of its prompt (facts.requests.Prompt)."""

    prompt_tokens: int
    bytes_per_token: float  # bytes per token of the whole prompt
    text_bytes: int  # bytes with a ratio to tokens worth learning; 0: none
    text_bytes_per_token: float  # bytes per token of text that follows the prompt
    pool_bytes_per_token: float  # bytes per token of the content of a KV cache
    opaque_bytes: int = 0  # bytes of placeholders for images and the like, with a token count worth learning; 0: none


class PromptMatch(Struct, gc=False):
    """A request in tokens, and the estimated cached parts of its prompt."""

    size: Size
    answer_tokens: float  # expected length of the answer
    keys: list[int]  # keys of the prompt's blocks
    depths: dict[str, int]  # leading blocks that each replica holds by our own estimate
    stored: dict[str, StoredPrefix] | None  # prefix that each replica holds by its events; None without token ids
    home: str = ""  # last replica of the conversation, if its cache is unchanged since; "": none
    credit: AnswerCredit | None = None  # blocks of the last answer that the home holds in addition
    sources: list[PullSource] | None = None  # sources of a P2P transfer, the longest prefix first; None: no transfer


class Matcher:
    """Reads the knowledge of caches and answers; changes nothing."""

    def __init__(
        self,
        models: Models,
        index: PrefixIndex,
        knowledge: EventIndex,
        answers: ResponseMemory,
        credits_: AnswerReuse,
        pulls: Pulls,
    ) -> None:
        self._models = models
        self._index = index
        self._knowledge = knowledge
        self._answers = answers
        self.credits = credits_
        self._pulls = pulls

    def match(self, wanted: PlacementRequest, speeds: ModelSpeeds, now_s: float) -> PromptMatch:
        """Return the size and the cached parts of a request. `speeds` are those of replicas that serve its model."""
        ask, chain, tokens, home, credit = wanted.ask, wanted.chain, wanted.tokens, "", None
        answer_tokens = min(speeds.answer_tokens.mean, ask.output_tokens_max or ANSWER_TOKENS_MAX)
        learned = self._models.tokens(wanted.model or "")
        quoted = self._answers.find_quoted(chain.spans) if chain and chain.spans else []
        size = size_of(ask, chain, learned, wanted.body_tokens, tokens, quoted)
        depths = self._index.match(chain.keys) if chain and chain.keys else {}
        if quoted:
            home = self.credits.home(quoted[0][1])
            if chain and home and learned.may_credit:
                credit = self.credits.find_credit(chain, quoted[0], size.text_bytes_per_token)
                if credit is not None:
                    depths[credit.replica] = len(credit.prefix)
        stored = self._knowledge.find_stored(tokens, now_s) if tokens else None
        sources = None
        if tokens and self._pulls.peers and wanted.may_pull:
            sources = self._knowledge.tiered.find_cpu_prefixes(tokens, self._pulls.sources(now_s))
        return PromptMatch(size, answer_tokens, chain.keys if chain else [], depths, stored, home, credit, sources)


def size_of(
    ask: RequestSpec,
    chain: Chain | None,
    tokens: ModelTokens,
    body_tokens: int,
    counted: TokenPrompt | None,
    quoted: list[tuple[Span, PastAnswer]],
) -> Size:
    """Return the size of a request, from the best source that is available.

    - `counted`: the token ids of the prompt, if known.
    - `quoted`: earlier answers in the prompt. The bytes per token of the conversation's last turn convert the prompt's
      bytes to tokens.
    - `tokens`: the learned bytes per token and tokens per image of the model.
    - `body_tokens`: used if the prompt cannot be read.
    """
    prompt, pool = ask.prompt, tokens.pool_ratio
    if counted is not None and counted.tokens:
        text_bytes = prompt.size if prompt is not None and prompt.bytes_per_token is None else 0
        ratio = text_bytes / counted.tokens if plausible(text_bytes / counted.tokens) else tokens.bytes_per_token
        return Size(counted.tokens, ratio, text_bytes, ratio, ratio * pool)
    ratio = tokens.bytes_per_token
    if prompt is None or chain is None:
        return Size(body_tokens, ratio, 0, ratio, ratio * pool)
    if prompt.opaque_bytes:
        count, text_bytes = tokens.tokens_of(prompt), prompt.size - prompt.opaque_bytes
        learned = prompt.opaque_bytes if prompt.bytes_per_token is None else 0
        return Size(count, prompt.size / count, text_bytes if learned else 0, ratio, ratio * pool, learned)
    if prompt.bytes_per_token is not None:
        ratio = prompt.bytes_per_token
        return Size(max(1, round(prompt.size / ratio)), ratio, 0, ratio, ratio * pool)
    for (_, start, _), answer in quoted:
        if answer.prompt_tokens and plausible(start / answer.prompt_tokens):
            ratio = start / answer.prompt_tokens  # the conversation's own ratio, from its last turn
            break
    text_bytes = prompt.size
    return Size(round(text_bytes / ratio) or 1, ratio, text_bytes, ratio, ratio * pool)
