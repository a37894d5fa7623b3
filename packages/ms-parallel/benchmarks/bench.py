"""A training step of the engine compared with the same step of a plain PyTorch loop.

The plain loop uses the Llama below, torch's fused AdamW and clipping, F.cross_entropy and nothing
of ms-parallel. Both start with the same weights and batches, and their losses must agree before
anything is timed. Steps alternate, so a busy machine slows both; the figure is the median ratio of
neighboring steps. On a CPU, the CPU time of the one thread is measured.

    python packages/ms-parallel/benchmarks/bench.py --steps 40
"""

import argparse
import json
import platform
from statistics import median
from time import perf_counter, process_time

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ms_parallel.engine.engine import Engine
from ms_parallel.engine.loss import NextTokenLoss
from ms_parallel.models import DecoderConfig
from ms_parallel.optim.optimizers.adamw import AdamWConfig

LIMIT = 1.03
SIZES = {
    "small": (
        DecoderConfig(
            vocab_size=4096,
            hidden_size=128,
            intermediate_size=352,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
        ),
        4,
        128,
    ),
    "laptop": (
        DecoderConfig(
            vocab_size=8192,
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=4,
            head_dim=32,
        ),
        4,
        256,
    ),
}
"""Model, batch size, sequence length."""


class PlainAttention(nn.Module):
    """Grouped-query attention with rotary embeddings."""

    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.width = c.head_dim
        self.q_proj = nn.Linear(c.hidden_size, c.num_attention_heads * c.head_dim, bias=False)
        self.k_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.v_proj = nn.Linear(c.hidden_size, c.num_key_value_heads * c.head_dim, bias=False)
        self.o_proj = nn.Linear(c.num_attention_heads * c.head_dim, c.hidden_size, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(B, S, H) to (B, S, H); cos and sin are (S, D), sin with its first half negated."""
        q, k, v = (
            p(x).unflatten(-1, (-1, self.width)).transpose(1, 2)
            for p in (self.q_proj, self.k_proj, self.v_proj)
        )
        q = q * cos + q.roll(self.width // 2, -1) * sin
        k = k * cos + k.roll(self.width // 2, -1) * sin
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class PlainFeedForward(nn.Module):
    """SwiGLU feed-forward network."""

    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.up_proj = nn.Linear(c.hidden_size, c.intermediate_size, bias=False)
        self.down_proj = nn.Linear(c.intermediate_size, c.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, S, H) to (B, S, H)."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class PlainBlock(nn.Module):
    """A pre-norm layer."""

    def __init__(self, c: DecoderConfig) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.self_attn = PlainAttention(c)
        self.post_attention_layernorm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.mlp = PlainFeedForward(c)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """(B, S, H) to (B, S, H)."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class PlainLlama(nn.Module):
    """The complete model, with Hugging Face's parameter names."""

    def __init__(self, c: DecoderConfig, length: int) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size)
        self.model.layers = nn.ModuleList(PlainBlock(c) for _ in range(c.num_hidden_layers))
        self.model.norm = nn.RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.lm_head = nn.Linear(c.hidden_size, c.vocab_size, bias=False)
        frequencies = c.rope_theta ** (-torch.arange(0, c.head_dim, 2) / c.head_dim)
        angles = torch.arange(length)[:, None] * frequencies
        self.register_buffer("cos", angles.cos().repeat(1, 2), persistent=False)
        self.register_buffer("sin", torch.cat((-angles.sin(), angles.sin()), 1), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, S) to logits (B, S, V)."""
        x = self.model.embed_tokens(tokens)
        for block in self.model.layers:
            x = block(x, self.cos, self.sin)
        return self.lm_head(self.model.norm(x))


class PlainLoop:
    """A tutorial's training loop with the fastest options."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        vectors = [p for p in model.parameters() if p.dim() == 1]
        matrices = [p for p in model.parameters() if p.dim() > 1]
        groups = [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}]
        self.optimizer = torch.optim.AdamW(
            groups, lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True
        )

    def step(self, batch: dict[str, Tensor]) -> float:
        """Take an update; the loss is read, as for logging."""
        logits = self.model(batch["tokens"])
        loss = F.cross_entropy(logits.flatten(0, 1), batch["targets"].flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()


def batches(
    vocabulary: int, rows: int, length: int, device: torch.device
) -> list[dict[str, Tensor]]:
    """A few random batches on the device."""
    generator = torch.Generator().manual_seed(0)
    batches = []
    for _ in range(4):
        text = torch.randint(0, vocabulary, (rows, length + 1), generator=generator)
        batches.append({"tokens": text[:, :-1].to(device), "targets": text[:, 1:].to(device)})
    return batches


def measure(size: str, steps: int, device: str) -> dict[str, float | str]:
    """Check that losses agree, then time both alternately."""
    config, rows, length = SIZES[size]
    engine = Engine(config, optimizer=AdamWConfig(), device=device)
    plain = PlainLlama(config, length).to(engine.device)
    plain.load_state_dict(dict(engine.parameters))
    loop, loss = PlainLoop(plain), NextTokenLoss()
    data = batches(config.vocab_size, rows, length, engine.device)
    for index in range(6):  # also warms up
        ours, theirs = (engine.step(data[index % 4], loss).loss, loop.step(data[index % 4]))
        if abs(ours - theirs) > 1e-5 * theirs:
            raise SystemExit(f"step {index}: losses differ, {ours} and {theirs}")
    # On one CPU thread, CPU time is the cost of a step; wall-clock time includes other load.
    clock = process_time if engine.device.type == "cpu" else perf_counter
    ratios, engine_times, plain_times = [], [], []
    for index in range(steps):
        batch = data[index % 4]
        pair = [lambda: engine.step(batch, loss), lambda: loop.step(batch)]  # noqa: B023
        times = [0.0, 0.0]
        for which in (0, 1) if index % 2 else (1, 0):
            start = clock()
            pair[which]()
            times[which] = clock() - start
        engine_times.append(times[0])
        plain_times.append(times[1])
        ratios.append(times[0] / times[1])
    return {
        "size": size,
        "engine_ms": 1e3 * median(engine_times),
        "plain_ms": 1e3 * median(plain_times),
        "ratio": median(ratios),
    }


def main() -> int:
    """Print a line per size; exit with 1 if the engine exceeds the limit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40, help="timed steps per side")
    parser.add_argument("--device", default="cpu", help="cpu, or an accelerator")
    parser.add_argument("--json", action="store_true", help="print facts as JSON")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = [measure(size, arguments.steps, arguments.device) for size in SIZES]
    if arguments.json:
        print(json.dumps(results))
    else:
        print(f"torch {torch.__version__}, {platform.machine()}, device {arguments.device}")
        for row in results:
            print(
                f"{row['size']:8} engine {row['engine_ms']:8.2f} ms  plain {row['plain_ms']:8.2f} "
                f"ms  ratio {row['ratio']:.3f} (limit {LIMIT})"
            )
    return int(any(row["ratio"] > LIMIT for row in results))


if __name__ == "__main__":
    raise SystemExit(main())
