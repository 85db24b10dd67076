"""python -m loadtest INSTRUMENT ...: each benchmark has a module with `main(argv) -> exit status`."""

from __future__ import annotations

import importlib
import sys

from router.config.suggestions import nearest

INSTRUMENTS: dict[str, tuple[str, str]] = {  # by name: the module, and a line on its purpose
    "agree": ("loadtest.sim_vs_http.command", "the same slice over HTTP and in the simulation; real routers raced"),
    "cost": ("loadtest.core_cost.decision", "CPU of an exact decision, and of following KV events"),
    "engine": ("loadtest.fake_engine.command", "simulated replicas with vLLM's HTTP surface and KV events"),
    "evidence": ("loadtest.suite.command", "all that measures time or rates, part by part, and one table of it"),
    "faces": ("loadtest.replay.frontends", "the demo's workloads by the edge, and by Envoy and the picker"),
    "faults": ("loadtest.faults.command", "what becomes of requests when things go wrong: faults, overload, abuse"),
    "forecasts": ("loadtest.reuse_forecast.command", "how well it is foretold when a prompt is asked for again"),
    "kernels": ("loadtest.kernels.command", "the simulated engine's step times beside those of a GPU's kernels"),
    "overhead": ("loadtest.proxy_cost.command", "what routers cost, side by side: CPU, added TTFT, memory"),
    "pages": ("loadtest.docgen.command", "blocks of the documents that are rendered from code and figures"),
    "replay": ("loadtest.replay.command", "drive any OpenAI-compatible URL with a trace"),
    "simulate": ("loadtest.simulate.command", "placement policies raced in virtual time"),
    "routers": (
        "loadtest.replay.routers",
        "the demo's workloads by one router, and by several with a store and without",
    ),
    "sizing": ("loadtest.core_cost.sizing", "CPU and memory of warmroute for so many replicas and streams"),
    "transfers": ("loadtest.kernels.transfers_command", "what moving KV blocks took on a GPU, beside computing them"),
    "steps": ("loadtest.kernels.steps_command", "the simulated engine's step times held against an engine that runs"),
    "story": ("loadtest.insights.story", "agents whose release dates their prompt, and what the observatory says"),
    "sidechannel": ("loadtest.insights.sidechannel", "whether one tenant finds out by time what another has asked"),
}


def main(argv: list[str]) -> int:
    """Run one benchmark."""
    if argv[:1] in (["--help"], ["-h"]):
        print(_usage())
        return 0
    if not argv or argv[0] not in INSTRUMENTS:
        wrong = f"there is no instrument '{argv[0]}'{nearest(argv[0], INSTRUMENTS)}" if argv else "which instrument?"
        print(f"{_usage()}\n\nloadtest: {wrong}", file=sys.stderr)
        return 2
    module = importlib.import_module(INSTRUMENTS[argv[0]][0])
    return int(module.main(argv[1:]))


def _usage() -> str:
    instruments = (f"  {name:12} {text}" for name, (_, text) in INSTRUMENTS.items())
    return "\n".join(("usage: python -m loadtest INSTRUMENT [--help]", "", *instruments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
