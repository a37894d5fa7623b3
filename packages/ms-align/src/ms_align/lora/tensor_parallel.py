"""Products of adapters on layers that tensor parallelism splits.

A linear layer's style in ms-parallel's plan defines how its weight is split; A or B is split with
it, and the other is replicated. Communicated tensors are never wider than the rank r. Adapters of
experts need no extra communication: they are part of the expert outputs that are summed over ranks.
Shapes: B rows, S positions, I inputs, O outputs, r rank, t tensor ranks.
"""

from collections.abc import Callable, Mapping
from typing import Any

from attrs import frozen
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from ms_align.errors import ConfigError
from ms_align.lora.layers import ExpertWeight, LoraGroupedLinear, LoraLinear, linear_product


def _column(x: Tensor, a: Tensor, b: Tensor, mesh: DeviceMesh) -> Tensor:
    """Full x (..., I), A (r, I), B (O/t, r) to (..., O/t); each rank has part of x's gradient."""
    if not isinstance(x, DTensor):
        x = DTensor.from_local(x, mesh, [Replicate()], run_check=False)
    return linear_product(x.to_local(grad_placements=[Partial()]), a, b)


def _column_to_whole(x: Tensor, a: Tensor, b: Tensor, mesh: DeviceMesh) -> Tensor:
    """Full x (..., I), A (r, I), B (O/t, r) to the full (..., O)."""
    y = _column(x, a, b, mesh)
    parts = DTensor.from_local(y, mesh, [Shard(y.ndim - 1)], run_check=False)
    return parts.redistribute(placements=[Replicate()]).to_local()


def _gathering_column(x: Tensor, a: Tensor, b: Tensor, mesh: DeviceMesh) -> Tensor:
    """Split x (B, S/t, I), A (r, I), B (O/t, r) to (B, S, O/t): gathers A·x along S."""
    z = DTensor.from_local(_local(x) @ a.mT, mesh, [Shard(1)], run_check=False)
    return z.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()]) @ b.mT


def _row(x: Tensor, a: Tensor, b: Tensor, mesh: DeviceMesh) -> Tensor:
    """Split x (B, S, I/t), A (r, I/t), B (O, r) to (B, S/t, O): reduce-scatters A·x along S."""
    z = DTensor.from_local(_local(x) @ a.mT, mesh, [Partial()], run_check=False)
    return z.redistribute(placements=[Shard(1)]).to_local() @ b.mT


def _row_of_sequence(x: Tensor, a: Tensor, b: Tensor, mesh: DeviceMesh) -> Tensor:
    """Split x (..., I/t), A (r, I/t), B (O, r) to the full (..., O): sums A·x over ranks."""
    z = DTensor.from_local(_local(x) @ a.mT, mesh, [Partial()], run_check=False)
    return z.redistribute(placements=[Replicate()]).to_local() @ b.mT


def _replicated(x: Tensor, a: Tensor, b: Tensor, mesh: DeviceMesh) -> Tensor:
    """Equal x (..., I), or the rank's slice of the sequence, with the full A and B."""
    return linear_product(_local(x), a, b)


def _local(x: Tensor) -> Tensor:
    return x.to_local() if isinstance(x, DTensor) else x


@frozen
class AdapterSplit:
    """Split of an adapter on a layer of one style."""

    a: str
    """Style of A, as ms-parallel names it."""
    b: str
    """Style of B."""
    product: Callable[[Tensor, Tensor, Tensor, DeviceMesh], Tensor] = _replicated


SPLIT_SEQUENCE: Mapping[str, AdapterSplit] = {
    "column": AdapterSplit("sequence", "column", _column),
    "gathering_column": AdapterSplit("sequence", "column", _gathering_column),
    "row": AdapterSplit("row", "sequence", _row),
    "sequence": AdapterSplit("sequence", "sequence"),
}
"""Splits by layer style, if each rank has a slice of the sequence between layers."""
FULL_SEQUENCE: Mapping[str, AdapterSplit] = {
    "column": AdapterSplit("heads", "column", _column),
    "column_to_whole": AdapterSplit("heads", "column", _column_to_whole),
    "row": AdapterSplit("row", "replicated", _row_of_sequence),
    "row_of_whole": AdapterSplit("replicated", "replicated"),
    "replicated": AdapterSplit("replicated", "replicated"),
}
"""Splits by layer style, if each rank has the full sequence between layers."""
EXPERTS: Mapping[str, AdapterSplit] = {
    "expert_column": AdapterSplit("expert", "expert_column"),
    "expert_row": AdapterSplit("expert_row", "expert"),
}


def adapter_styles(
    adapters: Mapping[str, LoraLinear | LoraGroupedLinear], plan: Any
) -> dict[str, str]:
    """Return the style of each tensor of the adapters, by name.

    Args:
        adapters: adapted layers by name.
        plan: plan of the model, an `ms_parallel.models.plan.ModelPlan`.

    Raises:
        ConfigError: a layer is split in a way that adapters do not support.
    """
    styles: dict[str, str] = {}
    for name, layer in adapters.items():
        split = _split_of(name, layer, plan)
        styles |= {f"{name}.{key}_A": split.a for key in ("lora", "initial")}
        styles |= {f"{name}.{key}_B": split.b for key in ("lora", "initial")}
    return styles


def split_products(
    adapters: Mapping[str, LoraLinear | LoraGroupedLinear], plan: Any, mesh: DeviceMesh
) -> None:
    """Make linear layers compute with split adapters, in place.

    Args:
        adapters: adapted layers by name.
        plan: plan of the model.
        mesh: mesh of the tensor axis.
    """
    for name, layer in adapters.items():
        if isinstance(layer, LoraLinear):
            layer.product = _on_mesh(_split_of(name, layer, plan).product, mesh)


def _on_mesh(
    product: Callable[[Tensor, Tensor, Tensor, DeviceMesh], Tensor], mesh: DeviceMesh
) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    return lambda x, a, b: product(x, a, b, mesh)


def _split_of(name: str, layer: LoraLinear | LoraGroupedLinear, plan: Any) -> AdapterSplit:
    if isinstance(layer.base_layer, ExpertWeight):
        raise ConfigError(
            f"adapters on the experts of a transformers model, such as {name!r}, cannot be split "
            "over tensor or expert ranks; set both to 1, or remove target_parameters"
        )
    style = plan.style(f"{name}.weight")
    linear = SPLIT_SEQUENCE if plan.split_sequence else FULL_SEQUENCE
    splits = EXPERTS if isinstance(layer, LoraGroupedLinear) else linear
    if style not in splits:
        raise ConfigError(
            f"adapters support layers that are split as {', '.join(splits)} over tensor ranks, and "
            f"{name!r} is split as {style}; leave it out of target_modules, or set tensor=1"
        )
    return splits[style]
