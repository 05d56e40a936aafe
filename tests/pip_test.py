"""`pip install .` into a fresh environment that has torch: the package, the command, and every example of docs/python.md."""

import inspect
import json
import os
import re
import runpy
import shutil
import subprocess
import sys
import sysconfig
import tomllib
from pathlib import Path

import pytest

from pages import ROOT, blocks, printed

BUILD = Path(os.environ["HORNER"]).parent


def run(command, code=0, **more):
    done = subprocess.run(command, capture_output=True, text=True, **more)
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


class Fresh:
    """A fresh environment that sees the packages of this one, and has pip."""

    def __init__(self, folder):
        run([sys.executable, "-m", "venv", "--without-pip", folder])
        self.python = folder / "bin" / "python"
        site = run([self.python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]).strip()
        (Path(site) / "there.pth").write_text(sysconfig.get_path("purelib") + "\n")
        self.package = Path(site) / "horner"
        self.environment = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "HOME": os.environ.get("HOME", "/")}
        (folder / "bin" / "pip").write_text(f'#!/bin/sh\nexec {self.python} -m pip "$@"\n')
        (folder / "bin" / "pip").chmod(0o755)


class Installed(Fresh):
    """With horner as pip puts it there."""

    def __init__(self, folder):
        super().__init__(folder)
        install, command = blocks("python.md", "sh")[0].splitlines()
        assert install == "pip install ."
        # What `make build` has compiled is not compiled again (unless HORNER_LONG asks for it); test_a_wheel_is_compiled_as_the_build_is.
        built = {} if "HORNER_LONG" in os.environ else {"SKBUILD_CMAKE_DEFINE": f"HORNER_BUILT={BUILD}"}
        built["SKBUILD_BUILD_DIR"] = str(folder.parent / "wheel")
        run(["bash", "-ec", f"{install} --no-build-isolation --no-index --quiet"], cwd=ROOT, env={**self.environment, **built})
        self.said = run(["bash", "-ec", command], env=self.environment)


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    return Installed(tmp_path_factory.mktemp("fresh") / "venv")


def test_the_package_and_the_command_are_there(installed):
    assert {p.name for p in installed.package.iterdir()} >= {"__init__.py", "py.typed", "libhorner_python.so", "built-with-torch", "bin"}
    assert "softmax, cut at order 2" in installed.said
    assert run([installed.package / "bin" / "horner", "--version"], env={}).startswith("horner ")
    for file, beside in (("bin/horner", "$ORIGIN/../../torch/lib"), ("libhorner_python.so", "$ORIGIN/../torch/lib")):
        assert f"[{beside}:" in run(["readelf", "-d", installed.package / file])


def test_completions_and_the_manual_are_there(installed):
    share = installed.python.parent.parent / "share"
    for file, word in (("bash-completion/completions/horner", "complete -F _horner horner"), ("zsh/site-functions/_horner", "#compdef horner"),
                       ("fish/vendor_completions.d/horner.fish", "complete -c horner"), ("man/man1/horner.1", ".TH HORNER 1")):  # fmt: skip
        assert word in (share / file).read_text(), file


def test_errors_of_the_command_are_its_own(installed):
    said = run([installed.python.parent / "horner", "show", "sofmax"], code=2, env=installed.environment)
    assert said.startswith("horner: no attention variant 'sofmax'")


def test_another_torch_is_refused(installed):
    note = installed.package / "built-with-torch"
    built = note.read_text()
    note.write_text("2.0.1+cpu")
    try:
        wanted = f"horner was built with torch 2.0.1+cpu, but torch {built} is installed"
        assert wanted in run([installed.python, "-c", "import horner"], code=1, env=installed.environment)
        said = run([installed.python.parent / "horner", "list"], code=2, env=installed.environment)
        assert wanted in said and "pip install --force-reinstall --no-deps ." in said
    finally:
        note.write_text(built)


