"""Model identity: one name for each model under all of its served names. Also, the tools that its engines leave out.

One model may be served under several names (vLLM's `--served-model-name a b`). Then `/v1/models` has a row for each
name with the same `root`, and the names share one cache. So their chains begin with one name, and token counts learned
for one name hold for the other. A conversation that changes the name continues its chain. A LoRA adapter has a separate
name: its blocks are separate for any path that it was loaded from.

A chain is made once for a request, before its replica is known, so a name must mean the same for all replicas. Names
are one model if some replica serves them as one, and no replica that serves both separates them. Values of `root` are
compared within a replica only, since the same model may be a path on one replica and a hub name on the next.

The name that stands for a group is the smallest one, or one that already stood for some of them: knowledge of a fleet's
caches is not lost when a rollout adds another name. (A router that was started later may then choose another name than
its peers, and another place on its ring.)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from typing import TypeVar

from router.core.types.replicas import ServedModel
from router.core.types.requests import MessageBoundary, Prompt

# Kinds of engine that leave tools out of a prompt which `tool_choice` forbids (SGLang 0.5.23, serving_chat.py). vLLM
# shows them, unless it runs with `--exclude-tools-when-tool-choice-none`; no interface reports this flag.
FEWER_TOOLS = frozenset(("sglang",))

_T = TypeVar("_T")
Table = tuple[tuple[str, str], ...]  # the base models of a replica: (name, root), sorted


class CacheIdentities:
    """Index from every name that the fleet's replicas serve, ready or not, to the model's name in chains. Replicas are
    distinguished by their models only, so a large fleet of few kinds costs as much as a small one."""

    def __init__(self) -> None:
        self._served: dict[str, tuple[Table, frozenset[str]]] = {}  # replica -> its base models, names of adapters
        self._tables: Counter[Table] = Counter()
        self._adapters: Counter[str] = Counter()
        self._stands: dict[str, str] = {}  # name of a base model -> the name that stands for it
        # The subset of `_stands` whose names differ. Never changed, only replaced: other threads read it.
        self.others: Mapping[str, str] = {}

    def cache_identity(self, name: str) -> str:
        """Return the name that a model's chains begin with. Safe in any thread."""
        return self.others.get(name, name)

    def observe(self, replica: str, rows: Iterable[ServedModel]) -> None:
        """Record the models that a replica serves now."""
        bases, adapters = [], []
        for row in rows:
            if row.parent:
                adapters.append(row.name)
            else:
                bases.append((row.name, row.root or row.name))
        self._take(replica, tuple(sorted(bases)), frozenset(adapters))

    def forget(self, replica: str) -> None:
        """Forget a replica that has left."""
        self._take(replica, (), frozenset())
        self._served.pop(replica, None)

    def _take(self, replica: str, table: Table, adapters: frozenset[str]) -> None:
        before, had = self._served.get(replica, ((), frozenset()))
        if (before, had) == (table, adapters):
            return
        self._served[replica] = table, adapters
        news = _count(self._adapters, adapters - had, had - adapters)
        if table != before:
            news = _count(self._tables, (table,) if table else (), (before,) if before else ()) or news
        if news:
            self._learn()

    def _learn(self) -> None:
        groups = _groups(self._tables, self._adapters)
        names = {name for table in self._tables for name, _ in table}
        self._stands = {name: self._stand(name, groups.get(name)) for name in names}
        self.others = {name: stand for name, stand in sorted(self._stands.items()) if stand != name}

    def _stand(self, name: str, group: set[str] | None) -> str:
        if group is None:
            return name
        before = [stand for each in group if (stand := self._stands.get(each)) in group]
        return min(before or group)


def _count(counts: Counter[_T], come: Iterable[_T], gone: Iterable[_T]) -> bool:
    """Update the counts. True if a key appeared or disappeared."""
    kinds = False
    for each in come:
        counts[each] += 1
        kinds = kinds or counts[each] == 1
    for each in gone:
        counts[each] -= 1
        if counts[each] <= 0:
            del counts[each]
            kinds = True
    return kinds


def _groups(tables: Iterable[Table], adapters: Mapping[str, int]) -> dict[str, set[str]]:
    """Return, for each name of a model with several names, all names of that model."""
    groups: dict[str, set[str]] = {}
    for table in tables:
        by_root: dict[str, set[str]] = {}
        for name, root in table:
            by_root.setdefault(root, set()).add(name)
        for names in by_root.values():
            if len(names) > 1:
                whole = names.union(*[groups.get(name, ()) for name in names])
                groups.update(dict.fromkeys(whole, whole))
    apart = [groups[name] for name in groups if adapters.get(name)]  # the name is an adapter on another replica
    for table in tables if groups else ():
        roots: dict[int, str] = {}
        for name, root in table:
            group = groups.get(name)
            if group is not None and roots.setdefault(id(group), root) != root:
                apart.append(group)
    for group in apart:
        for name in group:
            groups.pop(name, None)
    return groups


def with_fewer_tools(prompt: Prompt) -> Prompt:
    """Return the prompt as seen by engines that leave out tools which may not be called."""
    if prompt.fewer_tools is None:
        return prompt
    size, instead = prompt.fewer_tools
    moved, joint, text, skipped = len(instead) - size, prompt.joint, prompt.text, prompt.skipped_bytes
    if skipped:  # the text is only the part after the skipped bytes
        skipped += moved
    else:
        text = instead + text[size:]
    start, end = prompt.arguments
    made = Prompt(
        text,
        prompt.first_user_end + moved,
        tuple([(start + moved, end + moved) for start, end in prompt.assistant_spans]),
        prompt.opaque_bytes,
        prompt.bytes_per_token,
        skipped,
        (start + moved, end + moved) if end else (0, 0),
        None,
        max(0, prompt.hint_bytes + moved),
    )
    if joint is not None:
        made.joint = MessageBoundary(
            instead + joint.head[size:], joint.before, joint.ends, lambda: _rebuild_whole(joint)
        )
    return made


def _rebuild_whole(joint: MessageBoundary) -> Prompt | None:
    whole = joint.whole()
    return None if whole is None else with_fewer_tools(whole)
