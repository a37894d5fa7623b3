"""Compare training steps of a transformers model before and after `ms_kernels.patch`.

    python benchmarks/patch.py                 # a Llama of 23 million weights, on the CPU
    python benchmarks/patch.py --device cuda --layers 16 --hidden 2048 --dtype bfloat16

Each model runs in a separate process, to measure its peak memory, and the two take turns. Rows
are packed: `position_ids` start again at every document. Prints the median time of a step (CPU time
on a CPU), the ratio, and the peak memory above that of the model and its gradients.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

import torch
from transformers import AutoConfig, AutoModelForCausalLM

import ms_kernels


def main() -> None:
    """Start both workers, alternate their steps, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--hidden", type=int, default=384)
    parser.add_argument("--vocabulary", type=int, default=32_768)
    parser.add_argument("--rows", type=int, default=2)
    parser.add_argument("--length", type=int, default=1_024)
    parser.add_argument("--documents", type=int, default=8, help="documents in each row")
    parser.add_argument("--steps", type=int, default=5, help="timed steps, after one warmup")
    parser.add_argument("--worker", choices=["unpatched", "patched"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
        return
    names = ("unpatched", "patched")
    workers = {
        name: subprocess.Popen(
            [sys.executable, __file__, *sys.argv[1:], "--worker", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for name in names
    }
    results = {}
    for step in range(options.steps + 1):
        for name in names if step % 2 else reversed(names):
            worker = workers[name]
            assert worker.stdin is not None
            assert worker.stdout is not None
            worker.stdin.write("step\n")
            worker.stdin.flush()
            results.setdefault(name, []).append(json.loads(worker.stdout.readline()))
    print("model      step, s  loss      peak memory, MiB")
    for name in names:
        seconds = statistics.median(result["seconds"] for result in results[name][1:])
        last = results[name][-1]
        print(f"{name:9}  {seconds:7.3f}  {last['loss']:.5f}  {last['peak_mib']:,.0f}")
    ratios = [
        plain["seconds"] / ours["seconds"]
        for plain, ours in zip(results["unpatched"][1:], results["patched"][1:], strict=True)
    ]
    print(f"unpatched / patched: {statistics.median(ratios):.2f} (median of {len(ratios)} steps)")


def work(options: argparse.Namespace) -> None:
    """Train on request, and print the time, loss and peak memory of each step."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    config = AutoConfig.for_model(
        "llama",
        vocab_size=options.vocabulary,
        hidden_size=options.hidden,
        intermediate_size=options.hidden * 8 // 3,
        num_hidden_layers=options.layers,
        num_attention_heads=options.hidden // 64,
        num_key_value_heads=options.hidden // 64,
        max_position_embeddings=options.length,
        tie_word_embeddings=True,
    )
    model = AutoModelForCausalLM.from_config(config).to(
        options.device, getattr(torch, options.dtype)
    )
    if options.worker == "patched":
        ms_kernels.patch(model)
    model.train()
    ids = torch.randint(options.vocabulary, (options.rows, options.length), device=options.device)
    positions = torch.arange(options.length, device=options.device)
    positions = positions.remainder(options.length // options.documents).expand(options.rows, -1)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = peak_mib(options.device)
    for _ in sys.stdin:
        clock = time.process_time if options.device == "cpu" else time.perf_counter
        start = clock()
        loss = model(input_ids=ids, position_ids=positions, labels=ids, use_cache=False).loss
        loss.backward()
        value = loss.item()
        seconds = clock() - start
        peak = peak_mib(options.device) - before
        print(json.dumps({"seconds": seconds, "loss": value, "peak_mib": peak}), flush=True)


def peak_mib(device: str) -> float:
    """Return the peak memory of the device, or of this process on a CPU, in MiB."""
    if device == "cpu":
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return torch.cuda.max_memory_allocated() / 2**20


if __name__ == "__main__":
    main()
