"""The options of an engine, validated when they are built."""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

from attrs import field, frozen

from ms_parallel.cluster.device import DeviceSpec
from ms_parallel.cluster.groups import Groups
from ms_parallel.engine.settings import EngineSettings
from ms_parallel.errors import ConfigError
from ms_parallel.memory.modes import MOMENTS
from ms_parallel.models.plan import ModelPlan
from ms_parallel.operators.protocol import Ops
from ms_parallel.optim.loss_scale_settings import LossScale, loss_scale_of
from ms_parallel.optim.optimizer import SHARED, OptimizerConfig, optimizer_of
from ms_parallel.optim.optimizers.adamw import AdamWConfig
from ms_parallel.pipeline.layer_split import ScheduleChoice
from ms_parallel.settings import integer, one_of, valid_path


def _optimizer(value: OptimizerConfig | str | Mapping[str, Any]) -> OptimizerConfig:
    if isinstance(value, OptimizerConfig):
        return value
    if not isinstance(value, Mapping):
        return optimizer_of(value)
    shared = {key: value[key] for key in SHARED if key in value}
    return optimizer_of({k: v for k, v in value.items() if k not in shared}, **shared)


@frozen(kw_only=True)
class EngineOptions(EngineSettings):
    """Keyword arguments of an `Engine`.

    Raises:
        ConfigError: a value has the wrong type or is out of range.
    """

    optimizer: OptimizerConfig = field(factory=AdamWConfig, converter=_optimizer)
    """Optimizer settings, whose class selects the optimizer; or its name; or a table of its `name`
    and settings."""
    schedule: ScheduleChoice = field(default="1f1b", validator=valid_path(objects=True))
    """Pipeline schedule: a generator's name such as `"1f1b"` or `"zb-v"`; the path of a CSV file in
    the format of torch.distributed.pipelining; a table; or a `StagedSchedule`, which also assigns
    layers to stages. Files and tables have a fixed number of microbatches."""
    microbatch_size: int | None = field(default=None, validator=integer(optional=True))
    """Rows per forward pass on each data rank; the last may have fewer. None: all rows at once."""
    weights: Literal["initial", "unset"] | Path = field(default="initial", validator=valid_path())
    """`"initial"`: the weights of the model's folder, else random; a folder to read weights from;
    or `"unset"` if a checkpoint is loaded next."""
    device: DeviceSpec = None
    """`"cpu"` or an accelerator; or `Devices`, one for each rank. None: the machine's best."""
    ops: Ops | None = None
    """Operators of the model. None: plain torch."""
    heads: Mapping[str, int] = field(factory=dict)
    """Width of each extra linear head on the final hidden states, by name."""
    on_nonfinite: Literal["skip", "raise"] = field(
        default="skip", validator=one_of("skip", "raise")
    )
    """Response to an infinite or NaN gradient: skip the step and report it, or raise. Weights are
    unchanged in both cases."""
    groups: Groups | None = None
    """Process groups to use. None: connect the processes of the layout."""
    plan: ModelPlan | None = None
    """Parallel plan of a user-defined module. None: data parallelism only."""
    prepare: Callable[[Any], object] | None = None
    """Called with each local stage after it is split over the tensor axis and before it is sharded;
    may change layers in place. Parameters that it adds start at zero."""

    def __attrs_post_init__(self) -> None:
        if self.offload in MOMENTS and not self.optimizer.offloads:
            name = type(self.optimizer).__name__.removesuffix("Config")
            other = "none" if self.offload == "moments" else "activations"
            raise ConfigError(
                f"offload={self.offload!r} requires the optimizer AdamW, got {name}; set offload"
                f" to {other}, or use AdamW"
            )

    @property
    def scaling(self) -> LossScale | None:
        """Loss scaling in float16; None in other precisions."""
        if self.mixed_precision != "float16":
            return None
        return loss_scale_of(self.loss_scale) or LossScale()
