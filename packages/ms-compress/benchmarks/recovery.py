"""Recovery of the loss from rounding: RTN, GPTQ, QAT, distillation, sparsity.

    python packages/ms-compress/benchmarks/recovery.py BASE SHARDS OUT [--steps 100] [--only qat]

BASE is a plain decoder trained on SHARDS (see base.py); perplexities are over the held-out split.
Every trained model takes the same steps on the same batches, and so does a plain copy of BASE, so
that the gain from further training alone is known. Models that a runtime can read are exported and
measured in it: transformers, onnxruntime, llama.cpp, if installed. Results are stored in
OUT/recovery.json; a part named by `--only` is measured again, the others stay. The divergence from
BASE is given next to each perplexity.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from time import process_time

import torch
from torch import Tensor, nn

from ms_compress import ExportError, export, fit_scales, perplexity, qat
from ms_compress.corpus import rows
from ms_compress.methods.gptq import gptq
from ms_compress.methods.pruning import GradualPruning, keep_zeros, prune
from ms_compress.methods.wanda import wanda
from ms_compress.models.logits import next_token_logits
from ms_compress.targets.rules import scheme
from ms_compress.targets.target import open_runtime
from ms_compress.training.distillation import distillation_loss
from ms_compress.training.loop import tune
from ms_compress.training.options import Tuning
from ms_parallel.weights import load_model

LENGTH = 256
FOUR_BITS = ("ct.int4_g32", "ort.matmulnbits", "gguf.q4_0")
THREE_BITS = "ct.int3_g32"
GPTQ_LABELS = {
    "act_order": "in order of use",
    "by_loss": "by the loss",
    "fit_scales": "scales fitted",
}
GPTQ = (
    ("act_order",),
    ("fit_scales",),
    ("act_order", "fit_scales"),
    ("by_loss",),
    ("by_loss", "fit_scales"),
)
FLOATS = (
    "float",
    "float, trained further",
    "float, distilled further",
)


class Recovery:
    """All runs; results are written after each one."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options = options
        self.out = Path(options.out)
        self.held_out = rows(
            options.shards, split="held_out", sequence_length=LENGTH, count=options.rows
        )
        text = rows(options.shards, split="train", sequence_length=LENGTH, count=256, seed=7)
        self.calibration_for_training = list(text["tokens"].split(4))
        self.calibration = self.calibration_for_training[: options.calibration // 4]
        self.file = self.out / "recovery.json"

    @property
    def figures(self) -> dict[str, float]:
        """All perplexities so far, from other processes too."""
        return json.loads(self.file.read_text()) if self.file.is_file() else {}

    def plain(self) -> nn.Module:
        """Return a fresh copy of the base."""
        return load_model(self.options.base)

    def prepared(self, name: str) -> nn.Module:
        """Return a fresh copy prepared for a scheme, with nearest or GPTQ codes.

        With nearest codes the scales are the scheme's defaults: learned ones (LSQ) were worse after
        100 steps. GPTQ's scales are trained further.
        """
        if self.options.from_gptq:
            rows = self.calibration_for_training
            return self.rounded(name, rows, by_loss=True, for_training=True)
        return qat(self.plain(), name)

    def rounded(self, name: str, rows: list[Tensor] | None = None, **options: bool) -> nn.Module:
        """Return a copy quantized by GPTQ, on `rows` or the configured calibration rows."""
        calibration_rows = rows or self.calibration
        return apply(self.plain(), lambda model: gptq(model, name, calibration_rows, **options))

    def trained(
        self,
        model: nn.Module,
        *,
        taught: bool = False,
        longer: bool = False,
        schedule: GradualPruning | None = None,
    ) -> nn.Module:
        """Train for the common number of steps on the same batches; `longer` after pruning."""
        options = self.options
        steps = options.sparse_steps if longer else options.steps
        tuning = Tuning(
            steps=steps,
            batch_size=options.batch,
            sequence_length=LENGTH,
            learning_rate=options.sparse_rate if longer else options.rate,
            distill_weight=options.distill_weight,
            hidden_weight=options.hidden_weight,
        )
        text = rows(
            options.shards,
            split="train",
            sequence_length=LENGTH + 1,
            count=steps * options.batch,
            seed=1,
        )
        tune(
            model,
            text["tokens"],
            tuning,
            teacher=self.plain() if taught else None,
            before_step=None if schedule is None else lambda step: schedule.apply(model, step),
            after_step=lambda step: keep_zeros(model),
        )
        return model

    def run(self, name: str, make: Callable[[], nn.Module], *, deploy: bool = False) -> nn.Module:
        """Build a model and record its perplexity, also in its runtime if `deploy`."""
        torch.manual_seed(0)
        start = process_time()
        model = make()
        self.note(name, perplexity(model, self.held_out), start)
        self.note(f"{name}, divergence", self.divergence(model), start)
        if deploy:
            self.deployed(name, model)
        return model

    @torch.no_grad()
    def divergence(self, model: nn.Module) -> float:
        """Divergence from the base in nats per held-out token, less noisy than perplexity."""
        base = self.plain().eval()
        parts = self.held_out["tokens"].split(8)
        return sum(
            float(distillation_loss(next_token_logits(model.eval(), part), base_logits)) * len(part)
            for part in parts
            for base_logits in (next_token_logits(base, part),)
        ) / sum(map(len, parts))

    def deployed(self, name: str, model: nn.Module) -> None:
        """Record the perplexity of the exported file in its runtime."""
        folder = self.out / name.replace(",", "").replace(" ", "-")
        target = scheme(name.split()[-1]).target
        start = process_time()
        try:
            tokenizer = self.options.tokenizer
            runtime = open_runtime(
                export(model, folder, overwrite=True, tokenizer=tokenizer), target
            )
        except ExportError as error:
            print(f"{name}: not measured in its runtime: {error}", flush=True)
            return
        self.note(f"{name} in {runtime.name}", perplexity(runtime, self.held_out), start)

    def note(self, name: str, value: float, start: float) -> None:
        """Print and store a perplexity."""
        print(f"{name:52} {value:9.5g}  {process_time() - start:6.0f} s", flush=True)
        self.file.write_text(json.dumps({**self.figures, name: value}, indent=2) + "\n")


def apply(model: nn.Module, change: Callable[[nn.Module], object]) -> nn.Module:
    """Change a model in place and return it."""
    change(model)
    return model


def untrained(work: Recovery) -> None:
    """Measure the base and everything that needs no training."""
    work.run("float", work.plain)
    for name in work.options.scheme or (*FOUR_BITS, THREE_BITS):
        work.run(f"RTN {name}", lambda name=name: qat(work.plain(), name), deploy=True)
        fitted = qat(work.plain(), name, learned_scales=True)
        work.run(f"RTN, scales fitted {name}", lambda m=fitted: apply(m, fit_scales))
        work.run(f"GPTQ {name}", lambda name=name: work.rounded(name), deploy=True)
        for options in GPTQ:
            label = " and ".join(GPTQ_LABELS[option] for option in options)
            work.run(
                f"GPTQ, {label} {name}",
                lambda n=name, o=options: work.rounded(n, **dict.fromkeys(o, True)),
                deploy=options == ("by_loss",),
            )


def longer(work: Recovery) -> None:
    """Train the base in float for the same number of steps, and measure RTN after that."""
    control(work, FLOATS[1], work.run(FLOATS[1], lambda: work.trained(work.plain())))


def taught_float(work: Recovery) -> None:
    """Train the base in float with the distillation loss, and measure RTN after that."""
    label = FLOATS[2]
    control(work, label, work.run(label, lambda: work.trained(work.plain(), taught=True)))


def control(work: Recovery, label: str, model: nn.Module) -> None:
    """Round a further trained float model to nearest."""

    def rounded(name: str) -> nn.Module:
        fresh = work.plain()
        fresh.load_state_dict(model.state_dict())
        return qat(fresh, name)

    for name in FOUR_BITS:
        work.run(f"RTN of {label} {name}", lambda name=name: rounded(name))


def trained(work: Recovery, *, taught: bool) -> None:
    """Train on the text, or with a teacher."""
    prefix = "GPTQ, then " if work.options.from_gptq else ""
    label = "QAT with distillation" if taught else "QAT"
    for name in work.options.scheme or (*FOUR_BITS, THREE_BITS):
        work.run(
            f"{prefix}{label} {name}",
            lambda name=name: work.trained(work.prepared(name), taught=taught),
            deploy=True,
        )


def sparse(work: Recovery) -> None:
    """Measure 2:4 sparsity without and with retraining, and then also in four bits."""

    def pruned() -> nn.Module:
        return apply(work.plain(), lambda m: prune(m, "2:4"))

    def quantized(name: str) -> nn.Module:
        model = pruned()
        model.load_state_dict(state)
        return work.trained(qat(model, name), taught=True)

    work.run("2:4 Wanda", lambda: apply(work.plain(), lambda m: wanda(m, "2:4", work.calibration)))
    work.run("2:4 magnitude", pruned)
    retrained = work.run(
        "2:4 magnitude, retrained", lambda: work.trained(pruned(), taught=True, longer=True)
    )
    state = {name: value.clone() for name, value in retrained.state_dict().items()}
    for name in ("gguf.q4_0", "ct.int4_g32"):
        work.run(f"2:4 with QAT {name}", lambda name=name: quantized(name), deploy=True)


def gradual(work: Recovery) -> None:
    """Prune gradually by magnitude over the first half of the retraining."""
    schedule = GradualPruning(pattern="2:4", end=max(2, work.options.sparse_steps // 2), every=5)
    work.run(
        "2:4 gradual magnitude, retrained",
        lambda: work.trained(work.plain(), taught=True, longer=True, schedule=schedule),
    )
    work.run(
        "float, trained further for as long as the pruned model",
        lambda: work.trained(work.plain(), longer=True),
    )


def print_recovery(figures: dict[str, float]) -> None:
    """Print the fraction of RTN's loss in perplexity that was recovered, for base and control."""
    for name, value in figures.items():
        scheme_name = next((word for word in name.split() if word in (*FOUR_BITS, THREE_BITS)), "")
        label = name.partition(f" {scheme_name}")[0]
        rtn_of = {
            reference: figures.get(f"RTN of {reference} {scheme_name}") for reference in FLOATS
        }
        rtn_of["float"] = figures.get(f"RTN {scheme_name}")
        excluded = label.startswith("RTN of") or label in ("RTN", "2:4 with QAT")
        if rtn_of["float"] is None or excluded or name.endswith("divergence"):
            continue
        parts = [
            f"{(rounded - value) / (rounded - figures[reference]):4.0%} of RTN's loss, {reference}"
            for reference, rounded in rtn_of.items()
            if rounded is not None and reference in figures
        ]
        print(f"{name:52} {'; '.join(parts)}")


PARTS: dict[str, Callable[[Recovery], None]] = {
    "untrained": untrained,
    "float": longer,
    "taught-float": taught_float,
    "qat": lambda work: trained(work, taught=False),
    "taught": lambda work: trained(work, taught=True),
    "sparse": sparse,
    "gradual": gradual,
}


def main() -> None:
    """Print every perplexity with its CPU seconds, then the recovered fractions."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base")
    parser.add_argument("shards")
    parser.add_argument("out")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=4, help="rows of 256 tokens per step")
    parser.add_argument("--rows", type=int, default=64, help="held-out rows of 256 tokens")
    parser.add_argument("--calibration", type=int, default=64, help="rows for GPTQ; peers use 64")
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument(
        "--distill-weight",
        type=float,
        default=1.0,
        help="weight of the divergence; the rest is text",
    )
    parser.add_argument("--hidden-weight", type=float, default=0.0, help="weight of hidden states")
    parser.add_argument("--sparse-steps", type=int, default=1200, help="steps after pruning")
    parser.add_argument("--sparse-rate", type=float, default=1e-3)
    parser.add_argument("--tokenizer", help="a tokenizer.json to export with the models")
    parser.add_argument("--from-gptq", action="store_true", help="train on from GPTQ's codes")
    parser.add_argument("--scheme", choices=(*FOUR_BITS, THREE_BITS), action="append")
    parser.add_argument("--only", choices=PARTS, action="append")
    options = parser.parse_args()
    Path(options.out).mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    work = Recovery(options)
    for part in options.only or PARTS:
        PARTS[part](work)
    print_recovery(work.figures)


if __name__ == "__main__":
    main()
