"""python -m loadtest INSTRUMENT ...: each benchmark has a module with `main(argv) -> exit status`."""

from __future__ import annotations

import importlib
import sys

from router.config.suggestions import nearest

INSTRUMENTS: dict[str, tuple[str, str]] = {  # by name: the module, and a line on its purpose
    "agree": (
        "loadtest.sim_vs_http.command",
        "comparison of the simulation with HTTP runs; comparison of real routers",
    ),
    "cost": ("loadtest.core_cost.decision", "CPU of a placement decision with exact cache state, and of KV events"),
    "engine": ("loadtest.fake_engine.command", "simulated replicas with vLLM's HTTP surface and KV events"),
    "evidence": ("loadtest.suite.command", "all measurements of times and rates, in parts, with one table"),
    "faces": (
        "loadtest.replay.frontends",
        "the demo's workloads through the HTTP proxy, and through Envoy and the picker",
    ),
    "faults": ("loadtest.faults.command", "outcomes of requests under faults, overload and abuse"),
    "forecasts": ("loadtest.reuse_forecast.command", "quality of forecasts of prompt reuse"),
    "kernels": ("loadtest.kernels.command", "step times of the simulated engine compared with GPU kernels"),
    "overhead": ("loadtest.proxy_cost.command", "cost of routers compared: CPU, added TTFT, memory"),
    "pages": ("loadtest.docgen.command", "render parts of the documents from code and figures"),
    "replay": ("loadtest.replay.command", "send a trace to an OpenAI-compatible URL"),
    "simulate": ("loadtest.simulate.command", "compare placement policies in virtual time"),
    "routers": (
        "loadtest.replay.routers",
        "the demo's workloads through one router, and through several with and without a store",
    ),
    "sizing": ("loadtest.core_cost.sizing", "CPU and memory of warmroute by number of replicas and streams"),
    "transfers": (
        "loadtest.kernels.transfers_command",
        "times of KV block transfers on a GPU, compared with computation",
    ),
    "steps": ("loadtest.kernels.steps_command", "step times of the simulated engine compared with a running engine"),
    "story": (
        "loadtest.insights.story",
        "agents with a release that adds the time to their prompt, and the router's advice",
    ),
    "sidechannel": ("loadtest.insights.sidechannel", "timing side channel between tenants"),
}


def main(argv: list[str]) -> int:
    """Run one benchmark."""
    if argv[:1] in (["--help"], ["-h"]):
        print(_usage())
        return 0
    if not argv or argv[0] not in INSTRUMENTS:
        wrong = (
            f"unknown instrument '{argv[0]}'{nearest(argv[0], INSTRUMENTS)}" if argv else "an instrument is required"
        )
        print(f"{_usage()}\n\nloadtest: {wrong}", file=sys.stderr)
        return 2
    module = importlib.import_module(INSTRUMENTS[argv[0]][0])
    return int(module.main(argv[1:]))


def _usage() -> str:
    instruments = (f"  {name:12} {text}" for name, (_, text) in INSTRUMENTS.items())
    return "\n".join(("usage: python -m loadtest INSTRUMENT [--help]", "", *instruments))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
