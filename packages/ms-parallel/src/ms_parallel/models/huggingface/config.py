"""Configuration of a model built by transformers."""

import json
import math
import os
from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from attrs import field, frozen

from ms_parallel.cluster.layout import ModelShape
from ms_parallel.entry import one_line
from ms_parallel.errors import ConfigError, ModelError
from ms_parallel.files.untrusted import check_path, read_json
from ms_parallel.models.config import SIZE_LIMITS, TOKENS, TokenId, token_ids
from ms_parallel.models.experts.router_config import Mixture
from ms_parallel.models.huggingface.experts import mixture_of

VISION_TYPES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
AUDIO_TYPES = ("qwen2_audio",)
MULTIMODAL_TYPES = (*VISION_TYPES, *AUDIO_TYPES)
"""`model_type`s of `MultimodalModel`."""
MAX_LAYERS = 1000
"""Limit on the layer count: all layers are built on the meta device before weights are read."""
LAYER_TYPES = frozenset(
    {
        "attention",
        "conv",
        "dense",
        "full_attention",
        "hybrid",
        "hybrid_sliding",
        "linear_attention",
        "mamba",
        "moe",
        "recurrent",
        "sliding_attention",
        "sparse",
    }
)
"""Supported layer types. Others in transformers, such as sparse key selection, are not."""


def transformers() -> Any:
    """Import transformers.

    Raises:
        ModelError: it is not installed.
    """
    try:
        import transformers as package
    except ImportError as error:
        raise ModelError(
            "this model is built by transformers, which is not installed; install ms-parallel[hf]"
        ) from error
    return package


def is_supported_by_transformers(model_type: object) -> bool:
    """Whether transformers is installed and has a causal LM class for this `model_type`."""
    return isinstance(model_type, str) and model_type in causal_classes()


def causal_classes() -> Mapping[str, str]:
    """Map each `model_type` to transformers' causal LM class; empty if it is not installed.

    Raises:
        ModelError: transformers is installed but cannot be imported.
    """
    try:
        import_module("transformers")
        from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    except ImportError as error:
        if error.name == "transformers":
            return {}
        raise ModelError(
            f"transformers is installed but cannot be imported ({error}); reinstall it"
        ) from error
    return cast(Mapping[str, str], MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _document(source: Any) -> dict[str, Any]:
    """Return the content of config.json, given a folder, a mapping or a transformers config."""
    if isinstance(source, str | os.PathLike):
        check_path("a transformers model", source, error=ModelError)
        return read_json(Path(source) / "config.json", dict[str, Any], error=ModelError)
    if isinstance(source, Mapping):
        return dict(source)
    if hasattr(source, "to_dict"):
        return cast(dict[str, Any], json.loads(source.to_json_string(use_diff=False)))
    raise ConfigError(
        "a transformers model must be a folder, a transformers configuration or a mapping, got"
        f" {type(source).__name__}"
    )


@frozen(init=False, eq=False)
class TransformersModel:
    """Causal language model built by transformers and trained by our engine under any layout.

    Args:
        document: folder with a config.json, a transformers configuration, or the content of a
            config.json.
        folder: folder with weights; defaults to `document` if that is a folder.
        ids: special token ids that override those in config.json.

    Raises:
        ModelError: transformers is not installed or does not support the model, or the folder's
            config.json cannot be read.
        ConfigError: a setting is out of range.
    """

    document: Mapping[str, Any]
    """Content of config.json."""
    folder: Path | None
    """Folder with the weights; None to start from random weights."""
    bos_token_id: TokenId = field(kw_only=True)
    """Token at the start of a text, if any."""
    eos_token_id: TokenId = field(kw_only=True)
    """Token, or any of several tokens, at the end of a generated text."""
    pad_token_id: TokenId = field(kw_only=True)
    """Padding token of a batch's shorter rows, if any."""

    def __init__(
        self, document: Any = None, folder: Path | str | None = None, **ids: TokenId
    ) -> None:
        is_folder = isinstance(document, str | os.PathLike)
        folder = Path(document) if is_folder and folder is None else folder
        content = _document(document)
        for name in TOKENS:
            ids.setdefault(name, token_ids(name, content.get(name)))
        unknown = ids.keys() - set(TOKENS)
        if unknown:
            raise ConfigError(
                f"unknown argument {min(unknown)!r} of TransformersModel; settings other than"
                f" {', '.join(TOKENS)} belong in its document"
            )
        self.__attrs_init__(
            document=content, folder=None if folder is None else Path(folder), **ids
        )
        _check(self)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TransformersModel) and self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    @property
    def _key(self) -> str:
        ids = [getattr(self, name) for name in TOKENS]
        # The document is a dict and cannot be hashed, so its text stands in for it.
        return json.dumps([self.document, ids], sort_keys=True, default=str)

    @property
    def settings(self) -> Any:
        """Text model's configuration in transformers; must not be changed."""
        return settings_of(json.dumps(self.document, sort_keys=True, default=str))

    def with_settings(self, overrides: Mapping[str, Any]) -> "TransformersModel":
        """Return a copy with some settings of config.json changed.

        Raises:
            ConfigError: a setting is unknown.
        """
        from ms_parallel.settings import nearest

        defaults = self.settings.to_dict()
        for name in overrides:
            if name not in defaults:
                raise ConfigError(
                    f"unknown model setting {name!r}; {nearest(name, list(defaults))}"
                )
        ids = {name: overrides.get(name, getattr(self, name)) for name in TOKENS}
        return TransformersModel({**self.document, **overrides}, self.folder, **ids)

    @property
    def model_type(self) -> str:
        """The `model_type` in config.json."""
        return str(self.document.get("model_type"))

    @property
    def vocab_size(self) -> int:
        """Vocabulary size."""
        return int(self.settings.vocab_size)

    @property
    def hidden_size(self) -> int:
        """Width of the hidden states."""
        return int(self.settings.hidden_size)

    @property
    def num_hidden_layers(self) -> int:
        """Number of blocks."""
        return int(self.settings.num_hidden_layers)

    @property
    def max_position_embeddings(self) -> int | None:
        """Longest row in positions; None for no limit."""
        return getattr(self.settings, "max_position_embeddings", None)

    @property
    def tie_word_embeddings(self) -> bool:
        """Whether the output head uses the embedding's weight."""
        return bool(getattr(self.settings, "tie_word_embeddings", False))

    @property
    def is_text_part(self) -> bool:
        """Whether this is the text model of a multimodal model."""
        return "text_config" in self.document

    @property
    def mtp_layers(self) -> int:
        """Number of multi-token prediction layers: 0, as transformers drops them on load."""
        return 0

    @property
    def mixture(self) -> Mixture | None:
        """Experts with routers that can be balanced, which `output_router_logits` enables."""
        return mixture_of(self)

    @property
    def final_softcap(self) -> None:
        """Soft cap for our output head: None, as the model's forward applies its own."""
        return None

    @property
    def initializer_range(self) -> float:
        """Standard deviation of initial weights in most modules."""
        return float(getattr(self.settings, "initializer_range", None) or 0.02)

    @property
    def shape(self) -> ModelShape:
        """Sizes that a layout may have to divide."""
        settings = self.settings
        heads = int(settings.num_attention_heads)
        return ModelShape(
            layers=self.num_hidden_layers,
            attention_heads=heads,
            key_value_heads=int(getattr(settings, "num_key_value_heads", None) or heads),
            hidden_size=self.hidden_size,
            intermediate_size=_divisor(getattr(settings, "intermediate_size", None)),
            vocab_size=self.vocab_size,
        )


