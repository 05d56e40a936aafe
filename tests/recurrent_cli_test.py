"""horner plan, horner bench decode and order: states as a user of the command line meets them."""

import json
import math
import os
import resource
import subprocess
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import torch

HORNER = os.environ.get("HORNER") or str(Path(__file__).parent.parent / "build" / "horner")
SVG = "{http://www.w3.org/2000/svg}"


def horner(*args, timeout=120):
    return subprocess.run([HORNER, *args], capture_output=True, text=True, timeout=timeout)


def output(*args):
    done = horner(*args)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return done.stdout


def error(*args):
    done = horner(*args)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("horner: ") and done.stderr.count("\n") == 1
    return done.stderr


def lines(path):
    """The points of each line of a picture, all of them inside its frame."""
    root = ElementTree.parse(path).getroot()
    box = next(r for r in root.iter(SVG + "rect") if r.get("class") == "frame")
    x, y, width, height = (float(box.get(side)) for side in ["x", "y", "width", "height"])
    found = []
    for line in root.iter(SVG + "polyline"):
        points = [tuple(map(float, p.split(","))) for p in line.get("points").split()]
        for px, py in points:
            assert x - 0.01 <= px <= x + width + 0.01 and y - 0.01 <= py <= y + height + 0.01
        found.append(points)
    return found


def texts(path):
    return [t.text for t in ElementTree.parse(path).getroot().iter(SVG + "text")]


@pytest.mark.parametrize("D, order", [(16, 3), (64, 2), (128, 1)])
def test_plan_counts(D, order):
    args = ["--dim", D, "--heads", 8, "--key-heads", 2, "--layers", 3, "--batch", 5]
    args += ["--tokens", 10000, "--dtype", "bfloat16"]
    plan = json.loads(output("plan", f"taylor{order}", *map(str, args), "--json"))
    features = math.comb(D + order, order)
    assert plan["features"] == features
    assert plan["state_bytes_per_head"] == features * (D + 1) * 4
    assert plan["state_bytes"] == plan["state_bytes_per_head"] * 2 * 3 * 5
    assert plan["cache_bytes"] == 2 * D * 2 * 10000 * 2 * 3 * 5
    smaller = plan["from_tokens"]["state_smaller_than_cache"]
    assert smaller == math.ceil(features * (D + 1) * 4 / (2 * D * 2))
    assert plan["too_large"] == "" and plan["chunk"] % 16 == 0
    flop = {way["name"]: way["flop_per_token_and_head"] for way in plan["flop"]}
    assert flop["decode, state"] == 4 * features * (D + 1)
    assert flop["decode, KV cache"] == 2 * 2 * D * 10000


def test_plan_chooses_by_length():
    def chosen(tokens):
        args = ["plan", "taylor2", "--dim", "16", "--tokens", str(tokens), "--json"]
        return json.loads(output(*args))["auto"]["execution"]

    assert chosen(64) == "fused_cpu" and chosen(65536) == "chunked"


def test_plan_text():
    text = output("plan", "taylor2", "--dim", "64", "--heads", "8", "--tokens", "65536")
    assert "2,145 features" in text and "558 KB" in text
    assert "cache of 65,536 tokens" in text
    assert "auto chooses chunked" in text and "fused_cpu: takes more work" in text


def test_plan_of_what_has_no_state():
    text = output("plan", "softmax")
    assert "no state: its weight has no finite state" in text and "auto chooses fused_cpu" in text
    plan = json.loads(output("plan", "softmax", "--json"))
    assert plan["why_no_state"] and "state_bytes" not in plan


def test_plan_refuses_a_state_with_its_size():
    plan = json.loads(output("plan", "taylor4", "--dim", "64", "--json"))
    size = math.comb(68, 4) * 65 * 8 * 8  # 65 doubles a feature, 8 heads
    assert f"its state would take {size / 1e9:.3g} GB" in plan["too_large"]
    assert plan["auto"]["execution"] == "fused_cpu"
    assert "chunk" not in plan
    assert "refused: its state would take" in output("plan", "taylor4", "--dim", "64")


