"""Writes models to Hugging Face folders; under any layout, one gathered tensor at a time."""

import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TypeVar

import msgspec
import torch
import torch.distributed as dist
from attrs import evolve, frozen
from torch import Tensor, nn

from ms_parallel.arguments import check_integer, check_items, check_type
from ms_parallel.errors import ModelError, NonFiniteError
from ms_parallel.files.durable import (
    replace_folder,
    restore_folder,
    sync_folder,
    sync_tree,
    write_synced,
)
from ms_parallel.files.safetensors_file import TensorEntry, WeightFile
from ms_parallel.files.untrusted import check_path
from ms_parallel.models.config import ModelConfig
from ms_parallel.models.registry import (
    CONFIG,
    GENERATION,
    config_document,
    model_plan,
    weight_slices,
    with_tokens,
)
from ms_parallel.models.staged import StagedModel, named_weights
from ms_parallel.models.tokenizer_files import TokenizerFiles, read_tokenizer
from ms_parallel.models.weight_names import WeightSlice
from ms_parallel.split.part import drop_gathered, gather_full_tensor, part_of
from ms_parallel.weights.folder import INDEX, SINGLE, is_finite

T = TypeVar("T")

PARTIAL = ".saving"
"""Temporary folder in a model's folder."""


@frozen(kw_only=True)
class _File:
    """A file and the rank that writes it."""

    writer: int
    entries: list[TensorEntry]

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.entries)


@frozen(kw_only=True, eq=False)
class _Source:
    """A weight that makes up a tensor of the folder, or a part of it."""

    name: str
    weight: Tensor
    piece: WeightSlice


def save_model(
    model: StagedModel | Sequence[StagedModel],
    folder: str | Path,
    *,
    dtype: torch.dtype | None = None,
    file_size_bytes: int = 4 << 30,
    tokenizer: str | Path | TokenizerFiles | None = None,
) -> None:
    """Write a folder that transformers and `load_model` can read. Collective.

    Tensors are gathered one at a time, and the first rank of each stage writes. Files are written
    to a temporary folder and renamed after fsync, so that a save killed at any time leaves the old
    model or the new one. The exception is a folder that cannot be renamed, namely a mount point or
    the working directory: there a kill during the last renames leaves a folder that does not load.

    Args:
        model: full model, or this process's pipeline stages; plain, tensor-parallel or sharded.
        folder: folder on a file system shared by all processes; created if missing. A model in it
            is replaced; its other files stay.
        dtype: dtype in the files; that of the parameters by default.
        file_size_bytes: start a new file once a file would exceed this size.
        tokenizer: tokenizer to save with the model: a folder of shards or of a model, a
            `tokenizer.json`, or the result of `read_tokenizer`. Its begin, end and padding token
            ids go to config.json if the model has none.

    Raises:
        ModelError: a process cannot write, for example on a full disk; or the tokenizer cannot be
            read or has more tokens than the model.
        NonFiniteError: a weight is NaN or infinite, before or after conversion to `dtype`; nothing
            is written.
    """
    check_path("folder", folder, error=ModelError, written="folder")
    folder, rank = Path(folder), _rank()
    if isinstance(tokenizer, str | Path):
        check_path("tokenizer", tokenizer, error=ModelError)
    stages = [model] if isinstance(model, nn.Module) else model
    check_items("model", stages, nn.Module, "stages", error=ModelError)
    check_type("dtype", dtype, torch.dtype, "a torch.dtype", error=ModelError, optional=True)
    check_integer("file_size_bytes", file_size_bytes, minimum=1, error=ModelError)
    if not stages:
        raise ModelError("model must be a model or a list of stages, got no stage")
    for stage in stages:
        drop_gathered(stage)
    if tokenizer is not None and not isinstance(tokenizer, TokenizerFiles):
        tokenizer = read_tokenizer(tokenizer)
    config = stages[0].config if tokenizer is None else with_tokens(stages[0].config, tokenizer)
    local_tensors = _saved_tensors(stages)
    entries = [
        TensorEntry(name=name, shape=sources[0].piece.shape, dtype=_dtype(sources[0], dtype))
        for name, sources in local_tensors.items()
    ]
    # Every process learns all tensors, so all agree on files without further messages.
    offers = exchange(entries)
    _check_complete(config, {entry.name for offer in offers for entry in offer}, folder)
    files = _assign_files(offers, file_size_bytes)
    # Before anything is written: a diverged model must not replace a good one.
    _check_finite(local_tensors, dtype, folder)
    document = config_document(config, dtype or next(stages[0].parameters()).dtype)
    documents = {CONFIG: document, GENERATION: _generation(config)}
    texts = {name: _json(content) for name, content in documents.items()}
    texts |= tokenizer.files if tokenizer is not None else {}
    local_files = {name: file for name, file in files.items() if file.writer == rank}
    partial = folder / PARTIAL
    try:
        # Three phases, each ending with a collective: no rank publishes before all have written.
        on_all_ranks(lambda: prepare_folder(folder), folder, rank == 0)
        on_all_ranks(lambda: _write(local_tensors, local_files, partial), folder)
        on_all_ranks(lambda: _publish(folder, files, texts), folder, rank == 0)
    except ModelError:
        if rank == 0:
            shutil.rmtree(partial, ignore_errors=True)
        raise


