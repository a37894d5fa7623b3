"""Engines on mixed devices, for `run_on_rig`."""

from typing import Any

import torch
import torch.distributed as dist
from runs import OPTIMIZER, global_batch, local_rows, tiny

from ms_parallel import Engine, Layout, NextTokenLoss
from ms_parallel.cluster.mixed.devices import Devices
from ms_parallel.split.part import local_part


def weights(
    layout: str,
    devices: dict[str, str],
    steps: int = 4,
    rows: int = 8,
    drift: float = 0.0,
    model: dict[str, Any] | None = None,
    **options: Any,
) -> dict[str, Any]:
    """Losses and weights of an engine."""
    torch.set_num_threads(1)
    engine = Engine(
        tiny(num_key_value_heads=4, num_hidden_layers=4, **(model or {})),
        Layout.parse(layout),
        device=Devices.of(devices),
        **{"optimizer": OPTIMIZER, "microbatch_size": 2, "sharding": "replicate", **options},
    )
    if drift:  # as if device types rounded differently
        rank = dist.get_rank()
        with torch.no_grad():
            for param in engine.parameters.values():
                param.mul_(1 + rank * drift)
        engine.state_dict()
    updates = [
        engine.step(local_rows(global_batch(step, rows), engine.groups), NextTokenLoss())
        for step in range(steps)
    ]
    return {
        "device": str(engine.device),
        "weight_devices": sorted({str(local_part(p).device) for p in engine.parameters.values()}),
        "wires": [
            str(engine.groups.link(peer).message_device) for peer in range(engine.tables.ranks)
        ],
        "losses": [update.loss for update in updates],
        "weights": {
            name: local_part(param).detach().flatten().tolist()
            for name, param in engine.parameters.items()
        },
    }
