"""`cmake --install`, then other people's programs against what it installed: examples/embed and every example of docs/cpp.md."""

import os
import re
import subprocess
from pathlib import Path

import pytest

from pages import ROOT, blocks, printed

BUILD = Path(os.environ["HORNER"]).parent
PUBLIC = {"horner.h", "attn/attend.h", "attn/carry.h", "attn/catalog.h", "attn/join.h", "attn/make_state.h", "attn/mask.h", "attn/plan.h", "attn/rollback.h", "attn/spec.h", "attn/state.h", "core/check.h"}
ENVIRONMENT = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "LD_LIBRARY_PATH")}

# The fragments of the page, one after the other, in a program of their own beside that of examples/embed.
PROGRAM = """#include <ATen/ATen.h>
#include <horner.h>

#include <iostream>

using namespace horner;

int main() {
%s}
"""


def run(command, **more):
    done = subprocess.run(command, capture_output=True, text=True, **more)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """The commands of the page, as they stand there, in a home folder of their own; what they printed is in `said`."""
    home = tmp_path_factory.mktemp("home")
    (commands,) = blocks("cpp.md", "sh")
    assert "--install build " in commands
    commands = commands.replace("--install build ", f"--install {BUILD} --strip ")
    said = run(["bash", "-ec", commands], cwd=ROOT, env={**ENVIRONMENT, "HOME": str(home)})
    (home / "said").write_text(said)
    return home


def test_the_page_shows_the_example():
    assert blocks("cpp.md", "cmake") == [(ROOT / "examples" / "embed" / "CMakeLists.txt").read_text()]
    assert blocks("cpp.md", "cpp")[0] == (ROOT / "examples" / "embed" / "decode.cpp").read_text()


def test_the_embedded_stream_takes_constant_memory(home):
    lines = re.findall(r"(\d+) tokens in (\d+) bytes: \[1, 8, 1, 32\]", (home / "said").read_text())
    assert [int(tokens) for tokens, _ in lines] == [250, 500, 750, 1000]
    assert len({size for _, size in lines}) == 1


def test_the_fragments_of_the_page(home, tmp_path):
    fragments = blocks("cpp.md", "cpp")[1:]
    (tmp_path / "decode.cpp").write_text(PROGRAM % "".join(fragments))
    (tmp_path / "CMakeLists.txt").write_text((ROOT / "examples" / "embed" / "CMakeLists.txt").read_text())
    run(["cmake", "-S", tmp_path, "-B", tmp_path / "build", "-G", "Ninja", f"-DCMAKE_PREFIX_PATH={home}/horner",
         "-DCMAKE_CXX_FLAGS=-Wall -Wextra -Werror -Wno-missing-field-initializers"], env=ENVIRONMENT)  # fmt: skip
    run(["cmake", "--build", tmp_path / "build"], env=ENVIRONMENT)
    said = run([tmp_path / "build" / "decode"], cwd=tmp_path, env={}).splitlines()
    wanted = [line for fragment in fragments for line in printed(fragment)]
    assert len(wanted) == 9 and said == wanted


def test_only_public_headers_are_installed(home):
    include = home / "horner" / "include" / "horner"
    assert {str(p.relative_to(include)) for p in include.rglob("*") if p.is_file()} == PUBLIC
    for header in PUBLIC:
        for name in re.findall(r'#include "([^"]+)"', (include / header).read_text()):
            assert name in PUBLIC, f"{header} includes {name}, which is not public"
    assert not (home / "horner" / "horner").exists()  # the Python package is pip's


def test_the_installed_command_runs(home):
    assert "the length for the denominator" in run([home / "horner" / "bin" / "horner", "list", "l2"], env={})


SHARED = ["bash-completion/completions/horner", "zsh/site-functions/_horner", "fish/vendor_completions.d/horner.fish", "man/man1/horner.1"]


@pytest.mark.parametrize("file", SHARED)
def test_completions_and_the_manual_are_those_of_the_program(home, file):
    words = ["--man"] if file.endswith(".1") else ["--completion", file.split("/")[0].split("-")[0]]
    assert (home / "horner" / "share" / file).read_text() == run([home / "horner" / "bin" / "horner", "help", *words], env={})


def test_another_torch_is_refused(home, tmp_path):
    torch = tmp_path / "torch"
    (torch / "include" / "ATen").mkdir(parents=True)
    (torch / "include" / "ATen" / "ATen.h").touch()
    (torch / "version.py").write_text("__version__ = '2.99.0'\ncuda = None\n")
    done = subprocess.run(["cmake", "-S", ROOT / "examples" / "embed", "-B", tmp_path / "build", f"-DTorch_ROOT={torch}",
                           f"-DCMAKE_PREFIX_PATH={home}/horner"], capture_output=True, text=True, env=ENVIRONMENT)  # fmt: skip
    said = " ".join(done.stderr.split())
    assert done.returncode and re.search(r"built on torch 2\.\d+\.\S+, but torch 2\.99\.0 is in", said), said
    (torch / "version.py").unlink()
    done = subprocess.run(["cmake", tmp_path / "build"], capture_output=True, text=True, env=ENVIRONMENT)
    assert done.returncode and "must be the folder of an installed torch package" in " ".join(done.stderr.split())
