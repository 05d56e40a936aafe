"""horner generate --prompts: texts that are generated together are those that are generated alone."""

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

HORNER = os.environ.get("HORNER") or str(Path(__file__).parent.parent / "build" / "horner")
TOOL = str(Path(HORNER).parent / "model_tool")
PROMPTS = ["It was the best of times, it was the worst", "It", "It was the age of wisdom", "She", "x" * 70]
SHARED = "The same words begin every prompt, "
ROWS = ["softmax", "taylor2", "gated_conv", "linear_mamba", "gated_delta", "gated_decay@code", "near_taylor2",
        "softmax:mask=window(9)", "softmax:mask=chunks(16)", "softmax^2|retention^2", "linear_decay,softmax"]  # fmt: skip


def horner(*args, code=0, text=None):
    done = subprocess.run([HORNER, *map(str, args)], capture_output=True, text=True, timeout=120, input=text)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def new(folder, variant, preset="tiny", **config):
    subprocess.run([TOOL, "new", preset, variant, "3", folder, json.dumps({"initializer_range": 0.3, **config})], check=True)
    return folder


def generate(model, *args, text=None):
    """In double, in which sums of a batch and sums alone differ by nothing that samples show."""
    return json.loads(horner("generate", "--model", model, "--dtype", "float64", "--json", *args, text=text).stdout)


def together(model, prompts, *args):
    return generate(model, "--prompts", "-", *args, text="".join(p + "\n" for p in prompts))


def alone(model, prompts, *args, seed=0):
    return [generate(model, "--prompt", p, "--seed", seed + i, *args)["tokens"] for i, p in enumerate(prompts)]


def tokens(got):
    return [t["tokens"] for t in got["texts"]]


def expect_the_same(model):
    for options in (["--temperature", 0], ["--temperature", 1, "--top-k", 50]):
        options += ["--tokens", 20]
        got = together(model, PROMPTS, "--seed", 5, "--batch", 4, *options)
        wanted = alone(model, PROMPTS, *options, seed=5)
        assert tokens(got) == wanted and got["shared_tokens"] == 0
        assert len({tuple(t) for t in wanted}) == len(PROMPTS)  # the model tells them apart


@pytest.mark.parametrize("variant", ROWS)
def test_texts_are_those_of_each_prompt_alone(variant, tmp_path):
    expect_the_same(new(tmp_path / "model", variant))


def test_texts_with_learned_positions(tmp_path):
    sizes = {"n_embd": 32, "n_head": 2, "n_layer": 2, "n_inner": 64, "vocab_size": 256, "n_positions": 100, "eos_token_id": None}
    model = new(tmp_path / "model", "softmax", "gpt2", **sizes)
    expect_the_same(model)
    # The longest text reaches the last position and leaves; the others go on.
    got = together(model, PROMPTS, "--temperature", 0, "--tokens", 60)
    assert tokens(got) == alone(model, PROMPTS, "--temperature", 0, "--tokens", 60)
    assert [len(t["tokens"]) for t in got["texts"]] == [59, 60, 60, 60, 31]
    assert "at most 31 of the 60" in got["texts"][4]["remark"] and got["texts"][1]["remark"] == ""
    said = horner("generate", "--model", model, "--prompts", "-", text="a\n" + "x" * 101 + "\n", code=2)
    assert "standard input:2: the prompt has 101 tokens" in said.stderr


def test_texts_that_end_leave_the_others(tmp_path):
    """Tokens that end texts: some texts end at once, some never."""
    plain, model = new(tmp_path / "plain", "softmax"), tmp_path / "model"
    first = alone(plain, PROMPTS, "--temperature", 0, "--tokens", 20)
    ends = [first[0][7], first[2][0], first[4][-1]]
    new(model, "softmax", eos_token_id=ends)
    wanted = [t[: next((i + 1 for i, x in enumerate(t) if x in ends), 20)] for t in first]
    assert len({len(t) for t in wanted}) > 2
    for batch in (2, 5):
        got = together(model, PROMPTS, "--temperature", 0, "--tokens", 20, "--batch", batch)
        assert tokens(got) == wanted


@pytest.mark.parametrize("variant", ["softmax", "taylor2", "gated_conv", "softmax:mask=chunks(16)", "near_taylor2"])
def test_a_shared_beginning_is_read_once(variant, tmp_path):
    model = new(tmp_path / "model", variant)
    prompts = [SHARED + end for end in ("and then", "but", "a" * 40)] + [SHARED]
    got = together(model, prompts, "--tokens", 12)
    assert got["shared_tokens"] == len(SHARED) - 1  # the last prompt keeps a token of its own
    assert tokens(got) == alone(model, prompts, "--tokens", 12)
    # Prompts that differ at once share nothing.
    assert together(model, ["z", *prompts], "--tokens", 12)["shared_tokens"] == 0


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return new(tmp_path_factory.mktemp("models") / "model", "softmax")


