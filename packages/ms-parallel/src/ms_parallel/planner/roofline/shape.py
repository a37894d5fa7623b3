"""The sizes of a decoder that say what a step computes, and its weights in numbers."""

from attrs import field, frozen

from ms_parallel.settings import flag, integer

_size = integer(maximum=1 << 40)
_number = integer(minimum=0, maximum=1 << 40)


@frozen(kw_only=True)
class Latents:
    """Widths of latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1)."""

    query: int | None = field(validator=integer(maximum=1 << 40, optional=True))
    """Width of what queries are made from; None for the hidden state itself."""
    key: int = field(validator=_size)
    """Width of what keys and values are made from."""
    rotary: int = field(validator=_size)
    """Width of the part of a key that all heads share; a head's `head_dim` counts it too."""


@frozen(kw_only=True)
class ExpertSizes:
    """A mixture of experts."""

    count: int = field(validator=_size)
    chosen: int = field(validator=_size)
    """Experts that a token passes."""
    width: int = field(validator=_size)
    """Inner width of one."""
    shared_width: int = field(default=0, validator=_number)
    """Inner width of what every token passes besides."""
    first_layer: int = field(default=0, validator=_number)
    """Layers before it have a dense feed-forward instead."""


@frozen(kw_only=True)
class DecoderSizes:
    """A decoder's sizes.

    Raises:
        ConfigError: a size is no whole number of at least 1.
    """

    layers: int = field(validator=_size)
    hidden: int = field(validator=_size)
    heads: int = field(validator=_size)
    key_value_heads: int = field(validator=_size)
    head_dim: int = field(validator=_size)
    """Width of a head's query and key."""
    value_dim: int | None = field(default=None, validator=integer(optional=True))
    """Width of a head's value; None for `head_dim`."""
    inner: int = field(validator=_size)
    """Width of a dense feed-forward."""
    gated: bool = field(default=True, validator=flag)
    """Whether the feed-forward multiplies two projections, as SwiGLU does."""
    vocabulary: int = field(validator=_size)
    tied: bool = field(default=False, validator=flag)
    """Whether the head's weight is the embedding's."""
    experts: ExpertSizes | None = None
    latents: Latents | None = None
    window: int | None = field(default=None, validator=integer(optional=True))
    """Positions that a token sees at most; None for all before it."""
    mtp_layers: int = field(default=0, validator=_number)
    """Further layers, each with one more pass of the head."""

    @property
    def values_dim(self) -> int:
        """Width of a head's value."""
        return self.value_dim or self.head_dim

    @property
    def expert_layers(self) -> int:
        """Layers with experts."""
        first = self.layers if self.experts is None else self.experts.first_layer
        return max(0, self.layers - first) + (self.mtp_layers if self.experts else 0)

    @property
    def dense_layers(self) -> int:
        """Layers without."""
        return self.layers + self.mtp_layers - self.expert_layers

    @property
    def attention_weights(self) -> int:
        """Weights of one layer's attention; norms and biases are too small to count."""
        query, value = self.heads * self.head_dim, self.heads * self.values_dim
        if self.latents is None:
            keys = self.key_value_heads * (self.head_dim + self.values_dim)
            return self.hidden * (query + keys + value)
        made = self.heads * (self.head_dim - self.latents.rotary + self.values_dim)
        small = self.latents.query
        queries = self.hidden * query if small is None else small * (self.hidden + query)
        down = self.hidden * (self.latents.key + self.latents.rotary + value)
        return queries + down + self.latents.key * made

    @property
    def dense_weights(self) -> int:
        """Weights of the feed-forward of a layer without experts."""
        return self.hidden * self.inner * self.matrices

    @property
    def matrices(self) -> int:
        """Matrices of a feed-forward."""
        return 3 if self.gated else 2

    @property
    def expert_weights(self) -> int:
        """Weights of all experts of one layer; 0 where it has none."""
        if self.experts is None:
            return 0
        return self.experts.count * self.hidden * self.experts.width * self.matrices

    @property
    def shared_weights(self) -> int:
        """Weights that every token passes beside experts: the shared expert and the router."""
        if self.experts is None:
            return 0
        return self.hidden * (self.experts.shared_width * self.matrices + self.experts.count)

    @property
    def weights(self) -> int:
        """All of them."""
        return (
            (self.layers + self.mtp_layers) * self.attention_weights
            + self.dense_layers * self.dense_weights
            + self.expert_layers * (self.expert_weights + self.shared_weights)
            + self.vocabulary * self.hidden * (1 if self.tied else 2)
        )

    @property
    def active_weights(self) -> int:
        """Weights in matrices that one token passes; the embedding is none."""
        chosen = 0 if self.experts is None else self.experts.chosen / self.experts.count
        return (
            (self.layers + self.mtp_layers) * self.attention_weights
            + self.dense_layers * self.dense_weights
            + self.expert_layers * (int(self.expert_weights * chosen) + self.shared_weights)
            + self.vocabulary * self.hidden * (1 + self.mtp_layers)
        )

    def token_flops(self, sequence: int, *, causal: bool) -> float:
        """Count the operations of one token's forward and backward, without recomputation.

        Six for each weight it passes, and for each pair of positions those of two products
        (Chowdhery et al. 2022, PaLM, appendix B).

        Args:
            sequence: positions of a row.
            causal: count only pairs that a token sees, which are half of them.
        """
        pair = 6 * self.heads * (self.head_dim + self.values_dim)
        layers = self.layers + self.mtp_layers
        seen = self.seen(sequence) if causal else sequence
        return 6.0 * self.active_weights + layers * pair * seen

    def seen(self, sequence: int) -> float:
        """Return how many positions a token sees on average: half of them, or those of a window."""
        window = min(sequence, self.window or sequence)
        return window * (1 - window / (2 * sequence))
