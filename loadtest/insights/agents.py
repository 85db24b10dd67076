"""Agents of `python -m loadtest story`: their instructions, their tools, and their conversations.

Three agents share a fleet. One writes code, with long instructions, ten tools, and notes on its repository. One reviews
that code, and one answers customers. A release of the first one puts the time of day into its prompt at one of three
places:

- nowhere
- at the top of its instructions, which then differ with every request
- at the end of the newest message, which leaves all earlier computation valid
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import msgspec


class ReleaseClock(StrEnum):
    """The place at which a release of the coding agent states the time."""

    NOWHERE = "nowhere"
    TOP = "top"  # at the beginning of the system prompt
    END = "end"  # at the end of the newest message


@dataclass(frozen=True, slots=True)
class Agent:
    """Common start of all conversations of one agent; `notes` are about its work, one for each conversation."""

    name: str
    instructions: str
    tools: tuple[tuple[str, str, tuple[str, ...]], ...] = ()
    notes: tuple[str, ...] = ("",)
    steps: tuple[str, ...] = ("answer",)
    turns_max: int = 8
    tells_time: bool = False

    def schemas(self) -> list[dict[str, Any]]:
        """Return the agent's tools in the format of the chat API."""
        return [_tool(*tool) for tool in self.tools]


def _tool(name: str, text: str, arguments: tuple[str, ...]) -> dict[str, Any]:
    about = {each: {"type": "string", "description": _ARGUMENTS[each]} for each in arguments}
    parameters = {"type": "object", "properties": about, "required": list(arguments[:1]), "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": text, "parameters": parameters}}


_ARGUMENTS = {
    "path": "Path of a file or folder, relative to the root of the repository. Never absolute, never above the root.",
    "pattern": "Regular expression in RE2 syntax. Escape braces and dots that you mean literally.",
    "before": "Text to be replaced, exactly as it stands in the file, with all white space. It must occur just once.",
    "after": "Text that replaces it, with the indentation of its surroundings.",
    "command": "Command line for a POSIX shell, run in the root of the repository without a terminal.",
    "timeout": "Seconds after which the command is ended. The default is 120; builds may need more.",
    "lines": "Range of lines, as in 10-80. Left out: the first 400 lines.",
    "message": "What to say, in complete sentences, without markup.",
    "query": "Words to search for. Names of functions and error messages find most.",
    "order": "Number of the order, as the customer gives it: two letters and six digits.",
    "reason": "Why, in a few words, for whoever looks at it later.",
    "task": "What the other agent shall do, with all it needs to know: it sees nothing of this conversation.",
}

_RULES = (
    "Read a file before you change it, and read it again when a change of yours does not apply.",
    "Make the smallest change that solves the task, in the style of the code around it.",
    "Never invent an interface: look up its definition, and quote the line that you rely on.",
    "Prefer the repository's own helpers to new ones, and say so when you add one all the same.",
    "Run the tests next to what you changed after every change, and all tests before you finish.",
    "When a test fails, say what it expects and what it got before you change anything.",
    "Do not weaken a test to make it pass. If a test is wrong, explain why and ask.",
    "Names say what a thing is; comments say why it is so. Neither repeats the other.",
    "Handle errors where something can be done about them, and let all others pass.",
    "Write no secrets, tokens or addresses of people into files, commits or messages.",
    "Ask before you delete data, change a schema, or touch what is deployed.",
    "Commands that write outside of the repository are refused; do not try to work around that.",
    "Long output is cut in the middle. Search for what you need instead of printing all of it.",
    "If you are unsure between two ways, take the one that is easier to undo, and mention the other.",
    "Work in steps: find out, plan, change, test, and sum up. Announce each in one short sentence.",
    "A change of behaviour needs a test that fails without it, and a line in the change log.",
    "Keep functions short enough to be read without scrolling, and files to one subject.",
    "Do not reformat what you do not change: a review reads every line of a difference.",
    "Dependencies are pinned. Adding one needs a reason that the reviewers can check.",
    "Measure before you optimise, and say what you measured, on what, and how often.",
    "Times are in UTC, sizes in bytes, and money in the smallest unit of its currency.",
    "Answer in the language of the question. Code, identifiers and commit messages are in English.",
    "When you are done, list the files that changed and the commands that show that it works.",
    "Stop and ask when the task contradicts these rules, or when you have tried three times.",
)
_SERVICE = (
    "Be brief, friendly and exact. One question at a time, and never more than five sentences.",
    "Look an order up before you say anything about it, and never guess dates or amounts.",
    "Refunds of up to fifty euros may be granted at once; all others go to a colleague.",
    "Do not promise what the terms do not say: delivery times are estimates, prices are as ordered.",
    "Never ask for passwords, card numbers or codes, and stop a customer who begins to write one.",
    "If somebody is upset, say what you understood first, then what you can do, then what you cannot.",
    "Hand over to a colleague when asked for one, when it is about law, or after two failed attempts.",
    "Damaged goods: ask for a photograph, offer a replacement first and a refund second.",
    "A parcel counts as lost ten working days after its last scan, and is then sent again at no cost.",
    "End with one sentence that says what happens next, and by when.",
)
_MODULES = (
    *("billing", "ledger", "accounts", "search", "exports", "webhooks", "sessions", "reports", "invoices", "quotas"),
)
_VERBS = ("parse", "load", "merge", "retry", "round", "render", "expire", "verify", "batch", "resolve")
_TASKS = (
    "The nightly {module} job counts a record twice when it is retried. Find out why and put it right.",
    "Add a limit on the size of a request to the {module} endpoint, with a setting and a test.",
    "`{verb}_{module}` is slow for accounts with many rows. Make it linear, and show that it is.",
    "Users see a stale page of {module} after they {verb} one. Invalidate what has to be, and nothing else.",
    "Split {module} into reading and writing: reports must not wait for the lock any more.",
)


