"""Install real SGLang for CPU into `.venv-sglang`: `python -m tests.real.install_sglang`.

Theory: SGLang's scheduler, radix cache, HTTP server and KV events are Python, and that is all a router can see of it.
Its wheel asks for a stack of CUDA packages, none of which a tiny Llama on a CPU calls. So it is installed without its
dependencies into an environment that sees what `.venv-engines` has (torch, transformers, fastapi ...), next to the
few pure ones that it imports besides, at the versions it pins where others do not work; sglang_absent.py answers for
the kernels. It is a fixture for protocols: what it computes is not checked.
"""

from __future__ import annotations

import json
import shutil
import sys
from functools import partial
from pathlib import Path

from tests.real.install import REPO, VENV, install, lay_host_memory, run, site_of
from tests.support import installing
from tests.support.installing import python_of

VENV_SGLANG = REPO / ".venv-sglang"
SGLANG = "0.5.23"
# Part of the stamp: raise it when the steps below change.
RECIPE = 2
# What it imports on a CPU and `.venv-engines` lacks, or has in a version that SGLang does not take.
WANTED = (
    "apache-tvm-ffi==0.1.11", "compressed-tensors==0.18.0", "distro", "gguf", "nvidia-ml-py", "openai==2.8.0",
    "orjson", "scipy", "soundfile", "triton", "zstandard",
)  # fmt: skip
HOOK = "warmroute_sglang_absent"


def lay_paths(venv: Path, engines: Path) -> None:
    """Let it see the engines' packages behind its own, and load the stand-ins at every start."""
    site = site_of(venv)
    shutil.copyfile(Path(__file__).with_name("sglang_absent.py"), site / f"{HOOK}.py")
    (site / "warmroute_engines.pth").write_text(f"{site_of(engines)}\n", encoding="utf-8")
    (site / f"zz_{HOOK}.pth").write_text(f"import {HOOK}\n", encoding="utf-8")
    lay_host_memory(site)


def stamp_text() -> str:
    """What the stamp says when the environment is what this file would make."""
    return json.dumps({"recipe": RECIPE, "sglang": SGLANG, "wanted": WANTED, "python": sys.version.split()[0]})


def installed(venv: Path = VENV_SGLANG) -> bool:
    """Whether the stamp says that nothing is left to do."""
    return installing.stamped(venv, stamp_text())


def fill(venv: Path, engines: Path) -> None:
    """Install SGLang into the environment."""
    # Before the other environment is in sight: pip would take its packages for this one's.
    run(f"sglang {SGLANG}", installing.pip(venv, "install", "--no-deps", f"sglang=={SGLANG}", *WANTED))
    lay_paths(venv, engines)
    code = "import sglang.launch_server, sglang.srt.entrypoints.http_server"
    run("import SGLang's server", [str(python_of(venv)), "-c", code])


def install_sglang(venv: Path = VENV_SGLANG, engines: Path = VENV) -> None:
    """Bring `venv` to what the tests need, `.venv-engines` first; InstallFailed with the step that broke."""
    install(engines)
    steps = partial(fill, engines=engines)
    installing.make("engines", f"sglang {SGLANG} is", venv, stamp_text(), steps, done=installed(venv))


if __name__ == "__main__":
    sys.exit(installing.command("engines", "tests.real.install_sglang", "SGLang for CPU", VENV_SGLANG, install_sglang))
