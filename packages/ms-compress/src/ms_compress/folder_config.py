"""The config.json of a folder, as far as the folder's own readers need it."""

import json
from pathlib import Path
from typing import Any

from ms_compress.errors import ExportError

__all__ = ["quantization", "read_config"]

METHOD = "compressed-tensors"


def read_config(folder: Path) -> dict[str, Any]:
    """The whole document.

    Raises:
        ExportError: it cannot be read, or is no table.
    """
    path = folder / "config.json"
    try:
        document = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ExportError(f"{path}: cannot be read: {error}") from error
    if not isinstance(document, dict):
        raise ExportError(f"{path}: a JSON {type(document).__name__}, no table; export it again")
    return document


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
