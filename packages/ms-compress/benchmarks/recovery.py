"""How much of what rounding loses comes back: RTN, GPTQ, QAT, distillation, sparsity.

python packages/ms-compress/benchmarks/recovery.py BASE SHARDS OUT [--steps 100] [--rows 64]

BASE is a plain decoder that was trained on SHARDS, whose held-out split the perplexities are of.
Each trained model takes the same steps on the same batches, and so does a plain copy of BASE: what
further training alone gives is stated beside what is recovered. Exports of int4 are read again by
onnxruntime and by llama.cpp, whichever is installed.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from time import process_time

import torch
from torch import Tensor, nn

from ms_compress import ExportError, export, qat
from ms_compress.corpus import rows
from ms_compress.evaluate import perplexity
from ms_compress.gptq import gptq
from ms_compress.prune import GradualPruning, keep_zeros, prune
from ms_compress.runtimes import open_runtime
from ms_compress.tuning import Tuning, tune
from ms_compress.wanda import wanda
from ms_parallel.models import load_model

LENGTH = 256


class Here:
    """A model in this process, as perplexity wants it."""

    name = "torch"

    def __init__(self, model: nn.Module) -> None:
        self.model = model.eval()

    @torch.no_grad()
    def logits(self, tokens: Tensor) -> Tensor:
        """(B, S) int64 to (B, S, V)."""
        out: Tensor = self.model(tokens)
        return out


class Recovery:
    """All runs, their figures written after each."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.held_out = rows(
            options.shards, split="held_out", sequence_length=LENGTH, count=options.rows
        )
        self.calibration = list(
            rows(options.shards, split="train", sequence_length=LENGTH, count=32, seed=7)[
                "tokens"
            ].split(4)
        )
        wanted = options.steps * options.batch
        self.text = rows(
            options.shards, split="train", sequence_length=LENGTH + 1, count=wanted, seed=1
        )["tokens"]
        self.figures: dict[str, float] = {}

    def plain(self) -> nn.Module:
        """A fresh copy of the base."""
        return load_model(self.options.base)

    def trained(
        self,
        model: nn.Module,
        *,
        taught: bool = False,
        schedule: GradualPruning | None = None,
    ) -> nn.Module:
        """After as many steps as every other, on the same batches."""
        how = Tuning(
            steps=self.options.steps,
            batch_size=self.options.batch,
            sequence_length=LENGTH,
            learning_rate=self.options.rate,
            distil_weight=0.9,
        )
        tune(
            model,
            self.text,
            how,
            teacher=self.plain() if taught else None,
            before_step=None if schedule is None else lambda step: schedule.apply(model, step),
            after_step=lambda step: keep_zeros(model),
        )
        return model

    def note(self, name: str, model: nn.Module, began: float) -> None:
        """State and keep a perplexity."""
        self.figures[name] = perplexity(Here(model), self.held_out)
        print(f"{name:44} {self.figures[name]:9.3f}  {process_time() - began:6.0f} s", flush=True)
        path = Path(self.options.out) / "recovery.json"
        path.write_text(json.dumps(self.figures, indent=2) + "\n")

    def run(self, name: str, make: Callable[[], nn.Module]) -> nn.Module:
        """Make a model and note it."""
        torch.manual_seed(0)
        began = process_time()
        model = make()
        self.note(name, model, began)
        return model

    def deployed(self, name: str, model: nn.Module, target: str) -> None:
        """The same model, as its runtime computes the file."""
        folder = Path(self.options.out) / name.replace(" ", "-")
        began = process_time()
        try:
            runtime = open_runtime(export(model, folder, overwrite=True), target)
        except ExportError as error:
            print(f"{name}: not measured in its runtime: {error}", flush=True)
            return
        self.figures[f"{name} in {runtime.name}"] = perplexity(runtime, self.held_out)
        print(
            f"{name + ' in ' + runtime.name:44} {self.figures[f'{name} in {runtime.name}']:9.3f}"
            f"  {process_time() - began:6.0f} s",
            flush=True,
        )


