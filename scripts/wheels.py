"""Makes a wheel of horner for each version of torch that is named, and tests it in an environment of its own.

    python scripts/wheels.py 2.13.0 2.15.0 --out dist      (make wheels TORCH="2.13.0 2.15.0")

A version that `build` was not built with gets its own folder, build-wheels/VERSION, with a virtual environment and a
build: minutes for the first time, and a CUDA build of torch takes gigabytes. What the wheel gives is then tested with
pip and nothing else of this folder: operators, gradients, torch.compile and transforms, and models of transformers.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
TESTS = ["python_test.py", "compile_test.py", "transforms_test.py", "hf_test.py"]


def run(*command, **more):
    subprocess.run([str(word) for word in command], check=True, **more)


def packages(python):
    return subprocess.check_output([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], text=True).strip()


def built_with(build):
    note = build / "python" / "horner" / "built-with-torch"
    return note.read_text() if note.exists() else ""


def environment(folder, version):
    """The Python of a virtual environment with this torch and the packages of requirements.txt."""
    python = folder / "venv" / "bin" / "python"
    if not python.exists():
        run(sys.executable, "-m", "venv", folder / "venv")
    given = [line for line in (ROOT / "requirements.txt").read_text().split() if not line.startswith(("torch==", "clang-format", "playwright"))]
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"torch=={version}", *given)
    return python


def build(version, cuda):
    """The Python and the finished build for this torch."""
    made = ROOT / "build"
    if built_with(made).partition("+")[0] == version:
        return Path(sys.executable), made
    made = ROOT / "build-wheels" / version
    python = environment(made, version)
    off = [] if cuda else ["-DCMAKE_CUDA_COMPILER="]
    run("cmake", "-G", "Ninja", "-S", ROOT, "-B", made, f"-DPython_EXECUTABLE={python}", "-DHORNER_TESTS=OFF", "-DHORNER_LIBRARY=OFF", *off)
    run("ninja", "-C", made)
    return python, made


def test(python, wheel):
    """Installs the wheel in a fresh environment that sees the packages beside it, and runs the tests there."""
    with tempfile.TemporaryDirectory() as folder:
        run(python, "-m", "venv", "--without-pip", folder)
        fresh = Path(folder) / "bin" / "python"
        (Path(packages(fresh)) / "there.pth").write_text(packages(python) + "\n")
        clean = {"PATH": f"{folder}/bin:{os.environ['PATH']}", "HOME": os.environ.get("HOME", "/"), "CXX": "false", "HORNER": f"{folder}/bin/horner"}
        start = time.monotonic()
        run(fresh, "-m", "pip", "install", "--no-index", "--no-deps", "--quiet", wheel, env=clean)
        print(f"pip installed {wheel.name} in {time.monotonic() - start:.1f} s", flush=True)
        run(f"{folder}/bin/horner", "list", "softmax", env=clean)
        del clean["CXX"]  # torch.compile compiles
        where = "import horner, sys; assert horner.__file__.startswith(sys.prefix), horner.__file__"
        run(fresh, "-c", where, env=clean)
        run(fresh, "-m", "pytest", "-q", "-p", "no:cacheprovider", *(ROOT / "tests" / name for name in TESTS), env=clean, cwd=folder)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="+", help="of torch, such as 2.15.0")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    parser.add_argument("--without-cuda", action="store_true", help="leave the CUDA kernels out, also for a CUDA build of torch")
    parser.add_argument("--without-test", action="store_true")
    args = parser.parse_args()
    for version in args.versions:
        python, made = build(version, not args.without_cuda)
        said = subprocess.check_output([python, ROOT / "scripts" / "wheel.py", "--built", made, "--out", args.out], text=True)
        wheel = Path(said.splitlines()[-1]).resolve()
        print(wheel, flush=True)
        if not args.without_test:
            test(python, wheel)


if __name__ == "__main__":
    main()
