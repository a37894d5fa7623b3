"""Settings of an evaluation; reading them needs no torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from attrs import Attribute, field, frozen

from ms_compress.errors import ConfigError
from ms_compress.settings import a_path, shown, text, whole

Folders = str | Sequence[str]


def _models(instance: object, attribute: "Attribute[object]", value: object) -> None:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{attribute.name} is {shown(value)}; give a table of folders by name")
    for name, folders in value.items():
        many = [folders] if isinstance(folders, str | Path) else folders
        if not isinstance(many, list | tuple) or not many:
            raise ConfigError(f"{attribute.name}: {name!r} is {shown(folders)}; give folders")
        for folder in many:
            a_path()(instance, attribute, folder)


@frozen(kw_only=True)
class Evaluation:
    """Settings of an evaluation: which folders are measured, and on which text."""

    baseline: str = field(validator=a_path(), metadata={"example": "runs/train/model"})
    """Folder of the plain model, which torch runs in float32."""
    models: Mapping[str, Folders] = field(
        validator=_models,
        metadata={"example": {"RTN int4": "runs/quantize", "QAT int4": "runs/qat"}},
    )
    """A folder, or several for several runtimes, by the name of how it was made."""
    dataset: str = field(validator=a_path(), metadata={"example": "shards"})
    """ms-data's shards with a held-out split, or a file of conversations
    (JSON, CSV or Parquet)."""
    title: str = field(default="What compression costs and gives", validator=text())
    """Heading of the report."""
    sequence_length: int = field(default=256, validator=whole())
    """Tokens of a row."""
    sequences: int = field(default=32, validator=whole())
    """Held-out rows that the perplexity is taken over."""
    prefill_tokens: int = field(default=128, validator=whole())
    """Tokens of the prompt whose speed is measured."""
    decode_tokens: int = field(default=32, validator=whole())
    """Tokens generated after it, one by one."""
    rounds: int = field(default=5, validator=whole())
    """Times that each speed is measured, in turn with the others."""
    threads: int = field(default=1, validator=whole(most=1024))
    """Threads of each runtime."""
