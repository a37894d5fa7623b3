"""Adapters (such as LoRA) trained on top of a model, and how a layout splits them."""

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol, runtime_checkable

from torch import Tensor, nn
from torch.distributed.tensor import Shard, distribute_tensor

from ms_parallel.cluster.groups import Groups
from ms_parallel.cluster.layout import Layout
from ms_parallel.errors import ConfigError
from ms_parallel.models.plan import ModelPlan, Style
from ms_parallel.split.expert_parallel import local_experts


class Adapters(Protocol):
    """Trainable adapter weights added to a model."""

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Disable the adapter inside the block, so that the base model runs."""

    def save_pretrained(self, folder: Path, /) -> None:
        """Write the adapter weights to a folder; every process must call it."""


@runtime_checkable
class SplitAdapters(Adapters, Protocol):
    """Adapters whose tensors may be split over the tensor and expert axes."""

    @property
    def styles(self) -> Mapping[str, Style]:
        """Tensor-parallel style of each parameter and buffer, by its name in its stage."""


def check_adaptable(layout: Layout, placement: Sequence[int], adapters: Adapters) -> None:
    """Check that a layout supports adapters.

    Args:
        layout: how the model is split.
        placement: pipeline rank of each stage.
        adapters: the adapters.

    Raises:
        ConfigError: a rank has several stages, or the layout splits weights and the adapters do not
            say how to split theirs.
    """
    if len(set(placement)) < len(placement):
        raise ConfigError("adapters need one pipeline stage per rank; use a schedule such as 1f1b")
    if max(layout.tensor, layout.expert) > 1 and not isinstance(adapters, SplitAdapters):
        raise ConfigError(
            "these adapters have no `styles`, so they cannot be split over tensor or expert ranks;"
            " set tensor and expert to 1 in the layout"
        )


def split_adapters(
    stages: Mapping[int, nn.Module], styles: Mapping[str, Style], plan: ModelPlan, groups: Groups
) -> None:
    """Split adapter tensors over the tensor and expert axes, in place, as DTensors.

    Args:
        stages: stages of this process by number, with adapters that are not split.
        styles: style of each adapter tensor by name.
        plan: plan that covers these styles.
        groups: process groups of the layout.
    """
    for stage in stages.values():
        for name, tensor in [*stage.named_parameters(), *stage.named_buffers()]:
            if name not in styles:
                continue
            split, dim = tensor.detach(), plan.split_dim(name)
            if groups.layout.tensor > 1 and dim is not None:
                mesh = groups.mesh["tensor"]
                split = distribute_tensor(split, mesh, [Shard(dim)], src_data_rank=None)
            if groups.experts is not None and styles[name].startswith("expert"):
                split = local_experts(split, groups.experts)
            if split is not tensor:
                _replace(stage, name, split)


def _replace(stage: nn.Module, name: str, split: Tensor) -> None:
    parent, _, last = name.rpartition(".")
    module = stage.get_submodule(parent)
    if last in module._buffers:
        module._buffers[last] = split
    else:
        module._parameters[last] = nn.Parameter(split)
