"""Adapters on an engine of ms-parallel, over its data and pipeline axes.

The model's own weights stay split and sharded as they are, frozen; adapters are small, so each
data rank holds those of its stages whole. Their gradients are summed over the data axis as the
backward forms them, and are then the same on every data rank, bit for bit.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch import Tensor

from ms_align import processes
from ms_align.errors import ConfigError
from ms_align.lora.adapters import (
    AdaptedModel,
    LoraLinear,
    LoraOptions,
    add_lora,
    save_adapters,
)

if TYPE_CHECKING:
    from ms_parallel import Engine

__all__ = ["ParallelAdapters"]

HEADS = (".norm.value_matrix", ".norm.value_offset")


class ParallelAdapters:
    """Puts adapters into the stages of an engine, which from then on trains them alone.

    Args:
        engine: no update was made yet.
        options: which layers, and how.
        seed: of A's first values; the same seed gives those of one process.
        base_name: the model's name or folder, for `adapter_config.json`.

    Raises:
        ConfigError: the layout splits matrices or sequences, or a rank has more than one stage.
    """

    def __init__(
        self, engine: "Engine", options: LoraOptions, *, seed: int = 0, base_name: str = ""
    ) -> None:
        layout = engine.groups.layout
        if (
            layout.tensor > 1
            or layout.context > 1
            or len(set(engine.placement)) < len(engine.placement)
        ):
            raise ConfigError(
                "adapters are trained over data and pipeline with one stage a rank; leave tensor "
                "and context at 1 in the layout, and choose a schedule such as 1f1b"
            )
        self.engine, self.options, self.base_name = engine, options, base_name
        self.models: list[AdaptedModel] = [
            add_lora(stage, options, seed=seed) for stage in engine.stages.values()
        ]
        for stage in engine.stages.values():
            for name, head in stage.named_parameters():
                if name.endswith(HEADS):
                    head.requires_grad_(True)
        engine.parameters = {
            name: parameter
            for stage in engine.stages.values()
            for name, parameter in stage.named_parameters()
            if parameter.requires_grad
        }
        for parameter in engine.parameters.values():
            parameter.register_hook(self._sum)  # type: ignore[no-untyped-call]
        engine.whole = []
        # Each data rank has the whole gradient: it counts once in the norm.
        engine.counted = list(engine.parameters) if engine.groups.place.data == 0 else []
        local = {name: parameter.detach() for name, parameter in engine.parameters.items()}
        engine.optimizer = type(engine.optimizer)(local, engine.optimizer.config)

    def _sum(self, gradient: Tensor) -> Tensor:
        """The sum over the data axis."""
        return self.engine.groups.all_reduce(gradient.contiguous().clone(), "data")

    def layers(self) -> dict[str, LoraLinear]:
        """Adapted layers of this process, by their names in the whole model."""
        return {name: layer for model in self.models for name, layer in model.adapters().items()}

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """The model as it was before, while the block runs."""
        layers = list(self.layers().values())
        for layer in layers:
            layer.enabled = False
        try:
            yield
        finally:
            for layer in layers:
                layer.enabled = True

    def save_pretrained(self, folder: Path) -> None:
        """Write peft's two files from the first process; every process must call it.

        Raises:
            CheckpointError: the place cannot be written.
        """
        mine = {
            name: (layer.lora_A.detach().cpu(), layer.lora_B.detach().cpu())
            for name, layer in self.layers().items()
        }
        told = [mine] * processes.count()
        if processes.count() > 1:
            dist.all_gather_object(told, mine)
        if processes.rank() == 0:
            together = {name: pair for each in told for name, pair in each.items()}
            save_adapters(folder, self.options, together, self.base_name)
        processes.barrier()
