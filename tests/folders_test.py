"""Nothing lost, nothing silent: one owner per folder; nothing written before everything is checked; damaged checkpoints, full
disks and signals; outputs that never destroy inputs."""

import fcntl
import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest

HORNER = os.environ["HORNER"]
LONG = "HORNER_LONG" in os.environ
SIZE = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 1, "num_key_value_heads": 1, "head_dim": 16, "vocab_size": 64}
TINY = {"model": "tiny", "task": "copy", "device": "cpu", "threads": 1, "batch": 2, "length": 16, "evaluate-sequences": 2, "model-config": SIZE}
ENV = {**os.environ, "OMP_WAIT_POLICY": "PASSIVE"}


def options(**more):
    settings = {**TINY, **{k.replace("_", "-"): v for k, v in more.items()}}
    return [w for k, v in settings.items() for w in (f"--{k}", v if isinstance(v, str) else json.dumps(v))]


def horner(*words, code=0, **more):
    done = subprocess.run([HORNER, *map(str, words)], capture_output=True, text=True, timeout=300, env=ENV, **more)
    assert done.returncode == code, (done.returncode, done.stdout + done.stderr)
    return done.stdout if code == 0 else done.stderr


def train(out, *words, code=0, **more):
    return horner("train", "--out", out, *words, code=code, **more)


