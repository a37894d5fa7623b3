"""Experts of Llama 4, which transformers reads individually from a compressed-tensors folder.

A plain folder has all experts of a layer in two tensors, `gate_up_proj` (E, H, 2I) and
`down_proj` (E, I, H). If config.json has a quantization_config, transformers replaces the module by
a list of MLPs with transposed matrices: `0.gate_proj.weight` (I, H), `0.down_proj.weight` (H, I),
and so on. Source: transformers, `SequentialLlama4TextExperts`.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

FUSED = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def is_fused(name: str, config: Mapping[str, Any]) -> bool:
    """Return whether a tensor contains a matrix of all experts of a Llama 4 layer."""
    module, _, last = name.rpartition(".")
    family = str(config.get("model_type"))
    return family.startswith("llama4") and module.endswith(".experts") and last in FUSED


def stored_names(name: str, experts: int) -> list[str]:
    """Return the names of the matrices in which a tensor is stored, expert by expert."""
    module, _, last = name.rpartition(".")
    return [f"{module}.{i}.{matrix}.weight" for i in range(experts) for matrix in FUSED[last]]


def stored_shape(name: str, shape: tuple[int, ...]) -> tuple[int, int]:
    """Return the shape of these matrices."""
    _, inputs, outputs = shape  # experts are the first dim
    return outputs // len(FUSED[name.rpartition(".")[2]]), inputs


def split(name: str, value: Tensor) -> dict[str, Tensor]:
    """Split a tensor into the matrices in which it is stored."""
    count = len(FUSED[name.rpartition(".")[2]])
    # The columns of gate and up are the two halves of the last dim.
    matrices = [matrix.T for expert in value for matrix in expert.chunk(count, dim=-1)]
    return dict(zip(stored_names(name, len(value)), matrices, strict=True))


def join(name: str, matrices: Sequence[Tensor]) -> Tensor:
    """Combine these matrices into one tensor; the inverse of `split`."""
    count = len(FUSED[name.rpartition(".")[2]])
    columns = [matrix.T for matrix in matrices]
    experts = [torch.cat(columns[i : i + count], -1) for i in range(0, len(columns), count)]
    return torch.stack(experts)