@pytest.mark.parametrize(
    "args, words",
    [
        (["plan", "tylor2"], ["'tylor2'", "'taylor2'"]),
        (["plan"], ["VARIANT"]),
        (["plan", "taylor2", "--heads", "6", "--key-heads", "4"], ["6", "4 key heads"]),
        (["plan", "taylor2", "--tokens", "0"], ["--tokens"]),
        (["plan", "taylor2", "--dtype", "int8"], ["'int8'", "'bfloat16'"]),
        (["bench", "ordr"], ["'ordr'", "'order'", "'decode'"]),
        (["bench", "order", "--shape", "1,1,64,16"], ["order", "--shape"]),
        (["bench", "order", "--seed", "-1"], ["--seed"]),
        (["bench", "order", "--svg", "/no/such/folder/a.svg"], ["/no/such/folder/a.svg"]),
        (["bench", "decode", "--svg", "/no/such/folder/a.svg"], ["/no/such/folder/a.svg"]),
        (["bench", "decode", "--seed", "1"], ["decode", "--seed"]),
        (["bench", "decode", "--execution", "chunked"], ["decode", "--execution"]),
        (["bench", "decode", "--dtype", "float32", "bfloat16"], ["exactly one --dtype", "2"]),
        (["bench", "attention", "--svg", "a.svg"], ["attention", "--svg"]),
        (["bench", "attention", "--model", "a"], ["attention", "--model"]),
        (["bench", "decode", "--model", "/no/such", "--shape", "1,1,64,16"], ["decode", "--shape"]),
        (["bench", "decode", "--model", "/no/such/model"], ["/no/such/model"]),
    ],
    ids=" ".join,
)
def test_errors_name_what_is_wrong(args, words):
    line = error(*args)
    assert all(word in line for word in words), line


def test_bench_refuses_a_state_with_its_size():
    done = horner("bench", "decode", "--variant", "taylor4", "--shape", "1,8,2000,64")
    assert done.returncode == 2 and done.stdout == ""
    assert "its state would take 3.39 GB" in done.stderr


def test_bench_decode(tmp_path):
    picture = tmp_path / "decode.svg"
    args = ["--variant", "softmax", "taylor2", "linear_elu", "--shape", "1,2,5000,16"]
    report = json.loads(output("bench", "decode", *args, "--json", "--svg", str(picture)))
    names = [r["variant"] for r in report["results"]]
    assert names == ["softmax", "taylor2", "linear_elu"]
    for result in report["results"]:
        assert result["wrong"] == ""
        assert [t["context"] for t in result["times"]] == [250, 1000, 4000, 5000]
        assert all(t["us"] > 0 and t["bytes"] > 0 for t in result["times"])
    grows, flat = ({t["bytes"] for t in r["times"]} for r in report["results"][:2])
    assert len(flat) == 1 and len(grows) > 1
    # E + 1 sums a feature, beside D + E numbers a token.
    predicted = report["results"][1]["predicted_crossover"]
    assert predicted == pytest.approx(math.comb(18, 2) * 17 / 32)
    drawn = lines(picture)
    assert [len(line) for line in drawn] == [4, 4, 4]
    assert {"softmax (KV cache)", "taylor2", "linear_elu"} <= set(texts(picture))
    assert os.listdir(tmp_path) == ["decode.svg"]


def test_bench_decode_keeps_what_was_measured_before_memory_ended(tmp_path):
    """The KV cache of a million tokens takes 1.1 GB, and the process may have 1."""
    tool, models = os.path.join(os.path.dirname(HORNER), "model_tool"), [str(tmp_path / name) for name in ("softmax", "taylor1")]
    for model in models:
        subprocess.run([tool, "new", "tiny", os.path.basename(model), "3", model], check=True)

    def bench(*more):
        words = [HORNER, "bench", "decode", "--model", *models, "--repeats", "1", *more]
        limit = lambda: resource.setrlimit(resource.RLIMIT_DATA, (10**9, 10**9))  # noqa: E731
        return subprocess.run(words, capture_output=True, text=True, check=True, preexec_fn=limit, env={**os.environ, "OMP_NUM_THREADS": "1"}).stdout

    cache, state = json.loads(bench("--json"))["models"]
    assert cache["out_of_memory"] and not state["out_of_memory"]
    assert 0 < len(cache["times"]) < len(state["times"]) == 6
    row = bench().splitlines()[1 + len(cache["times"])].split()
    assert row[1:5] == ["out", "of", "memory", "–"] and row[6] == "µs"


