"""`pip wheel .` builds a package that works on its own, against the torch that is installed."""

import subprocess
import sys
import zipfile
from pathlib import Path

ROOT = Path(__file__).parent.parent


def test_wheel(tmp_path):
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", tmp_path, ROOT]
    subprocess.run(build, check=True)
    (wheel,) = tmp_path.glob("horner-*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path / "site")
    script = "import horner, torch; print(horner.__file__); print(horner.attend(*torch.randn(3, 1, 2, 5, 4)).shape)"
    run = subprocess.run([sys.executable, "-c", script], env={"PYTHONPATH": str(tmp_path / "site")}, cwd=tmp_path,
                         check=True, capture_output=True, text=True)  # fmt: skip
    file, shape = run.stdout.splitlines()
    assert file.startswith(str(tmp_path)) and shape == "torch.Size([1, 2, 5, 4])"
