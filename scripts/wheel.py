"""Makes a wheel of horner for the torch of this Python, from a finished build: pip installs it in seconds.

    python scripts/wheel.py --built build --out dist      (make wheel)

The library runs only with the torch that it was built with, so the wheel says so: its version is 0.1.0+torch2.13.0.cpu,
and it requires torch==2.13.0.
"""

import argparse
import base64
import hashlib
import os
import re
import runpy
import subprocess
import sys
import tempfile
import zipfile
from importlib.util import find_spec
from pathlib import Path

ROOT = Path(__file__).parent.parent


def for_torch(wheel, torch, out):
    """The same wheel with the version of torch in its name, version and requirements. Returns its path."""
    name, given, *rest = wheel.name.split("-")
    tagged = f"{given.partition('+')[0]}+torch{torch.replace('+', '.')}"
    info, new_info = (f"{name}-{v}.dist-info/" for v in (given, tagged))
    made = out / "-".join([name, tagged, *rest])
    record = []
    with zipfile.ZipFile(wheel) as old, zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as new:
        for item in old.infolist():
            data, item.filename = old.read(item), re.sub(rf"^{re.escape(info)}", new_info, item.filename)
            item.filename = item.filename.replace(f"{name}-{given}.data/", f"{name}-{tagged}.data/")
            if item.filename == new_info + "RECORD":
                continue
            if item.filename == new_info + "METADATA":
                text = re.sub(r"^Version: .*$", f"Version: {tagged}", data.decode(), count=1, flags=re.M)
                data = re.sub(r"^Requires-Dist: torch.*$", f"Requires-Dist: torch=={torch.partition('+')[0]}", text, flags=re.M).encode()
            digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).decode().rstrip("=")
            record.append(f"{item.filename},sha256={digest},{len(data)}\n")
            new.writestr(item, data, zipfile.ZIP_DEFLATED)
        new.writestr(new_info + "RECORD", "".join(record) + f"{new_info}RECORD,,\n")
    return made


def build(built, out):
    """The wheel of a finished build. Returns its path."""
    torch = (built / "python" / "horner" / "built-with-torch").read_text()
    # as torch says it itself: the metadata of its wheels may lack the "+cu130"
    there = runpy.run_path(Path(find_spec("torch").submodule_search_locations[0]) / "version.py")["__version__"]
    if str(there) != torch:
        sys.exit(f"{built} was built with torch {torch}, but {sys.executable} has torch {there}: run 'make clean' first")
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        settings = {"SKBUILD_CMAKE_DEFINE": f"HORNER_BUILT={built}", "SKBUILD_BUILD_DIR": f"{folder}/build"}
        pip = [sys.executable, "-m", "pip", "wheel", ".", "--no-build-isolation", "--no-deps", "--no-index", "--quiet", "--wheel-dir", folder]
        subprocess.run(pip, check=True, cwd=ROOT, env={**os.environ, **settings})
        (wheel,) = Path(folder).glob("horner-*.whl")
        return for_torch(wheel, torch, out)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--built", type=Path, default=ROOT / "build", help="a folder of 'make build'")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    args = parser.parse_args()
    print(build(args.built.resolve(), args.out))
