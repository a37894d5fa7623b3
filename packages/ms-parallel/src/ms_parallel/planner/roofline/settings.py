"""What a step does besides the model's sizes: its batch, precision, recomputation and overlap."""

from collections.abc import Mapping
from typing import Final, Literal

from attrs import field, frozen

from ms_parallel.settings import flag, integer, number, one_of

_share = number(minimum=0.0, maximum=1.0)
Sharding = Literal["replicate", "zero1", "zero2", "zero3"]
SHARDINGS: Final = ("replicate", "zero1", "zero2", "zero3")


@frozen(kw_only=True)
class Repeated:
    """Shares of a layer's forward that the backward computes again."""

    products: float = field(default=0.0, validator=_share)
    """Share of matrix products, with the tensor ranks' communication that follows them."""
    attention: float = field(default=0.0, validator=_share)
    """Share of attention's core."""
    elementwise: float = field(default=0.0, validator=_share)
    """Share of norms, activations and sums."""


RECOMPUTE: Final[Mapping[str, Repeated]] = {
    "none": Repeated(),
    "selective": Repeated(elementwise=1.0),
    "attention": Repeated(products=0.3, attention=1.0, elementwise=0.5),
    "full": Repeated(products=1.0, attention=1.0, elementwise=1.0),
}
"""The kinds of `recompute`, as `ms_parallel.split.memory.recompute_choice` describes them."""


@frozen(kw_only=True)
class Overlap:
    """Shares of communication issued beside computation; `Efficiency.hidden` of it hides."""

    tensor_forward: float = field(default=0.0, validator=_share)
    tensor_backward: float = field(default=0.0, validator=_share)
    context: float = field(default=0.0, validator=_share)
    expert: float = field(default=0.0, validator=_share)
    pipeline: float = field(default=0.0, validator=_share)
    data: float = field(default=0.0, validator=_share)


@frozen(kw_only=True)
class StepSettings:
    """One step of a run.

    Raises:
        ConfigError: a value is out of range.
    """

    sequence: int = field(validator=integer())
    """Positions of a row."""
    rows: int = field(default=1, validator=integer())
    """Rows of a microbatch."""
    microbatches: int = field(default=1, validator=integer())
    """Microbatches that each reader passes in a step."""
    dtype: str = field(default="bfloat16", validator=one_of("bfloat16", "float16", "float32"))
    """Dtype of weights and activations as they are computed with."""
    product_dtype: str | None = None
    """What matrices are cast to for their products, `float8` or None; attention is not."""
    repeated: Repeated = field(factory=Repeated)
    virtual_stages: int = field(default=1, validator=integer())
    """Stages of each pipeline rank, as interleaved 1F1B has them."""
    stage_layers: tuple[int, ...] | None = None
    """Layers of each pipeline rank; None for equal shares, rounded up."""
    bubble_share: float = field(default=1.0, validator=_share)
    """Share of 1F1B's bubble that the schedule leaves: a third for ZB-H1, half for DualPipe."""
    mirrored: bool = field(default=False, validator=flag)
    """Whether each pipeline rank has the stages of its mirror image too, as DualPipe has it."""
    sharding: Sharding = field(default="replicate", validator=one_of(*SHARDINGS))
    """What ranks that hold different tokens share out."""
    gradient_bytes: int = field(default=4, validator=integer())
    """Bytes of a weight's gradient as it is reduced."""
    fused_attention: bool = field(default=True, validator=flag)
    """Whether attention's scores stay on the chip (Dao et al. 2022) and its masked half is left
    out; otherwise they are written and read, and dropped out of at random, as in 2021."""
    sequence_split: bool = field(default=True, validator=flag)
    """Whether tensor ranks share out positions between matrices (Korthikanti et al. 2022)."""
    passes: float = field(default=1.0, validator=number(minimum=0.1, maximum=10.0))
    """How often element-wise steps read and write beyond fused kernels: 1 for those."""
    overlap: Overlap = field(factory=Overlap)
