"""Models to and from Hugging Face folders: config.json and safetensors.

Names are the same on both sides, so nothing is converted. Under any layout each process reads
only its part, and saving gathers one tensor at a time.
"""

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist
from attrs import frozen
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from ms_parallel.durable import sync_folder, write_synced
from ms_parallel.errors import ModelError
from ms_parallel.models.part import part_of
from ms_parallel.models.registry import build_model, config_document, model_plan, read_config
from ms_parallel.models.staged import StagedModel
from ms_parallel.models.weight_files import (
    INDEX,
    SINGLE,
    TensorEntry,
    WeightFile,
    WeightFolder,
)
from ms_parallel.ops import Ops

__all__ = ["load_model", "load_weights", "save_model"]

T = TypeVar("T")

CONFIG = "config.json"
_ASIDE = ".saving"
_BUFFERS_OF_OLD = (".rotary_emb.inv_freq",)


def load_model(
    folder: str | Path,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device | str = "cpu",
    ops: Ops | None = None,
    layers: range | None = None,
    first: bool = True,
    last: bool = True,
) -> StagedModel:
    """Build the model of a folder, or one stage of it, and read its weights.

    Args:
        folder: With a config.json and safetensors.
        dtype: Of the parameters; files of another dtype are converted.
        device: Of the parameters.
        ops: Operators; plain torch by default.
        layers: Global numbers of the blocks to build; all by default.
        first: Build the embedding.
        last: Build the final norm and the head.

    Raises:
        ModelError: the architecture or a setting is not supported, or a tensor is missing,
            unknown or of another shape.
    """
    folder = Path(folder)
    config = read_config(folder)
    weights = WeightFolder(folder)
    # Before a config.json that claims a billion layers makes us build them.
    last_layer = f"model.layers.{config.num_hidden_layers - 1}."
    if not any(name.startswith(last_layer) for name in weights.names):
        raise ModelError(
            f"{folder} holds no tensor of layer {config.num_hidden_layers - 1}, but its"
            f" config.json says num_hidden_layers={config.num_hidden_layers}; copy it again"
        )
    with torch.device("meta"):
        model = build_model(config, ops=ops, layers=layers, first=first, last=last).to(dtype)
    _check(model, weights)
    model.to_empty(device=device)
    _fill(model, weights)
    return model


def load_weights(model: StagedModel, folder: str | Path) -> None:
    """Fill a model, any stage under any layout, with the weights of a folder, in place.

    Every process reads only its part. Parameters must not be on `meta`.

    Args:
        model: Plain, tensor-parallel or sharded.
        folder: With safetensors of the same model.

    Raises:
        ModelError: a tensor is missing, unknown or of another shape.
    """
    weights = WeightFolder(Path(folder))
    _check(model, weights)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # else we would fill a gathered copy that is thrown away
    _fill(model, weights)


def _check(model: StagedModel, weights: WeightFolder) -> None:
    """Names of the whole model, and shapes of this stage, before any value is read."""
    with torch.device("meta"):
        whole = {name for name, _ in build_model(model.config).named_parameters()}
    copies = {copy: owner for owner, copy in model_plan(model.config).tied}
    missing = sorted(whole - weights.names)
    if missing:
        raise ModelError(
            f"{weights.folder} lacks {len(missing)} of {len(whole)} tensors, first {missing[0]!r};"
            f" is it complete, and of this architecture?"
        )
    known = whole | copies.keys()
    unknown = sorted(n for n in weights.names - known if not n.endswith(_BUFFERS_OF_OLD))
    if unknown:
        raise ModelError(
            f"{weights.folder} holds {unknown[0]!r}, which the model of its config.json does not"
            f" have; this architecture is not supported"
        )
    for name, parameter in model.named_parameters():
        shape = weights.shape(copies.get(name, name))
        if shape != tuple(parameter.shape):
            raise ModelError(
                f"{weights.folder} holds {name!r} with shape {shape}, but its config.json asks"
                f" for {tuple(parameter.shape)}; mend config.json"
            )


@torch.no_grad()
def _fill(model: StagedModel, weights: WeightFolder) -> None:
    copies = {copy: owner for owner, copy in model_plan(model.config).tied}
    for name, parameter in model.named_parameters():
        part = part_of(parameter)
        if part.local.numel():
            part.local.copy_(weights.read(copies.get(name, name), part.box))


@frozen(kw_only=True)
class _File:
    """A file to be written, and by whom."""

    writer: int
    entries: list[TensorEntry]

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.entries)


