"""Train the decoder that the other benchmarks use: one hour on one CPU core.

    python packages/ms-compress/benchmarks/base.py OUT [--steps 900]

Writes OUT/tokenizer.json, OUT/shards and OUT/base: a byte-level BPE of 4,096 tokens trained on the
running Python's standard library, its token shards with 2% of the documents held out, and a decoder
of 5.77M parameters. Rounding hardly hurts an undertrained model, and every further step repairs it,
so this one trains until its learning rate has decayed to zero. Matrices use Muon (Jordan et al.,
2024), which needs fewer tokens than AdamW; embedding and norms use AdamW.

The same command resumes from the last checkpoint.
"""

import argparse
import os
from collections.abc import Callable
from pathlib import Path
from time import monotonic

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import ms_data
from ms_compress.corpus import rows
from ms_parallel.models import DecoderConfig, build_model
from ms_parallel.weights import initialize, save_model

VOCABULARY = 4096
LENGTH = 256
HELD_OUT_SHARE = 0.02
CONFIG = DecoderConfig(
    vocab_size=VOCABULARY,
    hidden_size=256,
    intermediate_size=768,
    num_hidden_layers=6,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    max_position_embeddings=1024,
    tie_word_embeddings=True,
)


def main() -> None:
    """Build the shards if they are missing, train, and print the held-out perplexity."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=900)
    parser.add_argument("--batch", type=int, default=32, help="rows of 256 tokens per step")
    parser.add_argument("--rate", type=float, default=0.02, help="Muon's; AdamW uses a fifth")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    shards = build_shards(options.out)
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    model = build_model(CONFIG)
    initialize(model, seed=0)
    size = sum(parameter.numel() for parameter in model.parameters())
    print(f"{size:,} parameters, {options.steps * options.batch * LENGTH:,} tokens", flush=True)
    train(model, shards, options)
    save_model(model, options.out / "base")
    print(f"held-out perplexity {held_out(model, shards):.3f}", flush=True)


def build_shards(out: Path) -> Path:
    """Train the tokenizer and write the shards, if they are missing."""
    shards, tokenizer = out / "shards", out / "tokenizer.json"
    out.mkdir(parents=True, exist_ok=True)
    if not tokenizer.is_file():
        ms_data.train_tokenizer("stdlib", vocab_size=VOCABULARY, out=tokenizer)
    if not (shards / "index.json").is_file():
        ms_data.build("stdlib", tokenizer=tokenizer, out=shards, held_out_fraction=HELD_OUT_SHARE)
    return shards


def train(model: nn.Module, shards: Path, options: argparse.Namespace) -> None:
    """Run `options.steps` steps with a checkpoint every 25."""
    checkpoint = options.out / "base.pt"
    optimizers = optimizers_of(model, options.rate)
    first = resume(checkpoint, model, optimizers)

    def save_regularly(step: int) -> None:
        if (step + 1) % 25 == 0:
            save_checkpoint(checkpoint, model, optimizers, step + 1)

    take_steps(
        model, shards, options, optimizers, share_of_rate, save_regularly, seed=1, first=first
    )


def take_steps(
    model: nn.Module,
    shards: Path,
    options: argparse.Namespace,
    optimizers: list[torch.optim.Optimizer],
    share_of_rate: Callable[[int, int], float],
    after_step: Callable[[int], object],
    *,
    seed: int,
    first: int = 0,
    loss: Callable[[nn.Module, Tensor, Tensor], Tensor] | None = None,
) -> None:
    """Run steps from `first` on with a scaled learning rate; print loss and speed."""
    for block in model.model.layers.values():
        block.compile()
    peaks = [options.rate, options.rate / 5]
    stream = ms_data.TokenStream(
        shards, sequence_length=LENGTH, batch_size=options.batch, split="train", seed=seed
    )
    for _ in range(first):
        next(stream)
    start = monotonic()
    for step in range(first, options.steps):
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * share_of_rate(step, options.steps)
        batch = next(stream)
        tokens, targets = (torch.as_tensor(batch[name]).long() for name in ("tokens", "targets"))
        batch_loss = (loss or loss_of)(model, tokens, targets)
        batch_loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        after_step(step)
        if (step + 1) % 10 == 0:
            rate = (step + 1 - first) * options.batch * LENGTH / (monotonic() - start)
            print(
                f"step {step + 1}  loss {batch_loss.item():.4f}  {rate:,.0f} tokens/s", flush=True
            )


def optimizers_of(model: nn.Module, rate: float) -> list[torch.optim.Optimizer]:
    """Return Muon for matrices and AdamW for all other parameters."""
    matrices = [p for n, p in model.named_parameters() if p.ndim == 2 and "embed" not in n]
    others = [p for n, p in model.named_parameters() if p.ndim != 2 or "embed" in n]
    return [
        torch.optim.Muon(
            matrices, lr=rate, weight_decay=0.01, adjust_lr_fn="original", momentum=0.95
        ),
        torch.optim.AdamW(others, lr=rate / 5, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def loss_of(model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of a batch, in nats per token."""
    return cross_entropy(model(tokens).flatten(0, 1), targets.flatten())


def share_of_rate(step: int, steps: int) -> float:
    """Warm up over 30 steps, stay constant, then decay to zero over the second half."""
    return min(1.0, (step + 1) / 30, 2 * (steps - step) / steps)


def save_checkpoint(
    path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer], step: int
) -> None:
    """Write the state to a temporary file, then rename it."""
    states = [optimizer.state_dict() for optimizer in optimizers]
    temporary = path.with_suffix(".new")
    torch.save({"model": model.state_dict(), "optimizers": states, "step": step}, temporary)
    os.replace(temporary, path)


def resume(path: Path, model: nn.Module, optimizers: list[torch.optim.Optimizer]) -> int:
    """Load the checkpoint, if any; return the number of steps taken."""
    if not path.is_file():
        return 0
    state = torch.load(path, weights_only=True)
    model.load_state_dict(state["model"])
    for optimizer, optimizer_state in zip(optimizers, state["optimizers"], strict=True):
        optimizer.load_state_dict(optimizer_state)
    return int(state["step"])


@torch.no_grad()
def held_out(model: nn.Module, shards: Path) -> float:
    """Return the perplexity over 64 held-out rows."""
    batch = rows(shards, split="held_out", sequence_length=LENGTH, count=64)
    losses = [
        loss_of(model, tokens, targets)
        for tokens, targets in zip(batch["tokens"].split(8), batch["targets"].split(8), strict=True)
    ]
    return float(torch.stack(losses).mean().exp())


if __name__ == "__main__":
    main()
