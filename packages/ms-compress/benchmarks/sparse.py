"""2:4 by magnitude, retrained as its base was trained: some ten minutes of one processor.

    python packages/ms-compress/benchmarks/sparse.py OUT [--steps 200]

OUT is what base.py wrote. Half of every four weights go at once; the rest are trained on with the
base's own optimizers, at half its rate falling to zero, the masks kept after each step. A plain
copy takes the same steps with `--dense`, to tell what retraining alone gives.
"""

import argparse
from pathlib import Path
from time import process_time

import torch
from base import LENGTH, held_out, loss_of, optimizers_of
from torch import nn

from ms_compress.corpus import batches
from ms_compress.prune import keep_zeros, prune, sparsity
from ms_parallel.models import load_model, save_model


def main() -> None:
    """State the held-out perplexity before, without half of the weights, and after."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=32, help="rows of 256 tokens a step")
    parser.add_argument("--rate", type=float, default=0.01, help="Muon's; AdamW takes a fifth")
    parser.add_argument("--dense", action="store_true", help="prune nothing")
    options = parser.parse_args()
    torch.set_num_threads(1)
    model, shards = load_model(options.out / "base"), options.out / "shards"
    before = held_out(model, shards)
    if not options.dense:
        prune(model, "2:4")
    pruned = held_out(model, shards)
    print(f"held-out perplexity {before:.3f}, with zeros {pruned:.3f}", flush=True)
    retrain(model, shards, options)
    save_model(model, options.out / ("dense-longer" if options.dense else "sparse"))
    after = held_out(model, shards)
    print(
        f"held-out perplexity {after:.3f}, {after / before:.3f} of the base's,"
        f" {sparsity(model):.1%} zeros, {process_time():.0f} CPU s",
        flush=True,
    )


def retrain(model: nn.Module, shards: Path, options: argparse.Namespace) -> None:
    """So many steps, up in ten and then down to zero; what was pruned stays zero."""
    optimizers = optimizers_of(model, options.rate)
    peaks = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    for block in model.model.layers.values():
        block.compile()
    stream = batches(
        shards, split="train", sequence_length=LENGTH, batch_size=options.batch, seed=2
    )
    for step in range(options.steps):
        share = min((step + 1) / 10, (options.steps - step) / options.steps)
        for optimizer, peak in zip(optimizers, peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * share
        batch = next(stream)
        loss = loss_of(model, batch["tokens"], batch["targets"])
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        keep_zeros(model)
        if (step + 1) % 10 == 0:
            print(f"step {step + 1}  loss {loss.item():.3f}  {process_time():.0f} s", flush=True)


if __name__ == "__main__":
    main()
