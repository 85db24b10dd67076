"""One word for one thing: the glossary names what is there, and no class of the router shares its name."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent.parent
GLOSSARY = (ROOT / "docs" / "glossary.md").read_text(encoding="utf-8")

# Words of the target that the code does not bear yet. Each entry goes when its class comes.
AWAITED = {"ClientConnection", "Edges", "EngineConnection", "EnginePool", "HeldBack", "Market"}

# Public classes of the router that share a name, each with the reason why it does still. Each entry goes with a rename.
MESSAGE = "a message between hub and workers is named as the fact that it carries"
DECODED = "a private record of one file that decodes JSON, without an underscore"
STILL_TWICE = {
    "Answer": "an engine's answer to one request, and a remembered length of an answer",
    "Ask": "a parsed body, and a step of an event stream that asks for a replay",
    "Batch": "first tokens that came together, a batch of KV events, and a message",
    "Body": DECODED,
    "Cause": "what opened a breaker, and what caused a spill",
    "Change": "a kind of difference, a change of a socket, and a change of settings",
    "Client": "a client's connection, and the client of Kubernetes",
    "Connection": "a connection to an engine, and the Protocol of a client's",
    "Counts": MESSAGE,
    "Failed": MESSAGE,
    "Findings": "what an audit found, and what comparisons of prompts found",
    "Follower": "of an engine's events, and of a namespace's pods",
    "Generation": "one half of a memory, and the Jinja tag of chat templates",
    "Held": "what events say is stored, and the exception of who is held back",
    "Hub": "the hub, and the Protocol of what its server needs of it",
    "Ledger": "one engine's blocks, and the observatory's sums",
    "Limits": "of admission, and of an event stream",
    "Made": MESSAGE,
    "Mark": "a point of decoding time, and a point in a prompt's text",
    "Page": "one of the router's own pages, and the page that pre-warms",
    "Place": MESSAGE,
    "Placed": MESSAGE,
    "Places": "connection slots, JSON paths, and callbacks of the admitter",
    "Prefix": "of a template, and of a file of prompts",
    "Question": "a request understood, and what a policy is told",
    "Refused": MESSAGE,
    "Sender": "how an answer is sent, and who sends a warming prompt",
    "Server": "the listener, and an engine's address",
    "Sighting": "of a prompt, and of a pod",
    "Sink": "of events, and of an answer's bytes",
    "State": "of a breaker, and of a warming job",
    "Sums": "of observations, and of evictions",
    "Templates": MESSAGE,
    "View": "of pods, and a message",
}


@cache
def trees() -> dict[Path, ast.Module]:
    """Every module of the router and of the instruments, parsed."""
    files = [file for folder in ("router", "loadtest") for file in sorted((ROOT / folder).rglob("*.py"))]
    return {file: ast.parse(file.read_text(encoding="utf-8")) for file in files}


def defined(*kinds: type[ast.stmt]) -> Iterator[tuple[str, Path]]:
    """Every class or function (as `kinds` say) with its file."""
    for file, tree in trees().items():
        for node in ast.walk(tree):
            if isinstance(node, kinds) and isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield node.name, file


def twice() -> dict[str, list[str]]:
    """Public class names that the router defines more than once, with their files."""
    found = defaultdict[str, list[str]](list)
    for name, file in defined(ast.ClassDef):
        if not name.startswith("_") and file.is_relative_to(ROOT / "router"):
            found[name].append(str(file.relative_to(ROOT)))
    return {name: files for name, files in found.items() if len(files) > 1}


@cache
def names() -> frozenset[str]:
    """Every class and function of the router and of the instruments."""
    return frozenset(name for name, _ in defined(ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef))


def named(page: str) -> set[str]:
    """Names of code on a page: all that stands in the parentheses behind a word, and elsewhere names of classes."""
    heads = re.findall(r"^- \*\*.+?\): ", page, re.MULTILINE)
    return {name for head in heads for name in re.findall(r"`([^`]+)`", head)} | set(re.findall(r"`([A-Z]\w+)`", page))


@pytest.mark.parametrize("name", sorted(named(GLOSSARY) - AWAITED))
def test_the_glossary_names_what_is_there(name: str) -> None:
    """Each name behind a word of the glossary is a class or function of the code, or a file."""
    if "/" in name:
        assert (ROOT / name).exists()
    else:
        assert name in names()


def test_no_word_stands_twice_in_the_glossary() -> None:
    """Each term of art has one entry."""
    words = re.findall(r"\*\*(.+?)\*\*", GLOSSARY)
    assert len(words) > 60
    assert sorted(words) == sorted(set(words))


def test_awaited_names_are_not_there_yet() -> None:
    """Who brings a class that the glossary awaits takes it off the list; no name is awaited that no page says."""
    assert not AWAITED & names(), "take it off AWAITED"
    assert named(GLOSSARY) >= AWAITED


def test_no_two_classes_of_the_router_share_a_name() -> None:
    """A public class name is defined once in `router/`, but for those of STILL_TWICE."""
    shared = {name: files for name, files in twice().items() if name not in STILL_TWICE}
    assert not shared


def test_names_that_are_no_longer_shared_leave_the_list() -> None:
    """STILL_TWICE only shrinks: an entry whose name is defined once is taken out."""
    assert not STILL_TWICE.keys() - twice().keys()
