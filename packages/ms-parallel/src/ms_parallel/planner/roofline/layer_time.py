"""Time of one layer's forward and backward on one rank, by its matrix products and bytes."""

from collections.abc import Iterator
from typing import Final

from attrs import field, frozen

from ms_parallel.cluster.layout import Layout
from ms_parallel.planner.cluster import Cluster
from ms_parallel.planner.roofline.collectives import (
    Members,
    exchange_seconds,
    gather_seconds,
)
from ms_parallel.planner.roofline.efficiency import Efficiency
from ms_parallel.planner.roofline.settings import Repeated, StepSettings
from ms_parallel.planner.roofline.shape import DecoderSizes

BYTES: Final = {"bfloat16": 2, "float16": 2, "float32": 4, "float8": 1}
SCORE_BYTES = (13, 19)
"""Bytes that attention that is not fused reads and writes for each score, in half precision:
forward, written, masked and normalized, dropped out with a mask, multiplied; and backward."""
CAST_BYTES = 5
"""To find an element's largest neighbor, read it again and write it as one byte."""
BACKWARD_BYTES = 1.7
"""Element-wise bytes of a backward by those of its forward: gradients besides what was saved."""
SOFTMAX_WIDTH = 64
"""Width of a head at which the softmax of fused attention takes as long as its products do: rates
of Shah et al. 2024 (FlashAttention-3), figures 5 and 6, for heads of 64, 128 and 256."""
BACKWARD_ATTENTION = 2.5
"""Products of fused attention's backward by its forward's: five for two (Dao et al. 2022)."""


@frozen(kw_only=True)
class Product:
    """`count` products of (rows, inner) and (inner, columns) matrices."""

    rows: float
    inner: float
    columns: float
    count: float = 1.0

    @property
    def flops(self) -> float:
        """Floating-point operations of all of them."""
        return 2.0 * self.count * self.rows * self.inner * self.columns

    @property
    def elements(self) -> float:
        """Read and written."""
        pairs = self.rows * self.inner + self.inner * self.columns + self.rows * self.columns
        return self.count * pairs


@frozen(kw_only=True)
class Pass:
    """Seconds of one direction of a layer."""

    products: float = 0.0
    attention: float = 0.0
    elementwise: float = 0.0
    tensor: float = 0.0
    """Communication of tensor ranks, and so on; that of context and expert ranks, in all."""
    context: float = 0.0
    expert: float = 0.0

    @property
    def compute(self) -> float:
        """Without communication."""
        return self.products + self.attention + self.elementwise


@frozen(kw_only=True)
class Rank:
    """A rank's surroundings: what it computes, with which ranks, on what."""

    sizes: DecoderSizes
    layout: Layout
    settings: StepSettings
    cluster: Cluster
    efficiency: Efficiency
    tokens: float = field(init=False)
    """Tokens of a microbatch as products see them: tensor ranks have all of a context rank's."""

    def __attrs_post_init__(self) -> None:
        tokens = self.settings.rows * self.settings.sequence / self.layout.context
        object.__setattr__(self, "tokens", tokens)

    @property
    def width_bytes(self) -> int:
        """Bytes of a number of an activation."""
        return BYTES[self.settings.dtype]

    @property
    def read_bytes(self) -> int:
        """Bytes of a number that products read."""
        return BYTES[self.settings.product_dtype or self.settings.dtype]

    @property
    def tensor_ranks(self) -> Members:
        """Ranks that split its matrices."""
        return Members(count=self.layout.tensor)

    def moved(self, size_bytes: float) -> float:
        """Return the seconds to read or write so many bytes of its memory."""
        bandwidth = self.cluster.memory_bandwidth_gb_per_s * 1e9
        return size_bytes / (bandwidth * self.efficiency.memory)

    def rate(self, dtype: str) -> float:
        """Return the operations a second of large products."""
        return self.cluster.tflops(dtype) * 1e12 * self.efficiency.product_share(dtype)

    def multiplied(self, product: Product) -> float:
        """Return the seconds of a product: its operations, and what traffic they do not hide."""
        dtype = self.settings.product_dtype or self.settings.dtype
        traffic = (
            product.elements * self.read_bytes / (self.cluster.memory_bandwidth_gb_per_s * 1e9)
        )
        return product.flops / self.rate(dtype) + traffic * self.efficiency.traffic

    def cast(self, product: Product) -> float:
        """Return the seconds to make its activations eight bits wide, where products are.

        Weights are cast once a step, or each rank's share of them before it is gathered, which is
        too little to count.
        """
        if self.settings.product_dtype is None:
            return 0.0
        return self.moved(CAST_BYTES * product.count * product.rows * product.inner)