def start(*words):
    return subprocess.Popen([HORNER, *map(str, words)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=ENV)


def lines(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def steps(run):
    return [line["step"] for line in lines(run) if "loss" in line]


def wait_until(true, seconds=60):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.005)


# One owner per folder.

REFUSED = r"is in use by process \d+ on \S+ since \d{4}-.* UTC; wait until it ends, or choose another --out"


def test_the_second_process_is_told_who_owns_the_folder(tmp_path):
    run = tmp_path / "run"
    first = start("train", "--out", run, *options(steps=100_000))
    wait_until(lambda: (run / "metrics.jsonl").exists())
    said = train(run, "--resume", code=2)
    assert re.search(REFUSED, said) and f"process {first.pid} on {os.uname().nodename} " in said
    first.kill()  # the kernel releases the lock; the file stays and is no obstacle
    first.wait()
    assert (run / ".lock").exists()
    second = start("train", "--out", run, "--resume")
    wait_until(lambda: f"process {second.pid} " in (run / ".lock").read_text())
    second.send_signal(signal.SIGINT)
    assert second.wait() == 130 and not (run / ".lock").exists()
    assert steps(run) == list(range(1, len(steps(run)) + 1))


def test_two_processes_race_for_a_run(tmp_path):
    run = tmp_path / "run"
    train(run, *options(steps=30, decay_steps=100_000, checkpoint_every=10))
    for i in range(50 if LONG else 6):
        pair = [start("train", "--out", run, "--resume", "--steps", 60 + 30 * i) for _ in range(2)]
        said = [p.communicate(timeout=120)[1] for p in pair]
        codes = [p.returncode for p in pair]
        assert 0 in codes and set(codes) <= {0, 2}, said
        for code, text in zip(codes, said):
            assert code == 0 or re.search(REFUSED, text), text
        assert steps(run) == list(range(1, 61 + 30 * i))


def test_two_processes_race_for_a_new_folder(tmp_path):
    for i in range(3):
        run = tmp_path / str(i)
        pair = [start("train", "--out", run, *options(steps=20), "--resume-or-start") for _ in range(3)]
        said = [p.communicate(timeout=120)[1] for p in pair]
        assert 0 in [p.returncode for p in pair], said
        assert steps(run) == list(range(1, 21)) and not (run / ".lock").exists()


def study_file(folder, **fields):
    path = folder / "study.json"
    path.write_text(json.dumps({"attention": ["softmax", "taylor1"], "settings": {k: v for k, v in TINY.items() if k != "task"} | {"steps": 30},
                                "tasks": ["copy"], **fields}))  # fmt: skip
    return path


def test_two_studies_share_a_folder(tmp_path):
    grid = study_file(tmp_path)
    for i in range(20 if LONG else 2):
        out = tmp_path / str(i)
        pair = [start("study", grid, "--out", out, "--jobs", 1) for _ in range(2)]
        said = [p.communicate(timeout=120)[1] for p in pair]
        assert [p.returncode for p in pair] == [0, 0], said
        for run in (out / "copy").glob("*/seed0"):
            assert steps(run) == list(range(1, 31))


def test_a_study_does_not_take_a_run_that_another_process_trains(tmp_path):
    grid, out = study_file(tmp_path), tmp_path / "out"
    run = out / "copy/softmax/seed0"
    other = start("train", "--out", run, *options(steps=1_000_000))
    wait_until(lambda: (run / "metrics.jsonl").exists())
    began = time.monotonic()
    assert f"in use by process {other.pid} " in horner("study", grid, "--out", out, code=2)
    assert time.monotonic() - began > 4  # it waits for runs that are ending
    assert not (out / "origin.json").exists() and not (out / "copy/taylor1").exists()
    other.kill()
    other.wait()


NO_LOCKS = '#include <errno.h>\nint flock(int file, int what) { (void)file, (void)what; errno = ENOLCK; return -1; }\n'


def test_a_file_system_without_locks_is_reported(tmp_path):
    (tmp_path / "none.c").write_text(NO_LOCKS)
    subprocess.run(["cc", "-shared", "-fPIC", "-o", tmp_path / "none.so", tmp_path / "none.c"], check=True)
    done = subprocess.run([HORNER, "train", "--out", tmp_path / "run", *options(steps=2)], capture_output=True, text=True,
                          env={**ENV, "LD_PRELOAD": str(tmp_path / "none.so")})  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "does not support locks (No locks available): make sure that no other process uses this folder" in done.stderr


def test_the_report_says_when_steps_repeat(tmp_path):
    run = tmp_path / "run"
    train(run, *options(steps=20))
    horner("report", run)
    assert "repeat" not in (run / "report.json").read_text()
    text = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(text + "".join(text.splitlines(keepends=True)[4:10]))
    done = subprocess.run([HORNER, "report", run], capture_output=True, text=True, env=ENV)
    said = "the steps of tiny on copy, seed 0, repeat or run backwards in 6 lines of its metrics.jsonl"
    assert done.returncode == 0 and said in done.stderr.lower(), done.stderr
    assert any(said in s.lower() for s in json.loads((run / "report.json").read_text())["summary"])


# Nothing is written before everything is checked.

@pytest.mark.parametrize("wrong", [
    {"attention": "sofmax"}, {"model": "tinny"}, {"device": "cuda"}, {"length": 10**15}, {"execution": "fast"},
    {"task": "text", "data": "nowhere.bin"}, {"micro_batch": 3}, {"model_config": {**SIZE, "head_dim": 15}}, {"model_config": {**SIZE, "vocab_size": 8}},
])  # fmt: skip
def test_a_wrong_setting_leaves_nothing(wrong, tmp_path):
    if wrong.get("device") == "cuda" and "GPU " in horner("info"):
        pytest.skip("this machine has a GPU")
    run = tmp_path / "runs" / "run"
    train(run, *options(steps=2, **wrong), code=2)
    assert list(tmp_path.iterdir()) == []
    train(run, *options(steps=2))
    assert steps(run) == [1, 2]


def test_a_folder_without_a_step_is_unused(tmp_path):
    train(tmp_path / "other", *options(steps=1))
    saved = json.loads((tmp_path / "other/settings.json").read_text())
    for i, how in enumerate([[], ["--resume"], ["--resume-or-start"]]):
        run = tmp_path / str(i)
        run.mkdir()
        (run / "settings.json").write_text(json.dumps({**saved, "attention": "sofmax", "batch": 64}))
        train(run, *options(steps=3, attention="l2"), *how)
        assert steps(run) == [1, 2, 3] and json.loads((run / "settings.json").read_text())["batch"] == 2


def test_resume_without_a_run_names_what_is_missing(tmp_path):
    run = tmp_path / "run"
    assert "no run to resume: " in (said := train(run, "--resume", code=2)) and "does not exist; start the run without --resume" in said
    assert not run.exists()
    run.mkdir()
    assert "has no settings.json; start the run without --resume" in train(run, "--resume", code=2)
    train(run, *options(steps=3))  # as it says
    saved = (run / "settings.json").read_text()
    (run / "settings.json").unlink()
    for how in ([], ["--resume"], ["--resume-or-start"]):
        said = train(run, *how, *options(steps=3), code=2)
        assert "has the checkpoint-00000003 of a run, but not its settings.json; restore that file, or choose another --out" in said
    shutil.rmtree(run / "checkpoint-00000003")
    assert "has the metrics.jsonl of a run" in train(run, "--resume", code=2)
    (run / "metrics.jsonl").unlink()
    assert "has the result.json of a run" in train(run, *options(steps=3), code=2)
    (run / "settings.json").write_text(saved)  # as it says
    train(run, "--resume")


def test_what_may_change_on_resume(tmp_path):
    run = tmp_path / "run"
    train(run, *options(steps=4, decay_steps=90, checkpoint_every=2))
    free = {"evaluate-every": 3, "checkpoint-every": 3, "keep": 1, "entropy-every": 2, "on-nan": "skip", "on-spike": "skip", "threads": 2,
            "evaluate-sequences": 1, "steps": 9}  # fmt: skip
    train(run, "--resume", *(str(w) for k, v in free.items() for w in (f"--{k}", v)))
    saved = json.loads((run / "settings.json").read_text())
    assert {k: saved[k] for k in free} == free and steps(run) == list(range(1, 10))
    assert [p.name for p in run.glob("checkpoint-*")] == ["checkpoint-00000009"]
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    for name, value in {"batch": 4, "length": 8, "seed": 1, "learning-rate": 1, "spike": 3, "decay-steps": 80, "attention": "l2", "dtype": "bfloat16"}.items():
        assert f"holds a run with {name} " in train(run, "--resume", f"--{name}", value, code=2)
    assert "has done 9 steps: 'steps' must be at least that, not 7" in train(run, "--resume", "--steps", 7, code=2)
    train(run, "--resume", "--steps", 9)  # as it says: finished
    assert before == {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    plain = tmp_path / "plain"
    train(plain, *options(steps=4))
    assert "holds a run with steps 4, not 5, and its learning rate was planned for these (decay-steps is not set)" in train(plain, "--resume", "--steps", 5, code=2)


def test_a_study_with_other_settings_changes_nothing(tmp_path):
    grid, out = study_file(tmp_path), tmp_path / "out"
    horner("study", grid, "--out", out, "--only", "*/softmax/*")
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    for change in ('{"steps": 7}', '{"steps": 60}', '{"batch": 4}'):
        assert "copy/softmax/seed0 holds a run with " in horner("study", grid, "--out", out, "--set", change, code=2)
        assert before == {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    horner("study", grid, "--out", out, "--set", '{"threads": 2}')  # of runs that are not done
    assert json.loads((out / "copy/softmax/seed0/settings.json").read_text())["threads"] == 1
    assert json.loads((out / "copy/taylor1/seed0/settings.json").read_text())["threads"] == 2


def test_a_run_that_failed_does_not_poison_its_study(tmp_path):
    grid, out = study_file(tmp_path, attention=["softmax"]), tmp_path / "out"
    assert "no model 'tinny'" in horner("study", grid, "--out", out, "--set", '{"model": "tinny"}', code=2)
    horner("study", grid, "--out", out)
    assert steps(out / "copy/softmax/seed0") == list(range(1, 31))


def test_other_folders_that_look_like_checkpoints_stay(tmp_path):
    run = tmp_path / "run"
    train(run, *options(steps=4, decay_steps=90, checkpoint_every=1, keep=1))
    for name in ("checkpoint-best", "checkpoint-00000004-copy"):
        shutil.copytree(run / "checkpoint-00000004", run / name)
    train(run, "--resume", "--steps", 8)
    assert sorted(p.name for p in run.glob("checkpoint-*")) == ["checkpoint-00000004-copy", "checkpoint-00000008", "checkpoint-best"]
    assert steps(run) == list(range(1, 9))


# Integrity.

def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at % len(data)] ^= 1
    path.write_bytes(data)


def test_a_damaged_checkpoint_falls_back_to_the_one_before(tmp_path):
    """And the run ends with the same weights as one that was never damaged."""
    settings = options(steps=6, decay_steps=20, checkpoint_every=2)
    for name in ("straight", "run"):
        train(tmp_path / name, *settings)
    run = tmp_path / "run"
    for i, file in enumerate(("model.safetensors", "optimizer.safetensors", "training.json", "config.json", "checksums.txt")):
        last = run / f"checkpoint-{6 + 2 * i:08d}"
        flip(last / file, 1000 + i)
        done = subprocess.run([HORNER, "train", "--out", run, "--resume", "--steps", str(8 + 2 * i)], capture_output=True, text=True, env=ENV)
        assert done.returncode == 0, done.stderr
        assert f"warning: {last} is damaged ({file} has changed); it is set aside as {last.name}.damaged" in done.stderr
        assert f"resuming from {run}/checkpoint-{4 + 2 * i:08d}" in done.stderr
        assert (run / f"{last.name}.damaged" / file).exists() and last.exists()
    assert steps(run) == list(range(1, 17))
    train(tmp_path / "straight", "--resume", "--steps", 16)
    for file in ("model.safetensors", "training.json"):
        ours, theirs = ((tmp_path / name / "checkpoint-00000016" / file).read_bytes() for name in ("run", "straight"))
        assert ours == theirs or file == "training.json" and {**json.loads(ours), "seconds": 0} == {**json.loads(theirs), "seconds": 0}


def test_without_a_good_checkpoint_the_run_stops_and_says_what_to_do(tmp_path):
    run = tmp_path / "run"
    train(run, *options(steps=4, decay_steps=20, checkpoint_every=2))
    for name in ("checkpoint-00000002", "checkpoint-00000004"):
        flip(run / name / "model.safetensors", 500)
    before = {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    said = train(run, "--resume", "--steps", 6, code=2)
    assert f"no checkpoint is left to resume from; to begin again at step 0, remove {run}/checkpoint-00000002 and the others" in said
    assert before == {p: p.read_bytes() for p in run.rglob("*") if p.is_file()}
    assert "is damaged: model.safetensors has changed" in horner("generate", "--model", run / "checkpoint-00000004", "--prompt", "a", code=2)
    for name in ("checkpoint-00000002", "checkpoint-00000004"):
        shutil.rmtree(run / name)
    train(run, "--resume", "--steps", 6)  # as it says
    assert steps(run) == list(range(1, 7))


def test_a_token_beyond_the_vocabulary_is_found_at_the_start(tmp_path):
    tokens = bytearray(random.Random(1).randrange(64) for _ in range(50_000))
    tokens[49_123] = 77  # in no sequence of the first steps
    (tmp_path / "data").write_bytes(b"".join(t.to_bytes(2, "little") for t in tokens))
    said = train(tmp_path / "run", *options(task="text", data=str(tmp_path / "data"), steps=2), code=2)
    assert f"{tmp_path}/data: token 49123 is 77, but the model's vocabulary has 64 tokens, 0 to 63" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("command", [
    ["list"], ["show", "softmax"], ["plan", "softmax"], ["info"], ["info", "--json"], ["--help"], ["train", "--help"], ["--version"], [],
    ["study", "quick", "--out", "none", "--list"], ["check", "--variant", "softmax", "--execution", "reference", "--dtype", "float32"],
])  # fmt: skip
def test_a_full_stdout_is_an_error(command):
    with open("/dev/full", "w") as full:
        done = subprocess.run([HORNER, *command], stdout=full, stderr=subprocess.PIPE, text=True, env=ENV)
    assert done.returncode == 2 and "cannot write to stdout: No space left on device" in done.stderr, done


def test_a_closed_stdout_is_an_error():
    done = subprocess.run([HORNER, "list"], stderr=subprocess.PIPE, text=True, preexec_fn=lambda: os.close(1), env=ENV)
    assert done.returncode == 2 and "cannot write to stdout" in done.stderr


def test_a_limit_of_file_sizes_is_a_message(tmp_path):
    def small_files():
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    (tmp_path / "text").write_text("a" * 10_000)
    for command in (["data", "pack", tmp_path / "text", "--out", tmp_path / "x.bin"], ["train", "--out", tmp_path / "run", *options(steps=2)]):
        done = subprocess.run([HORNER, *command], capture_output=True, text=True, preexec_fn=small_files, env=ENV)
        assert done.returncode == 2 and "cannot write" in done.stderr and "File too large" in done.stderr, done
    assert sorted(p.name for p in tmp_path.iterdir()) == ["run", "text"]


@pytest.mark.parametrize("asked, code", [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_signals_stop_a_study(asked, code, tmp_path):
    out = tmp_path / "out"
    child = start("study", study_file(tmp_path, settings={**TINY, "steps": 100_000}), "--out", out, "--jobs", 2)
    wait_until(lambda: list(out.glob("*/*/*/metrics.jsonl")))
    child.send_signal(asked)
    assert child.wait(timeout=60) == code
    assert list(out.glob("*/*/*/checkpoint-*")) and not (out / ".lock").exists()


def test_what_a_killed_pack_left_is_removed_by_the_next_one(tmp_path):
    """Also that of a later file; but not that of a process that lives."""
    (tmp_path / "text").mkdir()
    (tmp_path / "text/a").write_text("a" * 30_000_000)
    (tmp_path / "b").write_text("b")
    pack = ["data", "pack", tmp_path / "text", "--out", tmp_path / "x.bin", "--shard", 10_000_000]
    child = start(*pack)
    wait_until(lambda: list(tmp_path.glob("x_000001.bin.part-*")))
    child.send_signal(signal.SIGSTOP)
    horner("data", "pack", tmp_path / "b", "--out", tmp_path / "x.bin")
    assert len(list(tmp_path.glob("x_000001.bin.part-*"))) == 1
    child.kill()
    child.wait()
    foreign = tmp_path / "x.bin.part-of-something"
    foreign.write_text("kept")
    horner("data", "pack", tmp_path / "b", "--out", tmp_path / "x.bin")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["b", "text", "x.bin", "x.bin.part-of-something"]


def test_a_process_of_the_same_number_elsewhere_keeps_its_file(tmp_path):
    """In a container every command may be process 1: on a shared folder they must not write to one temporary file."""
    apart = ["unshare", "--pid", "--fork", "--kill-child"]
    if subprocess.run([*apart, "true"], capture_output=True).returncode != 0:
        pytest.skip("no PID namespaces here")
    (tmp_path / "b").write_text("b")
    theirs = [tmp_path / f"x.bin.part-1-{i}" for i in range(4)]
    files = [path.open("w") for path in theirs]
    for file in files:
        fcntl.flock(file, fcntl.LOCK_EX)
        file.write("theirs")
        file.flush()
    command = [*apart, HORNER, "data", "pack", tmp_path / "b", "--out", tmp_path / "x.bin"]
    subprocess.run([str(word) for word in command], check=True, capture_output=True, timeout=60)
    assert (tmp_path / "x.bin").exists()
    assert [path.read_text() for path in theirs] == ["theirs"] * 4


# Outputs never destroy inputs.

def everything(folder):
    return {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_pack_never_writes_to_its_inputs(tmp_path):
    src = tmp_path / "src"
    (src / "deep").mkdir(parents=True)
    (src / "a.txt").write_text("text")
    (src / "deep/b.txt").write_text("more")
    (tmp_path / "link.txt").symlink_to(src / "a.txt")
    os.link(src / "a.txt", tmp_path / "hard.txt")
    (tmp_path / "folder").symlink_to(src / "deep")
    before = everything(tmp_path)
    for out in ("src/a.txt", "link.txt", "hard.txt", "folder/b.txt", "src/../src/./a.txt"):
        for force in ([], ["--force"]):
            assert "is an input of this command; choose another output" in horner("data", "pack", src, "--out", tmp_path / out, *force, code=2)
    for out in ("src/new.bin", "src/deep/new.bin", "folder/new.bin"):
        assert "is inside the input" in horner("data", "pack", src, "--out", tmp_path / out, code=2)
    for out in ("link.txt", "hard.txt"):
        assert "is an input" in horner("data", "pack", src / "a.txt", "--out", tmp_path / out, code=2)
    os.link(src / "deep/b.txt", tmp_path / "x_000001.bin")
    assert "x_000001.bin' is an input" in horner("data", "pack", src, "--out", tmp_path / "x.bin", "--shard", 5, "--force", code=2)
    (tmp_path / "x_000001.bin").unlink()
    assert everything(tmp_path) == before


def test_other_files_are_replaced_only_with_force(tmp_path):
    (tmp_path / "a").write_text("text")
    notes = tmp_path / "notes.txt"
    notes.write_text("precious")
    said = horner("data", "pack", tmp_path / "a", "--out", notes, code=2)
    assert "notes.txt' exists and is not a file that this command writes; add --force to replace it" in said
    assert notes.read_text() == "precious"
    horner("data", "pack", tmp_path / "a", "--out", notes, "--force")  # as it says
    horner("data", "pack", tmp_path / "a", "--out", notes)  # it is a token file now
    (tmp_path / "empty").touch()
    horner("data", "pack", tmp_path / "a", "--out", tmp_path / "empty")
    assert "it is not a regular file" in horner("data", "pack", tmp_path / "a", "--out", "/dev/null", "--force", code=2)
    assert not Path("/dev/null").is_file()


def test_reports_and_charts_replace_only_their_own_kind(tmp_path):
    run = tmp_path / "run"
    train(run, *options(steps=2))
    for name in ("report.html", "report.json"):
        out = tmp_path / name
        out.mkdir()
        horner("report", run, "--out", out)
        horner("report", run, "--out", out)
        (out / name).write_text("<html>mine</html>")
        assert f"{name}' exists and is not a file that this command writes; add --force" in horner("report", run, "--out", out, code=2)
        assert (out / name).read_text() == "<html>mine</html>"
        horner("report", run, "--out", out, "--force")
    svg = tmp_path / "a.svg"
    bench = ["bench", "decode", "--shape", "1,1,256,16", "--variant", "softmax", "--svg", svg]
    horner(*bench)
    horner(*bench)
    svg.write_text('<svg xmlns="http://www.w3.org/2000/svg"></svg>')
    assert "add --force to replace it" in horner(*bench, code=2)


def test_diagnose_does_not_replace_its_text(tmp_path):
    run = tmp_path / "run"
    train(run, *options(steps=2, model_config={**SIZE, "vocab_size": 256}))
    text = tmp_path / "out/report.html"
    text.parent.mkdir()
    text.write_text("a text of some length, as html\n" * 9)
    command = ["diagnose", "--model", run, "--length", 32, "--out", tmp_path / "out"]
    assert "report.html' is an input of this command" in horner(*command, "--text", text, "--force", code=2)
    (tmp_path / "text").write_text(text.read_text())
    (tmp_path / "out/report.html").unlink()
    horner(*command, "--text", tmp_path / "text")
    horner(*command, "--text", tmp_path / "text")
    (tmp_path / "out/diagnosis.json").write_text("{}")
    assert "diagnosis.json' exists and is not" in horner(*command, "--text", tmp_path / "text", code=2)


def test_train_and_study_do_not_replace_files_of_others(tmp_path):
    mine = tmp_path / "mine"
    mine.mkdir()
    config = mine / "settings.json"
    config.write_text(json.dumps({**TINY, "steps": 2}))
    assert "is an input of this command" in train(mine, "--config", config, code=2)
    for how in ([], ["--resume"], ["--resume-or-start"]):
        assert "exists and is not a file that this command writes; choose another --out" in train(mine, *how, *options(steps=2), code=2)
    assert list(mine.iterdir()) == [config] and json.loads(config.read_text()) == {**TINY, "steps": 2}
    train(tmp_path / "run", "--config", config)  # as it says
    grid = study_file(tmp_path, attention=["softmax"])
    grid.rename(mine / "origin.json")
    assert "origin.json' is an input of this command" in horner("study", mine / "origin.json", "--out", mine, code=2)
    shutil.copy(mine / "origin.json", grid)
    assert "origin.json' exists and is not a file" in horner("study", grid, "--out", mine, code=2)
    assert {p.name for p in mine.iterdir()} == {"settings.json", "origin.json"}
