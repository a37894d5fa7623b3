"""Train on from a base as the base was trained: dense, with half of its weights, in few bits.

    cd packages/ms-compress/benchmarks
    python retrain.py OUT dense
    python retrain.py OUT sparse --prune --start dense --seed 3
    python retrain.py OUT qat-q4_0 --scheme gguf.q4_0
    python retrain.py OUT taught-q4_0 --scheme gguf.q4_0 --start dense --teacher dense --rate 3e-3
    python retrain.py OUT sparse-q4_0 --prune --scheme gguf.q4_0 --start sparse --teacher dense

OUT is what base.py wrote. All take the same steps on the same batches with the base's own
optimizers, at half its rate falling to zero: `dense`, which is neither rounded nor pruned, tells
what the steps give by themselves, and its RTN what rounding then costs. A model is saved, or
exported for its target and read again by its runtime, in OUT/NAME; figures are kept in
OUT/retrain.json. Ten to twenty minutes of one processor each.
"""

import argparse
import json
from pathlib import Path
from time import process_time

import torch
from base import LENGTH, loss_of, optimizers_of, take_steps
from torch import Tensor, nn

from ms_compress import ExportError, distillation_loss, export, perplexity, qat
from ms_compress.methods.pruning import keep_zeros, prune, sparsity
from ms_compress.targets.rules import scheme
from ms_compress.targets.target import open_runtime
from ms_compress.training.corpus import rows
from ms_parallel.weights import load_model, save_model


def main() -> None:
    """State the held-out perplexity of the model that is begun with, and of what comes of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("name", help="of the folder, and of the figures")
    parser.add_argument("--start", default="base", help="folder in OUT of the model to begin with")
    parser.add_argument("--scheme", help="round weights as its target does")
    parser.add_argument("--prune", action="store_true", help="2 of every 4, those nearest zero")
    parser.add_argument("--teacher", help="folder in OUT whose logits are learnt, not the text")
    parser.add_argument(
        "--text", type=float, default=0.0, help="share of the text beside a teacher"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=32, help="rows of 256 tokens a step")
    parser.add_argument("--rate", type=float, default=0.01, help="Muon's; AdamW takes a fifth")
    parser.add_argument("--seed", type=int, default=2, help="order of the text; base.py takes 1")
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    held_out = rows(options.out / "shards", split="held_out", sequence_length=LENGTH, count=64)
    model = load_model(options.out / options.start)
    figures = {"start": perplexity(model, held_out)}
    if options.prune:
        prune(model, "2:4")
    if options.scheme:
        qat(model, options.scheme)
    figures["untrained"] = perplexity(model, held_out)
    print(f"{options.name}: {figures}", flush=True)
    if options.steps:
        retrain(model, options)
        figures["trained"] = perplexity(model, held_out)
    figures["zeros"] = sparsity(model)
    save(model, options, held_out, figures)
    figures["cpu_seconds"] = process_time()
    print(f"{options.name}: {figures}", flush=True)
    file = options.out / "retrain.json"
    known = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**known, options.name: figures}, indent=2) + "\n")


def retrain(model: nn.Module, options: argparse.Namespace) -> None:
    """So many steps; what was pruned stays zero."""
    teacher = load_model(options.out / options.teacher).eval() if options.teacher else None

    def loss(student: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        if teacher is None:
            return loss_of(student, tokens, targets)
        with torch.no_grad():
            aim = teacher(tokens)
        logits = student(tokens)
        apart = distillation_loss(logits, aim)
        if not options.text:
            return apart
        own = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return (1 - options.text) * apart + options.text * own

    model.train()
    take_steps(
        model,
        options.out / "shards",
        options,
        optimizers_of(model, options.rate),
        share_of_rate,
        lambda step: keep_zeros(model),
        seed=options.seed,
        loss=loss,
    )
    model.eval()


def share_of_rate(step: int, steps: int) -> float:
    """Up in ten steps, then down to zero."""
    return min((step + 1) / 10, (steps - step) / steps)


def save(
    model: nn.Module,
    options: argparse.Namespace,
    held_out: dict[str, Tensor],
    figures: dict[str, float],
) -> None:
    """The model; or what its target reads, and the perplexity that the runtime has of it."""
    folder = options.out / options.name
    if not options.scheme:
        save_model(model, folder)
        return
    export(model, folder, overwrite=True, tokenizer=options.out / "tokenizer.json")
    try:
        runtime = open_runtime(folder, scheme(options.scheme).target)
    except ExportError as error:
        print(f"not measured in its runtime: {error}", flush=True)
        return
    figures[f"in {runtime.name}"] = perplexity(runtime, held_out)


if __name__ == "__main__":
    main()
