"""The config.json of a folder, as far as the readers of its weights need it."""

from pathlib import Path
from typing import Any

from ms_compress.errors import ExportError
from ms_compress.files.untrusted import read_json

METHOD = "compressed-tensors"


def read_config(folder: Path) -> dict[str, Any]:
    """Read the whole document.

    Raises:
        ExportError: it cannot be read, or is no table.
    """
    path = folder / "config.json"
    return read_json(path, dict[str, Any], error=ExportError)


def quantization(folder: Path) -> dict[str, Any] | None:
    """Read how config.json says that weights are held; None of a plain model.

    Raises:
        ExportError: they are held by other means than compressed-tensors.
    """
    said = read_config(folder).get("quantization_config")
    if said is None:
        return None
    method = said.get("quant_method") if isinstance(said, dict) else said
    if method != METHOD:
        raise ExportError(
            f"{folder}/config.json: quantised by {method!r}; only {METHOD} is read: give a folder"
            " that was exported for it"
        )
    return dict(said)


def whole_or_none(value: object) -> int | None:
    """Return a whole number as it is, and None for anything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None