def _number_rules(rules: tuple[str, ...], times: int, topics: tuple[str, ...]) -> str:
    return "\n".join(f"{n}. {rule}" for n, rule in enumerate(_spread(rules, times, topics), 1))


def _spread(rules: tuple[str, ...], times: int, topics: tuple[str, ...]) -> Iterator[str]:
    """Yield each rule once in general, then as it applies to each topic."""
    for topic in (None, *topics[: times - 1]):
        for rule in rules:
            yield rule if topic is None else f"In {topic}: {rule[0].lower()}{rule[1:]}"


def _notes(name: str) -> str:
    """Return the text of a repository's file of notes for agents."""
    lines = [f"# Notes on the repository {name}", ""]
    for module in _MODULES:
        helpers = ", ".join(f"`{verb}_{module}`" for verb in _VERBS[:6])
        lines += [
            f"## {name}/{module}",
            f"Owned by the team of {module}. Entry points: {helpers}. Its tests are in tests/{module}, without",
            f"network. Anything that is kept goes through {name}.store; migrations are in migrations/{module}.",
            f"Known trouble: times of {module} are in the time zone of the account, not of the server.",
            "",
        ]
    return "\n".join(lines)


CODER = Agent(
    "coder",
    "You are a coding agent. You work in a checkout of one repository, on one task at a time, with the tools given.\n"
    "These rules hold for all of your work:\n" + _number_rules(_RULES, 3, ("tests", "migrations")),
    (
        ("read_file", "Read a text file, or a range of its lines, with line numbers.", ("path", "lines")),
        ("list_folder", "Files and folders below a folder, two levels deep, largest first.", ("path",)),
        ("search", "Lines of tracked files that match, with two lines of context, at most 100.", ("pattern", "path")),
        ("find_symbol", "Where a function, class or constant is defined and used.", ("query",)),
        ("edit_file", "Replace one passage of a file. Fails unless it occurs just once.", ("path", "before", "after")),
        ("create_file", "Write a new file. Fails if there is one already.", ("path", "after")),
        ("run", "Run a command and return its exit status and output, cut in the middle.", ("command", "timeout")),
        ("run_tests", "Run the tests below a path and return those that fail, with their output.", ("path",)),
        ("history", "The last commits that touched a path, with their messages and authors.", ("path", "lines")),
        ("delegate", "Let another agent do a self-contained part, and return what it says.", ("task", "reason")),
    ),
    tuple(_notes(name) for name in ("payments", "storefront", "warehouse")),
    ("explore", "edit", "test"),
    turns_max=14,
    tells_time=True,
)
REVIEWER = Agent(
    "reviewer",
    "You review changes that another agent has made, before people look at them. Judge by these rules:\n"
    + _number_rules(_RULES, 2, ("reviews",)),
    CODER.tools[:4],
    steps=("review",),
    turns_max=3,
)
SERVICE = Agent(
    "service",
    "You answer customers of a shop on the phone's chat. Keep to these rules:\n"
    + _number_rules(_SERVICE, 3, ("complaints", "orders from abroad")),
    (
        ("look_up_order", "State, items and parcels of an order.", ("order",)),
        ("refund", "Pay an order back in part or in full.", ("order", "reason")),
        ("hand_over", "Give the conversation to a colleague.", ("reason", "message")),
    ),
    turns_max=5,
)
SHARES = {CODER: 7, REVIEWER: 1, SERVICE: 2}
"""The share of each agent, of ten conversations."""
LIMIT_TOKENS = 4_096
"""`max_tokens` of agents' requests, far above their answers: a simulated engine ends at `min_tokens`."""