def test_files_of_prompts(model, tmp_path):
    (tmp_path / "p.txt").write_text("one\r\ntwo \n")
    (tmp_path / "p.jsonl").write_text('"one"\n{"prompt": "two ", "id": 7}\n{"prompt": "a\\nb"}')
    text, json_lines = (generate(model, "--prompts", tmp_path / f, "--tokens", 4) for f in ("p.txt", "p.jsonl"))
    assert [t["prompt"] for t in text["texts"]] == ["one", "two "]
    assert [t["prompt"] for t in json_lines["texts"]] == ["one", "two ", "a\nb"]
    assert tokens(text) == tokens(json_lines)[:2]
    assert [t["prompt_tokens"] for t in json_lines["texts"]] == [3, 4, 3]
    assert text["state_bytes"] > 0 and text["tokens_per_second"] > 0


def test_text_is_printed_in_the_order_of_the_file(model, tmp_path):
    (tmp_path / "p.txt").write_text("first\nsecond\nthird\n")
    said = horner("generate", "--model", model, "--prompts", tmp_path / "p.txt", "--tokens", 5, "--batch", 2, "--dtype", "float64")
    got = generate(model, "--prompts", tmp_path / "p.txt", "--tokens", 5)
    assert said.stdout == "\n".join(t["prompt"] + t["text"] + "\n" for t in got["texts"])
    assert "15 tokens" in said.stderr


@pytest.mark.parametrize(
    "name, text, words",
    [
        ("p.txt", "", "p.txt is empty"),
        ("p.txt", "one\n\nthree\n", "p.txt:2: the prompt is empty"),
        ("p.txt", "one\n\n", "p.txt:2: the prompt is empty"),
        ("p.jsonl", '"one"\n{"text": "two"}\n', "p.jsonl:2: expected a JSON string, or an object"),
        ("p.jsonl", '"one"\n{"prompt": 2}\n', "p.jsonl:2: expected a JSON string, or an object"),
        ("p.jsonl", "[1, 2\n", "p.jsonl:1: expected a JSON string, or an object"),
        ("p.jsonl", '"one"\n""\n', "p.jsonl:2: the prompt is empty"),
    ],
)
def test_errors_name_the_line(model, tmp_path, name, text, words):
    (tmp_path / name).write_text(text)
    done = horner("generate", "--model", model, "--prompts", tmp_path / name, code=2)
    assert words in done.stderr and done.stdout == "" and done.stderr.count("\n") == 1


def test_errors_of_options(model, tmp_path):
    for args, words in [
        (["--prompts", tmp_path / "none.txt"], "cannot open"),
        (["--prompts", "-", "--prompt", "a"], "excludes"),
        (["--prompts", "-", "--prompt-file", "-"], "excludes"),
        (["--prompts", "-", "--batch", 0], "--batch"),
    ]:
        assert words in horner("generate", "--model", model, *args, text="a\n", code=2).stderr


def test_ctrl_c_prints_what_is_there(model):
    command = [HORNER, "generate", "--model", str(model), "--prompts", "-", "--tokens", "1000000", "--batch", "2", "--json"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        running.stdin.write("one\ntwo\nthree\n")
        running.stdin.close()
        time.sleep(3)
        running.send_signal(signal.SIGINT)
        got = json.loads(running.stdout.read())
        assert running.wait() == 130
    assert len(got["texts"][0]["tokens"]) > 1 and got["texts"][2]["tokens"] == []


# Sampling


@pytest.mark.parametrize("options", [{"temperature": 0.7}, {"temperature": 0.7, "top-k": 5}, {"temperature": 0.7, "top-p": 0.6},
                                     {"temperature": 3, "top-p": 0.95}, {"temperature": 0.7, "top-k": 9, "top-p": 0.3}])  # fmt: skip
def test_samples_follow_the_distribution(model, tmp_path, options):
    """First tokens of many seeds beside the probabilities that temperature, top-k and top-p leave."""
    save_file({"tokens": torch.tensor([list(b"It was")])}, tmp_path / "tokens")
    subprocess.run([TOOL, "logits", model, tmp_path / "tokens", tmp_path / "out"], check=True)
    logits = load_file(tmp_path / "out")["logits"][0, -1].double()
    p, order = (logits / options["temperature"]).softmax(-1).sort(descending=True)
    p[options.get("top-k", 256) :] = 0
    if "top-p" in options:  # tokens preceded by less than it
        p[p.cumsum(0) - p >= options["top-p"]] = 0
    p /= p.sum()
    n = 1000
    got = together(model, ["It was"] * n, "--tokens", 1, "--batch", n, *(str(x) for name, value in options.items() for x in ("--" + name, value)))
    found = torch.bincount(torch.tensor(tokens(got)).flatten(), minlength=256)[order] / n
    assert found[p == 0].sum() == 0
    assert ((found - p).abs() < 5 * (p * (1 - p) / n).sqrt() + 3 / n).all()
    assert (options["temperature"] < 1) or (found > 0).sum() > 64  # more than are looked at first
