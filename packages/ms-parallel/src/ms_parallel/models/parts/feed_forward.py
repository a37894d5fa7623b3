"""Gated feed-forward."""

from collections.abc import Callable

from torch import Tensor, nn

from ms_parallel.models.decoder_config import DecoderConfig
from ms_parallel.models.staged import Context
from ms_parallel.operators.protocol import Ops


class FeedForward(nn.Module):
    """Gated feed-forward: down_proj(gate(gate_proj(x), up_proj(x))).

    Args:
        config: Model configuration.
        ops: Operators.
        inner: Intermediate size; the config's by default.
        gate: Gating function of (gate, up); SwiGLU by default.
    """

    def __init__(
        self,
        config: DecoderConfig,
        ops: Ops,
        *,
        inner: int | None = None,
        gate: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.intermediate_size if inner is None else inner
        self.gate_proj = nn.Linear(hidden, inner, bias=config.mlp_bias)
        self.up_proj = nn.Linear(hidden, inner, bias=config.mlp_bias)
        self.down_proj = nn.Linear(inner, hidden, bias=config.mlp_bias)
        self.gate = gate or ops.swiglu

    def forward(self, hidden: Tensor, *, context: Context | None = None) -> Tensor:
        """Map (B, S, H) to (B, S, H)."""
        inner = self.gate(self.gate_proj(hidden), self.up_proj(hidden))
        return self.down_proj(inner)  # type: ignore[no-any-return]