@pytest.fixture(scope="module")
def orders():
    return json.loads(output("bench", "order", "--json"))


def test_bench_order_counts(orders):
    assert (orders["T"], orders["D"], orders["seed"]) == (256, 64, 0)
    cells = {(r["deviation"], r["variant"]) for r in orders["results"]}
    names = [f"{kind}{n}" for kind in ["taylor", "centred_taylor"] for n in range(1, 11)]
    assert cells == {(d, name) for d in [0.5, 1, 2, 3] for name in names}
    assert len(orders["results"]) == 80


def test_bench_order_falls(orders):
    rms = {(r["deviation"], r["centred"], r["order"]): r["rms"] for r in orders["results"]}
    for centred in [False, True]:
        for n in range(1, 10):
            assert rms[0.5, centred, n + 1] < rms[0.5, centred, n]
        for n in range(2, 11, 2):
            assert rms[0.5, centred, n] < rms[1, centred, n] < rms[2, centred, n]


@pytest.mark.parametrize("deviation, order, centred", [(0.5, 4, True), (2, 3, False), (3, 2, True)])
def test_bench_order_against_a_formula_of_its_own(orders, deviation, order, centred):
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(256, 64, generator=random, dtype=torch.float64) for _ in range(3))
    seen = torch.ones(256, 256, dtype=torch.float64).tril()
    scores = deviation * q @ k.T / 8
    truth = torch.softmax(scores.masked_fill(seen == 0, -math.inf), -1) @ v
    if centred:
        scores = scores - (scores * seen).sum(-1, keepdim=True) / seen.sum(-1, keepdim=True)
    weights = sum(scores**n / math.factorial(n) for n in range(order + 1)) * seen
    # An odd order has a floor: the least mean weight of the next even order.
    x = torch.linspace(-20, 0, 2_000_001, dtype=torch.float64)
    floor = sum(x**n / math.factorial(n) for n in range(order + 2)).min().item() if order % 2 else -math.inf
    result = weights @ v / torch.maximum(weights.sum(-1, keepdim=True), floor * seen.sum(-1, keepdim=True))
    error = (result - truth).norm(dim=-1) / truth.norm(dim=-1)
    found = next(
        r
        for r in orders["results"]
        if (r["deviation"], r["order"], r["centred"]) == (deviation, order, centred)
    )
    assert found["rms"] == pytest.approx(error.square().mean().sqrt().item(), rel=1e-6)
    assert found["median"] == pytest.approx(error.median().item(), rel=1e-6)


def test_bench_order_seed(orders):
    again = json.loads(output("bench", "order", "--json", "--seed", "0"))
    other = json.loads(output("bench", "order", "--json", "--seed", "7"))
    assert again == orders
    assert other["seed"] == 7 and other["results"] != orders["results"]


def test_bench_order_table_and_picture(tmp_path, orders):
    picture = tmp_path / "order.svg"
    text = output("bench", "order", "--svg", str(picture))
    head, *rows = text.splitlines()[1:]
    assert head.split()[0] == "order" and len(rows) == 10
    first = [r["rms"] for r in orders["results"] if r["order"] == 1]
    assert rows[0].split() == ["1"] + [f"{x:.1e}" for x in first]
    drawn = lines(picture)
    assert [len(line) for line in drawn] == [10] * 8
    assert "σ = 0.5, centred" in texts(picture)
    # Higher in the picture: the larger error.
    by_line = [r["rms"] for r in orders["results"]]
    heights = [y for line in drawn for _, y in line]
    ranked = sorted(range(80), key=lambda i: by_line[i])
    assert all(heights[a] >= heights[b] - 0.02 for a, b in zip(ranked, ranked[1:]))
    assert os.listdir(tmp_path) == ["order.svg"]
