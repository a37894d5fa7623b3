"""Decoder block: attention, feed-forward, and the norms around them."""

from collections.abc import Callable

from attrs import frozen
from torch import Tensor, nn

from ms_parallel.models.decoder_config import DecoderConfig
from ms_parallel.models.parts.attention import Attention, RotaryContext
from ms_parallel.models.parts.feed_forward import FeedForward
from ms_parallel.models.parts.norm import RMSNorm
from ms_parallel.operators.protocol import Ops


@frozen(kw_only=True)
class Norms:
    """Names of the norms around attention and feed-forward; None for no norm."""

    before_attention: str | None = None
    after_attention: str | None = None
    before_mlp: str | None = None
    after_mlp: str | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all norms in use."""
        names = (self.before_attention, self.after_attention, self.before_mlp, self.after_mlp)
        return tuple(name for name in names if name is not None)


PRE_NORM = Norms(before_attention="input_layernorm", before_mlp="post_attention_layernorm")
"""Norms of Llama."""


class Block(nn.Module):
    """Decoder layer; the unit of activation checkpointing and sharding.

    Args:
        config: Model configuration.
        layer: Global layer index.
        ops: Operators.
        attention: Module for `self_attn`, called with (hidden, context=); Llama's by default.
        mlp: Module for `mlp`, called with (hidden, context=); Llama's by default.
        norm: Builds a norm from (width, eps, ops).
        norms: Names of the norms.
        residual: Scale of the outputs of attention and mlp before they are added.
    """

    def __init__(
        self,
        config: DecoderConfig,
        layer: int,
        ops: Ops,
        *,
        attention: nn.Module | None = None,
        mlp: nn.Module | None = None,
        norm: Callable[[int, float, Ops], nn.Module] = RMSNorm,
        norms: Norms = PRE_NORM,
        residual: float = 1.0,
    ) -> None:
        super().__init__()
        self.norms, self.residual = norms, residual

        def add_norm(name: str | None) -> None:
            if name is not None:
                self.add_module(name, norm(config.hidden_size, config.rms_norm_eps, ops))

        add_norm(norms.before_attention)
        self.self_attn = Attention(config, layer, ops) if attention is None else attention
        add_norm(norms.after_attention)
        add_norm(norms.before_mlp)
        self.mlp = FeedForward(config, ops) if mlp is None else mlp
        add_norm(norms.after_mlp)

    def forward(self, hidden: Tensor, *, context: RotaryContext) -> Tensor:
        """Map (B, S, H) to (B, S, H)."""
        norms = self.norms
        # Each norm may be absent: pre-norm (Llama), post-norm (OLMo 2) or both (Gemma).
        branch = self.self_attn(self._normed(norms.before_attention, hidden), context=context)
        branch = self._scaled(self._normed(norms.after_attention, branch))
        hidden, normed = self._normed_sum(norms.before_mlp, hidden, branch)
        branch = self.mlp(normed, context=context)
        return hidden + self._scaled(self._normed(norms.after_mlp, branch))

    def _normed_sum(
        self, name: str | None, hidden: Tensor, branch: Tensor
    ) -> tuple[Tensor, Tensor]:
        norm = None if name is None else getattr(self, name)
        if isinstance(norm, RMSNorm):
            return norm.of_sum(hidden, branch)
        hidden = hidden + branch
        return hidden, hidden if norm is None else norm(hidden)

    def _normed(self, name: str | None, hidden: Tensor) -> Tensor:
        return hidden if name is None else getattr(self, name)(hidden)

    def _scaled(self, branch: Tensor) -> Tensor:
        return branch if self.residual == 1.0 else branch * self.residual
