"""Prefixes that several conversations share, learned as they fork. The least recently used are evicted.

A template is named by the key of the last full block that is shared. If conversations are related although their first
bytes differ (a timestamp at the top), it is named by their common feature.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import msgspec

from router.core.prompts.canonical import RS
from router.core.types.cache_misses import Template

BODY_BYTES_MAX = 256 << 10  # longest body of a request that represents its template
TEMPLATE_BYTES = 1_200  # memory of a template without its body
LABEL_CHARS_MAX = 80
TOOLS_DECODED_BYTES_MAX = 64 << 10  # half a millisecond; names in longer JSON are not read
DEPTH_MAX = 16  # templates of templates that a conversation counts for
WORD_BYTES_MAX = 24  # a label that begins within a word begins with it
TOOLS = b"\x1dtools\x1f"
_TOOL = b'{"type":"function"'  # begins each tool
_SYSTEM = (RS + b"system\x1f", RS + b"developer\x1f")


_BREAKS = (b" ", b"\n", b"\x1f")


class _Function(msgspec.Struct, frozen=True):
    name: str = ""


class _Tool(msgspec.Struct):
    name: str = ""
    function: _Function = _Function()


_decode_tools = msgspec.json.Decoder(list[_Tool]).decode


class SharedPrefix(NamedTuple):
    """A beginning that several conversations share."""

    text: bytes
    key: int  # key of its last full block; 0: no block
    whole: bool  # the prefix ends with a message, not within one


class Templates:
    """The known templates, the least recently used first."""

    def __init__(self, templates_max: int, bodies_bytes_max: int, *, excerpts: bool) -> None:
        """`excerpts`: a template may be labelled with its own words."""
        self._templates_max = templates_max
        self._bodies_bytes_max = bodies_bytes_max
        self._bodies_bytes = 0
        self._excerpts = excerpts
        self._known: OrderedDict[int, Template] = OrderedDict()
        self._changed: set[int] = set()
        self.unlabelled: set[int] = set()  # templates with a new parent

    def __contains__(self, name: int) -> bool:
        return name in self._known

    def touch(self, name: int) -> None:
        """Record that a template is used."""
        if name in self._known:
            self._known.move_to_end(name)

    def count_conversation(self, name: int, prompt_bytes: int, path: str, body: bytes) -> bool:
        """Count one more conversation that begins with a template. False if the template is unknown."""
        known, changed = self._known, self._changed
        at = known.get(name)
        if at is None:
            return False
        if prompt_bytes < at.prompt_bytes:
            at.prompt_bytes = prompt_bytes
        if not at.body or len(body) < len(at.body):
            self._stand_in(at, path, body)
        known.move_to_end(name)
        at.conversations += 1
        changed.add(name)
        if at.parent:
            self._count(at.parent)
        return True

    def _count(self, name: int) -> None:
        """Count one more conversation for a template and for those that it begins with."""
        at = self._known.get(name)
        for _ in range(DEPTH_MAX):
            if at is None:
                break
            at.conversations += 1
            self._changed.add(at.id)
            at = self._known.get(at.parent)

    def learn(self, name: int, prefix: SharedPrefix, near: int, others: int) -> None:
        """Store a prefix that `others` conversations begin with. `near` is a template of one of them, or 0."""
        if len(self._known) >= self._templates_max:
            gone = self._known.popitem(last=False)[1]
            self._bodies_bytes -= len(gone.body)
            self._changed.discard(gone.id)
            self.unlabelled.discard(gone.id)
        text = prefix.text
        parent, child = self._find_neighbors(near, len(text))
        _, tools = _tools(tool_head(text))
        messages = max(0, text.count(RS) - (0 if prefix.whole else 1))
        made = Template(name, parent, len(text), prefix.key, tools, messages, conversations=others)
        if child is not None:
            child.parent = name
            if self._excerpts:
                self.unlabelled.add(child.id)
            made.conversations = child.conversations
            self._changed.add(child.id)
        self._known[name] = made
        if self._excerpts:
            self.label(name, text, anew=True)

    def label(self, name: int, prefix: bytes, *, anew: bool = False) -> None:
        """Label a template with its own text, after its parent's text. A template that has a label keeps it."""
        if not anew and name not in self.unlabelled:
            return
        self.unlabelled.discard(name)
        at = self._known[name]
        above = self._known.get(at.parent)
        at.label = _label(prefix, above.prompt_bytes if above is not None else 0)
        self._changed.add(name)

    def take_changed(self) -> list[Template]:
        """Return templates that changed since the last call."""
        changed, self._changed = self._changed, set()
        return [self._known[name] for name in changed if name in self._known]

    def _stand_in(self, template: Template, path: str, body: bytes) -> None:
        """Keep this request as the shortest one that has the whole template."""
        grown = len(body) - len(template.body)
        if len(body) <= BODY_BYTES_MAX and self._bodies_bytes + grown <= self._bodies_bytes_max:
            self._bodies_bytes += grown
            template.body, template.path = body, path

    def _find_neighbors(self, near: int, size: int) -> tuple[int, Template | None]:
        """Return the longest template shorter than this, from `near` up, and the one below it, if any."""
        child, at = None, self._known.get(near)
        for _ in range(DEPTH_MAX):
            if at is None or at.prompt_bytes < size:
                break
            child, at = at, self._known.get(at.parent)
        return (at.id if at is not None else 0), child


