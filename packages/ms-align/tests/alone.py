"""Facts checked by `nox -s alone`: the installed wheel in an environment without extras."""

import importlib.util
import subprocess
import sys

import torch
from torch import nn

import ms_align
from ms_align import LocalEngine, gae
from ms_align.engines.optimizer import OptimizerOptions
from ms_align.losses.policy import PolicyLoss


def check(condition: bool, fact: str) -> None:
    """Exit with status 1 if a fact does not hold."""
    if not condition:
        sys.exit(f"does not hold: {fact}")


def main() -> None:
    """Check a formula and the command."""
    for sibling in ("ms_data", "ms_kernels", "ms_parallel", "ms_compress", "ms_profile"):
        check(importlib.util.find_spec(sibling) is None, f"{sibling} is not installed")
    rewards, values = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.25, 0.5]])
    advantages = gae(rewards, values, torch.ones(1, 2), lam=1.0)
    check(advantages.tolist() == [[0.75, 0.5]], "with λ = 1 an advantage is return minus value")
    engine = LocalEngine(
        nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 7)), OptimizerOptions(learning_rate=0.1)
    )
    rows = {"tokens": torch.tensor([[1, 2, 3]]), "targets": torch.tensor([[2, 3, -100]])}
    rows |= {"advantages": torch.ones(1, 3), "old_logprobs": torch.zeros(1, 3)}

    def logprob() -> float:
        """Log-probabilities of the targets."""
        return -float(engine.evaluate(rows, lambda o, b: o.token_losses(b["targets"])).sum())

    rows["old_logprobs"] = torch.full((1, 3), logprob() / 2)
    before = logprob()
    engine.step(rows, PolicyLoss(clip_high=9.0))
    check(logprob() > before, "a rewarded response becomes more likely")
    command = [sys.executable, "-I", "-m", "ms_align", "--help"]
    check(
        subprocess.run(command, capture_output=True).returncode == 0, "the command prints its help"
    )
    print(f"ms-align {ms_align.__version__} works alone")


if __name__ == "__main__":
    main()
