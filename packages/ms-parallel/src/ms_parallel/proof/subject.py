"""Finds what is to be proved, and makes it small enough to be run many times."""

import importlib
import sys
from pathlib import Path
from typing import Any, cast

from attrs import evolve, field, fields, frozen
from torch import nn

from ms_parallel.errors import ConfigError, ModelError
from ms_parallel.models.config import ModelConfig
from ms_parallel.models.experts.choice import Mixture
from ms_parallel.models.family import families, family_of
from ms_parallel.models.foreign.config import (
    TransformersModel,
    causal_classes,
    transformers,
)
from ms_parallel.models.foreign.small import SMALL, small_model
from ms_parallel.models.foreign.trial import check_runs
from ms_parallel.models.plan import ModelPlan
from ms_parallel.models.registry import architecture, architectures
from ms_parallel.settings import nearest

TOLERANCE, FLOAT32 = 1e-12, 2e-6
"""Tolerances in float64, and of transformers' models, whose norms round to float32 in it."""
_LAYERS = 4
_SPREAD = 0.1
"""Standard deviation of weights: large enough that every path through a small model counts."""


@frozen(kw_only=True)
class Subject:
    """A model to be proved."""

    name: str
    """As the user named it."""
    shrunk: str
    """What is run, in a line."""
    given: ModelConfig | TransformersModel | nn.Module
    """What an `Engine` takes; a module is taken over by the first engine that gets it."""
    plan: ModelPlan | None = None
    vocabulary: int = field(default=SMALL["vocab_size"])
    experts: int = 1
    """Experts of a layer, which the expert axis can share out; 1 for none."""
    packs: bool = True
    """Whether documents in packed rows are held against the documents alone."""
    tolerance: float = TOLERANCE
    """Allowed difference, as a share of the largest value."""


def open_subject(name: str) -> Subject:
    """Find a model by the name of its family, its folder, its transformers class or its function.

    Args:
        name: A family, a folder with a config.json, the name of a transformers class for causal
            language models, or `module:function`, which returns a configuration, a module, or a
            module and its `ModelPlan`, and is called anew in each process for each case.

    Raises:
        ConfigError: there is no such model, or the function returns something else.
        ModelError: the folder's model is not supported.
    """
    if ":" in name and not Path(name).exists():
        return _of_function(name)
    if name.endswith("ForCausalLM") or name in causal_classes().values():
        return _of_transformers(name)
    try:
        config: Any = architecture(name)
    except ConfigError as error:
        if name in causal_classes():
            return _of_foreign(name, TransformersModel({"model_type": name}))
        raise ConfigError(
            f"unknown model {name[:200]!r}; {nearest(name, architectures())} (or give a folder with"
            " a config.json, a class of transformers, or module:function)"
        ) from error
    if isinstance(config, TransformersModel):
        return _of_foreign(name, config)
    return _of_config(name, config)


def _of_transformers(name: str) -> Subject:
    """Take our model where a family writes this class, else transformers' own by our adapter."""
    for family in families():
        if getattr(family, "transformers_class", None) == name:
            return _of_config(name, architecture(family.name))
    kind = getattr(transformers(), name, None)
    if kind is None:
        raise ConfigError(
            f"transformers has no {name[:200]!r}; give a class of its for causal text"
        )
    return _of_foreign(name, TransformersModel(kind.config_class().get_text_config()))


def _of_foreign(name: str, config: TransformersModel) -> Subject:
    small = small_model(config, layers=_LAYERS, spread=_SPREAD)
    check_runs(small)
    text = f"transformers' {small.model_type}, {small.num_hidden_layers} layers"
    return Subject(
        name=name, shrunk=text, given=small, vocabulary=small.vocab_size, tolerance=FLOAT32
    )


def _of_config(name: str, config: ModelConfig) -> Subject:
    small = _shrink(config)
    text = (
        f"{small.model_type}, {small.num_hidden_layers} layers of {small.hidden_size},"
        f" {small.num_attention_heads} heads, {small.vocab_size} tokens"
    )
    mixture: Mixture | None = getattr(small, "mixture", None)
    return Subject(
        name=name,
        shrunk=text,
        given=small,
        vocabulary=small.vocab_size,
        experts=1 if mixture is None else mixture.choice.num_experts,
        packs=family_of(small).packs,
    )


def _shrink(config: ModelConfig) -> ModelConfig:
    """Return the settings of the same kind of model in small; grouped heads stay grouped."""
    names = {setting.name for setting in fields(type(config))}
    changed: dict[str, Any] = {"initializer_range": _SPREAD}
    changed |= {"num_hidden_layers": min(config.num_hidden_layers, _LAYERS)}
    for name, most in SMALL.items():
        value = getattr(config, name, None)
        if name in names and isinstance(value, int):
            changed[name] = min(value, most)
    if "num_key_value_heads" in names:
        grouped = config.key_value_heads < config.num_attention_heads
        changed["num_key_value_heads"] = changed["num_attention_heads"] // (2 if grouped else 1)
    layers = getattr(config, "sliding_layers", None)
    if layers is not None:
        changed["sliding_layers"] = tuple(each for each in layers if each < _LAYERS)
    return cast(ModelConfig, evolve(cast(Any, config), **changed))


def _of_function(name: str) -> Subject:
    module_name, _, function = name.partition(":")
    if (here := str(Path.cwd())) not in sys.path:
        sys.path.insert(0, here)
    try:
        made = getattr(importlib.import_module(module_name), function)()
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{name!r} cannot be called: {error}; give module:function") from error
    if isinstance(made, ModelConfig):
        return _of_config(name, made)
    module, plan = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(module, nn.Module) or not isinstance(plan, ModelPlan | None):
        raise ConfigError(
            f"{name!r} returns {type(made).__name__}; return a configuration, a module, or a"
            " module and its ModelPlan"
        )
    return Subject(
        name=name,
        shrunk=f"{type(module).__name__} as given, {sum(1 for _ in module.parameters())} weights",
        given=module,
        plan=plan,
        vocabulary=_vocabulary(module),
    )


def _vocabulary(module: nn.Module) -> int:
    """Count the tokens that a module knows: the rows of its first embedding."""
    for each in module.modules():
        if isinstance(each, nn.Embedding):
            return each.num_embeddings
    raise ModelError(
        f"{type(module).__name__} has no nn.Embedding, so that its vocabulary is not known; give"
        " the module one"
    )
