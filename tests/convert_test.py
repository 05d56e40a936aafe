"""horner convert: a small model becomes a hybrid; every stage resumes; every command opens the result."""

import json
import os
import signal
import subprocess
import time

import pytest

HORNER = os.environ["HORNER"]
SIZES = {"--near": 8, "--length": 96, "--measure-tokens": 64, "--batch": 2, "--trial-steps": 3, "--transfer-steps": 4, "--heal-steps": 4,
         "--evaluate-sequences": 3, "--tokens": 1024}  # fmt: skip


def horner(*words, code=0):
    done = subprocess.run([HORNER, *map(str, words)], capture_output=True, text=True, timeout=300)
    assert (done.returncode == 0) == (code == 0), done.stdout + done.stderr
    return done.stdout if code == 0 else done.stderr


def command(given, out, *more):
    sizes = [word for name, value in SIZES.items() if name not in more for word in (name, value)]
    return ["convert", "--model", given / "teacher", "--data", given / "text.bin", "--out", out, *sizes, *more]


@pytest.fixture(scope="module")
def given(tmp_path_factory):
    """A token file and a model that has seen it."""
    folder = tmp_path_factory.mktemp("given")
    (folder / "text").write_text("".join(f"the number {i * 7919 % 1000} is not {i * 104729 % 997}; " for i in range(6000)))
    horner("data", "pack", folder / "text", "--out", folder / "text.bin")
    horner("train", "--model", "tiny", "--data", folder / "text.bin", "--steps", 80, "--batch", 8, "--learning-rate", 0.01, "--length", 96, "--threads", 1,
           "--evaluate-sequences", 2, "--out", folder / "teacher")  # fmt: skip
    return folder


def convert(given, out, *more, code=0):
    return horner(*command(given, out, *more), code=code)


@pytest.fixture(scope="module")
def converted(given):
    out = given / "converted"
    convert(given, out, "--share", 0.5, "--costs", "--objections", "--forms", "hedgehog8", "delta")
    return out


def test_bench_times_the_result_and_its_teacher(given, converted):
    words = ["bench", "decode", "--model", converted, given / "teacher", "--repeats", 1, "--json"]
    models = json.loads(horner(*words))["models"]
    for model in models:
        assert [t["context"] for t in model["times"]][:3] == [1024, 4096, 16384]
        assert all(t["us"] > 0 for t in model["times"])
        plan = json.loads(horner("plan", "--model", model["model"], "--dtype", "float32", "--json"))
        assert [t["bytes"] for t in model["times"]] == plan["bytes"][: len(model["times"])]
    ours, theirs = ([t["bytes"] for t in model["times"]] for model in models)
    assert all(a < b for a, b in zip(ours[1:], theirs[1:]))


def test_the_result_fits_its_budget(converted):
    numbers = json.loads((converted / "convert.json").read_text())
    plan = json.loads((converted / "work" / "plan.json").read_text())
    assert numbers["plan"] == plan
    assert 0 < plan["bytes"] <= plan["budget"] == 0.5 * plan["cache_bytes"]
    assert {head["form"] for head in plan["heads"]} <= {"cache", "hedgehog8", "delta"}
    assert len(plan["heads"]) == 8 and all(head["why"] for head in plan["heads"])
    names = [model["name"] for model in numbers["probes"]["models"]]
    assert names == ["teacher", "after transfer", "converted", "control (teacher, tuned alike)", "near keys only", "state only",
                     "without these heads"]  # fmt: skip
    assert [c["measure"] for c in numbers["correlations"]] == ["order", "entropy", "distance", "retrieval", "kl"]
    assert len(numbers["heal"]) == len(numbers["control"]) == 4 and numbers["tokens"] == 8 * 2 * 96


def test_choices_are_of_training_text_and_results_of_validation_text(given, tmp_path):
    numbers = []
    for name in ("one", "two"):
        (tmp_path / name).write_text("".join(f"{name} and {i * 7919 % 1000}; " for i in range(200)))
        horner("data", "pack", tmp_path / name, "--out", tmp_path / f"{name}.bin")
        convert(given, tmp_path / f"{name}-out", "--validation", tmp_path / f"{name}.bin", "--costs", "--forms", "hedgehog8", "delta", "--until", "plan")
        numbers.append(json.loads((tmp_path / f"{name}-out/convert.json").read_text()))
    one, two = numbers
    assert one["plan"] == two["plan"] and one["correlations"] == two["correlations"]
    assert (tmp_path / "one-out/work/measures.json").read_text() == (tmp_path / "two-out/work/measures.json").read_text()
    assert [k["by"] for k in one["kept"]] == [k["by"] for k in two["kept"]]
    assert all(a != b for k, m in zip(one["kept"], two["kept"]) for (_, a), (_, b) in zip(k["losses"], m["losses"]))


