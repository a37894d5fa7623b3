"""Check of the installed wheel with only its dependencies, run by `nox -s alone`."""

import importlib.util
import sys
import tempfile
from pathlib import Path

import torch

import ms_parallel
from ms_parallel import Engine, Layout, load_model, save_model
from ms_parallel.engine.loss import NextTokenLoss
from ms_parallel.models import architecture
from ms_parallel.schedules import one_f_one_b, verify


def check(holds: bool, fact: str) -> None:
    """Exit with status 1 if a fact does not hold."""
    if not holds:
        sys.exit(f"does not hold: {fact}")


def main() -> None:
    """Verify a schedule, and train, save and load a model."""
    for sibling in ("ms_data", "ms_kernels", "ms_align", "ms_compress", "ms_profile"):
        check(importlib.util.find_spec(sibling) is None, f"{sibling} is absent here")
    check(verify(one_f_one_b(4, 8)).peak_activations == (4, 3, 2, 1), "1F1B is as published")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    sizes |= {"num_attention_heads": 4, "num_key_value_heads": 2}
    engine = Engine(architecture("llama", sizes), Layout(), device="cpu")
    tokens = torch.arange(64).reshape(2, 32)
    batch = {"tokens": tokens, "targets": tokens.roll(-1, 1)}
    losses = [engine.step(batch, NextTokenLoss()).loss for _ in range(5)]
    check(losses[-1] < losses[0], "training lowers the loss")
    with tempfile.TemporaryDirectory() as folder:
        (model,) = engine.stages.values()
        save_model(model, Path(folder, "model"))
        loaded = load_model(Path(folder, "model"))
        check(torch.equal(loaded(tokens), model(tokens)), "a saved model loads equal")
    print(f"ms-parallel {ms_parallel.__version__} works alone")


if __name__ == "__main__":
    main()
