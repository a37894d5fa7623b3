"""Architectures by name, with their configurations, models, parallel plans and weight shapes."""

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
from ms_parallel.models.family import families, family_of, transformers_family
from ms_parallel.models.huggingface.config import MULTIMODAL_TYPES, is_supported_by_transformers
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
        name_or_folder: Family name (case and hyphens are ignored) or model folder.
        overrides: Settings to change, by name; `rope_scaling` may be a mapping. If the head count
            or the hidden size changes, `head_dim` defaults to their quotient.

    Raises:
        ConfigError: the name or a setting is unknown (suggests the nearest), or a value is out of
            range.
        ModelError: the folder's config.json is damaged or not supported.
    """
    check_path("model", name_or_folder, error=ConfigError)
    config = _small_config(str(name_or_folder))
    # An exact name wins over a folder, and a folder over a name that has to be normalized.
    if config is None and os.path.isdir(name_or_folder):
        config = read_config(Path(name_or_folder))
    if config is None:
        config = _small_config(_normalize_name(str(name_or_folder)))
    if config is None:
        if (problem := missing_model(str(name_or_folder))) is not None:
            raise ConfigError(f"unknown architecture: {problem}")
        remedy = nearest(str(name_or_folder), architectures())
        raise ConfigError(
            f"unknown architecture {str(name_or_folder)[:200]!r}; {remedy}"
            " (or use a folder with a config.json)"
        )
    return _override(config, dict(overrides or {}))


def architectures() -> list[str]:
    """Return the names of all families."""
    return [family.name for family in families()]


def _small_config(name: str) -> ModelConfig | None:
    """Return the small configuration of a family; None if no family has this name."""
    match = next((family for family in families() if family.name == name), None)
    return None if match is None else cast(ModelConfig, match.config(**match.default))


def _normalize_name(name: str) -> str:
    """Normalize case, hyphens and underscores of a family name; unknown names are unchanged."""
    canonical = {key.replace("-", ""): key for key in architectures()}
    return canonical.get(name.lower().replace("-", "").replace("_", "").replace(" ", ""), name)


def _override(config: ModelConfig, overrides: dict[str, Any]) -> ModelConfig:
    if hasattr(config, "with_settings"):
        return cast(ModelConfig, config.with_settings(overrides))
    config_class: Any = type(config)
    names = [setting.name for setting in fields(config_class)]
    for key in overrides:
        if key not in names:
            raise ConfigError(f"unknown model setting {key!r}; {nearest(key, names)}")
    # The head width follows the new sizes unless it is set.
    if "head_dim" not in overrides and overrides.keys() & {"hidden_size", "num_attention_heads"}:
        sizes = {**asdict(cast(Any, config)), **overrides}
        hidden, heads = sizes["hidden_size"], sizes["num_attention_heads"]
        if isinstance(hidden, int) and isinstance(heads, int):  # other types fail validation
            overrides["head_dim"] = hidden // max(1, heads)
    # With fewer layers, keep an alternating pattern, else only the sliding layers that remain.
    depth, layers = overrides.get("num_hidden_layers"), getattr(config, "sliding_layers", None)
    if type(depth) is int and layers is not None and "sliding_layers" not in overrides:
        every_other = tuple(range(0, config.num_hidden_layers, 2))
        lower = tuple(layer for layer in layers if layer < depth)
        overrides["sliding_layers"] = tuple(range(0, depth, 2)) if layers == every_other else lower
    return cast(ModelConfig, evolve(cast(Any, config), **overrides))


def build_model(
    config: ModelConfig,
    *,
    ops: Ops | None = None,
    layers: range | None = None,
    first: bool = True,
    last: bool = True,
) -> StagedModel:
    """Build a model or one of its stages, with uninitialized weights: `initialize` or load them.

    Args:
        config: Model configuration.
        ops: Operators; plain torch by default. Transformer-XL ignores them.
        layers: Global indices of the blocks to build; all by default.
        first: Build the embedding.
        last: Build the final norm and the head.

    Raises:
        ModelError: no family has this configuration class.
    """
    model = family_of(config).build(config, ops=ops, layers=layers, first=first, last=last)
    return cast(StagedModel, model)


def model_plan(config: ModelConfig) -> ModelPlan:
    """Return the parallel plan of a configuration's model.

    Raises:
        ModelError: no family has this configuration class.
    """
    return family_of(config).plan(config)


def parameter_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """Return the shapes of all parameters of the full model by name; tied ones once."""
    return _shapes(config, nn.Module.named_parameters)


def weight_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """Return the shapes of all parameters and persistent buffers of the full model by name."""
    return _shapes(config, named_weights)


def weight_slices(config: ModelConfig) -> dict[str, list[WeightSlice]]:
    """Return the checkpoint slices of each weight of the full model by name; tied ones once.

    Weights are parameters and persistent buffers.
    """
    rules = family_of(config).weights(config)
    shapes = weight_shapes(config)
    return {name: list(slices_of(rules, name, shape)) for name, shape in shapes.items()}


def _shapes(
    config: ModelConfig, named: Callable[[nn.Module], Iterable[tuple[str, Tensor]]]
) -> dict[str, torch.Size]:
    """Return the shapes of all tensors that `named` yields for the full model.

    Builds one block per kind of layer, so the cost does not grow with the number of layers.
    """
    family_shapes = family_of(config).shapes(config, named)
    if family_shapes is not None:
        return family_shapes
    layer_kind = family_of(config).layer_kind
    kinds = {layer: layer_kind(config, layer) for layer in range(config.num_hidden_layers)}
    shapes: dict[str, torch.Size] = {}
    block_shapes: dict[Hashable, dict[str, torch.Size]] = {}
    for layer, layer_key in kinds.items():
        if layer_key in block_shapes:
            continue
        single = range(layer, layer + 1)
        with torch.device("meta"):
            # The first block comes with the embedding, the final norm and the head.
            model = build_model(
                config, layers=single, first=not block_shapes, last=not block_shapes
            )
        stage_shapes = {name: weight.shape for name, weight in named(model)}
        block = f"model.layers.{layer}."
        block_shapes[layer_key] = {
            name.removeprefix(block): shape
            for name, shape in stage_shapes.items()
            if name.startswith(block)
        }
        shapes |= {
            name: shape for name, shape in stage_shapes.items() if not name.startswith(block)
        }
    return shapes | {
        f"model.layers.{layer}.{name}": shape
        for layer, layer_key in kinds.items()
        for name, shape in block_shapes[layer_key].items()
    }


def config_document(config: ModelConfig, dtype: torch.dtype) -> dict[str, object]:
    """Return the content of a configuration's config.json for weights of `dtype`.

    Raises:
        ModelError: no family has this configuration class.
    """
    return family_of(config).write(config, dtype)


def with_tokens(config: ModelConfig, tokenizer: TokenizerFiles) -> ModelConfig:
    """Add a tokenizer's begin, end and padding tokens to a configuration.

    Tokens that the configuration already has are kept.

    Raises:
        ModelError: a token id is outside the model's vocabulary.
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
                f"{name} of the tokenizer must be below the model's vocab_size of"
                f" {config.vocab_size}, got {value}; use the tokenizer that the model was trained"
                " with"
            )
    return cast(ModelConfig, evolve(cast(Any, config), **missing))


