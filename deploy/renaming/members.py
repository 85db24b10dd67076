"""Plans for members: attributes and methods by the classes of their receivers, which mypy knows.

Members of one name that must stay one are a family: overrides with what they override, methods with those of protocols
that their class implements, and members that one expression may mean (`a` in `(x if y else z).a`). A family has one new
name or keeps its own: rows that contradict each other, or what a library's class demands, are refused.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator

from deploy.renaming.edits import Edit
from deploy.renaming.naming import full_name
from deploy.renaming.receivers import Keywords, Receivers, looped
from deploy.renaming.scopes import At, Dotted, Scopes
from deploy.renaming.table import Table, Tree
from deploy.renaming.types_of import ANY_KEYWORDS, CLASS, FOLDERS, UNKNOWN, Types, place_of

Member = tuple[str, str]
"""Full name of the class that defines it, and its name there."""
BY_STRING = frozenset({"getattr", "setattr", "hasattr", "delattr", "object"})


class Families:
    """Members that are renamed together: a union-find."""

    def __init__(self, types: Types, wanted: set[str]) -> None:
        self._types, self.wanted = types, wanted
        self._above: dict[Member, Member] = {}
        self._owners: dict[Member, Member | None] = {}
        for name, known in types.classes.items():
            lines = [[base for base in known.bases if base in types.classes]]
            lines += [[name, *known_bases] for known_bases in (types.classes[p].bases for p in known.implements)]
            for offered in wanted & self._offered(known.bases):
                for bases in lines:
                    self.join([owner for base in bases if (owner := self.owner(base, offered)) is not None])

    def _offered(self, bases: list[str]) -> set[str]:
        return {member for base in bases if base in self._types.classes for member in self._types.classes[base].members}

    def owner(self, name: str, member: str) -> Member | None:
        """The class that has the member, first in the order of `name`'s bases; None where none has it."""
        key = (name, member)
        if key not in self._owners:
            bases = self._types.classes[name].bases if name in self._types.classes else []
            having = (base for base in bases if base in self._types.classes)
            found = next((base for base in having if member in self._types.classes[base].members), None)
            self._owners[key] = (found, member) if found is not None else None
        return self._owners[key]

    def head(self, member: Member) -> Member:
        """The one that stands for the family."""
        path = []
        while (above := self._above.get(member, member)) != member:
            path.append(member)
            member = above
        self._above.update((each, member) for each in path)
        return member

    def join(self, members: list[Member]) -> None:
        """Make one family of these."""
        for member in members[1:]:
            first, second = self.head(members[0]), self.head(member)
            if first != second:
                self._above[second] = first

    def all(self) -> dict[Member, list[Member]]:
        """Families by their heads, of all members with a wanted name."""
        found = defaultdict(list)
        for name, known in self._types.classes.items():
            for member in self.wanted.intersection(known.members):
                found[self.head((name, member))].append((name, member))
        return found


