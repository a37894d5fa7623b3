"""Time of a layer's forward and backward on one rank, from its matrix products and memory traffic.

Letters in comments: T tokens of a microbatch on a context rank, H hidden size, V vocabulary size.
"""

from collections.abc import Iterator
from typing import Final

from attrs import field, frozen

from ms_parallel.cluster.layout import Layout
from ms_parallel.planner.cluster import Cluster
from ms_parallel.planner.roofline.collectives import (
    RankGroup,
    exchange_seconds,
    gather_seconds,
)
from ms_parallel.planner.roofline.efficiency import Efficiency
from ms_parallel.planner.roofline.settings import RecomputedShares, StepSettings
from ms_parallel.planner.roofline.shape import DecoderSizes

BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4, "float8": 1}
SCORE_BYTES = (13, 19)
"""Bytes read and written per score by unfused attention in half precision. Forward: writing scores,
masked softmax, dropout with its mask, the product with the values. And backward."""
CAST_BYTES = 5
"""Bytes per element for a cast to float8: two 2-byte reads, the first one for the maximum, and
a 1-byte write."""
BACKWARD_BYTES = 1.7
"""Elementwise traffic of the backward relative to the forward: gradients and saved tensors."""
SOFTMAX_WIDTH = 64
"""head_dim at which the softmax of FlashAttention takes as long as its matrix products. From the
rates in Shah et al. 2024 (FlashAttention-3), figures 5 and 6, for head_dim 64, 128 and 256."""
BACKWARD_ATTENTION = 2.5
"""Matrix products of FlashAttention's backward relative to its forward: 5 / 2 (Dao et al. 2022)."""


@frozen(kw_only=True)
class Product:
    """`count` products of (rows, inner) and (inner, columns) matrices."""

    rows: float
    inner: float
    columns: float
    count: float = 1.0

    @property
    def flops(self) -> float:
        """Floating-point operations."""
        return 2.0 * self.count * self.rows * self.inner * self.columns

    @property
    def elements(self) -> float:
        """Elements read and written."""
        pairs = self.rows * self.inner + self.inner * self.columns + self.rows * self.columns
        return self.count * pairs


@frozen(kw_only=True)
class Pass:
    """Seconds of a layer's forward or backward."""

    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    tensor: float = 0.0
    """Communication between tensor ranks, before overlap."""
    context: float = 0.0
    """Communication between context ranks."""
    expert: float = 0.0
    """Communication between expert ranks."""

    @property
    def compute(self) -> float:
        """Seconds without communication."""
        return self.products + self.attention + self.elementwise


@frozen(kw_only=True)
class Rank:
    """Model, layout, settings and cluster of a rank, for computing its times."""

    sizes: DecoderSizes
    layout: Layout
    settings: StepSettings
    cluster: Cluster
    efficiency: Efficiency
    tokens: float = field(init=False)
    """T: tokens per microbatch in matrix products; all tensor ranks have the same tokens."""

    def __attrs_post_init__(self) -> None:
        tokens = self.settings.rows * self.settings.sequence / self.layout.context
        object.__setattr__(self, "tokens", tokens)

    @property
    def width_bytes(self) -> int:
        """Bytes per activation element."""
        return BYTES[self.settings.dtype]

    @property
    def read_bytes(self) -> int:
        """Bytes per input element of matrix products."""
        return BYTES[self.settings.product_dtype or self.settings.dtype]

    @property
    def tensor_ranks(self) -> RankGroup:
        """Tensor-parallel group."""
        return RankGroup(count=self.layout.tensor)

    def memory_seconds(self, size_bytes: float) -> float:
        """Seconds for reading or writing a number of bytes of device memory."""
        bandwidth = self.cluster.memory_bandwidth_gb_per_s * 1e9
        return size_bytes / (bandwidth * self.efficiency.memory)

    def rate(self, dtype: str) -> float:
        """Operations per second of large matrix products."""
        return self.cluster.tflops(dtype) * 1e12 * self.efficiency.product_share(dtype)

    def product_seconds(self, product: Product) -> float:
        """Seconds of a matrix product: its arithmetic, plus memory traffic that is not hidden."""
        dtype = self.settings.product_dtype or self.settings.dtype
        traffic = (
            product.elements * self.read_bytes / (self.cluster.memory_bandwidth_gb_per_s * 1e9)
        )
        return product.flops / self.rate(dtype) + traffic * self.efficiency.traffic

    def cast_seconds(self, product: Product) -> float:
        """Seconds for casting the activations of a float8 product; 0 for other dtypes.

        Casting weights is negligible: it happens once per step, or on shards before the gather.
        """
        if self.settings.product_dtype is None:
            return 0.0
        return self.memory_seconds(CAST_BYTES * product.count * product.rows * product.inner)


