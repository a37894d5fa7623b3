"""The storage side of `torch.distributed.checkpoint.save`: one safetensors file a rank."""

import os
import shutil
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ms_parallel.checkpoint.manifest import (
    MANIFEST,
    Chunk,
    Manifest,
    SavedFile,
    SavedTensor,
)
from ms_parallel.errors import CheckpointError
from ms_parallel.files.durable import publish, sync_folder, write_all, write_synced, writing
from ms_parallel.files.safetensors_file import DTYPES, TensorEntry, header_of


class Writer(StorageWriter):
    """Writes a checkpoint beside its place, and puts it there when every rank has finished.

    Args:
        folder: the checkpoint's own folder; it must not exist.
        step: updates that have been made.
        facts: plain JSON values to keep beside the tensors; the coordinator's are written.
    """

    def __init__(self, folder: Path, *, step: int, facts: Mapping[str, Any]) -> None:
        self.folder = folder
        self.aside = folder.with_name(folder.name + ".partial")
        self.step = step
        self.facts = facts
        self.rank = 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing, as nothing is kept between checkpoints."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn which rank this is."""
        self.rank = int(kwargs.get("rank", 0))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Refuse what is not a tensor, since it would have to be pickled."""
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                raise CheckpointError(f"state {item.index.fqn!r} is not a tensor; put it in facts")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Make the folder, before any rank is told what to write."""
        with writing(self.folder):
            shutil.rmtree(self.aside, ignore_errors=True)
            self.aside.mkdir(parents=True)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's chunks to its file and make them durable."""
        done: Future[list[WriteResult]] = Future()
        with writing(self.folder):
            done.set_result(self._write_file(plan, planner) if plan.items else [])
        return done

    def _write_file(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        # Wide dtypes first, so that each tensor in the file is aligned without holes.
        items = sorted(plan.items, key=lambda item: -dtype_of(item).itemsize)
        name = f"rank-{self.rank:05d}.safetensors"
        header = header_of_items(items)
        results = []
        with (self.aside / name).open("xb", buffering=0) as file:
            write_all(file, header)
            begin = len(header)
            for item in items:
                content = _content(planner, item)
                write_all(file, content)
                box = box_of(item)
                chunk = Chunk(
                    file=name,
                    begin=begin,
                    size_bytes=len(content),
                    crc32=zlib.crc32(content),
                    offsets=tuple(box.offsets),
                    shape=tuple(box.sizes),
                )
                begin += len(content)
                results.append(WriteResult(item.index, len(content), chunk))
            os.fsync(file.fileno())
        sync_folder(self.aside)
        whole = SavedFile(
            name=name, size_bytes=begin, header_bytes=len(header), header_crc32=zlib.crc32(header)
        )
        return [*results, WriteResult(MetadataIndex(name), len(header), whole)]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest and give the checkpoint its name: from here on it is complete."""
        manifest = self.manifest(metadata, results)
        with writing(self.folder):
            write_synced(self.aside / MANIFEST, manifest.encode())
            sync_folder(self.aside)
            publish(self.aside, self.folder)

    def manifest(self, metadata: Metadata, results: list[list[WriteResult]]) -> Manifest:
        """Build the manifest of the checkpoint from what every rank has written."""
        kept = [result for rank in results for result in rank]
        chunks: dict[str, list[Chunk]] = {name: [] for name in metadata.state_dict_metadata}
        for result in kept:
            if isinstance(result.storage_data, Chunk):
                chunks[result.index.fqn].append(result.storage_data)
        return Manifest(
            step=self.step,
            tensors={
                name: _saved(metadata.state_dict_metadata[name], tuple(parts))
                for name, parts in chunks.items()
            },
            files=tuple(r.storage_data for r in kept if isinstance(r.storage_data, SavedFile)),
            facts=dict(self.facts),
        )

    def discard(self) -> None:
        """Remove what an unfinished save has left."""
        shutil.rmtree(self.aside, ignore_errors=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Any path will do."""
        return True


def dtype_of(item: WriteItem) -> torch.dtype:
    """Return the dtype of what an item writes."""
    assert item.tensor_data is not None  # prepare_local_plan refused the rest
    return item.tensor_data.properties.dtype


def box_of(item: WriteItem) -> Any:
    """Return the offsets and sizes of what an item writes of its tensor."""
    assert item.tensor_data is not None
    return item.tensor_data.chunk


def header_of_items(items: list[WriteItem]) -> bytes:
    """Build the header of the file that holds the items, in their order.

    Raises:
        CheckpointError: a dtype cannot be saved.
    """
    entries = []
    for item in items:
        name, box, dtype = item.index.fqn, box_of(item), dtype_of(item)
        if dtype not in DTYPES:
            raise CheckpointError(f"state {name!r} has dtype {dtype}; it cannot be saved")
        place = ",".join(map(str, box.offsets))
        entries.append(TensorEntry(name=f"{name}@{place}", shape=tuple(box.sizes), dtype=dtype))
    return header_of(entries)


def _content(planner: SavePlanner, item: WriteItem) -> memoryview:
    tensor = planner.resolve_data(item)
    assert isinstance(tensor, torch.Tensor)
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return memoryview(flat.view(torch.uint8).numpy())  # type: ignore[arg-type]  # numpy 1 stubs


def _saved(metadata: Any, chunks: tuple[Chunk, ...]) -> SavedTensor:
    assert isinstance(metadata, TensorStorageMetadata)
    return SavedTensor(
        dtype=DTYPES[metadata.properties.dtype], shape=tuple(metadata.size), chunks=chunks
    )