@lru_cache(maxsize=16)
def settings_of(document: str) -> Any:
    """Build transformers' configuration from the text of a config.json."""
    package, content = transformers(), json.loads(document, object_hook=_number)
    model_type = content.pop("model_type", None)
    if not is_supported_by_transformers(model_type):
        raise ModelError(
            f"model_type {repr(model_type)[:60]} is not supported: neither ms-parallel nor"
            f" transformers {package.__version__} has a causal language model for it"
        )
    try:
        return package.AutoConfig.for_model(model_type, **content).get_text_config()
    except Exception as error:  # its checks raise many types for a damaged file
        reason = one_line(str(error))[:200]
        raise ModelError(f"transformers rejects this config.json ({reason})") from error


def _divisor(size: Any) -> int:
    """Greatest common divisor of a size over all layers; 1 if unset."""
    return math.gcd(*size) if isinstance(size, list | tuple) else int(size or 1)


def _number(entry: dict[str, Any]) -> Any:
    """Decode infinities, which transformers writes as {"__float__": "Infinity"}."""
    return float(entry["__float__"]) if entry.keys() == {"__float__"} else entry


def _check(model: TransformersModel) -> None:
    settings = model.settings
    names = ("hidden_size", "vocab_size", "num_attention_heads")
    limits = {"num_hidden_layers": MAX_LAYERS, **{name: SIZE_LIMITS[name] for name in names}}
    for name, limit in limits.items():
        try:
            value = getattr(settings, name, None)
        except RuntimeError as error:  # transformers' error for a value per layer
            raise ConfigError(
                f"{name} of {model.model_type} must be the same in all layers; train this model"
                " with transformers"
            ) from error
        if type(value) is not int or not 1 <= value <= limit:
            if value is None:
                raise ConfigError(
                    f"config.json of {model.model_type} must have {name}, which the engine needs;"
                    " train this model with transformers"
                )
            raise ConfigError(
                f"{name} of {model.model_type} must be an integer from 1 to {limit}, got"
                f" {repr(value)[:60]}"
            )
    for layer_type in getattr(settings, "layer_types", None) or ():
        if layer_type not in LAYER_TYPES:
            raise ConfigError(
                f"{model.model_type} has layers of type {layer_type!r}, which are not supported;"
                " train this model with transformers"
            )
    if getattr(settings, "output_router_logits", False) and model.mixture is None:
        raise ConfigError(
            f"output_router_logits=true requests a load-balancing loss, but the routers of"
            f" {model.model_type} cannot be balanced (they must return logits, weights and the"
            " top-k experts by logit); set it to false"
        )
