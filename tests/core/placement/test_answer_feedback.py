from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.dialects import OPENAI
from router.core.fleet.lease import Lease
from router.core.fleet.models import MODELS_MAX, NoReplicaReady
from router.core.prompts import block_keys
from router.core.prompts.block_keys import chain_of, ring_key
from router.core.types.placements import EndReason, Outcome, Usage
from router.core.types.replicas import Load, Replica, ServedModel
from router.core.types.requests import OPAQUE_BYTES, RequestSpec
from tests.core.placement.placing import CHAT, MODEL, World, chat, words
from tests.support.examples import examples
from tests.support.records import replace

LONG = words(1, 8_000)
BLOCK_TOKENS = block_keys.BLOCK_BYTES // 4


def test_an_answer_is_credited_when_a_prompt_quotes_it() -> None:
    """A second turn is predicted to find the first answer's blocks too, to within a block, on whoever gave it."""
    world, answer = World(), words(2, 4_000)
    home = world.serve(chat(LONG), output_tokens=4_000).replica
    lease = world.place(chat(LONG, answer, "why?"))
    assert lease.replica == home
    assert lease.prompt_tokens - lease.cached_tokens < 2 * BLOCK_TOKENS
    assert lease.prompt.credited_tokens == pytest.approx(4_000, abs=BLOCK_TOKENS)


def test_no_more_is_credited_than_was_generated() -> None:
    """A client that puts a longer answer in the assistant's mouth gets credit for what the engine generated."""
    world = World("a")
    world.serve(chat(LONG), output_tokens=1_000)
    lease = world.place(chat(LONG, words(2, 4_000), "why?"))
    assert lease.cached_tokens == pytest.approx(9_000, abs=BLOCK_TOKENS)


def test_an_unseen_answer_fills_the_cache() -> None:
    """Until it is quoted an answer takes room and matches nothing; quoted, it is not counted twice."""
    world = World("a")
    world.serve(chat(LONG), output_tokens=4_000)
    assert world.router.index.blocks("a") == pytest.approx(12_000 / BLOCK_TOKENS, abs=2)
    world.serve(chat(LONG, words(2, 4_000), "why?"), output_tokens=1)
    assert world.router.index.blocks("a") == pytest.approx(12_000 / BLOCK_TOKENS, abs=3)


def test_an_answer_without_usage_counts_its_events() -> None:
    """Where the engine reports no usage, streamed events stand for tokens."""
    world = World("a")
    lease = world.place(chat(LONG))
    world.finish(lease, events=4_000)
    assert world.place(chat(LONG, words(2, 4_000), "why?")).prompt.credited_tokens == pytest.approx(
        4_000, abs=BLOCK_TOKENS
    )


def test_credit_needs_the_prompt_to_be_there_still() -> None:
    """Nothing is credited behind a prefix that was evicted, nor on a replica that left."""
    world = World("a")
    world.serve(chat(LONG), output_tokens=4_000)
    world.router.observations.forget("a")
    assert world.place(chat(LONG, words(2, 4_000), "why?")).cached_tokens == 0
    world = World("ab")
    home = world.serve(chat(LONG), output_tokens=4_000).replica
    world.router.replace([Replica(id_) for id_ in "ab" if id_ != home])
    assert world.place(chat(LONG, words(2, 4_000), "why?")).prompt.credited_tokens == 0


def test_credit_is_dropped_where_engines_disagree() -> None:
    """A model whose engine keeps missing the answers (a template that drops reasoning) gets no more credit, and
    another model still does."""
    world, credited = World("a"), []
    world.router.observations.observe_models("a", [ServedModel(MODEL), ServedModel("other")])
    for n in range(8):
        question = words(10 + n, 2_000)
        world.serve(chat(question), output_tokens=1_000)
        lease = world.serve(chat(question, words(50 + n, 1_000), "why?"), cached_tokens=1_984)
        credited.append(lease.prompt.credited_tokens > 0)
    assert credited[0]
    assert not credited[-1]
    world.serve(chat(LONG), output_tokens=1_000, model="other")
    assert world.place(chat(LONG, words(2, 1_000), "why?"), model="other").prompt.credited_tokens > 0


