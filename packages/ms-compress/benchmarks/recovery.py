"""How much of what rounding loses comes back: RTN, GPTQ, QAT, distillation, sparsity.

    python packages/ms-compress/benchmarks/recovery.py BASE SHARDS OUT [--steps 100] [--only qat]

BASE is a plain decoder that was trained on SHARDS (see base.py), whose held-out split the
perplexities are of. Each trained model takes the same steps on the same batches, and so does a
plain copy of BASE: what further training alone gives is stated beside what is recovered. Models
that a runtime reads are exported and read again by it: transformers, onnxruntime, llama.cpp,
whichever is installed. Figures are kept in OUT/recovery.json; a part that `--only` names is
measured anew, the others stay. Beside each perplexity stands the divergence from BASE.
"""

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from time import process_time

import torch
from torch import Tensor, nn

from ms_compress import ExportError, export, fit_scales, perplexity, qat
from ms_compress.methods.gptq import gptq
from ms_compress.methods.pruning import GradualPruning, keep_zeros, prune
from ms_compress.methods.wanda import wanda
from ms_compress.models.logits import next_token_logits
from ms_compress.targets.rules import scheme
from ms_compress.targets.target import open_runtime
from ms_compress.training.corpus import rows
from ms_compress.training.distillation import distillation_loss
from ms_compress.training.loop import tune
from ms_compress.training.options import Tuning
from ms_parallel.weights import load_model

LENGTH = 256
FOUR_BITS = ("ct.int4_g32", "ort.matmulnbits", "gguf.q4_0")
THREE_BITS = "ct.int3_g32"
WAYS = {"act_order": "in order of use", "by_loss": "by the loss", "fit_scales": "scales fitted"}
GPTQ = (
    ("act_order",),
    ("fit_scales",),
    ("act_order", "fit_scales"),
    ("by_loss",),
    ("by_loss", "fit_scales"),
)
FLOATS = (
    "float",
    "float, as many more steps",
    "float, as many more steps with distillation",
)


