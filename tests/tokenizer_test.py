"""Tokenizers against the `tokenizers` package: the same tokens of the same texts, and the same texts of the same tokens.

Tokenizers of every kind are trained here on the Python sources of torch. Real ones are used where they are: Gemma's
(`make pretrained`), and any *tokenizer.json in the folder that HORNER_DATA names, with the texts (*.txt) there.
"""

import json
import os
import random
import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

ROOT = Path(__file__).parent.parent
TOOL = Path(os.environ["HORNER"]).parent / "tokenizer_tool"
DATA = os.environ.get("HORNER_DATA")
GEMMA = ROOT / "pretrained/gemma-3-270m/tokenizer.json"
LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+")  # fmt: skip
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
WORDS = ["the", " a", "  ", "\n", "\t", "'s", "'ll", "don't", "'S", "'\u017f", "12345", " \u00e9", "e\u0301", "\u00e9", "\u2581",
         "<0x41>", "<s>", "<bos>", "<|endoftext|>", "\u1100\u1161", "\uac00\u11a8", "\r\n", "    x", "\u180e", "\u0085", "\u00a0",
         " !", "\u200d", "\U0001f642", "\u1ac4\u0308", "def f(x):\n    return"]  # fmt: skip


def corpus(size):
    folder = Path(torch.__file__).parent
    text = ""
    for path in sorted(folder.rglob("*.py")):
        text += path.read_bytes().decode()
        if len(text) > size:
            return text[:size]
    return text


def byte_level(pattern=None, normalizer=None, prefix_space=False, ignore_merges=False):
    t = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    t.decoder = decoders.ByteLevel()
    if normalizer:
        t.normalizer = normalizer
    level = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space, use_regex=pattern is None)
    if pattern:
        level = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), level])
    t.pre_tokenizer = level
    return t, {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}


def fallback():
    return models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True)


BYTES = {"special_tokens": ["<unk>", "<s>", "</s>"] + [f"<0x{b:02X}>" for b in range(256)]}


def gpt2():
    return byte_level()


def gpt2_prefix_space():
    return byte_level(prefix_space=True)


def neox():
    return byte_level(normalizer=normalizers.NFC())


def llama3():
    return byte_level(LLAMA3, ignore_merges=True)


def qwen2():
    return byte_level(QWEN2, normalizers.NFC())


def starcoder():
    t, options = byte_level()
    t.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(True), pre_tokenizers.ByteLevel(add_prefix_space=False)])
    return t, options


def llama2():
    t = Tokenizer(fallback())
    t.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    t.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)])  # fmt: skip
    return t, BYTES | {"max_token_length": 12}


def metaspace(scheme, split=True):
    t = Tokenizer(fallback())
    t.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=split)
    t.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace(prepend_scheme=scheme)])
    return t, BYTES


def gemma():
    t = Tokenizer(fallback())
    t.normalizer = normalizers.Replace(" ", "▁")
    t.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    t.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return t, BYTES | {"max_token_length": 12}


def unknown():
    t = Tokenizer(models.BPE(unk_token="<unk>"))
    t.pre_tokenizer = pre_tokenizers.Split(Regex(r"\s+"), "removed")
    return t, {"special_tokens": ["<unk>"]}


# What comes behind the vocabulary, once that is trained.
def add_tokens(name, t):
    if name == "gpt2":
        t.add_special_tokens(["<|endoftext|>"])
    if name == "neox":
        t.add_tokens([AddedToken(" " * n, normalized=True) for n in range(2, 25)])
        t.add_tokens([AddedToken("<s>", lstrip=True, rstrip=True), AddedToken("the", single_word=True)])
    if name == "llama3":
        t.add_special_tokens(["<bos>"])
        template = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", t.token_to_id("<bos>"))])
        t.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])


KINDS = {"gpt2": gpt2, "gpt2_prefix_space": gpt2_prefix_space, "neox": neox, "llama3": llama3, "qwen2": qwen2,
         "starcoder": starcoder, "llama2": llama2, "metaspace_first": lambda: metaspace("first"),
         "metaspace_always": lambda: metaspace("always"), "metaspace_never": lambda: metaspace("never", False), "gemma": gemma,
         "unknown": unknown}  # fmt: skip


