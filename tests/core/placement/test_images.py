"""What is no text in a prompt: how many tokens it has is learned from what engines count."""

from __future__ import annotations

import json
from random import Random

import pytest

from router.core.dialects import OPENAI
from router.core.estimators.token_ratio import BYTES_PER_TOKEN, ModelTokens
from router.core.types.placements import Usage
from router.core.types.replicas import Load
from router.core.types.requests import OPAQUE_BYTES, Prompt, RequestSpec
from tests.core.placement.placing import CHAT, MODEL, World, words

IMAGE_TOKENS, KV_TOKENS = 1_500, 400_000


def seen(n: int, *, text_tokens: int = 130) -> RequestSpec:
    """A question about an image that nobody asked about before."""
    url = {"type": "image_url", "image_url": {"url": f"https://x/{n}.png"}}
    content = [url, {"type": "text", "text": words(n, text_tokens)}]
    body = {"model": MODEL, "stream": True, "messages": [{"role": "user", "content": content}]}
    return OPENAI.parse(CHAT, json.dumps(body).encode())


def count(ask: RequestSpec) -> int:
    """The engine's count: four bytes of text to a token, and what an image has."""
    assert ask.prompt is not None
    parts = ask.prompt.opaque_bytes // OPAQUE_BYTES
    return (ask.prompt.size - ask.prompt.opaque_bytes) // 4 + parts * IMAGE_TOKENS


def load(total: float) -> Load:
    """A replica's page: it has computed so many prompt tokens."""
    return Load(running=0, waiting=0, kv_tokens_max=KV_TOKENS, block_tokens=16, prompt_tokens_total=total)


def served(asks: list[RequestSpec], *, told: bool = True) -> World:
    """One replica that answered these, and says what it counted, in its answers or at least on its page."""
    world, total = World("a"), 0.0
    world.router.observations.observe_load("a", load(total), world.now_s)
    for ask in asks:
        lease = world.place(ask)
        world.first_token(lease, after_s=0.3)
        world.finish(lease, usage=Usage(count(ask), 10) if told else None)
        total += count(ask)
        world.router.observations.observe_load("a", load(total), world.now_s)
    return world


def test_tokens_of_an_image_are_learned() -> None:
    """After some answers a prompt with images is as long as the engine will say, and plain text stays what it was."""
    world = served([seen(n) for n in range(40)])
    for ask in (seen(99), seen(98, text_tokens=3_000)):
        assert world.place(ask).prompt_tokens == pytest.approx(count(ask), rel=0.02)
    assert world.router.models.tokens(MODEL).bytes_per_token == BYTES_PER_TOKEN


def test_the_only_router_is_alone_whatever_an_image_has() -> None:
    """Its share of a replica's prompts is by what answers say; too short a guess does not look like another router."""
    world = served([seen(n) for n in range(60)])
    member = world.router.fleet.members["a"]
    assert member.counters.engine_prompt_tokens > 50_000
    assert member.counters.share == 1.0


def test_long_answers_count_once_in_the_share() -> None:
    """What is corrected is corrected as much as it has faded meanwhile: a share is neither made up nor lost by guesses
    that were too long, nor by answers that take their time."""
    world, total, held = World("a"), 0.0, []
    world.router.models.tokens(MODEL).observe(200_000, 400_000)  # half a byte to a token: guesses are much too long
    world.router.observations.observe_load("a", load(total), world.now_s)
    for n in range(300):
        ask = RequestSpec(MODEL, Prompt(str(n).zfill(4_000).encode(), 4_000), stream=True)
        held.append(world.place(ask))
        total += 2_000.0  # ours and as much of another router's
        world.router.observations.observe_load("a", load(total), world.now_s)
        if len(held) > 40:
            world.finish(held.pop(0), usage=Usage(1_000, 10))
    member = world.router.fleet.members["a"]
    under_way = sum(lease.prompt_tokens - 1_000 for lease in held)
    assert (member.counters.sent_prompt_tokens - under_way) / member.counters.engine_prompt_tokens == pytest.approx(
        0.5, abs=0.1
    )


@pytest.mark.long
def test_a_cache_holds_as_many_images_as_fit() -> None:
    """An image takes more of the engine's cache than its bytes do as text: the belief is as large as the cache."""
    world = served([seen(n) for n in range(600)])
    fit = KV_TOKENS / count(seen(0))
    held = sum(world.depth(seen(n), "a") > 0 for n in range(600))
    assert held == pytest.approx(fit, rel=0.1)


def test_long_texts_teach_little_of_images() -> None:
    """A text whose tokens are known to a tenth hides an image; those with little text still tell."""
    tokens, rng = ModelTokens(), Random(7)
    for n in range(400):
        text = 100_000 if n % 2 else 400
        error = rng.uniform(0.9, 1.1) if n % 2 else 1.0
        tokens.observe(text, int(text / 4 * error) + IMAGE_TOKENS, OPAQUE_BYTES)
    assert tokens.opaque_tokens == pytest.approx(IMAGE_TOKENS, rel=0.1)


@pytest.mark.parametrize("prompt_tokens", [0, -5, 10**15])
def test_counts_that_cannot_be_teach_nothing(prompt_tokens: int) -> None:
    """An engine may say anything."""
    tokens = ModelTokens()
    tokens.observe(400, prompt_tokens, OPAQUE_BYTES)
    assert tokens == ModelTokens()


def test_without_images_nothing_changes() -> None:
    """What fills a cache is text then, to the last bit."""
    tokens = ModelTokens()
    for n in range(1, 200):
        tokens.observe(n * 37, n * 11)
    assert tokens.pool_ratio == 1.0
    assert tokens.tokens_of(Prompt(b"x" * 1_000, 1_000)) == round(1_000 / tokens.bytes_per_token)
