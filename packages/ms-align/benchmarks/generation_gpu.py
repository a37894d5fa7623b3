"""Generation speed on one GPU compared with transformers' `generate`.

    python benchmarks/generation_gpu.py [--variant NAME ...] [--seconds 40] [--out DIR]
    python benchmarks/generation_gpu.py --tiny        # tiny sizes on the CPU: does the script work?

64 responses of 256 tokens to prompts of 128 tokens, sampled at temperature 1 from a Llama of 1B
random bfloat16 weights (`llama-1b` of packages/ms-parallel/benchmarks/gpu.py). Each variant runs in
a separate process: one warmup call, then up to three calls within the time limit; the fastest
counts. A row is printed when a variant finishes, or reaches `--seconds`. Needs torch, transformers,
msgspec, attrs and lazy_loader, and no network.

Variants:
    graph               static shapes, CUDA graph, ms_kernels.decode_attention (the default)
    graph-sdpa          the same with torch's attention
    eager               static shapes, without a graph
    columns             neither: the path of models that do not support static shapes
    unfused             `graph` without fused weights, as for models with adapters
    engine              ms_parallel's Engine.generate, float32 weights and bfloat16 compute
    hf-dynamic          transformers' generate with its default cache
    hf-static           transformers' generate with its static cache, which compiles the step
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

VARIANTS = (
    "graph",
    "eager",
    "hf-dynamic",
    "graph-sdpa",
    "unfused",
    "columns",
    "hf-static",
    "engine",
)
SIZES: dict[str, Any] = {
    "vocab_size": 32768,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
}
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
ROWS, PROMPT, NEW = 64, 128, 256
SETTINGS: dict[str, dict[str, Any]] = {
    "graph": {},
    "graph-sdpa": {"kernels": False},
    "eager": {"cuda_graph": False},
    "columns": {"static_shapes": False},
    "unfused": {"fused": False},
}
"""Options of `LocalGenerator` for each variant."""


def ours(
    variant: str, sizes: dict[str, Any], prompts: list[list[int]], new: int, device: str
) -> Callable[[], int]:
    """Return a function that generates with `LocalGenerator` and returns the number of tokens."""
    from ms_align import LocalGenerator, Sampling
    from ms_parallel.models import architecture, build_model

    torch.manual_seed(0)
    with torch.device(device):  # drawn on the device, which is faster
        model = build_model(architecture("llama", sizes))
        for parameter in model.parameters():
            if parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=0.02)
    model = model.to(torch.bfloat16)
    settings = dict(SETTINGS[variant])
    if device == "cpu":
        settings.setdefault("static_shapes", True)
    generator = LocalGenerator(model, max_num_seqs=len(prompts), **settings)
    return lambda: int(generator(prompts, Sampling(max_new_tokens=new)).lengths.sum())


def engine(
    sizes: dict[str, Any], prompts: list[list[int]], new: int, device: str
) -> Callable[[], int]:
    """Return a function that generates with ms-parallel's engine."""
    from ms_parallel import Engine
    from ms_parallel.models import architecture

    running = Engine(architecture("llama", sizes), device=device, seed=0, mixed_precision=True)
    return lambda: sum(
        map(len, running.generate(prompts, max_new_tokens=new, temperature=1.0, stop_token=None))
    )


def transformers(
    variant: str, sizes: dict[str, Any], prompts: list[list[int]], new: int, device: str
) -> Callable[[], int]:
    """Return a function that generates with transformers."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**sizes)).to(torch.bfloat16).eval()
    ids = torch.tensor(prompts, device=device)
    options: dict[str, Any] = {"cache_implementation": "static"} if variant == "hf-static" else {}

    def generate() -> int:
        rows = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=new,
            min_new_tokens=new,
            do_sample=True,
            temperature=1.0,
            top_k=0,
            pad_token_id=0,
            eos_token_id=None,
            **options,
        )
        return int(rows[:, ids.shape[1] :].numel())

    return generate


def run(variant: str, *, tiny: bool, seconds: float) -> dict[str, Any]:
    """Measure one variant in this process."""
    sizes = SIZES | (TINY if tiny else {})
    rows, length, new = (4, 16, 16) if tiny else (ROWS, PROMPT, NEW)
    device = "cpu" if tiny else "cuda"
    began = time.monotonic()
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(5, sizes["vocab_size"], (rows, length), generator=generator).tolist()
    if variant == "engine":
        call = engine(sizes, prompts, new, device)
    elif variant.startswith("hf"):
        call = transformers(variant, sizes, prompts, new, device)
    else:
        call = ours(variant, sizes, prompts, new, device)
    built = time.monotonic()
    call()
    calls = [time.monotonic() - built]
    result: dict[str, Any] = {
        "variant": variant,
        "build_s": round(built - began, 2),
        "first_call_s": round(calls[0], 3),
    }
    # The first call also compiles and verifies; it counts only if a second one would not fit.
    measured: list[float] = []
    tokens = rows * new
    while len(measured) < 3 and time.monotonic() - began + min(calls) < seconds:
        start = time.monotonic()
        tokens = call()
        if device == "cuda":
            torch.cuda.synchronize()
        measured.append(time.monotonic() - start)
        calls.append(measured[-1])
    best = min(measured or calls)
    result |= {
        "calls": len(measured),
        "tokens": tokens,
        "seconds": round(best, 3),
        "median_s": round(statistics.median(measured or calls), 3),
        "tokens_per_s": round(tokens / best),
        "ms_per_token": round(best / new * 1e3, 3),
    }
    if device == "cuda":
        result["device"] = torch.cuda.get_device_name()
        result["torch"] = torch.__version__
        result["peak_GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return result


def main() -> int:
    """Measure the variants one after another, and print a row for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--variant", choices=VARIANTS, action="append", help="default: all")
    parser.add_argument("--seconds", type=float, default=40.0, help="time limit of each variant")
    parser.add_argument("--out", type=Path, help="folder for results.jsonl")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        print("generation_gpu.py: needs a GPU; --tiny checks the script on a CPU", file=sys.stderr)
        return 2
    if options.here:
        result = run(options.variant[0], tiny=options.tiny, seconds=options.seconds)
        print(json.dumps(result), flush=True)
        return 0
    failed = False
    print("variant       tokens/s  ms/step  first call s  peak GiB", flush=True)
    for variant in options.variant or VARIANTS:
        command = [sys.executable, __file__, "--here", "--variant", variant]
        command += ["--seconds", str(options.seconds), *(["--tiny"] if options.tiny else [])]
        try:
            ended = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=options.seconds,
                env={**os.environ, "TOKENIZERS_PARALLELISM": "false"},
            )
        except subprocess.TimeoutExpired:
            print(f"{variant:12} not finished in {options.seconds:.0f} s", flush=True)
            continue
        # Reasons for a slower path, such as a failed capture.
        notes = [line for line in ended.stderr.splitlines() if "slower" in line or "ms_" in line]
        if ended.returncode:
            failed = True
            error = (ended.stderr.strip().splitlines() or ["?"])[-1]
            print(f"{variant:12} failed: {error}", flush=True)
            continue
        result = json.loads(ended.stdout.strip().splitlines()[-1])
        print(
            f"{variant:12} {result['tokens_per_s']:9,} {result['ms_per_token']:8.2f}"
            f" {result['first_call_s']:13.1f} {result.get('peak_GiB', 0):9.2f}",
            *[f"\n  {note}" for note in notes[:2]],
            flush=True,
        )
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            with (options.out / "results.jsonl").open("a") as file:
                file.write(json.dumps(result) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