def attention_products(rank: Rank) -> Iterator[Product]:
    """Yield the matrix products of attention's projections."""
    sizes, split, rows = rank.sizes, rank.layout.tensor, rank.tokens
    query, value = sizes.heads * sizes.head_dim, sizes.heads * sizes.values_dim
    if sizes.latents is None:
        keys = sizes.key_value_heads * (sizes.head_dim + sizes.values_dim)
        yield Product(rows=rows, inner=sizes.hidden, columns=(query + keys) / split)
    else:
        made = sizes.heads * (sizes.head_dim - sizes.latents.rotary + sizes.values_dim)
        small = sizes.latents.query
        down = (small or 0) + sizes.latents.key + sizes.latents.rotary
        yield Product(rows=rows / split, inner=sizes.hidden, columns=down)
        yield Product(rows=rows, inner=small or sizes.hidden, columns=query / split)
        yield Product(rows=rows, inner=sizes.latents.key, columns=made / split)
    yield Product(rows=rows, inner=value / split, columns=sizes.hidden)


def feedforward_products(rank: Rank, *, experts: bool) -> Iterator[Product]:
    """Yield the matrix products of the feed-forward; with experts, of the router too."""
    sizes, split = rank.sizes, rank.layout.tensor
    width = sizes.inner
    if experts and sizes.experts is not None:
        each = sizes.experts
        passing = rank.tokens * each.chosen * rank.layout.expert / each.count
        local = each.count / rank.layout.expert
        yield from _feedforward(sizes, passing, each.width / split, local)
        yield Product(rows=rank.tokens / split, inner=sizes.hidden, columns=each.count)
        width = each.shared_width
    if width:
        yield from _feedforward(sizes, rank.tokens, width / split, 1)


def _feedforward(sizes: DecoderSizes, rows: float, width: float, count: float) -> Iterator[Product]:
    into = width * (sizes.matrices - 1)
    yield Product(rows=rows, inner=sizes.hidden, columns=into, count=count)
    yield Product(rows=rows, inner=width, columns=sizes.hidden, count=count)


def core_seconds(rank: Rank) -> tuple[float, float]:
    """Predict the seconds of attention's core, between its projections: forward and backward."""
    sizes, settings = rank.sizes, rank.settings
    heads = sizes.heads / rank.layout.tensor
    pairs = rank.tokens * settings.sequence * heads
    each = 2.0 * (sizes.head_dim + sizes.values_dim)
    peak = rank.cluster.tflops(settings.dtype) * 1e12
    if settings.fused_attention:
        seen = rank.tokens * sizes.seen(settings.sequence) * heads
        wide = (sizes.head_dim + sizes.values_dim) / 2
        slower = (1 + SOFTMAX_WIDTH / wide) / (1 + SOFTMAX_WIDTH / 128)
        forward = each * seen / peak * slower
        return (
            forward / rank.efficiency.attention,
            BACKWARD_ATTENTION * forward / rank.efficiency.attention_backward,
        )
    forward = each * pairs / rank.rate(settings.dtype)
    return (
        forward + rank.moved(SCORE_BYTES[0] * pairs),
        2 * forward + rank.moved(SCORE_BYTES[1] * pairs),
    )


def elementwise_bytes(rank: Rank, *, experts: bool) -> float:
    """Count the bytes that a forward's norms, sums, rotations and activations read and write."""
    sizes, split = rank.sizes, rank.layout.tensor
    norms = 20.0 * sizes.hidden / (split if rank.settings.sequence_split else 1)
    heads = 4.0 * (sizes.heads + sizes.key_value_heads) * sizes.head_dim / split
    width = float(sizes.inner)
    further = 0.0
    if experts and sizes.experts is not None:
        width = sizes.experts.width * sizes.experts.chosen + sizes.experts.shared_width
        # Sorted by expert, and back with their weights.
        further = 8.0 * sizes.hidden * sizes.experts.chosen / split
    gate = (6.0 if sizes.gated else 4.0) * width / split
    scale = rank.settings.passes * rank.width_bytes / 2
    return rank.tokens * scale * (norms + heads + gate + further)


