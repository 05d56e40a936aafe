"""Copies src/attn so that g++ compiles its CUDA kernels for the emulator (emulator.h) and the executions and states that launch
them take tensors on the CPU: transform.py SRC OUT. Writes only what changed."""

import re
import sys
from pathlib import Path

# Beside exec/*cuda*: what asks where a tensor is, to launch kernels there or to hold what they read.
LAUNCHES = ("split.cpp", "state.cpp", "make_state.cpp", "exec/decode.cpp")


def closing(text, at):
    """Where the parenthesis at text[at] closes; strings may have others."""
    depth, quoted = 0, False
    for i in range(at, len(text)):
        c = text[i]
        if c == '"' and text[i - 1] != "\\":
            quoted = not quoted
        elif not quoted and c in "([{":
            depth += 1
        elif not quoted and c in ")]}":
            depth -= 1
            if depth == 0:
                return i
    raise SystemExit(f"no closing parenthesis: {text[at:at + 80]}")


def parts(text, separator):
    """Split at a separator outside of parentheses and strings; "::" is two of ":"."""
    out, depth, quoted = [""], 0, False
    for i, c in enumerate(text):
        if c == '"' and text[i - 1] != "\\":
            quoted = not quoted
        depth += not quoted and (c in "([{") - (c in ")]}")
        if c == separator and depth == 0 and not quoted:
            out.append("")
        else:
            out[-1] += c
    return [part.strip() for part in out]


def call(statement):
    """A statement of inline assembly as a call of the function of its instruction."""
    fields = parts(statement, ":")
    template = "".join(re.findall(r'"((?:[^"\\]|\\.)*)"', fields[0]))
    if not template:
        return ""  # only hides a value from the compiler
    name = re.match(r"[\w.]+", template)[0].replace(".", "_")
    if name == "cp_async_ca_shared_global":
        name += "_" + re.search(r"(\d+);", template)[1]
    operands = []
    for field in fields[1:3]:
        operands += [re.match(r'"[^"]*"\s*\((.*)\)$', part, re.S)[1] for part in parts(field, ",") if part]
    return f"ptx::{name}({', '.join(operands)})"


def transformed(text, is_execution):
    text = text.replace("#ifdef __CUDACC__\n  __device__", "#ifdef HORNER_EMULATOR\n  __device__")
    while match := re.search(r"\basm(\s+volatile)?\s*\(", text):
        end = closing(text, match.end() - 1)
        text = text[: match.start()] + call(text[match.end() : end]) + text[end + 1 :]
    text = re.sub(r"extern __shared__ __align__\(\d+\) unsigned char memory\[\];",
                  "unsigned char* const memory = emulator::dynamic_memory();", text)
    text = re.sub(r"\b(\w+)<<<(.*?)>>>\(", r"emulator::launch(\1, \2, ", text, flags=re.S)
    if is_execution:
        text = re.sub(r"#include <c10/cuda/.*\n|.*c10::cuda::CUDAGuard.*\n", "", text)
        text = text.replace("c10::cuda::getCurrentCUDAStream().stream()", "nullptr")
        text = re.sub(r"\.is_(cuda|cpu)\(\)", lambda m: ".is_cpu()" if m[1] == "cuda" else ".is_cuda()", text)
    return text


def main():
    source, out = map(Path, sys.argv[1:3])
    for file in sorted(source.rglob("*")):
        if file.suffix not in (".h", ".cpp", ".cu", ".cuh"):
            continue
        if file.parent.name == "hopper" and file.suffix.startswith(".cu"):
            continue  # the emulator does not have their instructions
        of = file.relative_to(source)
        launches = str(of) in LAUNCHES or (of.parent.name == "exec" and "cuda" in of.name)
        text = transformed(file.read_text(), launches)
        to = out / of
        to.parent.mkdir(parents=True, exist_ok=True)
        if not to.exists() or to.read_text() != text:
            to.write_text(text)


main()
