"""horner data: the command as people call it."""

import gzip
import json
import lzma
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

HORNER = os.environ["HORNER"]


def horner(*arguments, rc=0):
    run = subprocess.run([HORNER, "data", *map(str, arguments)], capture_output=True, text=True)
    assert run.returncode == rc, run.stderr
    return run.stdout if rc == 0 else run.stderr


def tokens(path):
    header = np.fromfile(path, "<i4", 256)
    kind = {20240520: ("<u2", 1), 20240801: ("<u4", 7)}[header[0]]
    out = np.fromfile(path, kind[0], offset=1024)
    assert header[1] == kind[1] and header[2] == len(out) and not header[3:].any()
    return out.tolist()


def trained(folder, text):
    t = Tokenizer(models.BPE())
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    t.train_from_iterator([text], trainers.BpeTrainer(vocab_size=400, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    t.add_special_tokens(["<|end|>"])
    t.save(str(folder / "tokenizer.json"))
    return t


def test_bytes_of_files_folders_and_lines(tmp_path):
    (tmp_path / "in").mkdir()
    (tmp_path / "in/b.txt").write_text("second")
    (tmp_path / "in/a.txt").write_text("Grüße")
    (tmp_path / "c.jsonl").write_text('{"text": "one\\n"}\n\n{"text": "two", "n": 1}\n')
    out = json.loads(horner("pack", tmp_path / "in", tmp_path / "c.jsonl", "--out", tmp_path / "x.bin", "--json"))
    assert bytes(tokens(tmp_path / "x.bin")).decode() == "Grüßesecondone\ntwo"
    assert out["documents"] == 4 and out["files"] == 3 and out["tokens"] == len("Grüßesecondone\ntwo".encode())
    assert sorted(p.name for p in tmp_path.iterdir()) == ["c.jsonl", "in", "x.bin"]


def test_tokenizer_and_shards(tmp_path):
    text = "The quick brown fox, and the other one.\n\n  It was the best of times.\n" * 30_000  # two pieces
    t = trained(tmp_path, text[:10_000])
    (tmp_path / "a.txt").write_text(text)
    (tmp_path / "b.txt").write_text("the end")
    horner("pack", tmp_path / "a.txt", tmp_path / "b.txt", "--tokenizer", tmp_path, "--end", "<|end|>", "--out", tmp_path / "x.bin",
           "--shard", 300_000)  # fmt: skip
    end = [t.token_to_id("<|end|>")]
    wanted = t.encode(text).ids + end + t.encode("the end").ids + end
    files = [tmp_path / "x.bin", *sorted(tmp_path.glob("x_*.bin"))]
    assert len(files) == (len(wanted) + 299_999) // 300_000 > 1
    assert sum((tokens(f) for f in files), []) == wanted
    info = json.loads(horner("info", files[0], "--tokenizer", tmp_path, "--json"))[0]
    assert info["layout"] == "llm.c" and info["tokens"] == 300_000 and info["fits"] and info["text"].startswith("The quick brown")
    assert info["different"] == len(set(wanted[:300_000])) and info["largest"] == max(wanted[:300_000])
    assert "does not fit this tokenizer" in horner("info", files[0])


def test_a_tokenizer_is_the_one_of_the_tokenizers_package(tmp_path):
    """The whole file: vocabulary, merges and settings."""
    text = ("The quick brown fox, and the other one's.\n\n  Naïve café — “quote” 1234 don't aaaa aaaaaaa\n" * 7 + Path(__file__).read_text()) * 3
    (tmp_path / "a.txt").write_text(text)
    t = Tokenizer(models.BPE())
    t.pre_tokenizer, t.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    t.train_from_iterator([text], trainers.BpeTrainer(vocab_size=700, show_progress=False, special_tokens=["<|end|>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    t.save(str(tmp_path / "theirs.json"))
    out = json.loads(horner("tokenizer", "--train", tmp_path / "a.txt", "--vocabulary", 700, "--special", "<|end|>", "--out", tmp_path / "ours.json", "--json"))
    assert out["vocabulary"] == 700 and out["bytes"] == len(text.encode())
    assert json.loads((tmp_path / "ours.json").read_text()) == json.loads((tmp_path / "theirs.json").read_text())
    assert "at least 257 tokens, not 256" in horner("tokenizer", "--train", tmp_path / "a.txt", "--vocabulary", 256, "--special", "x", "--out", tmp_path / "y.json", rc=2)


@pytest.mark.parametrize("suffix", ["xz", "gz", "zst"])
def test_compressed_texts(tmp_path, suffix):
    """Equal to the plain file, or refused where the build has no library for it; two parts are one file after the other."""
    parts = [bytes(range(1, 128)) * 30_000, b"the end\n"]
    packers = {"xz": lzma.compress, "gz": gzip.compress}
    if suffix == "zst":
        if not shutil.which("zstd"):
            pytest.skip("no zstd command to compress with")
        packers["zst"] = lambda x: subprocess.run(["zstd", "-c"], input=x, capture_output=True, check=True).stdout
    packed = b"".join(map(packers[suffix], parts))
    (tmp_path / f"a.txt.{suffix}").write_bytes(packed)
    run = subprocess.run([HORNER, "data", "pack", tmp_path / f"a.txt.{suffix}", "--out", tmp_path / "x.bin"], capture_output=True, text=True)
    if "requires" in run.stderr and "when horner is built" in run.stderr:
        pytest.skip(run.stderr)
    assert run.returncode == 0, run.stderr
    assert bytes(tokens(tmp_path / "x.bin")) == b"".join(parts)
    (tmp_path / f"b.txt.{suffix}").write_bytes(packed[: len(packed) // 2])
    assert "damaged or incomplete" in (e := horner("pack", tmp_path / f"b.txt.{suffix}", "--out", tmp_path / "y.bin", rc=2)) or "is incomplete" in e


def test_nanogpt_layout(tmp_path):
    np.array([72, 105, 10], "<u2").tofile(tmp_path / "n.bin")
    out = horner("info", tmp_path / "n.bin")
    assert "nanoGPT" in out and "Hi↵" in out


def test_the_default_text_is_torch(tmp_path):
    out = json.loads(horner("pack", "--out", tmp_path / "x.bin", "--json"))
    assert out["files"] > 500 and out["tokens"] == out["bytes"] > 10_000_000
    assert "import" in json.loads(horner("info", tmp_path / "x.bin", "--tokens", 5000, "--json"))[0]["text"]


def test_errors(tmp_path):
    out = tmp_path / "x.bin"
    assert "no file or folder 'gone'" in horner("pack", "gone", "--out", out, rc=2)
    (tmp_path / "bad.txt").write_bytes(b"ab\xff")
    trained(tmp_path, "the text")
    error = horner("pack", tmp_path / "bad.txt", "--tokenizer", tmp_path, "--out", out, rc=2)
    assert "bad.txt" in error and "byte 2" in error
    (tmp_path / "bad.jsonl").write_text('{"text": "a"}\n{"body": "b"}\n')
    error = horner("pack", tmp_path / "bad.jsonl", "--out", out, rc=2)
    assert "line 2" in error and "missing string 'text'; the keys are: body" in error
    assert "no token '<eos>'" in horner("pack", tmp_path / "bad.jsonl", "--end", "<eos>", "--out", out, rc=2)
    assert "cannot write" in horner("pack", tmp_path / "bad.txt", "--out", tmp_path / "no/x.bin", rc=2)
    assert "--bogus" in horner("pack", "--bogus", rc=2)
    assert "needs 'pack', 'info' or 'tokenizer'" in horner(rc=2)
    assert not out.exists() and not list(tmp_path.glob("*.part*"))
    (tmp_path / "odd").write_bytes(b"abc")
    assert "is not a token file" in horner("info", tmp_path / "odd", rc=2)
