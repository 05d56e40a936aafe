"""Sharded and context-parallel training, recomputation, and what 'horner plan --train' says of them."""
import glob
import json
import os
import shutil
import subprocess

import pytest
import torch
from comm_test import ENVIRONMENT, TORCHRUN, alone, free_port, good, ranks, started
from safetensors.torch import load_file

HORNER = os.environ["HORNER"]
TOOL = os.path.join(os.path.dirname(HORNER), "scale_tool")
LONG = os.environ.get("HORNER_LONG")
VARIANTS = ["softmax", "l2", "taylor2", "gated", "gated_delta"]
STEPS = 100 if LONG else 5


def tool(world, *arguments, **more):
    """What the ranks print."""
    runs = ranks(world, *arguments, tool=TOOL, **more) if world > 1 else [started(TOOL, *arguments, **more)]
    seconds = 600 if LONG else 120
    out = [p.communicate(timeout=seconds) for p in runs]
    assert [p.returncode for p in runs] == [0] * world, [e for _, e in out]
    return [json.loads(line) for o, _ in out for line in o.splitlines()]


@pytest.fixture(scope="module")
def single(tmp_path_factory):
    """One process on whole batches, per variant, in float32 and in double."""
    done = {}

    def run(variant):
        if variant not in done:
            folder = tmp_path_factory.mktemp("single")
            alone("train", folder / "float", variant, 1, STEPS)
            alone("train", folder / "double", variant, 1, STEPS, DOUBLE="1")
            done[variant] = load_file(folder / "float0"), load_file(folder / "double0")
        return done[variant]

    return run


WAYS = {"none": {}, "optimizer": {"SHARD": "optimizer"}, "gradients": {"SHARD": "gradients"}, "context": {"CONTEXT": "all"},
        "both": {"SHARD": "gradients", "CONTEXT": "2", "RECOMPUTE": "1"},
        "optimizer, micro-batches": {"SHARD": "optimizer", "MICRO": "3"},
        "gradients, micro-batches": {"SHARD": "gradients", "MICRO": "3"}}  # fmt: skip
QUICK = [(2, "softmax", "optimizer"), (2, "taylor2", "gradients"), (4, "l2", "context"), (2, "gated_delta", "context"),
         (4, "taylor2", "both"), (2, "l2", "optimizer, micro-batches"), (2, "softmax", "gradients, micro-batches")]  # fmt: skip
ALL = [(world, variant, way) for variant in VARIANTS for way in WAYS for world in (2, 4)]


@pytest.mark.parametrize("world, variant, way", ALL if LONG else QUICK)
def test_ranks_are_one_process(world, variant, way, single, tmp_path):
    """Losses and weights after steps of SGD, within the bound of comm_test."""
    float32, truth = single(variant)
    more = {k: str(world) if v == "all" else v for k, v in WAYS[way].items()}
    for process in ranks(world, "train", tmp_path / "many", variant, more.pop("MICRO", 1), STEPS, **more):
        good(process)
    many = load_file(tmp_path / "many0")
    assert len(many) > 10
    for name, got in many.items():
        wanted = truth[name].double()
        error = (got.double() - wanted).abs().max()
        own = (float32[name].double() - wanted).abs().max()
        assert error <= 2 * own + 16 * 2**-24 * wanted.abs().max(), (name, error, own, wanted.abs().max())
        for r in range(1, world):
            assert torch.equal(load_file(tmp_path / f"many{r}")[name], got), f"rank {r} differs in {name}"


@pytest.mark.parametrize("variant", ["softmax", "gated_delta"])
def test_recomputation_changes_no_bit(variant, single, tmp_path):
    plain, _ = single(variant)
    alone("train", tmp_path / "again", variant, 1, STEPS, RECOMPUTE="1")
    again = load_file(tmp_path / "again0")
    assert set(again) == set(plain) and all(torch.equal(again[name], plain[name]) for name in plain)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    shutil.copy(__file__, folder / "text")
    subprocess.run([HORNER, "data", "pack", str(folder / "text"), "--out", str(folder / "data")], check=True,
                   capture_output=True)  # fmt: skip
    return folder / "data"