def changed(model: nn.Module, change: Callable[[nn.Module], object]) -> nn.Module:
    """A model, changed in place."""
    change(model)
    return model


def main() -> None:
    """Print each perplexity with the processor seconds it took, then the shares recovered."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base")
    parser.add_argument("shards")
    parser.add_argument("out")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rows", type=int, default=64)
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--untrained", action="store_true", help="leave out what needs training")
    options = parser.parse_args()
    Path(options.out).mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    work = Recovery(options)
    post_training(work)
    if options.untrained:
        return
    at_four_bits(work)
    at_three_bits(work)
    sparse(work)
    for bits in (4, 3):
        share(work.figures, bits)


def post_training(work: Recovery) -> None:
    """What needs no training."""
    work.run("float", work.plain)
    for bits in (4, 3):
        name = f"ct.int{bits}_g32"
        work.run(f"RTN int{bits}", lambda name=name: changed(work.plain(), lambda m: qat(m, name)))
        work.run(
            f"GPTQ int{bits}",
            lambda name=name: changed(work.plain(), lambda m: gptq(m, name, work.calibration)),
        )
    for target, name in (("ort", "ort.matmulnbits"), ("gguf", "gguf.q4_0")):
        model = work.run(
            f"RTN {name}", lambda name=name: changed(work.plain(), lambda m: qat(m, name))
        )
        work.deployed(f"RTN {name}", model, target)


def at_four_bits(work: Recovery) -> None:
    """Trained, and trained by a teacher."""
    work.run("float, as many more steps", lambda: work.trained(work.plain()))
    for target, name in (("ort", "ort.matmulnbits"), ("gguf", "gguf.q4_0")):
        model = work.run(f"QAT {name}", lambda name=name: work.trained(qat(work.plain(), name)))
        work.deployed(f"QAT {name}", model, target)
    work.run("QAT int4", lambda: work.trained(qat(work.plain(), "ct.int4_g32")))
    work.run(
        "QAT int4 with distillation",
        lambda: work.trained(qat(work.plain(), "ct.int4_g32"), taught=True),
    )


def at_three_bits(work: Recovery) -> None:
    """Learned scales too."""
    work.run("QAT int3", lambda: work.trained(qat(work.plain(), "ct.int3_g32")))
    work.run(
        "QAT int3 with distillation",
        lambda: work.trained(qat(work.plain(), "ct.int3_g32"), taught=True),
    )


def sparse(work: Recovery) -> None:
    """2:4 without and with retraining, and with four bits."""

    def pruned() -> nn.Module:
        return changed(work.plain(), lambda m: wanda(m, "2:4", work.calibration))

    work.run("2:4 magnitude", lambda: changed(work.plain(), lambda m: prune(m, "2:4")))
    work.run("2:4 Wanda", pruned)
    work.run("2:4 Wanda, retrained", lambda: work.trained(pruned()))
    work.run("2:4 Wanda with QAT int4", lambda: work.trained(qat(pruned(), "ct.int4_g32")))
    gradual = GradualPruning(how="2:4", end=max(2, work.options.steps // 2), every=5)
    work.run(
        "2:4 gradual magnitude, retrained",
        lambda: work.trained(work.plain(), schedule=gradual),
    )


def share(figures: dict[str, float], bits: int) -> None:
    """Of the perplexity that RTN loses, what came back; and of the way to float trained as long."""
    plain, longer, lost = (
        figures[name] for name in ("float", "float, as many more steps", f"RTN int{bits}")
    )
    for name in (f"GPTQ int{bits}", f"QAT int{bits}", f"QAT int{bits} with distillation"):
        gained = lost - figures[name]
        print(
            f"{name}: {gained / (lost - plain):.0%} of RTN's loss recovered,"
            f" {gained / (lost - longer):.0%} of the way to float after as many steps"
        )


if __name__ == "__main__":
    main()
