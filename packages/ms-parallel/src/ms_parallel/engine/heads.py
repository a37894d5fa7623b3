"""Extra linear heads on the final hidden states, such as a value of each position.

Their parameters lie beside the final norm's, which every layout keeps whole, and begin at zero.
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
"""Names of the norm behind the last block, of our families and of transformers' models."""


def add_heads(stage: Any, widths: Mapping[str, int]) -> None:
    """Add a head of each width to a last stage, in place; other stages stay as they are."""
    if not stage.last:
        return
    norm = _final_norm(stage)
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


def _final_norm(stage: Any) -> Any:
    """Find the last norm of a stage, which holds the heads' parameters.

    Raises:
        ModelError: there is none with a weight as wide as the hidden states.
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
    """Map the names of a last stage's heads to their weight (width, H) and offset (width,)."""
    norm = _final_norm(stage) if widths else None
    return {
        name: tuple(getattr(norm, f"{name}_{part}") for part in ("matrix", "offset"))
        for name in widths
    }
