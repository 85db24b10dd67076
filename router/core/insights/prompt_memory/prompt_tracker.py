"""Recognition of prompts: the conversation and template of each, and the earlier prompt that it should have continued.

Most prompts continue at the end of an earlier one, or begin a new conversation on a known template: these need no
comparison. Others are *suspect*: they differ within the text of their earlier prompts, or before the first user
message. The earlier prompt is found by the parts that stay the same: messages after the difference, the session that
the client names, the text up to the difference, lines of the template. The two are compared within a budget
(core/insights/difference/compare.py). The result is passed to the PromptTracker, and only then is the prompt kept.
"""

from __future__ import annotations

from xxhash import xxh3_64_intdigest

from router.core.insights.difference.compare import Compared
from router.core.insights.prompt_memory import fingerprints
from router.core.insights.prompt_memory.diff_candidate import SKETCHED_BYTES_MIN, DiffCandidate, marks_of, user_start
from router.core.insights.prompt_memory.fast_path import WAYS_MIN, is_append, matches_known_change
from router.core.insights.prompt_memory.recent_findings import FINDING_BYTES, RecentFindings
from router.core.insights.prompt_memory.related_prompts import find_other_identity, find_related
from router.core.insights.prompt_memory.shared_prefixes import TEMPLATE_BYTES, TOOLS, SharedPrefix, Templates
from router.core.insights.prompt_memory.texts import LINKS_MAX, Match, Record, Text, Texts
from router.core.prompts.block_keys import BLOCK_BYTES, Chain
from router.core.prompts.canonical import RS
from router.core.types.cache_misses import PromptAnalysis, Template
from router.core.types.requests import Prompt, RequestSpec

BODIES_SHARE = 8  # 1 part in this number of the memory is for bodies of templates
FINDINGS_SHARE = 64  # 1 part in this number of the memory is for results of comparisons

_RS_TOOL = RS + b"tool\x1f"
_MASK = (1 << 64) - 1
_NOTHING = Prompt(b"", 0)
_NO_MATCH = Match()


