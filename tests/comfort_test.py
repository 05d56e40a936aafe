"""What surrounds the work: words at the edges, help, completions, the manual page, terminals of any width, shared cores."""

import fcntl
import functools
import json
import os
import pty
import re
import select
import shutil
import struct
import subprocess
import termios
import time
from pathlib import Path

import pytest

HORNER = os.environ.get("HORNER") or str(Path(__file__).parent.parent / "build" / "horner")
SMALL = ["--steps", "2", "--batch", "1", "--length", "16", "--evaluate-sequences", "0", "--entropy-every", "0"]
COMMANDS = ["list", "show", "check", "bench", "plan", "data", "train", "study", "report", "diagnose", "convert", "generate", "info", "help"]
# What libraries say and users must not read.
FOREIGN = ["enforce fail", "json.exception", "alloc_cpu", "numel", "Storage size", "std::", "c10", "Could not convert", "basic_string", "stoi"]


def horner(*args, code=0, text=None, **more):
    done = subprocess.run([HORNER, *map(str, args)], capture_output=True, text=True, timeout=120, input=text, **more)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def error(*args, **more):
    """The last line on stderr of a command that fails, which must not be a library's."""
    said = horner(*args, code=2, **more).stderr
    line = said.splitlines()[-1]
    assert line.startswith("horner: ") and len(line) < 400, said
    assert not [word for word in FOREIGN if word in said], said
    long = re.search(r"\d{25,}", said)
    assert not long or long[0] in args, said
    return line


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs") / "run"
    horner("train", "--out", folder, *SMALL, "--json")
    return folder


# Words at the edges


@pytest.mark.parametrize(
    "args, words",
    [
        (["plan", "softmax", "--tokens", 2**63 - 1, "--heads", 2**63 - 1], ["--tokens", "--heads"]),
        (["plan", "softmax", "--dim", 2**62], ["--dim"]),
        (["plan", "softmax", "--tokens", "1e300"], ["--tokens", "an integer", "'1e300'"]),
        (["plan", "softmax", "--tokens", "9" * 30], ["--tokens", "64 bits"]),
        (["plan", "softmax", "--tokens"], ["--tokens needs a value"]),
        (["show", "softmax", "--dim", "9" * 20], ["--dim"]),
        (["show", "softmax", "--dim", 0], ["--dim", "1 to 65536", "got 0"]),
        (["bench", "attention", "--repeats", 10**12], ["--repeats", "32 bits"]),
        (["bench", "attention", "--repeats", 0], ["--repeats", "at least 1"]),
        (["check", "--seed", "1e30"], ["--seed"]),
        (["study", "quick", "--out", "x", "--jobs", -1], ["--jobs", "non-negative"]),
        (["study", "quick", "--out", "x", "--jobs", 10**6], ["--jobs", "1 to 1024"]),
        (["study", "quick", "--out", "x", "--minutes", "nan"], ["--minutes", "a number"]),
        (["data"], ["'pack', 'info' or 'tokenizer'"]),
        (["generate", "--model", "nowhere", "--prompt", "a"], ["'nowhere'", "Hugging Face folder", "horner train"]),
    ],
    ids=lambda x: " ".join(map(str, x))[:40],
)
def test_numbers_and_names_that_do_not_fit(args, words):
    line = error(*args)
    assert all(word in line for word in words), line


