"""Settings of a step: batch, precision, recomputation, sharding and overlap."""

from collections.abc import Mapping
from typing import Final, Literal

from attrs import field, frozen

from ms_parallel.settings import flag, integer, number, one_of

_share = number(minimum=0.0, maximum=1.0)
Sharding = Literal["replicate", "zero1", "zero2", "zero3"]
SHARDINGS: Final = ("replicate", "zero1", "zero2", "zero3")


@frozen(kw_only=True)
class RecomputedShares:
    """Fractions of a layer's forward that the backward recomputes."""

    products: float = field(default=0.0, validator=_share)
    """Matrix products and their tensor-parallel communication."""
    attention: float = field(default=0.0, validator=_share)
    """Attention between its projections."""
    elementwise: float = field(default=0.0, validator=_share)
    """Norms, activation functions and residual sums."""


RECOMPUTE: Final[Mapping[str, RecomputedShares]] = {
    "none": RecomputedShares(),
    "selective": RecomputedShares(elementwise=1.0),
    "attention": RecomputedShares(products=0.3, attention=1.0, elementwise=0.5),
    "full": RecomputedShares(products=1.0, attention=1.0, elementwise=1.0),
}
"""Recomputed fractions for each value of the setting `recompute`; see
`ms_parallel.memory.modes`."""


@frozen(kw_only=True)
class Overlap:
    """Fractions of communication that run concurrently with computation.

    Of these, `Efficiency.hidden` costs no time.
    """

    tensor_forward: float = field(default=0.0, validator=_share)
    tensor_backward: float = field(default=0.0, validator=_share)
    context: float = field(default=0.0, validator=_share)
    expert: float = field(default=0.0, validator=_share)
    pipeline: float = field(default=0.0, validator=_share)
    data: float = field(default=0.0, validator=_share)


@frozen(kw_only=True)
class StepSettings:
    """Settings of one step.

    Raises:
        ConfigError: a value is out of range.
    """

    sequence: int = field(validator=integer())
    """Tokens per row."""
    rows: int = field(default=1, validator=integer())
    """Microbatch size in rows."""
    microbatches: int = field(default=1, validator=integer())
    """Microbatches per step on each data rank."""
    dtype: str = field(default="bfloat16", validator=one_of("bfloat16", "float16", "float32"))
    """Compute dtype of weights and activations."""
    product_dtype: str | None = None
    """Dtype to which the inputs of matrix products are cast, `float8` or None; not in attention."""
    repeated: RecomputedShares = field(factory=RecomputedShares)
    """Recomputed fractions of the forward."""
    virtual_stages: int = field(default=1, validator=integer())
    """Stages per pipeline rank, as in interleaved 1F1B."""
    stage_layers: tuple[int, ...] | None = None
    """Layers of each pipeline rank; None to divide them evenly."""
    bubble_share: float = field(default=1.0, validator=_share)
    """Bubble as a fraction of 1F1B's: a third for ZB-H1, half for DualPipe."""
    mirrored: bool = field(default=False, validator=flag)
    """Each pipeline rank also has the stages of the mirrored rank, as in DualPipe."""
    sharding: Sharding = field(default="replicate", validator=one_of(*SHARDINGS))
    """Tensors that are sharded over ranks with different tokens."""
    gradient_bytes: int = field(default=4, validator=integer())
    """Bytes per gradient element in reductions."""
    fused_attention: bool = field(default=True, validator=flag)
    """Use FlashAttention (Dao et al. 2022), which keeps scores on chip and skips masked blocks.
    Otherwise all scores pass through memory, with dropout, as was usual in 2021."""
    sequence_split: bool = field(default=True, validator=flag)
    """Use sequence parallelism between matrix products (Korthikanti et al. 2022)."""
    passes: float = field(default=1.0, validator=number(minimum=0.1, maximum=10.0))
    """Memory traffic of elementwise operators relative to fused kernels, which have 1."""
    overlap: Overlap = field(factory=Overlap)
