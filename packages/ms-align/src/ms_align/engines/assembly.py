"""From a model and a few settings to an engine: in this process or under a layout, with adapters.

The one place that decides which engine runs a model; trainers, commands and users all come here.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from attrs import fields
from torch import nn

from ms_align.engines.local import LocalEngine
from ms_align.engines.optimizer import OptimizerOptions
from ms_align.engines.parallel import ParallelEngine
from ms_align.engines.protocol import Engine
from ms_align.errors import ConfigError
from ms_align.lora.adapters import LoraOptions, add_lora
from ms_align.models.folder import load_model
from ms_align.settings import nearest

if TYPE_CHECKING:
    from ms_parallel import Layout

__all__ = ["layout_of", "start_engine"]


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
        heads: width of each extra linear head on the final hidden states, by name.
        microbatch_size: rows that pass at once; None for all.
        seed: of the adapters' first values.

    Raises:
        ConfigError: it is no model, or a setting does not fit what is given.
        ModelError: the folder's model cannot be read.
    """
    if isinstance(model, str | Path):
        if layout is None:
            base_name, module = str(model), load_model(model)
        else:
            engine = ParallelEngine.start(
                model,
                layout_of(layout),
                optimizer=optimizer,
                heads=heads,
                microbatch_size=microbatch_size,
            )
            if lora is not None:
                engine.adapt(lora, seed=seed, base_name=str(model))
            return engine
    elif isinstance(model, nn.Module):
        base_name, module = "", model
        if layout is not None:
            _refuse("layout", model)
    elif isinstance(model, Engine):
        for name, given in (("layout", layout), ("lora", lora)):
            if given is not None:
                _refuse(name, model)
        return model
    else:
        raise ConfigError(
            f"a model is {type(model).__name__}; give a torch.nn.Module, an Engine or a folder"
        )
    if lora is not None:
        module = add_lora(module, lora, seed=seed, base_name=base_name)
    return LocalEngine(module, optimizer, heads=heads, microbatch_size=microbatch_size)


def layout_of(given: "Layout | Mapping[str, int]") -> "Layout":
    """ms-parallel's layout of a table of ranks by axis.

    Raises:
        ConfigError: ms-parallel is not installed, or has no such axis.
    """
    try:
        from ms_parallel import Layout
    except ImportError as error:
        raise ConfigError(
            "a layout needs ms-parallel; install it with `pip install ms-align[parallel]`"
        ) from error
    if not isinstance(given, Mapping):
        return given
    axes = [each.name for each in fields(Layout)]
    for name in given:
        if name not in axes:
            raise ConfigError(f"layout has no axis {name!r}; {nearest(name, axes)}")
    return Layout(**given)


def _refuse(name: str, model: object) -> NoReturn:
    wanted = "its folder" if name == "layout" else "a module or a folder"
    raise ConfigError(
        f"{name} is given and the model is a {type(model).__name__} in memory; give {wanted}, or "
        f"leave out {name}"
    )
