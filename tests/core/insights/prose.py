"""Text as agents see it, made from a seed: prose, code, logs, JSON and prompts of products that could exist.

Nothing is copied: sentences are put together from words, so two texts share words and phrases but hardly ever a line.
That is as it is in a real fleet, where prompts of different products share habits, and are not the same text.
"""

from __future__ import annotations

import json
import random
from typing import Any


def _each(words: str) -> list[str]:
    return words.split("|")


_WHO = _each(
    "the user|a customer|the account owner|an engineer|the reviewer|an analyst|the operator|a colleague|the "
    "on-call person|the requester|a new team member|the maintainer"
)
_DO = _each(
    "asks about|mentions|wants to change|cannot find|needs to verify|refers to|reports a problem "
    "with|disagrees with|uploads|describes|returns to|is unsure about|depends on|has already "
    "tried|forgot|compares"
)
_WHAT = _each(
    "invoice|refund|Zürich price list|東京 warehouse|emoji picker 🙂|shipment|"
    "schema migration|dashboard|query plan|access token|build pipeline|test "
    "fixture|release branch|warehouse table|quarterly report|retention policy|feature flag|support "
    "ticket|index|cache layer|webhook|parser|login form|data contract|backup|license key|rate limit|config "
    "file|memory leak|price list|audit trail|metrics endpoint|container image|payment method|delivery window"
)
_HOW = _each(
    "slow|missing|outdated|duplicated|inconsistent|expired|unreadable|misconfigured|empty|locked|corrupted|"
    "ambiguous|undocumented|incomplete|surprisingly large|owned by another team"
)
_THEN = _each(
    "look it up before you answer|say so plainly|ask one short question|prefer the smallest change that "
    'works|quote the source|never guess|say "I do not know"|show the exact command|'
    "offer to open a ticket|explain the trade-off in"
    " two sentences|keep the original wording|run the tests first|stop and report|give the figures with their "
    "units|leave unrelated parts alone|mention who is responsible|use the tool for it rather than your memory"
)
_WHY = _each(
    "since mistakes here are expensive|because it is read by other teams|as the contract demands|unless told "
    "otherwise|so that it can be undone|even when it seems obvious|which saves a round trip|and keep it "
    "brief|before anything else|in the language of the request"
)
_VERB = _each("load|parse|merge|check|build|fetch|render|store|split|update|resolve|score|group|trim|index")
_NOUN = _each("order|user|event|record|batch|token|report|ticket|session|price|chunk|policy|metric|region|invoice")
_HEADINGS = _each(
    "Role|Tone and style|Working with tools|Limits|Format of answers|Escalation|Privacy|Examples|Domain "
    "notes|Checklist|When things fail|Glossary|Quality bar|Planning"
)
_LEVELS = ("INFO", "INFO", "INFO", "WARN", "DEBUG", "ERROR")


class Prose:
    """Makes text; equal seeds make equal text."""

    def __init__(self, seed: str) -> None:
        self.rng = random.Random(seed)

    def sentence(self) -> str:
        """One sentence of 60 to 160 characters."""
        pick = self.rng.choice
        return pick((self._rule, self._fact, self._report))(pick)

    def _rule(self, pick: Any) -> str:
        return f"When {pick(_WHO)} {pick(_DO)} the {pick(_HOW)} {pick(_WHAT)}, {pick(_THEN)}, {pick(_WHY)}."

    def _fact(self, pick: Any) -> str:
        return (
            f"The {pick(_WHAT)} of {self.name()} is {pick(_HOW)} {pick(_WHY)}, and {pick(_WHO)} {pick(_DO)} "
            f"the {pick(_WHAT)}."
        )

    def _report(self, pick: Any) -> str:
        size = self.rng.randint(2, 9999)
        return f"I checked {size} of the {pick(_WHAT)} entries in {self.name()}: {pick(_HOW)}; I will {pick(_THEN)}."

    def name(self) -> str:
        """What a thing in somebody's system is called."""
        return f"{self.rng.choice(_VERB)}_{self.rng.choice(_NOUN)}_{self.word()}"

    def word(self) -> str:
        """A pronounceable word that means nothing."""
        return "".join(self.rng.choice("bdfgklmnprstvz") + self.rng.choice("aeiou") for _ in range(3))

    def digits(self, count: int, alphabet: str = "0123456789abcdef") -> str:
        """So many random characters."""
        return "".join(self.rng.choices(alphabet, k=count))

    def prose(self, size: int) -> str:
        """Paragraphs of about `size` characters."""
        return self._lines(size, lambda: " ".join(self.sentence() for _ in range(self.rng.randint(1, 4))), "\n\n")

    def bullets(self, size: int) -> str:
        """A list of about `size` characters."""
        return self._lines(size, lambda: f"- {self.sentence()}", "\n")

    def code(self, size: int) -> str:
        """Functions in Python, as a tool that reads files gives them back."""
        return self._lines(size, self._function, "\n\n\n")

    def _function(self) -> str:
        pick = self.rng.choice
        name, arg = self.name(), pick(_NOUN)
        body = "\n".join(
            f"    {self.word()} = {pick(_VERB)}({arg}, {self.rng.randint(1, 999)})  # {pick(_HOW)}"
            for _ in range(self.rng.randint(2, 7))
        )
        return f'def {name}({arg}: dict) -> list:\n    """{self.sentence()}"""\n{body}\n    return [{arg}]'

    def log(self, size: int) -> str:
        """Lines of a log: they hold times and ids of their own, which never change once said."""
        return self._lines(size, self._log_line, "\n")

    def _log_line(self) -> str:
        r = self.rng
        day, clock = f"2026-{r.randint(1, 12):02}-{r.randint(1, 28):02}", divmod(r.randint(0, 1439), 60)
        at = f"{day}T{clock[0]:02}:{clock[1]:02}:{r.randint(0, 59):02}Z"
        return (
            f"{at} {r.choice(_LEVELS)} [{self.digits(16)}] {self.name()} took {r.randint(1, 9000)} ms: {r.choice(_HOW)}"
        )

    def rows(self, size: int, indent: int | None = None) -> str:
        """A JSON array of objects."""
        rows: list[dict[str, Any]] = []
        length = 2
        while length < size:
            rows.append({"id": self.rng.randint(1, 10**6), "name": self.name(), "state": self.rng.choice(_HOW)})
            length += len(json.dumps(rows[-1], indent=indent)) + 2
        return json.dumps(rows, indent=indent)

    def result(self, size: int) -> str:
        """What some tool gave back."""
        return str(self.rng.choice((self.prose, self.code, self.log, self.rows))(size))

    def question(self, size: int) -> str:
        """What a user writes."""
        return f"{self.rng.choice(('Please', 'Could you', 'Now', 'Next,', 'Hm,'))} {self.prose(size)}"

    def _lines(self, size: int, line: Any, joint: str) -> str:
        made = [line()]
        length = len(made[0])
        while length < size:
            made.append(line())
            length += len(made[-1]) + len(joint)
        return joint.join(made)


