"""Writes models to Hugging Face folders; under any layout, gathering one tensor at a time."""

import logging
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

from ms_parallel.errors import ModelError, NonFiniteError
from ms_parallel.files.durable import sync_folder, write_synced
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
from ms_parallel.split.part import drop_gathered, part_of, whole_of
from ms_parallel.weights.folder import INDEX, SINGLE, is_finite

T = TypeVar("T")

_ASIDE = ".saving"


@frozen(kw_only=True)
class _File:
    """A file to be written, and by whom."""

    writer: int
    entries: list[TensorEntry]

    @property
    def size_bytes(self) -> int:
        return sum(entry.size_bytes for entry in self.entries)


@frozen(kw_only=True, eq=False)
class _Source:
    """What a tensor of the folder is made of: all or a part of a weight."""

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
    """Write a folder that transformers and `load_model` read. Every process must call it.

    Tensors are gathered one at a time; each stage's first process writes. Files are written
    aside and renamed after fsync, the index last: an interrupted save leaves no loadable mixture.

    Args:
        model: Whole, or this process's stage or stages; plain, tensor-parallel or sharded.
        folder: On a disk that all processes see. Made if missing; a model in it is replaced.
        dtype: Of the files; the parameters' by default.
        file_size_bytes: A file takes no further tensor beyond this size.
        tokenizer: Whose files go beside the model: a folder of shards or of a model, a
            `tokenizer.json`, or what `read_tokenizer` gives. Its ids of the begin, the end and the
            padding of a text go to config.json where the model has none of its own.

    Raises:
        ModelError: the disk is full or the folder cannot be written, on any process; or the
            tokenizer cannot be read, or has more tokens than the model.
        NonFiniteError: a weight is NaN or infinite, as it is or in `dtype`; nothing is written.
    """
    check_path("folder", folder, error=ModelError, written="folder")
    folder, rank = Path(folder), _rank()
    if isinstance(tokenizer, str | Path):
        check_path("tokenizer", tokenizer, error=ModelError)
    stages = [model] if isinstance(model, nn.Module) else list(model)
    for stage in stages:
        drop_gathered(stage)
    if tokenizer is not None and not isinstance(tokenizer, TokenizerFiles):
        tokenizer = read_tokenizer(tokenizer)
    config = stages[0].config if tokenizer is None else with_tokens(stages[0].config, tokenizer)
    mine = _saved_tensors(stages)
    entries = [
        TensorEntry(name=name, shape=sources[0].piece.shape, dtype=_dtype(sources[0], dtype))
        for name, sources in mine.items()
    ]
    offers = _exchange(entries)
    _check_complete(config, {entry.name for offer in offers for entry in offer}, folder)
    files = _share_out(offers, file_size_bytes)
    _check_finite(mine, dtype, folder)
    document = config_document(config, dtype or next(stages[0].parameters()).dtype)
    small = {CONFIG: document, GENERATION: _generation(config)}
    texts = {name: _json(content) for name, content in small.items()}
    texts |= tokenizer.files if tokenizer is not None else {}
    own = {name: file for name, file in files.items() if file.writer == rank}
    aside = folder / _ASIDE
    try:
        _together(lambda: _clear(aside), folder, rank == 0)
        _together(lambda: _write(mine, own, aside), folder)
        _together(lambda: _publish(folder, files, texts), folder, rank == 0)
    except ModelError:
        if rank == 0:
            shutil.rmtree(aside, ignore_errors=True)
        raise


def _saved_tensors(stages: Sequence[StagedModel]) -> dict[str, list[_Source]]:
    """Collect what a folder holds of these stages: each tied weight once, and nothing added."""
    plan = model_plan(stages[0].config)
    copies = {copy for _, copy in plan.tied}
    whole = weight_slices(stages[0].config)
    for name, again in plan.repeated:
        (piece,) = whole[name][:1]
        whole[name] = [*whole[name], evolve(piece, tensor=again)]
    tensors: dict[str, list[_Source]] = {}
    for stage in stages:
        for name, weight in named_weights(stage):
            for piece in whole.get(name, ()) if name not in copies else ():
                source = _Source(name=name, weight=weight, piece=piece)
                tensors.setdefault(piece.tensor, []).append(source)
    return tensors


def _check_complete(config: ModelConfig, offered: Collection[str], folder: Path) -> None:
    """Refuse to write a folder that would lack a part of its model."""
    every = [piece.tensor for pieces in weight_slices(config).values() for piece in pieces]
    lost = [tensor for tensor in every if tensor not in offered]
    if lost:
        raise ModelError(
            f"no process holds {lost[0]!r}, which the model's configuration asks for, so nothing is"
            f" saved to {folder}; give all stages of the model as it was built"
        )


