"""python -m loadtest INSTRUMENT ...: each instrument is a module with `main(argv) -> exit status`."""

from __future__ import annotations

import importlib
import sys

INSTRUMENTS = {
    "agree": "the same slice over HTTP and in the simulation; real routers raced",
    "cost": "CPU of an exact decision, and of following KV events",
    "engine": "simulated replicas with vLLM's HTTP surface and KV events",
    "evidence": "all that measures time or rates, part by part, and one table of it",
    "faults": "what becomes of requests when things go wrong: faults, overload, abuse",
    "overhead": "what routers cost, side by side: CPU, added TTFT, memory",
    "replay": "drive any OpenAI-compatible URL with a trace",
    "simulate": "placement policies raced in virtual time",
    "sizing": "CPU and memory of warmroute for so many replicas and streams",
    "story": "agents whose release puts the time into their prompt, and what the observatory says",
    "sidechannel": "whether one tenant finds out by time what another has asked",
}


def main(argv: list[str]) -> int:
    """Run one instrument."""
    if not argv or argv[0] not in INSTRUMENTS:
        print("usage: python -m loadtest INSTRUMENT [--help]\n")
        for name, text in INSTRUMENTS.items():
            print(f"  {name:12} {text}")
        return 0 if argv[:1] in (["--help"], ["-h"]) else 2
    module = importlib.import_module(f"loadtest.{argv[0]}")
    return int(module.main(argv[1:]))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