def save_model(
    model: StagedModel | Sequence[StagedModel],
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    file_size_bytes: int = 4 << 30,
) -> None:
    """Write a folder that transformers and `load_model` read. Every process must call it.

    Tensors are gathered one at a time; each stage's first process writes. Files are written
    aside and renamed after fsync, the index last: an interrupted save leaves no loadable mixture.

    Args:
        model: Whole, or this process's stage or stages; plain, tensor-parallel or sharded.
        folder: Made if missing; a model that it holds is replaced.
        dtype: Of the files; the parameters' by default.
        file_size_bytes: A file takes no further tensor beyond this size.

    Raises:
        ModelError: the disk is full or the folder cannot be written, on any process.
    """
    folder, rank = Path(folder), _rank()
    stages = [model] if isinstance(model, StagedModel) else list(model)
    config = stages[0].config
    copies = {copy for _, copy in model_plan(config).tied}
    mine = {
        name: parameter
        for stage in stages
        for name, parameter in stage.named_parameters()
        if name not in copies
    }
    entries = [
        TensorEntry(name=name, shape=tuple(parameter.shape), dtype=dtype or parameter.dtype)
        for name, parameter in mine.items()
    ]
    files = _share_out(_exchange(entries), file_size_bytes)
    document = config_document(config, dtype or next(stages[0].parameters()).dtype)
    aside = folder / _ASIDE
    _together(lambda: _clear(aside), folder, rank == 0)
    own = {name: file for name, file in files.items() if file.writer == rank}
    _together(lambda: _write(mine, own, aside), folder)
    _together(lambda: _publish(folder, files, document), folder, rank == 0)


def _share_out(offers: list[list[TensorEntry]], file_size_bytes: int) -> dict[str, _File]:
    """Files by name. A tensor that several processes hold is written by the first of them."""
    files: list[_File] = []
    taken: set[str] = set()
    for writer, entries in enumerate(offers):
        open_file: _File | None = None
        for entry in entries:
            if entry.name in taken:
                continue
            taken.add(entry.name)
            if open_file is None or open_file.size_bytes + entry.size_bytes > file_size_bytes:
                open_file = _File(writer=writer, entries=[])
                files.append(open_file)
            open_file.entries.append(entry)
    if len(files) == 1:
        return {SINGLE: files[0]}
    count = len(files)
    return {f"model-{i:05}-of-{count:05}.safetensors": file for i, file in enumerate(files, 1)}


def _clear(aside: Path) -> None:
    """Make the folder for unfinished files, without what an interrupted save left there."""
    if aside.exists():
        shutil.rmtree(aside)
    aside.mkdir(parents=True)


@torch.no_grad()
def _write(mine: Mapping[str, Tensor], own: Mapping[str, _File], aside: Path) -> None:
    """Gather every tensor and write those of this process's files."""
    file_of = {entry.name: name for name, file in own.items() for entry in file.entries}
    writing: tuple[str, WeightFile] | None = None
    failure: OSError | None = None
    with ExitStack() as stack:
        for name, parameter in mine.items():
            # Others wait for this process in the gathering, so it goes on even after a failure.
            whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
            file = file_of.get(name)
            if file is None or failure is not None:
                continue
            try:
                if writing is None or writing[0] != file:
                    stack.close()
                    weight_file = WeightFile(aside / file, own[file].entries)
                    writing = file, stack.enter_context(weight_file)
                writing[1].write(name, whole)
            except OSError as error:
                failure = error
                stack.pop_all()
    if failure is not None:
        raise failure


def _publish(folder: Path, files: Mapping[str, _File], document: Mapping[str, object]) -> None:
    """Take the old model away, then bring the new one in, what makes it loadable last."""
    aside = folder / _ASIDE
    _write_json(aside / CONFIG, document)
    names = [CONFIG, *files]
    if len(files) > 1:
        weight_map = {entry.name: name for name, file in files.items() for entry in file.entries}
        total = sum(file.size_bytes for file in files.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        _write_json(aside / INDEX, index)
        names.append(INDEX)
    for old in (folder / INDEX, *folder.glob("model*.safetensors")):
        old.unlink(missing_ok=True)
    sync_folder(folder)
    for name in names:
        (aside / name).replace(folder / name)
    sync_folder(folder)
    aside.rmdir()


def _write_json(path: Path, document: Mapping[str, object]) -> None:
    write_synced(path, msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n")


def _together(action: Callable[[], None], folder: Path, here: bool = True) -> None:
    """Act where `here`, wait for all, and fail on every process if one did."""
    failure = None
    try:
        if here:
            action()
    except OSError as error:
        failure = str(error)
    failures = [text for text in _exchange(failure) if text is not None]
    if failures:
        raise ModelError(
            f"cannot save a model to {folder} ({failures[0]}); free space, or give another folder"
        )


def _exchange(value: T) -> list[T]:
    """Every process's value, by rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
