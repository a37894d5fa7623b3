"""Training speed on one GPU compared with a plain compiled loop, on packed documents.

    python benchmarks/gpu.py [--model llama-1b] [--variant NAME ...] [--seconds 300] [--out DIR]
    python benchmarks/gpu.py --profile       # also the kernels that take most of a step
    python benchmarks/gpu.py --tiny          # tiny sizes on the CPU: does the script work?

Each variant runs in a separate process with 3 warmup and 20 measured steps and prints a row at the
end. The time is that of all measured steps, with one wait for the device at the end, as in a
training loop. All variants train on the same random tokens, split into documents of about 800
tokens, with AdamW, float32 weights and bfloat16 compute. FLOPs count only visible pairs of
positions. Needs torch, msgspec, zstandard and rich, and no network.

Variants:
    plain               an ordinary model under autocast, fully compiled, with FlexAttention
    default             ms-parallel with default settings and mixed_precision
    eager               the same with compile=False
    kernels             ms-parallel with ops=ms_kernels
    kernels-eager       the same with compile=False
    float8              ms-parallel with float8="rowwise"
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VARIANTS = ("default", "plain", "kernels", "eager", "kernels-eager", "float8")
LLAMA = {"model_type": "llama", "vocab_size": 32768, "tie_word_embeddings": False}
MODELS: dict[str, dict[str, Any]] = {
    "llama-1b": LLAMA
    | {
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
    },
    "llama-3b": LLAMA
    | {
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
    },
    "qwen3-moe": {
        "model_type": "qwen3_moe",
        "vocab_size": 32768,
        "tie_word_embeddings": False,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "num_experts": 32,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 768,
    },
}
TINY = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
}
ROWS, LENGTH, DOCUMENT = 4, 4096, 800
WARM_UP, STEPS = 3, 20


def batch_of(vocabulary: int, rows: int, length: int) -> dict[str, Tensor]:
    """Random tokens and packed documents whose lengths are exponentially distributed."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(vocabulary, (rows, length + 1), generator=generator)
    ends = torch.rand(rows, length, generator=generator) < 1 / DOCUMENT
    return {
        "tokens": tokens[:, :-1].contiguous(),
        "targets": tokens[:, 1:].contiguous(),
        "documents": ends.int().cumsum(1).int(),
    }