@pytest.fixture(scope="session")
def trained(tmp_path_factory):
    folder, made = tmp_path_factory.mktemp("tokenizers"), {}
    # Lines, so that a trainer without splitters sees words that are not too long.
    lines = [line for line in corpus(400_000).splitlines(keepends=True) if line.isascii()]

    def get(name):
        if name not in made:
            tokenizer, options = KINDS[name]()
            trainer = trainers.BpeTrainer(vocab_size=1500, show_progress=False, **options)
            short = [piece for line in lines for piece in line.split("  ")] if name in ("llama2", "gemma", "metaspace_never") else lines
            tokenizer.train_from_iterator(short, trainer)
            add_tokens(name, tokenizer)
            made[name] = folder / f"{name}.json"
            tokenizer.save(str(made[name]))
        return made[name]

    return get


def tool(what, tokenizer, items, tmp_path, *more):
    file = tmp_path / "items"
    with file.open("wb") as f:
        for item in items:
            data = item.encode() if what == "encode" else np.array(item, "<u4").tobytes()
            f.write(struct.pack("<I", len(item) if what == "decode" else len(data)) + data)
    out = subprocess.run([TOOL, what, tokenizer, file, *more], check=True, capture_output=True).stdout
    at = 0
    while at < len(out):
        (n,) = struct.unpack_from("<I", out, at)
        size = 4 * n if what == "encode" else n
        part = out[at + 4 : at + 4 + size]
        yield np.frombuffer(part, "<u4").tolist() if what == "encode" else part.decode()
        at += 4 + size


def random_texts(count):
    draw = random.Random(0)

    def any_character():
        c = draw.randrange(0x110000 - 0x800)
        return chr(c + 0x800 if c >= 0xD800 else c)

    kinds = [any_character, lambda: chr(draw.randrange(0x20, 0x3000)), lambda: draw.choice(WORDS),
             lambda: draw.choice([any_character(), draw.choice(WORDS), chr(draw.randrange(128)), chr(draw.randrange(128))])]  # fmt: skip
    for i in range(count):
        yield "".join(kinds[i % 4]() for _ in range(draw.randint(0, 30)))


def compare(path, texts, tmp_path):
    theirs = Tokenizer.from_file(str(path))
    for special in (True, False):
        wanted = [e.ids for e in theirs.encode_batch_fast(texts, add_special_tokens=special)]
        got = list(tool("encode", path, texts, tmp_path, *([] if special else ["raw"])))
        assert len(got) == len(texts)
        for text, a, b in zip(texts, wanted, got):
            assert a == b, f"{ascii(text[:300])}\n{[theirs.id_to_token(t) for t in a][:200]}\n{[theirs.id_to_token(t) for t in b][:200]}"
    draw = random.Random(1)
    size = theirs.get_vocab_size()
    tokens = wanted + [[draw.randrange(size) for _ in range(draw.randint(0, 20))] for _ in range(2000)]
    for skip in (True, False):
        wanted = theirs.decode_batch(tokens, skip_special_tokens=skip)
        assert wanted == list(tool("decode", path, tokens, tmp_path, *([] if skip else ["keep"])))


@pytest.mark.parametrize("name", KINDS)
def test_trained(trained, name, tmp_path):
    # 10,000 random texts for the main kinds, fewer for the rest: what they share is tested by then.
    count = 10_000 if name in ("neox", "llama3", "llama2", "gemma") else 2_000
    compare(trained(name), [*random_texts(count), corpus(300_000), "", " ", "a" * 5000, " " * 3000 + "x", "\n" * 2000], tmp_path)


def real_tokenizers():
    found = [GEMMA] if GEMMA.exists() else []
    return found + sorted(Path(DATA).glob("*tokenizer.json") if DATA else [])


def real_texts():
    return [path.read_bytes().decode() for path in sorted(Path(DATA).glob("*.txt"))] if DATA else [corpus(2_000_000)]


@pytest.mark.skipif(not GEMMA.exists(), reason="no pretrained model: `make pretrained` gets it")
def test_gemma(tmp_path):
    compare(GEMMA, [*random_texts(10_000), *real_texts()], tmp_path)


