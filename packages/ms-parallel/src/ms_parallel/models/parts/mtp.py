"""Layers behind the last one, each of which predicts one token further (DeepSeek-V3, section 2.2).

The layer of depth k joins what the one before made of position i with the embedding of token i+k,
and is a block as the others are; the model's own head makes logits for token i+k+1 of it.

Numbered differences from the paper:
1. The first of them gets hidden states behind the model's last norm, and each next one those behind
   the norm of the one before: so the released weights are run, as the paper leaves it open.
2. Each depth's loss is divided by the number of its own targets, not by the length of the text.
"""

from collections.abc import Mapping
from typing import Any

import torch
from attrs import evolve
from torch import Tensor, nn

from ms_parallel.models.config import ModelConfig
from ms_parallel.models.decoder_config import DecoderConfig
from ms_parallel.models.parts.attention import RotaryContext
from ms_parallel.models.parts.block import Block
from ms_parallel.models.parts.norm import RMSNorm
from ms_parallel.models.plan import ModelPlan, Style
from ms_parallel.operators.protocol import Ops

_MODULES: Mapping[str, Style] = {
    "enorm": "sequence",
    "hnorm": "sequence",
    "eh_proj": "sequence",
    "shared_head.norm": "sequence",
}
"""How the tensor axis splits what a block does not have, by names in the layer."""


class MTPLayer(Block):
    """A block that joins hidden states with embeddings of the tokens to come.

    Args:
        config: The model.
        layer: Its number, from the number of the model's layers on.
        ops: Operators.
        parts: Of `Block`.
    """

    def __init__(self, config: DecoderConfig, layer: int, ops: Ops, **parts: Any) -> None:
        super().__init__(config, layer, ops, **parts)
        width, eps = config.hidden_size, config.rms_norm_eps
        self.enorm = RMSNorm(width, eps, ops)
        self.hnorm = RMSNorm(width, eps, ops)
        self.eh_proj = nn.Linear(2 * width, width, bias=False)
        self.shared_head = nn.Module()
        self.shared_head.norm = RMSNorm(width, eps, ops)

    def forward(  # type: ignore[override]
        self, hidden: Tensor, embedded: Tensor, *, context: RotaryContext
    ) -> Tensor:
        """Turn hidden states and embeddings (B, S, H) into finished hidden states (B, S, H)."""
        joined = torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1)
        hidden = super().forward(self.eh_proj(joined), context=context)
        return self.shared_head.norm(hidden)  # type: ignore[operator,no-any-return]


def with_mtp_layers(plan: ModelPlan, config: ModelConfig) -> ModelPlan:
    """Add a model's prediction layers, if it has any, to the plan of its other parts.

    Its folder holds embedding and head once more for each of them.
    """
    if not config.mtp_layers:
        return plan
    embedding, copy = "model.embed_tokens.weight", "model.next_embed_tokens.weight"
    first = config.num_hidden_layers
    repeated = tuple(
        (weight, f"model.layers.{layer}.{name}")
        for layer in range(first, first + config.mtp_layers)
        for weight, name in (
            (embedding, "embed_tokens.weight"),
            ("lm_head.weight", "shared_head.head.weight"),
        )
    )
    joining = {f"{plan.blocks}.{name}": style for name, style in _MODULES.items()}
    tensor: dict[str, Style] = {
        **plan.tensor,
        **joining,
        "model.next_embed_tokens": "vocabulary",
    }
    tied = (*plan.tied, (embedding, copy))
    return evolve(plan, tensor=tensor, tied=tied, repeated=repeated)