def _saved_tensors(stages: Sequence[StagedModel]) -> dict[str, list[_Source]]:
    """Collect the tensors of these stages for the folder; tied weights once, no added weights."""
    plan = model_plan(stages[0].config)
    copies = {copy for _, copy in plan.tied}
    slices = weight_slices(stages[0].config)
    for name, duplicate in plan.repeated:
        (piece,) = slices[name][:1]
        slices[name] = [*slices[name], evolve(piece, tensor=duplicate)]
    tensors: dict[str, list[_Source]] = {}
    for stage in stages:
        for name, weight in named_weights(stage):
            for piece in slices.get(name, ()) if name not in copies else ():
                source = _Source(name=name, weight=weight, piece=piece)
                tensors.setdefault(piece.tensor, []).append(source)
    return tensors


def _check_complete(config: ModelConfig, saved: Collection[str], folder: Path) -> None:
    """Reject an incomplete model."""
    expected = [piece.tensor for pieces in weight_slices(config).values() for piece in pieces]
    missing = [tensor for tensor in expected if tensor not in saved]
    if missing:
        raise ModelError(
            f"no process has {missing[0]!r}, which the model's configuration defines, so nothing is"
            f" saved to {folder}; pass all stages of the model as it was built"
        )


def _dtype(source: _Source, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a tensor in its file; buffers keep theirs."""
    return dtype if dtype and isinstance(source.weight, nn.Parameter) else source.weight.dtype


@torch.no_grad()
def _check_finite(
    local_tensors: Mapping[str, Sequence[_Source]], dtype: torch.dtype | None, folder: Path
) -> None:
    """Check that all values are finite on all processes; raise the first fault on every process."""
    sources = {
        source.name: source
        for tensor_sources in local_tensors.values()
        for source in tensor_sources
    }
    local_fault = next(
        (
            name
            for name, source in sources.items()
            if not is_finite(part_of(source.weight).local, _dtype(source, dtype))
        ),
        None,
    )
    faulty = [name for name in exchange(local_fault) if name is not None]
    if faulty:
        raise NonFiniteError(
            f"{faulty[0]!r} has a NaN or an infinity, so the model is not saved to {folder}; resume"
            " from an earlier checkpoint"
        )


def _assign_files(offers: list[list[TensorEntry]], file_size_bytes: int) -> dict[str, _File]:
    """Assign tensors to files; the first process that has a tensor writes it."""
    # Offers are in rank order, so all processes compute the same assignment.
    files: list[_File] = []
    assigned: set[str] = set()
    for writer, entries in enumerate(offers):
        open_file: _File | None = None
        for entry in entries:
            if entry.name in assigned:
                continue
            assigned.add(entry.name)
            if open_file is None or open_file.size_bytes + entry.size_bytes > file_size_bytes:
                open_file = _File(writer=writer, entries=[])
                files.append(open_file)
            open_file.entries.append(entry)
    if len(files) == 1:
        return {SINGLE: files[0]}
    count = len(files)
    return {f"model-{i:05}-of-{count:05}.safetensors": file for i, file in enumerate(files, 1)}


def prepare_folder(folder: Path) -> None:
    """Undo an interrupted replacement and create an empty temporary folder."""
    restore_folder(folder.resolve())
    _clear(folder / PARTIAL)


def _clear(partial: Path) -> None:
    """Create an empty folder."""
    if partial.exists():
        shutil.rmtree(partial)
    partial.mkdir(parents=True)


@torch.no_grad()
def _write(
    local_tensors: Mapping[str, Sequence[_Source]], local_files: Mapping[str, _File], partial: Path
) -> None:
    """Gather every weight and write the tensors of this process's files."""
    last_use = {
        source.name: tensor for tensor, sources in local_tensors.items() for source in sources
    }
    # Gathered weights are dropped after the last tensor that uses them, to bound memory.
    gathered: dict[str, Tensor] = {}
    file_of = {entry.name: name for name, file in local_files.items() for entry in file.entries}
    writing: tuple[str, WeightFile] | None = None
    failure: OSError | None = None
    with _without_redistribute_warning(), ExitStack() as stack:
        for name, sources in local_tensors.items():
            # Gathering is collective, so continue even after a local failure.
            for source in sources:
                if source.name not in gathered:
                    gathered[source.name] = gather_full_tensor(source.weight)
            used = {source.name: gathered[source.name] for source in sources}
            gathered = {key: tensor for key, tensor in gathered.items() if last_use[key] != name}
            file = file_of.get(name)
            if file is None or failure is not None:
                continue
            try:
                if writing is None or writing[0] != file:
                    # Tensors of one file are consecutive, so the previous file is complete.
                    stack.close()
                    weight_file = WeightFile(partial / file, local_files[file].entries)
                    writing = file, stack.enter_context(weight_file)
                writing[1].write(name, _assemble(sources, used))
            except OSError as error:
                failure = error
                # Close the file as failed, then gather the other tensors without writing.
                stack.pop_all().__exit__(type(error), error, error.__traceback__)
    if failure is not None:
        raise failure


def _assemble(sources: Sequence[_Source], weights: Mapping[str, Tensor]) -> Tensor:
    """Assemble a tensor of the folder from its weights."""
    parts = [
        (source.piece, source.piece.to_tensor(weights[source.name][source.piece.box]))
        for source in sources
    ]
    piece, values = parts[0]
    # One source covers the tensor, so no copy is needed.
    if tuple(values.shape) == piece.shape:
        return values
    result = values.new_empty(piece.shape)
    for piece, values in parts:
        result[piece.part] = values
    return result


@contextmanager
def _without_redistribute_warning() -> Iterator[None]:
    """Silence torch's warning about the order of mesh axes, which a save cannot follow."""
    adviser = logging.getLogger("torch.distributed.tensor._redistribute")
    level = adviser.level
    adviser.setLevel(logging.ERROR)
    try:
        yield
    finally:
        adviser.setLevel(level)


def _publish(folder: Path, files: Mapping[str, _File], texts: Mapping[str, bytes]) -> None:
    """Complete the temporary folder and put its model in place of the old one."""
    partial = folder / PARTIAL
    for name, content in texts.items():
        (partial / name).parent.mkdir(exist_ok=True)
        write_synced(partial / name, content)
    names = [*texts, *files]
    if len(files) > 1:
        weight_map = {entry.name: name for name, file in files.items() for entry in file.entries}
        total = sum(file.size_bytes for file in files.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_synced(partial / INDEX, _json(index))
        names.append(INDEX)
    publish_files(folder, names)


def publish_files(folder: Path, names: Sequence[str]) -> None:
    """Put the files of the temporary folder in place of the folder's old model.

    Args:
        folder: the model's folder.
        names: paths in its temporary folder, the index last.
    """
    partial = folder / PARTIAL
    old_weights = [path for path in _weight_files(folder) if path.exists()]
    if old_weights and _can_be_replaced(folder):
        _replace(folder, names)
        return
    # In place: from here until the last rename, the folder has no complete model.
    for old in old_weights:
        old.unlink()
    sync_folder(folder)
    for name in names:  # the index last: without it the folder does not load
        (folder / name).parent.mkdir(exist_ok=True)
        (partial / name).replace(folder / name)
    sync_folder(folder)
    shutil.rmtree(partial)


def _weight_files(folder: Path) -> list[Path]:
    """List the index and the weight files of the model in a folder."""
    return [folder / INDEX, *folder.glob("model*.safetensors")]


def _can_be_replaced(folder: Path) -> bool:
    """Whether the folder can be renamed without pulling it away from under this process."""
    resolved = folder.resolve()
    return not (os.path.ismount(resolved) or Path.cwd().is_relative_to(resolved))


def _replace(folder: Path, names: Sequence[str]) -> None:
    """Exchange the folder for one with the new model and links to the old folder's other files."""
    folder = folder.resolve()  # a link to the folder stays a link
    replaced = {*names, *(path.name for path in _weight_files(folder)), PARTIAL}

    def dropped(parent: str, entries: list[str]) -> list[str]:
        relative = Path(parent).relative_to(folder)
        return [entry for entry in entries if str(relative / entry) in replaced]

    # On the same file system, so that the exchange is a rename.
    replacement = folder.with_name(f"{folder.name}{PARTIAL}")
    _clear(replacement)
    shutil.copytree(
        folder, replacement, symlinks=True, ignore=dropped, copy_function=_link, dirs_exist_ok=True
    )
    for name in names:
        (replacement / name).parent.mkdir(exist_ok=True)
        (folder / PARTIAL / name).replace(replacement / name)
    # Everything must be durable before the folder takes its name.
    sync_tree(replacement)
    replace_folder(folder, replacement)


def _link(source: str, target: str) -> None:
    """Hard-link a file, or copy it where the file system has no hard links."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(source, target, follow_symlinks=False)


def _generation(config: ModelConfig) -> dict[str, object]:
    """Content of generation_config.json: the begin, end and padding token ids."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {name: getattr(config, name) for name in names}
    return {name: value for name, value in ids.items() if value is not None}


def _json(document: Mapping[str, object]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def on_all_ranks(action: Callable[[], None], folder: Path, active: bool = True) -> None:
    """Run `action` on active ranks, wait for all, and raise on every rank if one failed."""
    failure = None
    try:
        if active:
            action()
    except OSError as error:
        failure = str(error)
    failures = [text for text in exchange(failure) if text is not None]
    if failures:
        raise ModelError(
            f"cannot save a model to {folder} ({failures[0]}); free space, or use another folder"
        )


def exchange(value: T) -> list[T]:
    """Gather the values of all processes, by rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
