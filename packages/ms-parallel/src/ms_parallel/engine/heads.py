"""Extra linear heads on the final hidden states, such as a value of each position.

Their parameters lie beside the final norm's, which every layout keeps whole, and begin at zero.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ms_parallel.errors import ModelError


def add_heads(stage: Any, widths: Mapping[str, int]) -> None:
    """Add a head of each width to a last stage, in place; other stages stay as they are."""
    if not stage.last:
        return
    norm = getattr(stage.model, "norm", None)
    if norm is None or not hasattr(norm, "weight"):
        raise ModelError("the model has no final norm called model.norm, beside which heads lie")
    for name, width in widths.items():
        matrix = torch.empty(width, norm.weight.shape[0], device=norm.weight.device)
        norm.register_parameter(f"{name}_matrix", nn.Parameter(matrix))
        norm.register_parameter(f"{name}_offset", nn.Parameter(matrix[:, 0].clone()))


def thaw_heads(stage: Any, widths: Mapping[str, int]) -> None:
    """Let the heads of a last stage be trained, whose other weights are frozen."""
    if widths and stage.last:
        for head in heads_of(stage, widths).values():
            for weights in head:
                weights.requires_grad_(True)


def heads_of(stage: Any, widths: Mapping[str, int]) -> dict[str, tuple[Tensor, Tensor]]:
    """Map the names of a last stage's heads to their weight (width, H) and offset (width,)."""
    return {
        name: tuple(getattr(stage.model.norm, f"{name}_{part}") for part in ("matrix", "offset"))
        for name in widths
    }
