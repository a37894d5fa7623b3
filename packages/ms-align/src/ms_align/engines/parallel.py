"""Starts ms-parallel's engine, with LoRA adapters in its pipeline stages.

The frozen base weights stay sharded. Adapters are small, so every data rank holds the adapters of
its stages in full, except those of experts on other ranks. Tensor ranks split A or B as they
split the weight.
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
from ms_align.lora.adapters import adapt_stage, ends_with, save_adapters
from ms_align.lora.layers import LoraLinear
from ms_align.lora.options import LoraOptions
from ms_align.lora.tensor_parallel import adapter_styles, split_products

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
    ranks = layout_of(layout)
    if lora is not None and lora.use_dora and ranks.tensor > 1:
        raise ConfigError(
            "lora.use_dora needs whole rows of the weights, which tensor > 1 splits; set "
            "tensor=1 or lora.use_dora=false"
        )
    # `layout_of` has checked that ms-parallel is installed.
    from ms_parallel import AdamWConfig, Engine
    from ms_parallel.models import MultimodalModel

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
    if lora is not None and lora.quantize_base != "none":
        _check_quantized(lora.quantize_base, ranks, options, training)
        # FSDP shards only parameters; a quantized weight is a buffer, complete on every rank.
        training["sharding"] = "replicate"

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
    if lora is not None and any(isinstance(s, MultimodalModel) for s in engine.stages.values()):
        raise ConfigError(
            "lora adapts text models, and the model reads images or audio; remove lora to train "
            "all of its weights"
        )
    if lora is not None:
        settings: dict[str, Any] = {"options": lora, "seed": seed, "base_name": str(model)}
        engine.adapt(partial(StageAdapters, engine=engine, **settings))
    return engine


def _check_quantized(
    base_format: str, layout: "Layout", options: ComputeOptions, training: Mapping[str, Any]
) -> None:
    """Check that a layout and its settings support quantized weights.

    Raises:
        ConfigError: weights are split, sharded or cast.
    """
    unsupported: dict[str, Any] = {
        name: getattr(layout, name) for name in ("tensor", "expert") if getattr(layout, name) > 1
    }
    if options.mixed_precision:
        unsupported["mixed_precision"] = options.mixed_precision
    unsupported |= {
        name: training[name]
        for name, values in {"sharding": ("auto", "replicate"), "float8": ("none",)}.items()
        if training.get(name, values[0]) not in values
    }
    for name, value in unsupported.items():
        raise ConfigError(
            f"lora.quantize_base = {base_format!r} needs unsplit float32 weights in a layout, and "
            f"{name} is {value!r}; leave {name} at its default, or set lora.quantize_base to 'none'"
        )


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
        engine: engine of the stages.
        options: LoRA settings.
        seed: seed of the initial values of A; the same values as in one process.
        base_name: name or folder of the base model, for `adapter_config.json`.
    """

    def __init__(
        self,
        stages: Mapping[int, nn.Module],
        *,
        engine: "Engine",
        options: LoraOptions,
        seed: int,
        base_name: str,
    ) -> None:
        self.options, self.base_name = options, base_name
        self.model_type: str = getattr(engine.config, "model_type", "")
        complete = engine.groups.layout.pipeline == 1
        self.models = [
            adapt_stage(stage, options, seed=seed, complete=complete) for stage in stages.values()
        ]
        names = {name: layer for model in self.models for name, layer in model.adapters().items()}
        if processes.any_of(not all(model.adapters() for model in self.models)):
            raise ConfigError(
                "lora must adapt a layer of every pipeline stage, and one stage of this layout "
                "has no target; add a target or lower pipeline"
            )
        # Every target must match a layer of at least one stage.
        if options.target_modules and not processes.any_of(
            any(isinstance(layer, LoraLinear) for layer in names.values())
        ):
            raise ConfigError(f"no linear layer matches target_modules {options.target_modules!r}")
        for target in options.target_parameters:
            if not processes.any_of(any(ends_with(name, (target,)) for name in names)):
                raise ConfigError(f"target_parameters must name expert weights, got {target!r}")
        self.styles: dict[str, Any] = {}
        """Style of each adapter tensor, by name in its stage, if the layout splits weights."""
        layout = engine.groups.layout
        for model in self.models if max(layout.tensor, layout.expert) > 1 else ():
            adapters = model.adapters()
            self.styles |= adapter_styles(adapters, engine.plan)
            if layout.tensor > 1:
                split_products(adapters, engine.plan, engine.groups.mesh["tensor"])

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
                        module.reshard()  # a merge into all-gathered copies would be lost
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
            save_adapters(folder, self.options, merged, self.base_name, self.model_type)
        processes.barrier()
