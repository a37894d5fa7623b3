"""From a model and a few settings to an engine: in this process or under a layout, with adapters.

The one place that decides which engine runs a model; trainers, commands and users all come here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import nn

from ms_align.engines.local import LocalEngine
from ms_align.engines.optimizer import OptimizerOptions
from ms_align.engines.parallel import start_parallel
from ms_align.engines.protocol import Engine
from ms_align.errors import ConfigError
from ms_align.lora.adapters import LoraOptions, add_lora
from ms_align.models.folder import load_model

if TYPE_CHECKING:
    from ms_parallel import Layout


def start_engine(
    model: nn.Module | Engine | str | Path,
    *,
    layout: "Layout | Mapping[str, int] | None" = None,
    lora: LoraOptions | None = None,
    optimizer: OptimizerOptions | None = None,
    heads: Mapping[str, int] | None = None,
    microbatch_size: int | None = None,
    seed: int = 0,
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

    Raises:
        ConfigError: it is no model, or a setting does not fit what is given.
        ModelError: the folder's model cannot be read.
    """
    folder = model if isinstance(model, str | Path) else None
    if layout is not None:
        if folder is None:
            raise _unfit("layout", model, "its folder")
        return start_parallel(
            folder,
            layout,
            lora=lora,
            optimizer=optimizer or OptimizerOptions(),
            heads=heads or {},
            microbatch_size=microbatch_size,
            seed=seed,
        )
    given = load_model(folder) if folder is not None else model
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


def _unfit(name: str, model: object, wanted: str) -> ConfigError:
    return ConfigError(
        f"{name} is given and the model is a {type(model).__name__} in memory; give {wanted}, or "
        f"leave out {name}"
    )