def train(world, out, data, *options):
    command = [HORNER, "train", "--out", str(out), "--data", str(data), "--batch", "12", "--length", "24", "--evaluate-sequences",
               "4", "--seed", "3", "--decay-steps", "50", *map(str, options)]  # fmt: skip
    launcher = [TORCHRUN, "--standalone", "--no-python", f"--nproc-per-node={world}"] if world > 1 else []
    done = subprocess.run(launcher + command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def moments(run, step):
    """Mean and square of every parameter, put together from the parts of a checkpoint."""
    parts = {}
    for file in glob.glob(str(run / f"checkpoint-{step:08}" / "optimizer*.safetensors")):
        for name, x in load_file(file).items():
            base, _, first = name.partition("@")
            parts.setdefault(base, {})[int(first or 0)] = x.flatten()
    return {name: torch.cat([x for _, x in sorted(each.items())]) for name, each in parts.items()
            if name.startswith(("mean.", "square."))}  # fmt: skip


def test_checkpoints_open_with_any_number_of_ranks(data, tmp_path):
    """Written by 4 ranks, opened and written again by 1, then by 3: weights and optimizer keep every bit."""
    settings = {"batch": 12, "length": 24, "evaluate-sequences": 0, "bucket": 0.05}
    runs = [tmp_path / str(i) for i in range(3)]
    train(4, runs[0], data, "--steps", 3, "--shard", "gradients", "--bucket", 0.05)
    assert len(glob.glob(str(runs[0] / "checkpoint-00000003" / "optimizer-0000?-of-00004.safetensors"))) == 4
    tool(1, "reopen", runs[0], runs[1], json.dumps(settings))
    tool(3, "reopen", runs[1], runs[2], json.dumps(settings | {"shard": "optimizer"}))
    tool(2, "reopen", runs[0], tmp_path / "two", json.dumps(settings | {"shard": "none"}))
    assert len(glob.glob(str(runs[2] / "checkpoint-00000003" / "optimizer-0000?-of-00003.safetensors"))) == 3
    four, weights = moments(runs[0], 3), load_file(runs[0] / "checkpoint-00000003" / "model.safetensors")
    assert sum(x.numel() for n, x in four.items() if n.startswith("mean.")) == sum(x.numel() for x in weights.values())
    assert all(x.abs().max() > 0 for n, x in four.items())
    for run in (*runs[1:], tmp_path / "two"):
        got, w = moments(run, 3), load_file(run / "checkpoint-00000003" / "model.safetensors")
        assert set(got) == set(four) and all(torch.equal(got[n], four[n]) for n in four)
        assert set(w) == set(weights) and all(torch.equal(w[n], weights[n]) for n in weights)
    train(3, runs[0], data, "--steps", 5, "--resume", "--shard", "optimizer")  # and training goes on
    assert json.loads((runs[0] / "result.json").read_text())["steps"] == 5


def numbers(run, *names):
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {name: [line[name] for line in lines if name in line] for name in names}


def test_a_run_over_parts_of_sequences_is_that_of_one_process(data, tmp_path):
    """With validation over the parts; resumed by one process that recomputes, then by two again."""
    options = ["--attention", "gated_delta,softmax", "--evaluate-every", 2, "--steps"]
    train(1, tmp_path / "one", data, *options, 6)
    train(2, tmp_path / "two", data, *options, 2, "--context-parallel", 2)
    train(1, tmp_path / "two", data, *options, 4, "--resume", "--context-parallel", 1, "--recompute")
    train(2, tmp_path / "two", data, *options, 6, "--resume", "--context-parallel", 2, "--recompute", "--shard", "gradients")
    names = "loss", "gradient_norm", "validation_loss", "validation_accuracy"
    one, two = (numbers(tmp_path / run, *names) for run in ("one", "two"))
    assert [len(one[name]) for name in names] == [6, 6, 3, 3]
    for name in names:
        assert two[name] == pytest.approx(one[name], rel=3e-5), name  # as test_two_processes_give_the_losses_of_one


SETTINGS = {"model": "tiny", "length": 64, "batch": 8, "evaluate-sequences": 0,
            "model-config": {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 4}}  # fmt: skip

WIDE = {"model-config": SETTINGS["model-config"] | {"num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 64}}
PLAIN = {"model": "gpt2", "model-config": {"n_embd": 256, "n_head": 4, "n_layer": 4, "vocab_size": 256, "n_inner": 512}}


MEMORY = [(world, {"attention": variant, **({"context-parallel": world} if way == "context" else {"shard": way})})
          for variant in VARIANTS for way in ("none", "optimizer", "gradients", "context") for world in (2, 4)]  # fmt: skip


@pytest.mark.parametrize("world, more", [*(MEMORY if LONG else []),
                                         (2, {"shard": "none"}), (2, {"shard": "optimizer"}), (4, {"shard": "gradients"}),
                                         (2, {"shard": "gradients", "micro-batch": 2}),
                                         (2, {"context-parallel": 2, "attention": "gated_delta"}),
                                         (4, {"context-parallel": 2, "attention": "gated_decay"}),
                                         (2, {"context-parallel": 2, "attention": "entmax15"}),
                                         (2, {"context-parallel": 2, "attention": "softmax", "recompute": True}),
                                         (2, {"context-parallel": 2, "attention": "taylor2", **WIDE}),
                                         (2, {"context-parallel": 2, "attention": "retention", "length": 256, **WIDE}),
                                         (4, {"context-parallel": 4, "attention": "gated_delta", **WIDE}),
                                         (1, {"attention": "gla", **WIDE}), (1, {"length": 256, **PLAIN}),
                                         (1, {"length": 256, "micro-batch": 2}),
                                         (2, {"dtype": "bfloat16", "shard": "gradients"})])  # fmt: skip
def test_memory_and_traffic_are_as_planned(world, more):
    """Bytes on the sockets of each process, and of torch's tensors at their peak. The plan is of the process that takes the
    most: rank 0 of four ranks of a sequence receives no state, and takes less."""
    for rank, got in enumerate(tool(world, "steps", json.dumps(SETTINGS | {"bucket": 1} | more), 4)):
        print(f"{world} ranks, {more}: rank {rank} {got['peak'] / 1e6:.1f} MB of {got['planned'] / 1e6:.1f}")
        assert got["sent"] == pytest.approx(got["traffic"], rel=0.01), (rank, got)
        least = 0.8 if more.get("context-parallel") == 4 and rank == 0 else 0.9
        assert got["planned"] * least <= got["peak"] <= got["planned"] * 1.1, (rank, got)


def test_messages_overlap_with_computation(tmp_path):
    file = tmp_path / "trace"
    tool(2, "steps", json.dumps(SETTINGS | {"shard": "gradients", "bucket": 0.3}), 3, HORNER_TRACE=str(file))
    for r in range(2):
        events = json.loads((tmp_path / f"trace.{r}").read_text())["traceEvents"]

        def spans(name):
            return [(e["ts"], e["ts"] + e["dur"]) for e in events if e["name"] == name]

        def within(inner, outer):
            return sum(any(a <= x and y <= b for a, b in outer) for x, y in inner)

        buckets, gathers = len(spans("reduce-scatter")), spans("all-gather")
        assert buckets > 10 and within(spans("reduce-scatter"), spans("backward")) > buckets / 2
        assert len(gathers) == buckets
        # Each layer waits for its own weights and runs before later layers have theirs.
        waits = [sum(a <= x and y <= b for x, y in spans("wait for weights")) for a, b in spans("forward")]
        assert max(waits) >= SETTINGS["model-config"]["num_hidden_layers"], waits
        assert all(n == 0 or n > 1 for n in waits), waits


STATES = ["taylor2", "linear_decay", "gated_delta", "kda", "retention"]
BLOCKS = ["softmax", "gated", "l2", "gated_decay", "forgetting", "alibi", "streaming", "sink", "ssmax"]
ALL_KEYS = ["entmax15", "cumulative_gate"]
SMALLER = ["taylor2", "linear_decay", "retention", "linear_relu", "raw_taylor2", "power2"]  # than a state: blocks of few keys of many channels
QUICK_SPLIT = ["taylor2", "linear_decay", "gated_delta", "softmax", "gated_decay", "streaming", "entmax15"]


@pytest.mark.parametrize("packed", [0, 1])
@pytest.mark.parametrize("variant", STATES + BLOCKS + ALL_KEYS if LONG else QUICK_SPLIT)
def test_a_sequence_over_ranks(variant, packed):
    """Outputs and gradients of every token are those of one process; states travel where there are some, and blocks of keys
    where the sums over them can be merged."""
    for got in tool(3, "attend", variant, 384, 16, packed, ALONE="1"):
        assert got["travels"] == ("states" if variant in STATES else "blocks of keys" if variant in BLOCKS else "all keys")
        assert len(got["errors"]) >= 4
        assert max(got["errors"].values()) < 2e-5, got


CUTS = [0, 54, 128, 129, 201, 308, 384]  # of the packed sequences of scale_tool
BACK = {"linear_decay": 384, "gated_delta": 384, "gla": 384, "gated_decay": 384, "forgetting:mask=window(17)": 17,
        "gated_decay:mask=window(17)": 17, "gated_decay:mask=streaming(3,9)": 384}  # fmt: skip


@pytest.mark.parametrize("packed, token", [(0, 0), (0, 197), (0, 250), (1, 20), (1, 201), (1, 250)])
def test_a_gate_that_is_nan_spoils_the_rows_that_see_a_key_before_it(packed, token):
    """Of one packed sequence, or of a window; the first gate has none. Other rows are those of one process."""
    cuts = CUTS if packed else [0, 384]
    begin, end = max(c for c in cuts if c <= token), min(c for c in cuts if c > token)
    for got in tool(3, "attend", " ".join(BACK), 384, 16, packed, ALONE="1", NAN_GATE=str(token)):
        rows = [t for t in range(token, end) if max(begin, t + 1 - BACK[got["variant"]]) < token and t // 128 == got["rank"]]
        assert got["same_nan"] and got["rows_of_nan"] == 2 * 16 * len(rows), got
        assert max(got["errors"].values()) < 2e-5, got


@pytest.mark.parametrize("variant", SMALLER)
def test_the_smaller_of_state_and_block_travels(variant):
    for got in tool(2, "attend", variant, 48, 64, 0, ALONE="1"):
        assert got["travels"] == "blocks of keys" and got["gathered"] < 100 and max(got["errors"].values()) < 2e-5, got
    base = ["--gpus", 2, "--context-parallel", 2, "--attention", variant, "--length"]
    assert [plan(*base, n)["along_the_sequence"] for n in (16, 65536)] == ["keys and values, in a ring", "states"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("packed", [0, 1])
def test_a_sequence_over_ranks_on_a_gpu(packed, dtype):
    """The same with the tensors of both ranks on one GPU, whose messages go through the CPU."""
    variants = " ".join(STATES + BLOCKS + ALL_KEYS)
    for got in tool(2, "attend", variants, 384, 16, packed, "--device", "cuda", "--dtype", dtype, ALONE="1"):
        assert (got["passed"] > 0) == (got["variant"] in BLOCKS)
        assert max(got["errors"].values()) < (1e-4 if dtype == "float32" else 0.03), got


@pytest.mark.skipif(not LONG, reason="minutes: make test-long")
@pytest.mark.parametrize("variant", ["linear", "gated_delta"])
def test_a_million_tokens_over_four_ranks(variant):
    """Memory that forward and backward add to a process: a quarter of that of one process, and the states; the result is
    the same; states travel, not keys."""
    got = tool(4, "attend", variant, 1 << 20, 16, 0)
    [one] = tool(1, "attend", variant, 1 << 20, 16, 0)
    again = tool(4, "attend", variant, 1 << 20, 16, 0, ALONE="1")
    for rank, checked in zip(got, again):
        assert rank["peak"] < 0.27 * one["peak"], (rank, one)
        assert rank["sent"] < 1e5
        assert max(checked["errors"].values()) < 1e-4, checked


@pytest.mark.skipif(not LONG, reason="minutes: make test-long")
def test_a_rank_of_a_ring_holds_one_block():
    """Less than one process with all keys, although sums and blocks are held twice; nothing is gathered."""
    got, [one] = tool(4, "attend", "softmax", 1 << 16, 64, 0), tool(1, "attend", "softmax", 1 << 16, 64, 0)
    for rank in got:
        assert rank["peak"] < 0.8 * one["peak"] and rank["gathered"] == 0, (rank, one)


def test_ranks_with_different_settings_are_refused(data, tmp_path):
    """The number of threads and the path of the data are a machine's own, but not what is there."""
    same = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    copy, other = (tmp_path / name for name in ("copy", "other"))
    shutil.copy(data, copy)
    (tmp_path / "text").write_text("another text " * 400)
    subprocess.run([HORNER, "data", "pack", str(tmp_path / "text"), "--out", str(other)], check=True, capture_output=True)
    for name, two, wanted in (("seed", (1, 2), "rank 0 has 'seed' 1, but rank 1 has 2; start all processes with the same options"),
                              ("threads", (1, 2), ""), ("data", (data, copy), ""),
                              ("data", (data, other), "rank 1 has other 'data'"), ("validation", (data, copy), ""),
                              ("validation", (data, other), "rank 1 has other 'validation'")):  # fmt: skip
        out = tmp_path / f"{name}-{len(wanted)}"
        options = [{"data": data, "length": 24, "steps": 2, name: value} for value in two]
        both = [started(HORNER, "train", "--out", out, *(word for key, x in options[r].items() for word in (f"--{key}", x)),
                        RANK=str(r), **same) for r in range(2)]  # fmt: skip
        codes, said = zip(*[(p.wait(60), p.stderr.read()) for p in both])
        assert codes == ((2, 2) if wanted else (0, 0)) and wanted in said[1], said


def test_ranks_whose_devices_exchange_other_tensors_are_refused():
    """Here rank 1 has an execution that cannot merge blocks of keys, as on an older GPU."""
    done = [p.communicate(timeout=60) + (p.returncode,) for p in ranks(2, "differ", tool=TOOL)]
    assert done[1][2] == 2 and "rank 1, whose part of a sequence is on cpu, cannot exchange the same" in done[1][1], done
    assert done[0][2] == 2 and "rank 1 failed with an error" in done[0][1], done


def plan(*options):
    return json.loads(subprocess.run([HORNER, "plan", "--train", "--json", *map(str, options)], check=True, capture_output=True,
                                     text=True).stdout)  # fmt: skip


def test_plan_adds_up():
    base = ["--model", "large", "--gpus", 8, "--length", 4096]
    none, optimizer, gradients = (plan(*base, "--shard", s) for s in ("none", "optimizer", "gradients"))
    n = none["parameters"]
    assert none["bytes"]["optimizer"] == 8 * n and none["bytes"]["weights"] == 4 * n
    assert optimizer["bytes"]["optimizer"] == pytest.approx(n, rel=1e-4)
    assert gradients["bytes"]["gradients"] == pytest.approx(n / 2, rel=1e-4)
    for p in (none, optimizer, gradients):
        assert p["bytes"]["all"] == pytest.approx(sum(v for k, v in p["bytes"].items() if k != "all"))
        assert p["sent_bytes"]["all"] == pytest.approx(2 * 7 / 8 * 4 * n, rel=1e-3)
    assert gradients["largest_batch"] >= optimizer["largest_batch"] > none["largest_batch"] > 0
    more = plan(*base, "--shard", "gradients", "--batch", gradients["largest_batch"])
    assert more["bytes"]["all"] <= 141e9 < plan(*base, "--shard", "gradients", "--batch", gradients["largest_batch"] + 1)["bytes"]["all"]
    again = plan(*base, "--recompute")
    assert again["bytes"]["activations"] < none["bytes"]["activations"] / 3
    shared = plan(*base, "--context-parallel", 8, "--attention", "gated_delta", "--bandwidth", 10)
    assert shared["times"] == [{"gigabytes_per_second": 10, "seconds": shared["sent_bytes"]["all"] / 1e10}]
    longer = plan(*base[:-1], 8192, "--context-parallel", 8, "--attention", "gated_delta")
    assert longer["sent_bytes"]["sequence"] == shared["sent_bytes"]["sequence"]  # states, whatever the length
    assert shared["along_the_sequence"] == "states" and none["along_the_sequence"] == ""
    for attention, along in (("softmax", "keys and values, in a ring"), ("gla", "keys and values, gathered"),
                             ("entmax15", "keys and values, gathered")):  # fmt: skip
        assert plan(*base, "--context-parallel", 8, "--attention", attention)["along_the_sequence"] == along


@pytest.mark.parametrize("options, said", [
    (["--gpus", "6", "--context-parallel", "4"], "'context-parallel' must divide the number of processes, 6, not 4"),
    (["--gpus", "4", "--context-parallel", "4", "--length", "10"], "'length' must be a multiple of 'context-parallel', 4, not 10"),
    (["--gpus", "2", "--context-parallel", "2", "--attention", "softmax:mask=full"],
     "variant 'softmax:mask=full' cannot divide a sequence over 2 ranks (context-parallel): its mask sees later tokens"),
    (["--model", "gpt2", "--length", "2048"], "'length' must be at most 1024, the learned positions of the model, not 2048"),
    (["--gpus", str(2**62)], "--gpus: must be 1 to 1048576"), (["--bucket", "1e300"], "'bucket' must be greater than 0 and below"),
    *[([option, str(2**62)], "choose a smaller --batch" if option != "--length" else "'batch' times 'length' must be at most")
      for option in ("--batch", "--micro-batches", "--length")],
    (["softmax"], "--attention softmax"), (["--bandwidth", "0"], "--bandwidth must be greater than 0"),
    (["--model", "huge"], "no model 'huge'")])  # fmt: skip
def test_plan_errors(options, said):
    done = subprocess.run([HORNER, "plan", "--train", *options], capture_output=True, text=True)
    assert done.returncode == 2 and said in done.stderr, done.stderr


@pytest.mark.parametrize("options, said", [
    (["--context-parallel", "2"], "'context-parallel' must divide the number of processes, 1, not 2; start them with torchrun"),
    (["--batch", str(2**40), "--length", str(2**40)], "'batch' times 'length' must be at most"),
    (["--evaluate-lengths", "64,2048", "--model", "gpt2", "--model-config", '{"n_embd": 16, "n_head": 1, "n_layer": 1}'],
     "'evaluate-lengths' must be at most 1024, the learned positions of the model, not 2048"),
    (["--shard", "all"], "'shard' must be 'none', 'optimizer' or 'gradients', not \"all\"")])  # fmt: skip
def test_training_errors(options, said, tmp_path):
    done = subprocess.run([HORNER, "train", "--out", str(tmp_path / "run"), "--steps", "1", *options], capture_output=True,
                          text=True)  # fmt: skip
    assert done.returncode == 2 and said in done.stderr, done.stderr
