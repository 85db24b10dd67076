"""Traits of a chat template that decide how engines fit messages to it.

vLLM 0.32 (renderers/hf.py) and SGLang 0.5.23 (srt/parser/jinja_template_utils.py) search its syntax tree for a loop
over a message's content. If they find one, the content is given as a list of parts, otherwise as one string. vLLM's
Messages API renders it once to learn if it accepts a system message between others (entrypoints/anthropic/serving.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from router.tokenization.optional_tokenizers import library
from router.tokenization.sandbox import environment

_MEDIA_WORDS = ("image", "audio", "video", "vision")
_MESSAGE_NAMES = ("message", "msg", "m")  # loop variables that SGLang looks for


def refuses_inline_system(source: str) -> bool:
    """True if the template fails on messages of the roles system, user, system and user. This is vLLM's probe of the
    Messages API, rendered without transformers' names."""
    jinja2 = library("jinja2")
    bare = library("jinja2.sandbox").ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[library("jinja2.ext").loopcontrols]
    )
    messages = [{"role": role, "content": "t"} for role in ("system", "user", "system", "user")]
    try:
        bare.from_string(source).render(messages=messages, add_generation_prompt=False)
    except jinja2.TemplateError:
        return True
    except Exception:  # vLLM itself would not start with such a template
        return False
    return False


def sglang_wants_parts(source: str) -> bool:
    """True if any loop runs over the content of a message with a usual name, or the template names media besides
    text."""
    if any(word in source for word in _MEDIA_WORDS):
        return True
    nodes = library("jinja2.nodes")
    loops = environment().parse(source).find_all(nodes.For)
    return any(_reads(loop.iter, name, "content") for loop in loops for name in _MESSAGE_NAMES)


def vllm_wants_parts(source: str) -> bool:
    """True if any loop runs over a message's content, or over a macro's argument that is one."""
    try:
        return _loops_over_content(environment().parse(source))
    except AssertionError:  # a loop over pairs, on which vLLM's own search fails as well
        return False


def _loops_over_content(root: Any) -> bool:  # noqa: ANN401 (Jinja's tree)
    nodes = library("jinja2.nodes")
    message_names = list(_message_names(root))
    inside: set[int] = set()
    arguments: dict[int, set[str]] = {}
    for macro in root.find_all(nodes.Macro):
        names = _content_arguments(root, macro, message_names)
        for loop in macro.find_all(nodes.For):
            inside.add(id(loop))
            if names:
                arguments[id(loop)] = names
    for loop in root.find_all(nodes.For):
        if any(_reads(loop.iter, name, "content") for name in message_names):
            return isinstance(loop.target, nodes.Name)
        if not isinstance(loop.iter, nodes.Name):
            continue
        if loop.iter.name in arguments.get(id(loop), ()) or (id(loop) not in inside and loop.iter.name == "content"):
            return True
    return False


def _content_arguments(root: Any, macro: Any, message_names: list[str]) -> set[str]:  # noqa: ANN401
    """Return names of a macro's arguments that receive a message's content in some call."""
    nodes = library("jinja2.nodes")
    found: set[str] = set()
    own = [argument.name for argument in macro.args]
    for call in root.find_all(nodes.Call):
        if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
            continue
        given = [*zip(own, call.args, strict=False), *((each.key, each.value) for each in call.kwargs)]
        found |= {name for name, value in given if any(_reads(value, each, "content") for each in message_names)}
    return found & set(own)


def _message_names(root: Any) -> Iterator[str]:  # noqa: ANN401
    """Yield variables of loops over the messages, or over a variable that they were assigned to."""
    nodes = library("jinja2.nodes")
    lists = ["messages"]
    for name in lists:
        for assigned in root.find_all(nodes.Assign):
            if _reads(assigned.node, name):
                assert isinstance(assigned.target, nodes.Name)  # noqa: S101 (as in vLLM: caught above)
                if assigned.target.name not in lists:
                    lists.append(assigned.target.name)
    for loop in root.find_all(nodes.For):
        if any(_reads(loop.iter, name) for name in lists):
            assert isinstance(loop.target, nodes.Name)  # noqa: S101
            yield loop.target.name


def _reads(node: Any, name: str, key: str | None = None) -> bool:  # noqa: ANN401
    """True if an expression is this variable, or its field `key`, through filters, tests and slices."""
    nodes = library("jinja2.nodes")
    if isinstance(node, nodes.Filter | nodes.Test):
        return node.node is not None and _reads(node.node, name, key)
    if isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice):
        return _reads(node.node, name, key)
    if key is None:
        return _is_name(node, name)
    if isinstance(node, nodes.Getitem):
        return _is_name(node.node, name) and isinstance(node.arg, nodes.Const) and node.arg.value == key
    return isinstance(node, nodes.Getattr) and node.attr == key and _is_name(node.node, name)


def _is_name(node: Any, name: str) -> bool:  # noqa: ANN401
    return isinstance(node, library("jinja2.nodes").Name) and node.ctx == "load" and node.name == name