def layer_seconds(rank: Rank, *, experts: bool = False) -> tuple[Pass, Pass]:
    """Predict the forward and backward of one layer and microbatch, with what is computed again.

    Args:
        rank: whose.
        experts: whether the layer has experts.
    """
    products = (*attention_products(rank), *feedforward_products(rank, experts=experts))
    casts = sum(rank.cast(each) for each in products)
    forward_core, backward_core = core_seconds(rank)
    moved = rank.moved(elementwise_bytes(rank, experts=experts))
    forward = Pass(
        products=sum(rank.multiplied(each) for each in products),
        attention=forward_core,
        elementwise=moved + casts,
        tensor=_tensor_seconds(rank),
        context=_context_seconds(rank),
        expert=_expert_seconds(rank) if experts else 0.0,
    )
    gradients = Pass(
        products=2 * forward.products,
        attention=backward_core,
        elementwise=BACKWARD_BYTES * moved + 1.5 * casts,
        tensor=forward.tensor,
        context=2 * forward.context,
        expert=forward.expert,
    )
    return forward, _again(rank, forward, gradients)


def head_seconds(rank: Rank) -> tuple[float, float]:
    """Predict the seconds of the head and its loss: forward and backward of one microbatch."""
    sizes, split = rank.sizes, rank.layout.tensor
    product = Product(rows=rank.tokens, inner=sizes.hidden, columns=sizes.vocabulary / split)
    wide = rank.tokens * sizes.vocabulary / split
    # Written, made float32, normalized; backward: read, written and made half as wide.
    forward = rank.moved((2 + 6 + 8) * wide)
    dtype = rank.settings.dtype
    multiply = product.flops / rank.rate(dtype)
    passes = 1 + sizes.mtp_layers
    return passes * (multiply + forward), passes * (2 * multiply + rank.moved(14 * wide))


def _again(rank: Rank, forward: Pass, gradients: Pass) -> Pass:
    """Add to the backward the shares of the forward that it repeats."""
    share: Repeated = rank.settings.repeated
    return Pass(
        products=gradients.products + share.products * forward.products,
        attention=gradients.attention + share.attention * forward.attention,
        elementwise=gradients.elementwise + share.elementwise * forward.elementwise,
        tensor=gradients.tensor + share.products * forward.tensor,
        context=gradients.context + share.attention * forward.context,
        expert=gradients.expert + share.products * forward.expert,
    )


def _tensor_seconds(rank: Rank) -> float:
    """Predict the seconds of two sums over tensor ranks, or of gathering and scattering instead.

    What is gathered is what products read, eight bits wide where they are.
    """
    size, near = rank.tokens * rank.sizes.hidden, (rank.cluster, rank.efficiency)
    gathered = gather_seconds(rank.read_bytes * size, rank.tensor_ranks, *near)
    return 2 * (gathered + gather_seconds(rank.width_bytes * size, rank.tensor_ranks, *near))


def _context_seconds(rank: Rank) -> float:
    """Predict the seconds to gather a whole row's keys and values over context ranks."""
    sizes, layout = rank.sizes, rank.layout
    if layout.context == 1:
        return 0.0
    width = sizes.key_value_heads * (sizes.head_dim + sizes.values_dim)
    whole = rank.settings.rows * rank.settings.sequence * width * rank.width_bytes / layout.tensor
    members = Members(count=layout.context, stride=layout.tensor)
    return gather_seconds(whole, members, rank.cluster, rank.efficiency)


def _expert_seconds(rank: Rank) -> float:
    """Predict the seconds in which tokens are sent to their experts, and back."""
    sizes, layout = rank.sizes, rank.layout
    if sizes.experts is None or layout.expert == 1:
        return 0.0
    copies = rank.tokens / layout.tensor * sizes.experts.chosen
    size = copies * sizes.hidden * rank.width_bytes
    members = Members(count=layout.expert, stride=layout.tensor)
    return 2 * exchange_seconds(size, members, rank.cluster, rank.efficiency)
