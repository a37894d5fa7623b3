"""Writes multimodal models to Hugging Face folders, under any data layout."""

from pathlib import Path

import torch
from torch import Tensor, nn

from ms_parallel.cluster.process import rank
from ms_parallel.errors import NonFiniteError
from ms_parallel.files.durable import sync_tree, write_synced
from ms_parallel.models.huggingface.multimodal import PROCESSOR_FILES, MultimodalModel
from ms_parallel.models.tokenizer_files import TokenizerFiles, read_tokenizer
from ms_parallel.split.part import gather_full_tensor, part_of
from ms_parallel.weights.folder import INDEX, is_finite
from ms_parallel.weights.save import (
    PARTIAL,
    exchange,
    on_all_ranks,
    prepare_folder,
    publish_files,
)


@torch.no_grad()
def save_multimodal(
    model: MultimodalModel,
    folder: Path,
    *,
    dtype: torch.dtype | None = None,
    tokenizer: str | Path | TokenizerFiles | None = None,
) -> None:
    """Write a folder that transformers and `MultimodalModel.load` can read. Collective.

    Tensors are gathered one at a time into the memory of rank 0, which writes them under the names
    of the published models, with the processor files of the folder that the model comes from. A
    model in the folder is replaced as a whole, as in `save_model`.

    Args:
        model: full or sharded model.
        folder: folder on a file system shared by all processes; created if missing.
        dtype: dtype of the saved parameters; that of the parameters by default.
        tokenizer: tokenizer to save with the model, as in `save_model`.

    Raises:
        ModelError: the folder cannot be written.
        NonFiniteError: a weight is NaN or infinite, before or after conversion; nothing is written.
    """
    if tokenizer is not None and not isinstance(tokenizer, TokenizerFiles):
        tokenizer = read_tokenizer(tokenizer)
    texts = dict(tokenizer.files) if tokenizer is not None else {}
    if model.folder is not None:
        paths = [model.folder / name for name in PROCESSOR_FILES]
        texts |= {path.name: path.read_bytes() for path in paths if path.is_file()}
    weights: dict[str, Tensor] = model.state_dict(keep_vars=True)
    dtypes = {
        name: dtype if dtype and isinstance(weight, nn.Parameter) else weight.dtype
        for name, weight in weights.items()
    }
    faults = [n for n, weight in weights.items() if not is_finite(part_of(weight).local, dtypes[n])]
    if faulty := [name for names in exchange(faults[:1]) for name in names]:
        raise NonFiniteError(
            f"{faulty[0]!r} has a NaN or an infinity, so the model is not saved to {folder}; resume"
            " from an earlier checkpoint"
        )
    state: dict[str, Tensor] = {}
    for name, weight in weights.items():
        full = gather_full_tensor(weight)
        if rank() == 0:
            state[name] = full.to("cpu", dtypes[name])
    partial = folder / PARTIAL

    def write() -> None:
        model.inner.save_pretrained(partial, state_dict=state)
        for name, content in texts.items():
            (partial / name).parent.mkdir(exist_ok=True)
            write_synced(partial / name, content)
        sync_tree(partial)
        paths = sorted(path for path in partial.rglob("*") if path.is_file())
        names = [str(path.relative_to(partial)) for path in paths]
        publish_files(folder, sorted(names, key=INDEX.__eq__))

    on_all_ranks(lambda: prepare_folder(folder), folder, rank() == 0)
    on_all_ranks(write, folder, rank() == 0)
