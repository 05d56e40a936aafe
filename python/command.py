#!python
"""The command horner as pip installs it: runs the program inside the package with the torch that Python imports."""

import importlib.util
import os
import runpy
import sys


def fail(message):
    print("horner:", message, file=sys.stderr)
    sys.exit(2)


def folder(package):
    found = importlib.util.find_spec(package)
    if not found:
        fail(f"{sys.executable} lacks the package {package!r}: install it there")
    return found.submodule_search_locations[0]


horner, torch = folder("horner"), folder("torch")
try:
    version = runpy.run_path(os.path.join(torch, "version.py"))["__version__"]
    runpy.run_path(os.path.join(horner, "_torch.py"))["check"](version)
except ImportError as error:
    fail(error)
# The checked torch comes first, whichever one the program was linked to.
os.environ["LD_LIBRARY_PATH"] = ":".join(filter(None, [os.path.join(torch, "lib"), os.environ.get("LD_LIBRARY_PATH")]))
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "5000")  # as the program would, at the cost of a second start
os.execv(os.path.join(horner, "bin", "horner"), ["horner", *sys.argv[1:]])
