"""deploy/backend.py: native code in the wheel that pip builds where it can be made, the pure wheel elsewhere."""

from __future__ import annotations

import ast
import re
import shutil
import tomllib
from pathlib import Path

import mypyc.build
import pytest

from deploy import backend, native_wheel
from deploy.compiled import MODULES, PARTS, REPO, parts, side_by_side, without_header

PROJECT = '[project]\nname = "tiny"\nversion = "1"\n[tool.setuptools]\npy-modules = []\n'
PURE, NATIVE = "tiny-1-py3-none-any.whl", "tiny-1-cp311-cp311-linux_x86_64.whl"
# Takes what a C compiler takes, and makes an empty file of the name behind -o.
ANY_COMPILER = '#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\n: > "$2"\n'


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A small project with a compiler that is always content."""
    (tmp_path / "pyproject.toml").write_text(PROJECT, encoding="utf-8")
    compiler = tmp_path / "cc"
    compiler.write_text(ANY_COMPILER, encoding="utf-8")
    compiler.chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.delenv(backend.VARIABLE, raising=False)
    return tmp_path


def maker(project: Path, monkeypatch: pytest.MonkeyPatch, source: str) -> None:
    """Let this be what puts native code into the wheel."""
    (project / "deploy").mkdir()
    (project / "deploy" / "native_wheel.py").write_text(source, encoding="utf-8")
    monkeypatch.setattr(backend, "REPO", project)
    monkeypatch.setattr(backend, "missing", lambda: "")


@pytest.mark.parametrize("compiler", ["/bin/false", "/bin/true", "no-such-compiler -m64"])
def test_without_a_compiler_nothing_is_fetched_for_it(
    compiler: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One that fails, that makes nothing, or that is not there: no mypyc, a pure wheel, and a line that names it."""
    monkeypatch.setenv("CC", compiler)
    assert not any("mypy" in each for each in backend.get_requires_for_build_wheel())
    assert backend.build_wheel(".") == PURE
    said = [line for line in capfd.readouterr().err.splitlines() if line.startswith("warmroute: pure Python")]
    assert len(said) == 1
    assert compiler.split()[0] in said[0]


def test_with_a_compiler_what_makes_native_code_is_fetched() -> None:
    """Where it will be tried, and never for the editable installation, which stays pure and quick."""
    wanted = backend.get_requires_for_build_wheel()
    assert set(backend.native_requirements()) <= set(wanted)
    assert any(each.startswith("mypy") for each in wanted)
    assert not any("mypy" in each for each in backend.get_requires_for_build_editable())


