"""Settings that the commands share."""

import os
from pathlib import Path
from typing import Any

from attrs import Attribute, field, frozen

from ms_compress.errors import ConfigError
from ms_compress.schemes import Scheme, scheme
from ms_compress.settings import flag, text, whole
from ms_compress.tuning import Tuning

__all__ = ["ModelRun", "SchemeRun", "optional_path"]

NAME_BYTES = 240
"""File systems take 255; what is written aside adds some."""


def path(value: Any) -> Path:
    """A path from a text."""
    if not isinstance(value, str | Path):
        raise TypeError("give a path")
    return Path(value)


def optional_path(value: Any) -> Path | None:
    """A path, or None."""
    return None if value is None else path(value)


def names(value: Any) -> tuple[str, ...]:
    """Patterns of names, of which one may stand alone."""
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list | tuple) or not all(isinstance(each, str) for each in given):
        raise TypeError("give a list of patterns of names")
    return tuple(given)


def named_scheme(value: Any) -> Scheme:
    """A scheme from its name."""
    if not isinstance(value, str | Scheme):
        raise TypeError("give the name of a scheme, such as 'gguf.q4_0'")
    return scheme(value)


def new_folder(instance: object, attribute: "Attribute[Any]", value: Path) -> None:
    """A path whose last part can be the name of a folder, and of files beside it."""
    name = os.fsencode(value.name)
    if name in (b"", b"..") or b"\0" in os.fsencode(value) or len(name) > NAME_BYTES:
        raise ConfigError(
            f"{attribute.name} is {str(value)!r}; give a path that ends in the name of a new"
            f" folder, of {NAME_BYTES} bytes at most"
        )


@frozen(kw_only=True)
class ModelRun:
    """Which model, from what tokens, to where."""

    model: Path = field(converter=path)
    """A Hugging Face folder."""
    output_dir: Path = field(converter=path, validator=new_folder)
    """Must not exist yet."""
    dataset: Path | None = field(default=None, converter=optional_path)
    """ms-data's shards, or a JSON list of lists of tokens."""
    rows: int = field(default=256, validator=whole())
    """Rows of tokens that are read of it, and used in turn."""
    exceptions: tuple[str, ...] = field(default=(), converter=names)
    """Patterns of names of layers that stay as they are."""
    tuning: Tuning = field(factory=Tuning, metadata={"table": Tuning})


@frozen(kw_only=True)
class SchemeRun(ModelRun):
    """A run whose result is exported for a target."""

    scheme: Scheme = field(converter=named_scheme)
    embeddings: bool = field(default=False, validator=flag)
    head: bool = field(default=False, validator=flag)
    activations: bool = field(default=True, validator=flag)
    verify: bool = field(default=False, validator=flag)
    """Read the result back through its runtime, and refuse it unless it is this model."""
    tokenizer: str | None = field(default=None, validator=text(optional=True))
    """A tokenizer.json to go with it; by default the model folder's, if there is one."""
