"""What every method and command does, on this process's device; see `test_device.py`."""

import sys
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent))
from models import decoder, llama, tokens

from ms_compress import (
    Tuning,
    cut_student,
    export,
    fit_scales,
    gptq,
    perplexity,
    prune,
    qat,
    tune,
    wanda,
)
from ms_compress.cli import main


def here() -> torch.device:
    """This process's device, which is not the CPU."""
    found = torch.accelerator.current_accelerator()
    assert found is not None
    return found


TUNING = Tuning(steps=2, batch_size=4, sequence_length=32)


BATCHES = [tokens(4, 32, seed=seed) for seed in range(2)]


def _qat(model: nn.Module) -> None:
    qat(model, "ct.int4_g32", learned_scales=True)
    fit_scales(model)
    tune(model, tokens(16, 33), TUNING)


def _sparse(model: nn.Module) -> None:
    wanda(model, "2:4", BATCHES)
    qat(model, "ct.int4_g32")
    tune(model, tokens(16, 33), TUNING)


def _pruned(model: nn.Module) -> None:
    prune(model, 0.5)
    qat(model, "ort.matmulnbits")


METHODS: dict[str, Callable[[nn.Module], object]] = {
    "qat": _qat,
    "gptq": lambda model: gptq(model, "ct.int4_g32", BATCHES, act_order=True),
    "gptq by loss": lambda model: gptq(model, "ct.int4_g32", BATCHES, by_loss=True),
    "sparse": _sparse,
    "pruned": _pruned,
    "gguf": lambda model: qat(model, "gguf.q4_0", embeddings=True, head=True, activations=False),
}


def methods(folder: str) -> dict[str, list[float]]:
    """Each method's perplexity on the device and on the CPU, after which its export is verified."""
    found = {}
    for make in (decoder, llama):
        for name, method in METHODS.items():
            found[f"{make.__name__}, {name}"] = [
                _under(make().to(device), method, Path(folder, f"{make.__name__} {name} {device}"))
                for device in (here(), torch.device("cpu"))
            ]
    return found


def _under(model: nn.Module, method: Callable[[nn.Module], object], folder: Path) -> float:
    method(model)
    # GGUF is verified by llama.cpp, which is built for `nox -s deploy` alone.
    export(model, folder, verify="gguf" not in folder.name)
    return perplexity(model, tokens(4, 33))


def student() -> bool:
    """Whether a student that is cut on the device stays there while it learns."""
    made = cut_student(decoder(4).to(here()), layers=2)
    tune(made, tokens(16, 33), TUNING, teacher=decoder(4).to(here()))
    return all(parameter.device.type == here().type for parameter in made.parameters())


def commands(run: str, calls: list[list[str]]) -> list[int]:
    """Exit codes of commands that read a run file."""
    return [main([name, run, *arguments]) for name, *arguments in calls]
