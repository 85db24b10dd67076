"""Templates, and sums over the requests that begin with them: the branches of a radix tree.

Data planes see texts, and define the templates (`know`). The ends of requests provide the sums (totals.py). A request
counts for the longest template that it begins with. Pages count it for all templates that it begins with, so that a
branch is as wide as its twigs together. Sums fade: see decaying_sums.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from operator import add
from typing import Any

from msgspec.structs import replace

from router.core.insights.ledger.decaying_sums import HIT, PROMPT, REQUESTS, misses_of, ratio, zeros
from router.core.insights.ledger.small_templates import slivers
from router.core.types.cache_misses import Template

BODIES_BYTES_MAX = 16 << 20  # bytes of all templates' shortest requests together; the least used templates have no body
BODY_BYTES_MAX = 256 << 10  # longest body that is kept of one template
MAP_MAX = 64  # branches on the map: more cannot be seen
BRANCHING_MAX = 16  # levels of longer templates that are searched for a holder if a template has no known holder
OTHERS_ROWS_MAX = 16  # templates drawn as one for which the common properties and holders are listed
MARGIN = 8  # 1 in this number of templates, the least used, is evicted at once: sorting is expensive
ANCESTORS_MAX = 16  # levels of shorter templates that are searched for a label


class Branch:
    """One template. `facts` is None until a data plane has defined it."""

    __slots__ = ("crowded_out", "facts", "model", "sums")

    def __init__(self) -> None:
        self.facts: Template | None = None
        self.sums = zeros()  # weighted sums (sums.Fading)
        self.crowded_out = 0.0  # weighted tokens evicted while the template, or one that it begins with, had a loss
        self.model = ""  # model of the last request


class TemplateTree:
    """All known templates and their sums, at most `branches_max`."""

    def __init__(self, branches_max: int) -> None:
        self._branches_max = branches_max
        self._body_bytes = 0
        self.all: dict[int, Branch] = {}

    def get_or_create(self, id_: int) -> Branch:
        """Return the branch of a template. It is created if it is missing."""
        branch = self.all.get(id_)
        if branch is None:
            if len(self.all) >= self._branches_max:
                for least in [each for each, _ in self._list_items_by_use()][: max(1, self._branches_max // MARGIN)]:
                    self._drop(least)
            branch = self.all[id_] = Branch()
        return branch

    def know(self, templates: Iterable[Template]) -> None:
        """Store the definitions of templates. A body that was reported once need not be reported again."""
        for told in templates:
            if not told.id:
                continue
            branch = self.get_or_create(told.id)
            known = branch.facts.body if branch.facts is not None else b""
            body = told.body if 0 < len(told.body) <= BODY_BYTES_MAX else known
            parent = told.parent or (branch.facts.parent if branch.facts is not None else 0)
            same = body is told.body and parent == told.parent
            branch.facts = told if same else replace(told, body=body, parent=parent)
            self._body_bytes += len(body) - len(known)
        if self._body_bytes > BODIES_BYTES_MAX:
            self._drop_bodies()

    def label(self, id_: int) -> str:
        """Return the label of a template: its own words, or those of the nearest one that it begins with, or else a
        description of its contents. "" if it is unknown."""
        at = id_
        for _ in range(ANCESTORS_MAX):
            branch = self.all.get(at)
            if branch is None or branch.facts is None:
                break
            if branch.facts.label:
                return branch.facts.label
            at = self.parent(branch.facts)
        own = self.all.get(id_)
        return made_of(own.facts) if own is not None and own.facts is not None else ""

    def prompt_bytes(self, id_: int) -> int:
        """Return the length of a template, 0 if it is unknown."""
        branch = self.all.get(id_)
        return branch.facts.prompt_bytes if branch is not None and branch.facts is not None else 0

    def conversations(self, id_: int) -> int:
        """Return the number of conversations that have begun with a template."""
        branch = self.all.get(id_)
        return branch.facts.conversations if branch is not None and branch.facts is not None else 0

    def crowded_out(self) -> dict[int, float]:
        """Return weighted tokens that were evicted while a loss existed that may have caused it, by template."""
        return {id_: branch.crowded_out for id_, branch in self.all.items() if branch.crowded_out}

    def upwards(self, id_: int) -> Iterator[int]:
        """Yield a template and those that it begins with."""
        for _ in range(ANCESTORS_MAX):
            if not id_:
                return
            yield id_
            id_ = self.parent_of(id_)

    def fade(self, factor: float) -> None:
        """Multiply all sums when weights begin anew (sums.Fading)."""
        for branch in self.all.values():
            branch.sums = [value * factor for value in branch.sums]
            branch.crowded_out *= factor

    def hottest(self, count: int) -> list[Template]:
        """Return the templates with the most prompt tokens in the fading window, of those with a stored request to
        send."""
        bodied = [each for each in self._list_by_use() if each.facts is not None and each.facts.body]
        return [each.facts for each in reversed(bodied) if each.facts is not None][:count]

    def through(self) -> dict[int, list[float]]:
        """Return weighted sums of all requests that begin with each template: its own, and those of longer ones."""
        sums = {id_: branch.sums for id_, branch in self.all.items()}
        known = [each.facts for each in self.all.values() if each.facts is not None]
        for facts in sorted(known, key=lambda each: -each.prompt_bytes):
            parent = self.parent(facts)
            if parent:
                sums[parent] = list(map(add, sums[parent], sums[facts.id]))
        return sums

    def parent(self, facts: Template) -> int:
        """Return the id of a known shorter template, 0 if it has no such parent. A parent must be shorter, so that no
        cycle can exist."""
        parent = self.all.get(facts.parent)
        if parent is None or parent.facts is None or parent.facts.prompt_bytes >= facts.prompt_bytes:
            return 0
        return facts.parent

    def parent_of(self, id_: int) -> int:
        """Return the parent of the template with this id, 0 if it has no parent."""
        branch = self.all.get(id_)
        return self.parent(branch.facts) if branch is not None and branch.facts is not None else 0

    def _list_items_by_use(self) -> list[tuple[int, Branch]]:
        return sorted(self.all.items(), key=lambda each: each[1].sums[PROMPT])

    def _list_by_use(self) -> list[Branch]:
        return [branch for _, branch in self._list_items_by_use()]

    def _drop(self, id_: int) -> None:
        facts = self.all.pop(id_).facts
        if facts is not None:
            self._body_bytes -= len(facts.body)

    def _drop_bodies(self) -> None:
        for branch in self._list_by_use():
            if self._body_bytes <= BODIES_BYTES_MAX:
                return
            if branch.facts is not None and branch.facts.body:
                self._body_bytes -= len(branch.facts.body)
                branch.facts = replace(branch.facts, body=b"")


def made_of(facts: Template) -> str:
    """Describe a template without a word of it: by the counts of its tools and messages. The beginning of its id
    distinguishes it from another one with the same counts."""
    parts = [_pluralize(facts.tools, "tool")] if facts.tools else []
    if facts.messages == 1:
        parts.append("a system prompt" if parts else "System prompt")
    elif facts.messages:
        parts.append(_pluralize(facts.messages, "message"))
    name = " and ".join(parts) or "Beginning of a prompt"
    return f"{name} ({format_template_id(facts.id)[:6]})"


def _pluralize(count: int, what: str) -> str:
    return f"{count} {what}{'s' * (count != 1)}"


def format_template_id(id_: int) -> str:
    """Return a template's name on pages, "" for 0."""
    return f"{id_:016x}" if id_ else ""