def _dtype(source: _Source, dtype: torch.dtype | None) -> torch.dtype:
    """Return the dtype of a tensor in its file; a buffer keeps its own."""
    return dtype if dtype and isinstance(source.weight, nn.Parameter) else source.weight.dtype


@torch.no_grad()
def _check_finite(
    mine: Mapping[str, Sequence[_Source]], dtype: torch.dtype | None, folder: Path
) -> None:
    """Check that values are finite: each process looks at its own, all hear of the first fault."""
    sources = {source.name: source for each in mine.values() for source in each}
    first = next(
        (
            name
            for name, source in sources.items()
            if not is_finite(part_of(source.weight).local, _dtype(source, dtype))
        ),
        None,
    )
    found = [name for name in _exchange(first) if name is not None]
    if found:
        raise NonFiniteError(
            f"{found[0]!r} holds a NaN or an infinity, so the model is not saved to {folder}; go on"
            " from an earlier checkpoint"
        )


def _share_out(offers: list[list[TensorEntry]], file_size_bytes: int) -> dict[str, _File]:
    """Share out files by name; the first of several processes that hold a tensor writes it."""
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
def _write(mine: Mapping[str, Sequence[_Source]], own: Mapping[str, _File], aside: Path) -> None:
    """Gather every weight and write the tensors of this process's files."""
    last_use = {source.name: tensor for tensor, each in mine.items() for source in each}
    gathered: dict[str, Tensor] = {}
    file_of = {entry.name: name for name, file in own.items() for entry in file.entries}
    writing: tuple[str, WeightFile] | None = None
    failure: OSError | None = None
    with _without_advice(), ExitStack() as stack:
        for name, sources in mine.items():
            # Others wait for this process in the gathering, so it goes on even after a failure.
            for source in sources:
                if source.name not in gathered:
                    gathered[source.name] = whole_of(source.weight)
            used = {source.name: gathered[source.name] for source in sources}
            gathered = {key: kept for key, kept in gathered.items() if last_use[key] != name}
            file = file_of.get(name)
            if file is None or failure is not None:
                continue
            try:
                if writing is None or writing[0] != file:
                    stack.close()
                    weight_file = WeightFile(aside / file, own[file].entries)
                    writing = file, stack.enter_context(weight_file)
                writing[1].write(name, _assemble(sources, used))
            except OSError as error:
                failure = error
                stack.pop_all().__exit__(type(error), error, error.__traceback__)
    if failure is not None:
        raise failure


def _assemble(sources: Sequence[_Source], weights: Mapping[str, Tensor]) -> Tensor:
    """Assemble a tensor of a folder from the weights that it is made of."""
    parts = [
        (source.piece, source.piece.to_tensor(weights[source.name][source.piece.box]))
        for source in sources
    ]
    piece, values = parts[0]
    if tuple(values.shape) == piece.shape:
        return values
    whole = values.new_empty(piece.shape)
    for piece, values in parts:
        whole[piece.part] = values
    return whole


@contextmanager
def _without_advice() -> Iterator[None]:
    """Silence torch's advice on the order of axes, which a save cannot follow, on each rank."""
    adviser = logging.getLogger("torch.distributed.tensor._redistribute")
    level = adviser.level
    adviser.setLevel(logging.ERROR)
    try:
        yield
    finally:
        adviser.setLevel(level)


def _publish(folder: Path, files: Mapping[str, _File], texts: Mapping[str, bytes]) -> None:
    """Take the old model away, then bring the new one in, what makes it loadable last."""
    aside = folder / _ASIDE
    for name, content in texts.items():
        (aside / name).parent.mkdir(exist_ok=True)
        write_synced(aside / name, content)
    names = [*texts, *files]
    if len(files) > 1:
        weight_map = {entry.name: name for name, file in files.items() for entry in file.entries}
        total = sum(file.size_bytes for file in files.values())
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        write_synced(aside / INDEX, _json(index))
        names.append(INDEX)
    for old in (folder / INDEX, *folder.glob("model*.safetensors")):
        old.unlink(missing_ok=True)
    sync_folder(folder)
    for name in names:
        (folder / name).parent.mkdir(exist_ok=True)
        (aside / name).replace(folder / name)
    sync_folder(folder)
    shutil.rmtree(aside)


def _generation(config: ModelConfig) -> dict[str, object]:
    """Return the content of generation_config.json: the tokens that begin, end and pad a text."""
    names = ("bos_token_id", "eos_token_id", "pad_token_id")
    ids = {name: getattr(config, name) for name in names}
    return {name: value for name, value in ids.items() if value is not None}


def _json(document: Mapping[str, object]) -> bytes:
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


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
    """Gather every process's value, by rank."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return [value]
    values: list[T] = [value] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return values


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0
