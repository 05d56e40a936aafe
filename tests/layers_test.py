"""The house: who may include whom, file by file; targets that say the same; sizes."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
SRC = ROOT / "src"
# Each layer (a folder of src/), and the layers that its files may include.
LAYERS = {
    "core": set(),
    "report": set(),
    "attn": {"core"},
    "files": {"attn", "core"},
    "text": {"files", "core"},
    "instruments": {"attn", "core"},
    "nn": {"text", "files", "attn", "core"},
    "train": {"nn", "text", "files", "attn", "core"},
    "diag": {"nn", "text", "files", "attn", "core", "report"},
    "study": {"train", "diag", "nn", "text", "files", "attn", "core", "report"},
    "convert": {"study", "train", "diag", "nn", "text", "files", "attn", "core", "report"},
    "cli": {"convert", "study", "train", "diag", "nn", "text", "files", "instruments", "attn", "core", "report"},
    "python": {"attn", "core"},
    "horner.h": {"attn", "core"},
    "horner.cpp": {"horner.h"},
}
# Private rooms: a file that includes one of these must itself lie under one of the given paths.
PRIVATE = {
    "attn/exec/": ("attn/",),
    "attn/kernels/": ("attn/exec/", "attn/kernels/"),
    # a decode step is the same problem on both: kernels/cpu/decode/decode.h
    "attn/kernels/cpu/": ("attn/exec/", "attn/kernels/cpu/", "attn/kernels/cuda/decode/"),
    "attn/kernels/cuda/fused/": ("attn/exec/", "attn/kernels/cuda/fused/"),
    "attn/kernels/cuda/hopper/": ("attn/exec/", "attn/kernels/cuda/hopper/"),
    "attn/kernels/cuda/chunked/": ("attn/exec/", "attn/kernels/cuda/chunked/"),
    "attn/kernels/cuda/decode/": ("attn/exec/", "attn/kernels/cuda/decode/"),
    "attn/kernels/cuda/prepare/": ("attn/exec/", "attn/kernels/cuda/prepare/"),
    "nn/kernels/": ("nn/",),
}
TORCH = re.compile(r"^(ATen|c10|torch)/")
WITHOUT_TORCH = ("core/", "report/", "text/", "attn/kernels/", "nn/kernels/", "attn/mask.h", "attn/spec.h", "attn/math.h",
                 "attn/formula", "attn/plan", "attn/spec_text", "attn/catalog")  # fmt: skip
SOURCES = sorted(p for p in SRC.rglob("*") if p.suffix in {".h", ".cpp", ".cu", ".cuh"})


def includes(path):
    return re.findall(r'^#include [<"]([^>"]+)[>"]', path.read_text(), re.M)


def names():
    """Every source, as its path below src/."""
    return {str(p.relative_to(SRC)): p for p in SOURCES}


def test_sources_are_there():
    assert len(SOURCES) > 100


def test_a_file_includes_its_own_layer_and_those_below():
    for name, path in names().items():
        layer = name.split("/")[0]
        for header in includes(path):
            other = header.split("/")[0]
            if other in LAYERS:
                assert other == layer or other in LAYERS[layer], f"{name}: {layer} must not include {header}"


def test_private_is_private():
    for name, path in names().items():
        for header in includes(path):
            for room, users in PRIVATE.items():
                if header.startswith(room):
                    assert name.startswith(users), f"{name} must not include {header}: {room} is private to {users}"


def test_no_two_files_include_each_other():
    """No cycle among headers; in attn, where a .cpp counts as part of its .h, none among sources either.

    Tables name what stands above them; kernels are instantiated by their own source.
    """
    tables = {"attn/attend.cpp"}
    unit = {name: re.sub(r"\.(cpp|h)$", "", name) for name in names()}
    uses = {}
    for name, path in names().items():
        if name in tables or "/kernels/" in name or not (name.startswith("attn/") or name.endswith(".h")):
            continue
        own = uses.setdefault(unit[name], set())
        own |= {unit[h] for h in includes(path) if h in unit and unit[h] != unit[name]}

    done, open_ = set(), []

    def visit(u):
        if u in done:
            return
        assert u not in open_, f"a cycle: {' -> '.join(open_[open_.index(u):] + [u])}"
        open_.append(u)
        for other in sorted(uses.get(u, ())):
            visit(other)
        open_.pop()
        done.add(u)

    for u in sorted(uses):
        visit(u)


def test_targets_are_folders_and_declare_their_links():
    """Each folder is one target, and links to every folder that its files include, by itself or through another."""
    links = {}
    for folder in LAYERS:
        if not (SRC / folder).is_dir():
            continue
        text = (SRC / folder / "CMakeLists.txt").read_text()
        own = "horner" if folder == "cli" else f"horner_{folder}"
        found = re.findall(rf"target_link_libraries\({own}\s+([^)]*)\)", text)
        links[folder] = {m for line in found for m in re.findall(r"\bhorner_(\w+)", line)} & set(LAYERS)

    def reach(folder):
        return {folder}.union(*(reach(f) for f in links[folder]))

    for name, path in names().items():
        folder = name.split("/")[0]
        if folder in links:
            for header in includes(path):
                other = header.split("/")[0]
                assert other not in links or other in reach(folder), f"{name} includes {header}: link horner_{other} in src/{folder}"


def test_no_torch_where_it_does_not_belong():
    for name, path in names().items():
        for header in includes(path):
            assert header != "torch/torch.h", f"{name}: the slow header torch/torch.h"
            if name.startswith(WITHOUT_TORCH):
                assert not TORCH.match(header), f"{name} must not include {header}"


def test_kernel_rooms_have_a_page():
    rooms = [p for p in (SRC / "attn/kernels").rglob("*") if p.is_dir() and any(f.suffix in {".cpp", ".cu", ".cuh"} for f in p.iterdir())]
    assert len(rooms) >= 10
    for room in rooms:
        lines = (room / "README.md").read_text().count("\n")
        assert 8 <= lines <= 30, f"{room}/README.md has {lines} lines: what launches what, in about 15"


def test_every_visit_over_a_spec_is_exhaustive():
    """A visitor that takes any alternative would take a new one silently: the compiler could not ask for it."""
    catch_all = re.compile(
        r"template <class (\w+)>\s+[\w:<> ]+ operator\(\)\((?:const )?\1&{0,2}(?: \w+)?\)"
        r"|operator\(\)\((?:const )?auto\b"
    )
    for name, path in names().items():
        if name.startswith(("attn/", "instruments/")) and not name.startswith("attn/kernels/"):
            assert not catch_all.search(path.read_text()), f"{name}: a catch-all overload in a visitor"


def test_sizes_stay_readable():
    """400 lines are where to look for a seam; 500 are a wall."""
    for path in SOURCES + sorted((ROOT / "tests").glob("*.cpp")):
        lines = path.read_text().count("\n")
        kernel = "kernels" in path.parts or "simd" in path.parts  # headers of code, compiled once per instruction set
        most = 200 if path.name == "spec.h" else 150 if path.suffix == ".h" and not kernel else 500
        assert lines <= most, f"{path} has {lines} lines, over {most}: split it where an idea ends"