@dataclass(slots=True)
class Conversation:
    """A conversation. Each request contains the answer before it and the result of that answer."""

    agent: Agent
    rng: random.Random
    model: str
    answer_tokens: int
    _messages: list[dict[str, Any]] = field(default_factory=list)

    @classmethod
    def start_random(cls, rng: random.Random, model: str, answer_tokens: int) -> Conversation:
        """Begin a conversation of an agent, drawn by SHARES."""
        agent = rng.choices(list(SHARES), list(SHARES.values()))[0]
        return cls(agent, rng, model, answer_tokens)

    def turns(self) -> int:
        """Return the number of its requests."""
        return self.rng.randint(max(2, self.agent.turns_max // 2), self.agent.turns_max)

    def next_body(self, clock: ReleaseClock) -> tuple[bytes, str]:
        """Return the next request, as the current release sends it, and the name of its step."""
        agent, rng = self.agent, self.rng
        first = not self._messages
        if first:
            notes = rng.choice(agent.notes)
            self._messages.append({"role": "system", "content": f"{agent.instructions}\n\n{notes}".strip()})
        self._messages += [{"role": "user", "content": self._task()}] if first else self._make_work_messages()
        told = f"Current time: {datetime.now(UTC).isoformat(timespec='milliseconds')}"
        if clock is ReleaseClock.END and agent.tells_time:
            self._messages[-1]["content"] += f"\n{told}"
        messages = self._messages
        if clock is ReleaseClock.TOP and agent.tells_time:
            messages = [{"role": "system", "content": f"{told}\n\n{messages[0]['content']}"}, *messages[1:]]
        body = {"model": self.model, "messages": messages, "max_tokens": LIMIT_TOKENS, "min_tokens": self.answer_tokens}
        if agent.tools:
            body["tools"] = agent.schemas()
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        return msgspec.json.encode(body), rng.choice(agent.steps)

    def _task(self) -> str:
        rng = self.rng
        task = rng.choice(_TASKS).format(module=rng.choice(_MODULES), verb=rng.choice(_VERBS))
        return f"{task}\nTicket {rng.randrange(10**6)}, reported by {rng.choice(_VERBS)}{rng.randrange(1000)}."

    def _make_work_messages(self) -> list[dict[str, Any]]:
        """Return the model's tool call and its result; a customer replies with text."""
        rng = self.rng
        module, verb = rng.choice(_MODULES), rng.choice(_VERBS)
        if self.agent is SERVICE and rng.random() < 0.5:
            said = f"I have looked at it: {module} {rng.randrange(10**6)} is on its way. Is there anything else?"
            asked = f"Yes, and what of {verb} {rng.randrange(10**6)}? It was to be here by now."
            return [{"role": "assistant", "content": said}, {"role": "user", "content": asked}]
        name, _, arguments = rng.choice(self.agent.tools)
        call = {"name": name, "arguments": msgspec.json.encode({arguments[0]: f"{module}/{verb}.py"}).decode()}
        id_ = f"call_{rng.getrandbits(48):012x}"
        calls = [{"id": id_, "type": "function", "function": call}]
        called = {"role": "assistant", "content": f"I look at {verb}_{module} next.", "tool_calls": calls}
        return [called, {"role": "tool", "tool_call_id": id_, "content": self._make_file_lines(module)}]

    def _make_file_lines(self, module: str) -> str:
        """Return some lines of a file."""
        rng = self.rng
        names = [(rng.choice(_VERBS), rng.choice(_VERBS), rng.randrange(10**4)) for _ in range(rng.randint(8, 24))]
        return "\n".join(
            f"{n:4}  def {one}_{module}_{number}(row: Row, limit: int = {number}) -> Row | None:\n"
            f"          return {two}(row, limit) if row.version > {number % 97} else None"
            for n, (one, two, number) in enumerate(names, rng.randrange(900))
        )