def read_config(folder: Path) -> ModelConfig:
    """Read config.json, and the end-of-text tokens in generation_config.json.

    Raises:
        ModelError: a file is missing, damaged or not supported.
    """
    path = folder / CONFIG
    if not os.path.lexists(path):
        raise ModelError(f"{str(path)[:300]} does not exist; use the folder of a saved model")
    document = _read(path)
    try:
        config = from_document(document)
    except (ModelError, ConfigError) as error:
        raise ModelError(f"{path}: {error}") from error
    ends = _ends_of_generation(folder / GENERATION) or {}
    no_mtp = {"num_nextn_predict_layers": 0} if _lacks_mtp_layers(config, folder) else {}
    changes = {**ends, **no_mtp}
    return cast(ModelConfig, evolve(cast(Any, config), **changes)) if changes else config


def _lacks_mtp_layers(config: ModelConfig, folder: Path) -> bool:
    """Whether a folder lacks weights for the MTP layers in its config.json.

    transformers drops these layers on load but keeps their number in config.json on save.
    """
    if not config.mtp_layers:
        return False
    names = _tensor_names(folder)
    layers = (config.num_hidden_layers + depth for depth in range(config.mtp_layers))
    prefixes = tuple(f"model.layers.{layer}." for layer in layers)
    if not names or any(name.startswith(prefixes) for name in names):
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
    """Return the tensor names in a folder; empty if its files are missing or damaged."""
    index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
    try:
        if single.is_file():
            with safe_open(single, framework="pt") as file:
                return frozenset(file.keys())
        if index.is_file():
            return frozenset(read_json(index, dict[str, Any], error=ModelError)["weight_map"])
    except (ModelError, SafetensorError, OSError, LookupError, TypeError, ValueError):
        pass  # loading the weights reports the error
    return frozenset()


def _read(path: Path) -> dict[str, Any]:
    try:
        return read_json(path, dict[str, Any], error=ModelError)
    except ModelError as error:
        raise ModelError(f"{error}; copy it again") from error


def _ends_of_generation(path: Path) -> dict[str, TokenId] | None:
    """Read the end-of-text tokens of generation_config.json, which take precedence."""
    if not os.path.lexists(path):
        return None
    name, document = "eos_token_id", _read(path)
    try:
        ids = token_ids(name, document.get(name))
    except ModelError as error:
        raise ModelError(f"{path}: {error}") from error
    return None if ids is None else {name: ids}


def from_document(document: Mapping[str, Any]) -> ModelConfig:
    """Build the configuration from a decoded config.json.

    Raises:
        ModelError: the family or a setting is not supported.
        ConfigError: a value is out of range.
    """
    name: object = document.get("model_type")
    match = next((family for family in families() if family.name == name), None)
    if match is None and is_supported_by_transformers(name):
        match = transformers_family()
    if name in MULTIMODAL_TYPES:
        raise ModelError(
            f"{name} reads images or audio, which text training cannot use; train it with"
            " `ms-align sft` and `layout = { data = 1 }`, or with an Engine of its folder"
        )
    if match is None:
        raise ModelError(
            f"model_type {repr(name)[:60]} is not supported; supported:"
            f" {', '.join(architectures())}, and all causal models of transformers if installed"
        )
    return match.read(document)
