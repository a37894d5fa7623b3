"""Runs of `test_optimizers.py`: updates by planted gradients.

A model's own gradients differ between layouts in their last bits, as sums are ordered differently.
Planted gradients are equal under every layout.
"""

import hashlib
import zlib
from pathlib import Path
from time import process_time
from typing import Any

import torch
from runs import build, global_batch, local_rows
from torch import Tensor

from ms_parallel import ConfigError, NextTokenLoss, TorchConfig, checkpoint
from ms_parallel.cluster.connection import connect
from ms_parallel.cluster.layout import Layout
from ms_parallel.engine.engine import Engine
from ms_parallel.split.part import gather_full_tensor, part_of

RATE = 0.01


def random_gradient(name: str, step: int, shape: tuple[int, ...]) -> Tensor:
    """Random gradient seeded by the parameter name and the step."""
    generator = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    return torch.randn(shape, generator=generator)


def gradients_of(engine: Engine, step: int) -> dict[str, Tensor]:
    """Local parts of the planted gradients of a step."""
    tied = {copy: owner for owner, copy in engine.plan.tied}
    grads = {}
    with torch.no_grad():
        for name, parameter in engine.parameters.items():
            full_grad = random_gradient(tied.get(name, name), step, tuple(parameter.shape))
            grads[name] = full_grad[part_of(parameter).box].contiguous()
    return grads


def advance(engine: Engine, first: int, last: int) -> None:
    """Take steps `first` to `last` - 1."""
    for step in range(first, last):
        engine.optimizer.step(gradients_of(engine, step), RATE)


def digest(tensor: Tensor) -> str:
    """Digest of a tensor's bytes."""
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()[:16]


def state_digests(engine: Engine) -> dict[str, str]:
    """Digests of the gathered tensors of this process's state."""
    return {
        name: digest(gather_full_tensor(tensor)) for name, tensor in engine.state_dict().items()
    }


def run_updates(jobs: list[dict[str, Any]]) -> list[dict[str, str]]:
    """State digests after `steps` updates of each job (layout, settings, optimizer)."""
    torch.set_num_threads(1)
    states = []
    for job in jobs:
        groups = connect(Layout.parse(job["layout"]), device="cpu", timeout_s=120)
        engine = build(job["settings"], groups, optimizer=job["optimizer"])
        advance(engine, 0, job["steps"])
        states.append(state_digests(engine))
    return states


def save_and_resume(
    saved: list[str], loaded: list[str], optimizers: list[str], settings: dict[str, Any], root: str
) -> dict[str, dict[str, str]]:
    """State digests after three updates, a save, a load under another layout and two updates."""
    torch.set_num_threads(1)
    states = {}
    for optimizer in optimizers:
        folder = Path(root, optimizer)
        for layout in saved:
            groups = connect(Layout.parse(layout), device="cpu")
            engine = build(settings, groups, optimizer=optimizer)
            advance(engine, 0, 3)
            checkpoint.save(folder / layout, engine.state_dict(), step=3, facts={})
        for layout in loaded:
            groups = connect(Layout.parse(layout), device="cpu")
            for source in sorted(folder.iterdir()):
                engine = build(settings, groups, optimizer=optimizer, seed=7)
                state = engine.state_dict()
                checkpoint.load(source, checkpoint.read_manifest(source), state)
                engine.load_state_dict(state)
                advance(engine, 3, 5)
                states[f"{optimizer} {source.name} {layout}"] = state_digests(engine)
    return states


def refusal(layout: str) -> str:
    """Message that refuses an optimizer that is not elementwise under a layout."""
    groups = connect(Layout.parse(layout), device="cpu")
    try:
        build({}, groups, optimizer=TorchConfig(kind=torch.optim.Muon))
    except ConfigError as error:
        return str(error)
    return ""


def z_loss_updates(jobs: list[dict[str, Any]], coefficient: float) -> list[dict[str, Any]]:
    """Loss and gradient norm of one update with z-loss, for each job."""
    torch.set_num_threads(1)
    results = []
    for job in jobs:
        groups = connect(Layout.parse(job["layout"]), device="cpu", timeout_s=120)
        engine = build(job["settings"], groups, **job.get("options", {}))
        update = engine.step(local_rows(global_batch(0), groups), NextTokenLoss(0.3, coefficient))
        results.append({"loss": update.loss, "norm": update.grad_norm})
    return results


def muon_seconds(data: int) -> float:
    """CPU seconds of this process in the fastest of five updates of six million parameters.

    With fewer parameters, work other than matrix products shows.
    """
    torch.set_num_threads(1)
    groups = connect(Layout(data=data), device="cpu", timeout_s=120)
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    engine = build({**sizes, **heads}, groups, optimizer="muon")
    seconds = []
    for step in range(6):
        gradients = gradients_of(engine, step)
        start = process_time()
        engine.optimizer.step(gradients, RATE)
        seconds.append(process_time() - start)
    return min(seconds[1:])
