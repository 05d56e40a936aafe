"""Installs what a requirements file names; a torch that is there already and new enough stays."""

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

OLDEST, NEWEST = (2, 11), (2, 15)

wanted = Path(sys.argv[1]).read_text().split()
try:
    if OLDEST <= tuple(int(n) for n in version("torch").split(".")[:2]) <= NEWEST:
        wanted = [line for line in wanted if not line.startswith("torch==")]
except PackageNotFoundError:
    print("installing torch and the Python packages of requirements.txt (about a minute)", flush=True)
subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check", *wanted], check=True)
