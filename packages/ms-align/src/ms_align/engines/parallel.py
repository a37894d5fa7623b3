"""Starts ms-parallel's engine, with LoRA adapters in its pipeline stages.

The frozen base weights stay sharded. Adapters are small, so every data rank holds the adapters of
its stages in full.
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
from ms_align.lora.adapters import add_lora, save_adapters
from ms_align.lora.options import LoraOptions

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
    """Connect the processes of a layout; each loads its shard of the model.

    Raises:
        ConfigError: ms-parallel is not installed, or a setting does not match the layout.
        ModelError: the model cannot be loaded from its folder.
    """
    if lora is not None and lora.dropout:
        raise ConfigError(
            f"lora.dropout = {lora.dropout} needs a single process; remove layout or lora.dropout"
        )
    if lora is not None and lora.quantize_base != "none":
        raise ConfigError(
            f"lora.quantize_base = {lora.quantize_base!r} needs a single process; remove layout, or"
            " set lora.quantize_base to 'none'"
        )
    ranks = layout_of(layout)
    # `layout_of` has checked that ms-parallel is installed.
    from ms_parallel import AdamWConfig, Engine

    training: dict[str, Any] = {}
    if isinstance(options, EngineOptions):
        coefficient = options.balance_coefficient
        if coefficient is not None and options.balance == "none":
            raise ConfigError(
                "balance_coefficient is the weight of a balance loss, and balance is 'none'; set "
                "balance to 'step' or 'sequence'"
            )
        names = (
            "float8",
            "recompute",
            "compile",
            "sharding",
            "offload",
            "balance",
            "balance_coefficient",
        )
        training = {name: getattr(options, name) for name in names}

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
            # ms-parallel counts the decay from step 0, ms-align from the end of the warmup.
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
    """Import an operator library by name; None for plain torch.

    Raises:
        ConfigError: it is not installed; names the extra.
    """
    if name == "torch":
        return None
    try:
        import ms_kernels
    except ImportError as error:
        raise ConfigError(
            "ops = 'ms_kernels' needs ms-kernels; install it with `pip install "
            "'ms-parallel[kernels]'`"
        ) from error
    return ms_kernels


class StageAdapters:
    """LoRA adapters in the pipeline stages of this process.

    Args:
        stages: stages of this process by number, with frozen weights.
        options: LoRA settings.
        seed: seed of the initial values of A; the same values as in one process.
        base_name: name or folder of the base model, for `adapter_config.json`.
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
        """Disable the adapters inside the `with` block."""
        with ExitStack() as stack:
            for model in self.models:
                stack.enter_context(model.disable_adapter())
            yield

    @contextmanager
    def as_merged(self) -> Iterator[None]:
        """Merge the adapters into the weights inside the `with` block, for saving."""
        with ExitStack() as stack:
            for model in self.models:
                for module in model.modules():
                    if isinstance(module, FSDPModule):
                        module.reshard()  # writes to all-gathered copies would be lost
                stack.enter_context(model.as_merged())
            yield

    def save_pretrained(self, folder: Path) -> None:
        """Write the two adapter files of peft from rank 0. Collective.

        Raises:
            CheckpointError: the folder cannot be written.
        """
        local = {
            name: layer.tensors().cpu()
            for model in self.models
            for name, layer in model.adapters().items()
        }
        # Stages have different layers; data ranks repeat the same adapters.
        gathered = [local] * processes.count()
        if processes.count() > 1:
            dist.all_gather_object(gathered, local)
        if processes.rank() == 0:
            merged = {name: pair for tensors in gathered for name, pair in tensors.items()}
            save_adapters(folder, self.options, merged, self.base_name)
        processes.barrier()
