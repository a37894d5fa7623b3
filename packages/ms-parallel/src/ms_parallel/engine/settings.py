"""Settings that an engine and a training run share, each declared once; imports no torch."""

from collections.abc import Mapping
from typing import Any, Literal

from attrs import field, frozen

from ms_parallel.engine.balance.settings import method
from ms_parallel.errors import ConfigError
from ms_parallel.memory.modes import (
    OFFLOADS,
    SHARDINGS,
    Offload,
    Recompute,
    Sharding,
    recompute_setting,
)
from ms_parallel.optim.loss_scale_settings import LossScale, check_loss_scale, loss_scale_of
from ms_parallel.settings import flag, integer, number, one_of, short_repr
from ms_parallel.split.context.kinds import (
    CONTEXT_BALANCES,
    CONTEXT_MODES,
    ContextBalance,
    ContextKind,
)
from ms_parallel.split.precision_choice import FLOAT8, Float8, MixedPrecision, mixed_precision

GROUPS = (
    "model, data and layout",
    "optimization",
    "bad steps",
    "experts",
    "execution",
    "raw text",
    "output",
)
"""Headings of `--help`, `init` and the reference page, in their order."""
MODEL, OPTIMIZATION, BAD_STEPS, EXPERTS, EXECUTION, RAW_TEXT, OUTPUT = (
    {"group": title} for title in GROUPS
)
"""Field metadata: the heading of a setting."""


def _loss_scale(instance: Any, attribute: Any, value: Any) -> None:
    check_loss_scale(loss_scale_of(value), instance.mixed_precision)


def _flag_or_auto(instance: Any, attribute: Any, value: Any) -> None:
    if value != "auto" and not isinstance(value, bool):
        raise ConfigError(
            f"{attribute.name} must be true, false or 'auto', got {short_repr(value)}"
        )


@frozen(kw_only=True)
class EngineSettings:
    """Settings that `Engine` and `DistributedTrainer` both take.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
    """

    mixed_precision: MixedPrecision = field(
        default=False, converter=mixed_precision, metadata=EXECUTION
    )
    """Compute in bfloat16 (true) or `float16`. Weights, optimizer state and reductions stay
    float32."""
    float8: Float8 = field(default="none", validator=one_of(*FLOAT8), metadata=EXECUTION)
    """Round the factors of matrix products in blocks to float8 e4m3, with scales per row
    (`rowwise`), per 128 x 128 block (`blockwise`) or per 32 elements (`mxfp8`). Only `rowwise` is
    fast, on GPUs since Hopper; elsewhere products are emulated. Experts keep their precision. Not
    with reproducible, or schedules that split backwards."""
    loss_scale: LossScale | Mapping[str, Any] | None = field(
        default=None, validator=_loss_scale, metadata=EXECUTION
    )
    """Loss scaling in float16: a table of initial (65536), growth_interval (2000) and hysteresis
    (1)."""
    audit_every: int | None = field(
        default=None, validator=integer(optional=True), metadata=EXECUTION
    )
    """Recompute every N-th step in float32 and report the difference. None: never."""
    recompute: Recompute = field(default="none", validator=recompute_setting, metadata=EXECUTION)
    """Activation checkpointing: `none`, `selective` (recompute all but matrix products and
    attention), `attention`, `full`, or a memory limit per rank such as `8GiB`, by which the mode of
    each block is chosen."""
    compile: bool | Literal["auto"] = field(
        default="auto", validator=_flag_or_auto, metadata=EXECUTION
    )
    """Compile the training of each block with torch.compile; `auto`: on a GPU, where possible. Not
    with tensor, context or expert ranks, experts, recompute other than `full`, or schedules that
    split backwards."""
    sharding: Sharding = field(default="auto", validator=one_of(*SHARDINGS), metadata=EXECUTION)
    """State sharded over data and context ranks: `replicate` nothing, `zero1` optimizer state,
    `zero2` also gradients, `zero3` also weights; `auto`: zero3, or zero1 with a pipeline."""
    offload: Offload = field(default="none", validator=one_of(*OFFLOADS), metadata=EXECUTION)
    """Keep AdamW `moments`, saved `activations`, or `all` of these in host memory."""
    reproducible: bool = field(default=False, validator=flag, metadata=EXECUTION)
    """Bitwise the same weights for any number of data ranks, sharding and pipeline: rows are
    computed one at a time and summed in a fixed order."""
    context_attention: ContextKind = field(
        default="auto", validator=one_of(*CONTEXT_MODES), metadata=EXECUTION
    )
    """Attention under context parallelism: `all_gather` of keys and values, `ulysses`, `ring`,
    `ulysses_ring`, or `auto` (the one that sends the least)."""
    context_balance: ContextBalance = field(
        default="balanced", validator=one_of(*CONTEXT_BALANCES), metadata=EXECUTION
    )
    """Split of a row over context ranks: `balanced` by the cost of attention, or `zig-zag`."""
    balance: str | None = field(default=None, validator=method, metadata=EXPERTS)
    """Expert load balancing: `step`, a loss with the expert loads of the previous step; `sequence`,
    a loss with the loads of each document; `bias`; or `none`. None: by the model's config.json."""
    balance_coefficient: float | None = field(
        default=None, validator=number(optional=True), metadata=EXPERTS
    )
    """Weight of the balance loss, E · sum of f · P. None: router_aux_loss_coef of config.json."""
    balance_bias_rate: float = field(default=1e-3, validator=number(), metadata=EXPERTS)
    """Change of an expert's bias per step with `bias`."""
    router_z_loss_coefficient: float = field(default=0.0, validator=number(), metadata=EXPERTS)
    """Weight of the mean squared logsumexp of the routers, which keeps their logits small."""
    seed: int = field(
        default=0, validator=integer(minimum=0, maximum=2**63 - 1), metadata=OPTIMIZATION
    )
    """Random seed of initial weights and of the order of samples; both are the same under every
    layout."""


def check_audit(options: Any, subject: str) -> None:
    """Check that no audit is requested for a model that does not support audits.

    Raises:
        ConfigError: an audit is requested.
    """
    if options.audit_every is not None:
        raise ConfigError(f"audit_every is not supported for {subject}; remove it")
