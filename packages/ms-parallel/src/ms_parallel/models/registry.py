"""Finds architectures by name, and builds, splits and describes their models."""

import logging
import os
from collections.abc import Callable, Hashable, Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any, cast

import torch
from attrs import asdict, evolve, fields
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from ms_parallel.errors import ConfigError, ModelError
from ms_parallel.files.model_name import missing_model
from ms_parallel.files.untrusted import check_path, read_json
from ms_parallel.models.config import ModelConfig, TokenId, token_ids
from ms_parallel.models.family import families, family_of, foreign
from ms_parallel.models.foreign.config import knows
from ms_parallel.models.plan import ModelPlan
from ms_parallel.models.staged import StagedModel, named_weights
from ms_parallel.models.tokenizer_files import TokenizerFiles
from ms_parallel.models.weight_names import WeightSlice, slices_of
from ms_parallel.operators.protocol import Ops
from ms_parallel.settings import nearest

logger = logging.getLogger(__name__)

CONFIG, GENERATION = "config.json", "generation_config.json"


def architecture(
    name_or_folder: str | Path, overrides: Mapping[str, object] | None = None
) -> ModelConfig:
    """Return the configuration of a named architecture, or of a folder with a config.json.

    Args:
        name_or_folder: A family's name, in any case and with or without hyphens, or a
            folder.
        overrides: Settings to change, by name; `rope_scaling` may be a mapping. Where heads or
            hidden size change and `head_dim` is not given, it becomes their quotient.

    Raises:
        ConfigError: the name or a setting is unknown (the nearest known one is named), or a value
            is out of range.
        ModelError: the folder's config.json is damaged or asks for what is not supported.
    """
    check_path("model", name_or_folder, error=ConfigError)
    known = _named(str(name_or_folder))
    if known is None and os.path.isdir(name_or_folder):
        known = read_config(Path(name_or_folder))
    if known is None:
        known = _named(_spelled(str(name_or_folder)))
    if known is None:
        if (problem := missing_model(str(name_or_folder))) is not None:
            raise ConfigError(f"unknown architecture: {problem}")
        remedy = nearest(str(name_or_folder), architectures())
        raise ConfigError(
            f"unknown architecture {str(name_or_folder)[:200]!r}; {remedy}"
            f" (or give a folder with a config.json)"
        )
    return _override(known, dict(overrides or {}))


def architectures() -> list[str]:
    """List the names of all families."""
    return [family.name for family in families()]


def _named(name: str) -> ModelConfig | None:
    """Return the small model of a family; None if no family has this name."""
    found = next((family for family in families() if family.name == name), None)
    return None if found is None else cast(ModelConfig, found.config(**found.default))


def _spelled(name: str) -> str:
    """Correct the case, hyphens and underscores of a family's name; keep a name that is unknown."""
    plain = {key.replace("-", ""): key for key in architectures()}
    return plain.get(name.lower().replace("-", "").replace("_", "").replace(" ", ""), name)


def _override(config: ModelConfig, overrides: dict[str, Any]) -> ModelConfig:
    if hasattr(config, "with_settings"):
        return cast(ModelConfig, config.with_settings(overrides))
    kind: Any = type(config)
    names = [setting.name for setting in fields(kind)]
    for key in overrides:
        if key not in names:
            raise ConfigError(f"unknown model setting {key!r}; {nearest(key, names)}")
    if "head_dim" not in overrides and overrides.keys() & {"hidden_size", "num_attention_heads"}:
        sizes = {**asdict(cast(Any, config)), **overrides}
        hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
        if isinstance(hidden, int) and isinstance(heads, int):  # else refused by name below
            overrides["head_dim"] = hidden // max(1, heads)
    depth, layers = overrides.get("num_hidden_layers"), getattr(config, "sliding_layers", None)
    if type(depth) is int and layers is not None and "sliding_layers" not in overrides:
        every_other = tuple(range(0, config.num_hidden_layers, 2))
        kept = tuple(layer for layer in layers if layer < depth)
        overrides["sliding_layers"] = tuple(range(0, depth, 2)) if layers == every_other else kept
    return cast(ModelConfig, evolve(cast(Any, config), **overrides))


def build_model(
    config: ModelConfig,
    *,
    ops: Ops | None = None,
    layers: range | None = None,
    first: bool = True,
    last: bool = True,
) -> StagedModel:
    """Build a model or one stage of it, with unset weights: `initialise` or load them.

    Args:
        config: What to build.
        ops: Operators; plain torch by default. Transformer-XL's scores need its own.
        layers: Global numbers of the blocks to build; all by default.
        first: Build the embedding.
        last: Build the final norm and the head.

    Raises:
        ModelError: no model has this kind of configuration.
    """
    model = family_of(config).build(config, ops=ops, layers=layers, first=first, last=last)
    return cast(StagedModel, model)


def model_plan(config: ModelConfig) -> ModelPlan:
    """Return how the model of a configuration may be split.

    Raises:
        ModelError: no model has this kind of configuration.
    """
    return family_of(config).plan(config)


def parameter_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """Map the names of the whole model's parameters to their shapes; tied ones once."""
    return _shapes(config, nn.Module.named_parameters)


def weight_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """Map the names of the whole model's parameters and persistent buffers to their shapes."""
    return _shapes(config, named_weights)


def weight_slices(config: ModelConfig) -> dict[str, list[WeightSlice]]:
    """List what makes up each weight of the whole model in its folder; tied ones once.

    Weights are its parameters, and the buffers that its folder holds.
    """
    rules = family_of(config).weights(config)
    shapes = weight_shapes(config)
    return {name: list(slices_of(rules, name, shape)) for name, shape in shapes.items()}


