"""Settings of an evaluation; importing them does not import torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from attrs import Attribute, field, frozen

from ms_compress.errors import ConfigError
from ms_compress.settings import integer, short_repr, text, valid_path

Folders = str | Sequence[str]


def _models(instance: object, attribute: "Attribute[object]", value: object) -> None:
    if not isinstance(value, Mapping):
        raise ConfigError(
            f"{attribute.name} must be a table of folders by name, got {short_repr(value)}; for"
            " example {qat = 'runs/qat'}"
        )
    for name, folders in value.items():
        paths = [folders] if isinstance(folders, str | Path) else folders
        if not isinstance(paths, list | tuple) or not paths:
            raise ConfigError(
                f"{attribute.name}: {name!r} must be a folder or a list of folders, got"
                f" {short_repr(folders)}; remove it, or name a folder"
            )
        for folder in paths:
            valid_path()(instance, attribute, folder)


@frozen(kw_only=True)
class Evaluation:
    """Settings of an evaluation: folders to measure, and text."""

    baseline: str = field(validator=valid_path(), metadata={"example": "runs/train/model"})
    """Folder of the plain model, run by torch in float32."""
    models: Mapping[str, Folders] = field(
        validator=_models,
        metadata={"example": {"RTN int4": "runs/quantize", "QAT int4": "runs/qat"}},
    )
    """Folders by name of the method; several folders for several runtimes."""
    dataset: str = field(validator=valid_path(), metadata={"example": "shards"})
    """Shards from ms-data with a held-out split, or a file of conversations (JSON, CSV or
    Parquet)."""
    title: str = field(default="Costs and benefits of compression", validator=text())
    """Title of the report."""
    sequence_length: int = field(default=256, validator=integer())
    """Tokens per row."""
    sequences: int = field(default=32, validator=integer())
    """Number of held-out rows for the perplexity."""
    prefill_tokens: int = field(default=128, validator=integer())
    """Prompt length of the speed measurement, in tokens."""
    decode_tokens: int = field(default=32, validator=integer())
    """Number of tokens decoded after the prompt in the speed measurement."""
    rounds: int = field(default=5, validator=integer())
    """Number of speed measurements per folder, alternating between folders."""
    threads: int = field(default=1, validator=integer(maximum=1024))
    """Number of threads of each runtime."""