_PRODUCTS = (
    ("coding agent", "You are {name}, an interactive agent that helps with software engineering in a terminal."),
    ("support agent", "You are {name}, the customer support assistant of {other}."),
    ("data analyst", "You are {name}. You answer questions about data by writing SQL and reading its results."),
    ("RAG assistant", "You are {name}, an assistant that answers from the documents it is given, and cites them."),
)
_TOOL_VERBS = _each(
    "read_file|write_file|list_directory|search_code|run_command|apply_patch|query_database|create_ticket|"
    "send_email|lookup_order|issue_refund|search_documents|get_weather|schedule_meeting|fetch_url|"
    "summarize_page|plot_chart|describe_table|create_branch|open_pull_request|read_logs|restart_service|"
    "get_metrics|translate_text"
)
_PROPERTIES = _each(
    "path|query|limit|offset|pattern|reason|customer_id|order_id|start_date|end_date|include_hidden|timeout_s|"
    "format|language|recursive|table|columns|branch|title|body|labels|priority"
)
_TYPES = ("string", "string", "string", "integer", "boolean", "number")


def system_prompt(prose: Prose, size: int) -> str:
    """The system prompt of a product, in sections, of about `size` characters."""
    _, opening = prose.rng.choice(_PRODUCTS)
    parts = [opening.format(name=prose.word().capitalize(), other=prose.word().capitalize())]
    length = len(parts[0])
    headings = prose.rng.sample(_HEADINGS, len(_HEADINGS))
    while length < size:
        heading = headings.pop() if headings else prose.word().capitalize()
        share = prose.rng.randint(200, max(201, size // 3))
        body = prose.rng.choice((prose.prose, prose.bullets))(min(share, size - length + 100))
        parts.append(f"# {heading}\n{body}")
        length += len(parts[-1])
    return "\n\n".join(parts)


def tool_schema(prose: Prose) -> dict[str, Any]:
    """Parameters of a tool as a JSON schema; some have an object within."""
    names = prose.rng.sample(_PROPERTIES, prose.rng.randint(3, 6))
    properties: dict[str, Any] = {}
    for name in names:
        properties[name] = {"type": prose.rng.choice(_TYPES), "description": prose.sentence()}
    if prose.rng.random() < 0.4:
        inner = {key: {"type": "string", "description": prose.sentence()} for key in ("field", "operator", "value")}
        properties["filter"] = {"type": "object", "properties": inner, "required": ["field"]}
    return {"type": "object", "properties": properties, "required": names[:2], "additionalProperties": False}


def tool_names(prose: Prose, count: int) -> list[str]:
    """Names of different tools, those of one server behind each other, as MCP hosts write them."""
    plain = prose.rng.sample(_TOOL_VERBS, min(count, prose.rng.randint(3, len(_TOOL_VERBS))))
    names = list(plain)
    while len(names) < count:
        server = prose.word()
        verbs = prose.rng.sample(_TOOL_VERBS, min(count - len(names), prose.rng.randint(2, 6)))
        names += [f"mcp__{server}__{verb}" for verb in verbs]
    return names