def test_native_code_can_be_forbidden(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    """WARMROUTE_NATIVE=0, whatever compiler there is."""
    monkeypatch.setenv(backend.VARIABLE, "0")
    assert not any("mypy" in each for each in backend.get_requires_for_build_wheel())
    assert backend.build_wheel(".") == PURE
    assert "WARMROUTE_NATIVE=0" in capfd.readouterr().err


def test_native_code_can_be_demanded(monkeypatch: pytest.MonkeyPatch) -> None:
    """WARMROUTE_NATIVE=1 makes the missing compiler an error of the build, and any other word is one."""
    monkeypatch.setenv(backend.VARIABLE, "1")
    monkeypatch.setenv("CC", "/bin/false")
    with pytest.raises(backend.NoNativeCodeError, match="/bin/false"):
        backend.build_wheel(".")
    monkeypatch.setenv(backend.VARIABLE, "yes")
    with pytest.raises(backend.NoNativeCodeError, match="'yes'"):
        backend.get_requires_for_build_wheel()


def test_a_failed_compilation_leaves_the_pure_wheel(
    project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """With what the compiler said, and the line that says why."""
    maker(project, monkeypatch, 'print("it went wrong here")\nraise SystemExit(3)\n')
    assert backend.build_wheel(".") == PURE
    assert (project / PURE).is_file()
    said = capfd.readouterr().err
    assert "it went wrong here" in said
    assert "warmroute: pure Python, slower: compilation of native code failed (exit status 3)" in said
    monkeypatch.setenv(backend.VARIABLE, "1")
    with pytest.raises(backend.NoNativeCodeError, match="exit status 3"):
        backend.build_wheel(".")


def test_the_native_wheel_takes_the_place_of_the_pure_one(
    project: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """pip gets its name, which is the last word that its maker printed."""
    maker(project, monkeypatch, f'print("compiling")\nprint("{NATIVE}")\n')
    assert backend.build_wheel(".") == NATIVE
    assert "warmroute: native code" in capfd.readouterr().err


def test_a_pure_wheel_is_marked_as_one_for_this_python() -> None:
    """Tag and purity change and nothing else; what is no pure wheel is refused."""
    pure = "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    tag = native_wheel.tag()
    assert re.fullmatch(r"cp3\d+-cp3\d+t?-(linux|macosx)_\w+", tag)
    native = native_wheel.marked(pure, tag)
    assert native == f"Wheel-Version: 1.0\nRoot-Is-Purelib: false\nTag: {tag}\n"
    with pytest.raises(ValueError, match="not a pure wheel"):
        native_wheel.marked(native, tag)


def test_sources_are_shared_out_evenly(tmp_path: Path) -> None:
    """Each source is in one part, neighbours stay together, and no part has much more than its share."""
    sources = []
    for number in range(50):
        source = tmp_path / f"{number:02}.c"
        source.write_text("/" * (100 + 37 * number % 400), encoding="utf-8")
        sources.append(source)
    made = [re.findall(r'#include "(.+)"', Path(part).read_text(encoding="utf-8")) for part in parts(sources, tmp_path)]
    assert len(made) == PARTS
    assert [Path(each) for some in made for each in some] == sources
    share_bytes = sum(source.stat().st_size for source in sources) / PARTS
    assert all(sum(Path(each).stat().st_size for each in some) <= share_bytes + 500 for some in made)


def test_a_single_source_is_a_part() -> None:
    """Fewer sources than parts make fewer parts."""
    Path("one.c").write_text("int one;", encoding="utf-8")
    assert parts([Path("one.c")], Path.cwd()) == [str(Path.cwd() / "part_0.c")]


def test_objects_come_in_the_order_of_their_sources() -> None:
    """Whichever compiler ends first; options go to each."""
    said = side_by_side(lambda sources, **options: [f"{source}.{options['debug']}.o" for source in sources])
    assert said([f"{number}.c" for number in range(20)], debug=0) == [f"{number}.c.0.o" for number in range(20)]


def test_compiled_modules_have_the_types_of_what_they_import() -> None:
    """Each package that they import is there when native code is made, of the versions that the router asks for."""
    ours = tomllib.loads((REPO / "pyproject.toml").read_text(encoding="utf-8"))["project"]["dependencies"]
    imported = set()
    for module in MODULES:
        for node in ast.walk(ast.parse((REPO / module).read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            imported |= {name.partition(".")[0] for name in names}
    needed = {line for line in ours if re.split(r"\W", line)[0] in imported}
    assert len(needed) >= 3
    assert needed <= set(backend.native_requirements())


def test_the_sdist_has_what_makes_its_wheel() -> None:
    """MANIFEST.in names every file of deploy/ that the backend needs, and what it fetches."""
    text = (REPO / "MANIFEST.in").read_text(encoding="utf-8")
    named = {word for line in text.splitlines() if line.startswith("include ") for word in line.split()[1:]}
    needed, seen = {"deploy/backend.py", "deploy/native_wheel.py"}, {"requirements/native.in"}
    while needed - seen:
        file = (needed - seen).pop()
        seen.add(file)
        tree = ast.parse((REPO / file).read_text(encoding="utf-8"))
        modules = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
        needed |= {f"{module.replace('.', '/')}.py" for module in modules if module.startswith("deploy.")}
    assert named == seen
    assert all((REPO / each).is_file() for each in named)


@pytest.mark.skipif(not shutil.which("cc"), reason="no C compiler is here")
def test_this_machines_compiler_is_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    """A compiler that is there with Python's headers will do."""
    monkeypatch.delenv("CC")
    assert backend.why_pure() == ""


def test_small_libraries_do_without_pythons_header(tmp_path: Path) -> None:
    """The C file of a module's own library, as mypyc makes it, declares what it names in place of Python.h; one that
    names more keeps the header, and compiles with another mypyc, too."""
    template = Path(mypyc.build.__file__).parent / "lib-rt" / "module_shim.tmpl"
    made = template.read_text("utf-8").format(modname="one", libname="all__mypyc", full_modname="pack.one")
    small, large = tmp_path / "small.c", tmp_path / "large.c"
    small.write_text(made, encoding="utf-8")
    large.write_text(f"{made}\nPyObject *more(void) {{ return PyList_New(0); }}\n", encoding="utf-8")
    before = large.read_bytes()
    without_header(small)
    without_header(large)
    assert "#include" not in small.read_text("utf-8")
    assert "PyInit_one(void)" in small.read_text("utf-8")
    assert large.read_bytes() == before
