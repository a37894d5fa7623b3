"""Multi-token prediction (MTP) layers after the last decoder layer (DeepSeek-V3, section 2.2).

The layer of depth k combines the previous hidden state at position i with the embedding of token
i+k and runs a regular block; the model's head turns its output into logits for token i+k+1.

Differences from the paper:
1. The first MTP layer reads the model's hidden states after the final norm; each later layer reads
   the previous layer's normalized output. The paper leaves this open; the released weights require
   it.
2. The loss of a depth is averaged over its number of targets, not over the sequence length.
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
"""Tensor-parallel styles of the modules that an MTP layer adds to a block, by name in the layer."""


class MTPLayer(Block):
    """Block that combines hidden states with embeddings of later tokens.

    Args:
        config: Model configuration.
        layer: Layer index; MTP layers count on from the model's layers.
        ops: Operators.
        parts: Other keyword arguments of `Block`.
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
        """Map hidden states and embeddings (B, S, H) to normalized hidden states (B, S, H)."""
        # Equation 21: M · [norm(h); norm(Emb(t))], here with the embedding first.
        joined = torch.cat((self.enorm(embedded), self.hnorm(hidden)), -1)
        hidden = super().forward(self.eh_proj(joined), context=context)
        return self.shared_head.norm(hidden)  # type: ignore[operator,no-any-return]


def with_mtp_layers(plan: ModelPlan, config: ModelConfig) -> ModelPlan:
    """Add the MTP layers of a model, if any, to its plan.

    A checkpoint folder repeats the embedding and the head for every MTP layer.
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