@pytest.mark.parametrize(
    "options, words",
    [
        (["--length", 10**11], ["out of memory", "800 GB", "free", "length"]),
        (["--batch", 10**18], ["choose a smaller batch or length"]),
        (["--model-config", '{"vocab_size": 1000000000000}'], ["out of memory"]),
        (["--model-config", '{"hidden_size": 1099511627000}'], ["smaller batch, length or model"]),
        (["--model-config", '{"hidden_size": 9999999999999}'], ["'hidden_size'", "1 to 1099511627775"]),
        (["--model-config", '{"hidden_sizee": 64}'], ["'hidden_sizee'", "did you mean 'hidden_size'"]),
        (["--model-config", '{"n_embd": 64}'], ["'n_embd'", "did you mean"]),
        (["--model-config", '{"horner_varian": "l2"}'], ["'horner_varian'", "'horner_variant'"]),
        (["--model-config", '{"horner": {"attention": "l2"}}'], ["'horner_variant'", "'horner.attention'"]),
        (["--model-config", '{"horner": {"key-shift": true}}'], ["'key-shift'", "'key_shift'"]),
        (["--model-config", '{"rope_scaling": 7}'], ["'rope_scaling'", "JSON object", "7"]),
        (["--threads", 100000], ["'threads'", "1025"]),
    ],
    ids=lambda x: " ".join(map(str, x))[:40],
)
def test_train_explains_sizes_and_fields(tmp_path, options, words):
    given = dict(zip(SMALL[::2], SMALL[1::2])) | dict(zip(options[::2], options[1::2]))
    line = error("train", "--out", tmp_path / "run", "--json", *[x for pair in given.items() for x in pair])
    assert all(word in line for word in words), line


def test_fields_that_a_config_has_can_be_changed(tmp_path):
    config = {"hidden_size": 32, "rope_scaling": None, "horner": {"key_shift": True}}
    horner("train", "--out", tmp_path / "run", "--json", *SMALL, "--model-config", json.dumps(config))


@pytest.mark.parametrize("text, words", [("{", ["line 1, column 2", "unexpected end"]), ('{"a": 1,\n  b}', ["line 2, column 3"]), ("[1, 2", ["line 1"])])
def test_broken_json_names_the_place(tmp_path, text, words):
    (tmp_path / "a.json").write_text(text)
    line = error("study", tmp_path / "a.json", "--out", tmp_path / "s")
    assert "a.json" in line and "is not valid JSON" in line and all(word in line for word in words), line


def test_json_with_other_types_is_explained(run, tmp_path):
    copy = tmp_path / "run"
    shutil.copytree(run, copy)
    (copy / "origin.json").write_text('{"title": 3}')
    assert "JSON" in error("report", copy)


def test_a_folder_that_cannot_be_written_is_named(run, tmp_path):
    (tmp_path / "file").write_text("")
    assert str(tmp_path / "file") in error("report", run, "--out", tmp_path / "file" / "below")


# Generating


def test_generate_takes_a_run_folder(run):
    got = json.loads(horner("generate", "--model", run, "--prompt", "ab", "--tokens", 3, "--json").stdout)
    assert got["prompt"] == "ab" and len(got["tokens"]) == 3 and got["remark"] == ""
    newest = max(run.glob("checkpoint-*"))
    again = json.loads(horner("generate", "--model", newest, "--prompt", "ab", "--tokens", 3, "--json").stdout)
    assert got["tokens"] == again["tokens"]


def test_generate_reads_the_prompt_from_a_file_or_stdin(run, tmp_path):
    (tmp_path / "p.txt").write_text("line\ntwo\n")
    common = ["--model", run, "--tokens", 3, "--json"]
    wanted = json.loads(horner("generate", *common, "--prompt", "line\ntwo").stdout)["tokens"]
    for file, text in ((tmp_path / "p.txt", None), ("-", "line\ntwo\n")):
        got = json.loads(horner("generate", *common, "--prompt-file", file, text=text).stdout)
        assert got["prompt"] == "line\ntwo" and got["tokens"] == wanted
    assert "--prompt-file" in error("generate", "--model", run)
    assert "excludes" in error("generate", "--model", run, "--prompt", "a", "--prompt-file", "-")
    assert "missing.txt" in error("generate", "--model", run, "--prompt-file", tmp_path / "missing.txt")


@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16", "float16"])
def test_generate_in_a_dtype(run, dtype):
    got = json.loads(horner("generate", "--model", run, "--prompt", "ab", "--tokens", 4, "--dtype", dtype, "--device", "cpu", "--json").stdout)
    assert len(got["tokens"]) == 4
    assert "'float8'" in error("generate", "--model", run, "--prompt", "a", "--dtype", "float8")


