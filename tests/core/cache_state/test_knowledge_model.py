"""What is remembered of replicas against the same found out anew, whatever happens to their streams."""

from __future__ import annotations

from array import array
from functools import cache

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from router.core.cache_state.calibration import CHECKS
from router.core.cache_state.engine_blocks import BLOCK_BYTES
from router.core.cache_state.event_index import EventIndex
from router.core.cache_state.event_state import HYBRID, ReplicaEventState, StoredPrefix
from router.core.kv_events.batch_decoder import Cleared, Removed, Stored
from router.core.kv_events.stream import RESTARTED
from router.core.prompts.block_keys import token_chain, token_root
from router.core.prompts.token_keys import TokenPrompt
from router.core.types.placements import Confidence
from router.core.types.replicas import Load
from tests.support.examples import examples

SIZES = (8, 16)  # tokens of a block, of engines that differ
NAMES = st.sampled_from(["a", "b", "c"])
LETTERS = st.text("xy", min_size=1, max_size=4)  # a letter stands for 16 tokens
SAMPLES = ("x", "xy", "xyxy", "yy")


@cache
def _prompt(letters: str, sizes: tuple[int, ...] = SIZES) -> TokenPrompt:
    ids = array("I", [ord(letter) for letter in letters for _ in range(16)]).tobytes()
    return TokenPrompt(ids, "", b"", {size: token_chain(ids, size, token_root("", b"", size)) for size in sizes})


