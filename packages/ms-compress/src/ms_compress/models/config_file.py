"""The config.json of a folder, as far as the folder's own readers need it."""

from pathlib import Path
from typing import Any

from ms_compress.errors import ExportError
from ms_compress.files.untrusted import read_json

__all__ = ["quantization", "read_config"]

METHOD = "compressed-tensors"


def read_config(folder: Path) -> dict[str, Any]:
    """The whole document.

    Raises:
        ExportError: it cannot be read, or is no table.
    """
    path = folder / "config.json"
    return read_json(path, dict[str, Any], error=ExportError)


def quantization(folder: Path) -> dict[str, Any] | None:
    """What config.json says of how weights are held; None of a plain model.

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