def attention_products(rank: Rank) -> Iterator[Product]:
    """Yield the matrix products of the attention projections."""
    sizes, split, rows = rank.sizes, rank.layout.tensor, rank.tokens
    query, value = sizes.heads * sizes.head_dim, sizes.heads * sizes.values_dim
    if sizes.latents is None:
        # Fused projection of queries, keys and values, split by columns.
        keys = sizes.key_value_heads * (sizes.head_dim + sizes.values_dim)
        yield Product(rows=rows, inner=sizes.hidden, columns=(query + keys) / split)
    else:
        # Up-projections: a head's value, and the part of its key without rotary embedding.
        key_value = sizes.heads * (sizes.head_dim - sizes.latents.rotary + sizes.values_dim)
        query_rank = sizes.latents.query
        down = (query_rank or 0) + sizes.latents.key + sizes.latents.rotary
        # The down-projection is replicated, so tensor ranks divide its rows instead.
        yield Product(rows=rows / split, inner=sizes.hidden, columns=down)
        yield Product(rows=rows, inner=query_rank or sizes.hidden, columns=query / split)
        yield Product(rows=rows, inner=sizes.latents.key, columns=key_value / split)
    # Output projection, split by rows.
    yield Product(rows=rows, inner=value / split, columns=sizes.hidden)


def feedforward_products(rank: Rank, *, experts: bool) -> Iterator[Product]:
    """Yield the matrix products of the MLP, or of the router and the experts."""
    sizes, split = rank.sizes, rank.layout.tensor
    width = sizes.inner
    if experts and sizes.experts is not None:
        mixture = sizes.experts
        # The ranks of an expert group send T * chosen * expert rows to `count` experts, evenly.
        rows_per_expert = rank.tokens * mixture.chosen * rank.layout.expert / mixture.count
        local_experts = mixture.count / rank.layout.expert
        yield from _feedforward(sizes, rows_per_expert, mixture.width / split, local_experts)
        yield Product(rows=rank.tokens / split, inner=sizes.hidden, columns=mixture.count)
        width = mixture.shared_width
    if width:
        yield from _feedforward(sizes, rank.tokens, width / split, 1)


def _feedforward(sizes: DecoderSizes, rows: float, width: float, count: float) -> Iterator[Product]:
    up_columns = width * (sizes.matrices - 1)  # gate and up projection in one product
    yield Product(rows=rows, inner=sizes.hidden, columns=up_columns, count=count)
    yield Product(rows=rows, inner=width, columns=sizes.hidden, count=count)


def core_seconds(rank: Rank) -> tuple[float, float]:
    """Predict the seconds of attention between its projections: (forward, backward)."""
    sizes, settings = rank.sizes, rank.settings
    heads = sizes.heads / rank.layout.tensor
    pairs = rank.tokens * settings.sequence * heads
    pair_flops = 2.0 * (sizes.head_dim + sizes.values_dim)  # scores, and weighted values
    peak = rank.cluster.tflops(settings.dtype) * 1e12
    if settings.fused_attention:
        unmasked_pairs = rank.tokens * sizes.mean_visible_keys(settings.sequence) * heads
        head_dim = (sizes.head_dim + sizes.values_dim) / 2
        # The softmax costs the same for any head_dim; `Efficiency.attention` is for 128.
        slowdown = (1 + SOFTMAX_WIDTH / head_dim) / (1 + SOFTMAX_WIDTH / 128)
        forward = pair_flops * unmasked_pairs / peak * slowdown
        return (
            forward / rank.efficiency.attention,
            BACKWARD_ATTENTION * forward / rank.efficiency.attention_backward,
        )
    # Unfused attention also computes the masked scores, and all pass through memory.
    forward = pair_flops * pairs / rank.rate(settings.dtype)
    return (
        forward + rank.memory_seconds(SCORE_BYTES[0] * pairs),
        2 * forward + rank.memory_seconds(SCORE_BYTES[1] * pairs),
    )


def elementwise_bytes(rank: Rank, *, experts: bool) -> float:
    """Bytes read and written in the forward by norms, residuals, RoPE and activation functions."""
    sizes, split = rank.sizes, rank.layout.tensor
    # Per token, in half precision.
    norms = 20.0 * sizes.hidden / (split if rank.settings.sequence_split else 1)
    heads = 4.0 * (sizes.heads + sizes.key_value_heads) * sizes.head_dim / split
    width = float(sizes.inner)
    routing = 0.0
    if experts and sizes.experts is not None:
        width = sizes.experts.width * sizes.experts.chosen + sizes.experts.shared_width
        # Permute rows by expert, and combine them with their weights.
        routing = 8.0 * sizes.hidden * sizes.experts.chosen / split
    gate = (6.0 if sizes.gated else 4.0) * width / split
    scale = rank.settings.passes * rank.width_bytes / 2
    return rank.tokens * scale * (norms + heads + gate + routing)


