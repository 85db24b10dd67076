"""How much of the parsers the attacks reach: `python -m tests.attack --coverage [--seconds S] [--keep] [TARGET...]`.

Kept inputs, short and long, those that a fuzzer has learned, and mutations of both run under coverage.py, on Python
alone, as native code has no lines. A parser below GOAL is listed with the lines that no attack reaches. With `--keep`,
inputs that reach lines which no kept one reaches become seeds: the shortest first, as long as each adds a line.
"""

from __future__ import annotations

import ast
import hashlib
import random
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import coverage

from tests.attack.clock import learned
from tests.attack.drive import ROOT
from tests.attack.grown import kept
from tests.attack.mutate import mutated
from tests.attack.target import SEEDS, Target
from tests.attack.targets import TARGETS

GOAL = 0.95
SEED_BYTES_MAX = 4_096
KEYS = (*("_read", "_entry", "_find_bad_fields", "_wrong", "_merge_tenant_fields", "_quote_text", "is_valid_name"),)
# Modules below router/, and their functions where only these read foreign bytes, or with a minus all but these.
PARSERS: dict[str, tuple[str, ...]] = {
    "http/receiver.py": (),
    "proxy/relay.py": (
        "Relay.body",
        "Relay._take_complete_events",
        "Relay._pass",
        "Relay._find_ending",
        "_is_event",
        "_unframe_chunk",
    ),
    "http/chunk_passthrough.py": (),
    "http/engine_connection.py": tuple(
        f"UpstreamConnection.{name}"
        for name in (
            *("data_received", "_pass_chunks", "_parse_slices", "_parse", "on_message_begin", "on_header"),
            *("on_headers_complete", "_look_at_head", "on_chunk_header", "on_chunk_complete", "on_body"),
            "on_message_complete",
        )
    ),
    "core/dialects/sse.py": (),
    "core/dialects/openai.py": (),
    "core/dialects/anthropic.py": (),
    "core/dialects/sglang.py": ("-with_rank",),
    "core/dialects/responses_api.py": (),
    "core/dialects/errors.py": (),
    "core/dialects/usage_filter.py": (),
    "core/dialects/tenant_isolation.py": ("-can_isolate", "-tenant_salt"),
    "core/dialects/prefill_only.py": (),
    "core/dialects/tool_normalization.py": (),
    "core/dialects/multipart.py": (),
    "core/prompts/json_fields.py": (),
    "core/prompts/incremental_parse.py": (
        "-BodyPrefixCache.per_tenant",
        "-BodyPrefixCache.look",
        "-BodyPrefixCache.get_or_render",
        "-BodyPrefixCache.spend",
    ),
    "core/prompts/canonical.py": (),
    "core/prompts/canonical_openai.py": (),
    "core/prompts/canonical_messages.py": (),
    "core/prompts/canonical_responses.py": (),
    "core/prompts/template_chat.py": ("-pack_ids",),
    "core/prompts/template_messages.py": (),
    "core/prompts/template_responses.py": (),
    "core/prompts/agent_headers.py": (),
    "prewarm/prefixes.py": ("-prompts_from_request", "-file_problems"),
    "cli/audit/log_requests.py": (),
    "cli/audit/log_formats.py": (),
    "cli/audit/engine_logs.py": (),
    "cli/audit/payload_logs.py": (),
    "cli/audit/trace_exports.py": (),
    "core/kv_events/batch_decoder.py": ("-slices",),
    "core/kv_events/event_state_codec.py": ("-pack_numbers", "-EngineState.blocks"),
    "core/peer_sync/snapshot_import.py": (),
    "config/files.py": ("-wait_until_settled",),
    "config/api_keys.py": ("Keys.load", "Keys.find", "_Entry.__post_init__", *KEYS),
    "config/url_maps.py": (),
    "peering/frames.py": (),
    "peering/store_url.py": ("-StoreAddress.__str__", "-url_problem"),
    "engines/discovery/pods.py": (),
    "engines/discovery/pools.py": ("-PoolView.__init__", "-PoolView.parse", "-PoolView.pool"),
    "engines/discovery/object_cache.py": (),
    "engines/discovery/informer.py": ("Informer._hear", "Informer._take", "Informer._list"),
    "engines/discovery/api_client.py": ("_lines",),
    "core/fleet/engine_metrics.py": (),
    "core/fleet/metrics_lines.py": (),
    "core/fleet/engine_capacity.py": ("-with_event_block",),
    "engines/probe.py": ("Prober._models",),
    "engines/ranks.py": ("RankExpander.count", "RankExpander.version"),
    "tokenization/encoder.py": ("_tokens",),
    "tokenization/template_traits.py": (),
    "tokenization/sandbox.py": (),
    "tokenization/chat_templates.py": (),
    "tokenization/engine_tokenize.py": ("ask_body",),
}


@dataclass(frozen=True, slots=True)
class Reached:
    """Lines of one parser, and those that no attack runs."""

    parser: str
    lines: int
    missing: tuple[int, ...]

    @property
    def share(self) -> float:
        """The part of its lines that attacks run."""
        return 1.0 - len(self.missing) / self.lines if self.lines else 1.0


