"""Sizes of a decoder: its parameter counts, and the operations of a token."""

from attrs import field, frozen

from ms_parallel.settings import flag, integer

_size = integer(maximum=1 << 40)
_number = integer(minimum=0, maximum=1 << 40)


@frozen(kw_only=True)
class LatentSizes:
    """Widths of multi-head latent attention (DeepSeek-AI 2024, DeepSeek-V2, section 2.1)."""

    query: int | None = field(validator=integer(maximum=1 << 40, optional=True))
    """Width of the compressed queries; None without compression of queries."""
    key: int = field(validator=_size)
    """Width of the compressed keys and values."""
    rotary: int = field(validator=_size)
    """Width of the part of a key that all heads share; it is included in `head_dim`."""


@frozen(kw_only=True)
class ExpertSizes:
    """Sizes of a mixture of experts."""

    count: int = field(validator=_size)
    chosen: int = field(validator=_size)
    """Experts per token (top-k)."""
    width: int = field(validator=_size)
    """Intermediate size of an expert."""
    shared_width: int = field(default=0, validator=_number)
    """Intermediate size of the shared experts, which all tokens pass through."""
    first_layer: int = field(default=0, validator=_number)
    """First layer with experts; earlier layers have a dense MLP."""


@frozen(kw_only=True)
class DecoderSizes:
    """Sizes of a decoder.

    Raises:
        ConfigError: a size is not an integer of at least 1.
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
    """Intermediate size of a dense MLP."""
    gated: bool = field(default=True, validator=flag)
    """The MLP multiplies two projections, as SwiGLU does."""
    vocabulary: int = field(validator=_size)
    tied: bool = field(default=False, validator=flag)
    """The head shares the embedding's weight."""
    experts: ExpertSizes | None = None
    latents: LatentSizes | None = None
    window: int | None = field(default=None, validator=integer(optional=True))
    """Sliding window in positions; None for full attention."""
    mtp_layers: int = field(default=0, validator=_number)
    """Layers for multi-token prediction, each with an additional pass of the head."""

    @property
    def values_dim(self) -> int:
        """Width of a head's value."""
        return self.value_dim or self.head_dim

    @property
    def expert_layers(self) -> int:
        """Number of layers with experts."""
        first = self.layers if self.experts is None else self.experts.first_layer
        return max(0, self.layers - first) + (self.mtp_layers if self.experts else 0)

    @property
    def dense_layers(self) -> int:
        """Number of layers with a dense MLP."""
        return self.layers + self.mtp_layers - self.expert_layers

    @property
    def attention_weights(self) -> int:
        """Attention weights of a layer, without the negligible norms and biases."""
        query, value = self.heads * self.head_dim, self.heads * self.values_dim
        if self.latents is None:
            keys = self.key_value_heads * (self.head_dim + self.values_dim)
            return self.hidden * (query + keys + value)  # Q, K and V, and the output projection
        # Up-projection of the compressed keys and values, without the shared rotary part.
        key_value = self.heads * (self.head_dim - self.latents.rotary + self.values_dim)
        rank = self.latents.query
        queries = self.hidden * query if rank is None else rank * (self.hidden + query)
        # Down-projection of keys and values, and the output projection.
        down = self.hidden * (self.latents.key + self.latents.rotary + value)
        return queries + down + self.latents.key * key_value

    @property
    def dense_weights(self) -> int:
        """Weights of a dense MLP."""
        return self.hidden * self.inner * self.matrices

    @property
    def matrices(self) -> int:
        """Number of matrices of an MLP."""
        return 3 if self.gated else 2

    @property
    def expert_weights(self) -> int:
        """Weights of all routed experts of a layer; 0 without experts."""
        if self.experts is None:
            return 0
        return self.experts.count * self.hidden * self.experts.width * self.matrices

    @property
    def shared_weights(self) -> int:
        """Weights of the shared experts and the router of a layer; 0 without experts."""
        if self.experts is None:
            return 0
        return self.hidden * (self.experts.shared_width * self.matrices + self.experts.count)

    @property
    def weights(self) -> int:
        """Total number of weights."""
        return (
            (self.layers + self.mtp_layers) * self.attention_weights
            + self.dense_layers * self.dense_weights
            + self.expert_layers * (self.expert_weights + self.shared_weights)
            + self.vocabulary * self.hidden * (1 if self.tied else 2)
        )

    @property
    def active_weights(self) -> int:
        """Weights by which a token is multiplied; the embedding is a lookup and does not count."""
        active = 0 if self.experts is None else self.experts.chosen / self.experts.count
        return (
            (self.layers + self.mtp_layers) * self.attention_weights
            + self.dense_layers * self.dense_weights
            + self.expert_layers * (int(self.expert_weights * active) + self.shared_weights)
            + self.vocabulary * self.hidden * (1 + self.mtp_layers)
        )

    def token_flops(self, sequence: int, *, causal: bool) -> float:
        """Operations of a token's forward and backward, without recomputation.

        Six per active weight, plus two dot products per pair of positions in each layer (Chowdhery
        et al. 2022, PaLM, appendix B).

        Args:
            sequence: tokens per row.
            causal: count only the half of the pairs that the causal mask keeps.
        """
        # Scores and weighted values, 2 operations each, times 3 for forward and backward.
        pair_flops = 6 * self.heads * (self.head_dim + self.values_dim)
        layers = self.layers + self.mtp_layers
        positions = self.mean_visible_keys(sequence) if causal else sequence
        return 6.0 * self.active_weights + layers * pair_flops * positions

    def mean_visible_keys(self, sequence: int) -> float:
        """Mean number of positions that a token attends to, with a causal mask and the window.

        With window w and S tokens this is w (1 - w / 2S), and S / 2 without a window.
        """
        window = min(sequence, self.window or sequence)
        return window * (1 - window / (2 * sequence))
