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
from base import held_out, optimizers_of, take_steps

from ms_compress.prune import keep_zeros, prune, sparsity
from ms_parallel.models import load_model, save_model


def main() -> None:
    """State the held-out perplexity before, without half of the weights, and after."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=32, help="rows of 256 tokens a step")
    parser.add_argument("--rate", type=float, default=0.01, help="Muon's; AdamW takes a fifth")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dense", action="store_true", help="prune nothing")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model, shards = load_model(options.out / "base"), options.out / "shards"
    before = held_out(model, shards)
    if not options.dense:
        prune(model, "2:4")
    pruned = held_out(model, shards)
    print(f"held-out perplexity {before:.3f}, with zeros {pruned:.3f}", flush=True)
    optimizers = optimizers_of(model, options.rate)
    take_steps(
        model, shards, options, optimizers, share_of_rate, lambda step: keep_zeros(model), seed=2
    )
    save_model(model, options.out / ("dense-longer" if options.dense else "sparse"))
    after = held_out(model, shards)
    print(
        f"held-out perplexity {after:.3f}, {after / before:.3f} of the base's,"
        f" {sparsity(model):.1%} zeros, {process_time():.0f} CPU s",
        flush=True,
    )


def share_of_rate(step: int, steps: int) -> float:
    """Up in ten steps, then down to zero."""
    return min((step + 1) / 10, (steps - step) / steps)


if __name__ == "__main__":
    main()
