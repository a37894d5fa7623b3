"""Every method and command on this process's device; run by `test_device.py`."""

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


def current_device() -> torch.device:
    """Return this process's device, which is not the CPU."""
    accelerator = torch.accelerator.current_accelerator()
    assert accelerator is not None
    return accelerator


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

TRANSFORMERS_METHODS = {"gptq", "sparse"}
"""Methods tested with a transformers model; the others use an ms-parallel model."""


def perplexities(folder: str) -> dict[str, list[float]]:
    """Return each method's perplexity on the device, with a verified export, and on the CPU."""
    results = {}
    for name, method in METHODS.items():
        model = (llama if name in TRANSFORMERS_METHODS else decoder)()
        on_device, on_cpu = deepcopy(model).to(current_device()), model
        method(on_device)
        # GGUF is verified with llama.cpp, which only `nox -s deploy` builds.
        export(on_device, Path(folder, name), verify=name != "gguf")
        method(on_cpu)
        results[name] = [perplexity(tested, tokens(4, 33)) for tested in (on_device, on_cpu)]
    return results


def student_stays_on_device() -> bool:
    """Return whether a student cut on the device stays there while it trains."""
    cut = cut_student(decoder(4).to(current_device()), layers=2)
    tune(cut, tokens(16, 33), TUNING, teacher=decoder(4).to(current_device()))
    return all(parameter.device.type == current_device().type for parameter in cut.parameters())


def commands(run: str, calls: list[list[str]]) -> list[int]:
    """Return the exit codes of commands that read a run file."""
    return [main([name, run, *arguments]) for name, *arguments in calls]
