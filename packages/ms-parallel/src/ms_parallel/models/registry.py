"""Architectures by name, and what builds and splits each."""

from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path

from attrs import evolve, fields

from ms_parallel import ops as plain_ops
from ms_parallel.errors import ConfigError
from ms_parallel.models import decoder
from ms_parallel.models.config import DecoderConfig
from ms_parallel.ops import Ops
from ms_parallel.plan import ModelPlan

__all__ = ["architecture", "build_model", "model_plan"]

_LAPTOP = DecoderConfig(
    vocab_size=8192,
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=6,
    num_attention_heads=8,
    num_key_value_heads=4,
    head_dim=32,
)

ARCHITECTURES: Mapping[str, DecoderConfig] = {
    "llama": _LAPTOP,
    "mistral": evolve(_LAPTOP, model_type="mistral", sliding_window=1024),
    "qwen2": evolve(_LAPTOP, model_type="qwen2", attention_bias=True, tie_word_embeddings=True),
    "qwen3": evolve(_LAPTOP, model_type="qwen3", query_key_norm=True, tie_word_embeddings=True),
}
"""Small defaults that train on a laptop; every setting can be overridden."""


def architecture(
    name_or_folder: str | Path, overrides: Mapping[str, object] | None = None
) -> DecoderConfig:
    """The configuration of a named architecture, or of a folder with a config.json.

    Args:
        name_or_folder: `"llama"`, `"mistral"`, `"qwen2"`, `"qwen3"`, or a folder.
        overrides: Settings to change, by name.

    Raises:
        ConfigError: the name or a setting is unknown (the nearest known one is named).
    """
    known = ARCHITECTURES.get(str(name_or_folder))
    if known is None:
        near = get_close_matches(str(name_or_folder), ARCHITECTURES, n=1, cutoff=0.4)
        remedy = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(ARCHITECTURES)}"
        raise ConfigError(f"unknown architecture {str(name_or_folder)!r}; {remedy}")
    return _override(known, overrides or {})


def _override(config: DecoderConfig, overrides: Mapping[str, object]) -> DecoderConfig:
    names = [setting.name for setting in fields(type(config))]
    for key in overrides:
        if key not in names:
            near = get_close_matches(key, names, n=1, cutoff=0.4)
            remedy = f"did you mean {near[0]!r}?" if near else f"known: {', '.join(names)}"
            raise ConfigError(f"unknown model setting {key!r}; {remedy}")
    return evolve(config, **overrides)  # type: ignore[arg-type]  # the validators check each value


def build_model(
    config: DecoderConfig,
    *,
    ops: Ops | None = None,
    layers: range | None = None,
    first: bool = True,
    last: bool = True,
) -> decoder.Decoder:
    """Build a model or one stage of it, with unset weights: `initialise` or load them.

    Args:
        config: What to build.
        ops: Operators; plain torch by default.
        layers: Global numbers of the blocks to build; all by default.
        first: Build the embedding.
        last: Build the final norm and the head.
    """
    return decoder.Decoder(config, ops=ops or plain_ops, layers=layers, first=first, last=last)


def model_plan(config: DecoderConfig) -> ModelPlan:
    """How the model of a configuration may be split."""
    return decoder.plan(config)