def layer_seconds(rank: Rank, *, experts: bool = False) -> tuple[Pass, Pass]:
    """Predict the forward and backward of a layer for one microbatch, including recomputation.

    Args:
        rank: rank that computes it.
        experts: the layer has experts.
    """
    products = (*attention_products(rank), *feedforward_products(rank, experts=experts))
    casts = sum(rank.cast_seconds(product) for product in products)
    forward_core, backward_core = core_seconds(rank)
    elementwise = rank.memory_seconds(elementwise_bytes(rank, experts=experts))
    forward = Pass(
        products=sum(rank.product_seconds(product) for product in products),
        attention=forward_core,
        elementwise=elementwise + casts,
        tensor=_tensor_seconds(rank),
        context=_context_seconds(rank),
        expert=_expert_seconds(rank) if experts else 0.0,
    )
    gradients = Pass(
        products=2 * forward.products,  # gradients of inputs and of weights
        attention=backward_core,
        elementwise=BACKWARD_BYTES * elementwise + 1.5 * casts,
        tensor=forward.tensor,
        context=2 * forward.context,
        expert=forward.expert,
    )
    return forward, _with_recomputation(rank, forward, gradients)


def head_seconds(rank: Rank) -> tuple[float, float]:
    """Predict the seconds of the head and the loss for one microbatch: (forward, backward)."""
    sizes, split = rank.sizes, rank.layout.tensor
    product = Product(rows=rank.tokens, inner=sizes.hidden, columns=sizes.vocabulary / split)
    logits = rank.tokens * sizes.vocabulary / split  # elements of (T, V)
    # Forward: write 2 bytes, cast to float32 (2 + 4), softmax (4 + 4). Backward: read and write
    # float32 (4 + 4), cast to half precision (4 + 2).
    forward = rank.memory_seconds((2 + 6 + 8) * logits)
    dtype = rank.settings.dtype
    product_s = product.flops / rank.rate(dtype)
    passes = 1 + sizes.mtp_layers
    backward = 2 * product_s + rank.memory_seconds(14 * logits)
    return passes * (product_s + forward), passes * backward


def _with_recomputation(rank: Rank, forward: Pass, gradients: Pass) -> Pass:
    """Add the recomputed fractions of the forward to the backward."""
    share: RecomputedShares = rank.settings.repeated
    return Pass(
        products=gradients.products + share.products * forward.products,
        attention=gradients.attention + share.attention * forward.attention,
        elementwise=gradients.elementwise + share.elementwise * forward.elementwise,
        tensor=gradients.tensor + share.products * forward.tensor,
        context=gradients.context + share.attention * forward.context,
        expert=gradients.expert + share.products * forward.expert,
    )


def _tensor_seconds(rank: Rank) -> float:
    """Predict the seconds of a layer's tensor-parallel communication.

    An all-gather and a reduce-scatter around attention and around the MLP, which take as long as
    two all-reduces. Gathers move the inputs of products, in float8 if these are.
    """
    elements, links = rank.tokens * rank.sizes.hidden, (rank.cluster, rank.efficiency)  # (T, H)
    gather = gather_seconds(rank.read_bytes * elements, rank.tensor_ranks, *links)
    scatter = gather_seconds(rank.width_bytes * elements, rank.tensor_ranks, *links)
    return 2 * (gather + scatter)


def _context_seconds(rank: Rank) -> float:
    """Predict the seconds for gathering the keys and values of all positions over context ranks."""
    sizes, layout = rank.sizes, rank.layout
    if layout.context == 1:
        return 0.0
    width = sizes.key_value_heads * (sizes.head_dim + sizes.values_dim)
    elements = rank.settings.rows * rank.settings.sequence * width / layout.tensor
    group = RankGroup(count=layout.context, stride=layout.tensor)
    return gather_seconds(elements * rank.width_bytes, group, rank.cluster, rank.efficiency)


def _expert_seconds(rank: Rank) -> float:
    """Predict the seconds of the two all-to-alls that dispatch tokens and combine results."""
    sizes, layout = rank.sizes, rank.layout
    if sizes.experts is None or layout.expert == 1:
        return 0.0
    copies = rank.tokens / layout.tensor * sizes.experts.chosen
    size = copies * sizes.hidden * rank.width_bytes
    group = RankGroup(count=layout.expert, stride=layout.tensor)
    return 2 * exchange_seconds(size, group, rank.cluster, rank.efficiency)
