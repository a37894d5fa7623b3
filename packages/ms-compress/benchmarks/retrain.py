"""Continue training a base model as it was trained: dense, 2:4 sparse, or in few bits.

    cd packages/ms-compress/benchmarks
    python retrain.py OUT dense
    python retrain.py OUT sparse --prune --start dense --seed 3
    python retrain.py OUT qat-q4_0 --scheme gguf.q4_0
    python retrain.py OUT taught-q4_0 --scheme gguf.q4_0 --start dense --teacher dense --rate 3e-3
    python retrain.py OUT sparse-q4_0 --prune --scheme gguf.q4_0 --start sparse --teacher dense

OUT is the output folder of base.py. All runs take the same steps on the same batches with the
base's own optimizers, at half its learning rate, decaying to zero. `dense` is neither quantized nor
pruned: it shows the gain from the additional steps alone, and its RTN the cost of rounding after
them. A model is saved, or exported for its target and loaded in its runtime, in OUT/NAME; results
are stored in OUT/retrain.json. Ten to twenty minutes per run on one CPU core.
"""

import argparse
import json
from pathlib import Path
from time import process_time

import torch
from base import LENGTH, loss_of, optimizers_of, take_steps
from torch import Tensor, nn

from ms_compress import ExportError, distillation_loss, export, perplexity, qat
from ms_compress.corpus import rows
from ms_compress.methods.pruning import keep_zeros, prune, sparsity
from ms_compress.targets.rules import scheme
from ms_compress.targets.target import open_runtime
from ms_parallel.weights import load_model, save_model


def main() -> None:
    """Print the held-out perplexity of the starting model and of the result."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("name", help="name of the output folder and of the results")
    parser.add_argument("--start", default="base", help="folder in OUT of the starting model")
    parser.add_argument("--scheme", help="quantization scheme to train for")
    parser.add_argument("--prune", action="store_true", help="prune 2 of every 4 by magnitude")
    parser.add_argument("--teacher", help="folder in OUT of a teacher to distill from")
    parser.add_argument(
        "--text", type=float, default=0.0, help="weight of the text loss next to a teacher"
    )
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=32, help="rows of 256 tokens per step")
    parser.add_argument("--rate", type=float, default=0.01, help="Muon's; AdamW uses a fifth")
    parser.add_argument("--seed", type=int, default=2, help="order of the text; base.py uses 1")
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
    results = json.loads(file.read_text()) if file.is_file() else {}
    file.write_text(json.dumps({**results, options.name: figures}, indent=2) + "\n")


def retrain(model: nn.Module, options: argparse.Namespace) -> None:
    """Run `options.steps` steps; pruned weights stay zero."""
    teacher = load_model(options.out / options.teacher).eval() if options.teacher else None

    def loss(student: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
        if teacher is None:
            return loss_of(student, tokens, targets)
        with torch.no_grad():
            teacher_logits = teacher(tokens)
        logits = student(tokens)
        divergence = distillation_loss(logits, teacher_logits)
        if not options.text:
            return divergence
        text_loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        return (1 - options.text) * divergence + options.text * text_loss

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
    """Warm up over ten steps, then decay linearly to zero."""
    return min((step + 1) / 10, (steps - step) / steps)


def save(
    model: nn.Module,
    options: argparse.Namespace,
    held_out: dict[str, Tensor],
    figures: dict[str, float],
) -> None:
    """Save the model, or export it and measure its perplexity in the runtime."""
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