class PromptTracker:
    """Recognises the prompts of one process. Not thread-safe."""

    def __init__(
        self, memory_bytes_max: int, prompt_bytes_max: int, templates_max: int, *, excerpts: bool, seed: int
    ) -> None:
        """`seed`: 64 random bits, so that no client can make marks that collide."""
        bodies_bytes_max = memory_bytes_max // BODIES_SHARE
        self._texts = Texts(memory_bytes_max - bodies_bytes_max - memory_bytes_max // FINDINGS_SHARE)
        self._templates = Templates(
            templates_max, max(0, bodies_bytes_max - templates_max * TEMPLATE_BYTES), excerpts=excerpts
        )
        self._sketches = fingerprints.FingerprintSampling()
        self._findings = RecentFindings(max(1, memory_bytes_max // FINDINGS_SHARE // FINDING_BYTES))
        self._kept_bytes_max = min(prompt_bytes_max, memory_bytes_max // BODIES_SHARE) // BLOCK_BYTES * BLOCK_BYTES
        self._seed = seed & _MASK
        self._roots: dict[int, tuple[int, bool]] = {}

    def templates(self) -> list[Template]:
        """Return templates that changed since the last call."""
        return self._templates.take_changed()

    @property
    def forgot(self) -> bool:
        """True if the memory was too small for all prompts so far."""
        return self._texts.forgot

    # -- search ------------------------------------------------------------------------------------------------

    def classify(
        self,
        ask: RequestSpec,
        chain: Chain,
        *,
        session: str,
        path: str,
        body: bytes,
        whole: Prompt | None = None,
        sure: bool = False,
        tenant: str = "",
    ) -> PromptAnalysis | DiffCandidate:
        """Compare a prompt with the texts of earlier prompts, and keep it. Returns a DiffCandidate if it must be
        compared or lacks its beginning; it is kept later.

        - `whole`: its prompt with all of its text, if `ask` has only the end.
        - `sure`: findings of other prompts are not assumed for it.
        - `tenant`: it is compared with prompts of that tenant only, and no other prompt with it.
        """
        prompt = whole or ask.prompt or _NOTHING  # every chain is made of a prompt
        whose = 0
        if tenant:
            whose = xxh3_64_intdigest(tenant.encode(), self._seed)
            chain = _kept_apart(chain, whose)
        text, base, keys, end_key = prompt.text, prompt.skipped_bytes, chain.keys, chain.end_key
        tools = (text if not base else prompt.joint.head if prompt.joint is not None else b"").startswith(TOOLS)
        if not keys:  # no replica can be estimated to hold any of it
            return PromptAnalysis(0, 0, 0, 0, 0, 0, True, tools)
        ends = self._texts.young.ends
        record = ends.get(end_key)
        if record is not None:
            record.asked += 1
            template, conversation, turn, calls = record.template, record.conversation, record.turn, record.tool_calls
            return PromptAnalysis(record.end, 0, 0, template, conversation, turn, True, tools, calls)
        size, name = base + len(text), session or ask.session
        mark = self._session_mark(name, chain.root) if name else 0
        if size <= self._kept_bytes_max:
            if chain.spans:
                key, start, _ = chain.spans[-1]
                record = ends.get(key)
                if record is not None and not record.children and start >= base and record.links < LINKS_MAX:
                    return is_append(self._texts, self._templates, record, chain, text, base, mark, tools=tools)
            if not mark and not prompt.hint_bytes:
                most = SKETCHED_BYTES_MIN if self._sketches.on else size
                texts, templates = self._texts, self._templates
                seen = matches_known_change(texts, templates, prompt, chain, path, body, tools=tools, behind_max=most)
                if seen is not None:
                    return seen
        if size > self._kept_bytes_max:
            size, end_key = self._kept_bytes_max, 0
            text, keys = text[: max(0, size - base)], keys[: size // BLOCK_BYTES]
            base = min(base, size)
        suspect = DiffCandidate(
            keys, chain.root, end_key, text, base, size, whose,
            PromptAnalysis(), min(prompt.first_user_end, size), path, body, mark, _NO_MATCH,
            prompt.hint_bytes, prompt.bytes_per_token is not None, bool(chain.spans),
        )  # fmt: skip
        suspect.sighting.tools, suspect.salted = tools, bool(ask.salt)
        self._search(suspect, chain, sure=sure)
        return suspect if suspect.lacks or suspect.related is not None else suspect.sighting

    def _session_mark(self, name: str, root: int) -> int:
        return xxh3_64_intdigest(name.encode(errors="surrogatepass"), self._seed ^ root)

    def _search(self, suspect: DiffCandidate, chain: Chain, *, sure: bool) -> None:
        """Find its longest known prefix, and decide the kind of the prompt."""
        texts = self._texts
        young, old = texts.young.match(suspect), texts.old.ends
        if old:
            aged = suspect.base > 0 or suspect.end_key in old or (bool(chain.spans) and chain.spans[-1][0] in old)
            known = texts.find_longest_match(suspect, young, aged=aged)
        else:
            known = young
        suspect.known = known
        suspect.sighting.known_bytes = at = known.known
        if known.lacks or at < suspect.base:
            suspect.lacks = True
            return
        record = known.record
        while record is not None and record.start >= at and record.parent is not None:
            record = record.parent
        suspect.record = record
        if record is not None:
            before = record.parent
            if at == suspect.size:
                self._handle_known(suspect, young, record)
                return
            if at == record.end and record.children < record.asked:
                self._handle_appended(suspect, young, record)
                return
            if before is not None and before.end == record.start and before.children < before.asked:
                self._handle_appended(suspect, young, before)
                return
        self._handle_divergent(suspect, young, sure=sure)

    def record_diff(self, suspect: DiffCandidate, compared: Compared | None, *, rejects: bool = False) -> None:
        """Complete the result of a suspect that was compared, or not (None), and keep it. With `rejects` it is not kept
        if it changes earlier text of its conversation."""
        if suspect.related is None:
            return
        young, known = self._texts.match(suspect)
        if known.lacks or known.known < suspect.base:  # forgotten in the meantime
            return
        suspect.known = known
        self._settle(suspect, young, compared, rejects=rejects)

    def _settle(
        self, suspect: DiffCandidate, young: Match, compared: Compared | None, *, rejects: bool = False
    ) -> None:
        related, sighting, own = suspect.related, suspect.sighting, suspect.own
        if related is None:
            return
        in_template, span = suspect.known_bytes < suspect.user, suspect.span(related)
        found, told = suspect.assumed, compared
        if told is None and found is not None and not rejects:
            told = found.adapt_to_prompt(suspect.known_bytes, span)
        if told is None:
            alike = own and suspect.least_bytes == 1
            sighting.appended = not alike
        else:
            alike = told.appended or told.repeated_bytes >= suspect.least_bytes
            if alike:
                sighting.difference = told.difference
                # Another prompt may share more of its beginning than the one that it was compared with.
                sighting.repeated_bytes = min(told.repeated_bytes, suspect.size - sighting.known_bytes)
                sighting.appended = told.difference is None or not own
                if rejects and not sighting.appended:
                    return
        if own and (alike or (suspect.user < 0 and not _is_fork(young))):
            self._go_on(suspect, young, self._texts.latest(related.conversation) or related)
        else:
            self._begin(suspect, young, related if alike else None)
        if compared is not None and not compared.appended:
            names = (sighting.conversation if own else 0, sighting.template if in_template or not own else 0)
            self._findings.add(names, compared, span, in_template=in_template)

    # -- kinds of prompts --------------------------------------------------------------------------------------

    def _handle_known(self, suspect: DiffCandidate, young: Match, record: Record) -> None:
        """Handle a prompt that is known to its end: the same prompt, or an earlier turn, or part of one."""
        sighting = suspect.sighting
        sighting.conversation, sighting.template = record.conversation, record.template
        sighting.turn, sighting.tool_calls = record.turn, record.tool_calls
        same = record.end == suspect.size
        if same:
            record.asked += 1
            if not suspect.end_key:  # the prompts were cut: the text after the cut is unknown
                record.turn += 1
        if young.known < suspect.size:  # the prompt is used, so it moves to the young generation
            suspect.user = -1
            asked, children = (record.asked, record.children) if same else (1, 0)
            self._keep(suspect, young, marks_of(suspect, young, self._seed, self._sketches), asked, children)

    def _handle_appended(self, suspect: DiffCandidate, young: Match, record: Record) -> None:
        """Keep a prompt that continues at the end of an earlier prompt."""
        sighting, start = suspect.sighting, record.end - suspect.base
        text, template = suspect.text, record.template
        # If a prompt was requested several times, each continuation is a separate conversation.
        sighting.conversation = _derive_conversation_id(suspect) if record.children else record.conversation
        record.children += 1
        sighting.template, sighting.turn, sighting.tool_calls = template, record.turn + 1, record.tool_calls
        if suspect.answered and (sighting.tools or sighting.tool_calls):
            sighting.tool_calls += text.count(_RS_TOOL, max(0, start))
        if template:
            self._templates.touch(template)
        made = fingerprints.messages(text, max(0, start), suspect.root, fingerprints.MESSAGES_KEPT_MAX)
        if suspect.session:
            made.append(suspect.session)
        self._keep(suspect, young, made)

    def _handle_divergent(self, suspect: DiffCandidate, young: Match, *, sure: bool) -> None:
        """Handle a prompt that differs from earlier prompts before their end, or resembles none."""
        first_end, known, size = suspect.first_user_end, suspect.known.known, suspect.size
        text, base = suspect.text, suspect.base
        user = -1
        if base < first_end and known < first_end:
            user = suspect.user = user_start(text, first_end - base) + base
        if known < BLOCK_BYTES and not base:
            suspect.sighting.identity_bytes = find_other_identity(suspect, self._texts, self._seed, self._roots)
        behind = size - known
        if not suspect.ids and (
            known < user
            or behind >= SKETCHED_BYTES_MIN
            or (suspect.session and user >= 0)
            or (first_end < size and (user >= 0 or text.find(RS, max(0, known - base)) >= 0))
        ):
            find_related(suspect, self._texts, self._sketches)
        related = suspect.related
        if related is not None:
            suspect.from_bytes = known if related is suspect.record else 0
            suspect.known_bytes = known
            names = (related.conversation, related.template) if suspect.own else (related.template,)
            found = suspect.assumed = self._findings.find_assumable(names, known, in_template=known < user)
            if not sure and found is not None and found.stands(known):
                self._settle(suspect, young, None)
                suspect.related = None
        elif user < 0 and suspect.record is not None and not _is_fork(young):
            self._go_on(suspect, young, suspect.record)
        else:
            self._begin(suspect, young, None)

    # -- storage -----------------------------------------------------------------------------------------------

    def _go_on(self, suspect: DiffCandidate, young: Match, before: Record) -> None:
        """Keep another prompt of the conversation."""
        sighting = suspect.sighting
        sighting.conversation, sighting.turn, sighting.template = before.conversation, before.turn + 1, before.template
        if suspect.answered:
            self._count_calls(suspect)
        self._keep(suspect, young, marks_of(suspect, young, self._seed, self._sketches))

    def _begin(self, suspect: DiffCandidate, young: Match, related: Record | None) -> None:
        """Keep the first prompt of a conversation. `related`: the latest prompt of another conversation of its
        template."""
        suspect.sighting.conversation = suspect.end_key or _derive_conversation_id(suspect)
        if suspect.answered:
            self._count_calls(suspect)
        end = self._shared_bytes(suspect, young)
        if end >= BLOCK_BYTES:
            key = suspect.keys[end // BLOCK_BYTES - 1]
            self._count_conversation(suspect, key, end, key)
        elif related is not None:
            if not related.template:
                related.template = xxh3_64_intdigest(b"template", related.conversation)
            self._count_conversation(suspect, related.template, suspect.known.known, 0)
        self._keep(suspect, young, marks_of(suspect, young, self._seed, self._sketches))

    def _count_calls(self, suspect: DiffCandidate) -> None:
        """Count the tools that were called: as many as have a result."""
        if suspect.sighting.tools or (suspect.record is not None and suspect.record.tool_calls):
            suspect.sighting.tool_calls = suspect.prefix(suspect.size).count(_RS_TOOL)

    def _shared_bytes(self, suspect: DiffCandidate, young: Match) -> int:
        """Return the end of the template that it begins with, 0 if it shares none."""
        known = suspect.known.known
        if BLOCK_BYTES <= suspect.hint_bytes <= suspect.size:
            return suspect.hint_bytes
        if suspect.record is None:
            return 0
        if suspect.user < 0:  # many conversations may begin with this whole one: examples
            return known if _is_fork(young) else 0
        return min(known, suspect.user) if suspect.user else known

    def _count_conversation(self, suspect: DiffCandidate, name: int, end: int, key: int) -> None:
        """Count one more conversation of this template. The conversation that it forked from belongs to it too."""
        record, templates = suspect.record, self._templates
        suspect.sighting.template = name
        near = record.template if record is not None else 0
        # A prompt related by a few lines only shares less than those that share it from the first byte on.
        size = end if key else 1 << 62
        if templates.count_conversation(name, size, suspect.path, suspect.body):
            if templates.unlabelled:
                templates.label(name, suspect.prefix(end))
            return
        known = key and key ^ suspect.whose  # the key by which replicas are known to hold it
        prefix = SharedPrefix(suspect.prefix(end), known, end in (suspect.user, suspect.hint_bytes))
        templates.learn(name, prefix, near, int(record is not None and (not suspect.hint_bytes or near == name)))
        templates.count_conversation(name, size, suspect.path, suspect.body)
        if record is not None and not near:
            record.template = name
            latest = self._texts.latest(record.conversation)
            if latest is not None and not latest.template:
                latest.template = name

    def _keep(self, suspect: DiffCandidate, young: Match, made: list[int], asked: int = 1, children: int = 0) -> None:
        if young.known < suspect.size:  # a prompt requested twice at once has been kept already
            of = suspect.sighting
            record = Record(
                None, 0, b"", 0, 0, 0, of.conversation, of.turn, of.template, of.tool_calls, of.tools, asked, children
            )
            self._texts.keep(suspect, young, suspect.known, record, made)


def _kept_apart(chain: Chain, whose: int) -> Chain:
    """Return the chain with all its keys XORed with this number. Collisions stay as unlikely as before."""
    spans = tuple([(key ^ whose, start, end) for key, start, end in chain.spans])
    keys = [key ^ whose for key in chain.keys]
    return Chain(keys, chain.root ^ whose, chain.end_key ^ whose, spans, chain.first_user_key ^ whose)


def _is_fork(young: Match) -> bool:
    """True if enough different continuations exist here for it to be the beginning of many conversations."""
    return young.siblings is not None and young.siblings.count >= WAYS_MIN


def _derive_conversation_id(said: Text) -> int:
    """Return a conversation's name, derived from its first prompt."""
    return said.end_key or (said.keys[-1] if said.keys else said.root) or 1