class Views:
    """Branches as pages show them, at one moment. `weight` is the current one. `bytes_per_token` takes a model,
    `holders` a block."""

    def __init__(
        self,
        branches: TemplateTree,
        weight: float,
        *,
        bytes_per_token: Callable[[str], float],
        holders: Callable[[int], Collection[str]],
    ) -> None:
        self._all = dict(branches.all)  # a copy, so that a template dropped while a page is made stays on it
        self._parents = {id_: branches.parent(each.facts) for id_, each in self._all.items() if each.facts is not None}
        self._holders = holders
        self._weight = weight
        self._bytes_per_token = bytes_per_token
        self._children: dict[int, list[int]] = {}
        for id_, parent in self._parents.items():
            self._children.setdefault(parent, []).append(id_)
        self._through = branches.through()
        self.most = sorted(self._through, key=self._rank)  # most served first, each after its parent

    def _rank(self, id_: int) -> tuple[float, int]:
        facts = self._all[id_].facts
        return -self._through[id_][PROMPT], facts.prompt_bytes if facts is not None else 0

    def group_for_map(self) -> tuple[list[int], list[tuple[int, list[int]]]]:
        """Return the templates that the map draws one by one, most served first; and those that it draws as one, by
        their parent."""
        own = {id_: branch.sums[PROMPT] for id_, branch in self._all.items()}
        through = {id_: sums[PROMPT] for id_, sums in self._through.items()}
        groups = slivers(self.most, self._parents, through, own, MAP_MAX)
        small = set().union(*groups.values())
        return [id_ for id_ in self.most if id_ not in small], list(groups.items())

    def build_others_row(self, parent: int, ids: Sequence[int]) -> dict[str, Any]:
        """Return a row of the map for several templates with one parent, and for their branches."""
        among = set(ids)
        tops = [id_ for id_ in ids if self._parents.get(id_, 0) not in among]
        rows = [self.branch(id_) for id_ in tops[:OTHERS_ROWS_MAX]]
        sums = [sum(self._through[id_][at] for id_ in tops) for at in (REQUESTS, PROMPT, HIT)]
        requests, prompt, hit = (value / self._weight for value in sums)
        tools = {facts.tools for id_ in ids if (facts := self._all[id_].facts) is not None}
        of_tools = f", of {_pluralize(max(tools), 'tool')} each" if len(tools) == 1 and 0 not in tools else ""
        return {
            "id": f"others-{format_template_id(parent)}",
            "parent": format_template_id(parent),
            "label": f"{_pluralize(len(ids), 'other')}{of_tools}",
            "prompt_tokens": sum(row["prompt_tokens"] for row in rows) // len(rows),
            "own_tokens": sum(row["own_tokens"] for row in rows) // len(rows),
            "requests": round(requests),
            "served_tokens": round(prompt),
            "hit_rate": ratio(hit, prompt),
            "holders": sorted(set().union(*(row["holders"] for row in rows))),
        }

    def branch(self, id_: int) -> dict[str, Any]:
        """Return a row of the map."""
        sums, facts, parent = self._through[id_], self._all[id_].facts, self._parents.get(id_, 0)
        bytes_per_token = self._bytes_per_token(self._all[id_].model)
        size = facts.prompt_bytes if facts is not None else 0
        before = self._all[parent].facts if parent else None
        return {
            "id": format_template_id(id_),
            "parent": format_template_id(parent),
            "label": (facts.label or made_of(facts)) if facts is not None else "",
            "prompt_tokens": int(size / bytes_per_token),
            "own_tokens": int((size - before.prompt_bytes if before is not None else size) / bytes_per_token),
            "requests": round(sums[REQUESTS] / self._weight),
            "served_tokens": round(sums[PROMPT] / self._weight),
            "hit_rate": ratio(sums[HIT] / self._weight, sums[PROMPT] / self._weight),
            "holders": sorted(self._find_holders(id_, BRANCHING_MAX)),
        }

    def _find_holders(self, id_: int, deeper: int) -> Collection[str]:
        """Return the replicas that hold the whole template. Its own block may be known by another key than the one it
        was learned with: a block's key depends on everything before it, and on the way the prompt was read. A replica
        that holds a longer template holds this one too."""
        facts = self._all[id_].facts
        held = self._holders(facts.key) if facts is not None and facts.key else ()
        if held or not deeper:
            return held
        return {holder for child in self._children.get(id_, ()) for holder in self._find_holders(child, deeper - 1)}

    def template(self, id_: int, differences: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return a row of the list, with the differences that were found in the template."""
        facts, sums = self._all[id_].facts, self._through[id_]
        return {
            **self.branch(id_),
            "path": facts.path if facts is not None else "",
            "tools": facts.tools if facts is not None else 0,
            "messages": facts.messages if facts is not None else 0,
            "conversations": facts.conversations if facts is not None else 0,
            "misses": misses_of([value / self._weight for value in sums]),
            "differences": differences,
            "can_prewarm": facts is not None and bool(facts.body),
        }