@pytest.mark.parametrize("options", [["--top-p", 3], ["--temperature", -1], ["--temperature", "nan"], ["--tokens", 0], ["--dtype", "int8"], ["--seed", -1]])
def test_an_error_echoes_no_prompt(run, options):
    done = horner("generate", "--model", run, "--prompt", "echo me", *options, code=2)
    assert "echo me" not in done.stdout + done.stderr


def test_any_positive_temperature_is_one(run):
    tiny, zero = (json.loads(horner("generate", "--model", run, "--prompt", "a", "--temperature", t, "--tokens", 5, "--json").stdout)["tokens"] for t in ("1e-300", "0"))
    assert tiny == zero


def test_a_context_longer_than_the_model_is_said(tmp_path):
    config = {"max_position_embeddings": 20}
    horner("train", "--out", tmp_path / "rotary", *SMALL, "--json", "--model-config", json.dumps(config))
    said = horner("generate", "--model", tmp_path / "rotary", "--prompt", "0123456789", "--tokens", 15)
    assert "context of 20 tokens" in said.stderr
    config = {"n_positions": 20, "n_embd": 32, "n_head": 2, "n_layer": 1, "vocab_size": 256, "eos_token_id": None}
    horner("train", "--model", "gpt2", "--out", tmp_path / "learned", *SMALL, "--json", "--model-config", json.dumps(config))
    got = json.loads(horner("generate", "--model", tmp_path / "learned", "--prompt", "0123456789", "--tokens", 15, "--json").stdout)
    assert len(got["tokens"]) == 11 and "at most 11 of the 15" in got["remark"]
    assert "21 tokens" in error("generate", "--model", tmp_path / "learned", "--prompt", "x" * 21)


# Help


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command(command):
    text = horner("help", command).stdout
    assert text == horner(command, "--help").stdout
    assert "Examples:" in text and f"Usage: horner {command}" in text
    assert max(map(len, text.splitlines())) <= 80


def test_help_of_what_is_below_or_missing():
    assert "Usage: horner data pack" in horner("help", "data", "pack").stdout
    assert horner("help").stdout == horner("--help").stdout == horner().stdout
    assert "did you mean 'train'" in error("help", "trian")
    assert "below it" in error("help", "info", "more")


def test_help_lists_the_choices():
    train, study = " ".join(horner("help", "train").stdout.split()), horner("help", "study").stdout
    for words in ("one of tiny, 10m, 30m", "one of text, recall", "one of auto, hopper_cuda", "one of auto, cpu, cuda", "one of note, skip, stop"):
        assert words in train, words
    assert all(name in study for name in ("quick:", "paper-small:"))
    listed = json.loads(horner("list", "softmax", "--json").stdout)["variants"][0]["executions"]
    assert all(name in train for name in listed)


# Completions and the manual page


@functools.cache
def bash_script():
    return horner("help", "--completion", "bash").stdout


def completions(line, folder="."):
    """What bash offers at the end of a line."""
    script = bash_script()
    words = line.split(" ")
    quoted = " ".join(f"'{w}'" for w in words)
    asked = f"{script}\ncompopt() {{ :; }}\nCOMP_WORDS=({quoted}); COMP_CWORD={len(words) - 1}; _horner; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, cwd=folder, timeout=60)
    assert done.stderr == "", done.stderr
    return set(done.stdout.split())


def test_bash_completes(tmp_path):
    (tmp_path / "models").mkdir()
    (tmp_path / "notes.txt").touch()
    assert completions("horner ") == set(COMMANDS)
    assert completions("horner di") == {"diagnose"}
    assert {"--model", "--prompt-file", "--device"} <= completions("horner generate --")
    assert completions("horner generate --device c") == {"cpu", "cuda"}
    assert "taylor2" in completions("horner train --attention tay")
    assert completions("horner train --on-nan ") == {"skip", "stop"}
    assert completions("horner train --attention taylor2 --on-nan s") == {"skip", "stop"}
    assert completions("horner train --out ", tmp_path) == {"models"}
    assert {"tiny", "models", "notes.txt"} <= completions("horner train --model ", tmp_path)
    assert "--steps" in completions("horner train --attention taylor2 --st")
    assert {"pack", "info", "tokenizer"} == completions("horner data ")
    assert "--tokenizer" in completions("horner data pack --tok")
    assert {"softmax", "sparsemax"} <= completions("horner show s")
    assert {"softmax", "l2"} <= completions("horner check --variant softmax ")
    assert "quick" in completions("horner study qu", tmp_path)
    assert completions("horner help tr") == {"train"}