def test_a_wheel_for_this_torch(tmp_path):
    """make wheel: its name, what it requires, and that pip installs it without a compiler."""
    torch = (BUILD / "python" / "horner" / "built-with-torch").read_text()
    run([sys.executable, ROOT / "scripts" / "wheel.py", "--built", BUILD, "--out", tmp_path])
    (wheel,) = tmp_path.glob("horner-*.whl")
    assert f"+torch{torch.replace('+', '.')}-py3-none-" in wheel.name
    fresh = Fresh(tmp_path / "venv")
    install = ["bash", "-ec", f"pip install --no-index --quiet {wheel}"]
    run(install, env={**fresh.environment, "CXX": "false", "CMAKE_GENERATOR": "none"})
    said = run([fresh.python, "-c", "import horner, torch; print(horner.attend(*torch.ones(3, 1, 1, 4, 8)).sum().item())"], env=fresh.environment)
    assert said.splitlines()[-1] == "32.0"
    assert run([fresh.python.parent / "horner", "--version"], env=fresh.environment).startswith("horner ")
    # the wheel of another torch is refused before anything is installed
    (tmp_path / "other").mkdir()
    other = runpy.run_path(ROOT / "scripts" / "wheel.py")["for_torch"](wheel, "2.0.1+cpu", tmp_path / "other")
    assert "torch==2.0.1" in run(["bash", "-ec", f"pip install --no-index {other}"], code=1, env=fresh.environment)


def test_every_example_of_the_page(installed, tmp_path):
    (tmp_path / "README.md").write_text((ROOT / "README.md").read_text())
    run(["bash", "-ec", blocks("python.md", "sh")[1]], cwd=tmp_path, env=installed.environment)
    code = "".join(blocks("python.md", "python"))
    said = run([installed.python, "-W", "error::FutureWarning", "-c", code], cwd=tmp_path, env=installed.environment)
    assert len(printed(code)) == 31 and said.splitlines() == printed(code)


def compile_commands(build, source):
    """What each object is compiled with and from, told apart from where (torch may lie inside the source folder)."""
    commands = {}
    for entry in json.loads((build / "compile_commands.json").read_text()):
        together = Path(entry["file"]).read_text() if "/Unity/" in entry["file"] else ""
        command, together = (text.replace(str(build), "BUILD").replace(f"{source}/src", "SOURCE") for text in (entry["command"], together))
        words = command[command.index(" -") :].split()
        commands[words[words.index("-o") + 1]] = [w for w in words if w not in ("-g1", "-Werror")], together
    return commands


def test_a_wheel_is_compiled_as_the_build_is(tmp_path):
    """From the source distribution: all that is needed is in it, and every object is the one that the other tests test."""
    script = "import sys; from scikit_build_core.build import build_sdist; build_sdist(sys.argv[1])"
    run([sys.executable, "-c", script, tmp_path], cwd=ROOT)
    (archive,) = tmp_path.glob("horner-*.tar.gz")
    shutil.unpack_archive(archive, tmp_path)
    source = next(p for p in tmp_path.iterdir() if p.is_dir())
    settings = tomllib.loads((source / "pyproject.toml").read_text())["tool"]["scikit-build"]["cmake"]
    defines = {"CMAKE_BUILD_TYPE": settings["build-type"], **settings["define"], "Python_EXECUTABLE": sys.executable}
    (defines["HORNER_UNITY"],) = re.findall("^HORNER_UNITY:BOOL=(.*)", (BUILD / "CMakeCache.txt").read_text(), re.M)
    run(["cmake", "-G", "Ninja", "-S", source, "-B", tmp_path / "build", *[f"-D{name}={value}" for name, value in defines.items()]])
    wheel, tested = compile_commands(tmp_path / "build", source), compile_commands(BUILD, ROOT)
    assert any("cli" in "".join(how[0]) + how[1] for how in wheel.values()) and len(wheel) > 50
    for target, how in wheel.items():
        assert how == tested[target], target


def test_hints_and_formulas():
    import horner

    assert list(horner.Inputs.__annotations__) == list(horner._INPUTS)  # as the library's table has them
    for name in horner.__all__:
        function = getattr(horner, name)
        assert function.__doc__, name
        hints = inspect.signature(function)
        assert inspect.isclass(function) or hints.return_annotation is not inspect.Signature.empty, name
        for parameter in hints.parameters.values():
            assert parameter.annotation is not inspect.Parameter.empty, f"{name}: {parameter}"
    for name in ("attend", "statistics"):
        assert re.search(r"sum .*", getattr(horner, name).__doc__), name
