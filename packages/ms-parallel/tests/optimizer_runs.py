"""Updates by planted gradients, which are the same under every layout; `run_processes` calls them.

The gradients of a model differ in their last bits with the order of sums, which is none of an
optimizer's doing; those planted here do not.
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


def planted(name: str, step: int, shape: tuple[int, ...]) -> Tensor:
    """A gradient that depends on nothing but its name and step."""
    draw = torch.Generator().manual_seed(zlib.crc32(f"{name} {step}".encode()))
    return torch.randn(shape, generator=draw)


def gradients_of(engine: Engine, step: int) -> dict[str, Tensor]:
    """This process's parts of the planted gradients of an update."""
    tied = {copy: owner for owner, copy in engine.plan.tied}
    found = {}
    with torch.no_grad():
        for name, parameter in engine.parameters.items():
            whole = planted(tied.get(name, name), step, tuple(parameter.shape))
            found[name] = whole[part_of(parameter).box].contiguous()
    return found


def advance(engine: Engine, first: int, last: int) -> None:
    """Updates number `first` up to, not including, `last`."""
    for step in range(first, last):
        engine.optimizer.step(gradients_of(engine, step), RATE)


def digest(tensor: Tensor) -> str:
    """Digest of the bytes of a tensor."""
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()[:16]


def whole_state(engine: Engine) -> dict[str, str]:
    """A digest of each tensor of the state that this process has, gathered."""
    return {
        name: digest(gather_full_tensor(tensor)) for name, tensor in engine.state_dict().items()
    }


def stepped(jobs: list[dict[str, Any]]) -> list[dict[str, str]]:
    """The state after `steps` updates of each job, which gives layout, settings and optimizer."""
    torch.set_num_threads(1)
    found = []
    for job in jobs:
        groups = connect(Layout.parse(job["layout"]), device="cpu", timeout_s=120)
        engine = build(job["settings"], groups, optimizer=job["optimizer"])
        advance(engine, 0, job["steps"])
        found.append(whole_state(engine))
    return found


def handed_on(
    saved: list[str], loaded: list[str], optimizers: list[str], settings: dict[str, Any], at: str
) -> dict[str, dict[str, str]]:
    """The state after three updates under a layout, saved, and two more under another."""
    torch.set_num_threads(1)
    found = {}
    for optimizer in optimizers:
        folder = Path(at, optimizer)
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
                found[f"{optimizer} {source.name} {layout}"] = whole_state(engine)
    return found


def refused(layout: str) -> str:
    """What is said of an optimizer that is not elementwise, under a layout."""
    groups = connect(Layout.parse(layout), device="cpu")
    try:
        build({}, groups, optimizer=TorchConfig(kind=torch.optim.Muon))
    except ConfigError as error:
        return str(error)
    return ""


def with_z(jobs: list[dict[str, Any]], coefficient: float) -> list[dict[str, Any]]:
    """Loss and gradient norm of one update with z-loss, for each layout and model."""
    torch.set_num_threads(1)
    found = []
    for job in jobs:
        groups = connect(Layout.parse(job["layout"]), device="cpu", timeout_s=120)
        engine = build(job["settings"], groups, **job.get("options", {}))
        update = engine.step(local_rows(global_batch(0), groups), NextTokenLoss(0.3, coefficient))
        found.append({"loss": update.loss, "norm": update.grad_norm})
    return found


def muon_seconds(data: int) -> float:
    """Processor time of this process in the fastest of five updates of six million numbers.

    With fewer, what an update takes besides its products shows.
    """
    torch.set_num_threads(1)
    groups = connect(Layout(data=data), device="cpu", timeout_s=120)
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64}
    engine = build({**sizes, **heads}, groups, optimizer="muon")
    took = []
    for step in range(6):
        gradients = gradients_of(engine, step)
        began = process_time()
        engine.optimizer.step(gradients, RATE)
        took.append(process_time() - began)
    return min(took[1:])
