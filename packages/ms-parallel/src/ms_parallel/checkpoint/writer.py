"""Storage writer for `torch.distributed.checkpoint.save`: one safetensors file per rank."""

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
    """Writes a checkpoint to a temporary folder, which is renamed when every rank has finished.

    Args:
        folder: folder of the checkpoint; must not exist.
        step: number of steps taken.
        facts: metadata as plain JSON values; the coordinator's are stored.
    """

    def __init__(self, folder: Path, *, step: int, facts: Mapping[str, Any]) -> None:
        self.folder = folder
        self.partial = folder.with_name(folder.name + ".partial")
        self.step = step
        self.facts = facts
        self.rank = 0

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: the writer is not reused."""

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Set the rank."""
        self.rank = int(kwargs.get("rank", 0))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Reject values that are not tensors, as they would have to be pickled."""
        for item in plan.items:
            if item.type == WriteItemType.BYTE_IO:
                raise CheckpointError(f"state {item.index.fqn!r} is not a tensor; put it in facts")
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Create the temporary folder, before any rank writes to it."""
        with writing(self.folder):
            shutil.rmtree(self.partial, ignore_errors=True)
            self.partial.mkdir(parents=True)
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's chunks to its file and sync it."""
        done: Future[list[WriteResult]] = Future()
        with writing(self.folder):
            done.set_result(self._write_file(plan, planner) if plan.items else [])
        return done

    def _write_file(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        # Wide dtypes first, so that every tensor is aligned without padding.
        items = sorted(plan.items, key=lambda item: -dtype_of(item).itemsize)
        name = f"rank-{self.rank:05d}.safetensors"
        header = header_of_items(items)
        results = []
        with (self.partial / name).open("xb", buffering=0) as file:
            # Order on disk: header, chunks, sync of the file, sync of the folder.
            write_all(file, header)
            offset = len(header)
            for item in items:
                content = _content(planner, item)
                write_all(file, content)
                box = box_of(item)
                chunk = Chunk(
                    file=name,
                    begin=offset,
                    size_bytes=len(content),
                    crc32=zlib.crc32(content),
                    offsets=tuple(box.offsets),
                    shape=tuple(box.sizes),
                )
                offset += len(content)
                results.append(WriteResult(item.index, len(content), chunk))
            os.fsync(file.fileno())
        sync_folder(self.partial)
        saved_file = SavedFile(
            name=name, size_bytes=offset, header_bytes=len(header), header_crc32=zlib.crc32(header)
        )
        return [*results, WriteResult(MetadataIndex(name), len(header), saved_file)]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the manifest and rename the folder, which completes the checkpoint."""
        manifest = self.manifest(metadata, results)
        with writing(self.folder):
            # The rename comes last: a crash before it leaves a partial folder that `sweep`
            # removes.
            write_synced(self.partial / MANIFEST, manifest.encode())
            sync_folder(self.partial)
            publish(self.partial, self.folder)

    def manifest(self, metadata: Metadata, results: list[list[WriteResult]]) -> Manifest:
        """Build the manifest from the results of all ranks."""
        rank_results = [result for results_of_rank in results for result in results_of_rank]
        chunks: dict[str, list[Chunk]] = {name: [] for name in metadata.state_dict_metadata}
        for result in rank_results:
            if isinstance(result.storage_data, Chunk):
                chunks[result.index.fqn].append(result.storage_data)
        return Manifest(
            step=self.step,
            tensors={
                name: _saved(metadata.state_dict_metadata[name], tuple(parts))
                for name, parts in chunks.items()
            },
            files=tuple(
                r.storage_data for r in rank_results if isinstance(r.storage_data, SavedFile)
            ),
            facts=dict(self.facts),
        )

    def discard(self) -> None:
        """Remove the temporary folder of an unfinished save."""
        shutil.rmtree(self.partial, ignore_errors=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Accept any path."""
        return True


def dtype_of(item: WriteItem) -> torch.dtype:
    """Return the dtype of an item's tensor."""
    assert item.tensor_data is not None  # prepare_local_plan rejects others
    return item.tensor_data.properties.dtype


def box_of(item: WriteItem) -> Any:
    """Return the offsets and sizes of an item's chunk in its tensor."""
    assert item.tensor_data is not None
    return item.tensor_data.chunk


def header_of_items(items: list[WriteItem]) -> bytes:
    """Build the header of the safetensors file with the items, in their order.

    Raises:
        CheckpointError: a dtype is not supported.
    """
    entries = []
    for item in items:
        name, box, dtype = item.index.fqn, box_of(item), dtype_of(item)
        if dtype not in DTYPES:
            raise CheckpointError(f"state {name!r} has dtype {dtype}, which cannot be saved")
        offsets = ",".join(map(str, box.offsets))
        entries.append(TensorEntry(name=f"{name}@{offsets}", shape=tuple(box.sizes), dtype=dtype))
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
