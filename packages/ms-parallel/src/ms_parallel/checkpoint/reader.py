"""Storage reader for `torch.distributed.checkpoint.load` that verifies every chunk it reads."""

import os
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from ms_parallel.checkpoint.manifest import DTYPES, Chunk, Manifest, SavedFile
from ms_parallel.errors import CheckpointError, DamageError
from ms_parallel.files.untrusted import open_file


class Reader(StorageReader):
    """Reads the chunks of a checkpoint that overlap this rank's tensors.

    One chunk is in memory at a time. File sizes are compared with the manifest before memory is
    allocated.

    Args:
        folder: folder of the checkpoint.
        manifest: its manifest.
        shapes: global shape of each tensor to be loaded.
    """

    def __init__(
        self, folder: Path, manifest: Manifest, shapes: Mapping[str, tuple[int, ...]]
    ) -> None:
        self.folder = folder
        self.manifest = manifest
        self.shapes = shapes

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: the reader is not reused."""

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Convert the manifest to torch's metadata."""
        tensors = self.manifest.tensors.items()
        return Metadata(
            {
                name: TensorStorageMetadata(
                    properties=TensorProperties(dtype=DTYPES[tensor.dtype]),
                    size=torch.Size(tensor.shape),
                    chunks=[_box(chunk) for chunk in tensor.chunks],
                )
                for name, tensor in tensors
            }
        )

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Check that all tensors exist with the right shape, before planning.

        Raises:
            CheckpointError: a tensor is missing or has another shape.
        """
        for name, shape in self.shapes.items():
            saved = self.manifest.tensors.get(name)
            if saved is None or saved.shape != shape:
                problem = "is missing" if saved is None else f"has shape {saved.shape}"
                raise CheckpointError(
                    f"{self.folder}: tensor {name!r} {problem} but this run needs {shape}, so it is"
                    " a checkpoint of another model; set another output_dir"
                )

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Return the plan unchanged."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return the plans unchanged."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read and verify each planned chunk once, and copy it to the tensors.

        Raises:
            DamageError: the bytes of a tensor have changed; names its file.
        """
        # By file, then by offset: a chunk that several boxes need is read once.
        requests: dict[str, dict[int, tuple[str, Chunk, list[ReadItem]]]] = {}
        for item in plan.items:
            name = item.storage_index.fqn
            chunk = self._chunk(name, tuple(item.storage_index.offset or ()))
            in_file = requests.setdefault(chunk.file, {})
            in_file.setdefault(chunk.begin, (name, chunk, []))[2].append(item)
        for file in self.manifest.files:
            if file.name in requests:
                self._read_file(file, requests[file.name], planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _chunk(self, name: str, offsets: tuple[int, ...]) -> Chunk:
        chunks = self.manifest.tensors[name].chunks
        # Empty chunks may share an offset with a real one.
        return next(chunk for chunk in chunks if chunk.offsets == offsets and 0 not in chunk.shape)

    def _read_file(
        self,
        file: SavedFile,
        requests: dict[int, tuple[str, Chunk, list[ReadItem]]],
        planner: LoadPlanner,
    ) -> None:
        path = self.folder / file.name
        try:
            with open_file(path, error=DamageError) as stream:
                size_bytes = os.fstat(stream.fileno()).st_size
                if size_bytes != file.size_bytes:
                    raise DamageError(
                        f"{path}: has {size_bytes} bytes but {file.size_bytes} were written"
                    )
                _read(stream, path, "header", 0, file.header_bytes, file.header_crc32)
                # In file order, so that the disk reads forward.
                for begin, (name, chunk, items) in sorted(requests.items()):
                    content = _read(stream, path, name, begin, chunk.size_bytes, chunk.crc32)
                    self._copy(name, chunk, items, content, planner)
        except OSError as error:
            raise DamageError(f"{path}: cannot be read: {error.strerror or error}") from error

    def _copy(
        self,
        name: str,
        chunk: Chunk,
        items: list[ReadItem],
        content: bytearray,
        planner: LoadPlanner,
    ) -> None:
        dtype = DTYPES[self.manifest.tensors[name].dtype]
        source = torch.frombuffer(content, dtype=dtype).reshape(chunk.shape)
        for item in items:
            # The part of the chunk that overlaps this rank's box.
            box = source
            for dim, (start, length) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                box = box.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(box)
            planner.commit_tensor(item, target)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Accept any path."""
        return True


def _box(chunk: Chunk) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(chunk.offsets), torch.Size(chunk.shape))


def _read(
    stream: BinaryIO, path: Path, part: str, begin: int, size_bytes: int, crc32: int
) -> bytearray:
    content = bytearray(size_bytes)
    stream.seek(begin)
    view = memoryview(content)
    while view and (count := stream.readinto(view)):  # type: ignore[attr-defined]
        view = view[count:]
    if view or zlib.crc32(content) != crc32:
        raise DamageError(f"{path}: {part}: its checksum does not match; bytes have changed")
    return content
