"""The options of an engine, validated when they are built."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from attrs import field, frozen

from ms_parallel.cluster.device import Wanted
from ms_parallel.cluster.groups import Groups
from ms_parallel.engine.balance.settings import method
from ms_parallel.engine.optimizer import SHARED, OptimizerConfig, optimizer_of
from ms_parallel.engine.optimizers.adamw import AdamWConfig
from ms_parallel.engine.updates.settings import LossScale, check_loss_scale, loss_scale_of
from ms_parallel.errors import ConfigError
from ms_parallel.models.plan import ModelPlan
from ms_parallel.operators.protocol import Ops
from ms_parallel.pipeline.layer_split import Choice
from ms_parallel.settings import a_path, flag, number, one_of, whole
from ms_parallel.split.context.kinds import BALANCES, KINDS, ContextKind
from ms_parallel.split.context.kinds import Balance as ContextBalance
from ms_parallel.split.data_axis import MOMENTS, OFFLOADS, SHARDINGS, Offload, Sharding
from ms_parallel.split.memory.recompute_choice import Recompute, recompute_setting
from ms_parallel.split.precision_choice import MixedPrecision, mixed_precision


def _optimizer(value: OptimizerConfig | str | Mapping[str, Any]) -> OptimizerConfig:
    if isinstance(value, OptimizerConfig):
        return value
    if not isinstance(value, Mapping):
        return optimizer_of(value)
    shared = {key: value[key] for key in SHARED if key in value}
    return optimizer_of({k: v for k, v in value.items() if k not in shared}, **shared)


@frozen(kw_only=True)
class EngineOptions:
    """Settings of an `Engine`; its keywords.

    Raises:
        ConfigError: a value is of the wrong kind or out of range.
    """

    optimizer: OptimizerConfig = field(factory=AdamWConfig, converter=_optimizer)
    """The settings of the optimizer, whose class says which it is; or its name, or a table of its
    `name` and settings, the shared ones too."""
    schedule: Choice = field(default="1f1b", validator=a_path(objects=True))
    """A generator's name, such as `"1f1b"` or `"zb-v"`; the path of a CSV file in
    torch.distributed.pipelining's form; or a table. A file or table is of its own number of
    microbatches. Each stage gets its share of the layers, or as many as a `Staged`, what
    `search_schedule` finds, says."""
    microbatch_size: int | None = field(default=None, validator=whole(optional=True))
    """Rows of this data rank that pass at once, the last time perhaps fewer; None for all."""
    mixed_precision: MixedPrecision = field(default=False, converter=mixed_precision)
    """Compute in bfloat16 (True) or `"float16"`; weights, moments and sums stay float32."""
    loss_scale: LossScale | None = field(default=None, converter=loss_scale_of)
    """How the loss is scaled in float16, a `LossScale` or a table of its settings."""
    audit_every: int | None = field(default=None, validator=whole(optional=True))
    """Updates between audits, each of which is computed again in float32; None for none."""
    recompute: Recompute = field(default="none", validator=recompute_setting)
    """What blocks run again in the backward instead of keeping it: `"none"`, `"selective"`,
    `"attention"`, `"full"`; or the most bytes that a rank's blocks may keep, such as `"8GiB"`."""
    compile: bool = field(default=False, validator=flag)
    """Compile the training of each block by itself, with torch.compile; see
    `ms_parallel.split.compiled`."""
    sharding: Sharding = field(default="auto", validator=one_of(*SHARDINGS))
    """What ranks that hold different tokens share out: `replicate`, `zero1`, `zero2`, `zero3`, or
    `auto`; see `ms_parallel.split.sharding`."""
    offload: Offload = field(default="none", validator=one_of(*OFFLOADS))
    """What lies in the machine's memory, not its device's: `"moments"` of AdamW, which visit the
    device in an update; `"activations"`, what forwards keep for their backward; or `"all"`."""
    reproducible: bool = field(default=False, validator=flag)
    """The same weights to the bit for any number of data ranks, any sharding, any cut into stages
    and any microbatch_size: rows pass one at a time and are added up in one order."""
    seed: int = 0
    """Seed of fresh weights, which are the same under every layout."""
    weights: Literal["initial", "unset"] | Path = field(default="initial", validator=a_path())
    """`"initial"`: those of the model's folder, or drawn; a folder whose weights are read; or
    `"unset"` where a checkpoint is loaded next, so that none are drawn to be overwritten."""
    device: Wanted = None
    """`"cpu"` or an accelerator; None for the machine's best; or `Devices`, where ranks have unlike
    ones."""
    ops: Ops | None = None
    """Operators of the model; None for plain torch."""
    context_attention: ContextKind = field(default="auto", validator=one_of(*KINDS))
    """How attention sees rows whose positions context ranks share out: `all_gather`, `ulysses`,
    `ring`, `ulysses_ring`, or `auto` by what is sent; see `ms_parallel.split.context.kinds`."""
    context_balance: ContextBalance = field(default="balanced", validator=one_of(*BALANCES))
    """How blocks of a row are assigned to context ranks: `balanced`, by what attention to their
    documents costs, or `zig-zag`, one early and one late block a rank."""
    balance: str | None = field(default=None, validator=method)
    """How the load of experts is balanced: `step`, `sequence`, `bias` or `none`; None for the
    model's own way. See `ms_parallel.engine.balance.settings.Balance`."""
    balance_coefficient: float | None = field(default=None, validator=number(optional=True))
    """Weight of the balance loss; None for the router_aux_loss_coef of the model's config.json."""
    balance_bias_rate: float = field(default=1e-3, validator=number())
    """How far `bias` moves an expert's bias in one update."""
    router_z_coefficient: float = field(default=0.0, validator=number())
    """Weight of the mean square of the routers' logsumexp."""
    heads: Mapping[str, int] = field(factory=dict)
    """Width of each extra linear head on the final hidden states, by name."""
    on_nonfinite: Literal["skip", "raise"] = field(
        default="skip", validator=one_of("skip", "raise")
    )
    """What a gradient with an infinity or NaN does: skip the update and say so, or raise. Weights
    are never touched by it."""
    groups: Groups | None = None
    """Processes that are already connected; by default the layout is connected."""
    plan: ModelPlan | None = None
    """How a module of your own may be split; None for over the data axis alone."""
    prepare: Callable[[Any], object] | None = None
    """Called with each stage of this process once it is split over the tensor axis and before it is
    sharded; may change layers in place. Parameters that it adds begin at zero."""

    def __attrs_post_init__(self) -> None:
        check_loss_scale(self.loss_scale, self.mixed_precision)
        if self.offload in MOMENTS and not self.optimizer.offloads:
            name = type(self.optimizer).__name__.removesuffix("Config")
            other = "none" if self.offload == "moments" else "activations"
            raise ConfigError(
                f"offload={self.offload!r} is for AdamW, and the optimizer is {name}; set offload"
                f" to {other}, or choose AdamW"
            )

    @property
    def scaling(self) -> LossScale | None:
        """How the loss is scaled; None where it is not."""
        return (self.loss_scale or LossScale()) if self.mixed_precision == "float16" else None
