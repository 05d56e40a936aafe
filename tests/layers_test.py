"""The layers: a file includes its own layer and those below it; and the house's sizes."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
# Each layer, and those that it may include.
LAYERS = {
    "core": set(),
    "report": set(),
    "attn": {"core"},
    "horner.h": {"attn", "core"},
    "horner.cpp": {"horner.h"},
    "nn": {"attn", "core"},
    "train": {"nn", "attn", "core"},
    "diag": {"nn", "attn", "core", "report"},
    "study": {"train", "diag", "nn", "attn", "core", "report"},
    "cli": {"study", "train", "diag", "nn", "attn", "core", "report"},
    "python": {"study", "train", "diag", "nn", "attn", "core", "report"},
}
TORCH = re.compile(r"^(ATen|c10|torch)/")
WITHOUT_TORCH = ("src/core/", "src/report/", "src/attn/exec/kernels/", "src/nn/kernels/", "src/attn/spec.h", "src/attn/math.h",
                 "src/attn/formula", "src/attn/plan", "src/attn/spec_text", "src/attn/catalog")  # fmt: skip
SOURCES = sorted(p for p in (ROOT / "src").rglob("*") if p.suffix in {".h", ".cpp", ".cu", ".cuh"})


def includes(path):
    return re.findall(r'^#include [<"]([^>"]+)[>"]', path.read_text(), re.M)


def test_sources_are_there():
    assert len(SOURCES) > 10


def test_a_file_includes_its_own_layer_and_those_below():
    for path in SOURCES:
        layer = path.relative_to(ROOT / "src").parts[0]
        for name in includes(path):
            other = name.split("/")[0]
            if other in LAYERS:
                assert other == layer or other in LAYERS[layer], f"{path}: {layer} must not include {name}"


def test_no_torch_where_it_does_not_belong():
    for path in SOURCES:
        name = str(path.relative_to(ROOT))
        for header in includes(path):
            assert header != "torch/torch.h", f"{name}: the slow header torch/torch.h"
            if name.startswith(WITHOUT_TORCH):
                assert not TORCH.match(header), f"{name} must not include {header}"


def test_sizes_stay_readable():
    for path in SOURCES + sorted((ROOT / "tests").glob("*.cpp")):
        lines = path.read_text().count("\n")
        kernel = "kernels" in path.parts  # its headers are code, compiled once per instruction set
        most = 150 if path.name == "spec.h" else 100 if path.suffix == ".h" and not kernel else 400
        assert lines <= most, f"{path} has {lines} lines, over {most}: split it by idea"