class MemberPlan:
    """Which members get which name, and where they stand."""

    def __init__(self, tree: Tree, table: Table, types: Types) -> None:
        self._tree, self._table, self._types = tree, table, types
        self._class_at = {(known.module, known.line): name for name, known in types.classes.items() if known.module}
        self._receivers = Receivers(tree, types, self._class_at)
        self._keywords = Keywords(self._receivers)
        for protocol, name in self._receivers.stand_ins():
            types.classes[name].implements.append(protocol)
        self._families = Families(types, {row.rpartition(".")[2] for row in table.members})
        self._new: dict[Member, str] = {}
        self._looped: dict[str, dict[tuple[int, int], list[ast.Constant]]] = {}

    def plan(self) -> None:
        """Decide, and put the edits into the tree."""
        self._looped = {path: looped(ast.parse(source)) for path, source in self._tree.sources.items()}
        self._join_uses()
        self._decide()
        for path, read in self._tree.read.items():
            for dotted in read.dotted:
                self._rename_dotted(path, dotted)
            for defined in read.defined:
                name = self._class_at.get((read.module, defined.class_line))
                owner = self._families.owner(name, defined.name) if name else None
                self._edit(path, defined.at, defined.name, self._name_of(owner))
            for call, scopes in read.calls:
                self._rename_keywords(path, call, scopes)
                self._rename_string(path, call, scopes)
            self._rename_slots(path)

    def word(self, name: str, member: str) -> str | None:
        """The new name of a member of the class, or None where it keeps its own."""
        return self._name_of(self._families.owner(name, member))

    # -- which

    def _owners(self, path: str, dotted: Dotted) -> list[Member]:
        classes = self._receivers.classes(path, dotted.node.value, dotted.scopes)
        owners = (self._families.owner(name.removeprefix(CLASS), dotted.node.attr) for name in classes)
        return [owner for owner in owners if owner is not None]

    def _join_uses(self) -> None:
        for path, read in self._tree.read.items():
            for dotted in read.dotted:
                if dotted.node.attr in self._families.wanted:
                    self._families.join(self._owners(path, dotted))

    def _decide(self) -> None:
        families = self._families.all()
        rows: dict[Member, set[str]] = defaultdict(set)
        for row, new in self._table.members.items():
            name, _, member = row.rpartition(".")
            if name not in self._types.classes or member not in self._types.classes[name].members:
                self._tree.refused[row].append("is gone")
            elif new != member:
                rows[self._families.head((name, member))].add(new)
        for head, words in rows.items():
            if why := self._objection(families[head], words):
                self._tree.refused[".".join(head)].append(why)
            else:
                self._new.update((member, min(words)) for member in families[head])
        while clash := self._clash():
            head, why = clash
            self._tree.refused[".".join(head)].append(why)
            for each in families[head]:
                del self._new[each]

    def _objection(self, family: list[Member], words: set[str]) -> str:
        foreign = [name for name, _ in family if not self._types.classes[name].module]
        if foreign:
            return f"belongs to {', '.join(foreign[:3])} too, of a library"
        if len(words) > 1:
            return f"has {len(words)} new names: {', '.join(sorted(words))}; family: {self._shown(family)}"
        return ""

    def _clash(self) -> tuple[Member, str] | None:
        """The head of a family whose new name a class has already, and why."""
        for name, known in self._types.classes.items():
            taken: dict[str, str] = {}
            offered = {
                member
                for base in known.bases
                if base in self._types.classes
                for member in self._types.classes[base].members
            }
            news = {
                member: self._name_of(self._families.owner(name, member)) for member in offered & self._families.wanted
            }
            for member, new in sorted(news.items()):
                if new is None:
                    continue
                stays = new in offered and news.get(new) is None
                if stays or new in taken:
                    owner = self._families.owner(name, member)
                    assert owner is not None  # noqa: S101
                    return self._families.head(owner), f"{name} has {new} already ({taken.get(new, new)})"
                taken[new] = member
        return None

    def _shown(self, family: list[Member]) -> str:
        return ", ".join(".".join(member) for member in sorted(family)[:12])

    def _name_of(self, owner: Member | None) -> str | None:
        return self._new.get(owner) if owner is not None else None

    # -- where

    def _edit(self, path: str, at: At, old: str, new: str | None, what: str = "members") -> None:
        if new is not None:
            self._tree.edits[path].append(Edit(at.line, at.column, old, new))
            self._tree.counts[what] += 1

    def _rename_dotted(self, path: str, dotted: Dotted) -> None:
        name = dotted.node.attr
        if name not in self._families.wanted or full_name(self._tree, dotted.node, dotted.scopes) is not None:
            return
        owners = self._owners(path, dotted)
        if owners:
            self._edit(path, dotted.at, name, self._name_of(owners[0]))
        elif self._receivers.classes(path, dotted.node.value, dotted.scopes) in (
            [],
            [UNKNOWN],
        ) and not self._is_foreign(dotted):
            words = {self._new.get(member) for member in self._all_named(name)}
            word = words.pop() if len(words) == 1 else None
            self._edit(path, dotted.at, name, word, "members by guess")
            said = f"{word or ' or '.join(sorted(map(str, words)))}"
            if word or words:
                self._tree.to_see.append(f"{path}:{dotted.at.line}: .{name} of no type: {said}")

    def _is_foreign(self, dotted: Dotted) -> bool:
        """Whether the receiver is something of a library, such as `pytest` in `pytest.mark`."""
        full = full_name(self._tree, dotted.node.value, dotted.scopes)
        return full is not None and full.partition(".")[0] not in FOLDERS

    def _all_named(self, name: str) -> Iterator[Member]:
        return ((owner, name) for owner, known in self._types.classes.items() if name in known.members)

    def _rename_keywords(self, path: str, call: ast.Call, scopes: Scopes) -> None:
        named = [keyword for keyword in call.keywords if keyword.arg in self._families.wanted]
        if not named:
            return
        for keyword in named:
            name = keyword.arg or ""
            classes = self._keywords.classes(path, call, scopes, name)
            owners = [owner for each in classes if (owner := self._families.owner(each, name)) is not None]
            at = At(keyword.lineno, keyword.col_offset)
            if owners:
                self._edit(path, at, name, self._name_of(owners[0]), "keywords")
            elif self._is_any(path, call.func) and any(member in self._new for member in self._all_named(name)):
                self._tree.to_see.append(f"{path}:{at.line}: keyword {name} of {ast.unparse(call.func)[:40]}()")

    def _is_any(self, path: str, node: ast.expr) -> bool:
        found = self._types.receivers.get(path, {}).get(place_of(node), [UNKNOWN])
        return bool({UNKNOWN, ANY_KEYWORDS}.intersection(found))

    def _rename_string(self, path: str, call: ast.Call, scopes: Scopes) -> None:
        """The second argument of getattr and its like, where the first has a type; modules have names (texts.py)."""
        called = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
        if called not in BY_STRING or len(call.args) < 2:
            return
        texts = self._looped[path].get((call.lineno, call.col_offset), call.args[1:2])
        for text in texts:
            if isinstance(text, ast.Constant) and isinstance(text.value, str):
                new = self._word_of_string(path, call, text.value, scopes)
                self._edit(path, At(text.lineno, text.col_offset + 1), text.value, new, "strings of getattr")

    def _word_of_string(self, path: str, call: ast.Call, name: str, scopes: Scopes) -> str | None:
        module = full_name(self._tree, call.args[0], scopes)
        if module in self._tree.modules.globals:
            full = self._tree.modules.resolve(f"{module}.{name}")
            return self._table.names.get(full) if full not in self._tree.refused else None
        if name not in self._families.wanted:
            return None
        classes = self._receivers.classes(path, call.args[0], scopes)
        owners = [self._families.owner(each.removeprefix(CLASS), name) for each in classes]
        if not any(owners) and any(member in self._new for member in self._all_named(name)):
            self._tree.to_see.append(f"{path}:{call.lineno}: {ast.unparse(call)[:60]}")
        return next((word for owner in owners if (word := self._name_of(owner)) is not None), None)

    def _rename_slots(self, path: str) -> None:
        """Strings in `__slots__` and `__match_args__`."""
        source = self._tree.sources[path]
        if b"__slots__" not in source and b"__match_args__" not in source:
            return
        read = self._tree.read[path]
        for node in ast.walk(ast.parse(source)):
            if not isinstance(node, ast.ClassDef) or (name := self._class_at.get((read.module, node.lineno))) is None:
                continue
            for statement in node.body:
                names = [target.id for target in getattr(statement, "targets", ()) if isinstance(target, ast.Name)]
                if {"__slots__", "__match_args__"}.isdisjoint(names):
                    continue
                for text in ast.walk(statement):
                    if isinstance(text, ast.Constant) and isinstance(text.value, str):
                        new = self._name_of(self._families.owner(name, text.value))
                        self._edit(path, At(text.lineno, text.col_offset + 1), text.value, new, "slots")
