"""Finds the model to prove and shrinks it to keep the runs fast."""

import importlib
import sys
from pathlib import Path
from typing import Any, cast

from attrs import evolve, field, fields, frozen
from torch import nn

from ms_parallel.errors import ConfigError, ModelError
from ms_parallel.models.config import ModelConfig
from ms_parallel.models.experts.router_config import Mixture
from ms_parallel.models.family import families, family_of
from ms_parallel.models.huggingface.config import (
    TransformersModel,
    causal_classes,
    transformers,
)
from ms_parallel.models.huggingface.small import SMALL, small_model
from ms_parallel.models.huggingface.trial import check_runs
from ms_parallel.models.plan import ModelPlan
from ms_parallel.models.registry import architecture, architectures
from ms_parallel.settings import nearest

TOLERANCE, FLOAT32 = 1e-12, 2e-6
"""Tolerances in float64, and for models of transformers, whose norms round to float32."""
_LAYERS = 4
_SPREAD = 0.1
"""Standard deviation of the weights: large, so that every path through a small model matters."""


@frozen(kw_only=True)
class Subject:
    """A model to prove."""

    name: str
    """Name from the user."""
    shrunk: str
    """Description of the small model on one line."""
    model: ModelConfig | TransformersModel | nn.Module
    """Argument of `Engine`; a module can be used for one engine only."""
    plan: ModelPlan | None = None
    vocabulary: int = field(default=SMALL["vocab_size"])
    experts: int = 1
    """Experts per layer, for expert parallelism; 1 for dense models."""
    packs: bool = True
    """Whether to compare documents in packed rows with the documents alone."""
    tolerance: float = TOLERANCE
    """Allowed difference relative to the largest value."""


def open_subject(name: str) -> Subject:
    """Find a model by architecture, folder, transformers class or function.

    Args:
        name: architecture, folder with a config.json, name of a transformers class for causal
            language models, or `module:function`. The function returns a configuration, a module,
            or a module and its `ModelPlan`; every process calls it again for each case.

    Raises:
        ConfigError: the model does not exist, or the function returns something else.
        ModelError: the folder's model is not supported.
    """
    if ":" in name and not Path(name).exists():
        return _from_function(name)
    if name.endswith("ForCausalLM") or name in causal_classes().values():
        return _from_transformers_class(name)
    try:
        config: Any = architecture(name)
    except ConfigError as error:
        if name in causal_classes():
            return _from_transformers(name, TransformersModel({"model_type": name}))
        raise ConfigError(
            f"unknown model {name[:200]!r}; {nearest(name, architectures())} (or use a folder with"
            " a config.json, a class of transformers, or module:function)"
        ) from error
    if isinstance(config, TransformersModel):
        return _from_transformers(name, config)
    return _from_config(name, config)


def _from_transformers_class(name: str) -> Subject:
    """Use our implementation of a transformers class if it exists, else its own."""
    for family in families():
        if getattr(family, "transformers_class", None) == name:
            return _from_config(name, architecture(family.name))
    model_class = getattr(transformers(), name, None)
    if model_class is None:
        raise ConfigError(
            f"transformers has no class {name[:200]!r}; use one for causal language models"
        )
    return _from_transformers(name, TransformersModel(model_class.config_class().get_text_config()))


def _from_transformers(name: str, config: TransformersModel) -> Subject:
    small = small_model(config, layers=_LAYERS, spread=_SPREAD)
    check_runs(small)
    text = f"transformers' {small.model_type}, {small.num_hidden_layers} layers"
    return Subject(
        name=name, shrunk=text, model=small, vocabulary=small.vocab_size, tolerance=FLOAT32
    )


def _from_config(name: str, config: ModelConfig) -> Subject:
    small = _shrink(config)
    text = (
        f"{small.model_type}, {small.num_hidden_layers} layers of {small.hidden_size},"
        f" {small.num_attention_heads} heads, {small.vocab_size} tokens"
    )
    mixture: Mixture | None = getattr(small, "mixture", None)
    return Subject(
        name=name,
        shrunk=text,
        model=small,
        vocabulary=small.vocab_size,
        experts=1 if mixture is None else mixture.choice.num_experts,
        packs=family_of(small).packs,
    )


def _shrink(config: ModelConfig) -> ModelConfig:
    """Shrink the dimensions of a model; grouped-query attention stays grouped."""
    names = {setting.name for setting in fields(type(config))}
    changed: dict[str, Any] = {"initializer_range": _SPREAD}
    changed |= {"num_hidden_layers": min(config.num_hidden_layers, _LAYERS)}
    for name, limit in SMALL.items():
        value = getattr(config, name, None)
        if name in names and isinstance(value, int):
            changed[name] = min(value, limit)
    if "num_key_value_heads" in names:
        grouped = config.key_value_heads < config.num_attention_heads
        changed["num_key_value_heads"] = changed["num_attention_heads"] // (2 if grouped else 1)
    layers = getattr(config, "sliding_layers", None)
    if layers is not None:
        changed["sliding_layers"] = tuple(layer for layer in layers if layer < _LAYERS)
    return cast(ModelConfig, evolve(cast(Any, config), **changed))


def _from_function(name: str) -> Subject:
    module_name, _, function = name.partition(":")
    # As with `python -m`, modules in the working directory can be imported.
    if (cwd := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, cwd)
    try:
        result = getattr(importlib.import_module(module_name), function)()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{name!r} cannot be called: {error}; use module:function") from error
    if isinstance(result, ModelConfig):
        return _from_config(name, result)
    module, plan = result if isinstance(result, tuple) and len(result) == 2 else (result, None)
    if not isinstance(module, nn.Module) or not isinstance(plan, ModelPlan | None):
        raise ConfigError(
            f"{name!r} returns {type(result).__name__}; return a configuration, a module, or a"
            " module and its ModelPlan"
        )
    return Subject(
        name=name,
        shrunk=f"{type(module).__name__} as is, {sum(1 for _ in module.parameters())} weights",
        model=module,
        plan=plan,
        vocabulary=_vocabulary(module),
    )


def _vocabulary(module: nn.Module) -> int:
    """Vocabulary size of a module: the rows of its first embedding."""
    for submodule in module.modules():
        if isinstance(submodule, nn.Embedding):
            return submodule.num_embeddings
    raise ModelError(
        f"{type(module).__name__} has no nn.Embedding, so its vocabulary size is unknown; add an"
        " embedding to the module"
    )
