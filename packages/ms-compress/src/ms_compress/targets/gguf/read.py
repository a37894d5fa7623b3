"""Read the tensors and properties of GGUF files with the `gguf` library."""

import re
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ms_compress.models.config_file import whole_or_none
from ms_compress.models.decoder_config import EXPERT_FAMILIES, FAMILIES, decoder_config
from ms_compress.targets.gguf.write import FILE, library
from ms_compress.targets.libraries import library_errors
from ms_compress.targets.target import Contents, Reader

LIBRARY = "the gguf library"


def reader(folder: Path, document: Mapping[str, Any]) -> Reader:
    """Return a reader of a folder's tensors that restores Hugging Face names and row order."""
    gguf = library()
    config = decoder_config(document, "GGUF", (*FAMILIES, *EXPERT_FAMILIES))
    path = folder / FILE
    with library_errors(path, LIBRARY):
        file = gguf.GGUFReader(path)
        tensors = {tensor.name: tensor for tensor in file.tensors}
        architecture = file.fields["general.architecture"].contents()
        # The library's own table maps Hugging Face's names to llama.cpp's.
        architectures = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
        names = gguf.get_tensor_name_map(architectures[architecture], config.layers)
    rotated = (
        {"q_proj": config.heads, "k_proj": config.key_heads} if architecture == "llama" else {}
    )

    def read(name: str) -> Tensor:
        # An unknown name gives None, so the lookup raises KeyError as a `Reader` must.
        # The matrices of all experts are one tensor, named without the expert's index.
        expert = re.search(r"\.experts\.(\d+)\.", name)
        stored = name if expert is None else name.replace(expert[0], ".experts.")
        tensor = tensors[names.get_name(stored, (".weight", ".bias"))]
        heads = rotated.get(name.split(".")[-2])
        with library_errors(path, LIBRARY):
            data = tensor.data if expert is None else tensor.data[int(expert[1])]
            rows = torch.from_numpy(gguf.dequantize(data, tensor.tensor_type).copy())
            return rows if heads is None else rows[halves(len(rows), heads)]

    return read


def halves(rows: int, heads: int) -> Tensor:
    """Return llama.cpp's position of each row of heads that rotate halves: 0, 2, ..., 1, 3, ..."""
    width = rows // heads
    row = torch.arange(rows)
    row_in_head = row % width
    # Row i of a head's first half is at 2i, and row i of its second half at 2i + 1.
    return row - row_in_head + 2 * (row_in_head % (width // 2)) + row_in_head // (width // 2)


def contents(folder: Path) -> Contents:
    """Read the properties of a folder's model.

    Raises:
        ExportError: the file cannot be read.
    """
    gguf = library()
    with library_errors(folder / FILE, LIBRARY):
        file = gguf.GGUFReader(folder / FILE)
        weights_by_type: Counter[str] = Counter()
        for tensor in file.tensors:
            if tensor.name != "rope_freqs.weight":  # a table, not a weight
                weights_by_type[tensor.tensor_type.name] += int(tensor.n_elements)
        # GGUF lists the innermost dim first, so rows are the last.
        rows = (
            int(tensor.shape[-1]) for tensor in file.tensors if tensor.name == "token_embd.weight"
        )
        return Contents(
            scheme=weights_by_type.most_common(1)[0][0] if weights_by_type else "",
            weights=sum(weights_by_type.values()),
            vocabulary=next(rows, None),
            positions=whole_or_none(
                _field(file, f"{_field(file, 'general.architecture')}.context_length")
            ),
        )


def _field(file: Any, name: str) -> Any:
    field = file.fields.get(name)
    return None if field is None else field.contents()