def inputs(target: Target, seconds: float, seed: int) -> Iterator[bytes]:
    """Kept inputs, learned ones, then mutations of both until the time is over."""
    pool = [*target.seeds().values(), *learned(target)]
    yield from pool
    yield from (recipe.data() for recipe in kept(target.name).values())
    choose, until_s = random.Random(seed), time.monotonic() + seconds
    while time.monotonic() < until_s:
        yield mutated(choose, pool, target.words, target.bytes_max)


class Measure:
    """Lines of the parsers that ran, by input."""

    def __init__(self) -> None:
        self._coverage = coverage.Coverage(data_file=None, config_file=False, include=[str(ROOT / "router" / "*")])
        self.inputs: dict[str, tuple[Target, bytes]] = {}

    def run(self, targets: Iterable[Target], seconds: float, seed: int) -> None:
        """Attack each target."""
        self._coverage.start()
        try:
            for target in targets:
                for data in inputs(target, seconds, seed):
                    name = f"{target.name} {len(self.inputs)}"
                    self.inputs[name] = target, data
                    self._coverage.switch_context(name)
                    with suppress(Exception):
                        target.try_once(data)
                self._coverage.switch_context("")
        finally:
            self._coverage.stop()

    def lines(self, parser: str) -> dict[int, list[str]]:
        """Line of a parser -> the inputs that ran it."""
        found = self._coverage.get_data().contexts_by_lineno(str(ROOT / "router" / parser))
        return {line: [name for name in names if name in self.inputs] for line, names in found.items()}

    def reached(self, parser: str) -> Reached:
        """The result for one parser. Lines that an import runs do not count."""
        file = str(ROOT / "router" / parser)
        _, statements, _, missing, _ = self._coverage.analysis2(file)
        wanted = _body_lines(Path(file), PARSERS[parser]) & set(statements)
        return Reached(parser, len(wanted), tuple(sorted(wanted & set(missing))))


def functions(file: Path) -> dict[str, range]:
    """Every function of a file by its qualified name, and the lines of its body."""
    found: dict[str, range] = {}

    def walk(node: ast.AST, prefix: str) -> None:
        for part in ast.iter_child_nodes(node):
            if isinstance(part, ast.ClassDef):
                walk(part, f"{prefix}{part.name}.")
            elif isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                found[f"{prefix}{part.name}"] = range(part.body[0].lineno, (part.end_lineno or part.lineno) + 1)
            else:
                walk(part, prefix)

    walk(ast.parse(file.read_text("utf-8")), "")
    return found


def _body_lines(file: Path, names: Sequence[str]) -> set[int]:
    """Lines of functions: of these alone, or of all but those with a minus."""
    only = {name for name in names if not name.startswith("-")}
    left_out = {name[1:] for name in names if name.startswith("-")}
    bodies = functions(file)
    wanted = only or bodies.keys() - left_out
    return {line for name in wanted for line in bodies[name]}


def additions(measure: Measure) -> list[tuple[Target, bytes]]:
    """Inputs that reach lines which no seed reaches: the shortest first, each with a line of its own."""
    seeds = {(target.name, data) for target in TARGETS.values() for data in target.seeds().values()}
    by_input: dict[str, set[tuple[str, int]]] = {}
    for parser in PARSERS:
        for line, names in measure.lines(parser).items():
            for name in names:
                by_input.setdefault(name, set()).add((parser, line))
    seen: set[tuple[str, int]] = set()
    candidates = []
    for name, lines in by_input.items():
        target, data = measure.inputs[name]
        if (target.name, data) in seeds:
            seen |= lines
        elif len(data) <= SEED_BYTES_MAX:
            candidates.append((len(data), name, lines))
    found = []
    for _, name, lines in sorted(candidates, key=lambda each: each[:2]):
        if lines - seen:
            seen |= lines
            found.append(measure.inputs[name])
    return found


def keep(found: Sequence[tuple[Target, bytes]]) -> None:
    """Write inputs among the seeds, under names of their content."""
    for target, data in found:
        (SEEDS / target.name / f"reaches-{hashlib.sha256(data).hexdigest()[:8]}").write_bytes(data)


def main(names: Sequence[str], seconds: float, seed: int, *, keeps: bool) -> int:
    """Print the table; 1 if a parser is below GOAL."""
    measure = Measure()
    measure.run([target for name, target in TARGETS.items() if name in (names or TARGETS)], seconds, seed)
    rows = sorted((measure.reached(parser) for parser in PARSERS), key=lambda each: each.share)
    for row in rows:
        missing = f"  not reached: {_ranges(row.missing)}" if row.share < GOAL else ""
        print(f"{row.share:5.0%} {row.lines:5} lines  router/{row.parser}{missing}")
    lines, missing = sum(row.lines for row in rows), sum(len(row.missing) for row in rows)
    print(f"{1 - missing / lines:5.1%} of {lines} lines of {len(rows)} parsers, by {len(measure.inputs):,} attacks")
    more = additions(measure)
    print(f"{len(more)} inputs reach lines that no seed reaches{', and are seeds now' if keeps else ' (--keep)'}")
    if keeps:
        keep(more)
    return 1 if missing > (1 - GOAL) * lines else 0


def _ranges(lines: Sequence[int]) -> str:
    """Lines as ranges: 3-5, 9."""
    groups: list[list[int]] = []
    for line in lines:
        if groups and line - groups[-1][-1] <= 1:
            groups[-1].append(line)
        else:
            groups.append([line])
    return ", ".join(f"{group[0]}-{group[-1]}" if len(group) > 1 else str(group[0]) for group in groups)