@pytest.mark.parametrize("shell, option", [("zsh", "-n"), ("fish", "--no-execute"), ("bash", "-n")])
def test_completions_are_valid(tmp_path, shell, option):
    script = horner("help", "--completion", shell).stdout
    for command in COMMANDS:
        assert command in script
    if not shutil.which(shell):
        pytest.skip(f"{shell} is not installed")
    (tmp_path / "script").write_text(script)
    done = subprocess.run([shell, option, tmp_path / "script"], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "", done.stderr
    assert "'tcsh'" in error("help", "--completion", "tcsh")


@pytest.mark.skipif(not shutil.which("fish"), reason="fish is not installed")
def test_fish_completes(tmp_path):
    (tmp_path / "horner.fish").write_text(horner("help", "--completion", "fish").stdout)

    def offers(line):
        asked = f"source {tmp_path}/horner.fish; complete -C '{line}'"
        done = subprocess.run(["fish", "--no-config", "-c", asked], capture_output=True, text=True, cwd=tmp_path, timeout=60)
        return {row.split("\t")[0] for row in done.stdout.splitlines()}

    assert set(COMMANDS) <= offers("horner ")
    assert {"pack", "info"} <= offers("horner data ")
    assert {"cpu", "cuda"} <= offers("horner generate --device ")
    assert "--tokenizer" in offers("horner data pack --tok")
    assert "taylor2" in offers("horner train --attention tay")


def test_the_manual_has_everything():
    page = horner("help", "--man").stdout
    plain = page.replace("\\-", "-")
    for command in COMMANDS:
        assert f".SS horner {command}\n" in plain
    for option in ("--prompt-file", "--per-head", "--learning-rate", "--completion"):
        assert option in plain
    for tool in (["mandoc", "-T", "lint", "-W", "warning"], ["groff", "-man", "-Tutf8", "-Kutf8", "-ww", "-z"]):
        if shutil.which(tool[0]):
            done = subprocess.run(tool, input=page, capture_output=True, text=True)
            assert not [line for line in (done.stdout + done.stderr).splitlines() if "date" not in line], done.stdout + done.stderr


# JSON of studies and reports


def test_report_as_json(run, tmp_path):
    got = json.loads(horner("report", run, "--out", tmp_path, "--json").stdout)
    assert Path(got["report"]).exists() and got["runs"][0]["finished"] and got["findings"]
    assert got["runs"][0]["result"]["steps"] == 2


def test_study_as_json(tmp_path):
    (tmp_path / "s.json").write_text(json.dumps({"title": "two", "attention": ["softmax", "taylor2:norm=l2"], "seeds": [0], "tasks": ["text"],
                                                "settings": {"steps": 2, "batch": 1, "length": 16, "evaluate-sequences": 2, "entropy-every": 0}}))  # fmt: skip
    args = ["study", tmp_path / "s.json", "--out", tmp_path / "out", "--json"]
    assert [r["finished"] for r in json.loads(horner(*args, "--list").stdout)["runs"]] == [False, False]
    got = json.loads(horner(*args).stdout)
    assert [r["status"] for r in got["runs"]] == ["finished", "finished"] and Path(got["report"]).exists()
    assert got["title"] == "two" and got["findings"]


# Terminals


def on_terminal(args, columns, seconds=60, **environment):
    """What a command writes to a terminal of that width."""
    pid, file = pty.fork()
    if pid == 0:
        os.environ.update({"TERM": "xterm", **environment})
        os.environ.pop("NO_COLOR", None)
        time.sleep(0.2)  # until the width is set
        os.execv(HORNER, ["horner", *map(str, args)])
    fcntl.ioctl(file, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    out, end = b"", time.monotonic() + seconds
    while time.monotonic() < end:
        if not select.select([file], [], [], 1)[0]:
            continue
        try:
            part = os.read(file, 65536)
        except OSError:
            break
        if not part:
            break
        out += part
    os.close(file)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0, out.decode()
    return out.decode()


def lines_of(text):
    """The lines as they are seen: without colours, and each state of a line that is redrawn."""
    plain = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", text)
    return [line for line in re.split(r"[\r\n]+", plain)]


@pytest.mark.parametrize("columns", [80, 132])
@pytest.mark.parametrize(
    "args",
    [
        ["list"],
        ["list", "-v"],
        ["show", "gated_decay"],
        ["show", "taylor4"],
        ["plan", "taylor2"],
        ["info"],
        ["check", "--variant", "softmax", "--execution", "reference", "--forward-only"],
        ["bench", "attention", "--variant", "softmax", "--execution", "fused_cpu", "--shape", "1,1,64,64", "--repeats", "1"],
        ["train", "--help"],
    ],
    ids=" ".join,
)
def test_tables_fit_a_terminal(args, columns):
    assert [line for line in lines_of(on_terminal(args, columns)) if len(line) > columns] == []


def test_a_table_of_numbers_comes_in_parts():
    args = ["bench", "attention", "--variant", "softmax", "--execution", "fused_cpu", "--shape", "1,1,64,64", "--repeats", "1"]
    narrow = "\n".join(lines_of(on_terminal(args, 60)))
    assert len(re.findall(r"variant +execution", narrow)) >= 2
    assert all(head in narrow for head in ("forward ms", "fwd+bwd ms", "memory"))
    assert "…" not in re.sub(r"\d+/\d+ .*…", "", narrow)  # the line of progress has one


@pytest.mark.parametrize("columns", [80, 50, 30])
def test_the_progress_line_fits(tmp_path, columns):
    text = on_terminal(["train", "--out", tmp_path / "run", *SMALL, "--steps", "30"], columns)
    redrawn = [line for line in lines_of(text) if re.search(r"\d+/30", line)]
    assert redrawn and max(map(len, redrawn)) < columns
    assert "loss" in redrawn[-1] and "left" in redrawn[-1]


def test_a_dumb_terminal_gets_plain_lines(tmp_path):
    for args in (["list", "soft*"], ["train", "--out", tmp_path / "run", *SMALL], ["check", "--variant", "l2", "--execution", "reference", "--forward-only"]):
        text = on_terminal(args, 80, TERM="dumb")
        assert "\033" not in text and "\r\r" not in text and "█" not in text


def test_colours_can_be_switched_off():
    assert "\033[" in on_terminal(["show", "softmax"], 80)
    assert "\033[" not in subprocess.run([HORNER, "show", "softmax"], capture_output=True, text=True, timeout=60).stdout


# Shared cores


def test_threads_wait_asleep():
    """The program that runs has the variable in its environment, unless the user chose another policy; no more processes than before."""

    def environment(**given):
        clean = {k: v for k, v in os.environ.items() if k not in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")}
        child = subprocess.Popen([HORNER, "check"], env={**clean, **given}, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            end = time.monotonic() + 30
            while not int(re.search(r"SigCgt:\s*(\w+)", Path(f"/proc/{child.pid}/status").read_text())[1], 16) & 2:  # SIGINT: it runs
                assert time.monotonic() < end
                time.sleep(0.05)
            assert Path(f"/proc/{child.pid}/comm").read_text().strip() == "horner"
            return dict(x.split("=", 1) for x in Path(f"/proc/{child.pid}/environ").read_text().split("\0") if "=" in x)
        finally:
            child.kill()
            child.wait()

    assert environment()["GOMP_SPINCOUNT"] == "5000"
    assert "GOMP_SPINCOUNT" not in environment(OMP_WAIT_POLICY="active")
    assert environment(GOMP_SPINCOUNT="100")["GOMP_SPINCOUNT"] == "100"


def test_many_threads_are_only_slow(tmp_path):
    horner("train", "--out", tmp_path / "run", *SMALL, "--json", "--threads", 64)
    assert "below 1025" in error("train", "--out", tmp_path / "other", *SMALL, "--threads", 1025)