def test_bytes_per_token_are_learned() -> None:
    """A tokenizer with 3 bytes a token is learned from usage; a conversation's own ratio goes before the mean."""
    world = World("a")
    text_bytes = len(chat(LONG).prompt.text)  # type: ignore[union-attr]
    lease = world.place(chat(LONG))
    world.finish(lease, usage=Usage(text_bytes // 3, 0))
    again = world.place(chat(LONG, "ok", "go on"))
    assert again.prompt_tokens == pytest.approx(text_bytes / 3, rel=0.01)
    fresh = world.place(chat(words(7, 8_000)))
    assert text_bytes / 4 < fresh.prompt_tokens < text_bytes / 3


def test_pictures_say_nothing_of_bytes_per_token() -> None:
    """A prompt with an image is sized by what an image has, and its text's bytes per token are not learned from."""
    world, picture = World("a"), [{"type": "image_url", "image_url": {"url": "https://x/y.png"}}]
    body = {"model": MODEL, "messages": [{"role": "user", "content": picture}]}
    lease = world.place(OPENAI.parse(CHAT, json.dumps(body).encode()))
    world.finish(lease, usage=Usage(5, 1))
    assert lease.prompt.opaque_bytes == OPAQUE_BYTES
    assert world.router.models.tokens(MODEL).bytes_per_token == 4.0


def test_one_slow_answer_is_no_exile() -> None:
    """A replica whose first prefill took twenty times as long is left alone while others are idle, but not for good:
    it is asked again within a minute."""
    world = World("ab")
    for n in range(4):
        world.serve(chat(words(n, 4_000)), only="b")
    lease = world.place(chat(words(4, 4_000)), only="a")
    world.first_token(lease, after_s=20 * lease.prefill_ms / 1e3)
    world.finish(lease, usage=Usage(4_000, 10, 0))

    def asked(first: int) -> set[str]:
        return {world.serve(chat(words(first + n, 4_000))).replica for n in range(12)}

    assert asked(10) == {"b"}
    for _ in range(60):
        world.now_s += 1.0
        for id_ in "ab":
            world.router.observations.observe_load(id_, Load(), world.now_s)
    assert asked(30) == {"a", "b"}


def test_prefill_speed_is_learned_from_streams() -> None:
    """Predicted prefill follows an engine that is ten times slower than the prior."""
    world = World("a")
    for n in range(30):
        lease = world.place(chat(words(100 + n, 4_000)))
        world.first_token(lease, after_s=4.0)
        world.finish(lease, usage=Usage(4_000, 5, 0))
    assert world.place(chat(LONG)).prefill_ms == pytest.approx(8_000, rel=0.15)


def test_predictions_are_rounded_and_capped_as_engines_do() -> None:
    """Whole blocks of the engine, never the last token, and nothing where prefix caching is off."""
    world = World("a")
    world.router.observations.observe_load("a", Load(block_tokens=48, kv_tokens_max=100_000))
    prompt = chat(words(1, 4 * BLOCK_TOKENS - 3))  # whole blocks of ours, role included
    world.serve(prompt)
    lease = world.place(prompt)
    assert lease.prompt_tokens > lease.cached_tokens > lease.prompt_tokens - 48 - BLOCK_TOKENS
    assert lease.cached_tokens % 48 == 0
    world.router.observations.observe_load("a", Load(prefix_caching=False))
    assert world.place(prompt).cached_tokens == 0


def test_the_last_token_is_always_computed() -> None:
    """An engine needs logits: of a prompt that is held whole, all but the last token count, down to whole blocks."""
    world, ids = World("a"), list(range(8 * BLOCK_TOKENS))
    ask = OPENAI.parse("/v1/completions", json.dumps({"model": MODEL, "prompt": ids}).encode())
    world.serve(ask)
    assert world.place(ask).cached_tokens == len(ids) - 1
    world.router.observations.observe_load("a", Load(block_tokens=16))
    assert world.place(ask).cached_tokens == len(ids) - 16


def test_a_lease_is_learned_from_once() -> None:
    """Finishing again, with whatever usage, changes nothing that was learned."""
    world = World("a")
    lease = world.serve(chat(LONG), output_tokens=4_000)
    fleet = world.router.fleet
    learned = (
        world.router.models.tokens(MODEL).bytes_per_token,
        fleet.means.common.mean_open_ms,
        fleet.means.common.prefill.model,
    )
    world.now_s += 100.0
    world.finish(lease, usage=Usage(1_000_000, 1))
    speeds = fleet.means.common
    assert learned == (world.router.models.tokens(MODEL).bytes_per_token, speeds.mean_open_ms, speeds.prefill.model)
    assert world.place(chat(LONG, words(2, 4_000), "why?")).prompt.credited_tokens > 3_000


def test_capacity_is_the_engines() -> None:
    """The believed cache shrinks to what the engine reports, in its tokens at the learned ratio."""
    world = World("a")
    world.serve(chat(LONG))
    world.router.observations.observe_load("a", Load(kv_tokens_max=32 * BLOCK_TOKENS))
    assert (world.router.index.capacity("a"), world.router.index.blocks("a")) == (32, 32)
    assert world.depth(chat(LONG), "a") > 0


def test_eviction_is_priced_only_where_it_happens() -> None:
    """Into a full cache whose prompts return the price counts; into an empty one it does not."""
    world = World("ab", blocks_max=80)
    for turn in range(20):
        world.serve(chat(LONG, *("ok", "go on") * turn), only="a")
        world.now_s += 1.0
    full, empty = world.place(chat(words(5, 4_000))).receipt.candidates
    assert full.evicted_ms > 0
    assert empty.evicted_ms == 0


def test_eviction_has_no_price_where_others_send_too() -> None:
    """Engines that count twice the prompts that we send are filled by others: what goes there is not ours to know."""
    world = World("a", blocks_max=80)
    for turn in range(40):
        world.serve(chat(LONG, *("ok", "go on") * turn))
        world.now_s += 1.0
    question = chat(words(5, 4_000))
    assert world.place(question).receipt.candidates[0].evicted_ms > 0
    for probe in range(2):
        world.router.observations.observe_load("a", Load(prompt_tokens_total=1.0 + probe * 1_000_000))
    world.router.observations.check(world.now_s)
    assert world.place(question).receipt.candidates[0].evicted_ms == 0


def test_a_full_pool_makes_others_wait() -> None:
    """Where open leases fill the KV pool, a request is expected to wait for one of them."""
    world = World("ab")
    lease = world.place(chat(LONG), only="a")
    world.first_token(lease, after_s=1.0)
    world.now_s += 19.0
    world.finish(lease, usage=Usage(8_000, 500, 0))
    for id_ in "ab":
        world.router.observations.observe_load(id_, Load(kv_tokens_max=10_000))
    world.place(chat(words(4, 8_000)), only="a")
    full, free = world.place(chat(words(5, 4_000))).receipt.candidates
    assert full.kv_wait_ms > 0
    assert free.kv_wait_ms == 0


def test_the_ring_key_is_the_best_hint_there_is() -> None:
    """Session header, then prompt_cache_key, then the first user message, then the body."""
    now, later = chat(LONG), chat(LONG, "ok", "go on")
    chains = chain_of(now, MODEL), chain_of(later, MODEL)
    assert ring_key(now, chains[0], None, b"x") == ring_key(later, chains[1], None, b"y")
    hinted = replace(now, session="s")
    assert (ring_key(hinted, chains[0], None, b""), ring_key(hinted, chains[0], "h", b"")) == ("s", "h")
    assert ring_key(RequestSpec(None), None, None, b"x") != ring_key(RequestSpec(None), None, None, b"y")


def test_models_learned_are_bounded() -> None:
    """A client that invents model names does not fill memory."""
    world = World("a")
    for n in range(MODELS_MAX + 50):
        world.router.models.tokens(str(n))
    assert len(world.router.models._tokens) == MODELS_MAX


def test_an_empty_prompt_teaches_no_ratio() -> None:
    """An answer to nothing, then a conversation that starts with the assistant: sized, not divided by zero."""
    world = World("a")
    world.serve(OPENAI.parse("/v1/completions", b'{"model":"m","prompt":""}'))
    body = b'{"model":"m","messages":[{"role":"assistant","content":"hi"},{"role":"user","content":"hi"}]}'
    assert world.place(OPENAI.parse(CHAT, body)).prompt_tokens > 0


LOADS = st.builds(
    Load,
    waiting=st.integers(0, 20),
    kv_tokens_max=st.sampled_from([None, 600, 20_000]),
    block_tokens=st.sampled_from([None, 16]),
    prompt_tokens_total=st.sampled_from([None, 10.0, 90_000.0]),
)
ASKS = st.builds(
    lambda seed, turns, stream: replace(chat(*[words(seed + n, 300) for n in range(turns)]), stream=stream),
    st.integers(0, 2),
    st.integers(1, 4),
    st.booleans(),
)
USAGES = st.none() | st.builds(Usage, st.integers(0, 9_000), st.integers(0, 900), st.none() | st.integers(0, 9_000))
OUTCOMES = st.builds(Outcome, st.sampled_from(EndReason), USAGES, st.integers(0, 50))
STEPS = st.one_of(
    st.tuples(st.just("route"), ASKS),
    st.tuples(st.just("route"), ASKS),
    st.tuples(st.just("first token"), st.integers(0, 30)),
    st.tuples(st.just("finish"), st.tuples(st.integers(0, 30), OUTCOMES)),
    st.tuples(st.just("replace"), st.sets(st.sampled_from("abc"))),
    st.tuples(st.just("health"), st.tuples(st.sampled_from("abc"), st.booleans())),
    st.tuples(st.just("load"), st.tuples(st.sampled_from("abc"), LOADS)),
)


@given(steps=st.lists(STEPS, max_size=40))
@settings(deadline=None, max_examples=examples(60))
def test_every_lease_comes_back(steps: list[tuple[str, Any]]) -> None:
    """Whatever happens in whatever order, once all leases are finished nothing is in use, pending or pinned."""
    world, leases = World("abc", blocks_max=12), list[Lease]()
    for action, detail in steps:
        world.now_s += 0.1
        if action == "route":
            try:
                leases.append(world.place(detail))
            except NoReplicaReady:
                assert not world.router.fleet.model_names()
        elif action == "first token" and leases:
            world.first_token(leases[detail % len(leases)])
        elif action == "finish" and leases:
            world.router.finish(leases[detail[0] % len(leases)], detail[1], world.now_s)
        elif action == "replace":
            for id_ in world.router.replace([Replica(id_) for id_ in sorted(detail)])[0]:
                world.router.observations.observe_models(id_, [ServedModel(MODEL)])
        elif action == "health":
            world.router.fleet.observe_health(detail[0], ok=detail[1])
        elif action == "load":
            world.router.observations.observe_load(*detail)
    for lease in leases:
        world.finish(lease, EndReason.FAILED)
    assert all(use == (0, 0, 0.0) for use in world.in_use())
    assert all(not (h.pins or h.unproven) for h in world.router.index.holders.values())
