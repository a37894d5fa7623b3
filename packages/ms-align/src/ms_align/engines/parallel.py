"""ms-parallel's engine, which is one of ours as it is; and adapters in its stages.

The model's own weights stay split and sharded as they are, frozen; adapters are small, so each
data rank holds those of its stages whole.
"""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from attrs import asdict
from attrs.filters import exclude
from torch import nn
from torch.distributed.fsdp import FSDPModule

from ms_align import processes
from ms_align.engines.layout import layout_of
from ms_align.engines.optimizer import OptimizerOptions
from ms_align.engines.options import ComputeOptions, EngineOptions
from ms_align.errors import ConfigError
from ms_align.lora.adapters import LoraOptions, add_lora, save_adapters

if TYPE_CHECKING:
    from ms_parallel import Engine, Layout


def start_parallel(
    model: str | Path,
    layout: "Layout | Mapping[str, int]",
    *,
    lora: LoraOptions | None,
    optimizer: OptimizerOptions,
    heads: Mapping[str, int],
    microbatch_size: int | None,
    seed: int,
    options: ComputeOptions,
) -> "Engine":
    """Connect the layout's processes and read each its part of a model's folder.

    Raises:
        ConfigError: ms-parallel is not installed, or a setting does not fit the layout.
        ModelError: the folder's model cannot be read.
    """
    ranks = layout_of(layout)
    from ms_parallel import AdamWConfig, Engine

    training: dict[str, Any] = {}
    if isinstance(options, EngineOptions):
        coefficient = options.balance_coefficient
        if coefficient is not None and options.balance == "none":
            raise ConfigError(
                "balance_coefficient weighs a balance loss and balance is 'none'; set balance to "
                "'step' or 'sequence'"
            )
        alike = ("recompute", "compile", "sharding", "offload", "balance", "balance_coefficient")
        training = {name: getattr(options, name) for name in alike}

    decay = optimizer.decay_steps
    engine = Engine(
        model,
        ranks,
        mixed_precision=options.mixed_precision,
        ops=_operators(options.ops),
        device=options.device,
        **training,
        optimizer=AdamWConfig(
            **asdict(optimizer, filter=exclude("decay_steps", "final_learning_rate_ratio")),
            decay="linear",
            decay_steps=None if decay is None else optimizer.warmup_steps + decay,
            final_ratio=optimizer.final_learning_rate_ratio,
        ),
        heads=heads,
        microbatch_size=microbatch_size,
    )
    if lora is not None:
        engine.adapt(partial(StageAdapters, options=lora, seed=seed, base_name=str(model)))
    return engine


def _operators(name: str) -> Any:
    """Import the operators of a name; None for plain torch.

    Raises:
        ConfigError: they are not installed; names the extra.
    """
    if name == "torch":
        return None
    try:
        import ms_kernels
    except ImportError as error:
        raise ConfigError(
            "ops = 'ms_kernels' needs ms-kernels; install it: pip install 'ms-parallel[kernels]'"
        ) from error
    return ms_kernels


class StageAdapters:
    """Adapters in the stages of a pipeline.

    Args:
        stages: of this process, by number; their own weights are frozen.
        options: which layers, and how.
        seed: of A's first values; the same seed gives those of one process.
        base_name: the model's name or folder, for `adapter_config.json`.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        *,
        options: LoraOptions,
        seed: int,
        base_name: str,
    ) -> None:
        self.options, self.base_name = options, base_name
        self.models = [add_lora(stage, options, seed=seed) for stage in stages.values()]

    @contextmanager
    def disable_adapter(self) -> Iterator[None]:
        """Switch the adapters off while the block runs, so that the model is as it was before."""
        with ExitStack() as stack:
            for model in self.models:
                stack.enter_context(model.disable_adapter())
            yield

    @contextmanager
    def as_merged(self) -> Iterator[None]:
        """Hold the adapters in the stages' weights while the block runs, for saving them."""
        with ExitStack() as stack:
            for model in self.models:
                for module in model.modules():
                    if isinstance(module, FSDPModule):
                        module.reshard()  # what is written to gathered copies is lost
                stack.enter_context(model.as_merged())
            yield

    def save_pretrained(self, folder: Path) -> None:
        """Write peft's two files from the first process; every process must call it.

        Raises:
            CheckpointError: the place cannot be written.
        """
        mine = {
            name: (layer.lora_A.detach().cpu(), layer.lora_B.detach().cpu())
            for model in self.models
            for name, layer in model.adapters().items()
        }
        every = [mine] * processes.count()
        if processes.count() > 1:
            dist.all_gather_object(every, mine)
        if processes.rank() == 0:
            together = {name: pair for each in every for name, pair in each.items()}
            save_adapters(folder, self.options, together, self.base_name)
        processes.barrier()
