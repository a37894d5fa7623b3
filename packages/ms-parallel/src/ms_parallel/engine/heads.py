"""Extra linear heads on the final hidden states, such as a value head with an output per position.

Their parameters are registered on the final norm, which no layout splits, and start at zero.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ms_parallel.errors import ModelError

FINAL_NORMS = (
    "model.norm",
    "transformer.ln_f",
    "model.final_layernorm",
    "model.final_layer_norm",
    "gpt_neox.final_layer_norm",
    "model.decoder.final_layer_norm",
    "model.final_norm",
    "model.norm_f",
    "backbone.norm_f",
    "backbone.final_layernorm",
    "model.embedding_norm",
)
"""Names of the norm after the last block, in our model families and in transformers."""


def add_heads(stage: Any, widths: Mapping[str, int]) -> None:
    """Add a head of each width to the last stage, in place; does nothing on other stages."""
    if not stage.last:
        return
    norm = _final_norm(stage)
    for name, width in widths.items():
        matrix = torch.empty(width, norm.weight.shape[0], device=norm.weight.device)
        norm.register_parameter(f"{name}_matrix", nn.Parameter(matrix))
        norm.register_parameter(f"{name}_offset", nn.Parameter(matrix[:, 0].clone()))


def thaw_heads(stage: Any, widths: Mapping[str, int]) -> None:
    """Make the heads of a last stage trainable when its other weights are frozen."""
    if widths and stage.last:
        for head in heads_of(stage, widths).values():
            for weights in head:
                weights.requires_grad_(True)


def _final_norm(stage: Any) -> Any:
    """Return the final norm of a stage, which owns the heads' parameters.

    Raises:
        ModelError: no final norm has a weight of the hidden size.
    """
    for name in FINAL_NORMS:
        try:
            norm = stage.get_submodule(name)
        except AttributeError:
            continue
        weight = getattr(norm, "weight", None)
        if isinstance(weight, Tensor) and weight.shape == (stage.config.hidden_size,):
            return norm
    raise ModelError(
        "extra heads need a final norm with a weight, and the model has none of"
        f" {', '.join(FINAL_NORMS)}; use a separate value model or reward model"
    )


def heads_of(stage: Any, widths: Mapping[str, int]) -> dict[str, tuple[Tensor, Tensor]]:
    """Map each head of a last stage to its weight (width, H) and offset (width,)."""
    norm = _final_norm(stage) if widths else None
    return {
        name: tuple(getattr(norm, f"{name}_{part}") for part in ("matrix", "offset"))
        for name in widths
    }