def tool_head(text: bytes) -> bytes:
    """Return the JSON of a prompt's tools, up to the end of the text."""
    if not text.startswith(TOOLS):
        return b""
    ends = [end for mark in (RS, b"\x1d") if (end := text.find(mark, len(TOOLS))) >= 0]
    return text[len(TOOLS) : min(ends, default=len(text))]


def _tools(head: bytes) -> tuple[list[str], int]:
    """Return names of the tools, and their number. If the head is cut off within a tool, only the ones before it count.
    This runs on the event loop, so the names of too many are not read."""
    if len(head) > TOOLS_DECODED_BYTES_MAX:
        return [], head.count(_TOOL) - (not head.endswith(b"]"))
    for text in (head, head[: max(0, head.rfind(_TOOL))].rstrip(b",") + b"]"):
        try:
            names = [tool.function.name or tool.name for tool in _decode_tools(text)]
        except (msgspec.MsgspecError, UnicodeDecodeError):
            continue
        return names, len(names)
    return [], 0


def _label(prefix: bytes, shared: int) -> str:
    """Return the beginning of a system prompt, or of the text after the bytes that are `shared` with its parent; for
    tools their names."""
    tools_end = prefix.find(RS)
    if shared > tools_end >= 0:
        start = max(prefix.rfind(mark, max(0, shared - WORD_BYTES_MAX), shared) + 1 for mark in _BREAKS)
        words = _words(prefix[start or shared :])
        if words:
            return words
    for lead in _SYSTEM:
        at = prefix.find(lead)
        if at >= 0 and (words := _words(prefix[at + len(lead) :])):
            return words
    names, count = _tools(tool_head(prefix))
    return _named_tools(names, count) if count else ""


def _named_tools(names: list[str], count: int) -> str:
    """Return the number of tools, and as many of their names as fit into a label."""
    label = f"{count} tool{'s' * (count != 1)}"
    for number, name in enumerate(names):
        longer = f"{label}{', ' if number else ': '}{name}"
        if len(longer) > LABEL_CHARS_MAX - len(", ..."):
            return f"{label}, ..." if number else label
        label = longer
    return label


def _words(text: bytes) -> str:
    """Return the first line of a message, or the first of the next one."""
    for said in text[: 8 * LABEL_CHARS_MAX].split(RS):
        line = said[said.find(b"\x1f") + 1 :].strip().split(b"\n", 1)[0]
        if line:
            return line[: 4 * LABEL_CHARS_MAX].decode(errors="replace")[:LABEL_CHARS_MAX]
    return ""