class Recovery:
    """All runs, their figures written after each."""

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
        """All perplexities so far, those of other processes too."""
        return json.loads(self.file.read_text()) if self.file.is_file() else {}

    def plain(self) -> nn.Module:
        """A fresh copy of the base."""
        return load_model(self.options.base)

    def prepared(self, name: str) -> nn.Module:
        """A fresh copy that computes as a scheme's target will, on the nearest codes or GPTQ's.

        From the nearest codes scales are the scheme's own: learned ones (LSQ) ended higher after
        100 steps. GPTQ's are learned on.
        """
        if self.options.from_gptq:
            rows = self.calibration_for_training
            return self.rounded(name, rows, by_loss=True, for_training=True)
        return qat(self.plain(), name)

    def rounded(self, name: str, rows: list[Tensor] | None = None, **how: bool) -> nn.Module:
        """By GPTQ, on as many rows as asked, if no others are given."""
        chosen = rows or self.calibration
        return changed(self.plain(), lambda model: gptq(model, name, chosen, **how))

    def trained(
        self,
        model: nn.Module,
        *,
        taught: bool = False,
        longer: bool = False,
        schedule: GradualPruning | None = None,
    ) -> nn.Module:
        """After as many steps as every other, on the same batches; `longer` for what was pruned."""
        asked = self.options
        steps = asked.sparse_steps if longer else asked.steps
        how = Tuning(
            steps=steps,
            batch_size=asked.batch,
            sequence_length=LENGTH,
            learning_rate=asked.sparse_rate if longer else asked.rate,
            distill_weight=asked.distill_weight,
            hidden_weight=asked.hidden_weight,
        )
        text = rows(
            asked.shards,
            split="train",
            sequence_length=LENGTH + 1,
            count=steps * asked.batch,
            seed=1,
        )
        tune(
            model,
            text["tokens"],
            how,
            teacher=self.plain() if taught else None,
            before_step=None if schedule is None else lambda step: schedule.apply(model, step),
            after_step=lambda step: keep_zeros(model),
        )
        return model

    def run(self, name: str, make: Callable[[], nn.Module], *, deploy: bool = False) -> nn.Module:
        """Make a model and note its perplexity, and that of the exported file if asked."""
        torch.manual_seed(0)
        began = process_time()
        model = make()
        self.note(name, perplexity(model, self.held_out), began)
        self.note(f"{name}, divergence", self.divergence(model), began)
        if deploy:
            self.deployed(name, model)
        return model

    @torch.no_grad()
    def divergence(self, model: nn.Module) -> float:
        """From the base, nats a token of the held-out rows: less noisy than perplexity is."""
        base = self.plain().eval()
        parts = self.held_out["tokens"].split(8)
        return sum(
            float(distillation_loss(next_token_logits(model.eval(), part), aim)) * len(part)
            for part in parts
            for aim in (next_token_logits(base, part),)
        ) / sum(map(len, parts))

    def deployed(self, name: str, model: nn.Module) -> None:
        """The same model, as its runtime computes the file."""
        folder = self.out / name.replace(",", "").replace(" ", "-")
        target = scheme(name.split()[-1]).target
        began = process_time()
        try:
            tokenizer = self.options.tokenizer
            runtime = open_runtime(
                export(model, folder, overwrite=True, tokenizer=tokenizer), target
            )
        except ExportError as error:
            print(f"{name}: not measured in its runtime: {error}", flush=True)
            return
        self.note(f"{name} in {runtime.name}", perplexity(runtime, self.held_out), began)

    def note(self, name: str, value: float, began: float) -> None:
        """State and keep a perplexity."""
        print(f"{name:52} {value:9.5g}  {process_time() - began:6.0f} s", flush=True)
        self.file.write_text(json.dumps({**self.figures, name: value}, indent=2) + "\n")


def changed(model: nn.Module, change: Callable[[nn.Module], object]) -> nn.Module:
    """A model, changed in place."""
    change(model)
    return model


def untrained(work: Recovery) -> None:
    """The base, and what needs no training."""
    work.run("float", work.plain)
    for name in work.options.scheme or (*FOUR_BITS, THREE_BITS):
        work.run(f"RTN {name}", lambda name=name: qat(work.plain(), name), deploy=True)
        fitted = qat(work.plain(), name, learned_scales=True)
        work.run(f"RTN, scales fitted {name}", lambda m=fitted: changed(m, fit_scales))
        work.run(f"GPTQ {name}", lambda name=name: work.rounded(name), deploy=True)
        for ways in GPTQ:
            how = " and ".join(WAYS[each] for each in ways)
            work.run(
                f"GPTQ, {how} {name}",
                lambda n=name, w=ways: work.rounded(n, **dict.fromkeys(w, True)),
                deploy=ways == ("by_loss",),
            )


def longer(work: Recovery) -> None:
    """The base in float, trained as long as every other, and what rounding this one loses."""
    control(work, FLOATS[1], work.run(FLOATS[1], lambda: work.trained(work.plain())))


def taught_float(work: Recovery) -> None:
    """The base in float by the very loss of distillation, from the base itself; likewise."""
    how = FLOATS[2]
    control(work, how, work.run(how, lambda: work.trained(work.plain(), taught=True)))


def control(work: Recovery, how: str, model: nn.Module) -> None:
    """A float model that was trained on, rounded to nearest."""

    def rounded(name: str) -> nn.Module:
        again = work.plain()
        again.load_state_dict(model.state_dict())
        return qat(again, name)

    for name in FOUR_BITS:
        work.run(f"RTN of {how} {name}", lambda name=name: rounded(name))


