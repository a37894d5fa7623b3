"""Settings that the commands share."""

from pathlib import Path
from typing import Any

from attrs import field, frozen

from ms_compress.scheme import Scheme, scheme
from ms_compress.settings import flag, text, whole
from ms_compress.tuning import Tuning

__all__ = ["ModelRun", "SchemeRun", "optional_path"]


def optional_path(value: Any) -> Path | None:
    """A path, or None."""
    return None if value is None else Path(value)


@frozen(kw_only=True)
class ModelRun:
    """Which model, from what tokens, to where."""

    model: Path = field(converter=Path)
    """A Hugging Face folder."""
    output_dir: Path = field(converter=Path)
    """Must not exist yet."""
    dataset: Path | None = field(default=None, converter=optional_path)
    """ms-data's shards, or a JSON list of lists of tokens."""
    rows: int = field(default=256, validator=whole())
    """Rows of tokens that are read of it, and used in turn."""
    exceptions: tuple[str, ...] = field(default=(), converter=tuple)
    """Patterns of names of layers that stay as they are."""
    tuning: Tuning = field(factory=Tuning, metadata={"table": Tuning})


@frozen(kw_only=True)
class SchemeRun(ModelRun):
    """A run whose result is exported for a target."""

    scheme: Scheme = field(converter=scheme)
    embeddings: bool = field(default=False, validator=flag)
    head: bool = field(default=False, validator=flag)
    activations: bool = field(default=True, validator=flag)
    verify: bool = field(default=False, validator=flag)
    """Read the result back through its runtime, and refuse it unless it is this model."""
    tokenizer: str | None = field(default=None, validator=text(optional=True))
    """A tokenizer.json to go with it; by default the model folder's, if there is one."""