def _shapes(
    config: ModelConfig, named: Callable[[nn.Module], Iterable[tuple[str, Tensor]]]
) -> dict[str, torch.Size]:
    """Map the names of what is `named` in the whole model to its shapes.

    Of each kind of layer one block is built, however many there are said to be.
    """
    known = family_of(config).shapes(config, named)
    if known is not None:
        return known
    kind = family_of(config).layer_kind
    layers = {layer: kind(config, layer) for layer in range(config.num_hidden_layers)}
    shapes: dict[str, torch.Size] = {}
    of_kind: dict[Hashable, dict[str, torch.Size]] = {}
    for layer, own in layers.items():
        if own in of_kind:
            continue
        alone = range(layer, layer + 1)
        with torch.device("meta"):
            model = build_model(config, layers=alone, first=not of_kind, last=not of_kind)
        found = {name: weight.shape for name, weight in named(model)}
        block = f"model.layers.{layer}."
        of_kind[own] = {
            name.removeprefix(block): shape
            for name, shape in found.items()
            if name.startswith(block)
        }
        shapes |= {name: shape for name, shape in found.items() if not name.startswith(block)}
    return shapes | {
        f"model.layers.{layer}.{name}": shape
        for layer, own in layers.items()
        for name, shape in of_kind[own].items()
    }


def config_document(config: ModelConfig, dtype: torch.dtype) -> dict[str, object]:
    """Return what a config.json says of a configuration, with weights of `dtype`.

    Raises:
        ModelError: no model has this kind of configuration.
    """
    return family_of(config).write(config, dtype)


def with_tokens(config: ModelConfig, tokenizer: TokenizerFiles) -> ModelConfig:
    """Add to a configuration how a tokenizer's texts begin, end and are padded.

    What it says already stays.

    Raises:
        ModelError: the tokenizer has an id that is beyond the model's vocabulary.
    """
    ids = {
        "bos_token_id": tokenizer.begin_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
    }
    missing = {name: value for name, value in ids.items() if getattr(config, name) is None}
    for name, value in missing.items():
        if value is not None and max(value if isinstance(value, tuple) else (value,)) >= (
            config.vocab_size
        ):
            raise ModelError(
                f"the tokenizer's {name} is {value}, but the model has {config.vocab_size} tokens;"
                " give the tokenizer that the model was trained with"
            )
    return cast(ModelConfig, evolve(cast(Any, config), **missing))


def read_config(folder: Path) -> ModelConfig:
    """Read a folder's configuration: config.json, and what generation_config.json says of ends.

    Raises:
        ModelError: a file is missing or damaged, or asks for something that is not supported.
    """
    path = folder / CONFIG
    if not os.path.lexists(path):
        raise ModelError(f"{str(path)[:300]} is missing; give a folder of a saved model")
    document = _read(path)
    try:
        config = from_document(document)
    except (ModelError, ConfigError) as error:
        raise ModelError(f"{path}: {error}") from error
    ends = _ends_of_generation(folder / GENERATION) or {}
    without = {"num_nextn_predict_layers": 0} if _lacks_mtp_layers(config, folder) else {}
    changes = {**ends, **without}
    return cast(ModelConfig, evolve(cast(Any, config), **changes)) if changes else config


def _lacks_mtp_layers(config: ModelConfig, folder: Path) -> bool:
    """Return whether a folder's weights stop before the prediction layers of its config.json.

    Transformers drops these layers when it loads a model, and keeps their number when it saves it.
    """
    if not config.mtp_layers:
        return False
    names = _tensor_names(folder)
    layers = (config.num_hidden_layers + at for at in range(config.mtp_layers))
    after = tuple(f"model.layers.{layer}." for layer in layers)
    if not names or any(name.startswith(after) for name in names):
        return False
    _warn_of_dropped_layers(str(folder), config.mtp_layers)
    return True


@cache
def _warn_of_dropped_layers(folder: str, count: int) -> None:
    logger.warning(
        "%s has no weights for its %d multi-token-prediction layers (num_nextn_predict_layers); the"
        " model is loaded without them and saved with num_nextn_predict_layers 0",
        folder,
        count,
    )


def _tensor_names(folder: Path) -> frozenset[str]:
    """List the tensors of a folder; nothing where its files are missing or damaged."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    try:
        if single.is_file():
            with safe_open(single, framework="pt") as file:
                return frozenset(file.keys())
        if index.is_file():
            return frozenset(read_json(index, dict[str, Any], error=ModelError)["weight_map"])
    except (ModelError, SafetensorError, OSError, LookupError, TypeError, ValueError):
        pass  # whoever reads the weights reports it
    return frozenset()


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path, dict[str, Any], error=ModelError)
    except ModelError as error:
        raise ModelError(f"{error}; copy it again") from error


def _ends_of_generation(path: Path) -> dict[str, TokenId] | None:
    """Read what ends a text from generation_config.json, which whoever generates asks first."""
    if not os.path.lexists(path):
        return None
    name, document = "eos_token_id", _read(path)
    try:
        ids = token_ids(name, document.get(name))
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    return None if ids is None else {name: ids}


def from_document(document: Mapping[str, Any]) -> ModelConfig:
    """Understand a config.json, decoded.

    Raises:
        ModelError: its family is not known, or a setting is not supported.
        ConfigError: a value is out of range.
    """
    name: object = document.get("model_type")
    found = next((family for family in families() if family.name == name), None)
    if found is None and knows(name):
        found = foreign()
    if found is None:
        raise ModelError(
            f"model_type {repr(name)[:60]} is not supported; supported:"
            f" {', '.join(architectures())}, and what transformers builds, where it is installed"
        )
    return found.read(document)
