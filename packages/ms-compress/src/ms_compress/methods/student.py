"""Cut a student from its teacher: fewer layers, and a narrower feed-forward.

Depth: evenly spaced layers including the first and last (DistilBERT, arXiv:1910.01108). Width: the
feed-forward neurons with the largest product of weight norms (scored as in Minitron,
arXiv:2407.14679, but from weights, so no data is needed). The student has the same architecture.
"""

import copy
from typing import Any

import torch
from torch import nn

from ms_compress.arguments import check_integer, check_type
from ms_compress.errors import ConfigError, LayerError
from ms_compress.models.selection import blocks_of
from ms_compress.quantization.layers import FACTOR

BY_LAYER = ("layer_types", "no_rope_layers")
"""Per-layer lists in a transformers configuration."""


def kept_layers(layers: int, keep: int) -> list[int]:
    """Return the indices of `keep` evenly spaced layers of `layers`, including first and last."""
    if not 1 <= keep <= layers:
        raise ConfigError(
            f"layers must be 1 to {layers}, the teacher's layers, got {keep}; use fewer"
        )
    if keep == 1:
        return [0]
    return [round(i * (layers - 1) / (keep - 1)) for i in range(keep)]


@torch.no_grad()
def cut_student(
    teacher: nn.Module, *, layers: int | None = None, inner: int | None = None
) -> nn.Module:
    """Build a model from a subset of a teacher's layers and feed-forward neurons.

    Args:
        teacher: a complete decoder from ms-parallel or transformers, not modified. The weights
            of a prepared model are copied without its learned scales.
        layers: number of layers. None: all.
        inner: feed-forward width. None: unchanged.

    Raises:
        ConfigError: more layers or neurons are requested than the teacher has.
        LayerError: the model is not a Llama-like decoder.
    """
    check_type("teacher", teacher, nn.Module, "a torch.nn.Module", error=LayerError)
    check_integer("layers", layers, minimum=1, error=ConfigError, optional=True)
    check_integer("inner", inner, minimum=1, error=ConfigError, optional=True)
    blocks = [block for _, block in blocks_of(teacher)]
    depth = kept_layers(len(blocks), len(blocks) if layers is None else layers)
    width = _width(blocks[0])
    inner = width if inner is None else inner
    if not 1 <= inner <= width:
        raise ConfigError(
            f"inner must be 1 to {width}, the teacher's feed-forward width, got {inner}; use less"
        )
    student = _build_smaller(teacher, depth, inner)
    # Embedding, final norm and head are copied unchanged; the layers are copied below.
    other_weights = {
        name: value
        for name, value in teacher.state_dict().items()
        if not name.startswith("model.layers.") and not name.endswith(FACTOR)
    }
    unknown = student.load_state_dict(other_weights, strict=False).unexpected_keys
    if unknown:
        raise LayerError(f"{unknown[0]} of the teacher does not exist in the student")
    for (_, target), number in zip(blocks_of(student), depth, strict=True):
        _copy_block(blocks[number], target, inner)
    return student


def _width(block: nn.Module) -> int:
    mlp: Any = getattr(block, "mlp", None)
    if not all(hasattr(mlp, name) for name in ("gate_proj", "up_proj", "down_proj")):
        raise LayerError(
            "distill needs layers whose mlp has gate_proj, up_proj and down_proj, which this model"
            " lacks; use a smaller model as the student, or prune the weights"
        )
    return int(mlp.down_proj.weight.shape[1])


def _build_smaller(teacher: nn.Module, depth: list[int], inner: int) -> nn.Module:
    """Build a model of the teacher's architecture with other sizes; layers keep their types."""
    config: Any = teacher.config
    if hasattr(config, "to_dict"):
        sizes = copy.deepcopy(config)
        sizes.num_hidden_layers, sizes.intermediate_size = len(depth), inner
        # Every layer keeps its attention type, so lists by layer are cut like the layers.
        for name in BY_LAYER:
            if values := getattr(config, name, None):
                setattr(sizes, name, [values[number] for number in depth])
        if (first := getattr(config, "max_window_layers", None)) is not None:
            # In Qwen models, layers from this index on use a sliding window.
            sizes.max_window_layers = sum(number < first for number in depth)
    else:
        import attrs

        changed: dict[str, Any] = {"num_hidden_layers": len(depth), "intermediate_size": inner}
        if (sliding := getattr(config, "sliding_layers", None)) is not None:
            student_sliding = (index for index, number in enumerate(depth) if number in sliding)
            changed["sliding_layers"] = tuple(student_sliding)
        sizes = attrs.evolve(config, **changed)
    weight = next(teacher.parameters())
    student: nn.Module = type(teacher)(sizes)
    return student.to(device=weight.device, dtype=weight.dtype)


def _copy_block(source: nn.Module, target: nn.Module, inner: int) -> None:
    values = {
        name: value for name, value in source.state_dict().items() if not name.endswith(FACTOR)
    }
    gate, up, down = (values[f"mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
    # (I,): a neuron has a row in gate and up, and a column in down.
    importance = gate.norm(dim=1) * up.norm(dim=1) * down.norm(dim=0)
    kept_neurons = importance.topk(inner).indices.sort().values  # in their original order
    for name in list(values):
        module = name.rpartition(".")[0]
        if module in ("mlp.gate_proj", "mlp.up_proj"):
            values[name] = values[name][kept_neurons]
    values["mlp.down_proj.weight"] = down[:, kept_neurons]
    target.load_state_dict(values)
