"""Approximate tree of prompts, as in sglang-router, vllm-router, SMG and Ray Serve: the replicas that got each prompt.

One radix tree over the text of prompts serves all replicas. A node is a run of text. Its *holders* are the replicas
that were sent a prompt through it, and its *maker* is the first of them. No report of an engine reaches the tree. A
block that an engine evicted stays in the tree until the tree itself has grown too large. Then the leaves that were sent
to a holder longest ago go first.

Here a run of text is a run of the router's keys, one for 512 characters, so that a prompt of 400 kB costs some
microseconds. A match may end up to 511 characters early. Sizes are in characters. Theirs is a tree over characters, in
which a prompt that leaves the tree still strays into the branch that shares its next few characters. The maker of that
branch is then the matched replica. The choice of branch depends on characters that are as good as random. Here it is
the branch with the key that shares the most leading hex digits, which is as random and needs no text.
"""

from __future__ import annotations

from array import array
from heapq import heapify, heappop, heappush
from itertools import count

from router.core.prompts.block_keys import BLOCK_BYTES

STRAY_DIGITS = 6
"""Hex digits that distinguish branches: enough for 16 million of them at one place."""

Keys = array  # the router's block keys, as array('Q')


class Node:
    """A run of text after another one."""

    __slots__ = ("branches", "children", "holders", "keys", "maker", "parent")

    def __init__(self, keys: Keys[int], parent: Node | None, holders: dict[str, int], maker: str) -> None:
        self.keys = keys
        self.parent = parent
        self.holders = holders
        """Last time, by holder, at which a prompt that ends here was sent to it; 0 if none ended here."""
        self.maker = maker
        self.children: dict[int, Node] = {}
        self.branches: dict[int, int] | None = None
        """Leading hex digits of children's keys (after a 1) -> the first child with these. None until it is built."""

    @property
    def chars(self) -> int:
        """The length of the edge in characters."""
        return len(self.keys) * BLOCK_BYTES

    def holder(self) -> str:
        """Return the replica that made the node while it holds it, else any other holder; empty without holders."""
        return self.maker if self.maker in self.holders else next(iter(self.holders), "")


class PromptTree:
    """The tree; `match` and `insert` take a prompt's keys."""

    def __init__(self) -> None:
        self._root = Node(array("Q"), None, {}, "")
        self._times = count(1)
        self.chars: dict[str, int] = {}
        """Characters in the tree, by holder."""

    def match(self, keys: Keys[int]) -> tuple[int, Node]:
        """Return the characters that are in the tree, and the node at which the prompt leaves it or ends."""
        node, done, total = self._root, 0, len(keys)
        while done < total:
            child = node.children.get(keys[done])
            if child is None:
                return done * BLOCK_BYTES, _stray(node, keys[done])
            shared = _count_shared(child.keys, keys, done)
            done, node = done + shared, child
            if shared < len(child.keys):
                break
        return done * BLOCK_BYTES, node

    def insert(self, keys: Keys[int], holder: str) -> None:
        """Enter the prompt as sent to this holder."""
        node, done, total = self._root, 0, len(keys)
        while done < total:
            child = node.children.get(keys[done])
            if child is None:
                child = Node(keys[done:], node, {}, holder)
                node.children[keys[done]] = child
                if node.branches is not None:
                    _branch(node.branches, keys[done])
                shared = total - done
            else:
                shared = _count_shared(child.keys, keys, done)
                if shared < len(child.keys):
                    child = _split(child, shared)
            if holder not in child.holders:
                child.holders[holder] = 0
                self.chars[holder] = self.chars.get(holder, 0) + child.chars
            done, node = done + shared, child
        if node is not self._root:
            node.holders[holder] = next(self._times)

    def evict(self, chars_max: int, *, together: bool) -> None:
        """Remove holders from leaves until each holder has at most `chars_max`, or all of them together have."""
        if not self._over(chars_max, together):
            return
        ties = count()  # nodes do not compare
        leaves = [(when, next(ties), node, who) for node in self._nodes() for who, when in _ends(node)]
        heapify(leaves)
        while leaves:
            over = self._over(chars_max, together)
            if not over:
                return
            _, _, node, who = heappop(leaves)
            if who not in over:
                continue
            del node.holders[who]
            self.chars[who] -= node.chars
            parent = node.parent
            if parent is None:
                continue
            if not node.holders and not node.children:
                del parent.children[node.keys[0]]
                parent.branches = None
            if who in parent.holders and not any(who in child.holders for child in parent.children.values()):
                heappush(leaves, (parent.holders[who], next(ties), parent, who))

    def _over(self, chars_max: int, together: bool) -> set[str]:
        if together:
            return set(self.chars) if sum(self.chars.values()) > chars_max else set()
        return {who for who, chars in self.chars.items() if chars > chars_max}

    def _nodes(self) -> list[Node]:
        found, at = list(self._root.children.values()), 0
        while at < len(found):
            found += found[at].children.values()
            at += 1
        return found


def _count_shared(left: Keys[int], keys: Keys[int], start: int) -> int:
    """Return the number of keys of `left` that equal `keys` from `start` on; the first one does."""
    high = min(len(left), len(keys) - start)
    if left[:high] == keys[start : start + high]:
        return high
    low = 1
    while low + 1 < high:
        middle = (low + high) // 2
        if left[low:middle] == keys[start + low : start + middle]:
            low = middle
        else:
            high = middle
    return low


def _split(node: Node, at: int) -> Node:
    """Cut the node in two; returns the upper half."""
    upper = Node(node.keys[:at], node.parent, dict(node.holders), node.maker)
    if node.parent is not None:
        node.parent.children[node.keys[0]] = upper
    node.keys, node.parent = node.keys[at:], upper
    upper.children[node.keys[0]] = node
    return upper


def _stray(node: Node, key: int) -> Node:
    """Return the branch that shares most of the next characters, the first of several, or the node itself if
    none does."""
    if not node.children:
        return node
    if node.branches is None:
        node.branches = {}
        for child in node.children:
            _branch(node.branches, child)
    for digits in range(STRAY_DIGITS, 0, -1):
        found = node.branches.get(_get_leading_digits(key, digits))
        if found is not None:
            return node.children[found]
    return node


def _branch(branches: dict[int, int], key: int) -> None:
    for digits in range(1, STRAY_DIGITS + 1):
        branches.setdefault(_get_leading_digits(key, digits), key)


def _get_leading_digits(key: int, digits: int) -> int:
    return 1 << 4 * digits | key >> 64 - 4 * digits


def _ends(node: Node) -> list[tuple[str, int]]:
    """Return the holders that have no node below this one, with their times."""
    if not node.children:
        return list(node.holders.items())
    return [
        (who, when)
        for who, when in node.holders.items()
        if not any(who in child.holders for child in node.children.values())
    ]
