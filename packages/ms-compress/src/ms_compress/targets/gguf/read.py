"""Reading GGUF files by the `gguf` library: their tensors, and what they say of themselves."""

from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ms_compress.models.config_file import whole_or_none
from ms_compress.models.decoder_config import decoder_config
from ms_compress.targets.gguf.write import FILE, library
from ms_compress.targets.libraries import library_errors
from ms_compress.targets.target import Contents, Reader

LIBRARY = "the gguf library"


def reader(folder: Path, document: Mapping[str, Any]) -> Reader:
    """Return what reads the tensors of a folder; names and the order of rows are undone."""
    gguf = library()
    config = decoder_config(document, "GGUF")
    path = folder / FILE
    with library_errors(path, LIBRARY):
        file = gguf.GGUFReader(path)
        found = {tensor.name: tensor for tensor in file.tensors}
        said = file.fields["general.architecture"].contents()
        known = {name: each for each, name in gguf.MODEL_ARCH_NAMES.items()}
        names = gguf.get_tensor_name_map(known[said], config.layers)
    rotated = {"q_proj": config.heads, "k_proj": config.key_heads} if said == "llama" else {}

    def read(name: str) -> Tensor:
        tensor = found[names.get_name(name, (".weight", ".bias"))]
        heads = rotated.get(name.split(".")[-2])
        with library_errors(path, LIBRARY):
            rows = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy())
            return rows if heads is None else rows[_halves(len(rows), heads)]

    return read


def _halves(rows: int, heads: int) -> Tensor:
    """Return where llama.cpp has the rows of heads that rotate by halves: 0, 2, ..., 1, 3, ..."""
    width = rows // heads
    row = torch.arange(rows)
    place = row % width
    return row - place + 2 * (place % (width // 2)) + place // (width // 2)


def contents(folder: Path) -> Contents:
    """Read what a folder's file says of its model.

    Raises:
        ExportError: the file cannot be read.
    """
    gguf = library()
    with library_errors(folder / FILE, LIBRARY):
        file = gguf.GGUFReader(folder / FILE)
        kinds: Counter[str] = Counter()
        for tensor in file.tensors:
            if tensor.name != "rope_freqs.weight":
                kinds[tensor.tensor_type.name] += int(tensor.n_elements)
        rows = (int(each.shape[-1]) for each in file.tensors if each.name == "token_embd.weight")
        return Contents(
            scheme=kinds.most_common(1)[0][0] if kinds else "",
            weights=sum(kinds.values()),
            vocabulary=next(rows, None),
            positions=whole_or_none(
                _field(file, f"{_field(file, 'general.architecture')}.context_length")
            ),
        )


def _field(file: Any, name: str) -> Any:
    field = file.fields.get(name)
    return None if field is None else field.contents()