@pytest.mark.skipif(not DATA, reason="HORNER_DATA names no folder")
def test_data(tmp_path):
    for path in sorted(Path(DATA).glob("*tokenizer.json")):
        compare(path, [*random_texts(10_000), *real_texts()], tmp_path)


def test_bytes(tmp_path):
    texts = ["", "abc", "Grüße", corpus(1000)]
    assert list(tool("encode", "bytes", texts, tmp_path)) == [list(t.encode()) for t in texts]
    assert list(tool("decode", "bytes", [list(t.encode()) for t in texts] + [[0xC3]], tmp_path)) == texts + ["\ufffd"]


def test_features_that_are_not_known_are_named(trained, tmp_path):
    def error(change, name="llama3"):
        data = json.loads(trained(name).read_text())
        change(data)
        (tmp_path / "changed.json").write_text(json.dumps(data))
        return subprocess.run([TOOL, "check", tmp_path / "changed.json"], check=True, capture_output=True, text=True).stdout

    assert error(lambda d: None) == "fine\n"
    cases = [
        (lambda d: d["model"].update(type="Unigram"), "model.type"),
        (lambda d: d["model"].update(dropout=0.1), "model.dropout"),
        (lambda d: d["model"].update(end_of_word_suffix="</w>"), "model.end_of_word_suffix"),
        (lambda d: d["model"].update(news=1), "model.news"),
        (lambda d: d["model"]["merges"].append(["zq", "xj"]), "'zq"),
        (lambda d: d["model"]["merges"].append("a b c"), "model.merges["),
        (lambda d: d["model"]["vocab"].update(a=7_000_000), "model.vocab"),
        (lambda d: d["model"]["vocab"].update(Ġnew=5), "model.vocab"),
        (lambda d: d["model"].pop("vocab"), "model.vocab is missing"),
        (lambda d: d.update(normalizer={"type": "Lowercase"}), "normalizer.type"),
        (lambda d: d.update(pre_tokenizer={"type": "Whitespace"}), "pre_tokenizer.type"),
        (lambda d: d.update(truncation={"max_length": 5}), "truncation"),
        (lambda d: d.update(decoder={"type": "WordPiece"}), "decoder.type"),
        (lambda d: d.update(post_processor={"type": "Unheard"}), "post_processor.type"),
        (lambda d: d["added_tokens"][0].update(id=3), "added_tokens[0]"),
        (lambda d: d["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex=r"\w+"), "\\w"),
        (lambda d: d["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex="(a"), "pretokenizers[0].pattern"),
        (lambda d: d["pre_tokenizer"]["pretokenizers"][0]["pattern"].update(Regex="a*"), "empty"),
        (lambda d: d["pre_tokenizer"]["pretokenizers"][0].update(behavior="Other"), "behavior"),
    ]  # fmt: skip
    for change, wanted in cases:
        got = error(change)
        assert "changed.json" in got and wanted in got, (wanted, got)


@pytest.mark.parametrize("name", ["llama3", "gemma"])
def test_random_truncations_and_bit_flips(trained, name, tmp_path):
    data = json.loads(trained(name).read_text())
    keep = 300 if name == "llama3" else 400
    data["model"]["vocab"] = {k: v for k, v in data["model"]["vocab"].items() if v < keep}
    data["model"]["merges"] = [m for m in data["model"]["merges"] if all(t in data["model"]["vocab"] for t in (*m, "".join(m)))]
    if name == "llama3":
        data["added_tokens"], data["post_processor"] = [], None
    good = json.dumps(data).encode()
    (tmp_path / "good.json").write_bytes(good)
    assert subprocess.run([TOOL, "check", tmp_path / "good.json"], check=True, capture_output=True).stdout == b"fine\n"
    draw, files = random.Random(1), []
    for i in range(500):
        bad = bytearray(good)
        if i % 4 == 0:
            del bad[draw.randrange(len(bad)) :]
        else:
            for _ in range(draw.randint(1, 3)):
                bad[draw.randrange(len(bad) if i % 4 < 3 else 3000)] ^= 1 << draw.randrange(8)
        files.append(tmp_path / f"{i}.json")
        files[-1].write_bytes(bad)
    out = subprocess.run([TOOL, "check", *files], check=True, capture_output=True, errors="replace").stdout.splitlines()
    assert len(out) >= 500 and out.count("fine") < 480
