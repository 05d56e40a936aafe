"""Time of one training step of a small Llama with attn_implementation="horner:l2", eager and under torch.compile.

Also the number of times that attention's forward ran in the step's forward and backward, by torch.profiler. With
`--beside FOLDER`, another build of the package takes turns with this one (in a process of its own), and the ratio of the
medians is printed.

    PYTHONPATH=build/python python bench/compiled_step.py --length 512
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

import torch
import transformers

import horner.hf  # registers "horner:..."


def make(length, variant):
    torch.manual_seed(0)
    config = transformers.LlamaConfig(hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=512, max_position_embeddings=length)  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation=f"horner:{variant}")
    ids = torch.randint(0, 512, (1, length))

    def step_of(model):
        def step():
            model.zero_grad()
            model(ids, labels=ids, use_cache=False).loss.backward()

        return step

    return {"eager": step_of(model), "compiled": step_of(torch.compile(model))}


def forwards(step):
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    return {e.key: e.count for e in profile.key_averages() if e.key.startswith("horner::") or e.key.endswith(" forward")}


def serve(steps):
    """Answers each line with the name of a step by its processor time in milliseconds (there is one thread)."""
    for line in sys.stdin:
        start = time.process_time()
        steps[line.strip()]()
        print(1000 * (time.process_time() - start), flush=True)


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--length", type=int, default=512)
    parser.add_argument("--variant", default="l2")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--beside", help="a folder with another build of the package, for PYTHONPATH")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.serve:
        steps = make(options.length, options.variant)
        for step in steps.values():
            step(), step()
        print(json.dumps({name: forwards(step) for name, step in steps.items()}), flush=True)
        return serve(steps)

    command = [sys.executable, __file__, "--serve", "--length", str(options.length), "--variant", options.variant]
    paths = {"this": os.environ.get("PYTHONPATH", "")} | ({"beside": options.beside} if options.beside else {})
    times, processes = {}, {}
    for name, path in paths.items():
        environment = os.environ | {"PYTHONPATH": path, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}  # which know no builds
        processes[name] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)
        for kind, counts in json.loads(processes[name].stdout.readline()).items():
            print(f"{name}, {kind}: {counts}")
    for _ in range(options.rounds):
        for name, process in processes.items():
            for kind in ("eager", "compiled"):
                print(kind, file=process.stdin, flush=True)
                times.setdefault((name, kind), []).append(float(process.stdout.readline()))
    print(f"torch {torch.__version__}, {options.variant}, {options.length} tokens: processor time of a step in milliseconds, median (fastest)")
    for (name, kind), of in times.items():
        print(f"{name:8}{kind:10}{statistics.median(of):9.1f} ({min(of):.1f})")
    if options.beside:
        for kind in ("eager", "compiled"):
            ratio = statistics.median(times["beside", kind]) / statistics.median(times["this", kind])
            print(f"{kind}: {ratio:.2f} times the speed of the other build")
    for process in processes.values():
        process.stdin.close()
        process.wait()


if __name__ == "__main__":
    main()
