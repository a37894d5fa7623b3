"""Builds engines from a model and settings.

Trainers, commands and users all start engines here: in one process or under a layout, with or
without adapters.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ms_align.arguments import check_integer, check_type
from ms_align.engines.local import LocalEngine
from ms_align.engines.optimizer import OptimizerOptions
from ms_align.engines.options import ComputeOptions, EngineOptions
from ms_align.engines.parallel import start_parallel
from ms_align.engines.protocol import Engine
from ms_align.errors import ConfigError, ModelError
from ms_align.files.untrusted import check_path
from ms_align.lora.adapters import add_lora
from ms_align.lora.loading import load_lora
from ms_align.lora.options import LoraOptions, lora_options
from ms_align.models.folder import adapter_base, load_model

if TYPE_CHECKING:
    from ms_parallel import Layout


def start_engine(
    model: nn.Module | Engine | str | Path,
    *,
    layout: "Layout | Mapping[str, int] | None" = None,
    lora: LoraOptions | Mapping[str, Any] | None = None,
    optimizer: OptimizerOptions | None = None,
    heads: Mapping[str, int] | None = None,
    microbatch_size: int | None = None,
    seed: int = 0,
    options: ComputeOptions | None = None,
) -> Engine:
    """Start an engine for a model.

    Args:
        model: folder of a model, a module, or an engine, which is returned unchanged.
        layout: ms-parallel layout that shards a folder's model over processes. None: one process.
        lora: freeze the model and train adapters.
        optimizer: AdamW settings.
        heads: width of each extra linear head on the final hidden states, by name; initialized to
            zero.
        microbatch_size: rows per forward pass. None: all rows.
        seed: seed of the adapters' initial values.
        options: precision, operators and device; `EngineOptions` for training.

    Raises:
        ConfigError: `model` is not a model, or a setting does not match it.
        ModelError: the model cannot be loaded from its folder.
    """
    description = "EngineOptions or ComputeOptions"
    check_type("options", options, ComputeOptions, description, error=ConfigError, optional=True)
    check_integer("seed", seed, minimum=0, error=ConfigError)
    options = options or EngineOptions()
    lora = lora_options(lora)
    folder = model if isinstance(model, str | Path) else None
    if layout is not None:
        if folder is None:
            raise _needs("layout", model, "its folder")
        if adapter_base(Path(folder)) is not None:
            raise ConfigError(
                f"layout needs a complete model, and {folder} is an adapter's folder; use the "
                "merged model that `merge = true` writes, or remove layout"
            )
        return start_parallel(
            folder,
            layout,
            lora=lora,
            optimizer=optimizer or OptimizerOptions(),
            heads=heads or {},
            microbatch_size=microbatch_size,
            seed=seed,
            options=options,
        )
    # Without a layout the model runs in LocalEngine.
    options.check_single_process(
        "set `layout = { data = 1 }`"
        if folder is not None
        else "pass the model's folder and layout={'data': 1}, or an Engine built with it"
    )
    loaded = open_model(folder, device=options.device) if folder is not None else model
    if isinstance(loaded, nn.Module):
        if lora is not None:
            loaded = add_lora(loaded, lora, seed=seed, base_name=str(folder or ""))
        return LocalEngine(loaded, optimizer, heads=heads, microbatch_size=microbatch_size)
    if not isinstance(loaded, Engine):
        raise ConfigError(
            f"model must be a torch.nn.Module, an Engine or a folder, got {type(loaded).__name__}; "
            "pass one"
        )
    if lora is not None:
        raise _needs("lora", model, "a module or a folder")
    return loaded


def open_model(folder: str | Path, *, device: str | None = None) -> nn.Module:
    """Load the model of a folder; from an adapter's folder, its base model with the adapter merged.

    Raises:
        ModelError: the model or the adapter cannot be loaded, or they do not match.
    """
    check_path("a model", folder, error=ModelError)
    base = adapter_base(Path(folder))
    if base is None:
        return load_model(folder, device=device)
    # The base may be an adapter's folder itself.
    return load_lora(open_model(base, device=device), folder).merged_model()


def _needs(setting: str, model: object, required: str) -> ConfigError:
    return ConfigError(
        f"{setting} needs {required}, and the model is a {type(model).__name__} in memory; pass "
        f"{required}, or remove {setting}"
    )