class Machine(RuleBasedStateMachine):
    """Three replicas, and room for some thirty blocks of all of them."""

    @initialize()
    def _begin(self) -> None:
        self.now_s, self.lease = 0.0, 0
        self.open: list[tuple[str, int, TokenPrompt]] = []
        self.knowledge = EventIndex(
            blocks_max=24,
            aside_max=8,
            names_max=8,
            graded=lambda *_: None,
            resync=lambda _: None,
            restarted=lambda _: None,
            bytes_max=30 * BLOCK_BYTES,
        )

    # What streams say

    @rule(name=NAMES, letters=LETTERS, medium=st.sampled_from(["GPU", "GPU", "CPU"]), size=st.sampled_from(SIZES))
    def _store(self, name: str, letters: str, medium: str, size: int) -> None:
        prompt = _prompt(letters)
        keys = prompt.keys[size]
        event = Stored([key ^ 1 for key in keys], None, prompt.ids, size, "", b"", None, medium, 0, prefix=True)
        self.knowledge.apply(name, event, self.now_s)

    @rule(name=NAMES, letters=LETTERS, size=st.sampled_from(SIZES))
    def _remove(self, name: str, letters: str, size: int) -> None:
        self.knowledge.apply(name, Removed([_prompt(letters).keys[size][-1] ^ 1], "GPU", 0), self.now_s)

    @rule(name=NAMES)
    def _window(self, name: str) -> None:
        event = Stored([1], None, b"", 0, "", b"", None, "GPU", 1, prefix=False)
        self.knowledge.apply(name, event, self.now_s)

    @rule(name=NAMES)
    def _cleared(self, name: str) -> None:
        self.knowledge.apply(name, Cleared(), self.now_s)
        known = self.knowledge._known[name]
        if known.stream_grade is Confidence.CATCHING_UP:  # core/kv_events/stream.py
            self.knowledge.grade(name, Confidence.EXACT, "joined at a clear", self.now_s)

    @rule(name=NAMES, what=st.sampled_from(["clear", "restart", "suspend", "resume", "forget", "untokened", "tokened"]))
    def _happens(self, name: str, what: str) -> None:
        knowledge, now_s = self.knowledge, self.now_s
        if what == "clear":
            knowledge.clear(name, "gap", now_s)
        elif what == "restart":
            knowledge.clear(name, f"{RESTARTED}: other bytes", now_s)
        elif what == "suspend":
            knowledge.suspend(name, "disconnected", now_s, doubt=True)
        elif what == "resume":
            knowledge.resume(name, now_s)
        elif what == "forget":
            knowledge.forget(name)
        else:
            knowledge.set_untokenizable(name, "no tokenizer" if what == "untokened" else "")

    @rule(
        name=NAMES,
        grade=st.sampled_from([Confidence.EXACT, Confidence.EXACT, Confidence.CATCHING_UP, Confidence.ESTIMATED]),
    )
    def _grade(self, name: str, grade: Confidence) -> None:
        self.knowledge.grade(name, grade, grade.value, self.now_s)

    # What the router sees

    @rule(name=NAMES, hint=st.sampled_from([None, *SIZES]), pool=st.sampled_from([None, 160, 1_600]))
    def _probed(self, name: str, hint: int | None, pool: int | None) -> None:
        self.knowledge.on_probe(name, Load(block_tokens=hint, kv_tokens_max=pool), self.now_s)

    @rule(name=NAMES, letters=LETTERS)
    def _placed(self, name: str, letters: str) -> None:
        prompt = _prompt(letters)
        held = self.knowledge.find_stored(prompt, self.now_s).get(name) or self.knowledge.empty(name)
        if held is not None:
            self.lease += 1
            self.knowledge.expect_blocks(name, self.lease, prompt, held)
            self.open.append((name, self.lease, prompt))

    @rule(data=st.data(), computed=st.sampled_from([True, True, False]), grown=st.integers(0, 2))
    def _ended(self, data: st.DataObject, computed: bool, grown: int) -> None:
        if self.open:
            name, lease, prompt = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
            self.knowledge.settle(name, lease, prompt, self.now_s, computed=computed, grown_blocks=grown)

    @rule(name=NAMES, found=st.sampled_from([32, 24, 16, 0]))
    def _answered(self, name: str, found: int) -> None:
        for _ in range(CHECKS):
            held = self.knowledge.find_stored(_prompt("xy"), self.now_s).get(name) or self.knowledge.empty(name)
            self.knowledge.check_prediction(name, held, 32, found, 48)

    @rule(elapsed_s=st.sampled_from([0.005, 0.3, 11.0]))
    def _time(self, elapsed_s: float) -> None:
        self.now_s += elapsed_s
        self.knowledge.tick(self.now_s)

    # What must hold

    def _anew(self, prompt: TokenPrompt) -> dict[str, StoredPrefix]:
        """Of each replica that is not merely estimated, from the ledgers alone."""
        knowledge, found = self.knowledge, dict[str, StoredPrefix]()
        for name, known in knowledge._known.items():
            grade, ledger, size = known.shown[0], known.engine, known.block_tokens
            if grade is not Confidence.ESTIMATED:
                keys = prompt.keys.get(size)
                tokens = knowledge.masks.match(keys).get(name, 0) * size if keys else 0
                free, behind = None, False
                if known.kv_tokens_max and size and ledger.complete:
                    free = known.kv_tokens_max - ledger.gpu_blocks * size
                if grade is Confidence.EXACT:
                    root = token_root("", b"", size)
                    behind = ledger.blocks > 0 if keys is None else ledger.tails.is_continuation(keys, root, self.now_s)
                suspended = bool(known.suspended)
                doubted = suspended and known.doubted
                said = StoredPrefix(tokens, size, grade, known.epoch, suspended, doubted, free, behind)
                loads = self._loads(known, keys or [], tokens // size) if tokens or size else 0
                if loads and not suspended:
                    said.tokens, said.tiers = tokens + loads * size, {"cpu": loads * size}
                else:
                    said.dropped = known.answers.dropped_blocks * size
                said.kept_share = ledger.kept_share
                found[name] = said
        return found

    def _loads(self, known: ReplicaEventState, keys: list[int], depth: int) -> int:
        """Blocks in a row that the tier has behind so many."""
        tier, of = known.engine.tiers.get("cpu"), self.knowledge.masks.of
        end = depth
        while tier is not None and end < len(keys) and of.get(keys[end], 0) & tier.bit:
            end += 1
        return end - depth

    @invariant()
    def _says_what_ledgers_say(self) -> None:
        for letters in SAMPLES:
            for sizes in ((8,), SIZES):
                prompt = _prompt(letters, sizes)
                said = self.knowledge.find_stored(prompt, self.now_s)
                rest = {name: self.knowledge.empty(name) for name in ("a", "b", "c") if name not in said}
                anew = self._anew(prompt)
                assert said | {name: held for name, held in rest.items() if held is not None} == anew
                assert all(held.tokens or held.behind for held in said.values())
                late = [name for name, held in anew.items() if held.behind and held.block_tokens in prompt.keys]
                assert self.knowledge.has_pending_events(prompt, self.now_s) is bool(late)

    @invariant()
    def _has_its_sums(self) -> None:
        known = self.knowledge._known.values()
        followed = {each.block_tokens for each in known if each.shown[0] is not Confidence.ESTIMATED}
        assert self.knowledge.block_sizes() == followed - {0}
        taken = sum(each.engine.bytes_used for each in known)
        assert taken <= self.knowledge.bytes_used <= 30 * BLOCK_BYTES

    @invariant()
    def _is_exact_only_where_that_is_known(self) -> None:
        for known in self.knowledge._known.values():
            assert known.shown == known.compute_confidence()
            if known.shown[0] is Confidence.EXACT:
                assert known.engine.complete
                assert known.earned or not known.hybrid
            assert known.hybrid or known.shown[1] != HYBRID


MODEL = settings(
    max_examples=examples(60), stateful_step_count=30, deadline=None, phases=[Phase.reuse, Phase.generate, Phase.shrink]
)


def test_model() -> None:
    """What `held` and `empty` say together is what the ledgers say, sums are right, and the grade is no better than the
    knowledge."""
    run_state_machine_as_test(Machine, settings=MODEL)
