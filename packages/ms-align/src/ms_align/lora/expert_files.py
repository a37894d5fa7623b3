"""Adapters of experts in files with one matrix per expert, as in the checkpoints of most models.

vLLM loads these for models whose checkpoints have one matrix per expert; it reads peft's stacked
format (`target_parameters`) of such models as if gate and up rows alternated. peft loads both:
it stacks the adapters and fuses the gate and up adapters.
Shapes: E experts, r rank, I inputs, O outputs.
"""

import re
from collections.abc import Iterable, Mapping

import torch
from attrs import frozen
from torch import Tensor

from ms_align.errors import ModelError
from ms_align.lora.layers import AdapterTensors


@frozen
class ExpertNames:
    """Names of experts in the checkpoints of a model type."""

    module: str = "mlp"
    """Name of the module around the experts."""
    gate: str = "gate_proj"
    up: str = "up_proj"
    down: str = "down_proj"

    def matrices(self, parameter: str) -> tuple[str, ...]:
        """Return the checkpoint's names of the matrices in a stacked weight."""
        return (self.gate, self.up) if parameter == "gate_up_proj" else (self.down,)


PER_EXPERT: Mapping[str, ExpertNames] = {
    "mixtral": ExpertNames("block_sparse_moe", "w1", "w3", "w2"),
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v3", "glm4_moe"), ExpertNames()),
}
"""Model types whose checkpoints have one matrix per expert."""

EXPERT = re.compile(r"(.+)\.(\w+)\.experts\.(\d+)\.(\w+)")
"""Layer, module, expert and matrix of an adapter's name in a file."""


def split_by_expert(
    weights: Mapping[str, AdapterTensors], names: ExpertNames
) -> dict[str, AdapterTensors]:
    """Return adapters with one A (r, I) and B (O, r) per expert and matrix.

    Gate and up share the A of the stacked weight, and each gets half the rows of its B.

    Args:
        weights: adapters by layer name, of experts with a leading dim.
        names: names of the model type.
    """
    split = {}
    for name, adapter in weights.items():
        if adapter.a.ndim == 2:
            split[name] = adapter
            continue
        module, _, parameter = name.rpartition(".")
        matrices = names.matrices(parameter)
        disk = f"{module.rpartition('.')[0].rpartition('.')[0]}.{names.module}.experts"
        for expert, (a, b) in enumerate(zip(adapter.a, adapter.b, strict=True)):
            for matrix, rows in zip(matrices, b.chunk(len(matrices)), strict=True):
                # Cloned, as safetensors rejects tensors that share memory.
                split[f"{disk}.{expert}.{matrix}"] = AdapterTensors(a.clone(), rows.clone())
    return split


def stack_experts(
    folder: object, stored: Mapping[str, AdapterTensors], names: ExpertNames
) -> tuple[dict[str, AdapterTensors], dict[str, AdapterTensors]]:
    """Split adapters into linear layers and experts, and stack the experts, by model names.

    Raises:
        ModelError: the adapter of a matrix is missing.
    """
    linear = {}
    by_weight: dict[str, dict[tuple[str, int], AdapterTensors]] = {}
    for name, adapter in stored.items():
        match = EXPERT.fullmatch(name)
        if match is None:
            linear[name] = adapter
            continue
        layer, _, expert, matrix = match.groups()
        parameter = "down_proj" if matrix == names.down else "gate_up_proj"
        adapters = by_weight.setdefault(f"{layer}.mlp.experts.{parameter}", {})
        adapters[matrix, int(expert)] = adapter
    stacked = {}
    for name, adapters in by_weight.items():
        matrices = names.matrices(name.rpartition(".")[2])
        count = 1 + max(expert for _, expert in adapters)
        for matrix in matrices:
            for expert in range(count):
                if (matrix, expert) not in adapters:
                    raise ModelError(
                        f"{folder}: it lacks the adapter of {matrix} of expert {expert} in "
                        f"{name!r}; copy it again"
                    )
        stacked[name] = _fuse(
            [[adapters[matrix, expert] for expert in range(count)] for matrix in matrices]
        )
    return linear, stacked


def _fuse(adapters: Iterable[Iterable[AdapterTensors]]) -> AdapterTensors:
    """Stack the experts of each matrix, and fuse the matrices over their outputs.

    Matrices with the same A keep their rank. Otherwise the ranks add up:
    [B₁, 0; 0, B₂]·[A₁; A₂].
    """
    a_s, b_s = [], []
    for matrix in adapters:
        tensors = list(matrix)
        a_s.append(torch.stack([adapter.a for adapter in tensors]))
        b_s.append(torch.stack([adapter.b for adapter in tensors]))
    if all(torch.equal(a, a_s[0]) for a in a_s):
        return AdapterTensors(a_s[0], torch.cat(b_s, 1))
    rows: list[Tensor] = []
    for index, b in enumerate(b_s):
        blocks = [b if other == index else torch.zeros_like(b) for other in range(len(b_s))]
        rows.append(torch.cat(blocks, 2))
    return AdapterTensors(torch.cat(a_s, 1), torch.cat(rows, 1))
