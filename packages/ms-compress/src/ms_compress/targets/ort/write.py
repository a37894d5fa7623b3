"""Writing ONNX files for onnxruntime: MatMulNBits, and the fused operators of its decoders."""

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
HEADS_OF = 16
"""onnxruntime rotates heads of a multiple of so many features."""


def library() -> Any:
    """Import the `onnx` library, or raise ExportError."""
    return import_library("onnx", extra="ort", purpose="ONNX files need the onnx library")


def check(model: WholeModel, assets: Assets) -> None:
    """Refuse what the graph has no operators for.

    Raises:
        ExportError: the model as a whole.
        LayerError: one of its tensors.
    """
    library()
    config = decoder_config(model.config, "ONNX")
    check_names(model.tensors, "ONNX")
    if config.head_width % HEADS_OF:
        raise ExportError(
            f"ONNX: head_dim is {config.head_width}, and onnxruntime's GroupQueryAttention takes"
            f" multiples of {HEADS_OF}; choose a ct or gguf scheme"
        )


def write(model: WholeModel, folder: Path, assets: Assets, accuracy_level: int) -> None:
    """Write `model.onnx` and its data in a folder that exists; the first process writes."""
    if accuracy_level not in (0, 1, 2, 3, 4):
        raise ConfigError(f"accuracy_level is {accuracy_level}; MatMulNBits knows 0 to 4")
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
        size_threshold=1024,
    )
    # The library makes it for its owner alone; the mode of the model is what the umask leaves.
    (folder / (FILE + ".data")).chmod((folder / FILE).stat().st_mode)
    text = json.dumps(model.config, indent=2, sort_keys=True).encode() + b"\n"
    write_synced(folder / "config.json", text)
