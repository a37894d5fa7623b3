"""What every method and command does, on this process's device; see `test_device.py`."""

from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import torch
from models import decoder, llama, tokens
from torch import nn

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


def device() -> torch.device:
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

OF_TRANSFORMERS = {"gptq", "sparse"}
"""Methods that are tried with a model of transformers; the others, with one of ms-parallel."""


def methods(folder: str) -> dict[str, list[float]]:
    """Each method's perplexity on the device, whence its export is verified, and on the CPU."""
    found = {}
    for name, method in METHODS.items():
        model = (llama if name in OF_TRANSFORMERS else decoder)()
        there, here = deepcopy(model).to(device()), model
        method(there)
        # GGUF is verified by llama.cpp, which is built for `nox -s deploy` alone.
        export(there, Path(folder, name), verify=name != "gguf")
        method(here)
        found[name] = [perplexity(each, tokens(4, 33)) for each in (there, here)]
    return found


def student() -> bool:
    """Whether a student that is cut on the device stays there while it learns."""
    made = cut_student(decoder(4).to(device()), layers=2)
    tune(made, tokens(16, 33), TUNING, teacher=decoder(4).to(device()))
    return all(parameter.device.type == device().type for parameter in made.parameters())


def commands(run: str, calls: list[list[str]]) -> list[int]:
    """Exit codes of commands that read a run file."""
    return [main([name, run, *arguments]) for name, *arguments in calls]
