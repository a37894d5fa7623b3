"""Configuration of a model that transformers builds."""

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
from ms_parallel.errors import ConfigError, ModelError
from ms_parallel.files.untrusted import check_path, read_json
from ms_parallel.models.config import MOST, TOKENS, TokenId, token_ids
from ms_parallel.models.experts.choice import Mixture
from ms_parallel.models.huggingface.experts import mixture_of

MOST_LAYERS = 1000
"""Limit on layers, all of which are built without storage before weights are looked for."""
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
"""Supported layer types. transformers has others, such as those that select keys."""


def transformers() -> Any:
    """Import the package transformers.

    Raises:
        ModelError: it is not installed.
    """
    try:
        import transformers as package
    except ImportError as error:
        raise ModelError(
            "transformers is not installed, which builds models of this kind; install"
            " ms-parallel[hf]"
        ) from error
    return package


def knows(model_type: object) -> bool:
    """Return whether transformers is installed and builds causal language models of this type."""
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
            f"transformers is installed and cannot be imported: {error}; install it again"
        ) from error
    return cast(Mapping[str, str], MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def _document(source: Any) -> dict[str, Any]:
    """Decode a config.json from a folder, a mapping or a transformers configuration."""
    if isinstance(source, str | os.PathLike):
        check_path("a model of transformers", source, error=ModelError)
        return read_json(Path(source) / "config.json", dict[str, Any], error=ModelError)
    if isinstance(source, Mapping):
        return dict(source)
    if hasattr(source, "to_dict"):
        return cast(dict[str, Any], json.loads(source.to_json_string(use_diff=False)))
    raise ConfigError(
        f"a model of transformers is a {type(source).__name__}; give a folder, or a configuration"
    )


@frozen(init=False, eq=False)
class TransformersModel:
    """Causal language model that transformers builds and our runtime trains under any layout.

    Args:
        document: folder with a config.json, a transformers configuration, or the content of a
            config.json.
        folder: folder with weights; by default the folder given as `document`.
        ids: special tokens that replace those of config.json.

    Raises:
        ModelError: transformers is not installed or does not support the model, or the folder's
            config.json cannot be read.
        ConfigError: a setting is out of range.
    """

    document: Mapping[str, Any]
    """Content of config.json."""
    folder: Path | None
    """Folder with the weights, if there is one."""
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
                f"a model of transformers has no {min(unknown)!r} beside its document"
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
        """Number of multi-token-prediction layers; transformers does not train any."""
        return 0

    @property
    def mixture(self) -> Mixture | None:
        """Experts that our runtime can balance; it does so if `output_router_logits` is set."""
        return mixture_of(self)

    @property
    def final_softcap(self) -> None:
        """Soft cap that our head applies; None, as the model's own forward applies any cap."""
        return None

    @property
    def initializer_range(self) -> float:
        """Standard deviation of fresh weights under most initialization rules."""
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
    kind = content.pop("model_type", None)
    if not knows(kind):
        raise ModelError(
            f"model_type {repr(kind)[:60]} is not supported: neither ms-parallel nor transformers"
            f" {package.__version__} builds a causal language model of it"
        )
    try:
        return package.AutoConfig.for_model(kind, **content).get_text_config()
    except Exception as error:  # its checks raise many types for a damaged file
        reason = " ".join(str(error).split())[:200]
        raise ModelError(f"transformers rejects this config.json ({reason})") from error


def _divisor(size: Any) -> int:
    """Return the greatest common divisor of a size over all layers; 1 if it is not set."""
    return math.gcd(*size) if isinstance(size, list | tuple) else int(size or 1)


def _number(found: dict[str, Any]) -> Any:
    """Decode infinities, which transformers writes as {"__float__": "Infinity"}."""
    return float(found["__float__"]) if found.keys() == {"__float__"} else found


def _check(model: TransformersModel) -> None:
    settings = model.settings
    sizes = {name: MOST[name] for name in ("hidden_size", "vocab_size", "num_attention_heads")}
    for name, most in {"num_hidden_layers": MOST_LAYERS, **sizes}.items():
        try:
            value = getattr(settings, name, None)
        except RuntimeError as error:  # transformers' error for a value per layer
            raise ConfigError(
                f"{name} of {model.model_type} must be the same in all layers; train this model"
                " with transformers"
            ) from error
        if type(value) is not int or not 1 <= value <= most:
            if value is None:
                raise ConfigError(
                    f"config.json of {model.model_type} must have {name}, which the engine needs;"
                    " train this model with transformers"
                )
            raise ConfigError(
                f"{name} of {model.model_type} must be a whole number from 1 to {most}, got"
                f" {repr(value)[:60]}"
            )
    for kind in getattr(settings, "layer_types", None) or ():
        if kind not in LAYER_TYPES:
            raise ConfigError(
                f"{model.model_type} has layers of type {kind!r}, which are not supported; train"
                " this model with transformers"
            )
    if getattr(settings, "output_router_logits", False) and model.mixture is None:
        raise ConfigError(
            f"output_router_logits=true asks for a balance loss of this {model.model_type}, whose"
            " routers are not of the form that can be balanced here (logits, weights and choices of"
            " each token, the best by their logits); set it to false"
        )