def test_transfer_brings_heads_nearer_to_the_teacher(given, tmp_path):
    plan = {"near": 8, "tokens": 1024, "heads": [{"layer": i, "head": h, "form": "hedgehog8"} for i in (0, 1) for h in range(4)]}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    convert(given, tmp_path / "out", "--plan", tmp_path / "plan.json", "--until", "transfer", "--transfer-steps", 60)
    steps = json.loads((tmp_path / "out" / "convert.json").read_text())["transfer"]
    assert sum(steps[-10:]) < 0.9 * sum(steps[:10]), steps


def test_every_command_opens_the_result(given, converted, tmp_path):
    config = json.loads((converted / "config.json").read_text())
    assert any("|" in layer or "lolcats" in layer or "+" in layer for layer in config["horner_variant"])
    said = json.loads(horner("generate", "--model", converted, "--prompt", "the number", "--tokens", 5, "--temperature", 0, "--json"))
    assert len(said["tokens"]) == 5 and said["state_bytes"] > 0
    horner("train", "--model", converted, "--data", given / "text.bin", "--steps", 2, "--batch", 2, "--length", 64, "--evaluate-sequences", 2,
           "--out", tmp_path / "run")  # fmt: skip
    horner("plan", "--train", "--model", converted, "--length", 64)


def test_diagnose_measures_the_heads_that_have_weights(given, tmp_path):
    plan = {"near": 8, "tokens": 1024, "heads": [{"layer": i, "head": h, "form": "hedgehog8"} for i in (0, 1) for h in (0, 2)]}
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    convert(given, tmp_path / "out", "--plan", tmp_path / "plan.json", "--until", "transfer")
    variants = json.loads((tmp_path / "out" / "config.json").read_text())["horner_variant"]
    assert variants[0] == "lolcats:features=hedgehog(8),near=window(8)|softmax|lolcats:features=hedgehog(8),near=window(8)|softmax"
    horner("diagnose", "--model", tmp_path / "out", "--text", given / "text", "--length", 48, "--out", tmp_path / "diagnosis")
    heads = json.loads((tmp_path / "diagnosis" / "diagnosis.json").read_text())["heads"]
    assert [(head["layer"], head["head"]) for head in heads] == [(0, 1), (0, 3), (1, 1), (1, 3)]


def without_times(folder):
    numbers = json.loads((folder / "convert.json").read_text())
    del numbers["seconds"]
    return numbers


def test_an_interrupted_conversion_resumes_to_the_same_numbers(given, converted, tmp_path):
    out, options = tmp_path / "out", ["--share", 0.5, "--costs", "--objections", "--forms", "hedgehog8", "delta"]
    for seconds in (0.5, 0.9, 1.4, 2.0):
        child = subprocess.Popen([HORNER, *map(str, command(given, out, *options))], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        time.sleep(seconds)
        child.send_signal(signal.SIGINT)
        error = child.communicate(timeout=120)[1]
        assert child.returncode in (0, 130, -2), error
        assert child.returncode != 130 or "run the same command to resume" in error
    convert(given, out, *options)
    assert without_times(out) == without_times(converted)
    assert (out / "model.safetensors").read_bytes() == (converted / "model.safetensors").read_bytes()


def test_other_settings_do_not_mix(given, converted):
    assert "has 'share' 0.5, not 0.25" in convert(given, converted, "--share", 0.25, "--costs", "--objections", "--forms", "hedgehog8", "delta", code=1)


@pytest.mark.parametrize(
    "options, message",
    [
        (["--forms", "hedgehog8", "headgehog8"], "no form 'headgehog8' of a head; possible:"),
        (["--near", 40], "--length must exceed --near by more than 64, got 96 and 40"),
        (["--layers", 2], "no layer 2; the model has 0 to 1"),
        (["--bytes", 100], "more than the budget of 100"),
        (["--distil", 2], "--distil must be 0 to 1, got 2"),
        (["--by", "luck"], "luck"),
        (["--keep", 2, "--share", 0.5], "excludes"),
        (["--plan", "absent.json"], "absent.json"),
    ],
)
def test_errors_say_what_is_wrong(given, tmp_path, options, message):
    assert message in convert(given, tmp_path / "out", *options, code=1)


def test_a_folder_that_is_not_a_conversion_is_left_alone(given, tmp_path):
    (tmp_path / "mine").write_text("x")
    assert "is not empty and not a conversion" in convert(given, tmp_path, code=1)