def trained(work: Recovery, *, taught: bool) -> None:
    """Trained on the text, or by a teacher."""
    first = "GPTQ, then " if work.options.from_gptq else ""
    how = "QAT with distillation" if taught else "QAT"
    for name in work.options.scheme or (*FOUR_BITS, THREE_BITS):
        work.run(
            f"{first}{how} {name}",
            lambda name=name: work.trained(work.prepared(name), taught=taught),
            deploy=True,
        )


def sparse(work: Recovery) -> None:
    """2:4 without and with retraining, and then in four bits too."""

    def pruned() -> nn.Module:
        return changed(work.plain(), lambda m: prune(m, "2:4"))

    def again(name: str) -> nn.Module:
        model = pruned()
        model.load_state_dict(state)
        return work.trained(qat(model, name), taught=True)

    work.run(
        "2:4 Wanda", lambda: changed(work.plain(), lambda m: wanda(m, "2:4", work.calibration))
    )
    work.run("2:4 magnitude", pruned)
    retrained = work.run(
        "2:4 magnitude, retrained", lambda: work.trained(pruned(), taught=True, longer=True)
    )
    state = {name: value.clone() for name, value in retrained.state_dict().items()}
    for name in ("gguf.q4_0", "ct.int4_g32"):
        work.run(f"2:4 with QAT {name}", lambda name=name: again(name), deploy=True)


def gradual(work: Recovery) -> None:
    """Pruned over the first half of the retraining, by magnitude."""
    how = GradualPruning(pattern="2:4", end=max(2, work.options.sparse_steps // 2), every=5)
    work.run(
        "2:4 gradual magnitude, retrained",
        lambda: work.trained(work.plain(), taught=True, longer=True, schedule=how),
    )
    work.run(
        "float, as many more steps as what was pruned",
        lambda: work.trained(work.plain(), longer=True),
    )


def shares(figures: dict[str, float]) -> None:
    """Print how much of the perplexity that RTN loses came back, for the base and its control."""
    for name, value in figures.items():
        chosen = next((word for word in name.split() if word in (*FOUR_BITS, THREE_BITS)), "")
        how = name.partition(f" {chosen}")[0]
        lost = {to: figures.get(f"RTN of {to} {chosen}") for to in FLOATS}
        lost["float"] = figures.get(f"RTN {chosen}")
        untold = how.startswith("RTN of") or how in ("RTN", "2:4 with QAT")
        if lost["float"] is None or untold or name.endswith("divergence"):
            continue
        parts = [
            f"{(rounded - value) / (rounded - figures[to]):4.0%} of what RTN loses of {to}"
            for to, rounded in lost.items()
            if rounded is not None and to in figures
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
    """Print each perplexity with the processor seconds it took, then the shares recovered."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("base")
    parser.add_argument("shards")
    parser.add_argument("out")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--batch", type=int, default=4, help="rows of 256 tokens a step")
    parser.add_argument("--rows", type=int, default=64, help="held-out rows of 256 tokens")
    parser.add_argument("--calibration", type=int, default=64, help="rows for GPTQ; the peers' 64")
    parser.add_argument("--rate", type=float, default=1e-4)
    parser.add_argument("--distill-weight", type=float, default=1.0, help="the text's is the rest")
    parser.add_argument("--hidden-weight", type=float, default=0.0, help="of layers' outputs")
    parser.add_argument("--sparse-steps", type=int, default=1200, help="after pruning")
    parser.add_argument("--sparse-rate", type=float, default=1e-3)
    parser.add_argument("--tokenizer", help="a tokenizer.json to go with what is exported")
    parser.add_argument("--from-gptq", action="store_true", help="train on from GPTQ's codes")
    parser.add_argument("--scheme", choices=(*FOUR_BITS, THREE_BITS), action="append")
    parser.add_argument("--only", choices=PARTS, action="append")
    options = parser.parse_args()
    Path(options.out).mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    work = Recovery(options)
    for part in options.only or PARTS:
        PARTS[part](work)
    shares(work.figures)


if __name__ == "__main__":
    main()
