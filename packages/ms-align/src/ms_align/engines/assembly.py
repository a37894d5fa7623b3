"""From a model and a few settings to an engine: in this process or under a layout, with adapters.

The one place that decides which engine runs a model; trainers, commands and users all come here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from ms_align.engines.local import LocalEngine
from ms_align.engines.optimizer import OptimizerOptions
from ms_align.engines.options import ComputeOptions, EngineOptions
from ms_align.engines.parallel import start_parallel
from ms_align.engines.protocol import Engine
from ms_align.errors import ConfigError, ModelError
from ms_align.files.untrusted import check_path
from ms_align.lora.adapters import LoraOptions, add_lora, lora_options
from ms_align.lora.loading import load_lora
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
        model: the folder of a model, a module, or an engine, which is taken as it is.
        layout: how processes split a folder's model, by ms-parallel; None for this process alone.
        lora: freeze the model and train adapters beside it.
        optimizer: AdamW's settings.
        heads: width of each extra linear head on the final hidden states, by name; they begin at
            zero.
        microbatch_size: rows that pass at once; None for all.
        seed: of the adapters' first values.
        options: precision, operators, device and the like; `EngineOptions` for training.

    Raises:
        ConfigError: it is no model, or a setting does not fit what is given.
        ModelError: the folder's model cannot be read.
    """
    options = options or EngineOptions()
    lora = lora_options(lora)
    folder = model if isinstance(model, str | Path) else None
    if layout is not None:
        if folder is None:
            raise _unfit("layout", model, "its folder")
        if adapter_base(Path(folder)) is not None:
            raise ConfigError(
                f"{folder} is an adapter's folder, and a layout needs a whole model; give the "
                "merged model that `merge = true` writes beside it, or leave out layout"
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
    options.check_alone(
        "set `layout = { data = 1 }`"
        if folder is not None
        else "give the model's folder and layout={'data': 1}, or an Engine built with it"
    )
    given = open_model(folder, device=options.device) if folder is not None else model
    if isinstance(given, nn.Module):
        if lora is not None:
            given = add_lora(given, lora, seed=seed, base_name=str(folder or ""))
        return LocalEngine(given, optimizer, heads=heads, microbatch_size=microbatch_size)
    if not isinstance(given, Engine):
        raise ConfigError(
            f"a model is {type(given).__name__}; give a torch.nn.Module, an Engine or a folder"
        )
    if lora is not None:
        raise _unfit("lora", model, "a module or a folder")
    return given


def open_model(folder: str | Path, *, device: str | None = None) -> nn.Module:
    """Read the model of a folder; of an adapter's folder, the model it is for with it merged.

    Raises:
        ModelError: the model or the adapter cannot be read, or they do not fit each other.
    """
    check_path("a model", folder, error=ModelError)
    base = adapter_base(Path(folder))
    if base is None:
        return load_model(folder, device=device)
    return load_lora(open_model(base, device=device), folder).merged_model()


def _unfit(name: str, model: object, wanted: str) -> ConfigError:
    return ConfigError(
        f"{name} is given and the model is a {type(model).__name__} in memory; give {wanted}, or "
        f"leave out {name}"
    )
