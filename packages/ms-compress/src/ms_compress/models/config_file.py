"""Read the parts of a folder's config.json that describe its weights."""

from pathlib import Path
from typing import Any

from ms_compress.errors import ExportError
from ms_compress.files.untrusted import read_json

METHOD = "compressed-tensors"


def read_config(folder: Path) -> dict[str, Any]:
    """Read config.json.

    Raises:
        ExportError: it cannot be read, or is not a table.
    """
    path = folder / "config.json"
    return read_json(path, dict[str, Any], error=ExportError)


def quantization(folder: Path) -> dict[str, Any] | None:
    """Return the `quantization_config` of config.json; None for a plain model.

    Raises:
        ExportError: the weights are quantized by a method other than compressed-tensors.
    """
    settings = read_config(folder).get("quantization_config")
    if settings is None:
        return None
    method = settings.get("quant_method") if isinstance(settings, dict) else settings
    if method != METHOD:
        raise ExportError(
            f"{folder}/config.json: quant_method must be {METHOD!r}, got {method!r}; use a folder"
            f" exported for {METHOD}"
        )
    return dict(settings)


def whole_or_none(value: object) -> int | None:
    """Return an integer unchanged, and None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None