def flops_per_step(model: dict[str, Any], batch: dict[str, Tensor]) -> float:
    """FLOPs of forward and backward: matrix products, and attention of visible pairs."""
    hidden, layers = model["hidden_size"], model["num_hidden_layers"]
    width = model.get("head_dim", hidden // model["num_attention_heads"])
    queries, keys = (model[name] * width for name in ("num_attention_heads", "num_key_value_heads"))
    feed_forward = 3 * hidden * model["intermediate_size"]
    if "num_experts" in model:
        feed_forward = 3 * hidden * model["moe_intermediate_size"] * model["num_experts_per_tok"]
    weights = layers * (2 * hidden * (queries + keys) + feed_forward) + model["vocab_size"] * hidden
    pairs = sum(
        float((torch.bincount(row).double().square().sum() + len(row)) / 2)
        for row in batch["documents"]
    )
    return 6.0 * weights * batch["tokens"].numel() + 12.0 * layers * queries * pairs


class PlainBlock(nn.Module):
    """A hand-written Llama block."""

    def __init__(self, model: dict[str, Any]) -> None:
        super().__init__()
        hidden, self.heads = model["hidden_size"], model["num_attention_heads"]
        self.key_heads, inner = model["num_key_value_heads"], model["intermediate_size"]
        self.width = hidden // self.heads
        linear = lambda a, b: nn.Linear(a, b, bias=False)  # noqa: E731
        self.q, self.o = linear(hidden, hidden), linear(hidden, hidden)
        self.k = linear(hidden, self.key_heads * self.width)
        self.v = linear(hidden, self.key_heads * self.width)
        self.gate, self.up, self.down = (
            linear(hidden, inner),
            linear(hidden, inner),
            linear(inner, hidden),
        )
        self.norm1, self.norm2 = nn.RMSNorm(hidden), nn.RMSNorm(hidden)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor, mask: Any) -> Tensor:
        """Map hidden states (B, S, H) to the same shape."""
        from torch.nn.attention.flex_attention import flex_attention

        rows, length, hidden = x.shape
        h = self.norm1(x)
        q = self.q(h).view(rows, length, self.heads, self.width).transpose(1, 2)
        k = self.k(h).view(rows, length, self.key_heads, self.width).transpose(1, 2)
        v = self.v(h).view(rows, length, self.key_heads, self.width).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        if x.device.type == "cpu":  # the dry run; FlexAttention has no backward pass there
            grouped = self.heads != self.key_heads
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=grouped)
        else:
            out = flex_attention(q, k, v, block_mask=mask, enable_gqa=True)
        x = x + self.o(out.transpose(1, 2).reshape(rows, length, hidden))
        h = self.norm2(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate pairs of features (B, heads, S, D) by the angles of their positions."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


class Plain(nn.Module):
    """A hand-written Llama."""

    def __init__(self, model: dict[str, Any], length: int) -> None:
        super().__init__()
        hidden = model["hidden_size"]
        self.embed = nn.Embedding(model["vocab_size"], hidden)
        self.blocks = nn.ModuleList(PlainBlock(model) for _ in range(model["num_hidden_layers"]))
        self.norm = nn.RMSNorm(hidden)
        self.head = nn.Linear(hidden, model["vocab_size"], bias=False)
        width = hidden // model["num_attention_heads"]
        angles = torch.outer(
            torch.arange(length), 1.0 / 10000 ** (torch.arange(0, width, 2) / width)
        )
        self.register_buffer("cos", angles.cos().bfloat16(), persistent=False)
        self.register_buffer("sin", angles.sin().bfloat16(), persistent=False)

    def forward(self, tokens: Tensor, targets: Tensor, mask: Any) -> Tensor:
        """Return the mean loss of targets (B, S)."""
        x = self.embed(tokens).bfloat16()
        for block in self.blocks:
            x = block(x, self.cos, self.sin, mask)
        logits = self.head(self.norm(x)).float()
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def plain_step(model: dict[str, Any], batch: dict[str, Tensor], device: str) -> Any:
    """Return a function that takes one step of the plain loop; it does not wait for the loss."""
    torch.manual_seed(0)
    with torch.device(device):
        module = Plain(model, batch["tokens"].shape[1])
    for weight in module.parameters():
        if weight.ndim > 1:
            nn.init.normal_(weight, std=0.02)
    optimizer = torch.optim.AdamW(module.parameters(), lr=3e-4, fused=True)
    documents, length = batch["documents"].to(device), batch["tokens"].shape[1]
    if device == "cpu":
        causal = torch.ones(length, length, dtype=torch.bool).tril()
        mask: Any = (causal & (documents[:, :, None] == documents[:, None]))[:, None]
        forward: Any = module
    else:
        from torch.nn.attention.flex_attention import create_block_mask

        def visible(row: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
            return (query >= key) & (documents[row, query] == documents[row, key])

        mask = create_block_mask(visible, len(documents), None, length, length, device=device)
        forward = torch.compile(module)

    def step() -> Tensor:
        tokens, targets = (batch[name].to(device) for name in ("tokens", "targets"))
        with torch.autocast(device, dtype=torch.bfloat16):
            loss = forward(tokens, targets, mask)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def engine_options(variant: str) -> dict[str, Any]:
    """Return the engine's options of a variant."""
    options: dict[str, Any] = {"mixed_precision": True}
    if variant.startswith("kernels"):
        import ms_kernels

        options["ops"] = ms_kernels
    if variant.endswith("eager"):
        options["compile"] = False
    if variant == "float8":
        options["float8"] = "rowwise"
    return options


def engine_config(model: dict[str, Any], batch: dict[str, Tensor]) -> Any:
    """Return the model's configuration for rows of the batch's length."""
    from ms_parallel.models import architecture

    settings = {name: value for name, value in model.items() if name != "model_type"}
    settings["max_position_embeddings"] = batch["tokens"].shape[1]
    return architecture(model["model_type"], settings)


def predicted_gib(model: dict[str, Any], batch: dict[str, Tensor], variant: str) -> float:
    """Return the peak memory that ms-parallel predicts, in GiB."""
    from ms_parallel import Layout
    from ms_parallel.planner.memory import predict_memory

    rows, length = batch["tokens"].shape
    (memory,) = predict_memory(
        engine_config(model, batch),
        Layout(),
        rows=rows,
        sequence_length=length,
        microbatches=1,
        documents=batch["documents"],
        **engine_options(variant),
    )
    return memory.total / 2**30


def engine_step(model: dict[str, Any], batch: dict[str, Tensor], device: str, variant: str) -> Any:
    """Return a function that takes one step of ms-parallel."""
    from ms_parallel import AdamWConfig, Engine, NextTokenLoss

    options, config = engine_options(variant), engine_config(model, batch)
    engine = Engine(config, device=device, optimizer=AdamWConfig(learning_rate=3e-4), **options)
    loss = NextTokenLoss()
    return lambda: engine.step(batch, loss).loss


def kernel_times(step: Any, count: int = 2) -> tuple[list[tuple[float, int, str]], list[str]]:
    """Profile a few steps.

    Returns:
        Milliseconds and launches per step of each kernel, slowest first; and the longest idle times
        of the device with the kernels around them.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as recording:
        for _ in range(count):
            step()
        torch.cuda.synchronize()
    kernels = [
        (event.start_ns(), event.end_ns(), event.name())
        for event in recording.profiler.kineto_results.events()
        if event.device_type() == torch.autograd.DeviceType.CUDA
    ]
    milliseconds: dict[str, float] = {}
    launches: dict[str, int] = {}
    for start_ns, end_ns, name in kernels:
        milliseconds[name] = milliseconds.get(name, 0.0) + (end_ns - start_ns) / 1e6
        launches[name] = launches.get(name, 0) + 1
    rows = [(milliseconds[name] / count, launches[name] // count, name) for name in launches]
    gaps, last_end_ns, last_name = [], 0, ""
    for start_ns, end_ns, name in sorted(kernels):
        if last_end_ns and start_ns > last_end_ns:
            gaps.append(((start_ns - last_end_ns) / 1e6, last_name, name))
        if end_ns > last_end_ns:
            last_end_ns, last_name = end_ns, name
    idle = [
        f"{gap:.2f} ms after {before[:50]}, before {after[:50]}"
        for gap, before, after in sorted(gaps, reverse=True)[:12]
    ]
    total = sum(gap for gap, *_ in gaps) / count
    return sorted(rows, reverse=True), [f"{total:.2f} ms per step in all", *idle]


def run(variant: str, name: str, *, tiny: bool, profile: bool = False) -> dict[str, Any]:
    """Measure one variant in this process."""
    model = MODELS[name] | (TINY if tiny else {})
    batch = batch_of(model["vocab_size"], *((2, 128) if tiny else (ROWS, LENGTH)))
    device = "cpu" if tiny else "cuda"
    predicted = None
    if variant != "plain":  # before the engine joins a process group
        predicted = round(predicted_gib(model, batch, variant), 2)
    start = time.perf_counter()
    if variant == "plain":
        step = plain_step(model, batch, device)
    else:
        step = engine_step(model, batch, device, variant)
    built = time.perf_counter()
    first_loss = float(step())
    result: dict[str, Any] = {
        "variant": variant,
        "model": name,
        "first_loss": round(first_loss, 5),
        "predicted_GiB": predicted,
        "build_s": round(built - start, 1),
        "first_step_s": round(time.perf_counter() - built, 1),
    }
    for _ in range(WARM_UP):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    count, start = 2 if tiny else STEPS, time.perf_counter()
    for _ in range(count):
        step()
    if device == "cuda":
        torch.cuda.synchronize()
    mean = (time.perf_counter() - start) / count
    result |= {
        "step_ms": round(mean * 1e3, 1),
        "tokens_per_s": round(batch["tokens"].numel() / mean),
        "tflops": round(flops_per_step(model, batch) / mean / 1e12, 1),
    }
    if device == "cuda":
        result["device"] = torch.cuda.get_device_name()
        result["torch"] = torch.__version__
        result["peak_GiB"] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    if profile and device == "cuda":
        kernels, result["idle"] = kernel_times(step)
        result["busy_ms"] = round(sum(row[0] for row in kernels), 1)
        result["kernels"] = [[round(ms, 2), count, name[:150]] for ms, count, name in kernels[:40]]
    return result


def main() -> int:
    """Measure the variants one after another, and print a row for each."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", choices=MODELS, default="llama-1b")
    parser.add_argument("--variant", choices=VARIANTS, action="append", help="default: all")
    parser.add_argument("--seconds", type=float, default=300.0, help="no variant starts later")
    parser.add_argument("--out", type=Path, help="folder for results.jsonl")
    parser.add_argument("--tiny", action="store_true", help="tiny sizes on the CPU")
    parser.add_argument("--profile", action="store_true", help="also list the slowest kernels")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if not options.tiny and not torch.cuda.is_available():
        print("gpu.py: needs a GPU; --tiny checks the script on a CPU", file=sys.stderr)
        return 2
    if options.here:
        result = run(options.variant[0], options.model, tiny=options.tiny, profile=options.profile)
        print(json.dumps(result), flush=True)
        return 0
    variants = options.variant or [
        name for name in VARIANTS if name != "plain" or "num_experts" not in MODELS[options.model]
    ]
    start, failed = time.monotonic(), False
    print(
        "variant        ms/step   tokens/s  TFLOP/s  peak GiB  predicted  first step s  first loss"
    )
    for variant in variants:
        seconds_left = options.seconds - (time.monotonic() - start)
        if seconds_left < 10:
            print(f"{variant:14} not run: {options.seconds:.0f} s are over")
            continue
        command = [sys.executable, __file__, "--here", "--variant", variant]
        command += ["--model", options.model, *(["--tiny"] if options.tiny else [])]
        command += ["--profile"] if options.profile else []
        try:
            ended = subprocess.run(
                command, capture_output=True, text=True, timeout=seconds_left, env={**os.environ}
            )
        except subprocess.TimeoutExpired:
            print(f"{variant:14} not finished: {options.seconds:.0f} s are over")
            continue
        if ended.returncode:
            failed = True
            print(f"{variant:14} failed: {(ended.stderr.strip().splitlines() or ['?'])[-1]}")
            continue
        result = json.loads(ended.stdout.strip().splitlines()[-1])
        print(
            f"{variant:14} {result['step_ms']:7.1f} {result['tokens_per_s']:10,}"
            f" {result['tflops']:8.1f} {result.get('peak_GiB', 0):9.2f}"
            f" {result['predicted_GiB'] or 0:10.2f}"
            f" {result['first_step_s']:13.1f} {result['first_loss']:11.5f}",
            flush=True,
        )
        if "kernels" in result:
            print(f"    kernels of one step: {result['busy_ms']} ms")
            for milliseconds, count, kernel in result["kernels"][:25]:
                print(f"    {milliseconds:8.2f} ms {count:5} x {kernel[:110]}")
            print("    the device is idle:", *result["idle"], sep="\n        ")
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            with (options.out / "results.jsonl").open("a") as file:
                file.write(json.dumps(result) + "\n")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
