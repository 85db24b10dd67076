"""Messages of Envoy's external processing, made from router/extproc/extproc.proto: `python -m deploy.protos`.

It needs protoc, which grpcio-tools has: `python -m pip install grpcio-tools==1.85.1`, preferably in a separate
environment, because it pins protobuf. `--python` names that environment's interpreter.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
SOURCE = "router/extproc/extproc.proto"


def make(python: str, out: Path) -> None:
    """Write extproc_pb2.py and extproc_pb2.pyi below `out`, by the interpreter that has grpcio-tools."""
    command = [python, "-m", "grpc_tools.protoc", "-I.", f"--python_out={out}", f"--pyi_out={out}", SOURCE]
    subprocess.run(command, cwd=REPO, check=True)


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(prog="python -m deploy.protos", description="messages of external processing")
    parser.add_argument("--python", default=sys.executable, help="interpreter that has grpcio-tools")
    parser.add_argument("--out", type=Path, default=REPO, help="folder that has `router`")
    options = parser.parse_args()
    make(options.python, options.out.resolve())
    return 0


if __name__ == "__main__":
    sys.exit(main())
