"""Write ONNX files for onnxruntime, with MatMulNBits and its fused decoder operators."""

import json
from pathlib import Path
from typing import Any

from ms_compress.errors import ConfigError, ExportError
from ms_compress.files.durable import write_synced
from ms_compress.models.decoder_config import check_names, decoder_config
from ms_compress.models.whole_model import WholeModel
from ms_compress.targets.libraries import import_library
from ms_compress.targets.ort.graph import Graph
from ms_compress.targets.target import Assets

FILE = "model.onnx"
HEAD_DIM_MULTIPLE = 16
"""onnxruntime's rotary embedding needs head dims that are a multiple of this."""


def library() -> Any:
    """Import the `onnx` library; ExportError if it is not installed."""
    return import_library("onnx", extra="ort", purpose="ONNX files need the onnx library")


def check(model: WholeModel, assets: Assets) -> None:
    """Check that the graph has operators for the model.

    Raises:
        ExportError: the model is not supported.
        LayerError: a tensor is not supported.
    """
    library()
    config = decoder_config(model.config, "ONNX")
    check_names(model.tensors, "ONNX")
    if config.head_width % HEAD_DIM_MULTIPLE:
        raise ExportError(
            f"ONNX: head_dim must be a multiple of {HEAD_DIM_MULTIPLE} for onnxruntime's"
            f" GroupQueryAttention, got {config.head_width}; use a ct or gguf scheme"
        )


def write(model: WholeModel, folder: Path, assets: Assets, accuracy_level: int) -> None:
    """Write `model.onnx` and its data in an existing folder; all ranks call it, rank 0 writes."""
    if accuracy_level not in (0, 1, 2, 3, 4):
        raise ConfigError(
            f"accuracy_level must be 0 to 4, got {accuracy_level}; 0 is the runtime's default"
        )
    config = decoder_config(model.config, "ONNX")
    if not model.is_first:
        for name in model.tensors:
            model.read(name)
        return
    onnx = library()
    onnx.save_model(
        Graph(onnx, config, model, accuracy_level).build(),
        folder / FILE,
        save_as_external_data=True,
        all_tensors_to_one_file=True,
        location=FILE + ".data",
        size_threshold=1024,  # bytes; smaller constants stay in the model file
    )
    # The library creates it with mode 0600; the model file has the mode set by the umask.
    (folder / (FILE + ".data")).chmod((folder / FILE).stat().st_mode)
    text = json.dumps(model.config, indent=2, sort_keys=True).encode() + b"\n"
    write_synced(folder / "config.json", text)
